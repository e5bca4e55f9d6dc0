"""Retention: caps and eviction, garbage collection, and `forget`.

Eviction drops the bodies of whole calls, the oldest first, and records that. It never evicts an open call, the newest
turn of an open session, a pinned call, or a body that something else still needs (`retention_rules`). Garbage
collection deletes blobs that no record names, except those that a call may be about to name.

`forget` erases bytes that are stored already, of a path or of a call, wherever the store has them. It also erases
bodies that another call or path shares: the user wants the bytes nowhere. It writes the records that hold parameters
and receipts of such effects anew without them. Their hashes stay, and one record in the journal of the store names all
bodies and records that were changed, so that `verify` accepts both. Then the engine erases what deletions left in its
file, its free pages and its log, and deletes the copy that a migration made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from mulligan.files.capture_rules import PATCH_HEADERS
from mulligan.files.snapshot.manifest import SNAPSHOTS, Manifest
from mulligan.history.abort import blobs_named_in
from mulligan.history.ledger import Ledger, digests_of, workspace_journal
from mulligan.history.log import changes_of
from mulligan.history.open_root import OpenRoot
from mulligan.history.retention_rules import (
    KnownNeeds,
    bodies_of_edits_before,
    cap_of,
    delete_body,
    drop_body,
    droppable,
    is_in_baseline,
    is_part,
    put_cap,
)
from mulligan.history.tables import (
    CALLS,
    CAPTURES,
    CHANGES,
    KEPT,
    OPEN,
    PINS,
    ROOTS,
    SCOPES,
    TOUCHES,
    CallRow,
    ChangeRow,
)
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.store.blobs import (
    BESIDE,
    BLOBS,
    PARTS,
    READABLE,
    TOUCH_INTERVAL_MS,
    BlobRow,
    Blobs,
    delete_unnamed_bodies,
)
from mulligan.store.journal import FORGOTTEN, RECORDS, REFS, STORE_JOURNAL, RecordRow, parse_record
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import FixedClock, parse_timestamp, timestamp
from mulligan.values.digest import Digest, digest_from_raw, parse_digest, raw_digest
from mulligan.values.entries import FileEntry, entry_from_bytes
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES, STORE_CAP_BYTES
from mulligan.values.paths import ROOT, RepoPath, is_inside, path_bytes, path_from_bytes, to_wire

if TYPE_CHECKING:
    from mulligan.store.verify import Progress

_GC_GRACE = timedelta(minutes=15)
_GC_BATCH = 500
_STORE_CAP = "store_cap"
_STORE_GROWN = "store_grown"
_MEASURE_EVERY_BYTES = 32 * MIB_BYTES
_MEASURES_PER_CAP = 8
_UNUSED_BASELINE_MAX = timedelta(days=30)
_ERASED = {"forgotten": True}
_PATH_PARAMS = ("path", "file_path", "to", "cwd")


@fast_dataclass(slots=True, frozen=True)
class SessionUsage:
    """The usage of one session: the stored bytes of the distinct blobs that its calls name."""

    session: str
    calls: int
    blobs: int
    bytes: int


def usage_of(tx: Tx, session: SessionId) -> SessionUsage:
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
        rows = sorted(tx.select(SESSIONS), key=lambda row: (row.closed_at is None, row.created_at))
    evicted: list[str] = []
    for session in (SessionId(row.id) for row in rows):
        if surplus <= 0:
            break
        with ledger.store.read() as tx:
            size = usage_of(tx, session).bytes
        # Two sessions may share bodies, so the session is measured again after the eviction.
        evicted += evict_over(ledger, session, max(0, size - surplus))
        with ledger.store.read() as tx:
            surplus -= size - usage_of(tx, session).bytes
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
            blobs = [blob for digest in bodies if (blob := tx.get(BLOBS, raw_digest(digest))) is not None]
            stored = sum(blob.stored for blob in blobs if blob.place in READABLE)
            surplus -= stored
            found.append({"call_id": call.id, "session_id": row.id, "at": call.started_at, "bytes": stored})
    return found


def evict_over(ledger: Ledger, session: SessionId, cap_bytes: int) -> list[str]:
    """Drop the oldest calls' bodies until the session keeps at most `cap_bytes`. Returns the evicted calls."""
    # Measuring is slow and usually evicts nothing, so it does not block other writers.
    with ledger.store.read() as tx:
        if usage_of(tx, session).bytes <= cap_bytes:
            return []
    evicted: list[str] = []
    known: KnownNeeds = {}
    with ledger.store.write() as tx:
        size = usage_of(tx, session).bytes
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
        cutoff = _cutoff_ms(ledger, tx)
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
    # Files of bodies that have no row: a process died between the file and its row.
    with ledger.store.read() as tx:
        swept, swept_bytes = ledger.store.bodies.sweep(partial(_is_beside, tx), before_s=cutoff / 1000)
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


def _is_beside(tx: Tx, digest: Digest) -> bool:
    row = tx.get(BLOBS, raw_digest(digest))
    return row is not None and row.place == BESIDE


def _cutoff_ms(ledger: Ledger, tx: Tx) -> int:
    """A blob that was touched later may belong to a call that has not named it yet."""
    oldest = ledger.clock.now() - _GC_GRACE
    # An open call may name whatever it has stored since it began.
    for open_call in tx.select(OPEN):
        row = tx.get(CALLS, open_call.call)
        if row is not None:
            oldest = min(oldest, parse_timestamp(row.started_at))
    return int(oldest.timestamp() * 1000) - TOUCH_INTERVAL_MS


def _is_garbage(tx: Tx, row: BlobRow, cutoff_ms: int) -> bool:
    if row.touched_ms >= cutoff_ms or tx.select(REFS, {"digest": row.digest}, limit=1):
        return False
    needed = is_part(tx, row.digest) or is_in_baseline(tx, row.digest)
    return not needed and not tx.select(BLOBS, {"base": row.digest}, limit=1)


# Forget.


@fast_dataclass(slots=True, frozen=True)
class Forgotten:
    """The result of `forget`: erased bodies by digest, records by journal and number, and changes that had the same
    content.
    """

    digests: tuple[Digest, ...]
    records: tuple[tuple[str, int], ...]
    shared: tuple[tuple[str, str], ...]
    """call and path of other changes that have lost their bytes too"""
    copies: tuple[str, ...]
    """names of files that were deleted: the whole store as it was before a migration"""

    def to_json(self) -> dict[str, Any]:
        return {
            "digests": list(self.digests),
            "records": [{"journal": journal, "seq": seq} for journal, seq in self.records],
            "shared": [{"call": call, "path": path} for call, path in self.shared],
            "copies": list(self.copies),
        }


def forget_path(open_root: OpenRoot, path: RepoPath) -> Forgotten:
    """Erase what the store has of a path and of everything below it."""
    place = open_root.disk.root.place_of(path)
    with open_root.ledger.store.read() as tx:
        rows = [row for row in tx.select(CHANGES) if is_inside(row.place, place)]
        digests = {digest for row in rows for digest in _digests_of_change(row)} | _captured_at(tx, open_root, path)
        ended = list(_ended_calls(tx))
        digests |= {digest for row in ended for digest in _rescued_at(row, open_root, path)}
        # A call that only read the path may have its bytes in a receipt.
        calls = {row.call for row in rows}
        mentions = _mentions_by_root(tx, open_root, path)
        records = [row for row in ended if _is_about(row, calls, mentions)]
    return _forget(open_root, digests, records, about={"path": to_wire(path), "root": open_root.root.id}, changes=rows)


def forget_call(open_root: OpenRoot, call: CallRow) -> Forgotten:
    """Erase what the store has because of one call: preimages, what it wrote, parameters and receipts."""
    if call.status == "open":
        raise fault("call_open", f"Call {call.id} is open; its files could not be put back.", call=call.id)
    with open_root.ledger.store.read() as tx:
        rows = tx.select(CHANGES, {"call": call.id})
        records = [row for row in _ended_calls(tx) if parse_record(row).payload.get("call") == call.id]
        named = {digest for row in records for digest in parse_record(row).refs}
        digests = named | {digest for row in rows for digest in _digests_of_change(row)}
    return _forget(open_root, digests, records, about={"call": call.id}, changes=rows)


def _forget(
    open_root: OpenRoot,
    digests: set[Digest],
    records: list[RecordRow],
    *,
    about: Mapping[str, str],
    changes: Iterable[ChangeRow],
) -> Forgotten:
    ledger = open_root.ledger
    with ledger.store.write() as tx:
        _refuse_open(tx, digests)
        erased = {(row.journal, row.seq): body for row in records if (body := _without_effects(row)) is not None}
        digests = {*digests, *(digest for row in records for digest in _digests_in_receipts(row))}
        if digests or records:
            digests |= _unnamed(ledger, tx)
        dropped = sorted(_with_parts(tx, {one for one in digests if _is_stored(tx, one)}))
        own = {(row.call, row.path) for row in changes}
        shared = tuple(
            (row.call, to_wire(path_from_bytes(row.path)))
            for row in tx.select(CHANGES)
            if (row.call, row.path) not in own and not _digests_of_change(row).isdisjoint(dropped)
        )
        # Blobs that are packed against a dropped one must be readable without it.
        for digest in dropped:
            ledger.blobs.repack_dependents(tx, digest, but=dropped)
        for digest in dropped:
            drop_body(tx, digest)
        for row in records:
            if (row.journal, row.seq) in erased:
                tx.put(RECORDS, replace(row, body=erased[row.journal, row.seq]))
        copies = tuple(map(os.path.basename, ledger.store.older_copies()))
        forgotten = Forgotten(tuple(dropped), tuple(sorted(erased)), shared, copies)
        hashes = [
            {"journal": journal, "seq": seq, "sha256": sha256(erased[journal, seq]).hexdigest()}
            for journal, seq in forgotten.records
        ]
        record = {**about, **forgotten.to_json(), "records": hashes}
        ledger.journal.append(tx, STORE_JOURNAL, FORGOTTEN, record, at=ledger.now())
    # Delete the files again, now raising errors: after a transaction, a body that cannot be deleted is left to `gc`.
    delete_unnamed_bodies(ledger.store, sorted({*digests, *dropped}))
    ledger.store.erase_deleted()
    return forgotten


def _refuse_open(tx: Tx, digests: set[Digest]) -> None:
    for row in tx.select(TOUCHES):
        entries = [decode(row.before), *decode(row.intended)]
        if not digests.isdisjoint(entry["digest"] for entry in entries if "digest" in entry):
            raise fault("call_open", f"Call {row.call} is open and may need these bytes; try again when it has ended.")


def _digests_of_change(row: ChangeRow) -> set[Digest]:
    entries = (entry_from_bytes(one) for one in (row.before, row.after))
    return {entry.digest for entry in entries if isinstance(entry, FileEntry)}


def _captured_at(tx: Tx, open_root: OpenRoot, path: RepoPath) -> set[Digest]:
    """What scopes, the baseline and snapshots have of the path and of what is below it."""
    key, root = path_bytes(path), open_root.root.id
    scopes = {(row.session, row.scope) for row in tx.select(SCOPES) if row.root == root}
    found = {
        Digest(entry["digest"])
        for row in tx.select(CAPTURES)
        if (row.session, row.scope) in scopes and _is_at(row.path, key) and "digest" in (entry := decode(row.before))
    }
    baseline = [row.digest for row in tx.select(KEPT, {"root": root}) if _is_at(row.path, key)]
    found |= {digest_from_raw(digest) for digest in baseline if digest is not None}
    for row in tx.select(SNAPSHOTS):
        if row.root == root:
            body = open_root.ledger.blobs.read_in(tx, parse_digest(row.manifest))
            entries = Manifest.from_json(decode(body)).entries
            found |= {one.blob for one in entries if _is_at(path_bytes(one.path), key)}
    return found


def _is_at(path: bytes, key: bytes) -> bool:
    """Whether the path is `key`, or below it."""
    return key == path_bytes(ROOT) or is_inside(path, key)


def _is_stored(tx: Tx, digest: Digest) -> bool:
    row = tx.get(BLOBS, raw_digest(digest))
    return row is not None and row.place in READABLE


def _with_parts(tx: Tx, digests: set[Digest]) -> set[Digest]:
    rows = (row for digest in digests for row in tx.select(PARTS, {"digest": raw_digest(digest)}))
    return digests | {digest_from_raw(row.part) for row in rows}


def _ended_calls(tx: Tx) -> Iterator[RecordRow]:
    """The records of the ends of calls, which hold parameters and receipts."""
    journals = {f"s:{row.session}" for row in tx.select(CALLS) if row.session is not None}
    for journal in sorted(journals):
        yield from (row for row in tx.select(RECORDS, {"journal": journal}) if b'"kind":"call.ended"' in row.body)


def _unnamed(ledger: Ledger, tx: Tx) -> set[Digest]:
    """Bodies that no record names: what an aborted call wrote, for example. No row says which path they belong to.

    Bodies that an open call may be about to name stay. Another process that stores the same content at this moment
    stores it again, because the row says that the body is gone.
    """
    # An open call may name whatever it has stored since it began.
    began = [call.started_at for one in tx.select(OPEN) if (call := tx.get(CALLS, one.call)) is not None]
    cutoff = min((int(parse_timestamp(at).timestamp() * 1000) - TOUCH_INTERVAL_MS for at in began), default=None)
    found = set[bytes]()
    for row in tx.select(BLOBS):
        is_old = cutoff is None or row.touched_ms < cutoff
        if is_old and not tx.select(REFS, {"digest": row.digest}, limit=1) and not is_in_baseline(tx, row.digest):
            found.add(row.digest)
    # A part may belong to several contents, and stays with the last of them.
    while needed := {one for one in found if any(row.digest not in found for row in tx.select(PARTS, {"part": one}))}:
        found -= needed
    if cutoff is None:
        ledger.store.bodies.sweep(partial(_is_beside, tx), before_s=ledger.clock.now().timestamp())
    return {digest_from_raw(raw) for raw in found}


def _rescued_at(row: RecordRow, open_root: OpenRoot, path: RepoPath) -> Iterator[Digest]:
    """What a command wrote at the path before Mulligan put the path back."""
    payload = parse_record(row).payload
    for one in payload.get("coverage", ()) if payload.get("root") == open_root.root.id else ():
        if "blob_ref" in one and _is_named(one["path"], to_wire(path)):
            yield parse_digest(one["blob_ref"])


def _is_named(text: str, wire: str) -> bool:
    """Whether a text is the path, or one below it."""
    if wire == ROOT or f"/{text.removeprefix('./')}/".startswith(f"/{wire}/"):
        return True
    return (text[:1] == "/" or ".." in text) and f"/{wire}/" in f"{text}/"


def _mentions_by_root(tx: Tx, open_root: OpenRoot, path: RepoPath) -> dict[str, _Mentions]:
    """How records of this root name the path, and those of the roots that overlap with it."""
    place, blobs = open_root.disk.root.place_of(path), open_root.ledger.blobs
    rows = [row for row in tx.select(ROOTS) if row.workspace == open_root.root.workspace]
    wires = {row.id: ROOT if is_inside(row.key, place) else _wire_below(row.key, place) for row in rows}
    wires[open_root.root.id] = to_wire(path)
    return {root: _Mentions(tx, blobs, wire) for root, wire in wires.items() if wire is not None}


def _wire_below(key: bytes, place: bytes) -> str | None:
    return to_wire(path_from_bytes(place[len(key) :].lstrip(b"/"))) if is_inside(place, key) else None


def _is_about(row: RecordRow, calls: set[str], mentions: Mapping[str, _Mentions]) -> bool:
    """Whether a call changed the path, or one of its effects named it or returned lines of it."""
    payload = parse_record(row).payload
    if payload.get("call") in calls:
        return True
    found = mentions.get(payload.get("root", ""))
    return found is not None and any(map(found.are_in, payload.get("effects", ())))


class _Mentions:
    """Finds the effects that may have bytes of a path, or of what is below it, in their parameters and receipts."""

    def __init__(self, tx: Tx, blobs: Blobs, wire: str) -> None:
        self._tx = tx
        self._blobs = blobs
        self._wire = wire
        name = re.escape(wire.rpartition("/")[2])
        self._word = re.compile(rf"(?<![\w.-]){name}(?![\w-]|\.\w)")

    def are_in(self, effect: Mapping[str, Any]) -> bool:
        params = effect["params"]
        named = [text for name in _PATH_PARAMS if isinstance(text := params.get(name), str)]
        if any(_is_named(one, self._wire) for one in named):
            return True
        if any(self._in_command(params.get(name)) for name in ("argv", "command")):
            return True
        # A search returns lines of files that its parameters do not name.
        lines = self._text(effect["receipt"].get("matches")).splitlines()
        return self._in_patch(self._text(params.get("patch"))) or any(map(self._begins, lines))

    def _in_command(self, given: object) -> bool:
        """Whether a command names the file. It may have been in another folder, so only the name counts."""
        words = given if isinstance(given, list) else [given]
        return any(isinstance(word, str) and self._word.search(word) is not None for word in words)

    def _in_patch(self, patch: str) -> bool:
        """Whether a line names the path as a file of the patch, also in a patch that Mulligan could not parse."""
        for line in patch.splitlines():
            if line.startswith(PATCH_HEADERS):
                words = [
                    word.removeprefix("a/").removeprefix("b/") for word in (*line.split(), line.partition(": ")[2])
                ]
                if any(_is_named(word, self._wire) for word in words if word):
                    return True
        return False

    def _begins(self, line: str) -> bool:
        return self._wire == ROOT or line.startswith((f"{self._wire}:", f"{self._wire}/"))

    def _text(self, value: object) -> str:
        """A text in parameters or a receipt: inline, or a blob."""
        if isinstance(value, str):
            return value
        found: Any = value if isinstance(value, Mapping) else {}
        inline = found.get("inline_text")
        if isinstance(inline, Mapping):
            return str(inline.get("text", ""))
        blob = found.get("blob")
        reference = (blob if isinstance(blob, Mapping) else found).get("blob_ref")
        digest = parse_digest(reference) if isinstance(reference, str) else None
        if digest is None or not _is_stored(self._tx, digest):
            return ""
        return self._blobs.read_in(self._tx, digest).decode("utf-8", "replace")


def _without_effects(row: RecordRow) -> bytes | None:
    """The record without parameters and receipts; None if it has no effects."""
    document = decode(row.body)
    effects = document["payload"].get("effects")
    if not effects:
        return None
    document["payload"]["effects"] = [
        {"effect": one["effect"], "params": _ERASED, "receipt": {"status": one["receipt"].get("status"), **_ERASED}}
        for one in effects
    ]
    return encode(document)


def _digests_in_receipts(row: RecordRow) -> Iterator[Digest]:
    """Blobs that the receipts of a record name: output, long texts, pages of a file."""
    pending: list[Any] = [one["receipt"] for one in decode(row.body)["payload"].get("effects", ())]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
            for name in ("blob_ref", "digest"):
                if isinstance(text := value.get(name), str):
                    try:
                        yield parse_digest(text)
                    except MulliganError:
                        continue
        elif isinstance(value, list):
            pending += value
