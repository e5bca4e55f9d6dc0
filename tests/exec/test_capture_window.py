"""The ways that see a window of time, not a writer: what they keep beforehand, and what they say they cannot know."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mulligan.history.baseline import Baseline
from mulligan.history.command import baseline_cache_of
from mulligan.history.tables import TOUCHES
from mulligan.store.blobs import BLOBS
from mulligan.values.digest import digest_of, raw_digest
from mulligan.values.entries import ABSENT, FileEntry
from mulligan.values.paths import RepoPath
from tests.exec.commands import at_rest, git, plant, repository, sh
from tests.exec.trees import tree
from tests.temp_workspace import TempWorkspace, open_temp_workspace


def is_stored(workspace: TempWorkspace, data: bytes) -> bool:
    with workspace.open_root.ledger.store.read() as tx:
        return tx.get(BLOBS, raw_digest(digest_of(data))) is not None


def looked_at(workspace: TempWorkspace, **caps: int) -> Baseline:
    """Everything below the root, read and saved."""
    tree = Baseline(workspace.open_root, **caps)
    tree.find_changes()
    while not tree.is_complete:
        tree.read_contents(math.inf)
    return tree


@pytest.mark.req("D7.scan_baseline_git")
class TestGitHasIt:
    def test_a_clean_tracked_file_is_read_from_git_only_when_it_changed(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "clean\n", "b": "clean too\n"})
        os.chmod(workspace.root / "a", 0o640)
        git(workspace.root, "update-index", "-q", "--refresh")
        tree = looked_at(workspace)
        assert not is_stored(workspace, b"clean\n")
        mtime = (workspace.root / "a").stat().st_mtime_ns
        plant(workspace.root, {"a": "changed\n"})
        changes = {one.path: one.before for one in tree.refresh([RepoPath("a")])}
        assert changes == {"a": FileEntry(digest_of(b"clean\n"), 6, 0o640, mtime)}
        assert is_stored(workspace, b"clean\n") and not is_stored(workspace, b"clean too\n")

    def test_a_file_that_is_not_clean_is_copied(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "committed\n"})
        plant(workspace.root, {"a": "dirty\n", "new": "untracked\n"})
        looked_at(workspace)
        assert is_stored(workspace, b"dirty\n") and is_stored(workspace, b"untracked\n")

    def test_a_file_that_attributes_made_different_from_gits_bytes_is_copied(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {".gitattributes": "* text eol=crlf\n", "a": "x\n"})
        (workspace.root / "a").unlink()
        git(workspace.root, "checkout", "-q", "--", "a")
        assert (workspace.root / "a").read_bytes() == b"x\r\n"
        sh(workspace, "echo y > a", strategy="scan")
        assert workspace.session().undo().ok
        assert (workspace.root / "a").read_bytes() == b"x\r\n"

    def test_commits_that_git_has_lost_are_reported_and_left(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "1\n"})
        receipt = sh(workspace, "echo 2 > a; rm -rf .git", strategy="scan")
        assert {"path": "a", "reason": "no_baseline"} in receipt.coverage
        workspace.session().undo()
        assert (workspace.root / "a").read_text() == "2\n"

    @pytest.mark.parametrize("way", ["scan", "watch"])
    @pytest.mark.parametrize("command", ["rm -rf .git", "rm -rf .git; git init -q"])
    def test_objects_that_are_gone_are_named_whatever_came_after(
        self, workspace: TempWorkspace, way: str, command: str
    ) -> None:
        repository(workspace.root, {"a": "1\n"})
        receipt = sh(workspace, f"{command}; exit 1", strategy=way, rollback_on="nonzero")
        assert {"path": ".git/objects", "reason": "no_baseline"} in receipt.coverage
        assert git(workspace.root, "symbolic-ref", "HEAD") == "refs/heads/main"

    @pytest.mark.parametrize("way", ["scan", "watch"])
    def test_objects_that_git_has_packed_are_not_gone(self, workspace: TempWorkspace, way: str) -> None:
        repository(workspace.root, {"a": "1\n"})
        assert sh(workspace, "git repack -adq", strategy=way).coverage == []


@pytest.mark.req("D7.scan_baseline_caps", "D7.scan_no_baseline", "D6.coverage.no_baseline")
class TestCaps:
    def test_keep_large_files_out(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"small": "s", "large": "l" * 11, "other": "o" * 6})
        tree = looked_at(workspace, file_max_bytes=10, workspace_max_bytes=7)
        plant(workspace.root, dict.fromkeys(("small", "large", "other", "absent"), "changed"))
        befores = {str(one.path): one.before for one in tree.find_changes()}
        assert befores["large"] is None and befores["absent"] == ABSENT
        assert befores["small"] is not None and befores["other"] is not None

    def test_keep_the_whole_bounded(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {str(number): "x" * 10 for number in range(5)})
        tree = looked_at(workspace, workspace_max_bytes=25)
        plant(workspace.root, {str(number): "changed" for number in range(5)})
        assert sum(one.before is not None for one in tree.find_changes()) == 2

    @pytest.mark.parametrize("way", ["scan", "watch"])
    def test_a_changed_path_that_a_scan_left_out_is_reported_and_not_harmed(
        self, workspace: TempWorkspace, way: str
    ) -> None:
        plant(workspace.root, {"huge": "h" * (3 << 20), "small": "1\n"})
        receipt = sh(workspace, "echo x >> huge; echo 2 > small", strategy=way)
        assert receipt.coverage == [{"path": "huge", "reason": "no_baseline"}]
        assert receipt.changes == [{"path": "small", "kind": "modified"}]
        assert workspace.session().undo().ok
        assert (workspace.root / "small").read_text() == "1\n" and (workspace.root / "huge").stat().st_size == (
            3 << 20
        ) + 2


@pytest.mark.parametrize("way", ["scan", "watch"])
def test_a_command_that_removes_its_root_has_removed_everything(tmp_path: Path, way: str) -> None:
    workspace = open_temp_workspace(tmp_path)
    plant(workspace.root, {"a": "1\n", "d/x": "x\n"})
    before = tree(os.fsencode(workspace.root))
    receipt = sh(workspace, f"rm -rf {workspace.root}", strategy=way)
    assert receipt.changes == [{"path": name, "kind": "deleted"} for name in ("a", "d", "d/x")]
    workspace.close()
    again = open_temp_workspace(tmp_path)
    # A new folder at the old path begins a history of its own, until a person says that it continues the earlier one.
    again.open_root.adopt(None)
    again.close()
    adopted = open_temp_workspace(tmp_path)
    assert adopted.session().undo().ok
    assert tree(os.fsencode(adopted.root)) == before
    adopted.close()


@pytest.mark.req("D7.window_ambiguous", "D7.window_attribution", "D6.reason.ambiguous")
@pytest.mark.parametrize("way", ["scan", "watch"])
def test_a_path_another_writer_changed_in_the_window_is_ambiguous(
    workspace: TempWorkspace, tmp_path: Path, way: str
) -> None:
    plant(workspace.root, {"shared": "1\n", "own": "1\n"})
    reached, go = tmp_path / "reached", tmp_path / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    found: list[Any] = []
    script = f"echo 2 > own; echo > {reached}; read x < {go}; echo agent >> shared"
    work = threading.Thread(target=lambda: found.append(sh(workspace, script, strategy=way)))
    work.start()
    reached.read_text()
    with workspace.session("person").call() as call:
        call.write_file("shared", "person\n")
    go.write_text("\n")
    work.join()
    assert found[0].attribution == "window"
    assert found[0].coverage == [{"path": "shared", "reason": "ambiguous"}]
    back = workspace.session().undo()
    assert not back.ok
    assert [one.to_json() for one in back.outcomes] == [
        {"path": "own", "outcome": "restored"},
        {"path": "shared", "outcome": "conflicted", "reason": "ambiguous"},
    ]
    assert (workspace.root / "own").read_text() == "1\n" and (
        workspace.root / "shared"
    ).read_text() == "person\nagent\n"


def test_changes_of_a_failed_transaction_are_recorded_by_the_next(workspace: TempWorkspace) -> None:
    plant(workspace.root, {"a": "1\n"})
    tree = looked_at(workspace)
    plant(workspace.root, {"a": "2\n"})
    assert [one.path for one in tree.find_changes(full=True)] == ["a"]
    with pytest.raises(LookupError), workspace.open_root.ledger.store.write() as tx:
        tree.publish(tx)
        raise LookupError
    assert not is_stored(workspace, b"2\n") and tree.has_unpublished
    with workspace.open_root.ledger.store.write() as tx:
        tree.publish(tx)
    tree.mark_published()
    assert is_stored(workspace, b"2\n") and not tree.has_unpublished


@pytest.mark.parametrize("way", ["scan", "watch"])
class TestWarm:
    """What was looked at stays known between commands."""

    def test_nothing_is_read_twice(self, workspace: TempWorkspace, way: str) -> None:
        plant(workspace.root, {str(number): f"{number}\n" for number in range(50)})
        at_rest(workspace.root.iterdir())
        sh(workspace, "echo x > new", strategy=way)
        with workspace.open_root.ledger.store.read() as tx:
            touched = {row.digest: row.touched_ms for row in tx.select(BLOBS)}
        receipt = sh(workspace, "echo changed > 7", strategy=way)
        assert receipt.changes == [{"path": "7", "kind": "modified"}]
        with workspace.open_root.ledger.store.read() as tx:
            again = [row for row in tx.select(BLOBS) if touched.get(row.digest) not in (None, row.touched_ms)]
        assert len(again) < 10

    def test_a_persons_change_between_two_windows_is_external(self, workspace: TempWorkspace, way: str) -> None:
        plant(workspace.root, {"a": "1\n", "b": "1\n"})
        sh(workspace, "echo 2 > a", strategy=way)
        plant(workspace.root, {"a": "person\n", "b": "person\n"})
        receipt = sh(workspace, "echo 3 > a", strategy=way)
        assert (receipt.changes, receipt.coverage) == ([{"path": "a", "kind": "modified"}], [])
        assert workspace.session().undo().ok
        assert (workspace.root / "a").read_text() == (workspace.root / "b").read_text() == "person\n"

    def test_the_next_window_knows_the_files_that_an_undo_restored(self, workspace: TempWorkspace, way: str) -> None:
        plant(workspace.root, {"a": "1\n", "d/x": "x\n"})
        before = tree(os.fsencode(workspace.root))
        for _ in range(3):
            assert sh(workspace, "echo 2 >> a; rm -r d; mkdir n; echo n > n/n", strategy=way).ok
            assert workspace.session().undo().ok
            assert tree(os.fsencode(workspace.root)) == before

    def test_another_process_goes_on_from_what_this_one_knew(
        self, workspace: TempWorkspace, tmp_path: Path, way: str
    ) -> None:
        plant(workspace.root, {"a": "1\n", "b": "1\n"})
        sh(workspace, "echo 2 > a", strategy=way)
        workspace.close()
        plant(workspace.root, {"b": "person\n"})
        again = open_temp_workspace(tmp_path)
        assert sh(again, "echo 3 > b", strategy=way).changes == [{"path": "b", "kind": "modified"}]
        assert again.session().undo().ok and (again.root / "b").read_text() == "person\n"
        again.close()

    def test_two_commands_at_once_each_have_a_window(self, workspace: TempWorkspace, tmp_path: Path, way: str) -> None:
        plant(workspace.root, {"a": "1\n", "b": "1\n"})
        reached, go = tmp_path / "reached", tmp_path / "go"
        os.mkfifo(reached)
        os.mkfifo(go)
        found: list[Any] = []
        script = f"echo 2 > a; echo > {reached}; read x < {go}"
        work = threading.Thread(target=lambda: found.append(sh(workspace, script, strategy=way)))
        work.start()
        reached.read_text()
        inner = sh(workspace, "echo 2 > b", strategy=way)
        go.write_text("\n")
        work.join()
        assert inner.changes == [{"path": "b", "kind": "modified"}]
        assert {"path": "a", "kind": "modified"} in found[0].changes
        assert {"path": "b", "reason": "ambiguous"} in found[0].coverage
        workspace.session().undo()
        workspace.session().undo()
        assert (workspace.root / "a").read_text() == (workspace.root / "b").read_text() == "1\n"


@pytest.mark.parametrize("way", ["scan", "watch"])
def test_the_mark_of_a_window_is_removed_with_it(workspace: TempWorkspace, tmp_path: Path, way: str) -> None:
    """What others did while it was open, and took back again."""
    plant(workspace.root, {"a": "1\n", "b": "1\n"})
    reached, go = tmp_path / "reached", tmp_path / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    work = threading.Thread(target=lambda: sh(workspace, f"echo 2 > a; echo > {reached}; read x < {go}", strategy=way))
    work.start()
    reached.read_text()
    sh(workspace, "echo 2 > b; echo new > c", strategy=way)
    sh(workspace, "echo 1 > b; rm c", strategy=way)
    go.write_text("\n")
    work.join()
    with workspace.open_root.ledger.store.read() as tx:
        assert tx.select(TOUCHES) == []


def test_a_kept_watcher_is_taken_where_notify_cannot_be_had(workspace: TempWorkspace) -> None:
    assert not baseline_cache_of(workspace.open_root).is_watching
    sh(workspace, "echo 1 > a", strategy="watch")
    assert baseline_cache_of(workspace.open_root).is_watching
    workspace.close()
    assert not baseline_cache_of(workspace.open_root).is_watching
