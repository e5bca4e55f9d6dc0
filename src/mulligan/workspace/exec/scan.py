"""The `scan` way, correct everywhere: what every path's stamp was before, what it is after, and the difference.

A stamp is (ctime, mtime, size, inode, mode): ctime cannot be put back, so an edit that restores the mtime is seen. A
path changed so shortly before the first look that a second change could carry the same stamp counts as touched.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping

from mulligan.workspace.exec.capture import Baseline, Caught, Coverage, StrategyName, without_baseline
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.spawn import Extras

Stamp = tuple[int, int, int, int, int]

RACY_NS = 20_000_000
"""Two ticks of the slowest kernel clock, and some: Linux before 6.13 stamps with the tick, not the time."""

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Folder:
    """One folder's names and their stamps; the names are good for as long as the folder's own stamp is the same."""

    __slots__ = ("entries", "inner", "stamp")

    def __init__(self, stamp: Stamp, entries: dict[bytes, Stamp], inner: list[bytes]) -> None:
        self.stamp = stamp
        self.entries = entries
        self.inner = inner


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
        """Look at everything below `root` but the folders in `skip` (absolute paths)."""
        return cls(root, skip, {}, 0).again()

    @classmethod
    def restored(cls, root: bytes, stamps: Mapping[bytes, Stamp], taken_ns: int) -> StatIndex:
        """An earlier look, from the stamps it found: of the root itself and of everything below it."""
        folders = {path: Folder(stamp, {}, []) for path, stamp in stamps.items() if stat.S_ISDIR(stamp[4])}
        for path, stamp in stamps.items():
            above, _, name = path.rpartition(b"/")
            if path != root and above in folders:
                folders[above].entries[name] = stamp
                folders[above].inner += [name] if stat.S_ISDIR(stamp[4]) else []
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
        """Look once more. Folders whose own stamp is the same are not listed again: 3 us a path instead of 5."""
        fresh = StatIndex(self.root, self._skip, {}, time.clock_gettime_ns(time.CLOCK_REALTIME))
        queue = [(self.root, stamp_of(os.lstat(self.root)))]
        while queue:
            path, stamp = queue.pop()
            folder = self._look_into(path, stamp, fresh.unreadable)
            if folder is not None:
                fresh._folders[path] = folder
                below = path + b"/"
                queue += [
                    (below + name, folder.entries[name]) for name in folder.inner if below + name not in self._skip
                ]
        return fresh

    def touched_since(self, before: StatIndex) -> frozenset[bytes]:
        """What is not as it was, or may not be."""
        found: set[bytes] = set()
        for path in self._folders.keys() | before._folders.keys():
            new, old = self._folders.get(path), before._folders.get(path)
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
            for name, stamp in folder.entries.items():
                if stamp[0] >= horizon and not stat.S_ISDIR(stamp[4]):
                    yield path + b"/" + name

    def _look_into(self, path: bytes, stamp: Stamp, unreadable: set[bytes]) -> Folder | None:
        """`stamp` is the folder's own, seen a moment ago in its parent; what changed since is seen next time."""
        known = self._folders.get(path)
        try:
            if known is not None and known.stamp == stamp and stamp[0] < self._taken_ns - RACY_NS:
                return Folder(stamp, *_stamps(path, known.entries, known.entries))
            return Folder(stamp, *_stamps(path, _listed(path), known.entries if known is not None else {}))
        except PermissionError:
            unreadable.add(path)
            return known  # what cannot be seen is not taken for gone
        except OSError:
            return None  # gone, or no folder any more


def _listed(folder: bytes) -> list[bytes]:
    fd = os.open(folder, _OPEN_FOLDER)
    try:
        return [os.fsencode(name) for name in os.listdir(fd)]
    finally:
        os.close(fd)


def _stamps(
    folder: bytes, names: Iterable[bytes], known: Mapping[bytes, Stamp]
) -> tuple[dict[bytes, Stamp], list[bytes]]:
    """On the way of every path of every scan: written for speed.

    An inode whose time of change is the same has not changed: its old stamp will do, which saves making a new one.
    """
    found: dict[bytes, Stamp] = {}
    inner: list[bytes] = []
    look, folder_bits, kind_bits, below = os.lstat, stat.S_IFDIR, 0o170000, folder + b"/"
    for name in names:
        try:
            s = look(below + name)
        except FileNotFoundError:
            continue
        ctime = s.st_ctime_ns
        old = known.get(name)
        if old is None or old[0] != ctime or old[3] != s.st_ino:
            old = (ctime, s.st_mtime_ns, s.st_size, s.st_ino, s.st_mode)
        found[name] = old
        if old[4] & kind_bits == folder_bits:
            inner.append(name)
    return found, inner


def stamp_of(s: os.stat_result) -> Stamp:
    return (s.st_ctime_ns, s.st_mtime_ns, s.st_size, s.st_ino, s.st_mode)


class Scan:
    """Two looks around the command. `before` may be an earlier one that is still trusted; `after` is for the next."""

    name: StrategyName = "scan"

    def __init__(self, baseline: Baseline | None = None, before: StatIndex | None = None) -> None:
        self._baseline = baseline
        self._before = before
        self.after: StatIndex | None = None

    def begin(self, command: Command) -> Extras:
        if self._before is None:
            self._before = StatIndex.take(command.root)
        return Extras()

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> Caught:
        assert self._before is not None
        self.after = self._before.again()
        touched = self.after.touched_since(self._before)
        unread: Coverage = tuple((path, "unreadable") for path in sorted(self.after.unreadable))
        return Caught(touched, unread + without_baseline(touched, self._baseline), attribution="window")
