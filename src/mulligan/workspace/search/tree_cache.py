"""Walks that can be taken up again. A remembered walk is used only after `still_holds` has asked the disk."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from types import MappingProxyType

from mulligan.values.clock import Clock, SystemClock
from mulligan.values.paths import RepoPath
from mulligan.workspace.search.walk import Enters, Place, Walk, plan_walk, start_walk, still_holds

CACHED_FILES_MAX = 1_000_000
CACHED_WALKS_MAX = 8

_Key = tuple[int, int, RepoPath, bool]
_NO_PLACES: Mapping[str, Place] = MappingProxyType({})


class TreeCache:
    """Remembers complete walks, the least recently used being forgotten first. Safe to share between threads."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._walks: OrderedDict[_Key, Walk] = OrderedDict()

    def walk(
        self, root_fd: int, base: RepoPath, *, include_ignored: bool = False, enters: Enters | None = None
    ) -> Walk:
        """The walk of the files below `base`: complete when nothing changed since the last one, else still to be gone.

        `enters` keeps it out of directories. Raises OSError when the base cannot be opened as a directory.
        """
        key = _key(root_fd, base, include_ignored)
        old = self._find(key)
        plan = plan_walk(root_fd, base, include_ignored=include_ignored)
        if old is not None and old.plan.chain == plan.chain:
            if enters is None and still_holds(root_fd, old):
                return old
            return start_walk(root_fd, old.plan, self._clock, known=old.places, enters=enters)
        return start_walk(root_fd, plan, self._clock, enters=enters)

    def remember(self, root_fd: int, walk: Walk) -> None:
        """Keep a complete walk that was not kept out of anywhere."""
        key = _key(root_fd, walk.plan.base, walk.plan.include_ignored)
        with self._lock:
            self._walks[key] = walk
            self._walks.move_to_end(key)
            while len(self._walks) > CACHED_WALKS_MAX or self._file_count() > CACHED_FILES_MAX:
                self._walks.popitem(last=False)

    def _file_count(self) -> int:
        return sum(len(walk.files) for walk in self._walks.values())

    def _find(self, key: _Key) -> Walk | None:
        with self._lock:
            found = self._walks.get(key)
            if found is not None:
                self._walks.move_to_end(key)
            return found


def _key(root_fd: int, base: RepoPath, include_ignored: bool) -> _Key:
    status = os.fstat(root_fd)
    return status.st_dev, status.st_ino, base, include_ignored
