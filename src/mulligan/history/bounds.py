"""Bounds: how much is kept, what goes first, and how space comes back.

Eviction drops the bodies of whole calls, oldest first, and leaves a record. It never takes the open call, the newest
turn of a session, a pin, or a body that something kept still needs. `gc` deletes blobs that no record names, unless a
call that was open when it began could still be about to name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

from mulligan.history.kept import forget_unused
from mulligan.history.ledger import Ledger, digests_of
from mulligan.history.log import changes_of
from mulligan.history.tables import CALLS, KEPT, OPEN, PINS, CallRow
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.store.blobs import BESIDE, BLOBS, BODIES, EVICTED, IN_DATABASE, PARTS, READABLE, BlobRow
from mulligan.store.journal import RECORDS, REFS, RefRow, parse_record
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.clock import FixedClock, parse_timestamp, timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.ids import SessionId
from mulligan.values.limits import SESSION_CAP_BYTES, STORE_CAP_BYTES

_GC_GRACE = timedelta(minutes=15)
_GC_BATCH = 500
_STORE_CAP = "store_cap"
_KEPT_UNUSED = timedelta(days=30)


@dataclass(slots=True, frozen=True)
class Usage:
    """What one session keeps: stored bytes of the distinct blobs its calls name."""

    session: str
    calls: int
    blobs: int
    bytes: int


def usage_of(tx: Tx, session: SessionId) -> Usage:
    rows = tx.select(CALLS, {"session": session}, order=("id",))
    named = {digest for row in rows for digest in _bodies_of(tx, row)}
    blobs = [blob for digest in named if (blob := tx.get(BLOBS, raw_digest(digest))) and blob.place in READABLE]
    return Usage(session, len(rows), len(blobs), sum(blob.stored for blob in blobs))


def usages(tx: Tx) -> Iterator[Usage]:
    for session in tx.select(SESSIONS):
        yield usage_of(tx, SessionId(session.id))


def _bodies_of(tx: Tx, call: CallRow) -> set[Digest]:
    return digests_of(changes_of(tx, call.id))


def cap_of(tx: Tx, session: SessionId) -> int:
    row = tx.get(META, f"cap:{session}")
    return int(row.value) if row is not None else SESSION_CAP_BYTES


def set_cap(ledger: Ledger, session: SessionId, cap_bytes: int) -> int:
    """A session's cap, at least one byte, in force at once and for every process. The previous one."""
    with ledger.store.write() as tx:
        previous = cap_of(tx, session)
        tx.put(META, MetaRow(f"cap:{session}", str(max(1, cap_bytes))))
    keep_bounds(ledger, session)
    return previous


def store_cap_of(tx: Tx) -> int:
    row = tx.get(META, _STORE_CAP)
    return int(row.value) if row is not None else STORE_CAP_BYTES


def set_store_cap(ledger: Ledger, cap_bytes: int) -> list[str]:
    """The store's cap, at least one byte, in force at once and for every process. The calls evicted."""
    with ledger.store.write() as tx:
        tx.put(META, MetaRow(_STORE_CAP, str(max(1, cap_bytes))))
    return _keep_store_bound(ledger)


def keep_bounds(ledger: Ledger, session: SessionId) -> list[str]:
    """Evict until the session is under its cap and the store under its own. The calls evicted."""
    with ledger.store.read() as tx:
        cap = cap_of(tx, session)
    return evict_over(ledger, session, cap) + _keep_store_bound(ledger)


def _keep_store_bound(ledger: Ledger) -> list[str]:
    with ledger.store.read() as tx:
        cap = store_cap_of(tx)
    return _evict_everywhere(ledger, cap) if ledger.store.size_bytes() > cap else []


def _evict_everywhere(ledger: Ledger, cap_bytes: int) -> list[str]:
    """The store is over its cap: every session gives up its oldest calls until the sum fits; closed sessions first."""
    with ledger.store.read() as tx:
        rows = sorted(tx.select(SESSIONS), key=lambda row: (row.closed_at is None, row.created_at))
        sizes = {SessionId(row.id): usage_of(tx, SessionId(row.id)).bytes for row in rows}
    surplus, evicted = sum(sizes.values()) - cap_bytes, []
    for session, size in sizes.items():
        if surplus <= 0:
            break
        evicted += evict_over(ledger, session, max(0, size - surplus))
        with ledger.store.read() as tx:
            surplus -= size - usage_of(tx, session).bytes
    return evicted


def evict_over(ledger: Ledger, session: SessionId, cap_bytes: int) -> list[str]:
    """Drop the oldest calls' bodies until the session keeps at most `cap_bytes`. The calls evicted."""
    evicted: list[str] = []
    with ledger.store.write() as tx:
        kept = usage_of(tx, session).bytes
        for call in _evictable(tx, session):
            if kept <= cap_bytes:
                break
            kept -= _evict(ledger, tx, call)
            evicted.append(call.id)
    return evicted


def drop_session(ledger: Ledger, session: SessionId) -> list[str]:
    """Drop every body of a session's calls, the newest turn's too: it is closed and asked to be forgotten."""
    dropped: list[str] = []
    with ledger.store.write() as tx:
        for call in tx.select(CALLS, {"session": session}, order=("id",)):
            if call.status != "open" and not call.evicted and not tx.has(PINS, call.id):
                _evict(ledger, tx, call)
                dropped.append(call.id)
    return dropped


def _evictable(tx: Tx, session: SessionId) -> list[CallRow]:
    rows = tx.select(CALLS, {"session": session}, order=("id",))
    last_turn = next((row.turn for row in reversed(rows)), None)
    return [
        row
        for row in rows
        if row.status == "committed" and not row.evicted and row.turn != last_turn and not tx.has(PINS, row.id)
    ]


def _evict(ledger: Ledger, tx: Tx, call: CallRow) -> int:
    """Record it with what is dropped: the bodies that nothing kept still needs. Bytes given back."""
    assert call.session is not None
    doomed = _doomed_with(tx, call)
    body = {"call": call.id, "digests": doomed}
    journal = session_journal(SessionId(call.session))
    ledger.journal.append(tx, journal, "call.evicted", body, at=ledger.now())
    return sum(_drop_body(ledger, tx, digest) for digest in doomed)


def _doomed_with(tx: Tx, call: CallRow) -> list[Digest]:
    """The call's bodies that nothing else needs; a version goes before the one it is packed against."""
    left, doomed = set(_bodies_of(tx, call)), set[Digest]()
    while more := {digest for digest in left if not _is_needed(tx, digest, doomed, but_for=call.id)}:
        doomed |= more
        left -= more
    return sorted(doomed)


def _is_needed(tx: Tx, digest: Digest, doomed: set[Digest], *, but_for: str) -> bool:
    """Named by a record of something kept, or by a part or a later version that is."""
    raw = raw_digest(digest)
    later = [row for row in tx.select(BLOBS, {"base": raw}) if digest_from_raw(row.digest) not in doomed]
    if any(row.place in READABLE for row in later) or _is_part(tx, raw) or _is_kept(tx, raw):
        return True
    return any(not _is_given_up(tx, ref, but_for) for ref in tx.select(REFS, {"digest": raw}))


def _is_given_up(tx: Tx, ref: RefRow, but_for: str) -> bool:
    """Whether a reference is of a call that is evicted, or about to be."""
    row = tx.get(RECORDS, ref.journal, ref.seq)
    call = parse_record(row).payload.get("call") if row is not None else None
    if call == but_for:
        return True
    found = tx.get(CALLS, call) if isinstance(call, str) else None
    return found is not None and bool(found.evicted)


def _drop_body(ledger: Ledger, tx: Tx, digest: Digest) -> int:
    row = tx.get(BLOBS, raw_digest(digest))
    if row is None or row.place not in READABLE:
        return 0
    _delete_body(ledger, tx, row)
    tx.put(BLOBS, replace(row, place=EVICTED, stored=0, base=None, depth=0))
    return row.stored


def _delete_body(ledger: Ledger, tx: Tx, row: BlobRow) -> None:
    if row.place == IN_DATABASE:
        tx.delete(BODIES, row.digest)
    elif row.place == BESIDE:
        ledger.store.bodies.delete(digest_from_raw(row.digest))
    for part in tx.select(PARTS, {"digest": row.digest}):
        tx.delete(PARTS, part.digest, part.ordinal)


def _is_part(tx: Tx, raw: bytes) -> bool:
    return bool(tx.select(PARTS, {"part": raw}, order=("part",), limit=1))


def _is_kept(tx: Tx, raw: bytes) -> bool:
    """Whether a watched file holds it now, so that the next change of that file will need it."""
    return bool(tx.select(KEPT, {"digest": raw}, limit=1))


def collect_garbage(ledger: Ledger) -> tuple[int, int]:
    """Delete what nothing names. Safe beside writers. Blobs and bytes given back."""
    with ledger.store.write() as tx:
        forget_unused(tx, timestamp(FixedClock(ledger.clock.now() - _KEPT_UNUSED)))
    with ledger.store.read() as tx:
        cutoff = _cutoff_ms(ledger, tx)
        doomed = [row.digest for row in tx.select(BLOBS) if _is_garbage(tx, row, cutoff)]
    blobs = size = 0
    for start in range(0, len(doomed), _GC_BATCH):
        with ledger.store.write() as tx:
            for row in _rows(tx, doomed[start : start + _GC_BATCH]):
                # Looked at again inside the transaction: somebody may have named or touched it since.
                if _is_garbage(tx, row, cutoff):
                    _delete_body(ledger, tx, row)
                    tx.delete(BLOBS, row.digest)
                    blobs, size = blobs + 1, size + row.stored
    return blobs, size


def _rows(tx: Tx, digests: Iterable[bytes]) -> Iterator[BlobRow]:
    return (row for digest in digests if (row := tx.get(BLOBS, digest)) is not None)


def _cutoff_ms(ledger: Ledger, tx: Tx) -> int:
    """Younger than this, a blob may belong to a call that has not named it yet."""
    oldest = ledger.clock.now() - _GC_GRACE
    for open_call in tx.select(OPEN):
        row = tx.get(CALLS, open_call.call)
        if row is not None:
            oldest = min(oldest, parse_timestamp(row.started_at))
    return int(oldest.timestamp() * 1000)


def _is_garbage(tx: Tx, row: BlobRow, cutoff_ms: int) -> bool:
    if row.touched_ms >= cutoff_ms or tx.select(REFS, {"digest": row.digest}, limit=1):
        return False
    needed = _is_part(tx, row.digest) or _is_kept(tx, row.digest)
    return not needed and not tx.select(BLOBS, {"base": row.digest}, limit=1)
