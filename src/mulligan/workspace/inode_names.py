"""The names that files have below a root.

A file with several names changes under all of them. Which of its names are inside the root decides how Mulligan may
change it, so they are looked for through open handles: a directory that becomes a symbolic link meanwhile is not
entered, and no name outside is ever taken for one inside.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from mulligan.values.paths import RepoPath, path_from_bytes
from mulligan.values.refusal import Refused
from mulligan.workspace.places import Root, resolve_exactly

Inode = tuple[int, int]
"""Device and number."""


def names_inside(root: Root, numbers: Collection[int]) -> dict[Inode, list[RepoPath]]:
    """The names below a root of files with these inode numbers. What is closed to us is left out."""
    found: dict[Inode, list[RepoPath]] = {}
    ahead = [b""] if numbers else []
    while ahead:
        folder = ahead.pop()
        with suppress(OSError, Refused):
            ahead += _names_in(root, folder, numbers, found)
    return found


def _names_in(root: Root, folder: bytes, numbers: Collection[int], found: dict[Inode, list[RepoPath]]) -> list[bytes]:
    """Look at what is in a folder, which is empty or ends with a slash. The folders in it."""
    inner: list[bytes] = []
    with resolve_exactly(root, path_from_bytes(folder + b"any")) as spot, _entries_of(spot.parent) as entries:
        for entry in entries:
            path = folder + os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False):
                inner.append(path + b"/")
                continue
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_ino in numbers:
                    found.setdefault((status.st_dev, status.st_ino), []).append(path_from_bytes(path))
    return inner


@contextmanager
def _entries_of(folder: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """Through a handle of its own: on btrfs, a handle lists only the names that were there when it was opened."""
    handle = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(handle) as entries:
            yield entries
    finally:
        os.close(handle)
