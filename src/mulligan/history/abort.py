"""Rolls back what an open call did, from what the call wrote down before it acted.

Abort, savepoints and recovery share this. For every path that the call meant to touch, what is there now decides:

| at the path is | then |
| --- | --- |
| what was there before | nothing: the change never happened, or is rolled back already |
| something that the call meant to put there | what was there before goes back |
| that content under another process's mode, or that mode over another's content | only the call's half is rolled back |
| a torn file of ours, after a power cut in the middle of an exchange | what was there before goes back |
| a torn file that was written in place, or that a power cut left of what the call meant | the store takes its bytes
  and a record names them, then what was there before goes back |
| something of the call's, and a power cut destroyed the bytes of what was there before | it stays, reported as lost |
| at a path that is not captured, not ours, or without a copy of the original | it stays, and is reported |
| anything else | another process's work: it stays, the store takes its bytes if it has room, and it is reported |

A draft (the file that was to take the path) is ours, so it is removed. But if it is another process's save that the
exchange had just displaced, then that save goes back, not the preimage. Every step can be repeated, so a rollback may
die anywhere too. Only bytes that are rescued need room in the store.

Rescued bytes went from the disk during a rollback, though another process may have written them. The store has them,
and the coverage of the call says where they were (`blob_ref`).

Originals: the store may not have the bytes of a path that is not captured. So before Mulligan writes such a path, it
copies what is there to a file in the root directory, which no effect removes together with a folder. Abort and recovery
put the copy back. The copy's name says the call, the path's number in it and what it is a copy of, so a call that
writes a path several times has a copy of each state. If nothing was there, an empty file says so. Without that file, a
command made what is at the path, Mulligan has no copy of those bytes, and so they stay.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from functools import partial
from typing import Protocol

from mulligan.files.capture_rules import CaptureRules
from mulligan.files.disk import DRAFT_PREFIX, NOTHING, Disk, Image, with_bytes
from mulligan.files.replace import Aim, FoundEntry, HardLinks, Replacement, TargetEntry
from mulligan.files.resolve import ResolvedPath, Spots
from mulligan.history.git_changes import is_locked_by_git
from mulligan.history.ledger import Ledger
from mulligan.history.permissions import NoteLift, despite_modes
from mulligan.history.plan import leaves
from mulligan.history.tables import CallRow, RootRow, SpooledContents, TouchRow
from mulligan.values import limits
from mulligan.values.canonical import decode
from mulligan.values.clock import booted_at_ns, monotonic_s
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Change,
    Content,
    DirEntry,
    Entry,
    FileEntry,
    digest_of_beginning,
    entry_from_bytes,
    entry_from_json,
    kind_of,
    pieces_of,
    same_content,
    same_state,
)
from mulligan.values.errors import ConflictError, InternalError, MulliganError, Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import BLOB_BATCH_BYTES
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, from_wire, join, parent_of, path_from_bytes, to_wire

_ORIGINAL = b"-original-"
_COPY = FileEntry(digest_of(b""), 0, 0o600)
# Enough to tell the states of one path in one call apart.
_DIGITS = 16


def original_name(draft: bytes, entry: Entry) -> bytes:
    """The name of the copy of what a path held. `draft` is the path's own draft name in its call."""
    told = entry.digest.partition(":")[2][:_DIGITS] if isinstance(entry, FileEntry) else kind_of(entry)
    return draft + _ORIGINAL + told.encode("ascii")


@contextmanager
def _spot_of(disk: Disk, path: RepoPath, name: bytes) -> Iterator[ResolvedPath]:
    """The copy, opened under the rules of the path that it is a copy of."""
    with disk.resolve_exactly(path_from_bytes(name)) as found:
        yield ResolvedPath(path, found.place, found.parent, found.name)


def keep_original(disk: Disk, path: RepoPath, draft: bytes, image: Image) -> bytes:
    """Copy what an image of the path holds, unless the call has that copy already. Answers the copy's name."""
    name = original_name(draft, image.entry)
    content: Content = b"" if image.any_content is None else image.any_content
    with _spot_of(disk, path, name) as spot, suppress(FileExistsError):
        disk.stage_file(spot, name, content, like=_COPY)
    return name


def find_original(disk: Disk, path: RepoPath, draft: bytes, entry: Entry) -> Image | None:
    """The copy of what the path held; None if there is none or it is not whole."""
    with _spot_of(disk, path, original_name(draft, entry)) as spot:
        image = disk.image(spot)
    if not isinstance(image.entry, FileEntry):
        return None
    # The process may have died while it wrote the copy.
    is_whole = not isinstance(entry, FileEntry) or same_content(image.entry, entry)
    return image if is_whole else None


def discard_original(disk: Disk, path: RepoPath, name: bytes) -> None:
    with _spot_of(disk, path, name) as spot:
        disk.discard(spot, name)


def discard_abandoned(disk: Disk, is_open: Callable[[str], bool]) -> None:
    """Remove the copies of calls that have ended. `is_open` gets the end of a call's id."""
    with disk.resolve(ROOT) as root:
        names = [name for name in disk.children(root) if name.startswith(DRAFT_PREFIX) and _ORIGINAL in name]
    for name in names:
        call = os.fsdecode(name[len(DRAFT_PREFIX) :]).partition("-")[0]
        # A call that is still open, perhaps in another process, will need its copies.
        if not is_open(call):
            with suppress(OSError):
                discard_original(disk, path_from_bytes(name), name)


_STAGED_MODE = 0o600
_TRIES = 5
# The unit in which a disk writes: a power cut may leave any mix of written and unwritten sectors.
_SECTOR_BYTES = 512
_BACK = b"-back"
_GIT_LOCK = b".lock"
_GIT_LOCK_FILE = FileEntry(digest_of(b""), 0, 0o644)
_READABLE = FileEntry(digest_of(b""), 0, _STAGED_MODE)
# git holds such a lock for milliseconds. One that stays longer was probably left by a git that died.
_GIT_LOCK_WAIT_S = 2.0
_GIT_LOCK_NAP_S = 0.005


class WritableRoot(Protocol):
    """The root in which abort restores files."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def root(self) -> RootRow: ...


@fast_dataclass(slots=True, frozen=True)
class Trace:
    """One path that an open call may have changed: its preimage, and every entry the call ever `intended` to put there.

    `after`: what a living call knows it has put there. `seen`: an image of the path, if its rollback has not begun.
    Then there are no drafts, and the exchange itself checks that the image is still true.
    """

    path: RepoPath
    before: Entry
    drafts: tuple[bytes, ...]
    in_place: bool
    intended: bytes = b"[]"
    after: Entry | None = None
    seen: Image | None = None

    @property
    def meant(self) -> tuple[Entry, ...]:
        """The newest last."""
        entries = [entry_from_json(body) for body in decode(self.intended)]
        return (*entries, self.after) if self.after is not None else tuple(entries)


def trace_of(row: TouchRow) -> Trace:
    """The trace of a path of a dead call, from its row in the store."""
    before = entry_from_bytes(row.before)
    return Trace(path_from_bytes(row.path), before, drafts_of(row), bool(row.in_place), row.intended)


def drafts_of(row: TouchRow) -> tuple[bytes, ...]:
    drafts = [name.encode("ascii") for name in decode(row.drafts)]
    return (*drafts, *(draft + _BACK for draft in drafts))


def everything_below(root: WritableRoot, traces: Sequence[Trace]) -> list[Trace]:
    """The paths below folders that an interrupted command made, where nothing existed before."""
    # Only a command can have put files into a folder without a trace of their own.
    made = [one for one in traces if one.in_place and not isinstance(one.before, DirEntry)]
    known = {one.path for one in traces}
    queue, found = list(made), list[Trace]()
    while queue:
        above = queue.pop()
        inner = [path for path in _children(root, above.path) if path not in known]
        fresh = [Trace(path, ABSENT, above.drafts, in_place=True) for path in inner]
        found += fresh
        queue += fresh
    return found


def _children(root: WritableRoot, path: RepoPath) -> list[RepoPath]:
    try:
        with root.disk.resolve_exactly(path) as spot:
            return [join(path, name.decode("utf-8", "surrogateescape")) for name in root.disk.children(spot)]
    except (OSError, Refused):
        return []


@fast_dataclass(slots=True)
class Report:
    """The paths that abort restored, and the conflicts: paths that another process had changed, left as they are.

    `not_captured`: paths that a command changed and whose bytes the store may not have; they are left too.

    `lost`: paths that are left because a power cut destroyed the stored bytes of their preimage.

    `rescued`: bytes of unknown origin that abort replaced, and their paths; the record of the call's end must name them
    so that the store retains them.
    """

    put_back: list[RepoPath] = field(default_factory=list)
    not_captured: list[RepoPath] = field(default_factory=list)
    lost: list[RepoPath] = field(default_factory=list)
    conflicts: list[RepoPath] = field(default_factory=list)
    rescued: dict[tuple[RepoPath, Digest], None] = field(default_factory=dict)

    def rescue(self, path: RepoPath, *entries: Entry) -> None:
        files = (entry for entry in entries if isinstance(entry, FileEntry) and entry.withheld is None)
        self.rescued |= {(path, entry.digest): None for entry in files}


def put_back(
    root: WritableRoot, traces: Iterable[Trace], note_lift: NoteLift, spooled: SpooledContents | None = None
) -> Report:
    """Restore every path, even if another one fails; raise the first error as OSError after all were tried.

    `spooled`: bytes that the store does not have, because it is full.

    The traces come newest first, and abort restores them in that order, as far as directories allow.
    """
    report, errors = Report(), list[OSError]()
    bodies = _Bodies(root.ledger, spooled)

    def attempt(restore: _PathRestore, act: Callable[[], None]) -> bool:
        try:
            try:
                act()
            # The command may have locked folders above the path; they are opened for this step only.
            except PermissionError as refused:
                despite_modes(root.disk, restore.path, act, note_lift, refused=refused)
        except OSError as error:
            errors.append(error)
            return False
        except InternalError as broken:
            # One damaged blob must not keep the other paths from being restored.
            errors.append(OSError(errno.EIO, broken.message))
            return False
        return True

    with Spots(root.disk) as spots:
        restores = [_PathRestore(root, trace, spots, bodies) for trace in traces]
        # If a path cannot be read, its draft may be another process's save, so abort leaves it.
        ordered = _newest_first([restore for restore in restores if attempt(restore, restore.look)])
        _leave_moved_originals(root.disk, ordered)
        bodies.expect(restore.target for restore in ordered)
        # Names of one file are restored as names of one file, not as copies.
        links = HardLinks(root.disk, {restore.path: restore.aim for restore in ordered})
        for restore in ordered:
            attempt(restore, partial(restore.run, report, links))
        # Backwards, because restoring anything in a folder sets the time of the folder.
        for restore in reversed(ordered):
            attempt(restore, restore.set_time)
    if root.ledger.store.durability == "power":
        try:
            sync_paths(root.disk, [restore.path for restore in restores])
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return report


def _leave_moved_originals(disk: Disk, restores: Sequence[_PathRestore]) -> None:
    """A command may have moved a file that is not captured. Its bytes are only at the new path, so they stay there."""
    missing = [one for one in restores if isinstance(one.now, Absent) and one.target.withheld is not None]
    gone = {one.path: one.target for one in missing if one.original() is None}
    for one in restores if gone else ():
        one.is_moved_original = isinstance(one.target, Absent) and source_among(gone, one.now, disk.capture) is not None


def source_among(gone: Mapping[RepoPath, Entry], now: Entry, rules: CaptureRules) -> RepoPath | None:
    """The first of the uncaptured files that are gone whose bytes this file has: they may be nowhere else."""
    if isinstance(now, FileEntry):
        for path, was in gone.items():
            if isinstance(was, FileEntry) and was.digest in (now.digest, rules.named(path, now).digest):
                return path
    return None


def sync_paths(disk: Disk, paths: Iterable[RepoPath]) -> None:
    """Make what is at these paths, and the names in their directories, survive a power cut. Raises OSError."""
    synced: set[RepoPath] = set()
    with Spots(disk) as spots:
        for path in paths:
            try:
                spot = spots.at(path)
            except (FileNotFoundError, NotADirectoryError, Refused):
                continue
            try:
                disk.sync_file(spot)
            except OSError as error:
                # The path is missing, or is a link; the sync of its directory covers both.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
            folder = parent_of(path)
            if folder not in synced:
                disk.sync_dir(spot)
                synced.add(folder)


class _Bodies:
    """Reads the bytes of files to restore. It reads several of the next ones in one transaction."""

    def __init__(self, ledger: Ledger, spooled: SpooledContents | None) -> None:
        self._ledger = ledger
        self._spooled = spooled
        self._ahead: deque[FileEntry] = deque()
        self._read: dict[Digest, bytes] = {}

    def expect(self, entries: Iterable[Entry]) -> None:
        """Announce the files that the caller will probably read, in this order."""
        files = (entry for entry in entries if isinstance(entry, FileEntry) and entry.withheld is None)
        self._ahead = deque(entry for entry in files if _is_whole(entry))

    def content(self, entry: FileEntry) -> Content:
        if entry.digest not in self._read and self._ahead and _is_whole(entry):
            self._read_along()
        known = self._read.get(entry.digest)
        if known is None and self._spooled is not None:
            known = self._spooled.read(entry.digest)
        return self._ledger.blobs.content(entry.digest, entry.size) if known is None else known

    def _read_along(self) -> None:
        self._read, size = {}, 0
        with self._ledger.store.read() as tx:
            while self._ahead and size < BLOB_BATCH_BYTES:
                entry = self._ahead.popleft()
                # A failed read must not stop the others: the caller gets the error when it reads that file.
                with suppress(MulliganError):
                    self._read[entry.digest] = self._ledger.blobs.read_in(tx, entry.digest)
                    size += entry.size


def _is_whole(entry: FileEntry) -> bool:
    return entry.size <= limits.WHOLE_MAX_BYTES


def _newest_first(restores: Sequence[_PathRestore]) -> list[_PathRestore]:
    """In the given order, but a removed directory comes after everything below it, and a new one before."""
    turns = {restore.path: turn for turn, restore in enumerate(restores)}
    leaving = {restore.path for restore in restores if leaves(restore)}
    due = dict(turns)
    for restore in restores:
        for above in ancestors_of(restore.path):
            if above not in turns:
                continue
            # A folder can go only when it is empty; a file can come only when its folder is there.
            if restore.path in leaving and above in leaving:
                due[above] = max(due[above], turns[restore.path])
            elif restore.path not in leaving:
                due[restore.path] = max(due[restore.path], turns[above])

    def turn(restore: _PathRestore) -> tuple[int, int]:
        depth = restore.path.count("/")
        return due[restore.path], -depth if restore.path in leaving else depth

    return sorted(restores, key=turn)


@fast_dataclass(slots=True)
class _PathRestore:
    """The restore of one path."""

    root: WritableRoot
    trace: Trace
    spots: Spots
    bodies: _Bodies
    now: Entry = ABSENT
    target: Entry = ABSENT
    _made: bool = False
    _displaced: list[Entry] = field(default_factory=list)
    _strays: bool = False
    """whether there is anything under a draft's name"""
    _is_original_aside: bool = False
    """whether that is what was there before: then the exchange has happened, and nothing more"""
    _seen: Image | None = None
    """the image that `look` read; the exchange checks later that it is still true"""
    is_moved_original: bool = False
    """whether the path holds what a command moved here from an uncaptured path"""

    @property
    def path(self) -> RepoPath:
        return self.trace.path

    def look(self) -> None:
        """Read the path, and find what to restore there: the preimage, or a save that the call had just displaced."""
        self.target = self.trace.before
        if self.trace.seen is not None:
            self.now = self.trace.seen.entry
            return
        spot = self._spot()
        if spot is None:
            return
        now = self._seen = self._image(spot)
        self.now = now.entry
        for draft in self.trace.drafts:
            image = self.root.disk.image(spot, draft=draft, kept=False)
            # Noted, so that `run` discards drafts only if there are any.
            self._strays |= image is not NOTHING
            if not image.special and same_state(image.entry, self.trace.before):
                self._is_original_aside = True
                self._store_if_lost(spot, image, draft)
            if image.replaceable and not self._is_known(image) and not self._is_torn_stage(image, now):
                theirs = with_bytes(self.root.disk, spot, image, draft=draft)
                if not self._is_torn_draft(theirs):
                    self._find_displaced(theirs, now)

    def _image(self, spot: ResolvedPath, known: Image | None = None) -> Image:
        """Read the path.

        If a command removed our permission to read it, take the permission: the bytes must be stored.
        """
        try:
            return self.root.disk.image(spot, kept=False, known=known)
        except PermissionError:
            if not self.trace.in_place:
                raise
            self.root.disk.set_metadata(spot, _READABLE)
            return self.root.disk.image(spot, kept=False)

    def _find_displaced(self, image: Image, now: Image) -> None:
        """Look under the drafts' names for something that was at the path before the call replaced it.

        If a command worked there, it is what the command had written; abort stores it but does not restore it. The same
        holds for a draft that may be the call's own, when a power cut destroyed the bytes to compare it with.
        """
        if self.trace.in_place or self._is_any_lost():
            self._store(image)
            self._displaced.append(image.entry)
            return
        if image.entry.withheld is not None:
            keep_original(self.root.disk, self.path, self.trace.drafts[0], image)
        self._keep(Change(self.path, self.trace.before, image.entry), image)
        self.target = image.entry if self._is_ours(now) else self.target

    @property
    def aim(self) -> Aim:
        return self._seen or self.trace.seen or NOTHING, self.target

    def run(self, report: Report, links: HardLinks) -> None:
        report.rescue(self.path, *self._displaced)
        spot = self._spot()
        if spot is None:
            if not isinstance(self.target, Absent):
                # A removed folder is another process's decision; a rollback does not make it again.
                report.conflicts.append(self.path)
                # Another process removed the directory without having seen these bytes, so the store must have them.
                report.rescue(self.path, self.target)
            return
        try:
            self._settle(spot, report, links)
        # A power cut destroyed the bytes that should go back. Other conflicts are for the caller.
        except ConflictError as gone:
            if not gone.details.get("lost"):
                raise
            report.lost.append(self.path)
        for draft in self.trace.drafts if self._strays else ():
            self.root.disk.discard(spot, draft)
        if is_locked_by_git(self.path) and self._is_our_lock(spot):
            self.root.disk.discard(spot, spot.name + _GIT_LOCK)
        # The open handles may lead to the folder that was just replaced.
        if isinstance(self.now, DirEntry) or isinstance(self.target, DirEntry):
            self.spots.let_go()

    def _settle(self, spot: ResolvedPath, report: Report, links: HardLinks) -> None:
        # Each round reads the path again, because another process may write to it between our read and our exchange.
        for _ in range(_TRIES):
            now, self._seen = self._seen or self._image(spot, known=self.trace.seen), None
            if now.holds(self.target):
                if now.links <= links.inside(self.path):
                    self._settle_time(spot, now.entry)
                return
            if self.is_moved_original or self._must_stay(now):
                report.not_captured.append(self.path)
                return
            target = self._half(spot, now, report)
            if target is None:
                # It stays where it is. It is recorded now, or the next scan records it as external.
                with suppress(InternalError):
                    self._keep_found(spot, now)
                break
            if now.holds(target):
                return
            if not isinstance(self._swap(spot, now, target, links), FoundEntry):
                links.was_placed(self.path)
                report.put_back.append(self.path)
                self._made = isinstance(target, DirEntry)
                return
            self._strays = True
            # A folder that does not go is not empty: another process has put something into it.
            if isinstance(target, Absent) and isinstance(now.entry, DirEntry):
                break
        report.conflicts.append(self.path)

    def _settle_time(self, spot: ResolvedPath, now: Entry) -> None:
        """Restore the time. A file that is written in place has its old bytes before it has its old time."""
        if not self.trace.in_place or not isinstance(now, FileEntry) or not isinstance(self.target, FileEntry):
            return
        if self.target.mtime_ns not in (0, now.mtime_ns):
            self.root.disk.set_mtime(spot, self.target.mtime_ns)

    def _swap(self, spot: ResolvedPath, now: Image, target: Entry, links: HardLinks) -> object:
        content = self._content_of(target) if isinstance(target, FileEntry) else None
        draft = self.trace.drafts[-1]
        # A draft that is left over would be in the way of the new one, which has the same name.
        if self._strays:
            self.root.disk.discard(spot, draft)
        with self._as_git_would(spot, now.entry, target), links.same_file(self.path) as same_as:
            return Replacement(
                self.root.disk,
                spot,
                draft,
                now.entry,
                TargetEntry(target, content),
                rescue=self._store,
                seen=now,
                inside=links.inside(self.path),
                same_as=same_as,
            ).run()

    def _content_of(self, target: FileEntry) -> Content | None:
        if target.withheld is None:
            return self.bodies.content(target)
        original = self.original()
        return None if original is None else original.any_content

    def original(self) -> Image | None:
        return find_original(self.root.disk, self.path, self.trace.drafts[0], self.target)

    def _must_stay(self, now: Image) -> bool:
        """Whether an uncaptured path must stay: abort restores it only if it holds what the call put there, and the
        copy exists.
        """
        if now.entry.withheld is None and self.target.withheld is None:
            return False
        return not self._is_ours(now) or self.original() is None

    def _is_torn_stage(self, image: Image, now: Image) -> bool:
        """Whether a draft of an uncaptured path is our unfinished write.

        Its bytes are not stored, so this cannot be compared: while the path does not hold the call's content yet, the
        draft is what the call was writing.
        """
        return image.entry.withheld is not None and not self._is_ours(now)

    @contextmanager
    def _as_git_would(self, spot: ResolvedPath, now: Entry, target: Entry) -> Iterator[None]:
        """Hold git's own lock while one of git's files changes, so that a running git command never sees half of it."""
        if isinstance(now, DirEntry) or isinstance(target, DirEntry) or not is_locked_by_git(self.path):
            yield
            return
        self._take_lock(spot)
        try:
            yield
        finally:
            self.root.disk.discard(spot, spot.name + _GIT_LOCK)

    def _take_lock(self, spot: ResolvedPath) -> None:
        """Create git's lock with our mark in it, so that another process knows whose it was if this one dies.

        A lock that already has our mark was left by a process that died while it restored this very path.
        """
        deadline, draft = monotonic_s() + _GIT_LOCK_WAIT_S, self.trace.drafts[-1]
        # The lock appears with the mark already in it: a lock of unknown origin could never be removed safely.
        lock = ResolvedPath(spot.path, spot.place, spot.parent, spot.name + _GIT_LOCK)
        while not self._is_our_lock(spot):
            self.root.disk.stage_file(lock, draft, self._mark, like=_GIT_LOCK_FILE)
            try:
                self.root.disk.place(lock, draft)
            except FileExistsError:
                self.root.disk.discard(spot, draft)
                if monotonic_s() > deadline:
                    raise
                time.sleep(_GIT_LOCK_NAP_S)

    @property
    def _mark(self) -> bytes:
        """The text in the lock of git that we hold; no other program, call or path has the same."""
        return self.trace.drafts[0]

    def _is_our_lock(self, spot: ResolvedPath) -> bool:
        return self._is_mark(self.root.disk.image(spot, draft=spot.name + _GIT_LOCK).entry)

    def _is_mark(self, entry: Entry) -> bool:
        return isinstance(entry, FileEntry) and entry.digest == digest_of(self._mark)

    def _half(self, spot: ResolvedPath, now: Image, report: Report) -> Entry | None:
        """The entry to restore: the present one without the call's changes.

        None: another process changed it, so it stays.
        """
        if self._is_ours(now):
            return self.target
        # Newest first: the last thing that the call put there is most likely what is there now.
        for ours in () if now.special else reversed(self.trace.meant):
            half = None if same_state(ours, self.target) else without(ours, now.entry, self.target)
            if half is not None:
                return half
        is_torn_now = self._is_torn_by_power_cut(spot, now)
        if is_torn_now and self._is_original_aside:
            return self.target
        if now.special or not (self.trace.in_place or is_torn_now):
            return None
        if isinstance(now.entry, FileEntry):
            torn = with_bytes(self.root.disk, spot, now)
            self._store(torn)
            report.rescue(self.path, torn.entry)
        return self.target

    def _is_torn_by_power_cut(self, spot: ResolvedPath, now: Image) -> bool:
        """Whether the path holds what a power cut left of a file that the call put there.

        Either that file took the path in a half-done exchange, or no process has written to it since the machine
        started: so a file that a person made shorter does not count.
        """
        if not isinstance(now.entry, FileEntry):
            return False
        # A torn file counts as ours only if it is certain that no process wrote to it after the power cut.
        is_half_done = self._is_original_aside and _is_whole(now.entry)
        if not is_half_done and not _is_from_before_boot(now.entry):
            return False
        mode = now.entry.mode
        meant = [entry for entry in self.trace.meant if isinstance(entry, FileEntry) and entry.mode == mode]
        return any(meant) and self._is_torn(with_bytes(self.root.disk, spot, now), meant)

    def _is_torn_draft(self, draft: Image) -> bool:
        """Whether a power cut left this of a draft that the call was about to put at the path."""
        if not isinstance(draft.entry, FileEntry) or not _is_from_before_boot(draft.entry):
            return False
        files = [entry for entry in (self.trace.before, *self.trace.meant) if isinstance(entry, FileEntry)]
        # A draft gets its final mode late, so both its modes are possible.
        modes = {_STAGED_MODE, *(entry.mode for entry in files)}
        return draft.entry.mode in modes and self._is_torn(draft, files)

    def _is_torn(self, image: Image, files: Iterable[FileEntry]) -> bool:
        left = image.any_content
        contents = (self._readable(entry) for entry in files)
        return left is not None and any(meant is not None and is_torn(left, meant) for meant in contents)

    def _readable(self, entry: FileEntry) -> Content | None:
        """The bytes of an entry; None if the store may not have them, or a power cut destroyed them."""
        if entry.withheld is not None:
            return None
        try:
            return self.bodies.content(entry)
        except ConflictError:
            return None

    def _store_if_lost(self, spot: ResolvedPath, original: Image, draft: bytes) -> None:
        """Store the bytes of the original again, if a power cut destroyed them in the store."""
        entry = original.entry
        if isinstance(entry, FileEntry) and entry.withheld is None and self._readable(entry) is None:
            self._store(with_bytes(self.root.disk, spot, original, draft=draft))

    def _is_any_lost(self) -> bool:
        known = [entry for entry in (self.trace.before, *self.trace.meant) if isinstance(entry, FileEntry)]
        return any(entry.withheld is None and self._readable(entry) is None for entry in known)

    def set_time(self) -> None:
        """Set the time of a recreated directory, after everything in it is restored."""
        if self._made and isinstance(self.target, DirEntry) and self.target.mtime_ns:
            spot = self._spot()
            if spot is not None:
                self.root.disk.set_mtime(spot, self.target.mtime_ns)

    def _spot(self) -> ResolvedPath | None:
        """The resolved path; None if its directory is missing, or is now a link that leads elsewhere."""
        try:
            return self.spots.at(self.path)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return None

    def _is_ours(self, image: Image) -> bool:
        if image is self.trace.seen:
            return True
        return not image.special and any(same_state(image.entry, entry) for entry in self.trace.meant)

    def _is_known(self, image: Image) -> bool:
        """Whether the call made this draft.

        It then holds an intended entry, the preimage, or the torn beginning of either.
        """
        known = (self.trace.before, *self.trace.meant)
        # The mark is what we write into git's locks, and a draft of a lock holds it too.
        if self._is_mark(image.entry) or any(same_content(image.entry, entry) for entry in known):
            return True
        if not isinstance(image.entry, FileEntry) or image.entry.mode != _STAGED_MODE:
            return False
        torn = image.entry
        longer = [entry for entry in known if isinstance(entry, FileEntry) and entry.size >= torn.size]
        contents = (self._readable(entry) for entry in longer)
        return is_beginning(torn, self._mark) or any(
            content is not None and is_beginning(torn, content) for content in contents
        )

    def _store(self, theirs: Image) -> None:
        if theirs.content is not None:
            self.root.ledger.blobs.store(theirs.content)

    def _keep_found(self, spot: ResolvedPath, now: Image) -> None:
        theirs = with_bytes(self.root.disk, spot, now)
        self._keep(Change(self.path, self.target, theirs.entry), theirs)

    def _keep(self, change: Change, theirs: Image) -> None:
        """Record another process's change, so that its bytes can be found again whatever happens to the file."""
        if theirs.special or same_state(change.before, change.after):
            return
        self._store(theirs)
        with self.root.ledger.store.write() as tx:
            seen = self.root.ledger.last_seen(tx, self.root.disk.root.place_of(self.path))
            # A rollback may run twice; the change is recorded once.
            if seen is None or not same_state(seen, theirs.entry):
                self.root.ledger.external(tx, self.root.root, [change])


def is_beginning(torn: FileEntry, content: Content) -> bool:
    return digest_of_beginning(content, torn.size) == torn.digest


def is_torn(left: Content, meant: Content) -> bool:
    """Whether a power cut can leave these bytes of a file: of each sector a beginning, then zeros, up to any length."""
    if len(left) > len(meant):
        return False
    # A sector that was written, one of which the disk has only a beginning, or one that it never wrote (zeros).
    pairs = zip(_sectors(left), _sectors(meant), strict=False)
    return all(one == other[: len(one)] or other.startswith(one.rstrip(b"\0")) for one, other in pairs)


def _sectors(content: Content) -> Iterator[bytes]:
    pending = b""
    for piece in pieces_of(content):
        pending += piece
        end = len(pending) - len(pending) % _SECTOR_BYTES
        yield from (pending[at : at + _SECTOR_BYTES] for at in range(0, end, _SECTOR_BYTES))
        pending = pending[end:]
    if pending:
        yield pending


def _is_from_before_boot(entry: FileEntry) -> bool:
    return entry.mtime_ns < booted_at_ns()


def without(ours: Entry, now: Entry, before: Entry) -> Entry | None:
    """The present entry without what `ours` changed in `before`, content and mode apart; None if both changed the
    content.
    """
    is_our_content = same_content(now, ours) and not isinstance(ours, Absent)
    if not is_our_content and not same_content(ours, before):
        return None
    for kind in (FileEntry, DirEntry):
        if isinstance(ours, kind) and isinstance(now, kind) and isinstance(before, kind):
            # Each part that is still as the call left it goes back; a part that another process changed stays.
            mode = before.mode if now.mode == ours.mode else now.mode
            xattrs = before.xattrs if now.xattrs == ours.xattrs else now.xattrs
            return replace(before if is_our_content else now, mode=mode, xattrs=xattrs)
    return before if is_our_content else None


def rescue_note(path: RepoPath, digest: Digest) -> dict[str, str]:
    return {"path": to_wire(path), "reason": "rescued", "blob_ref": digest}


def rescued_in(call: CallRow) -> list[tuple[RepoPath, Digest]]:
    """The rescued blobs of a call by path.

    A path can occur more than once, if abort restored it in parts; the last comes last.
    """
    if '"blob_ref"' not in call.coverage:
        return []
    notes = [note for note in decode(call.coverage) if note["reason"] == "rescued"]
    return [(from_wire(note["path"]), Digest(note["blob_ref"])) for note in notes]
