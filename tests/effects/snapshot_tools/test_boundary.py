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
from mulligan.effects.snapshot_tools.context import SnapshotContext
from mulligan.effects.snapshot_tools.tools import TOOLS
from tests.effects.snapshot_tools.snapshot_workspace import (
    SnapshotWorkspace,
    git,
    known_repository,
    open_snapshot_workspace,
)

OPS = ("read", "write", "edit", "patch", "search", "list", "stat", "exec")
PATCH = "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-# Toy Repo\n\\ No newline at end of file\n+# Ours\n"
HIDDEN = [{"paths": ["src"], "verdict": "deny"}]
"""A policy that hides a directory."""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[SnapshotWorkspace]:
    with open_snapshot_workspace(known_repository(tmp_path / "root"), tmp_path / "store") as opened:
        yield opened


def within(
    workspace: SnapshotWorkspace,
    capability: Mapping[str, object] | None = None,
    policy: Sequence[Mapping[str, object]] = (),
) -> SnapshotWorkspace:
    """The same root for somebody who may do less."""
    boundary = workspace.opened.boundary.narrowed(parse_capability(capability or {}), parse_policy(policy))
    return replace(workspace, context=SnapshotContext(workspace.opened.open_root, boundary))


def refusal(workspace: SnapshotWorkspace, tool: str, **args: Any) -> tuple[str, str]:
    error = workspace.ask(tool, **args)["error"]
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
def test_a_session_without_a_right_cannot_use_it_through_snapshot_tools(
    tool: Any, workspace: SnapshotWorkspace
) -> None:
    snapshot = workspace.snapshot(".")
    before = git(workspace.root, "status", "--porcelain")
    without = within(workspace, {"allowed_fs_ops": [op for op in OPS if op != tool.op]})
    alone = within(workspace, {"allowed_fs_ops": [tool.op]})
    for args in arguments(tool.name, snapshot):
        assert refusal(without, tool.name, **args) == ("PERMISSION_DENIED", "fs_op_not_allowed")
        assert git(workspace.root, "status", "--porcelain") == before
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
def test_write_limits_of_the_capability_hold(
    tool: str, args: dict[str, Any], capability: dict[str, Any], reason: str, workspace: SnapshotWorkspace
) -> None:
    snapshot = workspace.snapshot(".")
    limited = within(workspace, capability)
    assert refusal(limited, tool, **args) == ("PERMISSION_DENIED", reason)
    if tool == "workspace.apply_patch":
        assert refusal(limited, tool, **args, mode="snapshot", snapshot_id=snapshot) == ("PERMISSION_DENIED", reason)
    assert git(workspace.root, "status", "--porcelain") == b""


def test_read_limits_of_the_capability_hold(workspace: SnapshotWorkspace) -> None:
    snapshot = workspace.snapshot(".")
    for way in ({}, {"mode": "snapshot", "snapshot_id": snapshot}):
        assert within(workspace, {"max_read_bytes": 9}).code("snapshot.file", path="README.md", **way) == "TOO_LARGE"
        assert within(workspace, {"max_read_bytes": 10}).ok("snapshot.file", path="README.md", **way)["size"] == 10
        assert within(workspace, {"max_grep_results": 1}).ok("snapshot.grep", pattern=".", **way)["truncated"]
        assert within(workspace, {"max_scan_files": 1}).ok("snapshot.grep", pattern=".", **way)["files_searched"] == 1
        assert within(workspace, {"max_scan_bytes": 10}).ok("snapshot.grep", pattern=".", **way)["files_searched"] == 1
    kept_out = within(workspace, policy=[{"verdict": "allow", "output": "blob"}])
    assert kept_out.code("snapshot.file", path="README.md") == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("capability", "policy"), [({"fs_roots": ["README.md"]}, []), ({}, HIDDEN)], ids=["roots", "policy"]
)
def test_a_snapshot_hides_what_the_policy_hides_in_the_tree(
    workspace: SnapshotWorkspace, capability: dict[str, object], policy: list[dict[str, object]]
) -> None:
    """Whoever made it. What is hidden is not there: not by name, not by content, not as something deleted."""
    older = workspace.snapshot(".")
    workspace.write("src/main.rs", "fn secret() {}")
    workspace.write("README.md", "# Another")
    newer = workspace.snapshot(".")
    limited = within(workspace, capability, policy)
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


def test_a_patch_of_a_snapshot_changes_only_permitted_paths(
    workspace: SnapshotWorkspace,
) -> None:
    snapshot = workspace.snapshot(".")
    limited = within(workspace, policy=HIDDEN)
    way = {"mode": "snapshot", "snapshot_id": snapshot}
    forbidden = "--- a/src/main.rs\n+++ b/src/main.rs\n@@ -1 +1 @@\n-fn main() {}\n\\ No newline at end of file\n+x\n"
    told = limited.ok("workspace.apply_patch", patch=forbidden, **way)
    assert told["rejects"] == [{"path": "src/main.rs", "hunks": [{"index": 0, "reason": "path_rejected"}]}]
    derived = limited.ok("workspace.apply_patch", patch=PATCH, **way)["snapshot_id"]
    kept = workspace.ok("snapshot.file", path="src/main.rs", mode="snapshot", snapshot_id=derived)
    assert kept["content"] == "fn main() {}"


KEPT_OUT = [{"paths": ["src"], "verdict": "allow", "output": "blob"}]
"""A policy under which the content of a directory is never in an answer."""


def ways(workspace: SnapshotWorkspace) -> list[dict[str, Any]]:
    return [{}, {"mode": "snapshot", "snapshot_id": workspace.snapshot(".")}]


@pytest.mark.req("D8.substrate_blob_output")
@pytest.mark.parametrize("ops", [None, ["read"], ["read", "search"]], ids=str)
def test_content_that_a_policy_withholds_is_in_no_answer(workspace: SnapshotWorkspace, ops: list[str] | None) -> None:
    workspace.write("src/main.rs", "fn secret() {}")
    workspace.write("README.md", "# Another")
    limited = within(workspace, policy=[{**KEPT_OUT[0], **({} if ops is None else {"ops": ops})}])
    for way in ways(workspace):
        assert limited.code("snapshot.file", path="src/main.rs", **way) == "PERMISSION_DENIED"
        assert limited.code("snapshot.export", paths=["src/main.rs"], **way) == "PERMISSION_DENIED"
        assert limited.code("snapshot.export", paths=["."], **way) == "PERMISSION_DENIED"
        assert limited.ok("snapshot.export", paths=["README.md"], **way)["bundle"]
        assert [one["path"] for one in limited.ok("snapshot.grep", pattern=".", **way)["matches"]] == ["README.md"]
        assert limited.ok("snapshot.grep", pattern="secret", paths=["src"], **way)["matches"] == []
        text = limited.ok("snapshot.diff", **way)["diff"]
        assert "Another" in text and "secret" not in text and "main" not in text
        assert limited.ok("snapshot.diff", path="src/main.rs", **way)["diff"] == ""


@pytest.mark.req("D8.substrate_blob_output", "D8.every_tool_every_byte")
@pytest.mark.parametrize("rule", [{"verdict": "deny"}, {"verdict": "allow", "output": "blob"}], ids=str)
def test_a_patch_does_not_copy_hidden_content_to_where_it_would_show(
    workspace: SnapshotWorkspace, rule: dict[str, Any]
) -> None:
    limited = within(workspace, policy=[{"paths": ["src"], "ops": ["read", "search"], **rule}])
    rejects = [{"path": "src/main.rs", "hunks": [{"index": 0, "reason": "path_rejected"}]}]
    for way in ways(workspace):
        for verb in ("copy", "rename"):
            patch = f"diff --git a/src/main.rs b/z\nsimilarity index 100%\n{verb} from src/main.rs\n{verb} to z\n"
            told = limited.ok("workspace.apply_patch", patch=patch, **way)
            assert (told["applied"], told["rejects"]) == ([], rejects)
    assert git(workspace.root, "status", "--porcelain") == b""


@pytest.mark.req("D8.substrate_blob_output")
def test_a_diff_of_a_denied_path_is_refused(workspace: SnapshotWorkspace) -> None:
    workspace.write("src/main.rs", "fn secret() {}")
    for limited in (within(workspace, policy=HIDDEN), within(workspace, {"fs_roots": ["README.md"]})):
        for path in ("src/main.rs", "src"):
            for way in ways(workspace):
                assert limited.code("snapshot.diff", path=path, **way) == "PERMISSION_DENIED"


@pytest.mark.req("D8.substrate_inline_limit")
def test_over_max_inline_bytes_a_tool_fails_or_truncates(workspace: SnapshotWorkspace) -> None:
    workspace.write("README.md", "x" * 399 + "\n")
    for way in ways(workspace):
        small, large = within(workspace, {"max_inline_bytes": 399}), within(workspace, {"max_inline_bytes": 50_000})
        for tool, args in (
            ("snapshot.file", {"path": "README.md"}),
            ("snapshot.diff", {}),
            ("snapshot.export", {"paths": ["README.md"]}),
        ):
            assert small.code(tool, **args, **way) == "TOO_LARGE"
            large.ok(tool, **args, **way)
        for size, files in ((0, 0), (150, 1), (200, 2), (50_000, 3)):
            limited = within(workspace, {"max_inline_bytes": size})
            listed = limited.ok("snapshot.list", depth=9, **way)
            assert (len(listed["entries"]), listed["truncated"], listed["total"]) == (files, files < 3, 3)
            assert len(json.dumps(listed["entries"], separators=(",", ":"))) <= size + 2
        for size, matches in ((0, 0), (60, 0), (500, 1), (600, 2)):
            found = within(workspace, {"max_inline_bytes": size}).ok("snapshot.grep", pattern=".", **way)
            assert (len(found["matches"]), found["truncated"]) == (matches, matches < 2)


@pytest.mark.req("D8.substrate_inline_limit")
def test_the_next_page_of_a_truncated_list_continues_it(workspace: SnapshotWorkspace) -> None:
    for way in ways(workspace):
        limited = within(workspace, {"max_inline_bytes": 150})
        names: list[str] = []
        while True:
            page = limited.ok("snapshot.list", depth=9, offset=len(names), **way)
            names += [one["path"] for one in page["entries"]]
            if not page["truncated"]:
                break
        assert names == ["README.md", "src", "src/main.rs"]


@pytest.mark.req("D8.substrate_inline_limit")
def test_a_diff_over_ten_mebibytes_is_too_large(workspace: SnapshotWorkspace) -> None:
    workspace.write("README.md", "y\n" * (5 * 1024 * 1024))
    for way in ways(workspace):
        assert workspace.code("snapshot.diff", **way) == "TOO_LARGE"
        assert within(workspace, {"max_read_bytes": 20}).code("snapshot.diff", **way) == "TOO_LARGE"
        assert workspace.ok("snapshot.diff", path="src", **way)["diff"] == "" or way


@pytest.mark.req("D8.search_without_path")
def test_a_search_without_a_path_searches_what_fs_roots_allow(workspace: SnapshotWorkspace) -> None:
    workspace.write("docs/a", "main\n")
    workspace.write("other/b", "main\n")
    for roots, found in (
        (["src"], {"src/main.rs"}),
        (["src", "docs"], {"src/main.rs", "docs/a"}),
        (["src", "docs", "no such folder"], {"src/main.rs", "docs/a"}),
        (["docs/a"], {"docs/a"}),
    ):
        limited = within(workspace, {"fs_roots": roots})
        for way in ways(workspace):
            matches = limited.ok("snapshot.grep", pattern="main", **way)["matches"]
            assert {one["path"] for one in matches} == found
    denied = within(workspace, {"fs_roots": ["src", "docs"]}, [{"paths": ["docs"], "verdict": "deny"}])
    for way in ways(workspace):
        matches = denied.ok("snapshot.grep", pattern="main", **way)["matches"]
        assert {one["path"] for one in matches} == {"src/main.rs"}
    assert within(workspace, {"fs_roots": []}).code("snapshot.grep", pattern="main") == "PERMISSION_DENIED"
