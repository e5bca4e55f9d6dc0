"""Who else was at work where the command was: what happened in its folders that it did not do itself.

The supervisor hears of every change before the command makes it; inotify tells of every change that was made, whoever
made it. What was made more often than the command asked for was made by somebody else: a person's save, a formatter, a
daemon. It is counted for each name: opened for writing and closed, created, removed, moved there. What happened to a
name before its preimage was taken is in the preimage, and does not count. The kernel may join equal events and a call
may fail after it was counted, so somebody can be missed; nobody is accused who was not there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import IntEnum

from mulligan.workspace.exec import kernel
from mulligan.workspace.exec.inotify import EXCLUDE_UNLINKED, MODIFY, ONLY_FOLDERS, OVERFLOW, events_in
from mulligan.workspace.exec.ledger import Witness

_READ_BYTES = 1 << 18
_DRAIN_EVERY = 256


class Deed(IntEnum):
    """What can be done to a name, as inotify calls it."""

    WRITTEN = 0x8
    MOVED_TO = 0x80
    CREATED = 0x100
    REMOVED = 0x200


_MASK = sum(Deed)
_BETWEEN = MODIFY
"""Not counted: it comes between two closings, so that the kernel does not make one of them."""


_spare: list[int] = []
_SPARE_MAX = 4
os.register_at_fork(after_in_child=_spare.clear)  # the parent's; a child that read from one would take its events


def _take() -> int:
    try:
        return _spare.pop()
    except IndexError:
        pass
    try:
        return kernel.inotify_init()
    except OSError:
        return -1


def _give_back(fd: int, watches: Iterable[int]) -> None:
    for watch in watches:
        with suppress(OSError):  # its folder is gone, and so is the watch
            kernel.inotify_rm_watch(fd, watch)
    _empty(fd)
    if len(_spare) < _SPARE_MAX:
        _spare.append(fd)
    else:
        os.close(fd)


def _empty(fd: int) -> None:
    """What is left to be read is of watches that are no more; their numbers are not used again."""
    with suppress(BlockingIOError):
        while os.read(fd, _READ_BYTES):
            pass


class Bystanders:
    """Stand between the command and its witness. For one thread. Without inotify it sees nobody. Close it."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._folders: dict[int, bytes] = {}
        self._watched: set[bytes] = set()
        self._asked: Counter[tuple[bytes, int]] = Counter()
        self._done: Counter[tuple[bytes, int]] = Counter()
        self._blind: set[bytes] = set()
        self._overflowed = False
        self._stops = 0
        self._fd = _take()

    def expect(self, path: bytes, *deeds: Deed) -> None:
        """The command is about to do this. From now on everything in that folder is counted."""
        if self._fd < 0:
            return
        self._watch(path[: path.rfind(b"/")] or b"/")
        for deed in deeds:
            self._asked[path, deed] += 1
        self._stops += 1
        if self._stops % _DRAIN_EVERY == 0:
            self._drain()

    def expect_move(self, old: bytes, new: bytes) -> None:
        """What was opened under the old name may be closed under the new one. A folder takes its watches along."""
        self.expect(old, Deed.MOVED_TO)
        self.expect(new, Deed.MOVED_TO)
        for one, other in ((old, new), (new, old)):
            if os.path.isdir(one):
                self._blind.add(other + b"/")
                self._blind.add(one + b"/")
        self._drain()
        still_open = self._still_open(old), self._still_open(new)
        self._asked[new, Deed.WRITTEN] += still_open[0]
        self._asked[old, Deed.WRITTEN] += still_open[1]

    def _still_open(self, path: bytes) -> int:
        return max(0, self._asked[path, Deed.WRITTEN] - self._done[path, Deed.WRITTEN])

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        """The command gets to these paths: the witness is told, and we count from the preimages on.

        He may have to wait for a call of ours that is at work there. What came meanwhile is in the preimage, if that
        is what is there now; and what comes after we have asked for that is counted in any case.
        """
        self._drain()
        self._begin_anew(paths)
        self._witness.about_to_change(paths, going=going)
        self._drain()
        meanwhile = [path for path in paths if any((path, deed) in self._done for deed in Deed)]
        self._begin_anew(path for path in meanwhile if self._witness.has(path))

    def _begin_anew(self, paths: Iterable[bytes]) -> None:
        for path in paths:
            for deed in Deed:
                self._done.pop((path, deed), None)

    def forgive(self, path: bytes) -> None:
        """Nobody knows what the command itself has done to it."""
        for deed in Deed:
            self._asked[path, deed] += 1 << 30

    def were_at(self, paths: frozenset[bytes]) -> frozenset[bytes]:
        """Which of these paths somebody else has changed as well."""
        self._drain()
        if self._overflowed:
            return frozenset()
        more = {path for (path, deed), count in self._done.items() if count > self._asked[path, deed]}
        return frozenset(path for path in more & paths if not path.startswith(tuple(self._blind) or (b"\0",)))

    def close(self) -> None:
        """The instance is kept for the next command: to close one with watches takes the kernel 8 ms."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _give_back(fd, self._folders)

    def _watch(self, folder: bytes) -> None:
        if folder in self._watched:
            return
        self._watched.add(folder)
        try:
            watch = kernel.inotify_add_watch(self._fd, folder, _MASK | _BETWEEN | ONLY_FOLDERS | EXCLUDE_UNLINKED)
        except OSError:
            return  # not there yet, not ours to see, or no more watches to be had
        self._folders[watch] = folder

    def _drain(self) -> None:
        while self._fd >= 0:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            for watch, mask, name in events_in(data):
                self._count(watch, mask, name)

    def _count(self, watch: int, mask: int, name: bytes) -> None:
        self._overflowed |= bool(mask & OVERFLOW)
        folder = self._folders.get(watch)
        if folder is not None and name and mask & _MASK:
            path = folder + name if folder == b"/" else b"%b/%b" % (folder, name)
            self._done[path, mask & _MASK] += 1
