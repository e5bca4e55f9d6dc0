"""Windows: commands whose changes are seen only afterwards, by `scan` and `watch`.

What every path was is in the store before the command starts (see `kept`), so that it can be put back even if we are
killed in the middle of it (see `dead_windows`). Who changed a path in a window nobody knows, only that it changed
between two looks. The tree that was looked at stays in memory and its watcher goes on watching, so that the next window
opens at once.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

from mulligan.history.call import Call
from mulligan.history.dead_windows import CLOSED
from mulligan.history.desk import Desk
from mulligan.history.kept import Drift, KeptTree
from mulligan.history.kept_rows import forget_kept_for
from mulligan.history.ledger import newest_wseq
from mulligan.history.live import Learned
from mulligan.history.log import workspace_of
from mulligan.history.observing import take_stock
from mulligan.history.tables import OPEN, TOUCHES, WATCH_WINDOWS, WatchWindowRow
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.protocol import Tx
from mulligan.values.faults import MulliganError, fault, fault_of_os_error
from mulligan.values.paths import RepoPath
from mulligan.workspace.exec.capture import Caught, Coverage, StrategyName
from mulligan.workspace.exec.choose import WindowName
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.spawn import Extras

_MARKS = "windows"


class Mark:
    """A file in which a command's warden leaves the moment of its end, for whoever comes after us.

    It is locked by whoever has its descriptor, us and the warden: once the lock is free, nothing more will be written.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.path = os.path.join(directory, _MARKS, name)
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise fault_of_os_error(error, "Opening a window") from error
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def clear(self) -> None:
        os.ftruncate(self.fd, 0)

    def close_in_order(self) -> None:
        """Whatever was in the window is the call's by now."""
        os.pwrite(self.fd, CLOSED, 0)
        os.ftruncate(self.fd, len(CLOSED))

    def close(self) -> None:
        os.close(self.fd)
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class Ready:
    """What one window needs: the tree as it was last looked at, and a mark."""

    def __init__(self, desk: Desk, *, watched_from: int) -> None:
        directory = desk.ledger.store.directory
        self.tree = KeptTree(desk, watched_from=watched_from)
        self.mark = None if directory is None else Mark(directory, desk.ledger.ids.new())

    def close(self) -> None:
        self.tree.close()
        if self.mark is not None:
            self.mark.close()

    def leave(self) -> None:
        """The mark stays where it is, for whoever has to put back what we could not."""
        self.tree.close()
        if self.mark is not None:
            os.close(self.mark.fd)


class Lookout:
    """The tree of one desk, kept warm between windows. One window at a time has it; one beside it makes its own."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._lock = fork_safe_lock()
        self._ready: Ready | None = None
        self._is_closed = False

    @property
    def is_watching(self) -> bool:
        with self._lock:
            return self._ready is not None and self._ready.tree.watcher is not None

    def borrow(self, name: WindowName) -> Ready:
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None and name == "watch" and ready.tree.watcher is None:
            ready.close()
            ready = None
        return ready or Ready(self._desk, watched_from=0 if name == "watch" else _NEVER_WATCHED)

    def give_back(self, ready: Ready) -> None:
        """Only if it knows what it says it knows."""
        with self._lock:
            if self._ready is None and not self._is_closed:
                self._ready = ready
                return
        ready.close()

    def close(self) -> None:
        with self._lock:
            ready, self._ready, self._is_closed = self._ready, None, True
        if ready is not None:
            ready.close()


_NEVER_WATCHED = 1 << 62
_LOOKOUTS: WeakKeyDictionary[Desk, Lookout] = WeakKeyDictionary()
_LOOKOUTS_LOCK = fork_safe_lock()


def lookout_of(desk: Desk) -> Lookout:
    with _LOOKOUTS_LOCK:
        if desk not in _LOOKOUTS:
            _LOOKOUTS[desk] = lookout = Lookout(desk)
            desk.at_close(lookout.close)
        return _LOOKOUTS[desk]


class Window:
    """One command of a call, between two looks. A `Capture`; `take` what it found when the command is over."""

    def __init__(self, desk: Desk, call: Call, name: WindowName) -> None:
        self.name: StrategyName = name
        self._whole = name == "scan"
        self._borrowed: WindowName = name
        self._desk = desk
        self._call = call
        self._ready: Ready | None = None
        self._looked = False
        self._kept = True
        """whether the store has the bytes that the look found"""
        self.drifts: list[Drift] = []
        self.since = 0
        """the workspace's newest record when it was opened"""

    @property
    def is_open(self) -> bool:
        """Whether there is something to take."""
        return self._ready is not None

    # The command's side.

    def begin(self, command: Command) -> Extras:
        """From here on everything that changes is in the window; what was there before is in the store."""
        ready = lookout_of(self._desk).borrow(self._borrowed)
        try:
            started_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
            self._look_around(ready.tree)
            self._open(ready, started_ns)
            self._ready = ready
        finally:
            if not self.is_open:
                ready.close()
        watcher = ready.tree.watcher
        return Extras(
            mark=-1 if ready.mark is None else ready.mark.fd,
            tended=None if watcher is None else (watcher.fileno(), watcher.drain),
        )

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> Caught:
        assert self._ready is not None
        self.drifts = self._ready.tree.look(whole=self._whole)
        self._looked = True
        absolute = self._desk.disk.root.absolute
        return Caught(frozenset(absolute(one.path) for one in self.drifts), self._coverage(), attribution="window")

    def look(self) -> Coverage:
        """What it could not capture. If it broke in the middle of its look, what that found is lost; what the store
        has is not."""
        assert self._ready is not None
        if not self._looked:
            try:
                self._look_anew(self._ready)
            except MulliganError:  # what the store does not take must not keep anything from going back
                self._look_anew(self._ready, keep=False)
            self._looked = True
        return self._coverage()

    def _look_anew(self, ready: Ready, *, keep: bool = True) -> None:
        ready.tree.close()
        ready.tree = tree = KeptTree(self._desk, watched_from=_NEVER_WATCHED)
        self.drifts = tree.look(whole=True, keep=keep) if tree.restore() else []
        self._kept = keep

    def _coverage(self) -> Coverage:
        assert self._ready is not None
        absolute, tree = self._desk.disk.root.absolute, self._ready.tree
        lost = {absolute(one.path): "no_baseline" for one in self.drifts if one.before is None}
        linked = {absolute(one.path): "hard_link" for one in self.drifts if one.elsewhere}
        unseen = dict.fromkeys(tree.specials, "special_file") | dict.fromkeys(tree.closed, "unreadable")
        unstable = dict.fromkeys(tree.unstable, "unstable")
        return tuple(sorted((linked | lost | unseen | unstable).items()))

    def _look_around(self, tree: KeptTree) -> None:
        """What changed since the last window is somebody else's, and goes on record as such."""
        take_stock(self._desk, tree, whole=self._whole)
        while not tree.is_settled:
            tree.go_on(math.inf)
            take_stock(self._desk, tree)
        tree.specials.clear()
        tree.closed.clear()

    # The record's side.

    def _open(self, ready: Ready, started_ns: int) -> None:
        if ready.mark is not None:
            ready.mark.clear()
        with self._desk.ledger.store.write() as tx:
            self._call.begin_command_in(tx)
            _forget_ended(tx)
            self._forget(tx)
            self.since = newest_wseq(tx, workspace_of(tx, self._desk))
            path = "" if ready.mark is None else ready.mark.path
            tx.put(WATCH_WINDOWS, WatchWindowRow(self._call.id, self._desk.root.id, self.since, started_ns, path))
            ready.tree.publish(tx)
        self._call.has_begun()
        self._call.at_end.append(self._end_with_call)
        ready.tree.has_published()

    def take(self, *, stands: bool) -> None:
        """What changed in the window is the call's, durably; the window is closed with that.

        If it does not stand, it is about to be put back; so it is if this fails. Whoever wrote the bytes, they are in
        the store then, if that takes them.
        """
        ready, self._ready = self._ready, None
        assert ready is not None and self._looked
        taken = False
        try:
            self._put_on_record(ready.tree, stands=stands)
            if ready.mark is not None:
                ready.mark.close_in_order()
            taken = True
        finally:
            if not taken:
                ready.leave()
        lookout_of(self._desk).give_back(ready)

    def _put_on_record(self, tree: KeptTree, *, stands: bool) -> None:
        if not self.drifts:
            return
        if stands:
            self._learn(self._forget, tree.publish)
            tree.has_published()
            self._call.absorb(self._unread())
        else:
            self._learn(self._forget, *([tree.keep_bytes] if self._kept else ()))
            tree.take_back()
            self._call.at_end.append(partial(self._tell_of_return, tree, tree.looks))
            with suppress(PermissionError, MulliganError):  # whoever puts it back takes the right to read it
                self._call.absorb(self._unread())
        self._call.may_be_anybodys(one.path for one in self.drifts if one.before is not None)

    def _tell_of_return(self, tree: KeptTree, looks: int, _: Tx, status: str) -> bool:
        if status == "aborted":
            tree.were_put_back(set(self.paths()).difference(self._call.conflicts), since=looks)
        return False

    def _learn(self, *also: Callable[[Tx], None]) -> None:
        known = [
            Learned(one.path, one.before, one.after, one.seen, one.links, bare=not self._kept)
            for one in self.drifts
            if one.before is not None
        ]
        self._call.learn(known, also=also)

    def _unread(self) -> list[RepoPath]:
        """What was too large to be read along, or may not be read."""
        return [one.path for one in self.drifts if one.before is not None and one.after is None]

    def _forget(self, tx: Tx) -> None:
        tx.delete(WATCH_WINDOWS, self._call.id)
        forget_kept_for(tx, self._call.id)

    def _end_with_call(self, tx: Tx, _: str) -> bool:
        """A call does not end before it is known what a command did in it: the store has all it takes to find out."""
        if self.is_open:
            words = "What a command has changed could not be told. Opening the store again puts it back."
            raise fault("restore_failed", words, call=self._call.id)
        if not self.drifts:
            self._forget(tx)
        return False

    def has_company(self, tx: Tx) -> bool:
        """Whether anybody has put anything on record since it was opened."""
        return newest_wseq(tx, workspace_of(tx, self._desk)) != self.since

    def paths(self) -> list[RepoPath]:
        return [one.path for one in self.drifts]


def _forget_ended(tx: Tx) -> None:
    """Windows of calls that have ended, and what others kept for them."""
    for window in tx.select(WATCH_WINDOWS):
        if tx.get(OPEN, window.call) is None:
            tx.delete(WATCH_WINDOWS, window.call)
            for touch in tx.select(TOUCHES, {"call": window.call}):
                tx.delete(TOUCHES, window.call, touch.path)
