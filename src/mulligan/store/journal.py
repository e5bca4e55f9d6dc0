"""Journals: append-only, hash-chained, contiguous. One per session, one per workspace, one for the store itself.

A record's bytes are canonical JSON `{seq, kind, at, payload, prev, refs?}`, and its hash is
sha256(prev + "\\n" + bytes), in hex. `prev` of the first record is sixty-four zeros. `refs` names, sorted, every blob
the record needs, so that reachability is a query. The bytes are written once and never touched again.

All journals share one order: the `ordinal` of a record is higher than those of the records that caused it, so a fold
can follow the order of events across journals. A seal is a record that lists the newest record of every journal that
has changed since the seal before it, so `verify` notices when a whole journal or its end is missing. A write
transaction adds one when the last is 5 seconds or 10 000 records old (decision 40).

This module also reads whole tables page by page, so that a large one is never in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeAlias, TypeVar

from mulligan.store.blobs import BLOBS, BODIES, PARTS, UNSYNCED
from mulligan.store.protocol import META, OWNERS, MetaRow, Table, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass

GENESIS = "0" * 64
PAGE_RECORDS = 1_000


@fast_dataclass(slots=True, frozen=True)
class Record:
    journal: str
    seq: int
    kind: str
    at: str
    payload: Mapping[str, Any]
    prev: str
    refs: tuple[Digest, ...]
    hash: str


@fast_dataclass(slots=True, frozen=True)
class RecordRow:
    journal: str
    seq: int
    hash: bytes
    body: bytes
    ordinal: int = 0


@fast_dataclass(slots=True, frozen=True)
class HeadRow:
    """The newest record of a journal."""

    journal: str
    seq: int
    hash: bytes
    at: str
    ordinal: int


@fast_dataclass(slots=True, frozen=True)
class RefRow:
    """One edge from a record to a blob it needs."""

    digest: bytes
    journal: str
    seq: int


RECORDS: Table[RecordRow] = Table("records", RecordRow, key=("journal", "seq"), large=True)
# By ordinal: which journals have changed since some record, without reading all heads.
HEADS: Table[HeadRow] = Table("heads", HeadRow, key=("journal",), indexes=(("ordinal",),))
REFS: Table[RefRow] = Table("refs", RefRow, key=("digest", "journal", "seq"))

STORE_JOURNAL = "store"
FORGOTTEN = "store.forgotten"
"""A record of this kind names bodies and records that a user erased with `forget`."""

SEALS = "seals"
"""The journal of the seals. The row of META with this name has the number of the last one."""

SEALED = "store.sealed"
SEAL_INTERVAL_S = 5
SEAL_RECORDS = 10_000

ORDINAL_END = 2**62
"""Higher than any ordinal."""

OWN_TABLES: tuple[Table[Any], ...] = (RECORDS, HEADS, REFS, BLOBS, BODIES, PARTS, UNSYNCED, OWNERS, META)
"""The tables that every store has."""

Projector: TypeAlias = Callable[[Tx, Record], None]


@dataclass(frozen=True)
class Schema:
    """The tables of a store, and the functions that fold each kind of record into the projected ones.

    A record of a kind without a projector changes no table; it is history all the same. If a schema names such kinds
    (`unfolded`), `append` refuses other unknown kinds. The store's own tables are added automatically.
    """

    tables: tuple[Table[Any], ...]
    projectors: Mapping[str, Projector]
    unfolded: frozenset[str] | None = None

    def __post_init__(self) -> None:
        named = {table.name for table in self.tables}
        own = tuple(table for table in OWN_TABLES if table.name not in named)
        object.__setattr__(self, "tables", (*self.tables, *own))

    def project(self, tx: Tx, record: Record) -> None:
        projector = self.projectors.get(record.kind)
        if projector is not None:
            projector(tx, record)


def chain_hash(prev: str, body: bytes) -> bytes:
    return sha256(prev.encode("ascii") + b"\n" + body).digest()


@fast_dataclass(slots=True)
class Journal:
    """Appends records and folds them into the projections, in the caller's transaction."""

    schema: Schema
    _seal_at: str = field(default="", compare=False)
    _seal_ordinal: int = field(default=0, compare=False)

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
        """Append one record. Times never run backwards within a journal: `at` is at least the last record's time."""
        # A seal is about every journal, and only a transaction that is alone adds one.
        if tx.about is not None and journal not in tx.about and journal != SEALS:
            raise fault("internal", f"A transaction about {', '.join(tx.about)} cannot append to {journal}.")
        project = self.schema.projectors.get(kind)
        if project is None and self.schema.unfolded is not None and kind not in self.schema.unfolded:
            raise fault("internal", f"The schema does not name records of kind {kind!r}.")
        head = tx.get(HEADS, journal)
        seq, prev = (head.seq + 1, head.hash.hex()) if head else (1, GENESIS)
        at = max(at, head.at) if head else at
        named = tuple(sorted(set(refs)))
        document: dict[str, Any] = {"seq": seq, "kind": kind, "at": at, "payload": payload, "prev": prev}
        if named:
            document["refs"] = named
        body = encode(document)
        digest = sha256(prev.encode("ascii") + b"\n" + body).digest()
        ordinal = tx.next_ordinal()
        tx.put(RECORDS, RecordRow(journal, seq, digest, body, ordinal))
        tx.put(HEADS, HeadRow(journal, seq, digest, at, ordinal))
        for ref in named:
            tx.put(REFS, RefRow(raw_digest(ref), journal, seq))
        record = Record(journal, seq, kind, at, payload, prev, named, digest.hex())
        if project is not None:
            project(tx, record)
        if (at >= self._seal_at or ordinal >= self._seal_ordinal) and journal != SEALS and tx.is_alone:
            self._seal_if_due(tx, at, ordinal)
        return record

    def _seal_if_due(self, tx: Tx, at: str, ordinal: int) -> None:
        """Seal, unless another process has done it since this one looked."""
        since_at, since = _last_seal(tx)
        self._seal_at, self._seal_ordinal = _seal_time_after(since_at), since + SEAL_RECORDS
        if at >= self._seal_at or ordinal >= self._seal_ordinal:
            seal(tx, at=at)


def seal(tx: Tx, *, at: str) -> None:
    """List the newest record of every journal that has changed since the last seal. The transaction must be alone."""
    last = tx.get(HEADS, SEALS)
    since = 0 if last is None else last.ordinal
    heads = tx.select(HEADS, between=("ordinal", since + 1, ORDINAL_END))
    if heads:
        named = {head.journal: {"seq": head.seq, "hash": head.hash.hex()} for head in heads}
        # By a journal without projections, because only `verify` reads seals.
        sealed = _SEALING.append(tx, SEALS, SEALED, {"heads": named}, at=at)
        tx.put(META, MetaRow(SEALS, str(sealed.seq)))


_SEALING = Journal(Schema((), {}))


def _last_seal(tx: Tx) -> tuple[str, int]:
    """The time and the ordinal of the last seal; if there is none, the time of a first record, and 0."""
    head = tx.get(HEADS, SEALS)
    if head is not None:
        return head.at, head.ordinal
    for oldest in tx.select(HEADS, order=("ordinal",), limit=1):
        first = tx.get(RECORDS, oldest.journal, 1)
        # A damaged record is a matter for `verify`; it must not keep others from writing.
        with suppress(MulliganError):
            return ("" if first is None else parse_record(first).at), 0
    return "", 0


def _seal_time_after(at: str) -> str:
    """When the next seal is due. Without a readable time: now."""
    with suppress(ValueError):
        due = parse_timestamp(at) + timedelta(seconds=SEAL_INTERVAL_S)
        return due.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
    return ""


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
    """The record in a row. Raises `journal_broken` if the bytes are not a record."""
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
"""The SHA-256 of the present bytes of each record that was erased in part, by journal and number."""


def erased_records(tx: Tx) -> Erased:
    records = (one for one in records_of(tx, STORE_JOURNAL) if one.kind == FORGOTTEN)
    return {(one["journal"], one["seq"]): one["sha256"] for record in records for one in record.payload["records"]}


def break_in_chain(rows: Iterable[RecordRow], head: HeadRow, erased: Callable[[], Erased] = dict) -> str | None:
    """The first fault of a journal, as a phrase; None if it has none. `rows` are all its rows in order."""
    seq, prev, ordinal = 0, GENESIS, 0
    for row in rows:
        seq += 1
        where = f"record {row.seq} of {row.journal}"
        if row.seq != seq:
            return f"{where}: expected record {seq}"
        if chain_hash(prev, row.body) != row.hash and sha256(row.body).hexdigest() != erased().get((row.journal, seq)):
            return f"{where}: its bytes do not match its hash"
        try:
            parsed = parse_record(row)
        except MulliganError as broken:
            return broken.message
        if parsed.seq != seq or parsed.prev != prev:
            return f"{where}: its bytes name another number or predecessor"
        if row.ordinal <= ordinal:
            return f"{where}: its ordinal is not higher than that of the record before it"
        prev, ordinal = row.hash.hex(), row.ordinal
    if (head.seq, head.hash.hex(), head.ordinal) != (seq, prev, ordinal):
        return f"{head.journal}: the journal ends at record {seq}, its head says {head.seq}"
    return None


R = TypeVar("R")

PAGE_ROWS = 500
_BEYOND = b"\xff" * 33


def rows_by(tx: Tx, table: Table[R], column: str) -> Iterator[R]:
    """All rows in order of the first column of their key, which holds digests.

    A page is cut before its last value, because more rows may have that value. If a page has only one value, the next
    page is larger.
    """
    low, limit = b"", PAGE_ROWS
    while rows := tx.select(table, between=(column, low, _BEYOND), limit=limit):
        last = getattr(rows[-1], column)
        whole = [row for row in rows if getattr(row, column) != last] if len(rows) == limit else rows
        if not whole:
            limit *= 2
            continue
        yield from whole
        _check_order(table, low, getattr(whole[-1], column))
        low, limit = getattr(whole[-1], column) + b"\0", PAGE_ROWS


def rows_of_journal(tx: Tx, journal: str, page_rows: int = PAGE_ROWS) -> Iterator[RecordRow]:
    """A journal's records as they are stored, oldest first."""
    after = 0
    while rows := tx.select(RECORDS, {"journal": journal}, between=("seq", after + 1, 2**62), limit=page_rows):
        yield from rows
        _check_order(RECORDS, after + 1, rows[-1].seq)
        after = rows[-1].seq


def _check_order(table: Table[R], low: Any, last: Any) -> None:
    """Refuse rows out of order: in a damaged table a search could return the same rows for ever."""
    if type(last) is not type(low) or last < low:
        raise fault("store_corrupt", f"The rows of {table.name} are out of order.")
