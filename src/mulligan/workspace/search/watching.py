"""Hearing of changes in a walked tree, so that nobody has to look whether there were any.

A watch per directory, by inotify, set through the open directory before it is listed. The kernel queues an event before
the call that made a change returns, so whoever changed something and then asks gets the new answer. Not heard are a
change through another name of a file (so a file with several is asked every time) and a store into memory mapped from a
file, until the last map of it is gone. Where there is no inotify, or no more of it to be had, nothing is vouched for.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from mulligan.values.paths import ROOT
from mulligan.workspace.search.stamps import mounts

DIRECTORIES_MIN = 64
"""A smaller tree is looked at quickly enough."""
DIRECTORIES_MAX = 50_000
"""The kernel keeps about a kilobyte for each."""

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED, _IS_DIRECTORY = 0x400, 0x800, 0x2000, 0x4000, 0x8000, 1 << 30
_ONLY_DIRECTORIES = 0x01000000
_ENTRIES = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_MASK = _ENTRIES | _MODIFY | _ATTRIB | _CLOSE_WRITE | _DELETE_SELF | _MOVE_SELF | _ONLY_DIRECTORIES
_EVENT = struct.Struct("=iIII")
_READ_BYTES = 1 << 18

_Name = tuple[str, str]


@dataclass(slots=True)
class Changes:
    """What was heard of, each with the number of the time it was asked for.

    `listings`: directories whose entries are others. `trees`: directories that may not be the ones they were, with all
    that is below them. `files`: by directory and name, whose times may be others. `made`: those that were not there
    before: each may be one more name of a file that was.
    """

    listings: dict[str, int] = field(default_factory=dict)
    trees: dict[str, int] = field(default_factory=dict)
    files: dict[_Name, int] = field(default_factory=dict)
    made: dict[_Name, int] = field(default_factory=dict)
    lost: int = 0
    """When one that was made was gone again, or may have been made where nothing is heard."""

    def __bool__(self) -> bool:
        return bool(self.listings or self.trees or self.files)

    def since(self, number: int) -> Changes:
        """Those heard of after that time."""
        return Changes(
            {path: at for path, at in self.listings.items() if at > number},
            {path: at for path, at in self.trees.items() if at > number},
            {name: at for name, at in self.files.items() if at > number},
            {name: at for name, at in self.made.items() if at > number},
            self.lost if self.lost > number else 0,
        )


class Watch:
    """Watches directories as they are walked. The descriptor lives as long as anybody holds the watch."""

    def __init__(self, fd: int, add: Callable[[int, bytes, int], int]) -> None:
        self._fd = fd
        self._add = add
        self._pid = os.getpid()
        self._mounts = mounts()
        self._paths: dict[int, str] = {}
        self._moving: set[int] = set()
        self._arrived: _Name | None = None
        self._lock = Lock()
        self.is_broken = False
        """Something may have gone unheard."""
        self.is_kept = False
        """Whoever keeps it also keeps what was heard: it tells nobody twice."""

    def __del__(self) -> None:
        os.close(self._fd)

    def add(self, dir_fd: int, path: str) -> None:
        """Before the directory is listed. By its descriptor: what is at its path by now may be something else."""
        if self.is_broken:
            return
        with self._lock:  # or else an event could be read before it is known whose it is
            try:
                self._paths[self._add(self._fd, b"/proc/self/fd/%d" % dir_fd, _MASK)] = path
            except OSError:
                self.is_broken = True
        if len(self._paths) > DIRECTORIES_MAX:
            self.is_broken = True

    def hear(self, changes: Changes, number: int) -> None:
        """Add what was heard since the last time, under this number. Look at `is_broken` afterwards."""
        if self._pid != os.getpid() or self._mounts != mounts():
            self.is_broken = True  # a fork shares the queue, and what is mounted over a directory hides it unheard
        with self._lock:
            while not self.is_broken:
                try:
                    data = os.read(self._fd, _READ_BYTES)
                except BlockingIOError:
                    break
                self._read(data, changes, number)
            if self._moving:
                changes.lost = number
                self._moving.clear()

    def _read(self, data: bytes, changes: Changes, number: int) -> None:
        at = 0
        while at < len(data):
            watch, mask, cookie, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            raw = data[at : at + length].rstrip(b"\0")
            self._note(watch, mask, raw, cookie=cookie, changes=changes, number=number)
            at += length

    def _note(self, watch: int, mask: int, raw: bytes, *, cookie: int, changes: Changes, number: int) -> None:
        path = self._paths.get(watch)
        if mask & (_OVERFLOW | _UNMOUNT):
            self.is_broken = True
        elif path is None:
            return  # one that was let go
        elif mask & _IGNORED:
            del self._paths[watch]
        elif mask & (_DELETE_SELF | _MOVE_SELF):
            changes.trees[path] = number
        elif not raw:
            changes.listings[path] = number  # its own mode: perhaps it can no longer be read
        else:
            name = raw.decode("utf-8", "surrogateescape")
            changes.files[path, name] = number
            if mask & _ENTRIES:
                changes.listings[path] = number
                self._follow(mask, cookie, (path, name), changes=changes, number=number)
                if mask & _IS_DIRECTORY:
                    changes.trees[name if path == ROOT else f"{path}/{name}"] = number

    def _follow(self, mask: int, cookie: int, key: _Name, *, changes: Changes, number: int) -> None:
        """Keep `made` true while files are renamed. What leaves where something just came was exchanged for that."""
        if mask & _IS_DIRECTORY:
            if mask & (_CREATE | _MOVED_TO):
                changes.lost = number  # what was done in it before it is watched is not heard
        elif mask & _CREATE:
            changes.made[key] = number
        elif mask & _MOVED_FROM:
            if key != self._arrived and changes.made.pop(key, 0):
                self._moving.add(cookie)
        elif key in changes.made:
            changes.lost = number
        elif cookie in self._moving:
            self._moving.remove(cookie)
            changes.made[key] = number
        self._arrived = key if mask & _MOVED_TO else None


def start_watch() -> Watch | None:
    """None where there is no such thing."""
    if sys.platform != "linux":
        return None
    # Only here: elsewhere there are no such calls to bind.
    from mulligan.workspace.exec.kernel import inotify_add_watch, inotify_init

    try:
        return Watch(inotify_init(), inotify_add_watch)
    except OSError:
        return None
