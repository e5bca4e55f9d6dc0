"""What every file below a root was when it was last looked at, kept between calls that we only observe.

An agent that is not our child changes files by itself: there is a moment before and a moment after, and what was there
before has to be known already. So the tree is looked at once as a whole, and from then on only what moved is read.

1. What a path is said to have been, it was: it was read while its stamp was the one that the look had found.
2. A difference is given once, by the look that finds it; whoever looks puts it to somebody's account.
3. What nobody could read in time, or what is too large to keep, is unknown (`before` None), never guessed.
4. The rows in the store follow in the transaction that puts the differences on record, so a process that dies between
   two looks loses none: the next one goes on from the rows.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, TypeAlias

from mulligan.history.baseline import FILE_MAX_BYTES, WORKSPACE_MAX_BYTES, clean_files, git_contents
from mulligan.history.ledger import entry_bytes, intending, touch_row
from mulligan.history.putting_back import Site
from mulligan.history.repositories import is_object, repository_of
from mulligan.history.tables import (
    KEPT,
    KEPT_ROOTS,
    TOUCHES,
    WINDOWS,
    KeptRootRow,
    KeptRow,
    RootRow,
    TouchRow,
)
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import monotonic_s
from mulligan.values.content import Content
from mulligan.values.digest import digest_of, raw_digest
from mulligan.values.entries import ABSENT, Entry, FileEntry, entry_from_json, same_state
from mulligan.values.faults import MulliganError
from mulligan.values.ids import CallId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import ROOT, RepoPath, path_bytes, path_from_bytes
from mulligan.workspace.disk import DRAFT_PREFIX, Image
from mulligan.workspace.exec.scan import Stamp, StatIndex, stamp_of
from mulligan.workspace.exec.watch import Watcher

TOUCHED_MAX_BYTES = 64 * MIB_BYTES
"""A file that changed inside a window is kept up to this size, though it would not have been before."""

WATCHED_FROM_PATHS = 4_000
"""Below this, looking at every stamp is quick enough that nothing has to be taken on the kernel's word."""

OF_A_WINDOW = -1
"""The ordinal of what was kept for a command that sees its changes only afterwards."""

_STAMP = struct.Struct("<5q")
_BATCH = 200

Known: TypeAlias = Entry | str | None
"""An entry whose bytes are in the store, git's name for a clean file, or None for what nobody knows."""


@dataclass(slots=True, frozen=True)
class Drift:
    """A path that is not as it was. None: unknown before, or not to be captured now."""

    path: RepoPath
    before: Entry | None
    after: Entry | None

    @property
    def is_none(self) -> bool:
        return self.before is not None and self.after is not None and same_state(self.before, self.after)


class Ground(Site, Protocol):
    """A root, and what its paths hold."""

    def image(self, path: RepoPath) -> Image: ...


class KeptTree:
    """For one thread at a time. Close it."""

    def __init__(
        self,
        desk: Ground,
        *,
        file_max_bytes: int = FILE_MAX_BYTES,
        workspace_max_bytes: int = WORKSPACE_MAX_BYTES,
        watched_from: int = WATCHED_FROM_PATHS,
    ) -> None:
        self._desk = desk
        self._watched_from = watched_from
        self._root = desk.disk.root.path
        self._file_max_bytes = file_max_bytes
        self._room_bytes = workspace_max_bytes
        self._index: StatIndex | None = None
        self._known: dict[bytes, Known] = {}
        self._stamps: dict[bytes, Stamp] = {}
        self._pending: list[bytes] = []
        self._asked_git = True
        self._unsaved: set[bytes] = set()
        self._fresh: dict[bytes, Entry | None] = {}
        self._watcher: Watcher | None = None
        self._watch_is_new = False
        self._left: frozenset[bytes] = frozenset()
        self._twins: dict[int, list[bytes]] | None = None
        self._special: set[bytes] = set()
        self._links: tuple[bytes, ...] = ()
        """what links there were at the last look where something had changed, each with a slash"""
        self.specials: set[bytes] = set()
        """where a device, FIFO or socket has come or gone; whoever wants to know clears it"""

    @property
    def watcher(self) -> Watcher | None:
        """To be emptied by whoever waits long, so that its queue does not run over."""
        return self._watcher

    @property
    def has_news(self) -> bool:
        """Whether there is something to publish."""
        return bool(self._fresh)

    @property
    def is_settled(self) -> bool:
        """Whether everything that is to be read has been read and saved."""
        return not self._pending and self._asked_git and not self._unsaved

    def look(self, *, whole: bool = False, until_ns: int | None = None) -> list[Drift]:
        """What is not as it was at the last look. `whole`: the kernel's word is not enough, look at every stamp.

        `until_ns`: what has changed since then is left for the next look.
        """
        if self._index is None and not self.restore():
            self._begin()
            return []
        touched = self._touched(whole=whole) | self._left
        self._left = frozenset() if until_ns is None else _changed_since(touched, until_ns)
        return self.settle(touched - self._left)

    def entry(self, path: RepoPath) -> Entry | None:
        """What the last look found, with its bytes in the store or in git's; None if nobody knows."""
        known = self._known.get(self._absolute(path), ABSENT)
        return None if isinstance(known, str) else known

    def as_looked(self, paths: Iterable[RepoPath]) -> dict[RepoPath, Entry | None]:
        """What the last look found there, its bytes in the store. None: nobody had read it, and it is another now."""
        places = [self._absolute(path) for path in paths]
        unread = [place for place in places if self._known.get(place, ABSENT) is None and self._is_small(place)]
        self._read(unread)
        return {self._below(place): was for place, was in self._befores(places).items()}

    def _is_small(self, path: bytes) -> bool:
        return path in self._stamps and _size(self._stamps[path]) <= TOUCHED_MAX_BYTES

    def settle_paths(self, paths: Iterable[RepoPath]) -> None:
        """These are on record as they are now; the next look has nothing to say of them."""
        self.settle([self._absolute(path) for path in paths])

    # The first look.

    def _begin(self) -> None:
        """Every stamp at once; what they stand for is read by and by, as long as the stamp is still the same."""
        self._index = StatIndex.take(self._root)
        self._stamps = dict(self._index.stamps())
        with self._desk.ledger.store.write() as tx:
            forget(tx, self._desk.root.id)
        self._known = dict.fromkeys(self._stamps)
        self._asked_git = False
        self._unsaved = set(self._stamps)
        self._watch()

    def _watch(self) -> None:
        """What changes until the watches are set is found by looking at every stamp once more."""
        if len(self._stamps) < self._watched_from or self._watcher is not None:
            return
        try:
            self._watcher, self._watch_is_new = Watcher(self._root), True
        except (MulliganError, OSError):
            return

    def go_on(self, until: float) -> None:
        """Read what has not been read yet, smallest first, then save it; for as long as there is time."""
        if not self._asked_git:
            self._asked_git = True
            self._plan_reading()
        while self._pending and monotonic_s() < until:
            batch, self._pending = self._pending[-_BATCH:], self._pending[:-_BATCH]
            self._read(batch)
        while self._unsaved and not self._pending and monotonic_s() < until:
            self._save_some()

    def _plan_reading(self) -> None:
        for path, found in clean_files(self._root, self._stamps.keys()).items():
            as_looked = self._stamps[path]
            if not found.xattrs and (found.ctime_ns, found.mtime_ns, found.size) == as_looked[:3]:
                self._known[path] = found.oid
        unread = [path for path, known in self._known.items() if known is None and self._may_keep(path)]
        self._pending = sorted(unread, key=lambda path: -_size(self._stamps[path]))

    def _may_keep(self, path: bytes) -> bool:
        return _size(self._stamps[path]) <= self._file_max_bytes and not is_object(self._below(path))

    def _read(self, paths: Iterable[bytes]) -> None:
        """Only what still has the stamp of the look: then it is what it was then."""
        found: dict[bytes, Entry] = {}
        self._desk.ledger.blobs.store_all(self._contents(paths, found))
        for path, entry in found.items():
            if _stamp_now(path) == self._stamps.get(path):
                self._known[path] = entry

    def _contents(self, paths: Iterable[bytes], found: dict[bytes, Entry]) -> Iterator[Content]:
        """Entries are put into `found` as their bytes are given."""
        for path in paths:
            size = _size(self._stamps[path]) if path in self._stamps else 0
            image = self._image(path) if size <= self._room_bytes else None
            if image is None or image.special:
                continue
            found[path] = image.entry
            if image.content is not None:
                self._room_bytes -= size
                yield image.content

    # Every other look.

    def _touched(self, *, whole: bool) -> frozenset[bytes]:
        assert self._index is not None
        dirty = self._watcher.take() if self._watcher is not None else None
        if dirty is None or dirty.overflowed or whole or self._watch_is_new:
            fresh = self._index.again()
            touched = fresh.touched_since(self._index)
            self._index, self._watch_is_new = fresh, False
            self._watch()
            return touched if dirty is None else touched | dirty.paths
        gone = tuple(folder + b"/" for folder in dirty.moved_away)
        inner = [path for path in self._stamps if path.startswith(gone)] if gone else []
        return self._with_twins(dirty.paths.union(inner))

    def _with_twins(self, touched: frozenset[bytes]) -> frozenset[bytes]:
        """The other names of the same files: the kernel tells only of the name that was used."""
        looks = [status for path in touched if (status := _status(path)) is not None and stat.S_ISREG(status.st_mode)]
        linked = {status.st_ino for status in looks if status.st_nlink > 1}
        if linked or self._twins is None:
            self._twins = _twins(self._stamps)
        before = {self._stamps[path][3] for path in touched if path in self._stamps}
        known = [name for inode in before for name in self._twins.get(inode, ())]
        new = [path for path, stamp in self._stamps.items() if stamp[3] in linked] if linked else []
        return touched.union(known, new)

    def settle(self, touched: Collection[bytes]) -> list[Drift]:
        """Read these paths again, and remember what they are now. The ones that differ from what they were.

        What was below a directory that is a link by now is not there any more, whatever the link leads to.
        """
        self._links = tuple(path + b"/" for path in touched if os.path.islink(path))
        ours = [path for path in touched if path != self._root and not self._is_gits_own(path)]
        self._forget_gone(set(touched) - set(ours))
        before = self._befores(ours)
        after = self._afters(ours)
        drifts = [Drift(self._below(path), was, after[path]) for path, was in before.items()]
        self._fresh = before | self._fresh
        return [
            one for one in drifts if one.before is None or one.after is None or not same_state(one.before, one.after)
        ]

    def _is_gits_own(self, path: bytes) -> bool:
        """An object of a repository that was there at the last look: only that all of them went is worth a word."""
        inner = self._below(path)
        repository = repository_of(inner) if is_object(inner) else None
        if repository is None or self._absolute(repository) not in self._stamps:
            return False
        return inner != f"{repository}/objects" or _stamp_now(path) is not None

    def _forget_gone(self, paths: Iterable[bytes]) -> None:
        """What is nobody's business is not remembered either, lest it be taken for known when it comes again."""
        for path in paths:
            if path in self._stamps and self._stamp_now(path) is None:
                del self._stamps[path]
                self._known.pop(path, None)
                self._fresh.setdefault(path, None)

    def _befores(self, paths: Collection[bytes]) -> dict[bytes, Entry | None]:
        """What they were; what was git's own is fetched from it, all at once."""
        in_git = {path: known for path in paths if isinstance(known := self._known.get(path), str)}
        contents = git_contents(self._root, in_git) if in_git else {}
        self._desk.ledger.blobs.store_all(contents.values())
        for path, data in contents.items():
            stamp = self._stamps[path]
            self._known[path] = FileEntry(digest_of(data), len(data), stat.S_IMODE(stamp[4]), stamp[1])
        found = {path: self._known.get(path, ABSENT) for path in paths}
        return {path: None if isinstance(known, str) else known for path, known in found.items()}

    def _afters(self, paths: Collection[bytes]) -> dict[bytes, Entry | None]:
        found: dict[bytes, Entry] = {}
        changed = {path for path in paths if self._restamp(path)}
        self._desk.ledger.blobs.store_all(self._touched_contents(paths, changed, found))
        for path in paths:
            if path not in self._stamps:
                self._known.pop(path, None)
            elif path in found or path in changed:
                self._known[path] = found.get(path)
        return {path: self._known.get(path, ABSENT) for path in paths}  # type: ignore[misc]  # no names of git's left

    def _stamp_now(self, path: bytes) -> Stamp | None:
        return None if path.startswith(self._links) else _stamp_now(path)

    def _restamp(self, path: bytes) -> bool:
        """Before it is read: if it changes meanwhile, the next look finds another stamp. Whether it has one now."""
        before, stamp = self._stamps.get(path), self._stamp_now(path)
        is_special = stamp is not None and not _is_keepable(stamp[4])
        if is_special or path in self._special:
            self.specials.add(path)
        (self._special.add if is_special else self._special.discard)(path)
        if stamp is None or is_special:
            self._stamps.pop(path, None)
        else:
            self._stamps[path] = stamp
        return stamp != before

    def _touched_contents(
        self, paths: Collection[bytes], changed: Collection[bytes], found: dict[bytes, Entry]
    ) -> Iterator[Content]:
        for path in paths:
            stamp = self._stamps.get(path)
            if stamp is None or _size(stamp) > (TOUCHED_MAX_BYTES if path in changed else self._file_max_bytes):
                continue
            image = self._image(path)
            if image is not None and not image.special:
                found[path] = image.entry
                if image.content is not None:
                    yield image.content

    # The rows.

    def publish(self, tx: Tx) -> None:
        """What looks have found since the last time, as part of the transaction that puts it on record."""
        keep_for_windows(tx, self._desk.root, {self._below(path): was for path, was in self._fresh.items()})
        for path in self._fresh:
            self._put(tx, path)
        self._unsaved.difference_update(self._fresh)
        self._fresh = {}
        if not self._unsaved and self._index is not None:
            root = self._desk.root.id
            tx.put(KEPT_ROOTS, KeptRootRow(root, self._index.taken_ns, self._desk.ledger.now()))

    def _save_some(self) -> None:
        some = [path for path, _ in zip(self._unsaved, range(_BATCH), strict=False)]
        with self._desk.ledger.store.write() as tx:
            for path in some:
                self._put(tx, path)
            self._unsaved.difference_update(some)
            if not self._unsaved:
                self.publish(tx)

    def _put(self, tx: Tx, path: bytes) -> None:
        stamp, key = self._stamps.get(path), path_bytes(self._below(path))
        if stamp is None:
            tx.delete(KEPT, self._desk.root.id, key)
            return
        known = self._known.get(path)
        entry = None if known is None or isinstance(known, str) else known
        digest = raw_digest(entry.digest) if isinstance(entry, FileEntry) else None
        oid = known if isinstance(known, str) else None
        text = None if entry is None else entry_bytes(entry)
        tx.put(KEPT, KeptRow(self._desk.root.id, key, _STAMP.pack(*stamp), text, oid, digest))

    def restore(self) -> bool:
        """Go on from what another process left; False if there is nothing, or not all of it."""
        with self._desk.ledger.store.read() as tx:
            whole = tx.get(KEPT_ROOTS, self._desk.root.id)
            rows = tx.select(KEPT, {"root": self._desk.root.id}) if whole is not None else []
        if whole is None or not rows:
            return False
        for row in rows:
            path = self._absolute(path_from_bytes(row.path))
            self._stamps[path] = _STAMP.unpack(row.stamp)
            self._known[path] = row.oid if row.entry is None else entry_from_json(decode(row.entry))
            self._room_bytes -= _size(self._stamps[path]) if row.digest is not None else 0
        self._index = StatIndex.restored(self._root, self._stamps, whole.taken_ns)
        return True

    # Paths.

    def _below(self, path: bytes) -> RepoPath:
        inner = path[len(self._root) :].lstrip(b"/")
        return path_from_bytes(inner) if inner else ROOT

    def _absolute(self, path: RepoPath) -> bytes:
        return self._root if path == ROOT else os.path.join(self._root, path_bytes(path))

    def _image(self, path: bytes) -> Image | None:
        """None: there, and not for us to read."""
        try:
            return self._desk.image(self._below(path))
        except (PermissionError, MulliganError):
            return None

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None


def keep_for_windows(tx: Tx, root: RootRow, befores: Mapping[RepoPath, Entry | None]) -> None:
    """Before rows change: a command in a window of its own has its before in them, and needs it should it die."""
    for window in tx.select(WINDOWS, {"root": root.id}) if befores else ():
        for path, before in befores.items():
            if before is not None and not tx.has(TOUCHES, window.call, path_bytes(path)):
                tx.put(TOUCHES, watched_row(CallId(window.call), path_bytes(path), root, before=before))


def watched_row(call: CallId, path: bytes, root: RootRow, *, before: Entry) -> TouchRow:
    """What a path was before a command that is watched by nobody but the kernel."""
    row = touch_row(call, path, root, ordinal=OF_A_WINDOW, before=before)
    return intending(row, before, draft_name(call, path), in_place=True)


def draft_name(call: CallId, path: bytes) -> bytes:
    return DRAFT_PREFIX + f"{call[-12:]}-{sha256(path).hexdigest()[:16]}".encode("ascii")


def forget(tx: Tx, root: str) -> None:
    """Nobody looks at this root any more."""
    tx.delete(KEPT_ROOTS, root)
    for row in tx.select(KEPT, {"root": root}):
        tx.delete(KEPT, root, row.path)


def forget_unused(tx: Tx, before: str) -> list[str]:
    """Forget the roots that nobody has looked at since that time. Which they were."""
    stale = [row.root for row in tx.select(KEPT_ROOTS) if row.looked_at < before]
    for root in stale:
        forget(tx, root)
    return stale


def _twins(stamps: Mapping[bytes, Stamp]) -> dict[int, list[bytes]]:
    """Files that have several of these names."""
    first: dict[int, bytes] = {}
    found: dict[int, list[bytes]] = {}
    for path, stamp in stamps.items():
        if stat.S_ISREG(stamp[4]) and (other := first.setdefault(stamp[3], path)) is not path:
            found.setdefault(stamp[3], [other]).append(path)
    return found


def _stamp_now(path: bytes) -> Stamp | None:
    status = _status(path)
    return None if status is None else stamp_of(status)


def _status(path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def kernel_time_ns() -> int:
    """What files are stamped with: the world's clock, whatever a session takes for the time."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def _changed_since(paths: Collection[bytes], when_ns: int) -> frozenset[bytes]:
    """Those, but for folders of others: a folder that came before what is in it changes with that.

    A file system whose clock is ahead of ours says nothing; there, none.
    """
    now_ns = kernel_time_ns()
    stamps = {path: status.st_ctime_ns for path in paths if (status := _status(path)) is not None}
    late = {path for path, changed_ns in stamps.items() if when_ns < changed_ns <= now_ns}
    for path in set(paths) - late:
        while (path := os.path.dirname(path)) in late:
            late.discard(path)
    return frozenset(late)


def _size(stamp: Stamp) -> int:
    return stamp[2] if stat.S_ISREG(stamp[4]) else 0


def _is_keepable(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
