"""`scan` and `watch`: what changed in a window of time, found afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mulligan.exec.capture.notify import Capture
from mulligan.exec.capture.scan import StatIndex
from mulligan.exec.command import Spools, command
from mulligan.exec.run import CommandResult, run
from mulligan.files.tree.watcher import Watcher
from tests.exec.change_kinds import KINDS, Kind, make, perform, wrong_after_putting_back
from tests.exec.commands import at_rest
from tests.exec.lanes import lane
from tests.exec.window_captures import NoCapture, Scanned, Watched

MISSED_BY_WATCH = {"another hard link, then removed", "new hard link, changed through it"}
"""An inotify event names the path that was used; the other name of the inode changes unseen."""


def real(path: Path) -> bytes:
    return os.fsencode(os.path.realpath(path))


def sh(text: str, root: Path, capture: Capture) -> CommandResult:
    return run(command(["sh", "-c", text], str(root)), capture=capture, sink=Spools())


def names(ran: CommandResult, root: Path) -> set[bytes]:
    return {os.path.relpath(path, real(root)) for path in ran.touched}


@pytest.mark.parametrize("kind", [lane("scan", kind, kind) for kind in KINDS], ids=lambda kind: kind.name)
def test_everything_a_scan_finds_comes_back(kind: Kind, tmp_path: Path) -> None:
    root = real(tmp_path)
    before = make(kind, root)
    assert wrong_after_putting_back(root, before, perform(kind, root, Scanned()).touched) == {}


@pytest.mark.parametrize("kind", [lane("watch", kind, kind) for kind in KINDS], ids=lambda kind: kind.name)
def test_everything_a_watcher_sees_comes_back(kind: Kind, tmp_path: Path) -> None:
    root = real(tmp_path)
    before = make(kind, root)
    watcher = Watcher(root)
    try:
        capture = Watched(watcher)
        ran = perform(kind, root, capture)
    finally:
        watcher.close()
    wrong = wrong_after_putting_back(root, before, ran.touched, moved_away=capture.dirty.moved_away)
    assert bool(wrong) == (kind.name in MISSED_BY_WATCH)


class TestScan:
    def test_an_unchanged_tree_is_untouched(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "a").write_text("a")
        at_rest(tmp_path.rglob("*"))
        before = StatIndex.take(real(tmp_path))
        assert before.again().touched_since(before) == frozenset()

    @pytest.mark.req("D7.scan_racy_rehashed")
    def test_a_change_just_before_the_first_scan_counts(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a")
        before = StatIndex.take(real(tmp_path))
        before._taken_ns = (tmp_path / "a").stat().st_ctime_ns  # however busy the machine is
        assert before.again().touched_since(before) == {real(tmp_path / "a")}

    def test_skipped_folders_are_not_searched(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        index = StatIndex.take(real(tmp_path), skip=frozenset({real(tmp_path / "d")}))
        (tmp_path / "d" / "a").write_text("a")
        assert real(tmp_path / "d" / "a") not in index.again().touched_since(index)


class TestWatch:
    def test_it_is_kept_between_commands(self, tmp_path: Path) -> None:
        watcher = Watcher(real(tmp_path))
        assert names(sh("mkdir d; echo a > d/a", tmp_path, Watched(watcher)), tmp_path) == {b"d", b"d/a"}
        assert names(sh("echo b > d/b", tmp_path, Watched(watcher)), tmp_path) == {b"d/b"}
        assert names(sh("mv d e; echo c > e/c", tmp_path, Watched(watcher)), tmp_path) >= {
            b"d",
            b"e",
            b"e/a",
            b"e/b",
            b"e/c",
        }
        assert names(sh("echo c >> e/c", tmp_path, Watched(watcher)), tmp_path) == {b"e/c"}
        watcher.close()

    def test_changes_before_the_command_are_reported_apart(self, tmp_path: Path) -> None:
        watcher = Watcher(real(tmp_path))
        (tmp_path / "person").write_text("mine")
        capture = Watched(watcher)
        ran = sh("echo a > agent", tmp_path, capture)
        assert names(ran, tmp_path) == {b"agent"}
        assert capture.before.paths == {real(tmp_path / "person")}
        watcher.close()

    def test_reading_a_file_is_no_change(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a")
        watcher = Watcher(real(tmp_path))
        assert names(sh("cat a; ls -R", tmp_path, Watched(watcher)), tmp_path) == set()
        watcher.close()

    def test_a_file_moved_to_a_path_once_differs_from_one_written_there(self, tmp_path: Path) -> None:
        for name in "abcde":
            (tmp_path / name).write_text(name)
        watcher = Watcher(real(tmp_path))
        script = (
            "echo > 1; mv 1 a; echo > 1; mv 1 b; echo > 1; mv 1 b; echo >> c; mv d f; echo > 1; mv 1 e; chmod 600 e"
        )
        sh(script, tmp_path, NoCapture())
        dirty = watcher.take()
        assert dirty.paths == {real(tmp_path / name) for name in "1abcdef"}
        assert dirty.placed == {real(tmp_path / name) for name in "af"}
        watcher.close()

    def test_after_a_queue_overflow_a_scan_finds_the_changes(self, tmp_path: Path) -> None:
        watcher = Watcher(real(tmp_path))
        index = StatIndex.take(real(tmp_path))
        many = f"i=0; while [ $i -lt {_queue_length() + 10} ]; do : >> a; : >> b; i=$((i+1)); done; echo z > last"
        sh(many, tmp_path, NoCapture())
        dirty = watcher.take()
        assert dirty.overflowed
        assert real(tmp_path / "last") in index.again().touched_since(index)
        watcher.close()


def _queue_length() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
