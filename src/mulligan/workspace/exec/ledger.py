"""Which paths a command has touched, and which of them the witness must hear of before it goes on.

Invariants:
1. A path is told once, before the first change to it, and only if it can have been there before the command.
2. What lies below a path that was absent, or no folder, when first touched did not exist before: touched, never told.
3. What lies below a folder that was moved or removed was told when it went. What comes into its place later is told
   too, though it cannot have been there: else nobody could tell it from what was there all along, should we die.
So whoever keeps what was told has every preimage, and a touched path that was never told was absent, and lies below a
path that was told and was no folder then.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import islice
from typing import Protocol

_BATCH = 256
_LINK_WALK_MAX = 200_000


class Told(Protocol):
    """Told before paths change; returns only when their preimages are safe.

    Each path is absolute, real, inside the root, and stands for its own entry only (a folder's subtree is told path by
    path when the folder is about to move). It may exist or not. Called from the supervisor's thread, one call at a
    time. After it returns, the bytes may be rewritten in place under this or another name: copy them, a hard link is
    not enough. `going`: folders among them are about to be moved or removed, so nobody else may be at work in them.
    Raising OSError, MulliganError or Refused refuses the change: the system call fails with EIO.
    """

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None: ...


class Witness(Told, Protocol):
    """Has what he was told of."""

    def has(self, path: bytes) -> bool:
        """Whether what is there now is the preimage that was made safe. Asked only of paths that were told."""


class First(Enum):
    """What a path was when it was first touched."""

    ABSENT = auto()
    LEAF = auto()
    FOLDER = auto()
    WHOLE = auto()
    """a folder all of whose content was told"""


class Ledger:
    """The book of one command. For one thread."""

    def __init__(self, root: bytes, witness: Told) -> None:
        self._root = root
        self._witness = witness
        self._first: dict[bytes, First] = {}
        self._links: dict[tuple[int, int], list[bytes]] | None = None
        self.touched: set[bytes] = set()
        self.unsure: set[bytes] = set()
        """paths with other hard links that could not be looked for"""

    def opened(self, path: bytes, flags: int) -> None:
        """Opened so that it may change. Nothing happens to what is no regular file, or when the call must fail."""
        if path in self.touched:
            return
        status = look(path)
        if status is None:
            if flags & os.O_CREAT:
                self._tell_one(path, First.ABSENT)
        elif stat.S_ISREG(status.st_mode) and flags & (os.O_CREAT | os.O_EXCL) != os.O_CREAT | os.O_EXCL:
            self._tell_inode(path, status)

    def created(self, path: bytes) -> None:
        if path not in self.touched and look(path) is None:
            self._tell_one(path, First.ABSENT)

    def modified(self, path: bytes) -> None:
        """Content or metadata of what is there; every other name of the same inode changes with it."""
        if path in self.touched:
            return
        status = look(path)
        if status is not None:
            self._tell_inode(path, status)

    def removed(self, path: bytes) -> None:
        """A folder goes only when empty; whatever comes to its place later is not what was there before."""
        if path not in self.touched:
            status = look(path)
            if status is not None:
                self._tell_one(path, _first_of(status), going=True)
        if self._first.get(path) is First.FOLDER and not _names_in(path):
            self._first[path] = First.WHOLE

    def linked(self, old: bytes | None, new: bytes | None) -> None:
        """`old` is told too: from now on its bytes can change under the new name."""
        if old == new or (new is not None and new not in self.touched and look(new) is not None):
            return
        self._tell([path for path in (old, new) if path is not None and path not in self.touched])

    def leaving(self, old: bytes) -> None:
        """It may go somewhere we could not find."""
        if old in self.touched or look(old) is not None:
            self._whole(old, list(below(old)))

    def late(self, paths: Iterable[bytes]) -> None:
        """Names that were bound to fail, and are there after all: the command's, where nothing can have been before."""
        self.touched.update(path for path in paths if path not in self.touched and self._was_not_there(path))

    def renamed(self, old: bytes, new: bytes, *, inside: tuple[bool, bool]) -> None:
        """Both names change (or change places), and with a folder everything below it.

        What is below `new` is told even though only an empty folder can be replaced: then no name that the move brings
        can be one that was there before, whether the call succeeds or not.
        """
        if old not in self.touched and look(old) is None:
            return
        moved_out, moved_in = list(below(old)), list(below(new))
        if inside[0]:
            self._whole(old, moved_out)
        if inside[1]:
            self._whole(new, moved_in)
        arriving = [old + path[len(new) :] for path in moved_in] if inside[0] else []
        arriving += [new + path[len(old) :] for path in moved_out] if inside[1] else []
        self._tell([path for path in arriving if path not in self.touched])

    def _whole(self, path: bytes, inner: list[bytes]) -> None:
        self._tell([each for each in (path, *inner) if each not in self.touched], going=True)
        if self._first.get(path) is First.FOLDER:
            self._first[path] = First.WHOLE

    def _tell_one(self, path: bytes, first: First, *, going: bool = False) -> None:
        """The usual case, on the way of every first touch."""
        if not self._was_not_there(path):
            self._witness.about_to_change((path,), going=going)
            self._first[path] = first
        self.touched.add(path)

    def _tell_inode(self, path: bytes, status: os.stat_result) -> None:
        others = self._other_names(path, status)
        if others:
            self._tell([path, *others])
        else:
            self._tell_one(path, _first_of(status))

    def _tell(self, paths: list[bytes], *, going: bool = False) -> None:
        told = [path for path in paths if not self._was_not_there(path)]
        kinds = [_first_of(look(path)) for path in told]
        for start in range(0, len(told), _BATCH):
            self._witness.about_to_change(told[start : start + _BATCH], going=going)
        self._first.update(zip(told, kinds, strict=True))
        self.touched.update(paths)

    def _was_not_there(self, path: bytes) -> bool:
        """Below something that was no folder when it was first touched."""
        first = self._first
        while len(path) > len(self._root):
            path = path[: path.rfind(b"/")]
            kind = first.get(path)
            if kind is First.ABSENT or kind is First.LEAF:
                return True
        return False

    def _other_names(self, path: bytes, status: os.stat_result) -> list[bytes]:
        """The other hard links inside the root, untouched so far. The tree is walked once, only if there are any."""
        if status.st_nlink < 2 or stat.S_ISDIR(status.st_mode):
            return []
        if self._links is None:
            self._links = find_links(self._root)
        names = self._links.get((status.st_dev, status.st_ino), [])
        if len(names) < status.st_nlink:
            self.unsure.add(path)
        return [name for name in names if name != path and name not in self.touched]


def find_links(root: bytes) -> dict[tuple[int, int], list[bytes]]:
    """The names of every file below a folder that has several, by device and inode.

    A tree that is huge, or closed to us somewhere, is looked at in part.
    """
    found: dict[tuple[int, int], list[bytes]] = {}
    with suppress(PermissionError):
        for path in islice(below(root), _LINK_WALK_MAX):
            status = look(path)
            if status is not None and status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                found.setdefault((status.st_dev, status.st_ino), []).append(path)
    return found


def look(path: bytes) -> os.stat_result | None:
    """What is at a path; None for nothing, and where a file or a circle of links is in its way."""
    try:
        return os.lstat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def below(path: bytes) -> Iterator[bytes]:
    """Everything under a folder, parents first; nothing if it is none. Links are not followed."""
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


def _first_of(status: os.stat_result | None) -> First:
    if status is None:
        return First.ABSENT
    return First.FOLDER if stat.S_ISDIR(status.st_mode) else First.LEAF
