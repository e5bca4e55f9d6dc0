"""Caches walks of a tree and digests of files, as long as watches, stamps and ignore files show no change."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from typing import Any

from mulligan.files.capture_rules import NO_RULES
from mulligan.files.resolve import Root
from mulligan.files.tree.directories import OPEN_FILE, Handles, is_local, stamp_of, was_at_rest
from mulligan.files.tree.walk import (
    ALL_WAYS,
    Known,
    Walk,
    WalkScope,
    changed_sources,
    plan_walk,
    start_walk,
    still_holds,
)
from mulligan.files.tree.watcher import DIRECTORIES_MIN, Changes, Watch, start_watch
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.clock import Clock, SystemClock, now_ns
from mulligan.values.digest import Digest, digest_of, parse_digest
from mulligan.values.entries import FileEntry
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of

CACHED_FILES_MAX = 1_000_000
CACHED_WALKS_MAX = 8
WATCHED_WALKS_MAX = 2
NAMES_ASKED_MAX = 1_000

_Key = tuple[int, int, RepoPath, bool]


class _CachedWalk:
    """A complete walk with the watch on its tree, and the changes reported since it began."""

    def __init__(self, walk: Walk, watch: Watch | None) -> None:
        self.walk = walk
        self.watch = watch
        self.changes = Changes()
        self.lock = Lock()
        self.count = walk.number
        if watch is not None:
            watch.is_kept = True

    def hear(self) -> tuple[Walk, Changes | None, int]:
        """The walk, all changes since it began (None if they are unknown), and the number of this query."""
        with self.lock:
            self.count += 1
            if self.watch is not None:
                self.watch.hear(self.changes, self.count)
                if self.watch.is_broken:
                    self.watch = None
            return self.walk, None if self.watch is None else self.changes.since(0), self.count

    def replace(self, walk: Walk) -> None:
        """Replace the walk by a later complete one, which includes every change reported before it began."""
        with self.lock:
            if walk.number > self.walk.number:
                self.walk = walk
                self.changes = self.changes.since(walk.number)


class TreeCache:
    """Caches complete walks and drops the least recently used one first. Safe to share between threads."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._walks: OrderedDict[_Key, _CachedWalk] = OrderedDict()

    def walk(self, root_fd: int, base: RepoPath, *, include_ignored: bool = False, ways: WalkScope = ALL_WAYS) -> Walk:
        """The walk of the files below `base`. If nothing changed since the last one, it is complete; else it has not
        begun.

        Raises OSError when the base cannot be opened as a directory.
        """
        cached = self._find(_key(root_fd, base, include_ignored))
        plan = plan_walk(root_fd, base, include_ignored=include_ignored)
        wants_watch = ways.goes_everywhere and ways.visitor is not None
        if cached is None:
            watch = start_watch() if wants_watch else None
            return start_walk(root_fd, Walk(plan, watch=watch), self._clock, ways=ways)
        old, changes, number = cached.hear()
        walk = Walk(plan, watch=cached.watch, number=number)
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
        """Cache a complete walk, unless it could not read some directory."""
        key = _key(root_fd, walk.plan.base, walk.plan.include_ignored)
        watch, walk.watch = walk.watch, None
        with self._lock:
            cached = self._walks.get(key)
            if watch is not None and watch.is_kept and (cached is None or cached.watch is not watch):
                return  # The walk of this watch was dropped, and with it the changes that were read before.
            if cached is None or (cached.walk is not walk and cached.watch is not watch):
                big_enough = len(walk.places) >= DIRECTORIES_MIN
                self._walks[key] = _CachedWalk(walk, watch if big_enough else None)
            else:
                cached.replace(walk)
            self._walks.move_to_end(key)
            self._forget_some()

    def _forget_some(self) -> None:
        count = sum(cached.walk.file_count for cached in self._walks.values())
        while len(self._walks) > CACHED_WALKS_MAX or count > CACHED_FILES_MAX:
            count -= self._walks.popitem(last=False)[1].walk.file_count
        watched = [cached for cached in self._walks.values() if cached.watch is not None]
        for cached in watched[:-WATCHED_WALKS_MAX]:
            cached.watch = None

    def _find(self, key: _Key) -> _CachedWalk | None:
        with self._lock:
            found = self._walks.get(key)
            if found is not None:
                self._walks.move_to_end(key)
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
    """The old walk, if a new one would find the same files, with the times that `walk` has of them. Else None."""
    if changes is None:
        is_same = walk.watch is None and still_holds(root_fd, old)
        return replace(old, times={}, memo={}) if is_same else None
    if changes.listings or changes.trees or old.unreadable:
        return None
    return replace(old, times=walk.times, memo={}, watch=walk.watch, number=walk.number) if changes.files else old


def _times_left(root_fd: int, old: Walk, changes: Changes) -> dict[str, dict[str, int]]:
    """The times of files that did not change. Unchanged directories are shared with the old walk."""
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
    """Whether a new name may be another hard link of a known file: changes through it would not be reported."""
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


REMEMBERED_MAX = 300_000

Stamp = tuple[int, ...]


@fast_dataclass(slots=True, frozen=True)
class PathState:
    """The content of a path: kind `file`, `symlink`, `dir`, `special` or `absent`.

    For a link the digest of its target.
    """

    kind: str
    digest: Digest | None = None
    size: int = 0
    mode: int = 0

    def to_json(self) -> list[Any]:
        return [self.kind, self.digest, self.size, self.mode]

    @staticmethod
    def from_json(body: list[Any]) -> PathState:
        kind, digest, size, mode = body
        return PathState(str(kind), None if digest is None else parse_digest(digest), int(size), int(mode))


def link_state(target: bytes) -> PathState:
    return PathState("symlink", digest_of(target), len(target), 0o777)


GONE = PathState("absent")
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class DigestCache:
    """Caches digests by the stamps of their files. For any thread.

    A stamp is trusted only if the file had not changed for a while when it was read, on a local file system.
    """

    def __init__(self, root: Root, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._lock = fork_safe_lock()
        self._known: dict[RepoPath, tuple[Stamp, PathState]] = {}
        self._trusts = is_local(root.handle)
        self.capture = NO_RULES

    def look(self, handles: Handles, path: RepoPath) -> PathState:
        """The present content of a path. No link is followed. Raises OSError for a file that cannot be read."""
        try:
            parent = handles.directory(parent_of(path))
            name = name_of(path) if path != ROOT else "."
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            if error.errno in _MISSING:
                return GONE
            raise
        known = self._known.get(path)
        if known is not None and known[0] == _stamp(status):
            return known[1]
        return self._looked_at(parent, name, path, status)

    def _looked_at(self, parent: int, name: str, path: RepoPath, status: os.stat_result) -> PathState:
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            return link_state(os.fsencode(os.readlink(name, dir_fd=parent)))
        if not stat.S_ISREG(status.st_mode):
            return PathState("dir", mode=mode) if stat.S_ISDIR(status.st_mode) else PathState("special")
        now = now_ns(self._clock)
        data, after = read_at(parent, name)
        seen = PathState("file", self.digest_at(path, data), len(data), stat.S_IMODE(after.st_mode))
        if self._trusts and _stamp(status) == _stamp(after) and was_at_rest(stamp_of(after), now):
            self._remember(path, _stamp(after), seen)
        return seen

    def digest_at(self, path: RepoPath, data: bytes) -> Digest:
        """The digest of some bytes. Leases store digests, so a path under `capture.never` gets a keyed one here too."""
        digest = digest_of(data)
        return digest if not self.capture.any else self.capture.named(path, FileEntry(digest, 0, 0)).digest

    def _remember(self, path: RepoPath, stamp: Stamp, seen: PathState) -> None:
        with self._lock:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[path] = (stamp, seen)


def read_at(parent: int, name: str) -> tuple[bytes, os.stat_result]:
    """The bytes of a regular file in an open directory, and its status after they were read. Raises OSError."""
    fd = os.open(name, OPEN_FILE, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        pieces = []
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces), os.fstat(fd)
    finally:
        os.close(fd)


def bytes_at(handles: Handles, path: RepoPath) -> bytes:
    """The content of a file, or the target of a link. Raises OSError."""
    parent, name = handles.directory(parent_of(path)), name_of(path)
    try:
        return read_at(parent, name)[0]
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return os.fsencode(os.readlink(name, dir_fd=parent))


def _stamp(status: os.stat_result) -> Stamp:
    return (*stamp_of(status), status.st_size, status.st_mode)
