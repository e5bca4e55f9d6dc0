"""Leases: what they notice, what they let pass, and how long they live."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mulligan.files.tree.index import GONE
from mulligan.values.paths import RepoPath
from tests.effects.snapshot_tools.snapshot_workspace import (
    MovingClock,
    SnapshotWorkspace,
    git,
    known_repository,
    open_snapshot_workspace,
)


def lease_on(workspace: SnapshotWorkspace, path: str = "README.md") -> str:
    return str(workspace.ok("snapshot.file", path=path)["lease_id"])


def holds(workspace: SnapshotWorkspace, lease: str) -> bool:
    body = workspace.ask("snapshot.list", lease_id=lease, limit=0)
    if "error" in body:
        assert body["error"]["code"] == "STALE_LEASE"
        return False
    assert body["lease_id"] == lease
    return True


READS: dict[str, dict[str, Any]] = {
    "snapshot.file": {"path": "README.md"},
    "snapshot.list": {},
    "snapshot.grep": {"pattern": "Toy"},
    "snapshot.diff": {},
    "snapshot.export": {"paths": ["src"]},
}


@pytest.mark.req(
    "S2.lease.issued_by_file",
    "S2.lease.issued_by_list",
    "S2.lease.issued_by_grep",
    "S2.lease.issued_by_diff",
    "S2.lease.issued_by_export",
    "S2.mode.worktree_live",
)
@pytest.mark.parametrize("tool", READS)
def test_every_read_of_the_live_tree_issues_a_lease_or_keeps_the_given_one(repo: SnapshotWorkspace, tool: str) -> None:
    first = repo.ok(tool, **READS[tool])
    again = repo.ok(tool, **READS[tool], lease_id=first["lease_id"])
    assert again == first
    assert repo.ok(tool, **READS[tool])["lease_id"] != first["lease_id"]


@pytest.mark.req("S2.lease.issued_by_apply_patch", "D10.mutators_return_lease")
def test_every_writing_tool_issues_a_lease(repo: SnapshotWorkspace) -> None:
    patch = "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-# Toy Repo\n\\ No newline at end of file\n+x\n"
    answers = [
        repo.ok("workspace.apply_patch", patch=patch),
        repo.ok("workspace.write_file", path="new", content="1"),
        repo.ok("workspace.delete", path="new"),
    ]
    # The third call deleted what the second wrote, so only the second lease is stale.
    assert [holds(repo, answer["lease_id"]) for answer in answers] == [True, False, True]
    assert len({answer["lease_id"] for answer in answers}) == 3
    assert all(answer["fingerprint"] for answer in answers)


def edit(path: str, text: str = "edited again") -> Callable[[SnapshotWorkspace], None]:
    return lambda workspace: workspace.write(path, text)


def move_head(workspace: SnapshotWorkspace) -> None:
    git(workspace.root, "commit", "-q", "--allow-empty", "-m", "empty")


def git_add(workspace: SnapshotWorkspace) -> None:
    git(workspace.root, "add", "untracked/a")


def change_mode(path: str) -> Callable[[SnapshotWorkspace], None]:
    return lambda workspace: os.chmod(workspace.root / path, 0o755)


CHANGES: dict[str, Callable[[SnapshotWorkspace], None]] = {
    "second edit of a dirty file": edit("README.md"),
    "edit of an untracked file": edit("untracked/a"),
    "second file in an untracked directory": edit("untracked/b"),
    "deletion": lambda workspace: (workspace.root / "untracked/a").unlink(),
    "mode of a tracked file": change_mode("README.md"),
    "mode of an untracked file": change_mode("untracked/a"),
    "HEAD": move_head,
    "index": git_add,
    "a new file elsewhere": edit("src/other.rs"),
}


@pytest.mark.req(
    "D10.lease_content",
    "C1.lease_sees_content",
    "S2.lease.validated",
    "S2.lease.stale_error",
    "S2.lease.stale_structured",
    "S2.lease.no_auto_refresh",
    "S2.error.stale_lease",
    "S2.error.stale_has_fingerprint",
    "D10.stale_details",
)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("watched", [False, True], ids=["first", "watched"])
def test_a_lease_goes_stale_when_the_tree_changes(repo: SnapshotWorkspace, name: str, watched: bool) -> None:
    repo.write("README.md", "dirty already")
    repo.write("untracked/a", "1")
    lease = lease_on(repo)
    repo.ok("snapshot.file", path="untracked/a", lease_id=lease)
    for _ in range(3 if watched else 0):
        assert holds(repo, lease)
    CHANGES[name](repo)
    error = repo.ask("snapshot.file", path="src/main.rs", lease_id=lease)["error"]
    assert error["code"] == "STALE_LEASE"
    now = repo.ok("snapshot.create", paths=[])["fingerprint"]
    assert error["details"]["fingerprint"] == now
    assert error["details"]["lease_id"] == lease
    assert isinstance(error["details"]["changed_paths"], list)
    assert not holds(repo, lease)


THROUGH_LINKS: dict[str, dict[str, Any]] = {
    "snapshot.file": {"path": "way/file"},
    "snapshot.list": {"path": "way"},
    "snapshot.grep": {"pattern": "1", "paths": ["way"]},
}


@pytest.mark.req("D10.lease_content")
@pytest.mark.parametrize("tool", THROUGH_LINKS)
def test_a_lease_goes_stale_when_a_link_gets_another_target(repo: SnapshotWorkspace, tool: str) -> None:
    """Neither the file that was read nor anything git says of the untracked link is another."""
    for name in ("one", "two"):
        repo.write(f"{name}/file", name)
    os.symlink("one", repo.root / "link")
    os.symlink("link", repo.root / "way")
    lease = repo.ok(tool, **THROUGH_LINKS[tool])["lease_id"]
    assert holds(repo, lease)
    (repo.root / "link").unlink()
    os.symlink("two", repo.root / "link")
    details = repo.ask("snapshot.list", lease_id=lease)["error"]["details"]
    assert details["changed_paths"] == ["link"]


@pytest.mark.req("S2.create.touched_by_lease")
def test_a_file_read_through_a_link_is_readable_so_in_the_leases_snapshot(repo: SnapshotWorkspace) -> None:
    os.symlink("README.md", repo.root / "link")
    live = repo.ok("snapshot.file", path="link")
    taken = repo.ok("snapshot.create", lease_id=live["lease_id"])["snapshot_id"]
    kept = repo.ok("snapshot.file", path="link", mode="snapshot", snapshot_id=taken)
    assert (kept["content"], kept["blob"]) == (live["content"], live["blob"])


@pytest.mark.req("D10.stale_details")
def test_a_stale_lease_names_the_paths_that_changed(repo: SnapshotWorkspace) -> None:
    repo.write("README.md", "dirty already")
    lease = lease_on(repo)
    repo.write("README.md", "dirty otherwise")
    repo.write("b/new", "1")
    details = repo.ask("snapshot.list", lease_id=lease)["error"]["details"]
    assert details["changed_paths"] == ["README.md", "b/new"]


def test_a_stale_lease_stays_stale_until_the_tree_is_as_the_holder_saw_it(repo: SnapshotWorkspace) -> None:
    seen = repo.ok("snapshot.file", path="README.md")
    repo.write("README.md", "changed")
    answers = [holds(repo, seen["lease_id"]) for _ in range(3)]
    repo.ok("snapshot.file", path="README.md")
    assert [*answers, holds(repo, seen["lease_id"])] == [False] * 4
    repo.write("README.md", seen["content"])
    assert holds(repo, seen["lease_id"])


@pytest.mark.req("D10.renewal_own_paths", "C2.own_write_keeps_lease", "S2.lease.mutators_touch")
def test_writes_of_the_holder_do_not_make_its_lease_stale(repo: SnapshotWorkspace) -> None:
    lease = lease_on(repo)
    repo.ok("workspace.write_file", path="README.md", content="one", lease_id=lease)
    repo.ok("workspace.write_file", path="README.md", content="two", lease_id=lease)
    repo.ok("workspace.write_file", path="deep/er/new", content="x", create_dirs=True, lease_id=lease)
    repo.ok("workspace.delete", path="src", recursive=True, lease_id=lease)
    patch = "--- /dev/null\n+++ b/patched\n@@ -0,0 +1 @@\n+x\n"
    body = repo.ok("workspace.apply_patch", patch=patch, lease_id=lease)
    assert body["lease_id"] == lease
    assert holds(repo, lease)
    repo.ok("workspace.write_file", path=".gitignore", content="patched\n", lease_id=lease)
    assert holds(repo, lease)
    taken = repo.ok("snapshot.create", lease_id=lease)
    listed = repo.ok("snapshot.list", mode="snapshot", snapshot_id=taken["snapshot_id"], depth=9)["entries"]
    assert [one["path"] for one in listed if one["type"] == "file"] == [
        ".gitignore",
        "README.md",
        "deep/er/new",
        "patched",
    ]


@pytest.mark.req("D10.renewal_own_paths")
def test_renewal_does_not_hide_a_simultaneous_change_of_another_process(repo: SnapshotWorkspace) -> None:
    """Theirs comes between our check and our renewal: at the moment the call begins."""
    from mulligan.effects.snapshot_tools.context import RequestInfo
    from mulligan.effects.snapshot_tools.tools import BY_NAME, run_tool
    from mulligan.values.ids import SessionId

    repo.write("README.md", "dirty")
    lease = lease_on(repo)

    def theirs(call: object) -> None:
        repo.write("README.md", "dirty, by somebody else")

    named = RequestInfo(SessionId("tests"), began=theirs)
    body = run_tool(repo.context, BY_NAME["workspace.write_file"], write_new(lease), named).body
    assert body["lease_id"] == lease
    assert not holds(repo, lease)


def write_new(lease: str) -> dict[str, str]:
    return {"path": "new", "content": "1", "lease_id": lease}


def test_a_write_with_a_stale_lease_writes_nothing(repo: SnapshotWorkspace) -> None:
    from mulligan.effects.snapshot_tools.context import RequestInfo
    from mulligan.effects.snapshot_tools.tools import BY_NAME, run_tool
    from mulligan.values.ids import SessionId

    lease = lease_on(repo)
    named = RequestInfo(SessionId("tests"), began=lambda call: repo.write("README.md", "theirs"))
    args = {"path": "README.md", "content": "ours", "lease_id": lease}
    body = run_tool(repo.context, BY_NAME["workspace.write_file"], args, named).body
    assert body["error"]["code"] == "STALE_LEASE"
    assert (repo.root / "README.md").read_text() == "theirs"


@pytest.mark.req("D10.renewal_own_paths")
def test_a_write_of_one_holder_makes_the_lease_of_another_stale(repo: SnapshotWorkspace) -> None:
    one, two = lease_on(repo), lease_on(repo)
    repo.ok("workspace.write_file", path="README.md", content="by one", lease_id=one)
    assert holds(repo, one)
    assert not holds(repo, two)


@pytest.mark.req("D10.lease_durable", "C16.leases_survive_restart")
def test_leases_survive_a_restart(tmp_path: Path) -> None:
    root = known_repository(tmp_path / "repo")
    with open_snapshot_workspace(root, tmp_path / "store") as workspace:
        lease = lease_on(workspace)
        workspace.ok("workspace.write_file", path="own", content="1", lease_id=lease)
    with open_snapshot_workspace(root, tmp_path / "store") as workspace:
        assert holds(workspace, lease)
        workspace.write("README.md", "1")
        assert not holds(workspace, lease)


@dataclass
class Interrupted(MovingClock):
    """A clock that lets somebody else act when it is next looked at."""

    act: Callable[[], object] | None = None

    def now(self) -> datetime:
        act, self.act = self.act, None
        if act is not None:
            act()
        return super().now()


@pytest.mark.req("D10.lease_durable", "D10.lease_content")
def test_reads_of_two_processes_under_one_lease_both_count(tmp_path: Path) -> None:
    root, clock = known_repository(tmp_path / "repo"), Interrupted()
    with (
        open_snapshot_workspace(root, tmp_path / "store", clock) as one,
        open_snapshot_workspace(root, tmp_path / "store") as two,
    ):
        one.write("theirs", "1")
        lease = lease_on(one)
        found = one.context.leases.check(lease)[0]
        clock.act = lambda: two.ok("snapshot.file", path="theirs", lease_id=lease)
        one.context.leases.add_read_paths(found, {RepoPath("absent"): GONE})
        one.write("theirs", "2")
        assert not holds(one, lease)


@pytest.mark.req("D10.lease_one_root")
def test_a_lease_belongs_to_one_root(repo: SnapshotWorkspace, tmp_path: Path) -> None:
    lease = lease_on(repo)
    with open_snapshot_workspace(known_repository(tmp_path / "other"), tmp_path / "store") as other:
        assert other.code("snapshot.list", lease_id=lease) == "NOT_FOUND"
    for unknown in ("no such lease", "\ud800", "ü", ""):
        assert repo.code("snapshot.list", lease_id=unknown) == "NOT_FOUND"


@pytest.mark.req("D10.lease_expires")
def test_a_lease_ends_after_an_idle_hour_and_not_while_it_is_used(repo: SnapshotWorkspace) -> None:
    lease = lease_on(repo)
    for _ in range(3):
        repo.clock.ahead += timedelta(minutes=50)
        assert holds(repo, lease)
    repo.clock.ahead += timedelta(minutes=61)
    assert repo.code("snapshot.list", lease_id=lease) == "STALE_LEASE"


@pytest.mark.req("D10.lease_from_memory")
def test_a_check_runs_no_git_while_nothing_changes(repo: SnapshotWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = lease_on(repo)
    for _ in range(3):
        assert holds(repo, lease)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("subprocess.run", None)
    assert holds(repo, lease)


@pytest.mark.req("S2.lease.list_touches", "S2.lease.touched_tracked", "S2.create.touched_by_lease", "S2.list.worktree")
def test_listing_touches_the_files_it_returns_and_their_parents(repo: SnapshotWorkspace) -> None:
    repo.write("src/b.rs", "1")
    lease = repo.ok("snapshot.list", path="src", limit=1)["lease_id"]
    touched = repo.context.leases.check(lease)[0].touched
    assert {path: seen.kind for path, seen in touched.items()} == {"src": "dir", "src/b.rs": "file"}
    assert repo.ok("snapshot.create", lease_id=lease)["manifest_stats"]["files"] == 1


@pytest.mark.req("S2.lease.grep_touches_candidates", "S2.lease.grep_skips_binary", "S2.grep.max_files")
def test_grep_touches_every_text_file_that_it_searched(repo: SnapshotWorkspace) -> None:
    repo.write("bin", b"Toy\0")
    repo.write(".gitignore", "ignored\n")
    repo.write("ignored", "Toy")
    body = repo.ok("snapshot.grep", pattern="Toy", max_matches=0)
    touched = repo.context.leases.check(body["lease_id"])[0].touched
    assert sorted(touched) == [".gitignore", "README.md", "src/main.rs"]
    assert (body["files_searched"], body["truncated"]) == (3, True)
    fewer = repo.ok("snapshot.grep", pattern="Toy", max_files=1)
    assert sorted(repo.context.leases.check(fewer["lease_id"])[0].touched) == [".gitignore"]
    assert fewer["truncated"] is True


@pytest.mark.req("S2.lease.diff_touches")
def test_diff_touches_its_target(repo: SnapshotWorkspace) -> None:
    body = repo.ok("snapshot.diff", path="README.md")
    assert list(repo.context.leases.check(body["lease_id"])[0].touched) == ["README.md"]
