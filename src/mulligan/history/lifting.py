"""Working where a mode keeps even its owner out, for whoever puts things as they were or as a command left them.

A directory of ours that we may not write into, or pass, is opened for the length of one step and has its own mode again
afterwards. Before that it is on record, as one more thing the call meant to put there: a mode that a death leaves
lifted is put back like everything else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from mulligan.values.entries import DirEntry
from mulligan.values.paths import RepoPath, ancestors_of, join, parent_of, path_bytes
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Disk

T = TypeVar("T")

NoteLift = Callable[[RepoPath, DirEntry, DirEntry], None]
"""Told which directory is about to be opened, what it is, and what it will be for a moment. Durable when it returns."""

_TO_PASS = 0o500
"""A directory is opened for reading on the way to what is in it."""
_TO_WORK_IN = 0o700


def despite_modes(disk: Disk, path: RepoPath, act: Callable[[], T], note: NoteLift) -> T:
    """Do it. If it is not permitted, once more, with the directories above `path` opened that are ours and shut."""
    try:
        return act()
    except PermissionError:
        with _opened(disk, path, note) as opened:
            if not opened:
                raise
            return act()


def is_shut(disk: Disk, path: RepoPath) -> bool:
    """Whether a directory is there that its mode keeps us out of."""
    there = os.path.join(disk.root.path, path_bytes(path))
    try:
        return stat.S_ISDIR(os.lstat(there).st_mode) and not os.access(there, os.R_OK | os.X_OK)
    except OSError:
        return False


@contextmanager
def opened_up(disk: Disk, folder: RepoPath) -> Iterator[None]:
    """For a look into a directory that is shut, if it is ours. Nobody notes it: should we die in it, it stays open."""
    with _opened(disk, join(folder, "."), lambda *_: None):
        yield


@contextmanager
def _opened(disk: Disk, path: RepoPath, note: NoteLift) -> Iterator[list[RepoPath]]:
    opened = list[RepoPath]()
    with ExitStack() as closing:
        for above in reversed(ancestors_of(path)):
            needed = _TO_WORK_IN if above == parent_of(path) else _TO_PASS
            shut = _shut(disk, above, needed)
            if shut is not None:
                lifted = replace(shut, mode=shut.mode | needed)
                note(above, shut, lifted)
                closing.callback(_set_mode, disk, above, lifted.mode, shut.mode)
                _set_mode(disk, above, shut.mode, lifted.mode)
                opened.append(above)
        yield opened


def _shut(disk: Disk, path: RepoPath, needed: int) -> DirEntry | None:
    """The directory, if it is ours and its mode does not let us do what is needed."""
    try:
        with disk.resolve_exactly(path) as spot:
            image = disk.image(spot)
    except (FileNotFoundError, NotADirectoryError, Refused):
        return None
    if not isinstance(image.entry, DirEntry) or image.owner != os.geteuid() or image.entry.mode & needed == needed:
        return None
    return image.entry


def _set_mode(disk: Disk, path: RepoPath, now: int, mode: int) -> None:
    """From one mode to another, if it has that one; else somebody else has given it one, or has taken it away."""
    with suppress(FileNotFoundError, NotADirectoryError, Refused), disk.resolve_exactly(path) as spot:
        entry = disk.image(spot).entry
        if isinstance(entry, DirEntry) and entry.mode == now:
            disk.set_metadata(spot, replace(entry, mode=mode))
