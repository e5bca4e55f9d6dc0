"""The strategy `scan`, which works everywhere: compare the stamp of every path before and after the command.

A stamp is (ctime, mtime, size, inode, mode). A program cannot set the ctime, so an edit that restores the mtime is
seen. If a path changed so shortly before the first scan that a second change could have the same stamp, it counts as
touched.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping

Stamp = tuple[int, int, int, int, int]
Statuses = dict[bytes, os.stat_result | None]

# More than two ticks of the slowest kernel clock: Linux before 6.13 stamps files with the time of the last tick.
RACY_NS = 20_000_000

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class ScannedFolder:
    """The names in one folder and their stamps. The names are valid while the folder's own stamp stays the same."""

    __slots__ = ("entries", "inner", "newest", "stamp")

    def __init__(self, stamp: Stamp, entries: dict[bytes, Stamp]) -> None:
        self.stamp = stamp
        self.entries = entries
        self.inner = [name for name, one in entries.items() if stat.S_ISDIR(one[4])]
        self.newest = max((one[0] for one in entries.values()), default=0)


class StatIndex:
    """Every stamp below a root at one moment. It never changes; `again` answers a new one."""

    def __init__(self, root: bytes, skip: frozenset[bytes], folders: dict[bytes, ScannedFolder], taken_ns: int) -> None:
        self.root = root
        self.unreadable: set[bytes] = set()
        self._skip = skip
        self._folders = folders
        self._taken_ns = taken_ns

    @classmethod
    def take(cls, root: bytes, skip: frozenset[bytes] = frozenset()) -> StatIndex:
        """Scan everything below `root`, which must exist, except the folders in `skip` (absolute paths)."""
        os.lstat(root)
        return cls(root, skip, {}, 0).again()

    @classmethod
    def of(cls, folder: bytes) -> StatIndex:
        """The index of a folder; empty if the folder does not exist."""
        return cls(folder, frozenset(), {}, 0).again()

    @classmethod
    def restored(cls, root: bytes, stamps: Mapping[bytes, Stamp], taken_ns: int) -> StatIndex:
        """An earlier index, made again from its stamps: those of the root itself and of everything below it."""
        inner: dict[bytes, dict[bytes, Stamp]] = {path: {} for path, one in stamps.items() if stat.S_ISDIR(one[4])}
        for path, stamp in stamps.items():
            above, _, name = path.rpartition(b"/")
            if path != root and above in inner:
                inner[above][name] = stamp
        folders = {path: ScannedFolder(stamps[path], entries) for path, entries in inner.items()}
        return cls(root, frozenset(), folders, taken_ns)

    @property
    def taken_ns(self) -> int:
        return self._taken_ns

    def stamps(self) -> Iterator[tuple[bytes, Stamp]]:
        """The stamps of the root itself, then of everything below it."""
        yield self.root, self._folders[self.root].stamp
        for path, folder in self._folders.items():
            yield from ((path + b"/" + name, stamp) for name, stamp in folder.entries.items())

    def again(self) -> StatIndex:
        """Scan again.

        A folder whose own stamp is the same is not listed again. If the root is gone, the index is empty.
        """
        fresh = StatIndex(self.root, self._skip, {}, time.clock_gettime_ns(time.CLOCK_REALTIME))
        root = _look(self.root)
        queue = [] if root is None else [(self.root, root)]
        while queue:
            path, stamp = queue.pop()
            folder = self._look_into(path, stamp, fresh.unreadable)
            if folder is None:
                continue
            fresh._folders[path] = folder
            # Skipped folders are not entered, but their own stamp is compared.
            for name in folder.inner:
                inner = path + b"/" + name
                if inner not in self._skip:
                    queue.append((inner, folder.entries[name]))
        return fresh

    def touched_since(self, before: StatIndex) -> frozenset[bytes]:
        """The paths that changed since `before`, or may have changed."""
        found: set[bytes] = set()
        for path in self._folders.keys() | before._folders.keys():
            new, old = self._folders.get(path), before._folders.get(path)
            # `again` returns the same object for a folder in which nothing changed.
            if new is old:
                continue
            now, then = new.entries if new else {}, old.entries if old else {}
            if path == self.root and new and old and new.stamp != old.stamp:
                found.add(path)
            if now != then:
                names = now.keys() | then.keys()
                found.update(path + b"/" + name for name in names if now.get(name) != then.get(name))
        found.update(before._racy())
        return frozenset(found)

    def paths(self) -> Iterator[bytes]:
        for path, folder in self._folders.items():
            yield from (path + b"/" + name for name in folder.entries)

    def _racy(self) -> Iterator[bytes]:
        horizon = self._taken_ns - RACY_NS
        for path, folder in self._folders.items():
            for name, stamp in folder.entries.items() if folder.newest >= horizon else ():
                if stamp[0] >= horizon and not stat.S_ISDIR(stamp[4]):
                    yield path + b"/" + name

    def _look_into(self, path: bytes, stamp: Stamp, unreadable: set[bytes]) -> ScannedFolder | None:
        """List a folder.

        `stamp` is its own, read just before in its parent, so that the next scan sees a change in between.
        """
        known = self._folders.get(path)
        try:
            if known is not None and known.stamp == stamp and stamp[0] < self._taken_ns - RACY_NS:
                return _same_names(path, known)
            return ScannedFolder(stamp, _listed(path))
        except PermissionError:
            unreadable.add(path)
            return known  # A folder that we may not read is not deleted.
        except OSError:
            return None  # gone, or no folder any more


def _listed(folder: bytes) -> dict[bytes, Stamp]:
    # Open without following links, because the folder may have been replaced by a link since it was listed.
    fd = os.open(folder, _OPEN_FOLDER)
    try:
        names = [os.fsencode(name) for name in os.listdir(fd)]
    finally:
        os.close(fd)
    found = {name: _look(folder + b"/" + name) for name in names}
    return {name: stamp for name, stamp in found.items() if stamp is not None}


def _same_names(folder: bytes, known: ScannedFolder) -> ScannedFolder:
    """The same folder, if nothing in it has changed. Each scan runs this for every path, so it is written for speed.

    If the ctime of an inode is the same, nothing else of it has changed, so this compares only the ctime.
    """
    changed: dict[bytes, Stamp | None] = {}
    look, below = os.lstat, folder + b"/"
    for name, old in known.entries.items():
        try:
            s = look(below + name)
        except FileNotFoundError:
            changed[name] = None
        else:
            if s.st_ctime_ns != old[0] or s.st_ino != old[3]:
                changed[name] = stamp_of(s)
    if not changed:
        return known
    return ScannedFolder(known.stamp, {name: one for name, one in (known.entries | changed).items() if one is not None})


def _look(path: bytes) -> Stamp | None:
    try:
        return stamp_of(os.lstat(path))
    except FileNotFoundError:
        return None


def stamp_of(s: os.stat_result) -> Stamp:
    return (s.st_ctime_ns, s.st_mtime_ns, s.st_size, s.st_ino, s.st_mode)


def stamp_now(path: bytes) -> Stamp | None:
    status = status_of(path)
    return None if status is None else stamp_of(status)


def status_of(path: bytes) -> os.stat_result | None:
    """The status of a path; None if it does not exist or we may not see it."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def statuses(paths: Iterable[bytes]) -> Statuses:
    return {path: status_of(path) for path in paths}


def twins(stamps: Mapping[bytes, Stamp]) -> dict[int, list[bytes]]:
    """Files that have several of these names, by inode."""
    first: dict[int, bytes] = {}
    found: dict[int, list[bytes]] = {}
    for path, stamp in stamps.items():
        if stat.S_ISREG(stamp[4]) and (other := first.setdefault(stamp[3], path)) is not path:
            found.setdefault(stamp[3], [other]).append(path)
    return found
