"""Applying what an isolated command did to the real tree, over whatever somebody else did there meanwhile."""

from __future__ import annotations

import os
import stat
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.history.intents import Intent
from mulligan.history.ledger import newest_wseq, workspace_journal
from mulligan.history.log import workspace_of
from mulligan.history.merge import Conflict, TakeTheirs, WriteMerged, merge_entry
from mulligan.history.tables import CALLS, CHANGES, WSEQ_END
from mulligan.store.journal import records_of
from mulligan.store.protocol import Tx
from mulligan.values import limits
from mulligan.values.canonical import decode
from mulligan.values.content import Content, KeepLarge, digest_of_content, whole
from mulligan.values.digest import Digest
from mulligan.values.entries import ABSENT, Absent, DirEntry, Entry, FileEntry, SymlinkEntry, entry_from_json
from mulligan.values.paths import ROOT, RepoPath, path_from_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.disk import Image
from mulligan.workspace.exec.ledger import look
from mulligan.workspace.exec.overlay import IsolatedChange, attributes_of, kind_of_status
from mulligan.workspace.writing import Wanted

_CHANGES_PER_EFFECT = 500

_LATELY_RECORDS = 50
_LATELY_PLACES = 200
"""How far the record is looked through for what people may be at work on: an isolated command has to start soon."""


@plain(slots=True, frozen=True)
class Start:
    """When a command began: by the clock that files are stamped with, and by the journal of the workspace.

    `found`: what was there, at the places that were changed last, with its bytes in the store.
    """

    moment_ns: int
    wseq: int
    found: Mapping[bytes, Entry]

    @classmethod
    def now(cls, desk: Desk, call: Call) -> Start:
        moment_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        with desk.ledger.store.read() as tx:
            wseq = newest_wseq(tx, workspace_of(tx, desk))
            known = _lately(tx, desk, wseq)
        known |= {desk.disk.root.place_of(change.path): change.after for change in call.changes()}
        found = {place: _as_found(desk, place, entry) for place, entry in known.items()}
        return cls(moment_ns, wseq, {place: entry for place, entry in found.items() if entry is not None})

    def saw(self, desk: Desk, path: RepoPath) -> Entry | None:
        """What the command found at a path, as far as anybody can say.

        Else what whoever changed it first since then has found there, if that was older than the command.
        """
        place = desk.disk.root.place_of(path)
        if place in self.found:
            return self.found[place]
        with desk.ledger.store.read() as tx:
            rows = tx.select(
                CHANGES, {"place": place}, between=("wseq", self.wseq + 1, WSEQ_END), order=("wseq",), limit=1
            )
            call = tx.get(CALLS, rows[0].call) if rows else None
        if call is None:
            return None
        entry = entry_from_json(decode(rows[0].after if call.external else rows[0].before))
        return None if isinstance(entry, FileEntry) and entry.mtime_ns >= self.moment_ns else entry


def _lately(tx: Tx, desk: Desk, wseq: int) -> dict[bytes, Entry]:
    """What the record says of the places below the root that were changed last."""
    root, found = desk.disk.root.place_of(ROOT) + b"/", dict[bytes, bytes]()
    records = records_of(tx, workspace_journal(workspace_of(tx, desk)), after=max(0, wseq - _LATELY_RECORDS))
    for record in reversed(list(records)):
        call = record.payload.get("call") or record.payload.get("id")
        for row in tx.select(CHANGES, {"call": call}, limit=_LATELY_PLACES - len(found)):
            if row.place.startswith(root):
                found.setdefault(row.place, row.after)
        if len(found) == _LATELY_PLACES:
            break
    return {place: entry_from_json(decode(after)) for place, after in found.items()}


def _as_found(desk: Desk, place: bytes, known: Entry) -> Entry | None:
    """What is there: what is known, if it looks so, else it is read. None: too large to be merged, or not for us."""
    with suppress(PermissionError):
        status = look(place)
        if isinstance(known, FileEntry) and status is not None and _looks_so(known, status):
            return known
        if status is not None and stat.S_ISREG(status.st_mode) and status.st_size > limits.MERGE_MAX_BYTES:
            return None
        image = desk.image(path_from_bytes(place[len(desk.disk.root.place_of(ROOT)) + 1 :]))
        if image.content is not None:
            desk.ledger.blobs.store(image.content)
        return None if image.special else image.entry
    return None


def _looks_so(known: FileEntry, now: os.stat_result) -> bool:
    found = (now.st_size, now.st_mtime_ns, stat.S_IMODE(now.st_mode))
    return stat.S_ISREG(now.st_mode) and found == (known.size, known.mtime_ns, known.mode)


def take_over(
    desk: Desk, call: Call, changes: Sequence[IsolatedChange], *, start: Start
) -> tuple[tuple[bytes, Digest], ...]:
    """Apply what an isolated command did, wholly or not at all. Until here the real tree has not seen any of it.

    Where it had to give way to somebody else: the path, and what the command had there, by its digest in the store.
    """
    root = desk.disk.root.path
    inner = [one for one in changes if one.path != root and not _is_special(call, root, one)]
    leaving = [one for one in reversed(inner) if one.kind == "absent"]
    coming = [one for one in inner if one.kind != "absent"]
    ordered = [*leaving, *coming]
    since, going = _Since(start.moment_ns), {one.path for one in leaving}
    gone = {one.path for one in ordered if since.may_be_gone(one.path)}  # before we ourselves change any folder
    given_way: dict[bytes, Digest] = {}
    with call.savepoint():
        for at in range(0, len(ordered), _CHANGES_PER_EFFECT):
            part = {_path(root, change): change for change in ordered[at : at + _CHANGES_PER_EFFECT]}
            made = {
                path: _Made(one, cache(partial(start.saw, desk, path)), since, going, one.path in gone)
                for path, one in part.items()
            }
            call.change([_intent(desk, call, path, one, given_way=given_way) for path, one in made.items()])
    return tuple(given_way.items())


def _is_special(call: Call, root: bytes, change: IsolatedChange) -> bool:
    """A device, FIFO or socket that the command made or removed stays as it is in the real tree, which is said."""
    status = look(change.path)
    kinds = {change.kind, "file" if status is None else kind_of_status(status)}
    if "special" in kinds:
        call.coverage.append({"path": to_wire(_path(root, change)), "reason": "special_file"})
    return "special" in kinds


def _path(root: bytes, change: IsolatedChange) -> RepoPath:
    return path_from_bytes(change.path[len(root) :].lstrip(b"/"))


@plain(slots=True, frozen=True)
class _Since:
    """What the real tree says of a moment: when the command began."""

    moment_ns: int

    def has_changed(self, path: bytes) -> bool:
        """Whether somebody changed what is there. Of a folder nobody can say: its content changes its time too."""
        status = look(path)
        return status is not None and status.st_ctime_ns >= self.moment_ns and not stat.S_ISDIR(status.st_mode)

    def may_be_gone(self, path: bytes) -> bool:
        """Whether somebody may have removed it: nothing is there, and the folder it would be in has changed."""
        if look(path) is not None:
            return False
        folder = os.path.dirname(path)
        while (status := look(folder)) is None:
            folder = os.path.dirname(folder)
        return status.st_mtime_ns >= self.moment_ns


@dataclass(slots=True)
class _Made:
    """What an isolated command made of a path, and what was there before, as far as that is known."""

    change: IsolatedChange
    saw: Callable[[], Entry | None]
    """what the command found there, as far as anybody can say; asked once, as later it may be our own doing"""
    since: _Since
    going: set[bytes]
    """all that it removed, without what stays nevertheless; children are planned before their folders"""
    may_be_gone: bool

    def is_disputed(self, now: Image) -> bool:
        """Whether what is there may not be what the command saw there. A folder that is gone is needed all the same."""
        if isinstance(now.entry, Absent) and not now.special:
            return self.may_be_gone and self.change.kind != "dir"
        return isinstance(now.entry, DirEntry) or self.since.has_changed(self.change.path)

    def holds_others(self, now: Image) -> bool:
        """Whether it is a folder that cannot go, as something is in it that does not."""
        if self.change.kind == "dir" or not isinstance(now.entry, DirEntry):
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(self.change.path)
            return not self.going.issuperset(os.path.join(self.change.path, name) for name in names)
        return False


def _intent(desk: Desk, call: Call, path: RepoPath, made: _Made, *, given_way: dict[bytes, Digest]) -> Intent:
    is_captured = desk.disk.capture.withheld(path) is None
    keep_large = desk.ledger.blobs.store_large if is_captured else None

    def plan(image: Image) -> Wanted:
        sides = _Sides(image, _wanted(made.change, keep_large), made)
        if not is_captured and sides.made.is_disputed(image):
            # Without the bytes of what the command saw there is nothing to merge with.
            wanted = None
        else:
            wanted = _merged(desk, sides)
        if wanted is None:
            _name_conflict(call, path)
            given_way.update(_kept_aside(desk, call, path, sides))
            wanted = sides.kept
        if not isinstance(wanted.entry, Absent):
            made.going.discard(made.change.path)
        return wanted

    return Intent(path, plan, lifts=True)


def _wanted(change: IsolatedChange, keep_large: KeepLarge | None) -> Wanted:
    """Without `keep_large`, the bytes of a large file are in memory only."""
    if change.kind == "absent" or change.source is None:
        return Wanted(ABSENT)
    if change.kind == "symlink":
        return Wanted(SymlinkEntry(os.fsdecode(os.readlink(change.source))))
    if change.kind == "dir":
        return Wanted(DirEntry(change.mode, xattrs=_xattrs(change.source)))
    with open(change.source, "rb") as file:
        status = os.fstat(file.fileno())
        if keep_large is None or status.st_size <= limits.WHOLE_MAX_BYTES:
            data: Content = file.read()
        else:
            data = keep_large(iter(lambda: file.read(limits.BLOB_PART_BYTES), b""))
    digest, xattrs = digest_of_content(data), _xattrs(change.source)
    return Wanted(FileEntry(digest, len(data), change.mode, mtime_ns=status.st_mtime_ns, xattrs=xattrs), data)


def _xattrs(source: bytes) -> tuple[tuple[str, str], ...]:
    own = {name: value for name, value in attributes_of(source).items() if name.startswith("user.")}
    return tuple((name, b64encode(own[name]).decode("ascii")) for name in sorted(own))


@plain(slots=True, frozen=True)
class _Sides:
    """What a path holds now, and what an isolated command would have there."""

    now: Image
    wanted: Wanted
    made: _Made

    def content(self, entry: Entry) -> Content | None:
        """The bytes of an entry that is one of the two sides."""
        for side, data in ((self.now.entry, self.now.any_content), (self.wanted.entry, self.wanted.content)):
            if side == entry or (
                isinstance(side, FileEntry) and isinstance(entry, FileEntry) and side.digest == entry.digest
            ):
                return data
        return None

    @property
    def kept(self) -> Wanted:
        return Wanted(self.now.entry, self.now.any_content)


def _merged(desk: Desk, sides: _Sides) -> Wanted | None:
    """A path that somebody changed while the command ran is merged. None: it stays theirs, which has to be said."""
    if sides.made.holds_others(sides.now):
        return None
    if not sides.made.is_disputed(sides.now):
        # Should it be planned again, this is what the command saw: under another name we may change it ourselves.
        sides.made.saw = lambda: sides.now.entry
        return sides.wanted
    before = sides.made.saw()
    if before is None:
        return sides.wanted if isinstance(sides.now.entry, Absent | DirEntry) else None
    if sides.now.holds(before):
        return sides.wanted
    merged = merge_entry(before, sides.now.entry, sides.wanted.entry, _reader(desk, sides))
    if isinstance(merged, Conflict):
        return None
    if isinstance(merged, WriteMerged):
        return Wanted(merged.entry, merged.content or sides.content(merged.entry))
    return sides.wanted if isinstance(merged, TakeTheirs) else sides.kept


def _name_conflict(call: Call, path: RepoPath) -> None:
    """Said once, however often it is planned again."""
    note = {"path": to_wire(path), "reason": "conflicted"}
    if note not in call.coverage:
        call.coverage.append(note)


def _kept_aside(desk: Desk, call: Call, path: RepoPath, sides: _Sides) -> dict[bytes, Digest]:
    """What the command would have had there, in the store, and named by the call's record."""
    if sides.wanted.content is None or desk.disk.capture.withheld(path) is not None:
        return {}
    digest = desk.ledger.blobs.store(sides.wanted.content)
    call.account.hand_out(digest)
    return {sides.made.change.path: digest}


def _reader(desk: Desk, sides: _Sides) -> Callable[[Digest], bytes]:
    known = {
        entry.digest: data
        for entry, data in ((sides.now.entry, sides.now.content), (sides.wanted.entry, sides.wanted.content))
        if isinstance(entry, FileEntry) and data is not None
    }
    return lambda digest: whole(known[digest]) if digest in known else desk.ledger.blobs.read(digest)
