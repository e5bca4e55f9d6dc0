"""Retention: which stored bytes stay, and the eviction of others. Caps, eviction, garbage collection.

A body stays while something needs it: a record of something that is kept names it, a later version is packed against
it, it is a part of a stream, a baseline has it as the content of a file, or an open call may restore it. Records that
need nothing any more are those of an evicted call, with the outside edits that the call found; of a scope that was
dropped; of a snapshot that is gone. A snapshot that was never finished counts as gone after a day.

Eviction drops the bodies of whole calls, the oldest first, and records that. It never evicts an open call, the newest
turn of an open session, a pinned call, or a body that something else still needs. Garbage collection deletes blobs that
no record names, except those that a call may be about to name. `forget` has a module of its own.

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
from typing import TYPE_CHECKING, Any

from mulligan.files.snapshot.manifest import SNAPSHOTS
from mulligan.history.tables import (
    CALLS,
    CHANGES,
    KEPT,
    OPEN,
    PINS,
    SCOPES,
    TOUCHES,
    WSEQ_END,
    CallRow,
    ChangeRow,
    TouchRow,
    changes_of,
    workspace_journal,
)
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.store.blobs import (
    BESIDE,
    BLOBS,
    BODIES,
    EVICTED,
    IN_DATABASE,
    PARTS,
    READABLE,
    TOUCH_INTERVAL_MS,
    BlobRow,
)
from mulligan.store.journal import HEADS, RECORDS, REFS, Journal, Record, RefRow, parse_record
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import FixedClock, parse_timestamp, timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.entries import Change, FileEntry
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES, SESSION_CAP_BYTES, STORE_CAP_BYTES
from mulligan.values.paths import to_wire

if TYPE_CHECKING:
    # The ledger asks this module about caps when a call ends, so it imports this one.
    from mulligan.history.ledger import Ledger
    from mulligan.store.verify import Progress

_GC_GRACE = timedelta(minutes=15)
_GC_BATCH = 500
_STORE_CAP = "store_cap"
_STORE_GROWN = "store_grown"
_MEASURE_EVERY_BYTES = 32 * MIB_BYTES
_MEASURES_PER_CAP = 8
_UNUSED_BASELINE_MAX = timedelta(days=30)
_UNFINISHED_SNAPSHOT_MAX = timedelta(days=1)
"""The records of a snapshot that is being made come before the snapshot, so for this long they count."""

_EDITS_SEARCHED = 50
"""How many successive outside edits of one path are searched for the call that found them."""

KnownNeeds = dict[bytes, RefRow]
"""A cache for many questions in a row: for a blob, a reference that was found to need it."""


def droppable(tx: Tx, digests: Iterable[Digest], *, holder: str, known: KnownNeeds | None = None) -> list[Digest]:
    """The bodies that nothing but `holder` needs, which is about to be given up: a call, a scope or a snapshot."""
    left, dropped = set(digests), set[Digest]()
    # An open call needs its preimages for an abort, though no record names them yet.
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
    newest = parse_timestamp(tx.select(HEADS, order=("ordinal",), descending=True, limit=1)[0].at)
    return not tx.has(SNAPSHOTS, root, snapshot) and newest - parse_timestamp(record.at) > _UNFINISHED_SNAPSHOT_MAX


def _calls_after_edit(tx: Tx, external: Record) -> list[str]:
    """The calls that found an outside edit: the edit is needed no longer than they are.

    Empty if no call has found it at one of its paths.
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
        # Several edits may follow each other before a call finds the last of them.
        first = next((row.call for row in later if not _is_external(tx, row)), None)
        if first is None:
            return []
        found.append(first)
    return found


def bodies_of_edits_before(tx: Tx, call: str) -> set[Digest]:
    """The bodies of outside edits that a call was the first to find: they are evicted with it."""
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


def digests_of(changes: Iterable[Change]) -> set[Digest]:
    """The digests of all bytes that the changes need. The store has none for uncaptured paths."""
    found: set[Digest] = set()
    for change in changes:
        for entry in (change.before, change.after):
            if isinstance(entry, FileEntry) and entry.withheld is None:
                found.add(entry.digest)
    return found


def blobs_named_in(call: CallRow) -> set[Digest]:
    """All blobs that the coverage of a call names."""
    if '"blob_ref"' not in call.coverage:
        return set()
    return {Digest(note["blob_ref"]) for note in decode(call.coverage) if "blob_ref" in note}


def is_stored(tx: Tx, digest: Digest) -> bool:
    row = tx.get(BLOBS, raw_digest(digest))
    return row is not None and row.place in READABLE


def _stored_size(tx: Tx, digest: Digest) -> int:
    row = tx.get(BLOBS, raw_digest(digest))
    return row.stored if row is not None and row.place in READABLE else 0


# Caps.


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
    # A first estimate without the store, because nearly no call is near its cap.
    most = 0
    for change in changes:
        for entry in (change.before, change.after):
            most += entry.size if isinstance(entry, FileEntry) and entry.withheld is None else 0
    # Bytes that two changes share count twice here; only a call that may be over its cap is looked at more closely.
    if not most or most <= (cap := cap_of(tx, session)):
        return []
    entries = [entry for one in changes for entry in (one.before, one.after)]
    sizes = {one.digest: one.size for one in entries if isinstance(one, FileEntry) and one.withheld is None}
    if sum(sizes.values()) <= cap:
        return []
    stored = {digest: _stored_size(tx, digest) for digest in sizes}
    over, found = sum(stored.values()) - cap, list[Change]()
    # The largest first, so that as few paths as possible lose their bytes.
    for change in sorted(changes, key=lambda one: sum(stored[digest] for digest in digests_of([one])), reverse=True):
        if over <= 0:
            break
        over -= sum(stored.pop(digest, 0) for digest in digests_of([change]))
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
        kept = {digest for one in self.changes if one not in self.given_up for digest in digests_of([one])}
        named = {digest for one in self.given_up for digest in digests_of([one])}
        dropped = droppable(tx, named - kept, holder=self.call)
        body = {"call": self.call, "paths": [to_wire(one.path) for one in self.given_up], "digests": dropped}
        journal.append(tx, session_journal(self.session), "paths.evicted", body, at=at)
        for digest in dropped:
            drop_body(tx, digest)


# Eviction.


@fast_dataclass(slots=True, frozen=True)
class SessionUsage:
    """The usage of one session: the stored bytes of the distinct blobs that its calls name."""

    session: str
    calls: int
    blobs: int
    bytes: int


def session_usage(tx: Tx, session: SessionId) -> SessionUsage:
    rows = tx.select(CALLS, {"session": session}, order=("id",))
    named = {digest for row in rows for digest in _bodies_of(tx, row)}
    blobs = [blob for digest in named if (blob := tx.get(BLOBS, raw_digest(digest))) and blob.place in READABLE]
    return SessionUsage(session, len(rows), len(blobs), sum(blob.stored for blob in blobs))


def _bodies_of(tx: Tx, call: CallRow) -> set[Digest]:
    return digests_of(changes_of(tx, call.id)) | blobs_named_in(call)


def set_cap(ledger: Ledger, session: SessionId, cap_bytes: int) -> int:
    """Set a session's cap, at least one byte, at once and for every process. Returns the previous cap."""
    if not isinstance(cap_bytes, int) or isinstance(cap_bytes, bool):
        raise fault("invalid_params", f"A cap is a whole number of bytes, not {cap_bytes!r}.", field="cap_bytes")
    with ledger.store.write() as tx:
        previous = cap_of(tx, session)
        put_cap(tx, session, cap_bytes)
    evict_over(ledger, session, max(1, cap_bytes))
    return previous


def store_cap_of(tx: Tx) -> int:
    row = tx.get(META, _STORE_CAP)
    return int(row.value) if row is not None else STORE_CAP_BYTES


def set_store_cap(ledger: Ledger, cap_bytes: int) -> list[str]:
    """Set the store's cap, at least one byte, at once and for every process. Returns the evicted calls."""
    with ledger.store.write() as tx:
        tx.put(META, MetaRow(_STORE_CAP, str(max(1, cap_bytes))))
    return _evict_over_store_cap(ledger)


def enforce_caps(ledger: Ledger, session: SessionId, grown_bytes: int) -> list[str]:
    """A session has grown: evict calls if it or the store is over its cap. Returns the evicted calls.

    Measuring is slow, so it waits until all processes together have added enough bytes.
    """
    evicted: list[str] = []
    with ledger.store.write() as tx:
        cap = cap_of(tx, session)
        session_is_due = _is_due(tx, f"grown:{session}", grown_bytes, cap)
        store_is_due = _is_due(tx, _STORE_GROWN, grown_bytes, store_cap_of(tx))
    if session_is_due:
        evicted += evict_over(ledger, session, cap)
    if store_is_due:
        evicted += _evict_over_store_cap(ledger)
    return evicted


def _is_due(tx: Tx, name: str, grown_bytes: int, cap_bytes: int) -> bool:
    """Whether enough bytes have come since the last measurement. If so, the count begins anew."""
    row = tx.get(META, name)
    grown = grown_bytes + (0 if row is None else int(row.value))
    due = grown >= min(_MEASURE_EVERY_BYTES, cap_bytes // _MEASURES_PER_CAP)
    tx.put(META, MetaRow(name, str(0 if due else grown)))
    return due


def enforce_all_caps(ledger: Ledger) -> list[str]:
    """Measure now: bring every session and the store under its cap. Returns the evicted calls."""
    with ledger.store.read() as tx:
        caps = {SessionId(row.id): cap_of(tx, SessionId(row.id)) for row in tx.select(SESSIONS)}
    evicted = [call for session, cap in caps.items() for call in evict_over(ledger, session, cap)]
    return evicted + _evict_over_store_cap(ledger)


def _evict_over_store_cap(ledger: Ledger) -> list[str]:
    """Evict the oldest calls of session after session, closed sessions first, until the store is under its cap."""
    with ledger.store.read() as tx:
        # The size on disk, which includes what no session names.
        surplus = ledger.store.size_bytes() - store_cap_of(tx)
        # Closed sessions first: their users are least likely to undo something.
        rows = sorted(tx.select(SESSIONS), key=lambda row: (row.closed_at is None, row.created_at))
    evicted: list[str] = []
    for session in (SessionId(row.id) for row in rows):
        if surplus <= 0:
            break
        with ledger.store.read() as tx:
            size = session_usage(tx, session).bytes
        # Two sessions may share bodies, so the session is measured again after the eviction.
        evicted += evict_over(ledger, session, max(0, size - surplus))
        with ledger.store.read() as tx:
            surplus -= size - session_usage(tx, session).bytes
    return evicted


def would_evict(tx: Tx, cap_bytes: int, *, size: int, limit: int) -> list[dict[str, Any]]:
    """The calls whose bodies a cap on the store would drop, in order, with the bytes that each keeps."""
    surplus = size - cap_bytes
    found: list[dict[str, Any]] = []
    seen: set[Digest] = set()
    for row in sorted(tx.select(SESSIONS), key=lambda row: (row.closed_at is None, row.created_at)):
        for call in _evictable(tx, SessionId(row.id)):
            if surplus <= 0 or len(found) >= limit:
                return found
            bodies = _bodies_of(tx, call) - seen
            seen |= bodies
            stored = sum(_stored_size(tx, digest) for digest in bodies)
            surplus -= stored
            found.append({"call_id": call.id, "session_id": row.id, "at": call.started_at, "bytes": stored})
    return found


def evict_over(ledger: Ledger, session: SessionId, cap_bytes: int) -> list[str]:
    """Drop the oldest calls' bodies until the session keeps at most `cap_bytes`. Returns the evicted calls."""
    # Measuring is slow and usually evicts nothing, so it does not block other writers.
    with ledger.store.read() as tx:
        if session_usage(tx, session).bytes <= cap_bytes:
            return []
    evicted: list[str] = []
    known: KnownNeeds = {}
    with ledger.store.write() as tx:
        size = session_usage(tx, session).bytes
        for call in _evictable(tx, session):
            if size <= cap_bytes:
                break
            size -= _evict(ledger, tx, call, known)
            evicted.append(call.id)
    return evicted


def drop_session(ledger: Ledger, session: SessionId) -> list[str]:
    """Drop every body of a session's calls, even of the newest turn. Returns the calls that lost their bodies."""
    dropped: list[str] = []
    known: KnownNeeds = {}
    with ledger.store.write() as tx:
        for call in tx.select(CALLS, {"session": session}, order=("id",)):
            # An open call needs its preimages, and a pin is the user's word against it.
            if call.status != "open" and not call.evicted and not tx.has(PINS, call.id):
                _evict(ledger, tx, call, known)
                dropped.append(call.id)
    return dropped


def _evictable(tx: Tx, session: SessionId) -> list[CallRow]:
    """The calls that have bodies and may lose them. The newest turn may not, unless the session is closed."""
    rows = tx.select(CALLS, {"session": session}, order=("id",))
    known = tx.get(SESSIONS, session)
    is_closed = known is not None and known.closed_at is not None
    last_turn = next((row.turn for row in reversed(rows)), None)
    old = [row for row in rows if is_closed or row.turn != last_turn]
    # An aborted call has no changes, but may have rescued bytes.
    with_bodies = [row for row in old if row.status == "committed" or blobs_named_in(row)]
    return [row for row in with_bodies if not row.evicted and not tx.has(PINS, row.id)]


def _evict(ledger: Ledger, tx: Tx, call: CallRow, known: KnownNeeds) -> int:
    """Drop the bodies of a call that nothing else needs, and record that. Returns the bytes that become free."""
    assert call.session is not None
    bodies = _with_bases(tx, _bodies_of(tx, call) | bodies_of_edits_before(tx, call.id))
    dropped = droppable(tx, bodies, holder=call.id, known=known)
    body = {"call": call.id, "digests": dropped}
    journal = session_journal(SessionId(call.session))
    ledger.journal.append(tx, journal, "call.evicted", body, at=ledger.now())
    return sum(drop_body(tx, digest) for digest in dropped)


def _with_bases(tx: Tx, digests: Iterable[Digest]) -> set[Digest]:
    """Add the blobs that these are packed against: such a blob stays until the last that needs it goes."""
    found, queue = set[Digest](), list(digests)
    while queue:
        digest = queue.pop()
        row = None if digest in found else tx.get(BLOBS, raw_digest(digest))
        found.add(digest)
        if row is not None and row.base is not None:
            queue.append(digest_from_raw(row.base))
    return found


def pin_call(ledger: Ledger, call: CallRow, *, off: bool = False) -> None:
    """Pin a call, so that eviction never takes what undo needs. `off` removes the pin."""
    with ledger.store.write() as tx:
        journal = session_journal(SessionId(call.session)) if call.session else workspace_journal(call.workspace)
        kind = "call.unpinned" if off else "call.pinned"
        ledger.journal.append(tx, journal, kind, {"call": call.id}, at=ledger.now())


# Garbage collection.


def _silent(what: str, done: int, total: int) -> None:
    return None


def collect_garbage(ledger: Ledger, progress: Progress = _silent) -> tuple[int, int]:
    """Delete what nothing names. Safe beside writers. Returns how many blobs and bytes it deleted."""
    # Loaded here to keep start-up fast: every process that writes loads this module, few collect garbage.
    from mulligan.history.baseline import forget_unused_baselines

    with ledger.store.write() as tx:
        forget_unused_baselines(tx, timestamp(FixedClock(ledger.clock.now() - _UNUSED_BASELINE_MAX)))
    with ledger.store.read() as tx:
        grace = int((ledger.clock.now() - _GC_GRACE).timestamp() * 1000) - TOUCH_INTERVAL_MS
        began = oldest_begin_ms(tx)
        cutoff = grace if began is None else min(grace, began)
        garbage = _garbage_in(tx, cutoff, progress)
    blobs = size = 0
    for start in range(0, len(garbage), _GC_BATCH):
        progress("blobs deleted", start, len(garbage))
        with ledger.store.write() as tx:
            for digest in garbage[start : start + _GC_BATCH]:
                # Checked again inside the transaction: another process may have named or touched it since.
                if (row := tx.get(BLOBS, digest)) is not None and _is_garbage(tx, row, cutoff):
                    delete_body(tx, row)
                    tx.delete(BLOBS, row.digest)
                    blobs, size = blobs + 1, size + row.stored
    progress("blobs deleted", len(garbage), len(garbage))
    with ledger.store.read() as tx:
        swept, swept_bytes = sweep_files(ledger, tx, before_s=cutoff / 1000)
    return blobs + swept, size + swept_bytes


def _garbage_in(tx: Tx, cutoff_ms: int, progress: Progress) -> list[bytes]:
    rows = tx.select(BLOBS)
    found = []
    for number, row in enumerate(rows):
        if number % _GC_BATCH == 0:
            progress("blobs checked", number, len(rows))
        if _is_garbage(tx, row, cutoff_ms):
            found.append(row.digest)
    return found


def oldest_begin_ms(tx: Tx) -> int | None:
    """The time since which blobs may belong to an open call, which names them only at its end. None: none is open."""
    rows = [row for one in tx.select(OPEN) if (row := tx.get(CALLS, one.call)) is not None]
    # A blob that exists already gets a new touch time only now and then, so its time may be a little too old.
    began = [int(parse_timestamp(row.started_at).timestamp() * 1000) - TOUCH_INTERVAL_MS for row in rows]
    return min(began, default=None)


def sweep_files(ledger: Ledger, tx: Tx, *, before_s: float) -> tuple[int, int]:
    """Delete files of bodies that have no row: a process died between the file and its row."""

    def has_row(digest: Digest) -> bool:
        row = tx.get(BLOBS, raw_digest(digest))
        return row is not None and row.place == BESIDE

    return ledger.store.bodies.sweep(has_row, before_s=before_s)


def _is_garbage(tx: Tx, row: BlobRow, cutoff_ms: int) -> bool:
    if row.touched_ms >= cutoff_ms or tx.select(REFS, {"digest": row.digest}, limit=1):
        return False
    needed = is_part(tx, row.digest) or is_in_baseline(tx, row.digest)
    return not needed and not tx.select(BLOBS, {"base": row.digest}, limit=1)
