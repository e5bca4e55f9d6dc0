"""The substrate's tools are under a session's capability and policy like every other, snapshots included."""

from __future__ import annotations

import io
import json
import tarfile
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mulligan.boundary.capability import parse_capability
from mulligan.boundary.policy import parse_policy
from mulligan.effects.substrate.bench import Bench
from mulligan.effects.substrate.tools import TOOLS
from substrate.site import Site, git, known_repository, open_site

OPS = ("read", "write", "edit", "patch", "search", "list", "stat", "exec")
PATCH = "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-# Toy Repo\n\\ No newline at end of file\n+# Ours\n"
HIDDEN = [{"paths": ["src"], "verdict": "deny"}]
"""A policy that hides a directory."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_site(known_repository(tmp_path / "root"), tmp_path / "store") as opened:
        yield opened


def within(
    site: Site, capability: Mapping[str, object] | None = None, policy: Sequence[Mapping[str, object]] = ()
) -> Site:
    """The same root for somebody who may do less."""
    boundary = site.opened.boundary.narrowed(parse_capability(capability or {}), parse_policy(policy))
    return replace(site, bench=Bench(site.opened.desk, boundary))


def refusal(site: Site, tool: str, **args: Any) -> tuple[str, str]:
    error = site.ask(tool, **args)["error"]
    return error["code"], error["details"]["reason"]


def arguments(tool: str, snapshot: str) -> list[dict[str, Any]]:
    """Of the live tree, and of a snapshot, as far as the tool knows both."""
    of_snapshot = {"mode": "snapshot", "snapshot_id": snapshot}
    both: dict[str, list[dict[str, Any]]] = {
        "snapshot.create": [{"paths": ["."]}],
        "snapshot.list": [{}, of_snapshot],
        "snapshot.file": [{"path": "README.md"}, {"path": "README.md", **of_snapshot}],
        "snapshot.grep": [{"pattern": "."}, {"pattern": ".", **of_snapshot}],
        "snapshot.diff": [{}, of_snapshot],
        "snapshot.changes": [{"snapshot_id": snapshot}],
        "snapshot.info": [{"snapshot_id": snapshot}],
        "snapshot.export": [{"paths": ["."]}, of_snapshot],
        "workspace.apply_patch": [{"patch": PATCH}, {"patch": PATCH, **of_snapshot}],
        "workspace.write_file": [{"path": "n", "content": "x"}],
        "workspace.delete": [{"path": "README.md"}],
    }
    return both[tool]


@pytest.mark.req("D8.capability_forms")
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: str(tool.name))
def test_a_session_that_may_not_do_a_thing_may_not_do_it_here_either(tool: Any, site: Site) -> None:
    snapshot = site.snapshot(".")
    before = git(site.root, "status", "--porcelain")
    without = within(site, {"allowed_fs_ops": [op for op in OPS if op != tool.op]})
    alone = within(site, {"allowed_fs_ops": [tool.op]})
    for args in arguments(tool.name, snapshot):
        assert refusal(without, tool.name, **args) == ("PERMISSION_DENIED", "fs_op_not_allowed")
        assert git(site.root, "status", "--porcelain") == before
    for args in arguments(tool.name, snapshot):
        alone.ok(tool.name, **args)


LIMITS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("workspace.write_file", {"path": "n", "content": "four"}, {"max_write_bytes": 3}, "max_write_bytes_exceeded"),
    ("workspace.apply_patch", {"patch": PATCH}, {"max_write_bytes": 3}, "max_write_bytes_exceeded"),
    ("workspace.apply_patch", {"patch": PATCH}, {"max_patch_bytes": 3}, "max_patch_bytes_exceeded"),
    ("workspace.apply_patch", {"patch": PATCH}, {"allowed_patch_formats": ["v4a"]}, "patch_format_not_allowed"),
    ("workspace.apply_patch", {"patch": PATCH}, {"max_changed_files": 0}, "max_changed_files_exceeded"),
    ("workspace.delete", {"path": "src", "recursive": True}, {"max_changed_files": 0}, "max_changed_files_exceeded"),
]


@pytest.mark.parametrize(("tool", "args", "capability", "reason"), LIMITS, ids=lambda value: str(value)[:30])
def test_ceilings_hold(tool: str, args: dict[str, Any], capability: dict[str, Any], reason: str, site: Site) -> None:
    snapshot = site.snapshot(".")
    limited = within(site, capability)
    assert refusal(limited, tool, **args) == ("PERMISSION_DENIED", reason)
    if tool == "workspace.apply_patch":
        assert refusal(limited, tool, **args, mode="snapshot", snapshot_id=snapshot) == ("PERMISSION_DENIED", reason)
    assert git(site.root, "status", "--porcelain") == b""


def test_what_is_read_has_its_ceilings_too(site: Site) -> None:
    snapshot = site.snapshot(".")
    for way in ({}, {"mode": "snapshot", "snapshot_id": snapshot}):
        assert within(site, {"max_read_bytes": 9}).code("snapshot.file", path="README.md", **way) == "TOO_LARGE"
        assert within(site, {"max_read_bytes": 10}).ok("snapshot.file", path="README.md", **way)["size"] == 10
        assert within(site, {"max_grep_results": 1}).ok("snapshot.grep", pattern=".", **way)["truncated"]
        assert within(site, {"max_scan_files": 1}).ok("snapshot.grep", pattern=".", **way)["files_searched"] == 1
        assert within(site, {"max_scan_bytes": 10}).ok("snapshot.grep", pattern=".", **way)["files_searched"] == 1
    kept_out = within(site, policy=[{"verdict": "allow", "output": "blob"}])
    assert kept_out.code("snapshot.file", path="README.md") == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("capability", "policy"), [({"fs_roots": ["README.md"]}, []), ({}, HIDDEN)], ids=["roots", "policy"]
)
def test_a_snapshot_shows_no_more_than_the_tree_would(
    site: Site, capability: dict[str, object], policy: list[dict[str, object]]
) -> None:
    """Whoever made it. What is hidden is not there: not by name, not by content, not as something deleted."""
    older = site.snapshot(".")
    site.write("src/main.rs", "fn secret() {}")
    site.write("README.md", "# Another")
    newer = site.snapshot(".")
    limited = within(site, capability, policy)
    way = {"mode": "snapshot", "snapshot_id": newer}
    assert limited.code("snapshot.file", path="src/main.rs", **way) == "NOT_FOUND"
    assert [one["path"] for one in limited.ok("snapshot.list", depth=9, **way)["entries"]] == ["README.md"]
    assert {one["path"] for one in limited.ok("snapshot.grep", pattern=".", **way)["matches"]} == {"README.md"}
    assert [one["path"] for one in limited.ok("snapshot.changes", snapshot_id=newer)["changes"]] == ["README.md"]
    changed = limited.ok("snapshot.changes", snapshot_id=newer, from_snapshot_id=older)["changes"]
    assert [one["path"] for one in changed] == ["README.md"]
    assert limited.ok("snapshot.info", snapshot_id=newer)["manifest_stats"]["files"] == 1
    for text in (
        limited.ok("snapshot.diff", **way, from_snapshot_id=older)["diff"],
        limited.ok("snapshot.diff", **way)["diff"],
        *([limited.ok("snapshot.diff")["diff"]] if policy else []),
    ):
        assert "Another" in text and "secret" not in text and "main" not in text
    bundle = b64decode(limited.ok("snapshot.export", **way)["bundle"].removeprefix("base64:"))
    with tarfile.open(fileobj=io.BytesIO(bundle)) as exported:
        assert exported.getnames() == ["README.md"]


def test_a_patch_to_a_snapshot_changes_only_what_may_be_patched_and_keeps_the_rest(site: Site) -> None:
    snapshot = site.snapshot(".")
    limited = within(site, policy=HIDDEN)
    way = {"mode": "snapshot", "snapshot_id": snapshot}
    forbidden = "--- a/src/main.rs\n+++ b/src/main.rs\n@@ -1 +1 @@\n-fn main() {}\n\\ No newline at end of file\n+x\n"
    told = limited.ok("workspace.apply_patch", patch=forbidden, **way)
    assert told["rejects"] == [{"path": "src/main.rs", "hunks": [{"index": 0, "reason": "path_rejected"}]}]
    derived = limited.ok("workspace.apply_patch", patch=PATCH, **way)["snapshot_id"]
    kept = site.ok("snapshot.file", path="src/main.rs", mode="snapshot", snapshot_id=derived)
    assert kept["content"] == "fn main() {}"


KEPT_OUT = [{"paths": ["src"], "verdict": "allow", "output": "blob"}]
"""A policy under which the content of a directory is never in an answer."""


def ways(site: Site) -> list[dict[str, Any]]:
    return [{}, {"mode": "snapshot", "snapshot_id": site.snapshot(".")}]


@pytest.mark.req("D8.substrate_blob_output")
@pytest.mark.parametrize("ops", [None, ["read"], ["read", "search"]], ids=str)
def test_content_that_a_policy_keeps_out_of_answers_is_in_no_answer(site: Site, ops: list[str] | None) -> None:
    site.write("src/main.rs", "fn secret() {}")
    site.write("README.md", "# Another")
    limited = within(site, policy=[{**KEPT_OUT[0], **({} if ops is None else {"ops": ops})}])
    for way in ways(site):
        assert limited.code("snapshot.file", path="src/main.rs", **way) == "PERMISSION_DENIED"
        assert limited.code("snapshot.export", paths=["src/main.rs"], **way) == "PERMISSION_DENIED"
        assert limited.code("snapshot.export", paths=["."], **way) == "PERMISSION_DENIED"
        assert limited.ok("snapshot.export", paths=["README.md"], **way)["bundle"]
        assert [one["path"] for one in limited.ok("snapshot.grep", pattern=".", **way)["matches"]] == ["README.md"]
        assert limited.ok("snapshot.grep", pattern="secret", paths=["src"], **way)["matches"] == []
        text = limited.ok("snapshot.diff", **way)["diff"]
        assert "Another" in text and "secret" not in text and "main" not in text
        assert limited.ok("snapshot.diff", path="src/main.rs", **way)["diff"] == ""


@pytest.mark.req("D8.substrate_blob_output")
def test_a_diff_of_a_path_that_is_denied_is_refused(site: Site) -> None:
    site.write("src/main.rs", "fn secret() {}")
    for limited in (within(site, policy=HIDDEN), within(site, {"fs_roots": ["README.md"]})):
        for path in ("src/main.rs", "src"):
            for way in ways(site):
                assert limited.code("snapshot.diff", path=path, **way) == "PERMISSION_DENIED"


@pytest.mark.req("D8.substrate_inline_limit")
def test_over_max_inline_bytes_a_tool_says_too_large_or_stops_there(site: Site) -> None:
    site.write("README.md", "x" * 399 + "\n")
    for way in ways(site):
        small, large = within(site, {"max_inline_bytes": 399}), within(site, {"max_inline_bytes": 50_000})
        for tool, args in (
            ("snapshot.file", {"path": "README.md"}),
            ("snapshot.diff", {}),
            ("snapshot.export", {"paths": ["README.md"]}),
        ):
            assert small.code(tool, **args, **way) == "TOO_LARGE"
            large.ok(tool, **args, **way)
        for size, files in ((0, 0), (150, 1), (200, 2), (50_000, 3)):
            limited = within(site, {"max_inline_bytes": size})
            listed = limited.ok("snapshot.list", depth=9, **way)
            assert (len(listed["entries"]), listed["truncated"], listed["total"]) == (files, files < 3, 3)
            assert len(json.dumps(listed["entries"], separators=(",", ":"))) <= size + 2
        for size, matches in ((0, 0), (60, 0), (500, 1), (600, 2)):
            found = within(site, {"max_inline_bytes": size}).ok("snapshot.grep", pattern=".", **way)
            assert (len(found["matches"]), found["truncated"]) == (matches, matches < 2)


@pytest.mark.req("D8.substrate_inline_limit")
def test_the_next_page_of_a_list_that_was_cut_begins_where_it_ended(site: Site) -> None:
    for way in ways(site):
        limited = within(site, {"max_inline_bytes": 150})
        names: list[str] = []
        while True:
            page = limited.ok("snapshot.list", depth=9, offset=len(names), **way)
            names += [one["path"] for one in page["entries"]]
            if not page["truncated"]:
                break
        assert names == ["README.md", "src", "src/main.rs"]


@pytest.mark.req("D8.substrate_inline_limit")
def test_a_diff_over_ten_mebibytes_is_too_large(site: Site) -> None:
    site.write("README.md", "y\n" * (5 * 1024 * 1024))
    for way in ways(site):
        assert site.code("snapshot.diff", **way) == "TOO_LARGE"
        assert within(site, {"max_read_bytes": 20}).code("snapshot.diff", **way) == "TOO_LARGE"
        assert site.ok("snapshot.diff", path="src", **way)["diff"] == "" or way


@pytest.mark.req("D8.search_without_path")
def test_a_search_without_a_path_searches_what_fs_roots_allow(site: Site) -> None:
    site.write("docs/a", "main\n")
    site.write("other/b", "main\n")
    for roots, found in (
        (["src"], {"src/main.rs"}),
        (["src", "docs"], {"src/main.rs", "docs/a"}),
        (["src", "docs", "no such folder"], {"src/main.rs", "docs/a"}),
        (["docs/a"], {"docs/a"}),
    ):
        limited = within(site, {"fs_roots": roots})
        for way in ways(site):
            matches = limited.ok("snapshot.grep", pattern="main", **way)["matches"]
            assert {one["path"] for one in matches} == found
    assert within(site, {"fs_roots": []}).code("snapshot.grep", pattern="main") == "PERMISSION_DENIED"
