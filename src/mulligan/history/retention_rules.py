"""Which bodies of blobs may be dropped, the cap of a session, and the eviction of the largest paths of one call.

A body stays while something needs it: a record of something that is kept names it, a later version is packed against
it, it is a part of a stream, a baseline has it as the content of a file, or an open call may restore it. Records that
need nothing any more are those of an evicted call, with the outside edits that the call came upon; of a scope that was
dropped; of a snapshot that is gone. A snapshot that was never finished counts as gone after a day.

One call may change more bytes than its session may keep. The call runs all the same, and every preimage is durable
while it is open. When it ends, it gives up its largest paths until the rest fits: their bodies go, a record says so,
and the coverage of the call lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import takewhile

from mulligan.files.snapshot.manifest import SNAPSHOTS
from mulligan.history.tables import CALLS, CHANGES, KEPT, SCOPES, TOUCHES, WSEQ_END, ChangeRow, TouchRow
from mulligan.session.tables import session_journal
from mulligan.store.blobs import BESIDE, BLOBS, BODIES, EVICTED, IN_DATABASE, PARTS, READABLE, BlobRow
from mulligan.store.journal import HEADS, RECORDS, REFS, STORE_HEAD, Journal, Record, RefRow, parse_record
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.entries import Change, FileEntry
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.limits import SESSION_CAP_BYTES
from mulligan.values.paths import to_wire

_UNFINISHED_SNAPSHOT_MAX = timedelta(days=1)
"""The records of a snapshot that is being made come before the snapshot, so for this long they count."""

_EDITS_SEARCHED = 50
"""How many successive outside edits of one path are searched for the call that came upon them."""

KnownNeeds = dict[bytes, RefRow]
"""A cache for many questions in a row: for a blob, a reference that was found to need it."""


def droppable(tx: Tx, digests: Iterable[Digest], *, holder: str, known: KnownNeeds | None = None) -> list[Digest]:
    """The bodies that nothing but `holder` needs, which is about to be given up: a call, a scope or a snapshot."""
    left, dropped = set(digests), set[Digest]()
    left -= {digest for row in tx.select(TOUCHES) if row.call != holder for digest in _digests_in(row)}
    needs = _Needs(tx, holder, {} if known is None else known)
    # A version must go before the one that it is packed against, so each round may set more of them free.
    while more := {digest for digest in left if not needs.has(digest, dropped)}:
        dropped |= more
        left -= more
    return sorted(dropped)


def drop_body(tx: Tx, digest: Digest) -> int:
    """Returns the bytes that become free. The caller records the drop in the same transaction."""
    row = tx.get(BLOBS, raw_digest(digest))
    if row is None or row.place not in READABLE:
        return 0
    delete_body(tx, row)
    tx.put(BLOBS, replace(row, place=EVICTED, stored=0, base=None, depth=0))
    return row.stored


def delete_body(tx: Tx, row: BlobRow) -> None:
    if row.place == IN_DATABASE:
        tx.delete(BODIES, row.digest)
    elif row.place == BESIDE:
        tx.drop_body(digest_from_raw(row.digest))
    # The parts of a stream are blobs of their own; only the list of them goes here.
    for part in tx.select(PARTS, {"digest": row.digest}):
        tx.delete(PARTS, part.digest, part.ordinal)


def _digests_in(row: TouchRow) -> Iterable[Digest]:
    """The digests of an open call's preimage and intended entries at a path. No record names these bytes yet."""
    entries = [decode(row.before), *decode(row.intended)]
    return (Digest(entry["digest"]) for entry in entries if "digest" in entry)


@fast_dataclass(slots=True, frozen=True)
class _Needs:
    """Finds what is still needed without `holder`."""

    tx: Tx
    holder: str
    known: KnownNeeds

    def has(self, digest: Digest, dropped: set[Digest]) -> bool:
        raw = raw_digest(digest)
        later = [row for row in self.tx.select(BLOBS, {"base": raw}) if digest_from_raw(row.digest) not in dropped]
        if any(row.place in READABLE for row in later) or is_part(self.tx, raw) or is_in_baseline(self.tx, raw):
            return True
        known = self.known.get(raw)
        if known is not None and not _is_given_up(self.tx, known, self.holder):
            return True
        # Newest first, because dropped references are mostly old.
        refs = self.tx.select(REFS, {"digest": raw}, descending=True)
        found = next((ref for ref in refs if not _is_given_up(self.tx, ref, self.holder)), None)
        if found is not None:
            self.known[raw] = found
        return found is not None


def _is_given_up(tx: Tx, ref: RefRow, holder: str) -> bool:
    """Whether a reference belongs to something that was given up, or to the holder."""
    row = tx.get(RECORDS, ref.journal, ref.seq)
    if row is None:
        return False
    record = parse_record(row)
    if "snapshot" in record.payload:
        return _is_snapshot_given_up(tx, record, holder)
    if "scope" in record.payload:
        session, scope = record.payload["session"], record.payload["scope"]
        return holder_of_scope(session, scope) == holder or not tx.has(SCOPES, session, scope)
    if record.kind == "external":
        calls = _calls_after_edit(tx, record)
        return bool(calls) and all(_is_call_given_up(tx, call, holder) for call in calls)
    return _is_call_given_up(tx, record.payload.get("call"), holder)


def _is_call_given_up(tx: Tx, call: object, holder: str) -> bool:
    found = tx.get(CALLS, call) if isinstance(call, str) else None
    return call == holder or (found is not None and bool(found.evicted))


def _is_snapshot_given_up(tx: Tx, record: Record, holder: str) -> bool:
    root, snapshot = record.payload["root"], record.payload["snapshot"]
    if holder_of_snapshot(root, snapshot) == holder:
        return True
    head = tx.get(HEADS, STORE_HEAD)
    newest = parse_timestamp(record.at if head is None else head.at)
    return not tx.has(SNAPSHOTS, root, snapshot) and newest - parse_timestamp(record.at) > _UNFINISHED_SNAPSHOT_MAX


def _calls_after_edit(tx: Tx, external: Record) -> list[str]:
    """The calls that came upon an outside edit: the edit is needed no longer than they are.

    Empty if no call has come upon it at one of its paths.
    """
    found: list[str] = []
    for change in tx.select(CHANGES, {"call": external.payload["id"]}):
        later = tx.select(
            CHANGES,
            {"place": change.place},
            between=("wseq", change.wseq + 1, WSEQ_END),
            order=("wseq",),
            limit=_EDITS_SEARCHED,
        )
        # Several edits may follow each other before a call comes upon the last of them.
        first = next((row.call for row in later if not _is_external(tx, row)), None)
        if first is None:
            return []
        found.append(first)
    return found


def bodies_of_edits_before(tx: Tx, call: str) -> set[Digest]:
    """The bodies of outside edits that a call was the first to come upon: they are given up with it."""
    found = set[Digest]()
    for change in tx.select(CHANGES, {"call": call}):
        earlier = tx.select(
            CHANGES,
            {"place": change.place},
            between=("wseq", 0, change.wseq),
            order=("wseq",),
            descending=True,
            limit=_EDITS_SEARCHED,
        )
        for row in takewhile(partial(_is_external, tx), earlier):
            found |= {Digest(one["digest"]) for one in (decode(row.before), decode(row.after)) if "digest" in one}
    return found


def _is_external(tx: Tx, change: ChangeRow) -> bool:
    call = tx.get(CALLS, change.call)
    return call is not None and bool(call.external)


def holder_of_snapshot(root: str, snapshot: str) -> str:
    """The name of a snapshot as a holder of bodies. The same content is a snapshot of its own in each root."""
    return f"{root}/{snapshot}"


def holder_of_scope(session: str, scope: str) -> str:
    """The name of a scope as a holder of bodies. No call and no snapshot has such a name."""
    return f"{session}//{scope}"


def is_part(tx: Tx, raw: bytes) -> bool:
    return bool(tx.select(PARTS, {"part": raw}, order=("part",), limit=1))


def is_in_baseline(tx: Tx, raw: bytes) -> bool:
    """Whether a baseline has it as the content of a file: the next change of that file will need it."""
    return bool(tx.select(KEPT, {"digest": raw}, limit=1))


# The cap of a session, and a call that alone is over it.


def cap_of(tx: Tx, session: SessionId) -> int:
    row = tx.get(META, f"cap:{session}")
    # An earlier version of Mulligan stored caps that are no whole numbers. They count as not set.
    return int(row.value) if row is not None and row.value.isdecimal() else SESSION_CAP_BYTES


def put_cap(tx: Tx, session: SessionId, cap_bytes: int) -> None:
    tx.put(META, MetaRow(f"cap:{session}", str(max(1, cap_bytes))))


def changes_over_cap(tx: Tx, session: SessionId, changes: Sequence[Change]) -> list[Change]:
    """The largest changes, without which the others fit the cap of the session."""
    if not changes:
        return []
    most = 0
    for change in changes:
        for entry in (change.before, change.after):
            most += entry.size if isinstance(entry, FileEntry) and entry.withheld is None else 0
    # Bytes that two changes share count twice here; only a call that may be over its cap is looked at more closely.
    if not most or most <= (cap := cap_of(tx, session)):
        return []
    if sum({entry.digest: entry.size for entry in _files_of(changes)}.values()) <= cap:
        return []
    stored = {entry.digest: _stored(tx, entry.digest) for entry in _files_of(changes)}
    over, found = sum(stored.values()) - cap, list[Change]()
    # The largest first, so that as few paths as possible lose their bytes.
    for change in sorted(changes, key=lambda one: sum(stored[digest] for digest in _digests_of(one)), reverse=True):
        if over <= 0:
            break
        over -= sum(stored.pop(digest, 0) for digest in _digests_of(change))
        found.append(change)
    return found


def coverage_of(given_up: Iterable[Change]) -> list[dict[str, str]]:
    """Notes for changes whose bodies were given up. The creation of a file can still be undone."""
    return [
        {
            "path": to_wire(change.path),
            "reason": "not_undoable" if isinstance(change.before, FileEntry) else "evicted",
        }
        for change in given_up
    ]


@fast_dataclass(slots=True, frozen=True)
class PathEviction:
    """An ended call gives up the bodies of some of its changes, in the transaction of its end."""

    call: str
    session: SessionId
    changes: Sequence[Change]
    given_up: Sequence[Change]

    def apply_in(self, tx: Tx, journal: Journal, *, at: str) -> None:
        kept = {digest for one in self.changes if one not in self.given_up for digest in _digests_of(one)}
        named = {digest for one in self.given_up for digest in _digests_of(one)}
        dropped = droppable(tx, named - kept, holder=self.call)
        body = {"call": self.call, "paths": [to_wire(one.path) for one in self.given_up], "digests": dropped}
        journal.append(tx, session_journal(self.session), "paths.evicted", body, at=at)
        for digest in dropped:
            drop_body(tx, digest)


def _files_of(changes: Iterable[Change]) -> list[FileEntry]:
    entries = [entry for one in changes for entry in (one.before, one.after)]
    return [entry for entry in entries if isinstance(entry, FileEntry) and entry.withheld is None]


def _digests_of(change: Change) -> set[Digest]:
    return {entry.digest for entry in _files_of([change])}


def _stored(tx: Tx, digest: Digest) -> int:
    row = tx.get(BLOBS, raw_digest(digest))
    return row.stored if row is not None and row.place in READABLE else 0
