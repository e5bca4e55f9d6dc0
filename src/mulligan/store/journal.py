"""Journals: append-only, hash-chained, contiguous. One per session, one per workspace, one for the store itself.

A record's bytes are canonical JSON `{seq, kind, at, payload, prev, refs?}`, and its hash is
sha256(prev + "\\n" + bytes), in hex. `prev` of the first record is sixty-four zeros. `refs` names, sorted, every blob
the record needs, so that reachability is a query. The bytes are written once and never touched again.

All journals together form one line: `ordinal` counts records in the order they came, and the head of the store itself
(journal "") keeps that count and sha256(its hash before + hash of the record). So a fold can follow the order in which
things happened across journals, and a journal that vanished whole is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

from mulligan.store.blobs import BLOBS, BODIES, PARTS, UNSYNCED
from mulligan.store.protocol import META, OWNERS, Tx
from mulligan.store.tables import Table
from mulligan.values.canonical import decode, encode
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.faults import MulliganError, fault
from mulligan.values.plain import plain

GENESIS = "0" * 64
PAGE_RECORDS = 1_000


@plain(slots=True, frozen=True)
class Record:
    journal: str
    seq: int
    kind: str
    at: str
    payload: Mapping[str, Any]
    prev: str
    refs: tuple[Digest, ...]
    hash: str


@plain(slots=True, frozen=True)
class RecordRow:
    journal: str
    seq: int
    hash: bytes
    body: bytes
    ordinal: int = 0


@plain(slots=True, frozen=True)
class HeadRow:
    """Where a journal stands: its newest record."""

    journal: str
    seq: int
    hash: bytes
    at: str


@plain(slots=True, frozen=True)
class RefRow:
    """One edge from a record to a blob it needs."""

    digest: bytes
    journal: str
    seq: int


RECORDS: Table[RecordRow] = Table("records", RecordRow, key=("journal", "seq"))
HEADS: Table[HeadRow] = Table("heads", HeadRow, key=("journal",))
REFS: Table[RefRow] = Table("refs", RefRow, key=("digest", "journal", "seq"))

STORE_JOURNAL = "store"
FORGOTTEN = "store.forgotten"
"""A record of this kind names bodies and records that somebody had erased."""

STORE_HEAD = ""
"""The name under which HEADS keeps where the store as a whole stands."""

OWN_TABLES: tuple[Table[Any], ...] = (RECORDS, HEADS, REFS, BLOBS, BODIES, PARTS, UNSYNCED, OWNERS, META)
"""What every store holds, whatever is built on it."""

Projector: TypeAlias = Callable[[Tx, Record], None]


@dataclass(frozen=True)
class Schema:
    """What a store holds: its tables, and how each kind of record folds into the projected ones.

    A kind without a projector is a record that projects to nothing; it is still truth. Where such kinds are named
    (`unfolded`), no others are written. The store's own tables are always there and need not be named.
    """

    tables: tuple[Table[Any], ...]
    projectors: Mapping[str, Projector]
    unfolded: frozenset[str] | None = None

    def __post_init__(self) -> None:
        named = {table.name for table in self.tables}
        own = tuple(table for table in OWN_TABLES if table.name not in named)
        object.__setattr__(self, "tables", (*self.tables, *own))

    def check_kind(self, kind: str) -> None:
        if kind not in self.projectors and self.unfolded is not None and kind not in self.unfolded:
            raise fault("internal", f"The schema does not name records of kind {kind!r}.")

    def project(self, tx: Tx, record: Record) -> None:
        projector = self.projectors.get(record.kind)
        if projector is not None:
            projector(tx, record)


_EMPTY = HeadRow(STORE_HEAD, 0, bytes(32), "")


def chain_hash(prev: str, body: bytes) -> bytes:
    return sha256(prev.encode("ascii") + b"\n" + body).digest()


@dataclass(slots=True)
class Journal:
    """Appends records and folds them into the projections, in the caller's transaction."""

    schema: Schema

    def append(
        self,
        tx: Tx,
        journal: str,
        kind: str,
        payload: Mapping[str, Any],
        *,
        at: str,
        refs: Iterable[Digest] = (),
    ) -> Record:
        """Times never run backwards within a journal, whatever the clock does: `at` is at least the last one's."""
        self.schema.check_kind(kind)
        head = tx.get(HEADS, journal)
        seq, prev = (head.seq + 1, head.hash.hex()) if head else (1, GENESIS)
        at = max(at, head.at) if head else at
        named = tuple(sorted(set(refs)))
        document: dict[str, Any] = {"seq": seq, "kind": kind, "at": at, "payload": payload, "prev": prev}
        if named:
            document["refs"] = named
        body = encode(document)
        digest = chain_hash(prev, body)
        whole = tx.get(HEADS, STORE_HEAD) or _EMPTY
        tx.put(RECORDS, RecordRow(journal, seq, digest, body, whole.seq + 1))
        tx.put(HEADS, HeadRow(journal, seq, digest, at))
        tx.put(HEADS, HeadRow(STORE_HEAD, whole.seq + 1, sha256(whole.hash + digest).digest(), at))
        for ref in named:
            tx.put(REFS, RefRow(raw_digest(ref), journal, seq))
        record = Record(journal, seq, kind, at, payload, prev, named, digest.hex())
        self.schema.project(tx, record)
        return record


def records_of(tx: Tx, journal: str, *, after: int = 0, limit: int | None = None) -> Iterator[Record]:
    """The records after `after`, oldest first, read in pages."""
    while limit is None or limit > 0:
        page = PAGE_RECORDS if limit is None else min(limit, PAGE_RECORDS)
        rows = tx.select(RECORDS, {"journal": journal}, between=("seq", after + 1, 2**62), limit=page)
        for row in rows:
            yield parse_record(row)
        if len(rows) < page:
            return
        after = rows[-1].seq
        limit = None if limit is None else limit - len(rows)


def parse_record(row: RecordRow) -> Record:
    """The record in a row. Raises `journal_broken` if the bytes are not a record at all."""
    try:
        body = decode(row.body)
        return Record(
            journal=row.journal,
            seq=body["seq"],
            kind=body["kind"],
            at=body["at"],
            payload=body["payload"],
            prev=body["prev"],
            refs=tuple(body.get("refs", ())),
            hash=row.hash.hex(),
        )
    except (KeyError, TypeError, MulliganError) as error:
        raise fault("journal_broken", f"Record {row.seq} of {row.journal} cannot be read: {error!r}") from None


Erased: TypeAlias = Mapping[tuple[str, int], str]
"""For a record that was erased in part, by journal and number: the SHA-256 of the bytes it has now."""


def erased_records(tx: Tx) -> Erased:
    records = (one for one in records_of(tx, STORE_JOURNAL) if one.kind == FORGOTTEN)
    return {(one["journal"], one["seq"]): one["sha256"] for record in records for one in record.payload["records"]}


def _nothing_erased() -> Erased:
    return {}


def break_in_chain(
    rows: Iterable[RecordRow], head: HeadRow, erased: Callable[[], Erased] = _nothing_erased
) -> str | None:
    """The first thing wrong with a whole journal in order, in words; None when it is sound."""
    seq, prev = 0, GENESIS
    for row in rows:
        seq += 1
        where = f"record {row.seq} of {row.journal}"
        if row.seq != seq:
            return f"{where}: expected record {seq}"
        if chain_hash(prev, row.body) != row.hash and sha256(row.body).hexdigest() != erased().get((row.journal, seq)):
            return f"{where}: its bytes do not have its hash"
        try:
            parsed = parse_record(row)
        except MulliganError as broken:
            return broken.message
        if parsed.seq != seq or parsed.prev != prev:
            return f"{where}: it names another place in the chain"
        prev = row.hash.hex()
    if (head.seq, head.hash.hex()) != (seq, prev):
        return f"{head.journal}: the journal ends at record {seq}, its head says {head.seq}"
    return None
