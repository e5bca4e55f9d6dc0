"""Run a command inside a call; what the command changes becomes part of the call.

A capture strategy finds the changes: `notify` before each change, `scan` and `watch` afterwards, `overlay` in a copy.
Mulligan does not make these changes, so abort follows the rules of recovery: it stores what is there, then restores
the preimage. Mulligan neither captures nor removes new objects in git's store if the repository was there before, so
a commit that a command made is never lost.

`scan` and `watch` see a capture window: what changed between two scans, but not who changed it. Before the command
starts, the baseline in the store has what every path was, so recovery works even if Mulligan is killed in the middle
(see `recovery`). The baseline stays in memory and its watcher goes on watching, so that the next window opens at once.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

from mulligan.exec.capture.notify import Capture, CaughtPaths, Coverage, Notify, StrategyName
from mulligan.exec.capture.overlay import Overlay
from mulligan.exec.capture.touched_paths import below
from mulligan.exec.command import Command, Sink
from mulligan.exec.pump import CommandHandle
from mulligan.exec.run import CaptureMeans, CommandResult, WindowName, run_captured
from mulligan.exec.start import StartOptions
from mulligan.history.apply_overlay import OverlayStart, apply_overlay
from mulligan.history.baseline import Baseline, BaselineChange, forget_window_touches
from mulligan.history.call import Call
from mulligan.history.command_changes import FoundChange
from mulligan.history.git_changes import LinkedGit, is_object, repository_of
from mulligan.history.ledger import newest_wseq
from mulligan.history.log import workspace_of
from mulligan.history.observe import record_changes
from mulligan.history.open_root import OpenRoot
from mulligan.history.permissions import is_shut, opened_up
from mulligan.history.recovery import closed_mark
from mulligan.history.tables import CHANGES, OPEN, TOUCHES, WATCH_WINDOWS, WSEQ_END, WatchWindowRow
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.protocol import Tx
from mulligan.values.entries import ABSENT, Absent
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, is_inside, path_bytes, path_from_bytes, to_wire

Strategy = Literal["notify", "watch", "scan", "overlay", "bare"]

_MARKS = "windows"
_NEVER_WATCHED = 1 << 62


@fast_dataclass(slots=True, frozen=True)
class RunOptions:
    """How to run a command. `only_success`: drop what the command changed unless it exits with 0."""

    strategy: Strategy | None = None
    isolate: bool = False
    deadline: float | None = None
    handle: CommandHandle | None = None
    only_success: bool = False


def run_in_call(open_root: OpenRoot, call: Call, command: Command, *, sink: Sink, how: RunOptions) -> CommandResult:
    """Run a command to its end. What it changed is then part of the call; the caller commits or aborts."""
    if how.strategy not in ("watch", "scan"):
        # A capture window begins the call in the transaction that opens the window.
        call.commands.begin()
    start = OverlayStart.now(open_root, call) if how.isolate or how.strategy == "overlay" else None
    begun: list[Capture] = []
    means = CaptureMeans(
        CallWitness(open_root, call, command.root),
        window=lambda name: CaptureWindow(open_root, call, name),
        is_watching=baseline_cache_of(open_root).is_watching,
        begun=begun.append,
    )
    # An interrupt must not lose what the command did: the `finally` below needs to know.
    finished = False
    linked_git = LinkedGit(command.root)
    linked_git.read()
    try:
        ran, capture = run_captured(
            command,
            means,
            strategy=how.strategy,
            isolate=how.isolate,
            sink=sink,
            handle=how.handle,
            deadline=how.deadline,
        )
        finished = True
    finally:
        if not finished:
            _absorb_unfinished(call, command.root, begun)
        if (note := linked_git.note(open_root.ledger.blobs.store)) is not None:
            call.note_git(note)
    is_git_stored = note is not None and "blob_ref" in note
    _cover(call, command.root, [one for one in ran.coverage if not (is_git_stored and linked_git.restores(one[0]))])
    keeps = not (ran.timed_out or ran.cancelled or (how.only_success and ran.exit_code != 0))
    if isinstance(capture, Overlay):
        assert start is not None, "an overlay is used only if the caller asks for it"
        try:
            if keeps:
                ran = replace(ran, given_way=apply_overlay(open_root, call, capture.changes, start=start))
        finally:
            capture.close()
    elif isinstance(capture, CaptureWindow):
        capture.record(keeps=keeps)
        _note_ambiguous(open_root, call, capture)
    elif isinstance(capture, Notify):
        _absorb_all(call, command.root, capture, keep=keeps)
    return ran


class CallWitness:
    """The preimage keeper of a command: the supervisor calls it before each change, and it returns when the preimage is
    durable.
    """

    def __init__(self, open_root: OpenRoot, call: Call, root: bytes) -> None:
        self._open_root = open_root
        self._call = call
        self._root = root

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        inner = paths_below(self._root, paths)
        # A new object of git has no preimage, and no undo removes it.
        captured = [path for path in inner if not is_object(path) or self._exists(path)]
        try:
            self._call.commands.about_to_change(captured, going=going)
        except MulliganError as error:
            self._call.note_if_store_was_full(error)
            raise

    def has(self, path: bytes) -> bool:
        """Whether a path still is what it was before the call, as far as the call knows that."""
        befores = {inner: self._call.commands.before_of(inner) for inner in paths_below(self._root, [path])}
        return all(one is None or self._open_root.image(inner).holds(one) for inner, one in befores.items())

    def _exists(self, path: RepoPath) -> bool:
        return os.path.lexists(os.path.join(self._root, path_bytes(path)))


def paths_below(root: bytes, paths: Iterable[bytes]) -> list[RepoPath]:
    """Absolute paths as paths below the root, without the root itself, in byte order."""
    inner = sorted(path[len(root) :].lstrip(b"/") for path in paths)
    return [path_from_bytes(path) for path in inner if path]


# The changes of a command become changes of the call.


def _absorb_unfinished(call: Call, root: bytes, begun: Iterable[Capture]) -> None:
    """Add what an interrupted or failed command has done so far to the call, which will be aborted."""
    for capture in begun:
        if isinstance(capture, Notify):
            _cover(call, root, capture.caught.coverage)
            _absorb_all(call, root, capture, keep=True)
            _absorb_opening(call, _may_have_changed(call, root))
        elif isinstance(capture, CaptureWindow) and capture.is_open:
            _cover(call, root, capture.finish_scan())
            capture.record(keeps=False)


def _may_have_changed(call: Call, root: bytes) -> list[RepoPath]:
    """What a command may have changed that `notify` did not follow to its end.

    All paths that it was about to change, and everything below the new folders among them.
    """
    found = dict.fromkeys(call.commands.announced_paths())
    for path in list(found):
        if isinstance(call.commands.before_of(path), Absent):
            with opened_up(call.disk, path):
                found |= dict.fromkeys(paths_below(root, below(os.path.join(root, path_bytes(path)))))
    return sorted(found, key=path_bytes)


def _absorb_all(call: Call, root: bytes, capture: Notify, *, keep: bool) -> None:
    try:
        _absorb(call, root, capture.caught, keep=keep)
    finally:
        # Another process may have written to these files after the command and before Mulligan read them.
        late = capture.late()
        _absorb(call, root, CaughtPaths(late, shared=late), keep=True)


def _absorb(call: Call, root: bytes, caught: CaughtPaths, *, keep: bool) -> None:
    paths = paths_below(root, caught.touched)
    touched = frozenset(paths)
    ours = [path for path in paths if not _is_new_object(call, path, touched)]
    # Another process wrote to these paths too. Mulligan cannot say whose the bytes are, so an abort leaves them, also
    # an abort because the store is full.
    shared = paths_below(root, caught.shared)
    try:
        _absorb_opening(call, ours, keep=keep or bool(shared))
    finally:
        if shared:
            call.commands.leave_in_place(shared)
    if not shared:
        return
    changed = {change.path for change in call.changes()}
    call.coverage += [{"path": to_wire(path), "reason": "ambiguous"} for path in shared if path in changed]


def _absorb_opening(call: Call, paths: Sequence[RepoPath], *, keep: bool = True) -> None:
    """Absorb paths. Folders that the command made unreadable, parents first, are open while Mulligan reads in them."""
    shut = set[RepoPath]()
    with ExitStack() as closing:
        for path in paths:
            if is_shut(call.disk, path):
                shut.add(path)
                # Runs after the folder is shut again, so that the call records the mode that the command gave it.
                closing.callback(call.commands.absorb, [path], keep=keep)
                closing.enter_context(opened_up(call.disk, path))
        call.commands.absorb([path for path in paths if path not in shut], keep=keep)


def _is_new_object(call: Call, path: RepoPath, touched: frozenset[RepoPath]) -> bool:
    """Whether a path is an object that the command added to a repository that was there before."""
    repository = repository_of(path)
    if repository is None or not is_object(path) or not isinstance(call.commands.before_of(path) or ABSENT, Absent):
        return False
    is_repository_new = repository in touched and isinstance(call.commands.before_of(repository) or ABSENT, Absent)
    return not is_repository_new


def _note_ambiguous(open_root: OpenRoot, call: Call, window: CaptureWindow) -> None:
    """Note the paths for which another call has recorded a change since the window opened."""
    with open_root.ledger.store.read() as tx:
        if newest_wseq(tx, workspace_of(tx, open_root)) == window.since:
            return
        for change in window.changes:
            place = open_root.disk.root.place_of(change.path)
            if tx.select(CHANGES, {"place": place}, between=("wseq", window.since + 1, WSEQ_END), limit=1):
                call.coverage.append({"path": to_wire(change.path), "reason": "ambiguous"})


def _cover(call: Call, root: bytes, coverage: Iterable[tuple[bytes, str]]) -> None:
    for path, reason in coverage:
        inner = is_inside(path, root) and path != root
        shown = path_from_bytes(path[len(root) :].lstrip(b"/")) if inner else RepoPath(os.fsdecode(path))
        call.coverage.append({"path": to_wire(shown), "reason": reason})


# Capture windows.


class CaptureWindow:
    """One command of a call between two scans. A `Capture`; `record` what it found when the command is over."""

    def __init__(self, open_root: OpenRoot, call: Call, name: WindowName) -> None:
        self.name: StrategyName = name
        self._strategy: WindowName = name
        self._open_root = open_root
        self._call = call
        self._prepared: PreparedWindow | None = None
        self._is_scanned = False
        self._are_contents_stored = True
        self.changes: list[BaselineChange] = []
        self.since = 0
        """the newest record of the workspace when the window opened"""

    @property
    def is_open(self) -> bool:
        """Whether `record` is still to be called."""
        return self._prepared is not None

    def begin(self, command: Command) -> StartOptions:
        """Open the window. What every path is at this moment is in the store when this returns."""
        prepared = baseline_cache_of(self._open_root).acquire(self._strategy)
        try:
            started_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
            # After the start time is taken: a change during this scan then counts as possibly the command's.
            self._bring_up_to_date(prepared.baseline)
            self._open(prepared, started_ns)
            self._prepared = prepared
        finally:
            if not self.is_open:
                prepared.close()
        watcher = prepared.baseline.watcher
        return StartOptions(
            mark=-1 if prepared.mark is None else prepared.mark.fd,
            tended=None if watcher is None else (watcher.fileno(), watcher.drain),
        )

    def _bring_up_to_date(self, baseline: Baseline) -> None:
        """Record what changed since the last window as external, and read every file that is not read yet."""
        record_changes(self._open_root, baseline, full=self._strategy == "scan")
        while not baseline.is_complete:
            baseline.read_contents(math.inf)
            record_changes(self._open_root, baseline)
        baseline.special_paths.clear()
        baseline.unreadable_paths.clear()

    def _open(self, prepared: PreparedWindow, started_ns: int) -> None:
        if prepared.mark is not None:
            prepared.mark.begin(started_ns)
        path = "" if prepared.mark is None else prepared.mark.path
        with self._open_root.ledger.store.write() as tx:
            self._call.commands.begin_in(tx)
            # A process may have died after its call had ended and before it deleted the window.
            _forget_ended_windows(tx)
            self._forget(tx)
            self.since = newest_wseq(tx, workspace_of(tx, self._open_root))
            tx.put(WATCH_WINDOWS, WatchWindowRow(self._call.id, self._open_root.root.id, self.since, started_ns, path))
            prepared.baseline.publish(tx)
        self._call.commands.mark_begun()
        self._call.at_end.append(self._end_with_call)
        prepared.baseline.mark_published()

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> CaughtPaths:
        assert self._prepared is not None
        self.changes = self._prepared.baseline.find_changes(full=self._strategy == "scan")
        self._is_scanned = True
        absolute = self._open_root.disk.root.absolute
        return CaughtPaths(
            frozenset(absolute(one.path) for one in self.changes), self._coverage(), attribution="window"
        )

    def finish_scan(self) -> Coverage:
        """Scan if `end` did not, or failed: then only the rows in the store are to be trusted."""
        assert self._prepared is not None
        if not self._is_scanned:
            try:
                self._scan_from_rows(self._prepared, store_contents=True)
            except MulliganError:
                # A full store must not keep the call from being rolled back.
                self._scan_from_rows(self._prepared, store_contents=False)
            self._is_scanned = True
        return self._coverage()

    def _scan_from_rows(self, prepared: PreparedWindow, *, store_contents: bool) -> None:
        prepared.baseline.close()
        prepared.baseline = baseline = Baseline(self._open_root, watched_from=_NEVER_WATCHED)
        self.changes = baseline.find_changes(full=True, store_contents=store_contents) if baseline.load() else []
        self._are_contents_stored = store_contents

    def _coverage(self) -> Coverage:
        assert self._prepared is not None
        absolute, baseline = self._open_root.disk.root.absolute, self._prepared.baseline
        reasons = {absolute(one.path): "hard_link" for one in self.changes if one.linked_outside}
        reasons |= {absolute(one.path): "no_baseline" for one in self.changes if one.before is None}
        reasons |= dict.fromkeys(baseline.special_paths, "special_file")
        reasons |= dict.fromkeys(baseline.unreadable_paths, "unreadable")
        reasons |= {absolute(one.path): "unstable" for one in self.changes if one.unstable}
        return tuple(sorted(reasons.items()))

    def record(self, *, keeps: bool) -> None:
        """Make the changes the call's, durably, and close the window.

        Without `keeps` the caller is about to roll them back, and so it is if this fails. The store has the new bytes
        all the same, if it takes them: they may be another process's.
        """
        prepared, self._prepared = self._prepared, None
        assert prepared is not None and self._is_scanned
        done = False
        try:
            if self.changes:
                self._record_changes(prepared.baseline, keeps=keeps)
            if prepared.mark is not None:
                prepared.mark.set_closed()
            done = True
        finally:
            if not done:
                prepared.close_keeping_mark()
        baseline_cache_of(self._open_root).release(prepared)

    def _record_changes(self, baseline: Baseline, *, keeps: bool) -> None:
        # The scan could not read these: they are too large, or we have no permission.
        unread = [one.path for one in self.changes if one.before is not None and one.after is None]
        if keeps:
            self._record_found(self._forget, baseline.publish)
            baseline.mark_published()
            self._call.commands.absorb(unread)
        else:
            self._record_found(self._forget, *([baseline.store_small_contents] if self._are_contents_stored else ()))
            baseline.revert_last_scan()
            self._call.at_end.append(partial(self._note_restored, baseline, baseline.scan_count))
            # Abort takes the permission to read where it restores.
            with suppress(PermissionError, MulliganError):
                self._call.commands.absorb(unread)
        self._call.commands.note_unattributed(one.path for one in self.changes if one.before is not None)

    def _record_found(self, *also: Callable[[Tx], None]) -> None:
        known = [
            FoundChange(one.path, one.before, one.after, one.image, one.link_count, bare=not self._are_contents_stored)
            for one in self.changes
            if one.before is not None
        ]
        self._call.commands.record_found(known, also=also)

    def _note_restored(self, baseline: Baseline, scan_count: int, _: Tx, status: str) -> bool:
        if status == "aborted":
            restored = {one.path for one in self.changes}.difference(self._call.conflicts)
            baseline.note_restored(restored, scan_count=scan_count)
        return False

    def _forget(self, tx: Tx) -> None:
        tx.delete(WATCH_WINDOWS, self._call.id)
        forget_window_touches(tx, self._call.id)

    def _end_with_call(self, tx: Tx, _: str) -> bool:
        """Refuse to end the call before the changes of its command are recorded.

        If they never are, recovery finds them from the store.
        """
        if self.is_open:
            words = "Mulligan could not record what a command changed. Open the store again to roll it back."
            raise fault("restore_failed", words, call=self._call.id)
        if not self.changes:
            self._forget(tx)
        return False


def _forget_ended_windows(tx: Tx) -> None:
    """Delete the windows of calls that have ended, and the touches that others wrote for them."""
    for window in tx.select(WATCH_WINDOWS):
        if tx.get(OPEN, window.call) is None:
            tx.delete(WATCH_WINDOWS, window.call)
            for touch in tx.select(TOUCHES, {"call": window.call}):
                tx.delete(TOUCHES, window.call, touch.path)


class EndMark:
    """A file in which the init process of a command writes when its last process ended, for recovery to read.

    Every process with the descriptor, Mulligan and the init process, holds the lock. Once the lock is free, nothing
    more will be written.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.path = os.path.join(directory, _MARKS, name)
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise fault_of_os_error(error, "Opening a window") from error
        # The init process inherits the descriptor, and with it the lock.
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self._started_ns = 0

    def begin(self, started_ns: int) -> None:
        """For a window that opens now."""
        self._started_ns = started_ns
        os.ftruncate(self.fd, 0)

    def set_closed(self) -> None:
        """The call has recorded everything that was in the window."""
        closed = closed_mark(self._started_ns)
        os.pwrite(self.fd, closed, 0)
        os.ftruncate(self.fd, len(closed))

    def close(self) -> None:
        os.close(self.fd)
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class PreparedWindow:
    """What one capture window needs: the baseline of its root, and a mark if the store is on a disk."""

    def __init__(self, open_root: OpenRoot, *, watched_from: int) -> None:
        directory = open_root.ledger.store.directory
        self.baseline = Baseline(open_root, watched_from=watched_from)
        self.mark = None if directory is None else EndMark(directory, open_root.ledger.ids.new())

    def close(self) -> None:
        self.baseline.close()
        if self.mark is not None:
            self.mark.close()

    def close_keeping_mark(self) -> None:
        """The mark stays on disk, for the recovery of what could not be recorded."""
        self.baseline.close()
        if self.mark is not None:
            os.close(self.mark.fd)


class BaselineCache:
    """Keeps the baseline of one open root between capture windows.

    One window at a time uses it; a window that runs at the same time makes its own.
    """

    def __init__(self, open_root: OpenRoot) -> None:
        self._open_root = open_root
        self._lock = fork_safe_lock()
        self._idle: PreparedWindow | None = None
        self._is_closed = False

    @property
    def is_watching(self) -> bool:
        with self._lock:
            return self._idle is not None and self._idle.baseline.watcher is not None

    def acquire(self, strategy: WindowName) -> PreparedWindow:
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and strategy == "watch" and idle.baseline.watcher is None:
            idle.close()
            idle = None
        return idle or PreparedWindow(self._open_root, watched_from=0 if strategy == "watch" else _NEVER_WATCHED)

    def release(self, prepared: PreparedWindow) -> None:
        """Only for a baseline that agrees with the store."""
        with self._lock:
            if self._idle is None and not self._is_closed:
                self._idle = prepared
                return
        prepared.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, None, True
        if idle is not None:
            idle.close()


_CACHES: WeakKeyDictionary[OpenRoot, BaselineCache] = WeakKeyDictionary()
_CACHES_LOCK = fork_safe_lock()


def baseline_cache_of(open_root: OpenRoot) -> BaselineCache:
    with _CACHES_LOCK:
        if open_root not in _CACHES:
            _CACHES[open_root] = cache = BaselineCache(open_root)
            open_root.at_close(cache.close)
        return _CACHES[open_root]
