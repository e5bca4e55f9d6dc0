"""The `watch` way: the kernel's own list of what changed in a window of time, by inotify.

A watch per folder, set once and kept between commands. A folder that appears, or opens, is watched from then on and
everything in it counts as touched, because it may have been filled before the watch was there. When the kernel's queue
runs over, only a scan can tell. The other names of a hard-linked file and late mmap stores are not seen: the scan is
the audit.
"""

from __future__ import annotations

import os

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.faults import fault_of_os_error
from mulligan.values.paths import is_inside
from mulligan.values.plain import plain
from mulligan.workspace.exec import kernel
from mulligan.workspace.exec.inotify import (
    ATTRIB,
    CLOSE_WRITE,
    CREATE,
    DELETE,
    DO_NOT_FOLLOW,
    EXCLUDE_UNLINKED,
    IGNORED,
    IS_FOLDER,
    MODIFY,
    MOVED_FROM,
    MOVED_TO,
    ONLY_FOLDERS,
    OVERFLOW,
    events_in,
)

_MASK = MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE
_HOW = ONLY_FOLDERS | DO_NOT_FOLLOW | EXCLUDE_UNLINKED

_READ_BYTES = 1 << 18

_PLACED, _MORE = 1, 2
"""What is done to a path is added up: nothing for what leaves it, one for what is moved there, two for all else."""


@plain(slots=True, frozen=True)
class Dirty:
    """Paths that changed since the last time. With `overflowed` there may be more."""

    paths: frozenset[bytes] = frozenset()
    moved_away: frozenset[bytes] = frozenset()
    """folders that were moved: everything that was below them is touched, though the kernel does not list it"""
    overflowed: bool = False
    placed: frozenset[bytes] = frozenset()
    """of the paths, those to which something was moved once, and nothing else was done but to move things away"""


class Watcher:
    """Watches a whole tree. For any thread; close it. Raises a fault when the kernel gives no more watches."""

    def __init__(self, root: bytes, skip: frozenset[bytes] = frozenset()) -> None:
        self._root = root
        self._skip = skip
        self._lock = fork_safe_lock()
        self._fd = kernel.inotify_init()
        self._paths: dict[int, bytes] = {}
        self._watches: dict[bytes, int] = {}
        self._deeds: dict[bytes, int] = {}
        self._moved_away: set[bytes] = set()
        self._overflowed = False
        try:
            self._add_tree(root)
        except OSError as error:
            os.close(self._fd)
            raise fault_of_os_error(error, "Watching the workspace") from error

    def fileno(self) -> int:
        return self._fd

    def take(self) -> Dirty:
        """Everything since the last `take`."""
        with self._lock:
            self._drain()
            placed = frozenset(path for path, deeds in self._deeds.items() if deeds == _PLACED)
            found = Dirty(frozenset(self._deeds), frozenset(self._moved_away), self._overflowed, placed)
            self._deeds, self._moved_away, self._overflowed = {}, set(), False
            return found

    def drain(self) -> None:
        """Empty the kernel's queue, so that it does not run over; `take` still gives it all."""
        with self._lock:
            self._drain()

    def close(self) -> None:
        os.close(self._fd)

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            for watch, mask, name in events_in(data):
                self._note(watch, mask, name)

    def _note(self, watch: int, mask: int, name: bytes) -> None:
        if mask & OVERFLOW:
            self._overflowed = True
            return
        folder = self._paths.get(watch)
        if folder is None:
            return  # of a folder that moved away; its new place was read whole
        if mask & IGNORED:
            self._forget(watch, folder)
            return
        path = folder + b"/" + name if name else folder
        deed = _PLACED if mask & MOVED_TO else 0 if mask & MOVED_FROM else _MORE
        self._deeds[path] = self._deeds.get(path, 0) + deed
        if mask & IS_FOLDER and name:
            self._note_folder(path, mask)

    def _note_folder(self, path: bytes, mask: int) -> None:
        if mask & MOVED_FROM:
            self._moved_away.add(path)
            self._drop_tree(path)
        elif mask & (CREATE | MOVED_TO) or (mask & ATTRIB and path not in self._watches):
            try:
                self._add_tree(path, is_new=True)
            except OSError:
                self._overflowed = True  # no more watches to be had

    def _add_tree(self, top: bytes, *, is_new: bool = False) -> None:
        """What is in a folder that is new to us counts as touched."""
        queue = [top]
        while queue:
            folder = queue.pop()
            if folder in self._skip or not self._add(folder):
                continue
            try:
                with os.scandir(folder) as entries:
                    found = list(entries)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
            queue.extend(entry.path for entry in found if entry.is_dir(follow_symlinks=False))
            self._deeds.update((entry.path, _MORE) for entry in found if is_new)

    def _add(self, folder: bytes) -> bool:
        try:
            watch = kernel.inotify_add_watch(self._fd, folder, _MASK | _HOW)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False
        self._paths[watch] = folder
        self._watches[folder] = watch
        return True

    def _forget(self, watch: int, folder: bytes) -> None:
        self._paths.pop(watch, None)
        if self._watches.get(folder) == watch:
            del self._watches[folder]

    def _drop_tree(self, top: bytes) -> None:
        """A folder that moved keeps its watches under a name that is no longer its own: let them go."""
        gone = [path for path in self._watches if is_inside(path, top)]
        for path in gone:
            watch = self._watches.pop(path)
            self._paths.pop(watch, None)
            self._deeds[path] = _MORE
            try:
                kernel.inotify_rm_watch(self._fd, watch)
            except OSError:
                continue  # the kernel dropped it already
