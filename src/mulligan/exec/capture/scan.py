"""The `scan` way, correct everywhere: what every path's stamp was before, what it is after, and the difference.

A stamp is (ctime, mtime, size, inode, mode): ctime cannot be put back, so an edit that restores the mtime is seen. A
path changed so shortly before the first look that a second change could carry the same stamp counts as touched.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping

Stamp = tuple[int, int, int, int, int]
Statuses = dict[bytes, os.stat_result | None]

RACY_NS = 20_000_000
"""Two ticks of the slowest kernel clock, and some: Linux before 6.13 stamps with the tick, not the time."""

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Folder:
    """One folder's names and their stamps; the names are good for as long as the folder's own stamp is the same."""

    __slots__ = ("entries", "inner", "newest", "stamp")

    def __init__(self, stamp: Stamp, entries: dict[bytes, Stamp]) -> None:
        self.stamp = stamp
        self.entries = entries
        self.inner = [name for name, one in entries.items() if stat.S_ISDIR(one[4])]
        self.newest = max((one[0] for one in entries.values()), default=0)


class StatIndex:
    """Every stamp below a root at one moment. Never changes; `again` gives a new one."""

    def __init__(self, root: bytes, skip: frozenset[bytes], folders: dict[bytes, Folder], taken_ns: int) -> None:
        self.root = root
        self.unreadable: set[bytes] = set()
        self._skip = skip
        self._folders = folders
        self._taken_ns = taken_ns

    @classmethod
    def take(cls, root: bytes, skip: frozenset[bytes] = frozenset()) -> StatIndex:
        """Look at everything below `root`, which has to be there, but the folders in `skip` (absolute paths)."""
        os.lstat(root)
        return cls(root, skip, {}, 0).again()

    @classmethod
    def of(cls, folder: bytes) -> StatIndex:
        """Of a folder that may be gone: nothing then."""
        return cls(folder, frozenset(), {}, 0).again()

    @classmethod
    def restored(cls, root: bytes, stamps: Mapping[bytes, Stamp], taken_ns: int) -> StatIndex:
        """An earlier look, from the stamps it found: of the root itself and of everything below it."""
        inner: dict[bytes, dict[bytes, Stamp]] = {path: {} for path, one in stamps.items() if stat.S_ISDIR(one[4])}
        for path, stamp in stamps.items():
            above, _, name = path.rpartition(b"/")
            if path != root and above in inner:
                inner[above][name] = stamp
        folders = {path: Folder(stamps[path], entries) for path, entries in inner.items()}
        return cls(root, frozenset(), folders, taken_ns)

    @property
    def taken_ns(self) -> int:
        return self._taken_ns

    def stamps(self) -> Iterator[tuple[bytes, Stamp]]:
        """Of the root itself, then of everything below it."""
        yield self.root, self._folders[self.root].stamp
        for path, folder in self._folders.items():
            yield from ((path + b"/" + name, stamp) for name, stamp in folder.entries.items())

    def again(self) -> StatIndex:
        """Look once more. Folders whose own stamp is the same are not listed again. A root that is gone has none."""
        fresh = StatIndex(self.root, self._skip, {}, time.clock_gettime_ns(time.CLOCK_REALTIME))
        root = _look(self.root)
        queue = [] if root is None else [(self.root, root)]
        while queue:
            path, stamp = queue.pop()
            folder = self._look_into(path, stamp, fresh.unreadable)
            if folder is None:
                continue
            fresh._folders[path] = folder
            for name in folder.inner:
                inner = path + b"/" + name
                if inner not in self._skip:
                    queue.append((inner, folder.entries[name]))
        return fresh

    def touched_since(self, before: StatIndex) -> frozenset[bytes]:
        """What is not as it was, or may not be."""
        found: set[bytes] = set()
        for path in self._folders.keys() | before._folders.keys():
            new, old = self._folders.get(path), before._folders.get(path)
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

    def _look_into(self, path: bytes, stamp: Stamp, unreadable: set[bytes]) -> Folder | None:
        """`stamp` is the folder's own, seen a moment ago in its parent; what changed since is seen next time."""
        known = self._folders.get(path)
        try:
            if known is not None and known.stamp == stamp and stamp[0] < self._taken_ns - RACY_NS:
                return _same_names(path, known)
            return Folder(stamp, _listed(path))
        except PermissionError:
            unreadable.add(path)
            return known  # what cannot be seen is not taken for gone
        except OSError:
            return None  # gone, or no folder any more


def _listed(folder: bytes) -> dict[bytes, Stamp]:
    fd = os.open(folder, _OPEN_FOLDER)
    try:
        names = [os.fsencode(name) for name in os.listdir(fd)]
    finally:
        os.close(fd)
    found = {name: _look(folder + b"/" + name) for name in names}
    return {name: stamp for name, stamp in found.items() if stamp is not None}


def _same_names(folder: bytes, known: Folder) -> Folder:
    """The same folder, if nothing in it has changed. On the way of every path of every scan: written for speed.

    An inode whose time of change is the same has not changed, so that is all that is looked at.
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
    return Folder(known.stamp, {name: one for name, one in (known.entries | changed).items() if one is not None})


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
    """None: nothing there, or nothing that we may see."""
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
