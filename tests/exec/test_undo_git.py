"""Git's own files: what a command does to a repository outlives its undo, or goes back with its abort."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mulligan.values.errors import MulliganError
from tests.exec.commands import git, plant, repository, seen, sh, told
from tests.exec.trees import tree
from tests.temp_workspace import TempWorkspace


class TestGit:
    @pytest.mark.req("D6.git_undo_leaves_alone", "D6.git_objects_kept")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_commit_inside_a_command_outlives_its_undo(self, workspace: TempWorkspace, way: str) -> None:
        repository(workspace.root, {"a": "1\n"})
        old, session = git(workspace.root, "rev-parse", "HEAD"), workspace.session()
        commit = "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two"
        assert sh(workspace, commit, strategy=way).exit_code == 0
        new = git(workspace.root, "rev-parse", "HEAD")
        planned = session.undo(dry_run=True).to_json()
        assert planned["git"] == [{"repository": ".git", "head": {"before": old, "after": new}}]
        assert planned["outcomes"] == [
            {"path": ".git", "outcome": "skipped", "reason": "git"},
            {"path": "a", "outcome": "restored"},
        ]
        assert session.undo().ok
        assert git(workspace.root, "rev-parse", "HEAD") == new != old
        assert git(workspace.root, "show", "HEAD:a") == "2"
        assert (workspace.root / "a").read_text() == "1\n"

    @pytest.mark.req("D6.git_restore_option")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_commit_is_undone_when_that_is_asked_for_and_its_objects_stay(
        self, workspace: TempWorkspace, way: str
    ) -> None:
        repository(workspace.root, {"a": "1\n"})
        old, session = git(workspace.root, "rev-parse", "HEAD"), workspace.session()
        sh(workspace, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two", strategy=way)
        new = git(workspace.root, "rev-parse", "HEAD")
        assert session.undo(git="restore").ok
        assert git(workspace.root, "rev-parse", "HEAD") == old
        assert git(workspace.root, "status", "--short") == ""
        assert git(workspace.root, "cat-file", "-t", new) == "commit"
        git(workspace.root, "fsck", "--strict")
        assert session.redo().ok
        assert git(workspace.root, "rev-parse", "HEAD") == new

    @pytest.mark.req("D6.git_restore_option")
    def test_an_index_that_git_only_refreshed_is_no_change_and_goes_along(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "1\n", "b": "b\n"})
        session = workspace.session()
        sh(workspace, "echo 2 > a; echo n > n; git add n; git -c user.name=u -c user.email=e commit -qam two")
        new = git(workspace.root, "rev-parse", "HEAD")
        undo: Callable[[], Any] = partial(session.undo, git="restore")
        for time_s, way in enumerate((undo, session.redo, undo), start=1):
            index = (workspace.root / ".git/index").read_bytes()
            os.utime(workspace.root / "b", (time_s, time_s))
            git(workspace.root, "update-index", "--refresh")
            assert (workspace.root / ".git/index").read_bytes() != index
            assert way().ok and git(workspace.root, "status", "--short") == ""
        plant(workspace.root, {"staged": "s\n"})
        git(workspace.root, "add", "staged")
        done = session.redo()
        assert [(one.path, one.reason) for one in done.outcomes if not one.is_fine] == [(".git/index", "binary")]
        assert git(workspace.root, "rev-parse", "HEAD") == new
        assert git(workspace.root, "ls-files", "staged") == "staged"

    def test_undoing_a_call_that_only_committed_moves_on_to_the_one_before(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "1\n"})
        session = workspace.session()
        sh(workspace, "echo 2 > a")
        sh(workspace, "git -c user.name=u -c user.email=e commit -qam two")
        assert session.undo().ok and (workspace.root / "a").read_text() == "2\n"
        assert session.undo().ok and (workspace.root / "a").read_text() == "1\n"

    @pytest.mark.req("D6.git_abort_puts_back")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_an_aborted_checkout_leaves_head_index_and_files(self, workspace: TempWorkspace, way: str) -> None:
        repository(workspace.root, {"a": "1\n", "gone": "g\n"})
        git(workspace.root, "checkout", "-qb", "other")
        plant(workspace.root, {"a": "2\n"})
        git(workspace.root, "rm", "-q", "gone")
        git(workspace.root, "commit", "-qam", "two")
        git(workspace.root, "checkout", "-q", "main")
        plant(workspace.root, {"staged": "s\n"})
        git(workspace.root, "add", "staged")
        before = seen(workspace)
        receipt = sh(workspace, "git checkout -q other && false", strategy=way, rollback_on="nonzero")
        assert told(receipt) == ("error", "nonzero_exit")
        assert seen(workspace) == before
        assert git(workspace.root, "status", "--short") == "A  staged"
        assert git(workspace.root, "symbolic-ref", "HEAD") == "refs/heads/main"

    @pytest.mark.req("D6.git_created_is_files", "W6.cloned_repo_removed")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_repository_made_by_a_call_is_ordinary_files(
        self, workspace: TempWorkspace, tmp_path: Path, way: str
    ) -> None:
        repository(tmp_path / "origin", {"x": "x\n"})
        before = tree(os.fsencode(workspace.root))
        failed = sh(workspace, f"git clone -q {tmp_path}/origin c && false", strategy=way, rollback_on="nonzero")
        assert told(failed) == ("error", "nonzero_exit") and tree(os.fsencode(workspace.root)) == before
        assert sh(workspace, f"git clone -q {tmp_path}/origin c", strategy=way).exit_code == 0
        after = tree(os.fsencode(workspace.root))
        assert workspace.session().undo().ok
        assert tree(os.fsencode(workspace.root)) == before
        assert workspace.session().redo().ok
        assert tree(os.fsencode(workspace.root)) == after

    @pytest.mark.req("D6.git_created_is_files")
    @pytest.mark.parametrize("way", ["notify", "overlay"])
    def test_a_repository_removed_by_a_call_comes_back_with_its_objects(
        self, workspace: TempWorkspace, way: str
    ) -> None:
        repository(workspace.root, {"a": "1\n"})
        before = tree(os.fsencode(workspace.root))
        sh(workspace, "rm -rf .git", strategy=way)
        assert not (workspace.root / ".git").exists()
        assert workspace.session().undo().ok
        assert tree(os.fsencode(workspace.root)) == before
        git(workspace.root, "fsck", "--strict")

    def test_a_scan_says_that_it_does_not_keep_objects(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "1\n"})
        receipt = sh(workspace, "rm -rf .git", strategy="scan")
        lost = {one["path"] for one in receipt.coverage if one["reason"] == "no_baseline"}
        assert lost and all(path.startswith(".git/objects") for path in lost)

    def test_a_persons_commit_made_meanwhile_is_never_overwritten(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "1\n", "b": "1\n"})
        sh(workspace, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam agent")
        plant(workspace.root, {"b": "person\n"})
        git(workspace.root, "commit", "-qam", "person")
        head = git(workspace.root, "rev-parse", "HEAD")
        assert workspace.session().undo().ok
        assert git(workspace.root, "rev-parse", "HEAD") == head
        assert (workspace.root / "b").read_text() == "person\n" and (workspace.root / "a").read_text() == "1\n"

    def test_a_git_that_runs_meanwhile_holds_the_abort_up_until_it_is_done(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"a": "1\n"})
        index = (workspace.root / ".git/index").read_bytes()
        with workspace.session().call() as call:
            call.exec(["sh", "-c", "echo 2 > a; git add a"])
            lock = workspace.root / ".git/index.lock"
            lock.touch()
            release = threading.Timer(0.1, lock.unlink)
            release.start()
            call.fail("no")
        release.join()
        assert (workspace.root / ".git/index").read_bytes() == index and not lock.exists()


@pytest.mark.req("D6.git_restore_option")
def test_a_commit_that_undo_kept_is_undone_afterwards_and_redone(workspace: TempWorkspace) -> None:
    repository(workspace.root, {"a": "1\n"})
    old, session = git(workspace.root, "rev-parse", "HEAD"), workspace.session()
    sh(workspace, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two")
    new = git(workspace.root, "rev-parse", "HEAD")
    call = session.undo().of[0]
    assert git(workspace.root, "rev-parse", "HEAD") == new
    assert session.undo(call, git="restore").ok
    assert git(workspace.root, "rev-parse", "HEAD") == old
    assert git(workspace.root, "status", "--short") == ""
    with pytest.raises(MulliganError) as caught:
        session.undo(call, git="restore")
    assert caught.value.code == "nothing_to_undo"
    assert session.redo().ok and git(workspace.root, "rev-parse", "HEAD") == new
    assert (workspace.root / "a").read_text() == "1\n"
    assert session.redo().ok and (workspace.root / "a").read_text() == "2\n"
    assert git(workspace.root, "status", "--short") == ""
