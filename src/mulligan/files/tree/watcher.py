"""Reports changes in a tree by inotify, so that nothing has to be scanned for them.

`read_events` is the one reader of inotify; `exec.capture.touched_paths` uses it too.

`Watch` has a watch on each walked directory, set through the open directory before it is listed. The kernel queues an
event before the changing system call returns, so a process that changes a file and then asks gets the new answer. Not
reported are a change through another name of a file (so the times of files with several names are read every time) and
a store into memory mapped from a file, until its last map is gone. Without inotify, or without free watches, nothing
counts as unchanged.

`Watcher` watches a whole tree, and finds what changed in a capture window. It has a watch on each folder, set once and
kept between commands. A new or newly readable folder is watched from then on, and everything in it counts as touched,
because it may have been filled before the watch was set. If the kernel's queue overflows, only a scan can tell what
changed. It misses the other names of a hard-linked file and late mmap stores, which a full scan finds.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import field
from threading import Lock
from typing import NamedTuple

from mulligan.files import kernel
from mulligan.files.tree.directories import mounts
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.errors import fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, is_inside

# A smaller tree is scanned quickly enough without watches.
DIRECTORIES_MIN = 64
# The kernel needs about a kilobyte for each watch.
DIRECTORIES_MAX = 50_000

MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, UNMOUNT, OVERFLOW, IGNORED, IS_FOLDER = 0x400, 0x800, 0x2000, 0x4000, 0x8000, 1 << 30
ONLY_FOLDERS, DO_NOT_FOLLOW, EXCLUDE_UNLINKED = 0x01000000, 0x02000000, 0x04000000

_ENTRIES = MOVED_FROM | MOVED_TO | CREATE | DELETE
_MASK = _ENTRIES | MODIFY | ATTRIB | CLOSE_WRITE
_EVENT = struct.Struct("=iIII")
_READ_BYTES = 1 << 16
_EVENT_MAX_BYTES = 16 + 256


class InotifyEvent(NamedTuple):
    """One event. The two halves of a rename have the same `cookie`."""

    watch: int
    mask: int
    cookie: int
    name: bytes


def read_events(fd: int) -> Iterator[InotifyEvent]:
    """The events that the kernel has queued so far."""
    while True:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            watch, mask, cookie, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            yield InotifyEvent(watch, mask, cookie, data[at : at + length].rstrip(b"\0"))
            at += length
        # The kernel passes on all events that fit, so a read that leaves room for the largest has emptied the queue.
        if len(data) < _READ_BYTES - _EVENT_MAX_BYTES:
            return


_Name = tuple[str, str]


@fast_dataclass(slots=True)
class Changes:
    """The reported changes, each with the number of the query that read it.

    `listings`: directories whose entries changed. `trees`: directories that may have been replaced, with everything
    below them. `files`: files by directory and name whose times may have changed. `made`: new names; each may be
    another name of an existing file.
    """

    listings: dict[str, int] = field(default_factory=dict)
    trees: dict[str, int] = field(default_factory=dict)
    files: dict[_Name, int] = field(default_factory=dict)
    made: dict[_Name, int] = field(default_factory=dict)
    # The number at which a new name was gone again, or may have been made in an unwatched directory.
    lost: int = 0

    def __bool__(self) -> bool:
        return bool(self.listings or self.trees or self.files)

    def since(self, number: int) -> Changes:
        """The changes after that query."""
        return Changes(
            {path: at for path, at in self.listings.items() if at > number},
            {path: at for path, at in self.trees.items() if at > number},
            {name: at for name, at in self.files.items() if at > number},
            {name: at for name, at in self.made.items() if at > number},
            self.lost if self.lost > number else 0,
        )


_WALK_MASK = _MASK | DELETE_SELF | MOVE_SELF | ONLY_FOLDERS


class Watch:
    """Watches directories as they are walked. The descriptor stays open while something refers to the watch."""

    def __init__(self) -> None:
        self._fd = kernel.inotify_init()
        self._pid = os.getpid()
        self._mounts = mounts()
        self._paths: dict[int, str] = {}
        self._moving: set[int] = set()
        self._arrived: _Name | None = None
        self._lock = Lock()
        # Whether a change may have been missed.
        self.is_broken = False
        # A cache that keeps the watch also keeps its changes, because each event can be read only once.
        self.is_kept = False

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def add(self, dir_fd: int, path: str) -> None:
        """Watch a directory, before it is listed.

        By its descriptor, because its path may name another directory by now.
        """
        if self.is_broken:
            return
        with self._lock:  # Otherwise an event could be read before its directory is noted.
            try:
                watch = kernel.inotify_add_watch(self._fd, b"/proc/self/fd/%d" % dir_fd, _WALK_MASK)
                self._paths[watch] = path
            except OSError:
                self.is_broken = True
        if len(self._paths) > DIRECTORIES_MAX:
            self.is_broken = True

    def hear(self, changes: Changes, number: int) -> None:
        """Read the new events and add them under this number. The caller checks `is_broken` afterwards."""
        if self._pid != os.getpid() or self._mounts != mounts():
            # A forked child shares the queue, and a mount over a directory hides it without an event.
            self.is_broken = True
        with self._lock:
            if not self.is_broken:
                for event in read_events(self._fd):
                    self._note(event, changes, number)
            if self._moving:
                changes.lost = number
                self._moving.clear()

    def _note(self, event: InotifyEvent, changes: Changes, number: int) -> None:
        path, mask = self._paths.get(event.watch), event.mask
        if mask & (OVERFLOW | UNMOUNT):
            self.is_broken = True
        elif path is None:
            return  # The watch was removed.
        elif mask & IGNORED:
            del self._paths[event.watch]
        elif mask & (DELETE_SELF | MOVE_SELF):
            changes.trees[path] = number
        elif not event.name:
            changes.listings[path] = number  # Its own mode changed, so it may be unreadable now.
        else:
            name = event.name.decode("utf-8", "surrogateescape")
            changes.files[path, name] = number
            if mask & _ENTRIES:
                changes.listings[path] = number
                self._follow(event, (path, name), changes, number)
                if mask & IS_FOLDER:
                    changes.trees[name if path == ROOT else f"{path}/{name}"] = number

    def _follow(self, event: InotifyEvent, key: _Name, changes: Changes, number: int) -> None:
        """Keep `made` correct while files are renamed.

        A file that leaves a name where another has just come was exchanged for it.
        """
        mask = event.mask
        if mask & IS_FOLDER:
            if mask & (CREATE | MOVED_TO):
                changes.lost = number  # Changes in it before its watch is set are not reported.
        elif mask & CREATE:
            changes.made[key] = number
        elif mask & MOVED_FROM:
            if key != self._arrived and changes.made.pop(key, 0):
                self._moving.add(event.cookie)
        elif key in changes.made:
            changes.lost = number
        elif event.cookie in self._moving:
            self._moving.remove(event.cookie)
            changes.made[key] = number
        self._arrived = key if mask & MOVED_TO else None


def start_watch() -> Watch | None:
    """A watch; None if the system has no inotify."""
    if sys.platform != "linux":
        return None
    try:
        return Watch()
    except OSError:
        return None


_WINDOW_MASK = _MASK | ONLY_FOLDERS | DO_NOT_FOLLOW | EXCLUDE_UNLINKED

# The changes of a path add up: 0 for a file that leaves it, 1 for one that is moved there, 2 for anything else.
_PLACED, _MORE = 1, 2


@fast_dataclass(slots=True, frozen=True)
class Dirty:
    """The paths that changed since the last `take`. With `overflowed` there may be more."""

    paths: frozenset[bytes] = frozenset()
    # Folders that were moved: everything below them counts as touched, though the kernel does not list it.
    moved_away: frozenset[bytes] = frozenset()
    overflowed: bool = False
    # The paths to which one file was moved, and where nothing else happened except that files left.
    placed: frozenset[bytes] = frozenset()


class Watcher:
    """Watches a whole tree. For any thread; close it. Raises a fault when the kernel gives no more watches."""

    def __init__(self, root: bytes, skip: frozenset[bytes] = frozenset()) -> None:
        self._root = root
        self._skip = skip
        self._lock = fork_safe_lock()
        self._fd = kernel.inotify_init()
        self._paths: dict[int, bytes] = {}
        self._watches: dict[bytes, int] = {}
        self._counts: dict[bytes, int] = {}
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
        """All changes since the last `take`."""
        with self._lock:
            self._drain()
            placed = frozenset(path for path, count in self._counts.items() if count == _PLACED)
            found = Dirty(frozenset(self._counts), frozenset(self._moved_away), self._overflowed, placed)
            self._counts, self._moved_away, self._overflowed = {}, set(), False
            return found

    def drain(self) -> None:
        """Empty the kernel's queue, so that it does not overflow; `take` still answers all changes."""
        with self._lock:
            self._drain()

    def close(self) -> None:
        os.close(self._fd)

    def _drain(self) -> None:
        for watch, mask, _, name in read_events(self._fd):
            self._note(watch, mask, name)

    def _note(self, watch: int, mask: int, name: bytes) -> None:
        if mask & OVERFLOW:
            self._overflowed = True
            return
        folder = self._paths.get(watch)
        if folder is None:
            return  # The folder moved away, and its new path was read whole.
        if mask & IGNORED:
            self._forget(watch, folder)
            return
        path = folder + b"/" + name if name else folder
        count = _PLACED if mask & MOVED_TO else 0 if mask & MOVED_FROM else _MORE
        self._counts[path] = self._counts.get(path, 0) + count
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
                self._overflowed = True  # The kernel has no more watches.

    def _add_tree(self, top: bytes, *, is_new: bool = False) -> None:
        """Watch a folder and everything below it; if it is new, its content counts as touched."""
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
            self._counts.update((entry.path, _MORE) for entry in found if is_new)

    def _add(self, folder: bytes) -> bool:
        try:
            watch = kernel.inotify_add_watch(self._fd, folder, _WINDOW_MASK)
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
        """Remove the watches of a moved folder, because their paths are no longer right."""
        gone = [path for path in self._watches if is_inside(path, top)]
        for path in gone:
            watch = self._watches.pop(path)
            self._paths.pop(watch, None)
            self._counts[path] = _MORE
            try:
                kernel.inotify_rm_watch(self._fd, watch)
            except OSError:
                continue  # the kernel dropped it already
