"""Finds the paths that a command touched, and reports each to the preimage keeper before the command changes it.

Invariants of `TouchedPaths`:
1. It reports a path once, before the first change to it, and only if the path can have existed before the command.
2. If the command first touched a path while it was absent or no folder, then nothing below it existed before. Such
   paths count as touched, and are not reported.
3. Before a folder is moved or removed, it reports everything below it. It also reports what the command puts there
   later, although that did not exist before: after a crash, recovery could not tell the two apart.
So the keeper has every preimage. A touched path that was never reported was absent, below a reported path that was no
folder.

`OtherWriters` finds changes in the command's folders that another program made: a person's save, a formatter, a
daemon. The supervisor knows every change before the command makes it, and inotify reports the changes of all processes.
For each name, `OtherWriters` counts both: written and closed, created, removed, moved there. If inotify reports more
than the supervisor has seen, another program changed that name too. A change before the preimage was stored is in the
preimage, and does not count. The kernel may join equal events, and a counted call may fail, so `OtherWriters` can miss
another writer; but it never takes the command's own change for another program's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, IntEnum, auto
from itertools import islice
from typing import Protocol

from mulligan.files import kernel
from mulligan.files.tree.watcher import EXCLUDE_UNLINKED, MODIFY, ONLY_FOLDERS, OVERFLOW, read_events

_BATCH = 256
_LINK_WALK_MAX = 200_000


class ChangeListener(Protocol):
    """Called before paths change; returns only when their preimages are safe.

    Each path is absolute, real and inside the root, and stands for its own entry only: before a folder moves, every
    path below it is reported. It may exist or not. The supervisor's thread makes one call at a time. After it returns,
    the command may rewrite the bytes in place under this or another name, so the keeper must copy them; a hard link is
    not enough. `going`: folders among the paths are about to be moved or removed, so no other call may work in them.
    Raising OSError, MulliganError or Refused refuses the change: the system call fails with EIO.
    """

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None: ...


class PreimageKeeper(ChangeListener, Protocol):
    """Stores the preimages of reported paths."""

    def has(self, path: bytes) -> bool:
        """Whether the path still has the content of its stored preimage. Only for reported paths."""


class FirstState(Enum):
    """The state of a path when the command first touched it."""

    ABSENT = auto()
    LEAF = auto()
    FOLDER = auto()
    # A folder; all paths below it were reported.
    WHOLE = auto()


class TouchedPaths:
    """The touched paths of one command. For one thread."""

    def __init__(self, root: bytes, listener: ChangeListener) -> None:
        self._root = root
        self._listener = listener
        self._first: dict[bytes, FirstState] = {}
        self._links: dict[tuple[int, int], list[bytes]] | None = None
        self.touched: set[bytes] = set()
        # Paths with other hard links that Mulligan could not find.
        self.with_unknown_links: set[bytes] = set()

    def opened(self, path: bytes, flags: int) -> None:
        """The command opens a file for writing. Ignores paths that are no regular file, and calls that must fail."""
        if path in self.touched:
            return
        status = look(path)
        if status is None:
            if flags & os.O_CREAT:
                self._report_one(path, FirstState.ABSENT)
        elif stat.S_ISREG(status.st_mode) and flags & (os.O_CREAT | os.O_EXCL) != os.O_CREAT | os.O_EXCL:
            self._report_inode(path, status)

    def created(self, path: bytes) -> None:
        # The call fails if the path exists, and then nothing changes.
        if path not in self.touched and look(path) is None:
            self._report_one(path, FirstState.ABSENT)

    def modified(self, path: bytes) -> None:
        """The command changes content or metadata; every other name of the same inode changes too."""
        if path in self.touched:
            return
        status = look(path)
        if status is not None:
            self._report_inode(path, status)

    def removed(self, path: bytes) -> None:
        """The command removes a path. Only an empty folder can be removed, so nothing below it needs a preimage."""
        if path not in self.touched:
            status = look(path)
            if status is not None:
                self._report_one(path, _first_of(status), going=True)
        if self._first.get(path) is FirstState.FOLDER and not _names_in(path):
            self._first[path] = FirstState.WHOLE

    def linked(self, old: bytes | None, new: bytes | None) -> None:
        """The command makes a hard link. `old` is reported too, because its bytes can now change under the new name."""
        if old == new or (new is not None and new not in self.touched and look(new) is not None):
            return
        self._report([path for path in (old, new) if path is not None and path not in self.touched])

    def moved_out(self, old: bytes) -> None:
        """The command moves a path out of the root, where Mulligan cannot follow it."""
        if old in self.touched or look(old) is not None:
            self._report_tree(old, list(below(old)))

    def add_missed(self, paths: Iterable[bytes]) -> None:
        """The command made these paths by calls that Mulligan expected to fail. They cannot have existed before."""
        self.touched.update(path for path in paths if path not in self.touched and self._was_not_there(path))

    def renamed(self, old: bytes, new: bytes, *, inside: tuple[bool, bool]) -> None:
        """Both names change or are exchanged, and with a folder everything below it.

        What is below `new` is reported too, though only an empty folder can be replaced: so a name that the move brings
        never counts as one that existed before, whether the call succeeds or not.
        """
        # Renaming a missing path fails and changes nothing.
        if old not in self.touched and look(old) is None:
            return
        moved_out, moved_in = list(below(old)), list(below(new))
        if inside[0]:
            self._report_tree(old, moved_out)
        if inside[1]:
            self._report_tree(new, moved_in)
        arriving = [old + path[len(new) :] for path in moved_in] if inside[0] else []
        arriving += [new + path[len(old) :] for path in moved_out] if inside[1] else []
        self._report([path for path in arriving if path not in self.touched])

    def _report_tree(self, path: bytes, inner: list[bytes]) -> None:
        self._report([each for each in (path, *inner) if each not in self.touched], going=True)
        if self._first.get(path) is FirstState.FOLDER:
            self._first[path] = FirstState.WHOLE

    def _report_one(self, path: bytes, first: FirstState, *, going: bool = False) -> None:
        """Report a single path. This is the usual case, so it is written for speed."""
        if not self._was_not_there(path):
            self._listener.about_to_change((path,), going=going)
            self._first[path] = first
        self.touched.add(path)

    def _report_inode(self, path: bytes, status: os.stat_result) -> None:
        others = self._other_names(path, status)
        if others:
            self._report([path, *others])
        else:
            self._report_one(path, _first_of(status))

    def _report(self, paths: list[bytes], *, going: bool = False) -> None:
        reported = [path for path in paths if not self._was_not_there(path)]
        kinds = [_first_of(look(path)) for path in reported]
        for start in range(0, len(reported), _BATCH):
            self._listener.about_to_change(reported[start : start + _BATCH], going=going)
        self._first.update(zip(reported, kinds, strict=True))
        self.touched.update(paths)

    def _was_not_there(self, path: bytes) -> bool:
        """Whether the path is below one that was no folder when the command first touched it, so it did not exist."""
        first = self._first
        while len(path) > len(self._root):
            path = path[: path.rfind(b"/")]
            kind = first.get(path)
            if kind is FirstState.ABSENT or kind is FirstState.LEAF:
                return True
        return False

    def _other_names(self, path: bytes, status: os.stat_result) -> list[bytes]:
        """The other hard links inside the root, untouched so far.

        Walks the tree once, and only if a file has several names.
        """
        if status.st_nlink < 2 or stat.S_ISDIR(status.st_mode):
            return []
        if self._links is None:
            self._links = find_links(self._root)
        names = self._links.get((status.st_dev, status.st_ino), [])
        if len(names) < status.st_nlink:
            self.with_unknown_links.add(path)
        return [name for name in names if name != path and name not in self.touched]


def find_links(root: bytes) -> dict[tuple[int, int], list[bytes]]:
    """The names of each file below a folder that has several names, by device and inode.

    A huge tree, or one with closed folders, is walked only in part.
    """
    found: dict[tuple[int, int], list[bytes]] = {}
    with suppress(PermissionError):
        for path in islice(below(root), _LINK_WALK_MAX):
            status = look(path)
            if status is not None and status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                found.setdefault((status.st_dev, status.st_ino), []).append(path)
    return found


def look(path: bytes) -> os.stat_result | None:
    """The status of a path; None if it does not exist, or a file or a circle of links blocks the way."""
    try:
        return os.lstat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def below(path: bytes) -> Iterator[bytes]:
    """All paths below a folder, parents first; none if it is no folder. Links are not followed."""
    queue = [path]
    while queue:
        folder = queue.pop()
        for entry in _names_in(folder):
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                queue.append(entry.path)


def _names_in(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        if stat.S_ISLNK(os.lstat(folder).st_mode):
            return []
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _first_of(status: os.stat_result | None) -> FirstState:
    if status is None:
        return FirstState.ABSENT
    return FirstState.FOLDER if stat.S_ISDIR(status.st_mode) else FirstState.LEAF


_READ_BYTES = 1 << 16
_DRAIN_EVERY = 256


class WriteKind(IntEnum):
    """The kinds of changes to a name, with the values of inotify."""

    WRITTEN = 0x8
    MOVED_TO = 0x80
    CREATED = 0x100
    REMOVED = 0x200


_MASK = sum(WriteKind)
# Watched but not counted: an event between two closes keeps the kernel from merging them into one.
_BETWEEN = MODIFY


_NONE: Counter[int] = Counter()

_spare: list[int] = []
_SPARE_MAX = 4
os.register_at_fork(
    after_in_child=_spare.clear
)  # These belong to the parent. A child that read from one would take the parent's events.


def _take_inotify() -> int:
    with suppress(IndexError):
        return _spare.pop()
    try:
        return kernel.inotify_init()
    except OSError:
        return -1


def _return_inotify(fd: int, watches: Iterable[int]) -> None:
    for watch in watches:
        with suppress(OSError):  # The folder is gone, and the kernel removed the watch with it.
            kernel.inotify_rm_watch(fd, watch)
    # Discard the unread events. They belong to removed watches, whose numbers the kernel does not use again.
    with suppress(BlockingIOError):
        while os.read(fd, _READ_BYTES):
            pass
    if len(_spare) < _SPARE_MAX:
        _spare.append(fd)
    else:
        os.close(fd)


class OtherWriters:
    """Finds writes of other programs, by inotify; without inotify it finds none. For one thread. Close it."""

    def __init__(self, keeper: PreimageKeeper) -> None:
        self._keeper = keeper
        self._folders: dict[int, bytes] = {}
        self._watched: set[bytes] = set()
        self._expected: Counter[tuple[bytes, int]] = Counter()
        self._events: dict[bytes, Counter[int]] = {}
        self._uncounted: set[bytes] = set()
        self._overflowed = False
        self._stops = 0
        self._fd = _take_inotify()

    def expect(self, path: bytes, *kinds: WriteKind) -> None:
        """The command is about to make this change. From now on, every event in that folder is counted."""
        if self._fd < 0:
            return
        self._watch(path[: path.rfind(b"/")] or b"/")
        for kind in kinds:
            self._expected[path, kind] += 1
        self._stops += 1
        if self._stops % _DRAIN_EVERY == 0:
            self._drain()

    def expect_move(self, old: bytes, new: bytes) -> None:
        """A file opened under the old name may be closed under the new one. The watches of a folder move with it."""
        self.expect(old, WriteKind.MOVED_TO)
        self.expect(new, WriteKind.MOVED_TO)
        for one, other in ((old, new), (new, old)):
            if os.path.isdir(one):
                self._uncounted.add(other + b"/")
                self._uncounted.add(one + b"/")
        self._drain()
        still_open = self._still_open(old), self._still_open(new)
        self._expected[new, WriteKind.WRITTEN] += still_open[0]
        self._expected[old, WriteKind.WRITTEN] += still_open[1]

    def _still_open(self, path: bytes) -> int:
        return max(0, self._expected[path, WriteKind.WRITTEN] - self._events.get(path, _NONE)[WriteKind.WRITTEN])

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        """Report paths to the keeper, and count events from their preimages on.

        The keeper may have to wait for another call that works there. An event from before the preimage does not count:
        it is in the preimage, if the preimage is what the path holds now. Events after our `has` count in any case.
        """
        self._keeper.about_to_change(paths, going=going)
        self._drain()
        for path in paths:
            if path in self._events and self._keeper.has(path):
                del self._events[path]

    def ignore_changes_of(self, path: bytes) -> None:
        """Stop counting for a path, because Mulligan cannot tell how often the command itself changed it."""
        for kind in WriteKind:
            self._expected[path, kind] += 1 << 30

    def changed_by_others(self, paths: frozenset[bytes]) -> frozenset[bytes]:
        """The paths among these that another process changed as well."""
        self._drain()
        if self._overflowed:
            return frozenset()
        more = {
            path
            for path, done in self._events.items()
            if any(count > self._expected[path, kind] for kind, count in done.items())
        }
        return frozenset(path for path in more & paths if not path.startswith(tuple(self._uncounted) or (b"\0",)))

    def close(self) -> None:
        """Keep the inotify instance for the next command: closing one with watches takes the kernel 8 ms."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _return_inotify(fd, self._folders)

    def _watch(self, folder: bytes) -> None:
        if folder in self._watched:
            return
        self._watched.add(folder)
        try:
            watch = kernel.inotify_add_watch(self._fd, folder, _MASK | _BETWEEN | ONLY_FOLDERS | EXCLUDE_UNLINKED)
        except OSError:
            return  # The folder does not exist yet, or we may not read it, or the kernel has no more watches.
        self._folders[watch] = folder

    def _drain(self) -> None:
        if self._fd >= 0:
            for watch, mask, _, name in read_events(self._fd):
                self._count(watch, mask, name)

    def _count(self, watch: int, mask: int, name: bytes) -> None:
        self._overflowed |= bool(mask & OVERFLOW)
        folder = self._folders.get(watch)
        if folder is not None and name and mask & _MASK:
            path = folder + name if folder == b"/" else b"%b/%b" % (folder, name)
            self._events.setdefault(path, Counter())[mask & _MASK] += 1
