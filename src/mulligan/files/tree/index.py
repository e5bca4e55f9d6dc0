"""Walks that can be taken up again, once watches, stamps and ignore files have been asked what changed since."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from dataclasses import replace
from threading import Lock

from mulligan.values.clock import Clock, SystemClock
from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.walk import (
    ALL_WAYS,
    Known,
    Walk,
    Ways,
    changed_sources,
    plan_walk,
    start_walk,
    still_holds,
)
from mulligan.workspace.search.watching import DIRECTORIES_MIN, Changes, Watch, start_watch

CACHED_FILES_MAX = 1_000_000
CACHED_WALKS_MAX = 8
WATCHED_WALKS_MAX = 2
NAMES_ASKED_MAX = 1_000

_Key = tuple[int, int, RepoPath, bool]


class _Kept:
    """A complete walk, what watches its tree, and what was heard of changes in it since it began."""

    def __init__(self, walk: Walk, watch: Watch | None) -> None:
        self.walk = walk
        self.watch = watch
        self.changes = Changes()
        self.lock = Lock()
        self.count = walk.number
        if watch is not None:
            watch.is_kept = True

    def hear(self) -> tuple[Walk, Changes | None, int]:
        """The walk, all changes since it began or None if they cannot be known, and the number of this time."""
        with self.lock:
            self.count += 1
            if self.watch is not None:
                self.watch.hear(self.changes, self.count)
                if self.watch.is_broken:
                    self.watch = None
            return self.walk, None if self.watch is None else self.changes.since(0), self.count

    def settle(self, walk: Walk) -> None:
        """A later walk went to its end: it knows of everything heard before it began."""
        with self.lock:
            if walk.number > self.walk.number:
                self.walk = walk
                self.changes = self.changes.since(walk.number)


class TreeCache:
    """Remembers complete walks, the least recently used being forgotten first. Safe to share between threads."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()

    def walk(self, root_fd: int, base: RepoPath, *, include_ignored: bool = False, ways: Ways = ALL_WAYS) -> Walk:
        """The walk of the files below `base`: complete when nothing changed since the last one, else still to be gone.

        Raises OSError when the base cannot be opened as a directory.
        """
        kept = self._find(_key(root_fd, base, include_ignored))
        plan = plan_walk(root_fd, base, include_ignored=include_ignored)
        wants_watch = ways.goes_everywhere and ways.visitor is not None
        if kept is None:
            watch = start_watch() if wants_watch else None
            return start_walk(root_fd, Walk(plan, watch=watch), self._clock, ways=ways)
        old, changes, number = kept.hear()
        walk = Walk(plan, watch=kept.watch, number=number)
        if old.plan.chain != plan.chain or not _is_at(root_fd, old):
            return start_walk(root_fd, walk, self._clock, ways=ways)
        walk.plan = old.plan
        if changes is not None:
            changes.listings.update(dict.fromkeys(changed_sources(root_fd, old), number))
            walk.times = _times_left(root_fd, old, changes)
        elif wants_watch and len(old.places) >= DIRECTORIES_MIN:
            walk.watch = start_watch()
        found = _unchanged(root_fd, old, changes, walk) if ways.goes_everywhere else None
        if found is not None:
            return found
        return start_walk(root_fd, walk, self._clock, known=Known(old.places, changes), ways=ways)

    def remember(self, root_fd: int, walk: Walk) -> None:
        """Keep a complete walk that was not kept out of anywhere."""
        key = _key(root_fd, walk.plan.base, walk.plan.include_ignored)
        watch, walk.watch = walk.watch, None
        with self._lock:
            kept = self._kept.get(key)
            if watch is not None and watch.is_kept and (kept is None or kept.watch is not watch):
                return  # it was kept by one that is gone, and with that went what others have heard since
            if kept is None or (kept.walk is not walk and kept.watch is not watch):
                big_enough = len(walk.places) >= DIRECTORIES_MIN
                self._kept[key] = _Kept(walk, watch if big_enough else None)
            else:
                kept.settle(walk)
            self._kept.move_to_end(key)
            self._forget_some()

    def _forget_some(self) -> None:
        while len(self._kept) > CACHED_WALKS_MAX or self._file_count() > CACHED_FILES_MAX:
            self._kept.popitem(last=False)
        watched = [kept for kept in self._kept.values() if kept.watch is not None]
        for kept in watched[:-WATCHED_WALKS_MAX]:
            kept.watch = None

    def _file_count(self) -> int:
        return sum(kept.walk.file_count for kept in self._kept.values())

    def _find(self, key: _Key) -> _Kept | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found


def _key(root_fd: int, base: RepoPath, include_ignored: bool) -> _Key:
    status = os.fstat(root_fd)
    return status.st_dev, status.st_ino, base, include_ignored


def _is_at(root_fd: int, walk: Walk) -> bool:
    """Whether the base is still the directory that was walked."""
    base, place = walk.plan.base, walk.places.get(walk.plan.base)
    if base == ROOT or place is None:
        return place is not None
    with Handles(root_fd) as handles:
        status = os.stat(name_of(base), dir_fd=handles.directory(parent_of(base)), follow_symlinks=False)
    return (status.st_dev, status.st_ino) == (place.listing.stamp.device, place.listing.stamp.inode)


def _unchanged(root_fd: int, old: Walk, changes: Changes | None, walk: Walk) -> Walk | None:
    """The old walk, if going again would find the same files, with the times that `walk` has of them. Else None."""
    if changes is None:
        is_same = walk.watch is None and still_holds(root_fd, old)
        return replace(old, times={}, memo={}) if is_same else None
    if changes.listings or changes.trees or old.unreadable:
        return None
    return replace(old, times=walk.times, memo={}, watch=walk.watch, number=walk.number) if changes.files else old


def _times_left(root_fd: int, old: Walk, changes: Changes) -> dict[str, dict[str, int]]:
    """The times of files but for those that changed. Directories that did not share their part with the old."""
    if not changes.files:
        return dict(old.times)
    if _may_be_linked(root_fd, changes):
        return {}
    kept = dict(old.times)
    for path in {path for path, _ in changes.files} & kept.keys():
        kept[path] = dict(kept[path])
    for path, name in changes.files:
        kept.get(path, {}).pop(name, None)
    return kept


def _may_be_linked(root_fd: int, changes: Changes) -> bool:
    """Whether a name that came may be one more of a file that we know by another, and whose changes it would tell."""
    came = [(path, name) for path, name in changes.files if path in changes.listings]
    if changes.lost or len(came) > NAMES_ASKED_MAX:
        return True
    with Handles(root_fd) as handles:
        return any(_has_other_names(handles, *one, if_gone=one in changes.made) for one in came)


def _has_other_names(handles: Handles, path: str, name: str, *, if_gone: bool) -> bool:
    try:
        status = os.stat(name, dir_fd=handles.directory(path), follow_symlinks=False)
    except OSError:
        return if_gone
    return stat.S_ISREG(status.st_mode) and status.st_nlink > 1
