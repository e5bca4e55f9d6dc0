"""Git's own files: what a command does to a repository outlives its undo, or goes back with its abort."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benches import Bench
from exec.commands import git, plant, repository, seen, sh, told
from mulligan.values.faults import MulliganError
from workspace.exec.trees import tree


class TestGit:
    @pytest.mark.req("D6.git_undo_leaves_alone", "D6.git_objects_kept")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_commit_inside_a_command_outlives_its_undo(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n"})
        old, session = git(bench.root, "rev-parse", "HEAD"), bench.session()
        commit = "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two"
        assert sh(bench, commit, strategy=way).exit_code == 0
        new = git(bench.root, "rev-parse", "HEAD")
        planned = session.undo(dry_run=True).to_json()
        assert planned["git"] == [{"repository": ".git", "head": {"before": old, "after": new}}]
        assert planned["outcomes"] == [
            {"path": ".git", "outcome": "skipped", "reason": "git"},
            {"path": "a", "outcome": "restored"},
        ]
        assert session.undo().ok
        assert git(bench.root, "rev-parse", "HEAD") == new != old
        assert git(bench.root, "show", "HEAD:a") == "2"
        assert (bench.root / "a").read_text() == "1\n"

    @pytest.mark.req("D6.git_restore_option")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_commit_goes_back_when_that_is_asked_for_and_its_objects_stay(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n"})
        old, session = git(bench.root, "rev-parse", "HEAD"), bench.session()
        sh(bench, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two", strategy=way)
        new = git(bench.root, "rev-parse", "HEAD")
        assert session.undo(git="restore").ok
        assert git(bench.root, "rev-parse", "HEAD") == old
        assert git(bench.root, "status", "--short") == ""
        assert git(bench.root, "cat-file", "-t", new) == "commit"
        git(bench.root, "fsck", "--strict")
        assert session.redo().ok
        assert git(bench.root, "rev-parse", "HEAD") == new

    @pytest.mark.req("D6.git_restore_option")
    def test_an_index_that_git_only_refreshed_is_nobodys_change_and_goes_along(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n", "b": "b\n"})
        session = bench.session()
        sh(bench, "echo 2 > a; echo n > n; git add n; git -c user.name=u -c user.email=e commit -qam two")
        new = git(bench.root, "rev-parse", "HEAD")
        undo: Callable[[], Any] = partial(session.undo, git="restore")
        for time_s, way in enumerate((undo, session.redo, undo), start=1):
            index = (bench.root / ".git/index").read_bytes()
            os.utime(bench.root / "b", (time_s, time_s))
            git(bench.root, "update-index", "--refresh")
            assert (bench.root / ".git/index").read_bytes() != index
            assert way().ok and git(bench.root, "status", "--short") == ""
        plant(bench.root, {"staged": "s\n"})
        git(bench.root, "add", "staged")
        done = session.redo()
        assert [(one.path, one.reason) for one in done.outcomes if not one.is_fine] == [(".git/index", "binary")]
        assert git(bench.root, "rev-parse", "HEAD") == new
        assert git(bench.root, "ls-files", "staged") == "staged"

    def test_undoing_a_call_that_only_committed_moves_on_to_the_one_before(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n"})
        session = bench.session()
        sh(bench, "echo 2 > a")
        sh(bench, "git -c user.name=u -c user.email=e commit -qam two")
        assert session.undo().ok and (bench.root / "a").read_text() == "2\n"
        assert session.undo().ok and (bench.root / "a").read_text() == "1\n"

    @pytest.mark.req("D6.git_abort_puts_back")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_an_aborted_checkout_leaves_head_index_and_files(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n", "gone": "g\n"})
        git(bench.root, "checkout", "-qb", "other")
        plant(bench.root, {"a": "2\n"})
        git(bench.root, "rm", "-q", "gone")
        git(bench.root, "commit", "-qam", "two")
        git(bench.root, "checkout", "-q", "main")
        plant(bench.root, {"staged": "s\n"})
        git(bench.root, "add", "staged")
        before = seen(bench)
        receipt = sh(bench, "git checkout -q other && false", strategy=way, rollback_on="nonzero")
        assert told(receipt) == ("error", "nonzero_exit")
        assert seen(bench) == before
        assert git(bench.root, "status", "--short") == "A  staged"
        assert git(bench.root, "symbolic-ref", "HEAD") == "refs/heads/main"

    @pytest.mark.req("D6.git_created_is_files", "W6.cloned_repo_removed")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_repository_made_by_a_call_is_ordinary_files(self, bench: Bench, tmp_path: Path, way: str) -> None:
        repository(tmp_path / "origin", {"x": "x\n"})
        before = tree(os.fsencode(bench.root))
        failed = sh(bench, f"git clone -q {tmp_path}/origin c && false", strategy=way, rollback_on="nonzero")
        assert told(failed) == ("error", "nonzero_exit") and tree(os.fsencode(bench.root)) == before
        assert sh(bench, f"git clone -q {tmp_path}/origin c", strategy=way).exit_code == 0
        after = tree(os.fsencode(bench.root))
        assert bench.session().undo().ok
        assert tree(os.fsencode(bench.root)) == before
        assert bench.session().redo().ok
        assert tree(os.fsencode(bench.root)) == after

    @pytest.mark.req("D6.git_created_is_files")
    @pytest.mark.parametrize("way", ["notify", "overlay"])
    def test_a_repository_removed_by_a_call_comes_back_with_its_objects(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n"})
        before = tree(os.fsencode(bench.root))
        sh(bench, "rm -rf .git", strategy=way)
        assert not (bench.root / ".git").exists()
        assert bench.session().undo().ok
        assert tree(os.fsencode(bench.root)) == before
        git(bench.root, "fsck", "--strict")

    def test_a_scan_says_that_it_does_not_keep_objects(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n"})
        receipt = sh(bench, "rm -rf .git", strategy="scan")
        lost = {one["path"] for one in receipt.coverage if one["reason"] == "no_baseline"}
        assert lost and all(path.startswith(".git/objects") for path in lost)

    def test_a_persons_commit_made_meanwhile_is_never_overwritten(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n", "b": "1\n"})
        sh(bench, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam agent")
        plant(bench.root, {"b": "person\n"})
        git(bench.root, "commit", "-qam", "person")
        head = git(bench.root, "rev-parse", "HEAD")
        assert bench.session().undo().ok
        assert git(bench.root, "rev-parse", "HEAD") == head
        assert (bench.root / "b").read_text() == "person\n" and (bench.root / "a").read_text() == "1\n"

    def test_a_git_that_runs_meanwhile_holds_the_abort_up_until_it_is_done(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n"})
        index = (bench.root / ".git/index").read_bytes()
        with bench.session().call() as call:
            call.exec(["sh", "-c", "echo 2 > a; git add a"])
            lock = bench.root / ".git/index.lock"
            lock.touch()
            release = threading.Timer(0.1, lock.unlink)
            release.start()
            call.fail("no")
        release.join()
        assert (bench.root / ".git/index").read_bytes() == index and not lock.exists()


@pytest.mark.req("D6.git_restore_option")
def test_a_commit_that_undo_kept_is_undone_afterwards_and_redone(bench: Bench) -> None:
    repository(bench.root, {"a": "1\n"})
    old, session = git(bench.root, "rev-parse", "HEAD"), bench.session()
    sh(bench, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two")
    new = git(bench.root, "rev-parse", "HEAD")
    call = session.undo().of[0]
    assert git(bench.root, "rev-parse", "HEAD") == new
    assert session.undo(call, git="restore").ok
    assert git(bench.root, "rev-parse", "HEAD") == old
    assert git(bench.root, "status", "--short") == ""
    with pytest.raises(MulliganError) as caught:
        session.undo(call, git="restore")
    assert caught.value.code == "nothing_to_undo"
    assert session.redo().ok and git(bench.root, "rev-parse", "HEAD") == new
    assert (bench.root / "a").read_text() == "1\n"
    assert session.redo().ok and (bench.root / "a").read_text() == "2\n"
    assert git(bench.root, "status", "--short") == ""
