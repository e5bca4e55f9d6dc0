"""Which bodies may go when what named them is given up, and letting them go.

A body stays while a record of something kept names it, while a later version is packed against it, while it is a part
of a stream, while a watched file holds it, and while an open call could need it to put a file back. What is given up is
a call that was evicted, a scope that was dropped, or a snapshot that is gone; a snapshot that never came to be counts
as gone after a day.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from mulligan.history.tables import CALLS, KEPT, SCOPES, TOUCHES, TouchRow
from mulligan.store.blobs import BESIDE, BLOBS, BODIES, EVICTED, IN_DATABASE, PARTS, READABLE, BlobRow
from mulligan.store.journal import HEADS, RECORDS, REFS, STORE_HEAD, Record, RefRow, parse_record
from mulligan.store.protocol import BlobStore, Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.workspace.snapshots import SNAPSHOTS

_STILL_COMING = timedelta(days=1)
"""The records of a snapshot that is being made come before the snapshot."""


def droppable(tx: Tx, digests: Iterable[Digest], *, but_for: str) -> list[Digest]:
    """Those that only what is given up needs; a version goes before the one it is packed against."""
    left, doomed = set(digests), set[Digest]()
    left -= _held_by_open_calls(tx, but_for=but_for)
    while more := {digest for digest in left if not _is_needed(tx, digest, doomed, but_for=but_for)}:
        doomed |= more
        left -= more
    return sorted(doomed)


def drop_body(tx: Tx, bodies: BlobStore, digest: Digest) -> int:
    """The bytes given back. A record that says so must be in the same transaction."""
    row = tx.get(BLOBS, raw_digest(digest))
    if row is None or row.place not in READABLE:
        return 0
    delete_body(tx, bodies, row)
    tx.put(BLOBS, replace(row, place=EVICTED, stored=0, base=None, depth=0))
    return row.stored


def delete_body(tx: Tx, bodies: BlobStore, row: BlobRow) -> None:
    if row.place == IN_DATABASE:
        tx.delete(BODIES, row.digest)
    elif row.place == BESIDE:
        bodies.delete(digest_from_raw(row.digest))
    for part in tx.select(PARTS, {"digest": row.digest}):
        tx.delete(PARTS, part.digest, part.ordinal)


def _held_by_open_calls(tx: Tx, *, but_for: str) -> set[Digest]:
    """What calls in progress have found or mean to put at a path: nothing on record names it yet."""
    return {digest for row in tx.select(TOUCHES) if row.call != but_for for digest in _digests_in(row)}


def _digests_in(row: TouchRow) -> Iterable[Digest]:
    entries = [decode(row.before), *decode(row.intended)]
    return (Digest(entry["digest"]) for entry in entries if "digest" in entry)


def _is_needed(tx: Tx, digest: Digest, doomed: set[Digest], *, but_for: str) -> bool:
    """Named by a record of something kept, or by a part or a later version that is."""
    raw = raw_digest(digest)
    later = [row for row in tx.select(BLOBS, {"base": raw}) if digest_from_raw(row.digest) not in doomed]
    if any(row.place in READABLE for row in later) or is_part(tx, raw) or is_watched(tx, raw):
        return True
    return any(not _is_given_up(tx, ref, but_for) for ref in tx.select(REFS, {"digest": raw}))


def _is_given_up(tx: Tx, ref: RefRow, but_for: str) -> bool:
    """Whether a reference is of something that was given up, or is about to be."""
    row = tx.get(RECORDS, ref.journal, ref.seq)
    if row is None:
        return False
    record = parse_record(row)
    if "snapshot" in record.payload:
        return _is_of_no_snapshot(tx, record, but_for)
    if "scope" in record.payload:
        session, scope = record.payload["session"], record.payload["scope"]
        return holder_of_scope(session, scope) == but_for or not tx.has(SCOPES, session, scope)
    call = record.payload.get("call")
    if call == but_for:
        return True
    found = tx.get(CALLS, call) if isinstance(call, str) else None
    return found is not None and bool(found.evicted)


def holder_of_snapshot(root: str, snapshot: str) -> str:
    """A snapshot as one that needs bodies. The same content is a snapshot of its own in each root."""
    return f"{root}/{snapshot}"


def holder_of_scope(session: str, scope: str) -> str:
    """A scope as one that needs bodies. No call has such a name, and no snapshot."""
    return f"{session}//{scope}"


def _is_of_no_snapshot(tx: Tx, record: Record, but_for: str) -> bool:
    root, snapshot = record.payload["root"], record.payload["snapshot"]
    if holder_of_snapshot(root, snapshot) == but_for:
        return True
    head = tx.get(HEADS, STORE_HEAD)
    newest = parse_timestamp(record.at if head is None else head.at)
    return not tx.has(SNAPSHOTS, root, snapshot) and newest - parse_timestamp(record.at) > _STILL_COMING


def is_part(tx: Tx, raw: bytes) -> bool:
    return bool(tx.select(PARTS, {"part": raw}, order=("part",), limit=1))


def is_watched(tx: Tx, raw: bytes) -> bool:
    """Whether a watched file holds it now, so that the next change of that file will need it."""
    return bool(tx.select(KEPT, {"digest": raw}, limit=1))
