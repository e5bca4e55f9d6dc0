"""The writing tools of the substrate: safe paths, exact patches, and every change a call that can be undone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mulligan.values.ids import SessionId
from mulligan.values.paths import parse_repo_path
from tests.effects.snapshot_tools.snapshot_workspace import SnapshotWorkspace

NEW = "--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
EDIT = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"

DENIED = [
    "../out",
    "a/../../out",
    "/etc/passwd",
    "~/x",
    "~root",
    "newdir/../../outside.txt",
    ".",
    ".git/config",
    ".git",
]


def tree(root: Path) -> dict[str, bytes]:
    found = [path for path in root.parent.rglob("*") if path.is_file() and "store" not in path.parts]
    return {str(path): path.read_bytes() for path in found}


class TestPaths:
    @pytest.mark.req(
        "D10.denied_dotdot",
        "D10.denied_absolute",
        "D10.denied_tilde",
        "D10.denied_root_and_git",
        "S2.write.dotdot_denied",
        "S2.write.absolute_denied",
        "S2.write.outside_denied",
        "S2.delete.same_safety",
        "S2.error.permission_denied",
        "C7.newdir_dotdot",
        "C8.delete_is_careful",
    )
    @pytest.mark.parametrize("path", DENIED)
    def test_a_path_outside_the_root_is_denied_and_changes_nothing(self, repo: SnapshotWorkspace, path: str) -> None:
        before = tree(repo.root)
        assert repo.code("workspace.write_file", path=path, content="x", create_dirs=True) == "PERMISSION_DENIED"
        assert repo.code("workspace.delete", path=path, recursive=True) == "PERMISSION_DENIED"
        assert tree(repo.root) == before

    @pytest.mark.req("D10.denied_absolute", "D10.denied_dotdot", "D10.denied_tilde", "S2.paths.no_tilde")
    def test_reads_outside_the_root_are_denied_too(self, repo: SnapshotWorkspace) -> None:
        inside = str(repo.root / "README.md")
        for path in ("../x", inside, "~/x"):
            assert repo.code("snapshot.file", path=path) == "PERMISSION_DENIED"
            assert repo.code("snapshot.list", path=path) == "PERMISSION_DENIED"
            assert repo.code("snapshot.create", paths=[path]) == "PERMISSION_DENIED"
            assert repo.code("snapshot.grep", pattern="x", paths=[path]) == "PERMISSION_DENIED"

    @pytest.mark.req("D10.invalid_empty_nul")
    @pytest.mark.parametrize("path", ["", "a\0b"])
    def test_an_empty_path_and_one_with_nul_are_invalid(self, repo: SnapshotWorkspace, path: str) -> None:
        assert repo.code("workspace.write_file", path=path, content="x") == "INVALID_ARGUMENT"
        assert repo.code("snapshot.file", path=path) == "INVALID_ARGUMENT"

    @pytest.mark.req("D10.denied_symlink_escape", "S2.write.symlink_denied", "S2.write.resolved_inside")
    def test_links_out_of_the_root_are_denied(self, repo: SnapshotWorkspace, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "f").write_text("theirs")
        os.symlink(outside, repo.root / "dir")
        os.symlink(outside / "f", repo.root / "file")
        os.symlink(outside / "dangling", repo.root / "dangling")
        before = tree(repo.root)
        for path in ("dir/f", "dir/new", "file", "dangling"):
            assert repo.code("workspace.write_file", path=path, content="x", create_dirs=True) == "PERMISSION_DENIED"
        for path in ("dir/f", "file", "dir"):
            assert repo.code("snapshot.list", path=path) == "PERMISSION_DENIED"
        assert repo.code("snapshot.file", path="file") == "PERMISSION_DENIED"
        assert repo.code("workspace.delete", path="dir/f") == "PERMISSION_DENIED"
        rejected = repo.ask("workspace.apply_patch", patch=NEW.format(path="dir/new"))
        assert rejected["rejects"] == [{"path": "dir/new", "hunks": [{"index": 0, "reason": "path_rejected"}]}]
        assert tree(repo.root) == before

    @pytest.mark.req("S2.write.new_file_by_parent", "S2.write.resolved_inside")
    def test_a_new_file_is_created_in_the_resolved_parent(self, repo: SnapshotWorkspace) -> None:
        os.symlink("src", repo.root / "way")
        repo.ok("workspace.write_file", path="way/new.rs", content="1")
        assert (repo.root / "src/new.rs").read_text() == "1"

    @pytest.mark.req("C8.delete_is_careful")
    def test_delete_removes_the_link_and_not_its_target(self, repo: SnapshotWorkspace) -> None:
        os.symlink("src", repo.root / "way")
        repo.ok("workspace.delete", path="way")
        assert not os.path.lexists(repo.root / "way")
        assert (repo.root / "src/main.rs").exists()


class TestWriteAndDelete:
    @pytest.mark.req("D10.write_file.output", "D10.write_file.create_dirs_default", "S2.schema.worktree_hint")
    def test_write_file_creates_and_replaces(self, repo: SnapshotWorkspace) -> None:
        assert repo.code("workspace.write_file", path="d/new", content="é") == "NOT_FOUND"
        body = repo.ok("workspace.write_file", path="d//new", content="é", create_dirs=True)
        assert (body["path"], body["written_bytes"], body["created"]) == ("d/new", 2, True)
        assert repo.ok("workspace.write_file", path="d/new", content="x")["created"] is False
        assert repo.code("workspace.write_file", path="src", content="x") == "INVALID_ARGUMENT"
        assert repo.code("workspace.write_file", path="x", content="base64:?") == "INVALID_ARGUMENT"

    @pytest.mark.req("D10.delete.recursive", "D10.delete.output")
    def test_delete_removes_a_file(self, repo: SnapshotWorkspace) -> None:
        assert repo.code("workspace.delete", path="src") == "INVALID_ARGUMENT"
        assert repo.code("workspace.delete", path="nope") == "NOT_FOUND"
        body = repo.ok("workspace.delete", path="src/", recursive=True)
        assert (body["path"], body["deleted"]) == ("src", True)
        assert not (repo.root / "src").exists()

    @pytest.mark.req("D10.dry_run")
    def test_a_dry_run_reports_and_changes_nothing(self, repo: SnapshotWorkspace) -> None:
        before = tree(repo.root)
        made = repo.ok("workspace.write_file", path="n", content="x", dry_run=True)
        assert (made["created"], made["written_bytes"]) == (True, 1)
        assert repo.ok("workspace.delete", path="README.md", dry_run=True)["deleted"] is False
        assert repo.ok("workspace.apply_patch", patch=NEW.format(path="p"), dry_run=True)["applied"] == ["p"]
        taken = repo.snapshot(".")
        kept = repo.ok(
            "workspace.apply_patch", patch=NEW.format(path="p"), dry_run=True, mode="snapshot", snapshot_id=taken
        )
        assert kept["snapshot_id"] == taken
        assert tree(repo.root) == before

    @pytest.mark.req("D10.conflict_code")
    def test_a_file_another_call_is_changing_is_a_conflict(self, repo: SnapshotWorkspace) -> None:
        from mulligan.files.replace import TargetEntry
        from mulligan.history.undo_log import Intent

        older = repo.opened.open_root.call(SessionId("other"))
        older.change([Intent(parse_repo_path("README.md"), lambda image: TargetEntry(image.entry, image.content))])
        assert repo.code("workspace.write_file", path="README.md", content="x") == "CONFLICT"
        older.abort("done")

    def test_every_change_is_a_call_and_can_be_undone(self, repo: SnapshotWorkspace) -> None:
        before = tree(repo.root)
        repo.ok("workspace.write_file", path="a/new", content="x", create_dirs=True)
        repo.ok("workspace.delete", path="src", recursive=True)
        repo.ok("workspace.apply_patch", patch=NEW.format(path="p"))
        session = repo.opened.session("tests")
        assert all(session.undo().ok for _ in range(3))
        assert tree(repo.root) == before
        assert not (repo.root / "a").exists()


REASONS = {
    "context_mismatch": "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-other\n+x\n",
    "target_missing": "--- a/none\n+++ b/none\n@@ -1 +1 @@\n-a\n+b\n",
    "target_exists": "diff --git a/f b/f\nnew file mode 100644\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n",
    "content_remains": "diff --git a/f b/f\ndeleted file mode 100644\n--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n",
    "malformed_hunk": "--- a/f\n+++ b/f\n@@ -1,9 +1 @@\n-one\n+x\n",
    "binary_unsupported": "diff --git a/f b/f\nindex 1..2 100644\nGIT binary patch\nliteral 0\nHcmV?d00001\n\n",
    "path_rejected": "--- a/../f\n+++ b/../f\n@@ -1 +1 @@\n-a\n+b\n",
}


class TestPatch:
    @pytest.mark.req("S2.apply_patch.worktree", "S2.apply_patch.unified", "D10.apply_patch.applied_sorted")
    def test_patches_the_live_tree(self, repo: SnapshotWorkspace) -> None:
        repo.write("f", "one\ntwo\nthree\n")
        body = repo.ok("workspace.apply_patch", patch=EDIT + NEW.format(path="a"))
        assert (body["applied"], body["rejects"]) == (["a", "f"], [])
        assert (repo.root / "f").read_text() == "one\n2\nthree\n"
        assert body["fingerprint"] == repo.ok("snapshot.create", paths=[])["fingerprint"]

    @pytest.mark.req("S2.apply_patch.snapshot", "D10.apply_patch.snapshot_id")
    def test_patches_a_snapshot_and_nothing_else(self, repo: SnapshotWorkspace) -> None:
        repo.write("f", "one\ntwo\nthree\n")
        taken, before = repo.snapshot("f"), tree(repo.root)
        body = repo.ok("workspace.apply_patch", mode="snapshot", snapshot_id=taken, patch=EDIT)
        assert tree(repo.root) == before
        made = repo.ok("snapshot.file", mode="snapshot", snapshot_id=body["snapshot_id"], path="f")
        assert made["content"] == "one\n2\nthree\n"
        assert repo.ok("snapshot.file", mode="snapshot", snapshot_id=taken, path="f")["content"] == "one\ntwo\nthree\n"

    @pytest.mark.parametrize("mode", ["worktree", "snapshot"])
    def test_a_file_created_and_deleted_by_one_patch_leaves_nothing(self, repo: SnapshotWorkspace, mode: str) -> None:
        repo.write("f", "one\n")
        taken, before = repo.snapshot("f"), tree(repo.root)
        where = {"mode": mode, "snapshot_id": taken} if mode == "snapshot" else {}
        gone = "--- a/d/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        body = repo.ok("workspace.apply_patch", patch=NEW.format(path="d/x") + gone, **where)
        assert (body["applied"], body["rejects"], body.get("snapshot_id", taken)) == (["d/x"], [], taken)
        assert tree(repo.root) == before

    @pytest.mark.req("D10.apply_patch.strip_default")
    def test_strip_removes_leading_directories(self, repo: SnapshotWorkspace) -> None:
        plain = NEW.format(path="q").replace("b/q", "q")
        assert repo.ok("workspace.apply_patch", patch=plain, strip=0)["applied"] == ["q"]
        assert repo.ok("workspace.apply_patch", patch=NEW.format(path="x/r"), strip=2)["applied"] == ["r"]

    @pytest.mark.req(
        "D10.reason.context_mismatch",
        "D10.reason.target_missing",
        "D10.reason.target_exists",
        "D10.reason.content_remains",
        "D10.reason.malformed_hunk",
        "D10.reason.binary_unsupported",
        "D10.reason.path_rejected",
        "D10.rejects_shape",
        "S2.apply_patch.rejects_shape",
        "D10.unified_all_or_nothing",
    )
    @pytest.mark.parametrize("reason", REASONS)
    @pytest.mark.parametrize("mode", ["worktree", "snapshot"])
    def test_a_patch_with_a_rejected_hunk_applies_nothing(
        self, repo: SnapshotWorkspace, reason: str, mode: str
    ) -> None:
        repo.write("f", "one\ntwo\nthree\n")
        where = {} if mode == "worktree" else {"mode": mode, "snapshot_id": repo.snapshot(".")}
        before = tree(repo.root)
        body = repo.ok("workspace.apply_patch", patch=NEW.format(path="fine") + REASONS[reason], **where)
        assert body["applied"] == []
        assert [hunk["reason"] for one in body["rejects"] for hunk in one["hunks"]] == [reason]
        assert tree(repo.root) == before
        assert body.get("snapshot_id") == where.get("snapshot_id")

    @pytest.mark.req(
        "S2.apply_patch.byte_context",
        "S2.apply_patch.no_fuzz",
        "D10.unified_strict",
        "C5.no_offset_no_whitespace",
    )
    @pytest.mark.parametrize("content", ["zero\none\ntwo\nthree\n", "one\ntwo \nthree\n", "one\r\ntwo\r\nthree\r\n"])
    def test_hunks_match_without_offset_or_white_space_tolerance(self, repo: SnapshotWorkspace, content: str) -> None:
        repo.write("f", content.encode())
        assert repo.ok("workspace.apply_patch", patch=EDIT)["rejects"] != []

    @pytest.mark.req("S2.apply_patch.rejects_sorted", "S2.order.rejects")
    def test_rejects_are_sorted(self, repo: SnapshotWorkspace) -> None:
        repo.write("b", "1\n")
        repo.write("a", "1\n2\n3\n4\n5\n6\n7\n8\n9\n")
        bad = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-x\n+y\n"
        text = bad.format("b") + bad.format("a") + "@@ -9 +9 @@\n-x\n+y\n"
        rejects = repo.ok("workspace.apply_patch", patch=text)["rejects"]
        assert [(one["path"], [hunk["index"] for hunk in one["hunks"]]) for one in rejects] == [
            ("a", [0, 1]),
            ("b", [0]),
        ]

    @pytest.mark.req(
        "D10.unified.renames",
        "D10.unified.copies",
        "D10.unified.mode_changes",
        "D10.unified.new_files",
        "D10.unified.deleted_files",
        "D10.unified.no_final_newline",
        "D10.unified.crlf",
    )
    def test_all_kinds_of_git_diffs_apply(self, repo: SnapshotWorkspace) -> None:
        repo.write("crlf", b"a\r\nb\r\n")
        repo.write("gone", "x\n")
        repo.write("end", "no newline")
        text = (
            "diff --git a/README.md b/READ.me\nrename from README.md\nrename to READ.me\n"
            "diff --git a/src/main.rs b/src/copy.rs\ncopy from src/main.rs\ncopy to src/copy.rs\n"
            "diff --git a/src/main.rs b/src/main.rs\nold mode 100644\nnew mode 100755\n"
            "diff --git a/gone b/gone\ndeleted file mode 100644\n--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
            "--- a/end\n+++ b/end\n@@ -1 +1 @@\n-no newline\n\\ No newline at end of file\n+still none\n"
            "\\ No newline at end of file\n"
            "--- a/crlf\n+++ b/crlf\n@@ -1,2 +1,2 @@\n a\r\n-b\r\n+c\r\n" + NEW.format(path="made/new")
        )
        body = repo.ok("workspace.apply_patch", patch=text)
        assert body["rejects"] == []
        assert (repo.root / "READ.me").read_text() == "# Toy Repo"
        assert (repo.root / "src/copy.rs").read_text() == "fn main() {}"
        assert os.access(repo.root / "src/main.rs", os.X_OK)
        assert not (repo.root / "gone").exists()
        assert (repo.root / "end").read_text() == "still none"
        assert (repo.root / "crlf").read_bytes() == b"a\r\nc\r\n"
        assert (repo.root / "made/new").read_text() == "x\n"

    @pytest.mark.req("C6.no_false_success")
    def test_in_a_subdirectory_of_a_repository_it_applies_or_rejects(
        self, repo: SnapshotWorkspace, tmp_path: Path
    ) -> None:
        from tests.effects.snapshot_tools.snapshot_workspace import open_snapshot_workspace

        with open_snapshot_workspace(repo.root / "src", tmp_path / "store2") as inner:
            text = "diff --git a/main.rs b/main.rs\n--- a/main.rs\n+++ b/main.rs\n@@ -1 +1 @@\n"
            text += "-fn main() {}\n\\ No newline at end of file\n+x\n"
            assert inner.ok("workspace.apply_patch", patch=text)["applied"] == ["main.rs"]
        assert (repo.root / "src/main.rs").read_text() == "x\n"

    def test_invalid_diff_text_is_an_invalid_argument(self, repo: SnapshotWorkspace) -> None:
        assert repo.code("workspace.apply_patch", patch="hello") == "INVALID_ARGUMENT"

    def test_a_patch_that_makes_two_names_of_one_file_differ_changes_nothing(self, repo: SnapshotWorkspace) -> None:
        repo.write("one", "old\n")
        os.link(repo.root / "one", repo.root / "two")
        text = "".join(f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-old\n+{name}\n" for name in ("one", "two"))
        assert repo.code("workspace.apply_patch", patch=text) == "INVALID_ARGUMENT"
        assert (repo.root / "one").read_bytes() == (repo.root / "two").read_bytes() == b"old\n"

    def test_a_dry_run_of_each_writing_tool_changes_nothing(self, repo: SnapshotWorkspace) -> None:
        repo.write("f", "one\n")
        before = tree(repo.root)
        patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-one\n+1\n"
        assert repo.ok("workspace.write_file", path="a/b", content="x", create_dirs=True, dry_run=True)["created"]
        assert not repo.ok("workspace.delete", path="f", dry_run=True)["deleted"]
        assert repo.ok("workspace.apply_patch", patch=patch, dry_run=True)["applied"] == ["f"]
        assert tree(repo.root) == before
        assert not (repo.root / "a").exists()
