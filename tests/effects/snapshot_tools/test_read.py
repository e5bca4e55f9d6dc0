"""The reading tools of the substrate, on the live tree and on snapshots."""

from __future__ import annotations

import base64
import io
import os
import re
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from mulligan.files.search.native import Matcher
from tests.effects.snapshot_tools.snapshot_workspace import SnapshotWorkspace, git, open_snapshot_workspace


def paths_in(body: dict[str, object]) -> list[str]:
    entries = body["entries"]
    assert isinstance(entries, list)
    return [one["path"] for one in entries]


class TestList:
    @pytest.mark.req("D10.list.path_default", "D10.list.depth_default", "D10.list.entries", "D10.mode_default")
    def test_lists_the_root_one_level_deep_by_default(self, repo: SnapshotWorkspace) -> None:
        os.symlink("README.md", repo.root / "link")
        body = repo.ok("snapshot.list")
        blob = "sha256:" + sha256(b"# Toy Repo").hexdigest()
        assert body["entries"] == [
            {"path": "README.md", "type": "file", "size": 10, "blob": blob},
            {"path": "link", "type": "symlink", "size": 9, "blob": "sha256:" + sha256(b"README.md").hexdigest()},
            {"path": "src", "type": "dir"},
        ]

    @pytest.mark.req(
        "D10.list.limit_default", "D10.list.offset_default", "D10.list.total_and_truncated", "S2.paths.returned_sorted"
    )
    def test_a_listing_is_paged(self, folder: SnapshotWorkspace) -> None:
        for number in range(1003):
            folder.write(f"f{number:04}", "")
        first = folder.ok("snapshot.list")
        assert (len(first["entries"]), first["total"], first["truncated"]) == (1000, 1003, True)
        rest = folder.ok("snapshot.list", offset=1000)
        assert (paths_in(rest), rest["total"], rest["truncated"]) == (["f1000", "f1001", "f1002"], 1003, False)

    @pytest.mark.req("S2.order.path_arrays", "S2.paths.returned_normalised")
    def test_paths_are_in_byte_order_at_any_depth(self, folder: SnapshotWorkspace) -> None:
        for path in ("a/x", "a-b", "a/b/c", "a.b", "é", "z"):
            folder.write(path, "")
        live = paths_in(folder.ok("snapshot.list", depth=9, path="./"))
        assert live == sorted(live, key=os.fsencode)
        kept = folder.ok("snapshot.list", depth=9, mode="snapshot", snapshot_id=folder.snapshot("."))
        assert paths_in(kept) == live

    @pytest.mark.req("D10.list.include_ignored_default")
    def test_ignored_files_only_when_asked_for(self, repo: SnapshotWorkspace) -> None:
        repo.write(".gitignore", "out\n")
        repo.write("out/x", "1")
        assert paths_in(repo.ok("snapshot.list")) == [".gitignore", "README.md", "src"]
        assert "out" in paths_in(repo.ok("snapshot.list", include_ignored=True))

    @pytest.mark.req("D10.not_found", "S2.error.not_found", "S2.error.envelope")
    def test_a_missing_path_is_not_found_and_a_file_lists_itself(self, repo: SnapshotWorkspace) -> None:
        error = repo.ask("snapshot.list", path="nope")
        assert set(error) == {"error"}
        assert set(error["error"]) == {"code", "message", "details"}
        assert error["error"]["code"] == "NOT_FOUND"
        assert paths_in(repo.ok("snapshot.list", path="src/main.rs")) == ["src/main.rs"]

    @pytest.mark.req(
        "S2.list.snapshot_only_captured",
        "S2.list.implicit_parents",
        "S2.list.unknown_is_empty",
        "S2.mode.snapshot_immutable",
    )
    def test_a_snapshot_lists_what_was_captured(self, repo: SnapshotWorkspace) -> None:
        taken = repo.snapshot("src/main.rs")
        repo.write("src/main.rs", "changed")
        repo.write("src/later.rs", "1")
        asked = {"mode": "snapshot", "snapshot_id": taken}
        assert paths_in(repo.ok("snapshot.list", **asked)) == ["src"]
        assert repo.ok("snapshot.list", path="src", **asked)["entries"] == [
            {"path": "src/main.rs", "type": "file", "size": 12, "blob": "sha256:" + sha256(b"fn main() {}").hexdigest()}
        ]
        empty = repo.ok("snapshot.list", path="README.md", **asked)
        assert (empty["entries"], empty["total"], empty["truncated"]) == ([], 0, False)


class TestFile:
    @pytest.mark.req("D10.file.text", "D10.file.size_blob_eol", "S2.schema.worktree_hint")
    def test_text_is_returned_unchanged(self, repo: SnapshotWorkspace) -> None:
        repo.write("t", "héllo\r\nworld\n")
        body = repo.ok("snapshot.file", path="./t")
        assert body["cache_hint"] == "until_dirty"
        assert {name: body[name] for name in ("path", "content", "size", "eol", "blob")} == {
            "path": "t",
            "content": "héllo\r\nworld\n",
            "size": 14,
            "eol": "mixed",
            "blob": "sha256:" + sha256("héllo\r\nworld\n".encode()).hexdigest(),
        }

    @pytest.mark.req("D10.file.binary", "D10.file.text_that_looks_encoded", "S2.encoding.binary_base64_prefix")
    @pytest.mark.parametrize("data", [b"\0\1", b"\xff\xfe", b"base64:AAAA", b""])
    def test_binary_bytes_are_returned_encoded(self, repo: SnapshotWorkspace, data: bytes) -> None:
        repo.write("t", data)
        content = repo.ok("snapshot.file", path="t")["content"]
        assert content == ("" if not data else "base64:" + base64.b64encode(data).decode())
        repo.ok("workspace.write_file", path="u", content=content)
        assert (repo.root / "u").read_bytes() == data

    @pytest.mark.req("S2.mode.snapshot_immutable", "S2.schema.immutable_hint")
    def test_a_snapshot_returns_the_captured_content(self, repo: SnapshotWorkspace) -> None:
        taken = repo.snapshot("README.md")
        repo.write("README.md", "changed")
        body = repo.ok("snapshot.file", path="README.md", mode="snapshot", snapshot_id=taken)
        assert (body["content"], body["cache_hint"]) == ("# Toy Repo", "immutable")
        assert repo.code("snapshot.file", path="src/main.rs", mode="snapshot", snapshot_id=taken) == "NOT_FOUND"

    def test_links_are_followed_within_the_root_and_within_the_snapshot(self, repo: SnapshotWorkspace) -> None:
        os.symlink("../README.md", repo.root / "src/link")
        assert repo.ok("snapshot.file", path="src/link")["content"] == "# Toy Repo"
        taken = repo.snapshot("src", "README.md")
        assert repo.ok("snapshot.file", path="src/link", mode="snapshot", snapshot_id=taken)["content"] == "# Toy Repo"
        alone = repo.snapshot("src")
        assert repo.code("snapshot.file", path="src/link", mode="snapshot", snapshot_id=alone) == "NOT_FOUND"

    @pytest.mark.req("D10.too_large", "S2.error.too_large")
    def test_more_than_ten_mebibytes_are_too_large(self, repo: SnapshotWorkspace) -> None:
        repo.write("big", b"x" * (10 * 1024 * 1024 + 1))
        assert repo.code("snapshot.file", path="big") == "TOO_LARGE"
        assert repo.code("workspace.write_file", path="b", content="x" * (10 * 1024 * 1024 + 1)) == "TOO_LARGE"

    @pytest.mark.req("S2.error.invalid_argument", "D10.mode_default")
    def test_invalid_arguments_are_refused(self, repo: SnapshotWorkspace) -> None:
        assert repo.code("snapshot.file", path="src") == "INVALID_ARGUMENT"
        assert repo.code("snapshot.file") == "INVALID_ARGUMENT"
        assert repo.code("snapshot.file", path=1) == "INVALID_ARGUMENT"
        assert repo.code("snapshot.file", path="README.md", surprise=1) == "INVALID_ARGUMENT"
        assert repo.code("snapshot.file", path="README.md", mode="snapshot") == "INVALID_ARGUMENT"
        assert repo.code("snapshot.file", path="README.md", mode="else") == "INVALID_ARGUMENT"


class TestGrep:
    @pytest.mark.req(
        "D10.grep.matches",
        "D10.grep.col_code_points",
        "D10.grep.files_searched",
        "S2.order.matches",
        "S2.grep.ignore_rules",
    )
    def test_matches_have_line_and_column_in_code_points(self, folder: SnapshotWorkspace) -> None:
        folder.write("b", "ünï foo\nnone\n\tfoo foo")
        folder.write("a/x", b"\xef\xbb\xbffoo\r\n\xff foo\n")
        folder.write(".gitignore", "no\n")
        folder.write("no", "foo")
        body = folder.ok("snapshot.grep", pattern="fo+")
        assert body["matches"] == [
            {"path": "a/x", "line": 1, "col": 1, "text": "foo"},
            {"path": "a/x", "line": 2, "col": 3, "text": "\ufffd foo"},
            {"path": "b", "line": 1, "col": 5, "text": "ünï foo"},
            {"path": "b", "line": 3, "col": 2, "text": "\tfoo foo"},
        ]
        assert (body["files_searched"], body["truncated"]) == (3, False)

    @pytest.mark.parametrize(("pattern", "col"), [("b$", 2), (r"\r", 3), (r"b\r$", 2), (r"b\s", None), (r"b.$", None)])
    def test_a_carriage_return_at_a_line_end_is_matched_only_explicitly(
        self, folder: SnapshotWorkspace, pattern: str, col: int | None
    ) -> None:
        folder.write("a", b"ab\r\n")
        assert [one["col"] for one in folder.ok("snapshot.grep", pattern=pattern)["matches"]] == ([col] if col else [])

    def test_a_byte_order_mark_is_not_searched_but_u_feff_elsewhere_is(self, folder: SnapshotWorkspace) -> None:
        folder.write("a", "\ufefffoo\n\ufeffbar\n")
        folder.write("b", "\ufeff")
        found = {
            pattern: [
                (one["path"], one["line"], one["col"]) for one in folder.ok("snapshot.grep", pattern=pattern)["matches"]
            ]
            for pattern in ("^foo", "o$", "^bar", r"^\W", "^$")
        }
        assert found == {
            "^foo": [("a", 1, 1)],
            "o$": [("a", 1, 3)],
            "^bar": [],
            r"^\W": [("a", 2, 1)],
            "^$": [("b", 1, 1)],
        }

    @pytest.mark.req(
        "S2.grep.lexicographic_walk",
        "S2.grep.stable_selection",
        "C9.grep_is_tolerant",
        "D10.grep.case_insensitive_default",
    )
    def test_files_come_in_byte_order_of_their_whole_paths(self, folder: SnapshotWorkspace) -> None:
        for path in ("a/x", "a-b", "B"):
            folder.write(path, "Foo")
        assert [one["path"] for one in folder.ok("snapshot.grep", pattern="Foo")["matches"]] == ["B", "a-b", "a/x"]
        assert folder.ok("snapshot.grep", pattern="foo")["matches"] == []
        assert len(folder.ok("snapshot.grep", pattern="foo", case_insensitive=True)["matches"]) == 3

    @pytest.mark.req("S2.grep.binary_excluded", "D10.grep.max_matches_default", "D10.grep.max_files_default")
    def test_limits_hold_and_binary_files_are_skipped(self, folder: SnapshotWorkspace) -> None:
        folder.write("bin", b"\0foo")
        folder.write("many", "foo\n" * 1001)
        body = folder.ok("snapshot.grep", pattern="foo")
        assert (len(body["matches"]), body["truncated"], body["files_searched"]) == (1000, True, 1)
        for number in range(10_001):
            (folder.root / f"e{number}").touch()
        assert folder.ok("snapshot.grep", pattern="nothing")["files_searched"] == 10_000

    def test_grep_works_in_a_snapshot(self, repo: SnapshotWorkspace) -> None:
        live = repo.ok("snapshot.grep", pattern="o", paths=["src", "README.md"])
        taken = repo.snapshot(".")
        kept = repo.ok("snapshot.grep", pattern="o", paths=["src", "README.md"], mode="snapshot", snapshot_id=taken)
        assert kept["matches"] == live["matches"] != []

    def test_an_invalid_pattern_is_an_invalid_argument(self, repo: SnapshotWorkspace) -> None:
        assert repo.code("snapshot.grep", pattern="(") == "INVALID_ARGUMENT"
        assert repo.code("snapshot.grep", pattern=r"(a)\1") == "INVALID_ARGUMENT"

    @pytest.mark.parametrize(
        "pattern", ["a+b", r"\bfoo\b", "^$", "b|ab", "(a|b)*c", "é", "x{2,3}y?", "(a*)*b", "[^a-c]z$", "^ab|b$", ""]
    )
    def test_the_column_is_where_the_leftmost_match_begins(self, pattern: str) -> None:
        text = "xxaab\nfoo bar foo\n\nzzabac caf\u00e9\nxxxy xxy\naaaaaaaaaaaaaaaaaaaaaaaaaaab\ndz\nab b"
        searched = ((number, re.search(pattern, line)) for number, line in enumerate(text.split("\n"), 1))
        expected = [(number, match.start() + 1) for number, match in searched if match is not None]
        found = [(one.line, one.col) for one in Matcher(pattern, case_insensitive=False).matches(text.encode())]
        assert found == expected


class TestDiff:
    @pytest.mark.req("D10.diff.against_head", "D10.diff.against_index", "D10.diff.unified", "S2.encoding.diff_lf")
    def test_the_live_tree_is_compared_with_head_and_with_the_index(self, repo: SnapshotWorkspace) -> None:
        repo.write("README.md", "staged\n")
        git(repo.root, "add", "README.md")
        repo.write("README.md", "live\n")
        head = repo.ok("snapshot.diff", path="README.md")["diff"]
        index = repo.ok("snapshot.diff", path="README.md", against="index")["diff"]
        assert head == git(repo.root, "diff", "--no-color", "HEAD", "--", "README.md").decode().replace(
            head_index_line(repo, "HEAD"), ""
        )
        assert "-staged\n+live\n" in index
        assert "@@ -1 +1 @@" in index

    @pytest.mark.parametrize("against", ["head", "index"])
    def test_a_diff_of_one_path_compares_it_with_git(self, repo: SnapshotWorkspace, against: str) -> None:
        repo.write(".gitignore", "ignored\n")
        git(repo.root, "add", ".gitignore")
        git(repo.root, "commit", "-q", "-m", "More")
        repo.write("ignored", "x\n")
        repo.write("new/untracked", "x\n")
        told = {
            path: repo.ok("snapshot.diff", path=path, against=against)["diff"].partition("\n")[0]
            for path in ("README.md", "src", "src/main.rs", ".gitignore", "ignored", "new", "new/untracked")
        }
        assert {path: first for path, first in told.items() if first} == {
            "ignored": "diff --git a/ignored b/ignored",
            "new": "diff --git a/new/untracked b/new/untracked",
            "new/untracked": "diff --git a/new/untracked b/new/untracked",
        }
        assert repo.code("snapshot.diff", path="nowhere", against=against) == "NOT_FOUND"

    @pytest.mark.req("C14.diff_applies")
    def test_the_printed_diff_applies_to_the_commit(self, repo: SnapshotWorkspace) -> None:
        before = repo.snapshot(".")
        repo.write("README.md", "# Toy Repo\nmore\r\n")
        repo.write("new/ü file", "x")
        (repo.root / "src/main.rs").unlink()
        (repo.root / "src").rmdir()
        repo.write("run.sh", "#!/bin/sh\n")
        (repo.root / "run.sh").chmod(0o755)
        text = repo.ok("snapshot.diff")["diff"]
        after = repo.snapshot(".")
        patched = repo.ok("workspace.apply_patch", mode="snapshot", snapshot_id=before, patch=text)
        assert patched["applied"] == ["README.md", "new/ü file", "run.sh", "src/main.rs"]
        asked = {"mode": "snapshot", "depth": 9}
        made = repo.ok("snapshot.list", snapshot_id=patched["snapshot_id"], **asked)
        assert made["entries"] == repo.ok("snapshot.list", snapshot_id=after, **asked)["entries"]

    @pytest.mark.req("C14.diff_applies")
    def test_text_that_is_not_utf8_is_shown_as_binary(self, repo: SnapshotWorkspace) -> None:
        before = repo.snapshot(".")
        repo.write("latin", b"caf\xe9\n")
        text = repo.ok("snapshot.diff")["diff"]
        assert text == "diff --git a/latin b/latin\nnew file mode 100644\nBinary files /dev/null and b/latin differ\n"
        patched = repo.ask("workspace.apply_patch", mode="snapshot", snapshot_id=before, patch=text)
        assert (patched["snapshot_id"], patched["rejects"][0]["hunks"][0]["reason"]) == (before, "binary_unsupported")

    @pytest.mark.req("D10.diff.between_snapshots")
    def test_two_snapshots_are_compared(self, repo: SnapshotWorkspace) -> None:
        one = repo.snapshot("README.md")
        repo.write("README.md", "two\n")
        two = repo.snapshot("README.md")
        body = repo.ok("snapshot.diff", mode="snapshot", snapshot_id=two, from_snapshot_id=one)
        assert body["diff"].endswith("@@ -1 +1 @@\n-# Toy Repo\n\\ No newline at end of file\n+two\n")
        assert repo.ok("snapshot.diff", mode="snapshot", snapshot_id=two, from_snapshot_id=two)["diff"] == ""


def head_index_line(repo: SnapshotWorkspace, rev: str) -> str:
    lines = git(repo.root, "diff", "--no-color", rev, "--", "README.md").decode().splitlines(keepends=True)
    return next(line for line in lines if line.startswith("index "))


class TestChangesInfoExport:
    @pytest.mark.req(
        "D10.changes.statuses", "D10.changes.default_base", "S2.changes.output", "S2.changes.no_guessed_renames"
    )
    def test_changes_since_head(self, repo: SnapshotWorkspace) -> None:
        repo.write("README.md", "changed")
        os.rename(repo.root / "src/main.rs", repo.root / "src/moved.rs")
        body = repo.ok("snapshot.changes", snapshot_id=repo.snapshot("."))
        assert body["changes"] == [
            {"path": "README.md", "status": "modified"},
            {"path": "src/main.rs", "status": "deleted"},
            {"path": "src/moved.rs", "status": "added"},
        ]
        assert repo.ok("snapshot.changes", snapshot_id=repo.snapshot("README.md"))["changes"] == body["changes"][:1]

    @pytest.mark.req("D10.changes.default_base", "D10.changes.given_base", "C11.lineage_apart_from_id")
    def test_changes_since_the_parent_snapshot(self, repo: SnapshotWorkspace) -> None:
        base = repo.snapshot(".")
        patch = "--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
        made = repo.ok("workspace.apply_patch", mode="snapshot", snapshot_id=base, patch=patch)["snapshot_id"]
        assert repo.ok("snapshot.changes", snapshot_id=made)["changes"] == [{"path": "n", "status": "added"}]
        back = repo.ok("snapshot.changes", snapshot_id=base, from_snapshot_id=made)["changes"]
        assert back == [{"path": "n", "status": "deleted"}]
        undo = "--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        again = repo.ok("workspace.apply_patch", mode="snapshot", snapshot_id=made, patch=undo)["snapshot_id"]
        assert again == base
        assert repo.context.snapshots.parent_of(base) != base

    @pytest.mark.req("D10.tool_info", "S2.info.output", "S2.info.no_lease", "D10.create.manifest_stats")
    def test_info_describes_a_snapshot(self, repo: SnapshotWorkspace) -> None:
        made = repo.ok("snapshot.create", paths=["."])
        assert repo.ok("snapshot.info", snapshot_id=made["snapshot_id"]) == {
            "cache_hint": "immutable",
            "fingerprint": made["fingerprint"],
            "manifest_stats": {"files": 2, "total_bytes": 22},
        }
        assert repo.code("snapshot.info", snapshot_id="sha256:" + "0" * 64) == "NOT_FOUND"

    @pytest.mark.req("D10.export.tar_order", "D10.export.tar_metadata", "D10.export.sha256", "S2.export.deterministic")
    def test_the_bundle_is_a_plain_tar(self, repo: SnapshotWorkspace) -> None:
        for path in ("a/x", "a-b", "exe"):
            repo.write(path, path)
        (repo.root / "exe").chmod(0o700)
        os.symlink("exe", repo.root / "link")
        (repo.root / "empty").mkdir()
        body = repo.ok("snapshot.export", mode="snapshot", snapshot_id=repo.snapshot("."))
        data = base64.b64decode(body["bundle"].removeprefix("base64:"))
        assert body["sha256"] == "sha256:" + sha256(data).hexdigest()
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            rows = [(m.name, oct(m.mode), m.mtime, m.uid, m.gid, m.uname) for m in archive.getmembers()]
        assert rows == [
            ("README.md", "0o644", 0, 0, 0, ""),
            ("a-b", "0o644", 0, 0, 0, ""),
            ("a/x", "0o644", 0, 0, 0, ""),
            ("empty", "0o755", 0, 0, 0, ""),
            ("exe", "0o755", 0, 0, 0, ""),
            ("link", "0o777", 0, 0, 0, ""),
            ("src/main.rs", "0o644", 0, 0, 0, ""),
        ]

    @pytest.mark.req("D10.export.worktree_paths")
    def test_the_live_tree_exports_given_paths_or_those_of_the_lease(self, repo: SnapshotWorkspace) -> None:
        lease = repo.ok("snapshot.file", path="README.md")["lease_id"]
        by_lease = repo.ok("snapshot.export", lease_id=lease)
        by_path = repo.ok("snapshot.export", paths=["README.md"])
        kept = repo.ok("snapshot.export", mode="snapshot", snapshot_id=repo.snapshot("README.md"))
        assert by_lease["bundle"] == by_path["bundle"] == kept["bundle"]


class TestCreate:
    @pytest.mark.req(
        "D10.create.neither_input", "S2.create.inputs", "D10.create.fingerprint", "D10.create.directories_recursive"
    )
    def test_create_needs_paths_or_a_lease(self, repo: SnapshotWorkspace) -> None:
        assert repo.code("snapshot.create") == "INVALID_ARGUMENT"
        made = repo.ok("snapshot.create", paths=["."])
        assert made["manifest_stats"]["files"] == 2
        assert set(made["fingerprint"]) == {"head_oid", "index_oid", "status_hash"}
        assert repo.code("snapshot.create", paths=["nope"]) == "NOT_FOUND"

    @pytest.mark.req("D10.create.skipped", "C10.snapshot_consistent")
    def test_create_lists_skipped_paths_and_takes_each_path_once(self, repo: SnapshotWorkspace) -> None:
        os.mkfifo(repo.root / "pipe")
        made = repo.ok("snapshot.create", paths=[".", "README.md", "README.md", "src/", "src"])
        assert made["skipped"] == [{"path": "pipe", "reason": "special_file"}]
        assert made["manifest_stats"]["files"] == 2

    @pytest.mark.req("S2.create.immutable")
    def test_a_snapshot_survives_a_restart_and_is_verified_on_read(
        self, repo: SnapshotWorkspace, tmp_path: Path
    ) -> None:
        taken = repo.snapshot(".")
        with open_snapshot_workspace(repo.root, tmp_path / "store") as again:
            kept = again.ok("snapshot.file", mode="snapshot", snapshot_id=taken, path="src/main.rs")
        assert kept["content"] == "fn main() {}"
        assert kept["blob"] == "sha256:" + sha256(b"fn main() {}").hexdigest()

    @pytest.mark.req("D10.repo_changed", "S2.error.repo_changed", "C10.snapshot_consistent")
    def test_create_notices_a_tree_that_changes_while_it_is_read(
        self, repo: SnapshotWorkspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody saves the first file whenever the directory after it is opened."""
        saves = self.saving(repo, monkeypatch, times=1_000)
        assert repo.code("snapshot.create", paths=["."]) == "REPO_CHANGED"
        assert saves[0] < 1_000

    def test_create_retries_until_the_tree_is_stable(
        self, repo: SnapshotWorkspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.saving(repo, monkeypatch, times=3)
        taken = repo.snapshot(".")
        kept = repo.ok("snapshot.file", mode="snapshot", snapshot_id=taken, path="README.md")
        assert kept["content"] == "moved on 0"

    @staticmethod
    def saving(repo: SnapshotWorkspace, monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[int]:
        """How many saves are left."""
        real_open, left = os.open, [times]

        def opening(path: object, *args: object, **named: object) -> int:
            if path == "src" and left[0]:
                left[0] -= 1
                (repo.root / "README.md").write_text(f"moved on {left[0]}")
            return real_open(path, *args, **named)  # type: ignore[arg-type]  # passed through as it came

        monkeypatch.setattr(os, "open", opening)
        return left

    def test_names_that_are_not_utf8_are_captured(self, folder: SnapshotWorkspace) -> None:
        for name in (b"\xff\xfe", b"base64:x"):
            with open(os.path.join(os.fsencode(folder.root), name), "wb") as file:
                file.write(name)
        listed = folder.ok("snapshot.list")["entries"]
        assert all(one["path"].startswith("base64:") for one in listed)
        taken = folder.snapshot(".")
        for one in listed:
            kept = folder.ok("snapshot.file", path=one["path"], mode="snapshot", snapshot_id=taken)
            assert kept["blob"] == one["blob"] == folder.ok("snapshot.file", path=one["path"])["blob"]
