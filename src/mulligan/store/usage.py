"""What a store takes, and what for."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from mulligan.store.blobs import BLOBS, IN_PARTS, PARTS, READABLE, BlobRow
from mulligan.store.journal import HEADS, REFS, STORE_HEAD
from mulligan.store.paging import rows_by, rows_of_journal
from mulligan.store.protocol import Store, Tx
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class JournalUsage:
    """`blob_bytes` is what its blobs take, packed; one that several journals need counts in each."""

    journal: str
    records: int
    record_bytes: int
    blobs: int
    blob_bytes: int


@plain(slots=True, frozen=True)
class BlobUsage:
    """Blobs in one place: `db`, `out`, `parts` (which are blobs themselves), `evicted` or `lost`."""

    place: str
    blobs: int
    plain_bytes: int
    stored_bytes: int


@plain(slots=True, frozen=True)
class Usage:
    total_bytes: int
    journals: tuple[JournalUsage, ...]
    blobs: tuple[BlobUsage, ...]


def usage_of(store: Store) -> Usage:
    with store.read() as tx:
        return Usage(store.size_bytes(), _journals(tx), _blobs(tx))


def _journals(tx: Tx) -> tuple[JournalUsage, ...]:
    blobs: Counter[str] = Counter()
    blob_bytes: Counter[str] = Counter()
    for digest, edges in groupby(rows_by(tx, REFS, "digest"), key=lambda row: row.digest):
        row = tx.get(BLOBS, digest)
        stored = 0 if row is None else _stored(tx, row)
        for journal in {edge.journal for edge in edges}:
            blobs[journal] += 1
            blob_bytes[journal] += stored
    heads = [head for head in tx.select(HEADS) if head.journal != STORE_HEAD]
    return tuple(
        JournalUsage(
            head.journal, head.seq, _record_bytes(tx, head.journal), blobs[head.journal], blob_bytes[head.journal]
        )
        for head in heads
    )


def _stored(tx: Tx, row: BlobRow) -> int:
    """What a blob takes; one in parts takes what they take."""
    if row.place != IN_PARTS:
        return row.stored if row.place in READABLE else 0
    parts = (tx.get(BLOBS, edge.part) for edge in tx.select(PARTS, {"digest": row.digest}))
    return sum(part.stored for part in parts if part is not None)


def _record_bytes(tx: Tx, journal: str) -> int:
    return sum(len(row.body) for row in rows_of_journal(tx, journal))


def _blobs(tx: Tx) -> tuple[BlobUsage, ...]:
    count: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for row in rows_by(tx, BLOBS, "digest"):
        count[row.place] += 1
        plain[row.place] += row.size
        stored[row.place] += row.stored if row.place in READABLE else 0
    return tuple(BlobUsage(place, count[place], plain[place], stored[place]) for place in sorted(count))
