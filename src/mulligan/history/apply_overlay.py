"""Applies what an isolated command did in its overlay to the real tree, and merges it with changes that others made
meanwhile.

`OverlayStart` records, when the command starts, what the most recently changed paths hold, because people most likely
work on those. `apply_overlay` writes the command's changes as changes of the call. If another process has changed a
path since, it merges the two over what the command found there. If that is impossible, the other process's state stays,
and the store has what the command wrote.
"""

from __future__ import annotations

import os
import stat
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial

from mulligan.exec.capture.overlay import IsolatedChange, attributes_of, kind_of_status
from mulligan.exec.capture.touched_paths import look
from mulligan.files.disk import Image
from mulligan.files.replace import TargetEntry
from mulligan.history.call import Call
from mulligan.history.ledger import newest_wseq
from mulligan.history.log import workspace_of
from mulligan.history.merge import Conflict, TakeTheirs, WriteMerged, merge_entry
from mulligan.history.open_root import OpenRoot
from mulligan.history.plan import in_batches
from mulligan.history.tables import CALLS, CHANGES, WSEQ_END, workspace_journal
from mulligan.history.undo_log import Intent
from mulligan.store.journal import records_of
from mulligan.store.protocol import Tx
from mulligan.values import limits
from mulligan.values.digest import Digest
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Content,
    DirEntry,
    Entry,
    FileEntry,
    KeepLarge,
    SymlinkEntry,
    digest_of_content,
    entry_from_bytes,
    whole,
)
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, path_from_bytes, to_wire

_RECENT_RECORDS = 50
_RECENT_PLACES = 200
"""The number of recent changes that Mulligan reads; more would delay the start of the command."""


@fast_dataclass(slots=True, frozen=True)
class OverlayStart:
    """The start of a command: by the clock that stamps files, and by the journal of the workspace.

    `entries`: what the most recently changed paths held, with the bytes in the store.
    """

    started_ns: int
    wseq: int
    entries: Mapping[bytes, Entry]

    @classmethod
    def now(cls, open_root: OpenRoot, call: Call) -> OverlayStart:
        started_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        with open_root.ledger.store.read() as tx:
            wseq = newest_wseq(tx, workspace_of(tx, open_root))
            recorded = _recent_entries(tx, open_root, wseq)
        # The changes of this call are not recorded yet, so they are added here.
        recorded |= {open_root.disk.root.place_of(change.path): change.after for change in call.changes()}
        found = {place: _store_entry(open_root, place, entry) for place, entry in recorded.items()}
        return cls(started_ns, wseq, {place: entry for place, entry in found.items() if entry is not None})

    def entry(self, open_root: OpenRoot, path: RepoPath) -> Entry | None:
        """What the command found at a path; None if unknown.

        If Mulligan did not read it at the start, this is what the first later change found there, unless that is newer.
        """
        place = open_root.disk.root.place_of(path)
        if place in self.entries:
            return self.entries[place]
        later = ("wseq", self.wseq + 1, WSEQ_END)
        with open_root.ledger.store.read() as tx:
            rows = tx.select(CHANGES, {"place": place}, between=later, order=("wseq",), limit=1)
            call = tx.get(CALLS, rows[0].call) if rows else None
        if call is None:
            return None
        entry = entry_from_bytes(rows[0].after if call.external else rows[0].before)
        return None if isinstance(entry, FileEntry) and entry.mtime_ns >= self.started_ns else entry

    def has_changed_since(self, path: bytes) -> bool:
        """Whether another process changed the path.

        A folder never counts, because its time changes with its content.
        """
        status = look(path)
        return status is not None and status.st_ctime_ns >= self.started_ns and not stat.S_ISDIR(status.st_mode)

    def may_be_removed_since(self, path: bytes) -> bool:
        """Whether another process may have removed the path: it is missing, and the nearest folder above changed."""
        if look(path) is not None:
            return False
        folder = os.path.dirname(path)
        while (status := look(folder)) is None:
            folder = os.path.dirname(folder)
        return status.st_mtime_ns >= self.started_ns


def _recent_entries(tx: Tx, open_root: OpenRoot, wseq: int) -> dict[bytes, Entry]:
    """The recorded entries of the most recently changed paths below the root."""
    root, found = open_root.disk.root.place_of(ROOT) + b"/", dict[bytes, bytes]()
    records = records_of(tx, workspace_journal(workspace_of(tx, open_root)), after=max(0, wseq - _RECENT_RECORDS))
    for record in reversed(list(records)):
        call = record.payload.get("call") or record.payload.get("id")
        for row in tx.select(CHANGES, {"call": call}, limit=_RECENT_PLACES - len(found)):
            if row.place.startswith(root):
                found.setdefault(row.place, row.after)
        if len(found) == _RECENT_PLACES:
            break
    return {place: entry_from_bytes(after) for place, after in found.items()}


def _store_entry(open_root: OpenRoot, place: bytes, recorded: Entry) -> Entry | None:
    """The present entry of a path, with its bytes in the store. None: too large to merge, or not readable."""
    with suppress(PermissionError):
        status = look(place)
        if status is not None and stat.S_ISREG(status.st_mode):
            found = (status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode))
            if isinstance(recorded, FileEntry) and found == (recorded.size, recorded.mtime_ns, recorded.mode):
                return recorded
            if status.st_size > limits.MERGE_MAX_BYTES:
                return None
        image = open_root.image(path_from_bytes(place[len(open_root.disk.root.place_of(ROOT)) + 1 :]))
        if image.content is not None:
            open_root.ledger.blobs.store(image.content)
        return None if image.special else image.entry
    return None


def apply_overlay(
    open_root: OpenRoot, call: Call, changes: Sequence[IsolatedChange], *, start: OverlayStart
) -> tuple[tuple[bytes, Digest], ...]:
    """Apply all changes of an isolated command, or none. Until here the real tree is untouched.

    Returns the conflicts, where another process's state stays: the path, and the digest of what the command wrote.
    """
    root = open_root.disk.root.path
    inner = [one for one in changes if one.path != root and not _is_special(call, root, one)]
    # Removals first and children first: a file may take the place of a folder.
    removed = [one for one in reversed(inner) if one.kind == "absent"]
    ordered = [*removed, *(one for one in inner if one.kind != "absent")]
    removing = {one.path for one in removed}
    # Checked before the call itself changes any folder and its time.
    gone = {one.path for one in ordered if start.may_be_removed_since(one.path)}
    kept_aside: dict[bytes, Digest] = {}
    # One savepoint around all batches: a refusal in the last one rolls back the first.
    with call.savepoint():
        for some in in_batches(ordered):
            batch = {_path(root, change): change for change in some}
            steps = {
                path: _Step(one, cache(partial(start.entry, open_root, path)), start, removing, one.path in gone)
                for path, one in batch.items()
            }
            call.change([_intent(open_root, call, path, one, kept_aside=kept_aside) for path, one in steps.items()])
    return tuple(kept_aside.items())


def _is_special(call: Call, root: bytes, change: IsolatedChange) -> bool:
    """Whether the change is of a device, FIFO or socket. It is not applied, and the coverage says so."""
    status = look(change.path)
    kinds = {change.kind, "file" if status is None else kind_of_status(status)}
    if "special" in kinds:
        call.coverage.append({"path": to_wire(_path(root, change)), "reason": "special_file"})
    return "special" in kinds


def _path(root: bytes, change: IsolatedChange) -> RepoPath:
    return path_from_bytes(change.path[len(root) :].lstrip(b"/"))


@fast_dataclass(slots=True)
class _Step:
    """One change of the command, with the facts to decide whether another process changed the path too."""

    change: IsolatedChange
    entry_at_start: Callable[[], Entry | None]
    """cached, because this call may change the file later under another name"""
    start: OverlayStart
    removing: set[bytes]
    """all paths that the command removed; the call plans children before their folders"""
    may_be_gone: bool

    def is_disputed(self, now: Image) -> bool:
        """Whether the path may hold something else than the command found there."""
        if isinstance(now.entry, Absent) and not now.special:
            # The command's files need their folder, even if another process removed it.
            return self.may_be_gone and self.change.kind != "dir"
        return isinstance(now.entry, DirEntry) or self.start.has_changed_since(self.change.path)

    def holds_others(self, now: Image) -> bool:
        """Whether the path is a folder that must stay, because something in it stays."""
        if self.change.kind == "dir" or not isinstance(now.entry, DirEntry):
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(self.change.path)
            return not self.removing.issuperset(os.path.join(self.change.path, name) for name in names)
        return False


def _intent(open_root: OpenRoot, call: Call, path: RepoPath, step: _Step, *, kept_aside: dict[bytes, Digest]) -> Intent:
    is_captured = open_root.disk.capture.withheld(path) is None
    keep_large = open_root.ledger.blobs.store_large if is_captured else None

    def plan(image: Image) -> TargetEntry:
        sides = _Sides(image, _wanted(step.change, keep_large), step)
        if not is_captured and step.is_disputed(image):
            # The store does not have the bytes that the command found, so a merge has no base.
            wanted = None
        else:
            wanted = _merge(open_root, sides)
        if wanted is None:
            _note_conflict(call, path)
            if sides.wanted.content is not None and is_captured:
                digest = open_root.ledger.blobs.store(sides.wanted.content)
                call.account.hand_out(digest)
                kept_aside[step.change.path] = digest
            wanted = sides.theirs
        # This path stays, so the folders above it must stay too.
        if not isinstance(wanted.entry, Absent):
            step.removing.discard(step.change.path)
        return wanted

    return Intent(path, plan, lifts=True)


def _note_conflict(call: Call, path: RepoPath) -> None:
    """Note a conflict once, though a call may plan a path several times."""
    note = {"path": to_wire(path), "reason": "conflicted"}
    if note not in call.coverage:
        call.coverage.append(note)


def _wanted(change: IsolatedChange, keep_large: KeepLarge | None) -> TargetEntry:
    """The state of a path in the overlay. Without `keep_large`, the bytes of a large file are in memory only."""
    if change.kind == "absent" or change.source is None:
        return TargetEntry(ABSENT)
    if change.kind == "symlink":
        return TargetEntry(SymlinkEntry(os.fsdecode(os.readlink(change.source))))
    if change.kind == "dir":
        return TargetEntry(DirEntry(change.mode, xattrs=_xattrs(change.source)))
    with open(change.source, "rb") as file:
        status = os.fstat(file.fileno())
        if keep_large is None or status.st_size <= limits.WHOLE_MAX_BYTES:
            data: Content = file.read()
        else:
            data = keep_large(iter(lambda: file.read(limits.BLOB_PART_BYTES), b""))
    digest, xattrs = digest_of_content(data), _xattrs(change.source)
    return TargetEntry(FileEntry(digest, len(data), change.mode, mtime_ns=status.st_mtime_ns, xattrs=xattrs), data)


def _xattrs(source: bytes) -> tuple[tuple[str, str], ...]:
    own = {name: value for name, value in attributes_of(source).items() if name.startswith("user.")}
    return tuple((name, b64encode(own[name]).decode("ascii")) for name in sorted(own))


@fast_dataclass(slots=True, frozen=True)
class _Sides:
    """The two sides of a merge: the present state of a path, and its state in the overlay."""

    now: Image
    wanted: TargetEntry
    step: _Step

    @property
    def theirs(self) -> TargetEntry:
        return TargetEntry(self.now.entry, self.now.any_content)

    def content(self, entry: Entry) -> Content | None:
        """The bytes of an entry that is one of the two sides."""
        for side, data in ((self.now.entry, self.now.any_content), (self.wanted.entry, self.wanted.content)):
            if side == entry or (
                isinstance(side, FileEntry) and isinstance(entry, FileEntry) and side.digest == entry.digest
            ):
                return data
        return None


def _merge(open_root: OpenRoot, sides: _Sides) -> TargetEntry | None:
    """Merge a path that another process changed while the command ran.

    None: a conflict, so the other process's state stays.
    """
    step = sides.step
    if step.holds_others(sides.now):
        return None
    if not step.is_disputed(sides.now):
        # If the call plans the path again, this is what the command found: the call itself may change the file under
        # another name.
        step.entry_at_start = lambda: sides.now.entry
        return sides.wanted
    before = step.entry_at_start()
    if before is None:
        return sides.wanted if isinstance(sides.now.entry, Absent | DirEntry) else None
    if sides.now.holds(before):
        return sides.wanted
    merged = merge_entry(before, sides.now.entry, sides.wanted.entry, _reader(open_root, sides))
    if isinstance(merged, Conflict):
        return None
    if isinstance(merged, WriteMerged):
        return TargetEntry(merged.entry, merged.content or sides.content(merged.entry))
    return sides.wanted if isinstance(merged, TakeTheirs) else sides.theirs


def _reader(open_root: OpenRoot, sides: _Sides) -> Callable[[Digest], bytes]:
    known = {
        entry.digest: data
        for entry, data in ((sides.now.entry, sides.now.content), (sides.wanted.entry, sides.wanted.content))
        if isinstance(entry, FileEntry) and data is not None
    }
    return lambda digest: whole(known[digest]) if digest in known else open_root.ledger.blobs.read(digest)
