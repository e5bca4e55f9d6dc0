"""Bounds: how much is kept, what goes first, and how space comes back.

Eviction drops the bodies of whole calls, oldest first, and leaves a record. It never takes the open call, the newest
turn of an open session, a pin, or a body that something kept still needs. `gc` deletes blobs that no record names,
unless a call that was open when it began could still be about to name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial

from mulligan.history.dropping import Keepers, came_upon, delete_body, drop_body, droppable, is_part, is_watched
from mulligan.history.ledger import Ledger, digests_of, workspace_journal
from mulligan.history.log import changes_of
from mulligan.history.over_cap import cap_of, put_cap
from mulligan.history.rescues import rescued_in
from mulligan.history.tables import CALLS, OPEN, PINS, CallRow
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.store.blobs import BESIDE, BLOBS, READABLE, TOUCHED_ANEW_MS, BlobRow
from mulligan.store.journal import REFS
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.clock import FixedClock, parse_timestamp, timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES, STORE_CAP_BYTES
from mulligan.values.plain import plain

_GC_GRACE = timedelta(minutes=15)
_GC_BATCH = 500
_STORE_CAP = "store_cap"
_STORE_GROWN = "store_grown"
_LOOK_EVERY_BYTES = 32 * MIB_BYTES
_LOOKS_PER_CAP = 8
_KEPT_UNUSED = timedelta(days=30)


@plain(slots=True, frozen=True)
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
    return digests_of(changes_of(tx, call.id)) | {digest for _, digest in rescued_in(call)}


def set_cap(ledger: Ledger, session: SessionId, cap_bytes: int) -> int:
    """A session's cap, at least one byte, in force at once and for every process. The previous one."""
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
    """The store's cap, at least one byte, in force at once and for every process. The calls evicted."""
    with ledger.store.write() as tx:
        tx.put(META, MetaRow(_STORE_CAP, str(max(1, cap_bytes))))
    return _keep_store_bound(ledger)


def keep_bounds(ledger: Ledger, session: SessionId, grown_bytes: int) -> list[str]:
    """A session has grown, in whatever process. To look takes long, so it is done when enough has come in all of them.

    The calls evicted.
    """
    evicted: list[str] = []
    with ledger.store.write() as tx:
        cap = cap_of(tx, session)
        session_is_due = _is_due(tx, f"grown:{session}", grown_bytes, cap)
        store_is_due = _is_due(tx, _STORE_GROWN, grown_bytes, store_cap_of(tx))
    if session_is_due:
        evicted += evict_over(ledger, session, cap)
    if store_is_due:
        evicted += _keep_store_bound(ledger)
    return evicted


def _is_due(tx: Tx, name: str, grown_bytes: int, cap_bytes: int) -> bool:
    """Whether so much has come since the last look that a cap may be passed by much; then the count begins anew."""
    row = tx.get(META, name)
    grown = grown_bytes + (0 if row is None else int(row.value))
    due = grown >= min(_LOOK_EVERY_BYTES, cap_bytes // _LOOKS_PER_CAP)
    tx.put(META, MetaRow(name, str(0 if due else grown)))
    return due


def keep_all_bounds(ledger: Ledger) -> list[str]:
    """Every session under its cap, and the store under its own. The calls evicted."""
    with ledger.store.read() as tx:
        caps = {SessionId(row.id): cap_of(tx, SessionId(row.id)) for row in tx.select(SESSIONS)}
    evicted = [call for session, cap in caps.items() for call in evict_over(ledger, session, cap)]
    return evicted + _keep_store_bound(ledger)


def _keep_store_bound(ledger: Ledger) -> list[str]:
    """Over the cap, sessions give up their oldest calls until the store fits or nothing may go; closed ones first."""
    with ledger.store.read() as tx:
        surplus = ledger.store.size_bytes() - store_cap_of(tx)
        rows = sorted(tx.select(SESSIONS), key=lambda row: (row.closed_at is None, row.created_at))
    evicted: list[str] = []
    for session in (SessionId(row.id) for row in rows):
        if surplus <= 0:
            break
        with ledger.store.read() as tx:
            size = usage_of(tx, session).bytes
        evicted += evict_over(ledger, session, max(0, size - surplus))
        with ledger.store.read() as tx:
            surplus -= size - usage_of(tx, session).bytes
    return evicted


def evict_over(ledger: Ledger, session: SessionId, cap_bytes: int) -> list[str]:
    """Drop the oldest calls' bodies until the session keeps at most `cap_bytes`. The calls evicted."""
    # To measure takes long, and mostly nothing has to go: nobody waits for that.
    with ledger.store.read() as tx:
        if usage_of(tx, session).bytes <= cap_bytes:
            return []
    evicted: list[str] = []
    keepers: Keepers = {}
    with ledger.store.write() as tx:
        kept = usage_of(tx, session).bytes
        for call in _evictable(tx, session):
            if kept <= cap_bytes:
                break
            kept -= _evict(ledger, tx, call, keepers)
            evicted.append(call.id)
    return evicted


def drop_session(ledger: Ledger, session: SessionId) -> list[str]:
    """Drop every body of a session's calls, the newest turn's too: it was asked for. The calls that lost theirs."""
    dropped: list[str] = []
    keepers: Keepers = {}
    with ledger.store.write() as tx:
        for call in tx.select(CALLS, {"session": session}, order=("id",)):
            if call.status != "open" and not call.evicted and not tx.has(PINS, call.id):
                _evict(ledger, tx, call, keepers)
                dropped.append(call.id)
    return dropped


def _evictable(tx: Tx, session: SessionId) -> list[CallRow]:
    """The newest turn is spared while somebody may go on from it: a closed session has none."""
    rows = tx.select(CALLS, {"session": session}, order=("id",))
    known = tx.get(SESSIONS, session)
    is_closed = known is not None and known.closed_at is not None
    last_turn = next((row.turn for row in reversed(rows)), None)
    old = [row for row in rows if is_closed or row.turn != last_turn]
    keeping = [row for row in old if row.status == "committed" or rescued_in(row)]
    return [row for row in keeping if not row.evicted and not tx.has(PINS, row.id)]


def _evict(ledger: Ledger, tx: Tx, call: CallRow, keepers: Keepers) -> int:
    """Record it with what is dropped: the bodies that nothing kept still needs. Bytes given back."""
    assert call.session is not None
    bodies = _with_bases(tx, _bodies_of(tx, call) | came_upon(tx, call.id))
    doomed = droppable(tx, bodies, but_for=call.id, keepers=keepers)
    body = {"call": call.id, "digests": doomed}
    journal = session_journal(SessionId(call.session))
    ledger.journal.append(tx, journal, "call.evicted", body, at=ledger.now())
    return sum(drop_body(tx, digest) for digest in doomed)


def _with_bases(tx: Tx, digests: Iterable[Digest]) -> set[Digest]:
    """And what they are packed against: that could not go with its own call, and goes with the last that needs it."""
    found, queue = set[Digest](), list(digests)
    while queue:
        digest = queue.pop()
        row = None if digest in found else tx.get(BLOBS, raw_digest(digest))
        found.add(digest)
        if row is not None and row.base is not None:
            queue.append(digest_from_raw(row.base))
    return found


def pin_call(ledger: Ledger, call: CallRow, *, off: bool = False) -> None:
    """Never evict what the call needs to be undone; `off`: as any other again."""
    with ledger.store.write() as tx:
        journal = session_journal(SessionId(call.session)) if call.session else workspace_journal(call.workspace)
        ledger.journal.append(
            tx, journal, "call.unpinned" if off else "call.pinned", {"call": call.id}, at=ledger.now()
        )


def collect_garbage(ledger: Ledger) -> tuple[int, int]:
    """Delete what nothing names. Safe beside writers. Blobs and bytes given back."""
    # Loaded here: bounds are kept at the end of every process that wrote, garbage is collected when somebody asks.
    from mulligan.history.kept_rows import forget_unused

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
                    delete_body(tx, row)
                    tx.delete(BLOBS, row.digest)
                    blobs, size = blobs + 1, size + row.stored
    with ledger.store.read() as tx:
        swept, swept_bytes = ledger.store.bodies.sweep(partial(_is_beside, tx), before_s=cutoff / 1000)
    return blobs + swept, size + swept_bytes


def _is_beside(tx: Tx, digest: Digest) -> bool:
    row = tx.get(BLOBS, raw_digest(digest))
    return row is not None and row.place == BESIDE


def _rows(tx: Tx, digests: Iterable[bytes]) -> Iterator[BlobRow]:
    return (row for digest in digests if (row := tx.get(BLOBS, digest)) is not None)


def _cutoff_ms(ledger: Ledger, tx: Tx) -> int:
    """Younger than this, a blob may belong to a call that has not named it yet."""
    oldest = ledger.clock.now() - _GC_GRACE
    for open_call in tx.select(OPEN):
        row = tx.get(CALLS, open_call.call)
        if row is not None:
            oldest = min(oldest, parse_timestamp(row.started_at))
    return int(oldest.timestamp() * 1000) - TOUCHED_ANEW_MS


def _is_garbage(tx: Tx, row: BlobRow, cutoff_ms: int) -> bool:
    if row.touched_ms >= cutoff_ms or tx.select(REFS, {"digest": row.digest}, limit=1):
        return False
    needed = is_part(tx, row.digest) or is_watched(tx, row.digest)
    return not needed and not tx.select(BLOBS, {"base": row.digest}, limit=1)
