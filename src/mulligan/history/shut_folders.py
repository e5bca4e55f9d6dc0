"""Folders of a kept tree that their modes keep us out of.

One that was shut since the last look is opened for the next, if it is ours. What nobody could look into is unknown: it
is taken neither for gone nor for what it was, wherever it has gone to since.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping

from mulligan.workspace.exec.scan import Stamp, Statuses

_TO_LOOK_INTO = 0o500


class ShutFolders:
    """All paths are absolute. `stamps` are those of the last look, which change under us."""

    def __init__(self, stamps: Mapping[bytes, Stamp]) -> None:
        self._stamps = stamps
        self._inside: set[bytes] = set()
        """those that were opened for a look while they were shut: what was in them is known"""
        self._strays: set[int] = set()
        """inodes of those that nobody could look into, and that are not where they were"""
        self.closed: set[bytes] = set()
        """those that were shut, and were not looked into; whoever wants to know clears it"""

    def close(self, folders: Iterable[bytes]) -> None:
        """These are not looked into."""
        self.closed.update(folders)
        self._inside.difference_update(folders)

    def was_opened(self, folder: bytes) -> None:
        self._inside.add(folder)

    def is_unseen(self, path: bytes, inode: int | None = None) -> bool:
        """Whether nobody could look into a folder at the last look, wherever it has gone to since."""
        mode = self._stamps[path][4] if path in self._stamps else 0
        was_shut = stat.S_ISDIR(mode) and mode & _TO_LOOK_INTO != _TO_LOOK_INTO and os.geteuid() != 0
        return (was_shut and path not in self._inside) or inode in self._strays

    def lost(self, touched: Statuses) -> list[bytes]:
        """Those that nobody could look into, and that are gone, or lack something, or have more: what, is unknown."""
        unseen = {path: self._stamps[path] for path in touched if self.is_unseen(path)}
        self._strays = {stamp[3] for path, stamp in unseen.items() if touched[path] is None}
        return [path for path, was in unseen.items() if not _has_same_names(touched[path], was)]

    def astray(self, stamps: Mapping[bytes, Stamp | None]) -> list[bytes]:
        """Those that nobody could look into and that were moved there, with all that is in them."""
        tops = {path for path, now in stamps.items() if now and now[3] in self._strays and stat.S_ISDIR(now[4])}
        below = tuple(path + b"/" for path in tops)
        return [path for path in stamps if path in tops or path.startswith(below)] if tops else []


def _has_same_names(now: os.stat_result | None, was: Stamp) -> bool:
    """Of a folder: the same one, in which nothing has come or gone."""
    return now is not None and (now.st_mtime_ns, now.st_ino) == (was[1], was[3])
