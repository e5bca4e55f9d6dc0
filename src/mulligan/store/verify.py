"""Checks that every stored byte is what Mulligan wrote. It changes nothing and continues after each problem.

What must hold:
1. The engine has no complaint about its medium.
2. Each journal is contiguous, its hashes chain, its ordinals rise, and its head names its last record. Every record is
   in a journal that has a head, and every record that a seal names is there.
3. Each blob a record names has a row, and the edges between them (REFS) are those the records name.
4. Each blob unpacks to the bytes of its digest. If a blob has no body, a record says why.
5. Folding the journals from their start gives the projected tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from hashlib import sha256
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, TypeAlias, TypeVar

from mulligan.store.blobs import (
    BESIDE,
    BLOBS,
    BODIES,
    EVICTED,
    IN_DATABASE,
    IN_PARTS,
    LOST,
    PARTS,
    READABLE,
    BlobRow,
    Blobs,
)
from mulligan.store.journal import (
    HEADS,
    PAGE_ROWS,
    RECORDS,
    REFS,
    SEALED,
    SEALS,
    Erased,
    Record,
    RecordRow,
    Schema,
    break_in_chain,
    erased_records,
    parse_record,
    rows_by,
    rows_of_journal,
)
from mulligan.store.memory import MemoryStore
from mulligan.store.protocol import META, Store, Table, Tx, Value
from mulligan.values.clock import SystemClock
from mulligan.values.digest import digest_from_raw, raw_digest
from mulligan.values.errors import INTEGRITY_CODES, MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass

Kind = Literal["engine", "journal", "ref", "blob", "orphan", "projection"]
Severity = Literal["broken", "harmless"]
Progress: TypeAlias = Callable[[str, int, int], None]
"""A function that gets the name of the step, the number of checked items, and their total."""

R = TypeVar("R")


@fast_dataclass(slots=True, frozen=True)
class Problem:
    """One problem. `broken`: stored bytes are not what Mulligan wrote; `harmless`: nothing needs to be done."""

    kind: Kind
    where: str
    message: str
    severity: Severity = "broken"


def verify(
    store: Store,
    schema: Schema,
    *,
    deep: bool = True,
    progress: Progress | None = None,
    rebuilt: Store | None = None,
) -> Iterator[Problem]:
    """Every problem of the store. Without `deep`, bodies of blobs are not read.

    Projections are rebuilt in `rebuilt`, an empty store of the same schema (default: in memory).
    """
    with store.read() as tx:
        check = _Check(store, tx, progress or _no_progress)
        yield from check.checked("engine", "the database file", check.engine)
        yield from check.checked("journal", "the journals", check.journals)
        yield from check.checked("blob", "the list of blobs", check.blob_rows)
        if deep:
            yield from check.checked("blob", "the blobs", check.bodies)
        yield from check.checked("orphan", "bodies beside the database", check.orphans)
        fresh = rebuilt if rebuilt is not None else MemoryStore(schema)
        yield from check.checked("projection", "the projections", lambda: check.projections(schema, fresh))


def verify_journal(store: Store, journal: str, *, deep: bool = True) -> Iterator[Problem]:
    """A single journal: its chain, and the blobs its records name."""
    with store.read() as tx:
        check = _Check(store, tx, _no_progress)
        yield from check.checked("journal", journal, lambda: check.journal(journal))
        if deep and not check.broken_journals:
            yield from check.checked("blob", journal, lambda: check.blobs_of(journal))


def _no_progress(what: str, done: int, total: int) -> None:
    return None


@fast_dataclass(slots=True)
class _Check:
    """One read transaction on the store, and what the steps have found in it so far."""

    store: Store
    tx: Tx
    progress: Progress
    gone: dict[str, set[str]] = field(default_factory=lambda: {EVICTED: set(), LOST: set()})
    """Digests of the blobs that records name as evicted and as lost."""
    sealed: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The newest record of each journal that a seal names: its number and its hash."""
    broken_journals: bool = False
    records: int = 0
    edges: int = 0

    def checked(self, kind: Kind, where: str, step: Callable[[], Iterable[Problem]]) -> Iterator[Problem]:
        """Run one step. If the step cannot read its data, that is a problem too."""
        try:
            for problem in step():
                self.broken_journals = self.broken_journals or kind == "journal"
                yield problem
        except MulliganError as error:
            if error.code not in INTEGRITY_CODES:
                raise
            self.broken_journals = self.broken_journals or kind == "journal"
            yield Problem(kind, where, error.message)

    def engine(self) -> Iterator[Problem]:
        self.progress("database file", 0, 1)
        for complaint in self.store.check():
            yield Problem("engine", "the database file", complaint)
        self.progress("database file", 1, 1)

    def journals(self) -> Iterator[Problem]:
        total = self.tx.count(RECORDS)
        sound = True
        for head in self.tx.select(HEADS):
            missing: list[Problem] = []
            problem = break_in_chain(self._checked_rows(head.journal, total, missing), head, self._erased)
            yield from missing
            if problem is not None:
                sound = False
                yield Problem("journal", head.journal, problem)
        if sound and total != self.records:
            counted = f"{total} records exist, {self.records} of them in a journal that has a head"
            yield Problem("journal", "all journals", counted)
        if sound:
            yield from self._check_seals()
        if sound and self.edges != self.tx.count(REFS):
            listed = self.tx.count(REFS)
            words = f"the store lists {listed} references to blobs, the records name {self.edges}"
            yield Problem("ref", "all journals", words)

    def _checked_rows(self, journal: str, total: int, missing: list[Problem]) -> Iterator[RecordRow]:
        """The rows of a journal. The caller checks each row's hash before this generator reads the record in it."""
        for row in rows_of_journal(self.tx, journal):
            if _has_wrong_type(RECORDS, row):
                return
            yield row
            self.records += 1
            record = parse_record(row)
            for ref in record.refs:
                self.edges += 1
                if not self.tx.has(REFS, raw_digest(ref), journal, row.seq):
                    where = f"record {row.seq} of {journal}"
                    missing.append(Problem("ref", where, f"the store does not list its reference to {ref}"))
            for place, endings in _GONE_KINDS.items():
                if record.kind.endswith(endings):
                    self.gone[place].update(record.payload.get("digests", ()))
            if record.kind == SEALED:
                for name, newest in record.payload["heads"].items():
                    self.sealed[name] = (newest["seq"], newest["hash"])
            self.progress("records", self.records, total)

    def _erased(self) -> Erased:
        return erased_records(self.tx)

    def _check_seals(self) -> Iterator[Problem]:
        """What the seals name must be there; the chains show that everything before it is."""
        for journal, (seq, digest) in self.sealed.items():
            row = self.tx.get(RECORDS, journal, seq)
            if row is None or row.hash.hex() != digest:
                yield Problem("journal", journal, f"a seal names record {seq} of this journal, and it is not there")
        written, head = self.tx.get(META, SEALS), self.tx.get(HEADS, SEALS)
        if written is not None and written.value != str(head.seq if head else 0):
            found = head.seq if head else 0
            yield Problem("journal", SEALS, f"the store has {found} seals, and {written.value} were written")

    def journal(self, journal: str) -> Iterator[Problem]:
        head = self.tx.get(HEADS, journal)
        if head is None:
            yield Problem("journal", journal, "there is no such journal")
            return
        missing: list[Problem] = []
        problem = break_in_chain(self._checked_rows(journal, head.seq, missing), head, self._erased)
        yield from missing
        if problem is not None:
            yield Problem("journal", journal, problem)

    def blobs_of(self, journal: str) -> Iterator[Problem]:
        blobs = Blobs(self.store, SystemClock())
        wanted = {ref for row in rows_of_journal(self.tx, journal) for ref in parse_record(row).refs}
        for digest in sorted(wanted):
            row = self.tx.get(BLOBS, raw_digest(digest))
            if row is None:
                yield Problem("ref", digest, "a record refers to this blob, and it is not there")
            elif row.place in READABLE:
                yield from self._body(blobs, row)

    def blob_rows(self) -> Iterator[Problem]:
        for digest in _distinct(row.digest for row in _pages(self.tx, REFS, "digest")):
            if not self.tx.has(BLOBS, digest):
                yield Problem("ref", digest_from_raw(digest), "a record refers to this blob, and it is not there")
        bodies = 0
        for row in _pages(self.tx, BLOBS, "digest"):
            bodies += row.place == IN_DATABASE
            yield from self._blob_row(row)
        if bodies != self.tx.count(BODIES):
            yield Problem("blob", "bodies", f"there are {self.tx.count(BODIES)} bodies for {bodies} blobs")

    def _blob_row(self, row: BlobRow) -> Iterator[Problem]:
        where = digest_from_raw(row.digest)
        if row.place in self.gone and where not in self.gone[row.place]:
            yield Problem("blob", where, f"its body is {row.place}, and no record says so")
        elif row.place not in (*READABLE, *self.gone):
            yield Problem("blob", where, f"its row names an unknown place: {row.place!r}")
        if row.base is None:
            return
        base = self.tx.get(BLOBS, row.base)
        if base is None:
            yield Problem("blob", where, f"the earlier version it builds on, {digest_from_raw(row.base)}, is not there")
        elif base.depth + 1 != row.depth:
            yield Problem("blob", where, "its row states a wrong depth in its chain of versions")

    def bodies(self) -> Iterator[Problem]:
        blobs = Blobs(self.store, SystemClock())
        total = self.tx.count(BLOBS)
        for done, row in enumerate(_pages(self.tx, BLOBS, "digest"), start=1):
            if row.place in READABLE:
                yield from self._body(blobs, row)
            self.progress("blobs", done, total)

    def _body(self, blobs: Blobs, row: BlobRow) -> Iterator[Problem]:
        digest = digest_from_raw(row.digest)
        try:
            if row.place == IN_PARTS:
                stored = self._in_parts(blobs, row)
            else:
                blobs.read_in(self.tx, digest)
                stored = self._stored(row)
        except MulliganError as error:
            if error.code not in INTEGRITY_CODES | {"evicted", "unknown_blob"}:
                raise
            # Bodies beside the database are not part of our read transaction: gc may have deleted one since it began.
            with self.store.read() as now:
                if now.get(BLOBS, row.digest) == row:
                    yield Problem("blob", digest, error.message)
        else:
            if stored != row.stored:
                yield Problem("blob", digest, f"its body has {stored} bytes, but its row says {row.stored}")

    def _in_parts(self, blobs: Blobs, row: BlobRow) -> int:
        """As `Blobs.read` does, but with a single part in memory at a time."""
        whole, size = sha256(), 0
        for number, edge in enumerate(self.tx.select(PARTS, {"digest": row.digest})):
            part = blobs.read_in(self.tx, digest_from_raw(edge.part))
            whole.update(part)
            size += len(part)
            if (edge.ordinal, edge.size) != (number, len(part)):
                raise fault("blob_corrupt", f"Part {edge.ordinal} has a wrong number or size.")
        if (whole.digest(), size) != (row.digest, row.size):
            raise fault("blob_corrupt", "Its parts do not hold the bytes of its digest.")
        return row.stored

    def _stored(self, row: BlobRow) -> int:
        body = self.tx.get(BODIES, row.digest)
        if row.place == BESIDE or body is None:
            return len(self.store.bodies.get(digest_from_raw(row.digest)))
        return len(body.body)

    def orphans(self) -> Iterator[Problem]:
        for digest in self.store.bodies.digests():
            with self.store.read() as now:
                row = now.get(BLOBS, raw_digest(digest))
            if row is None or row.place != BESIDE:
                yield Problem("orphan", digest, "a body that no row names; `mulligan gc` removes it", "harmless")
        for kept in _pages(self.tx, BODIES, "digest"):
            blob = self.tx.get(BLOBS, kept.digest)
            if blob is None or blob.place != IN_DATABASE:
                yield Problem("blob", digest_from_raw(kept.digest), "a body in the database that no blob names")
        for part in _pages(self.tx, PARTS, "digest"):
            whole = self.tx.get(BLOBS, part.digest)
            if whole is None or whole.place != IN_PARTS:
                yield Problem("orphan", digest_from_raw(part.digest), "parts of a blob that is not there", "harmless")

    def projections(self, schema: Schema, rebuilt: Store) -> Iterator[Problem]:
        tables = [table for table in schema.tables if table.projected]
        if not tables:
            return
        if self.broken_journals:
            yield Problem("projection", "all tables", "not compared, because a journal is broken", "harmless")
            return
        refused = fold_into(rebuilt, self.tx, schema, self.progress)
        if refused is not None:
            yield refused
            return
        for table in tables:
            yield from _differences(self.tx, rebuilt, table)


_GONE_KINDS = {EVICTED: (".evicted", ".dropped", ".forgotten"), LOST: (".lost",)}
"""Kinds of records that account for bodies without bytes; their payload names them in `digests`."""


def _distinct(ordered: Iterable[bytes]) -> Iterator[bytes]:
    last = None
    for digest in ordered:
        if digest != last:
            yield digest
        last = digest


def _pages(tx: Tx, table: Table[R], column: str) -> Iterator[R]:
    """All rows whose columns have the right types; a damaged cell can change its type."""
    return (row for row in rows_by(tx, table, column) if not _has_wrong_type(table, row))


_KINDS: dict[str, type] = {"str": str, "int": int, "bytes": bytes}


def _has_wrong_type(table: Table[Any], row: object) -> bool:
    """Whether a column has a wrong type, as after damage. Code that reads it would fail without naming the cause."""
    return any(
        type(getattr(row, column)) is not _KINDS[kind]
        and not (getattr(row, column) is None and table.is_nullable(column))
        for column, kind in table.column_types.items()
    )


def fold_into(rebuilt: Store, tx: Tx, schema: Schema, progress: Progress = _no_progress) -> Problem | None:
    """Fold all records, in the order they were written, into an empty store. Answers the first that does not fold."""
    total, done = tx.count(RECORDS), 0
    journals = [head.journal for head in tx.select(HEADS)]
    rows = _in_order(tx, journals)
    while batch := [parse_record(row) for row in islice(rows, PAGE_ROWS)]:
        with rebuilt.write() as fresh:
            for record in batch:
                refused = _project(schema, fresh, record)
                if refused is not None:
                    return refused
        done += len(batch)
        progress("projections", done, total)
    return None


def _project(schema: Schema, fresh: Tx, record: Record) -> Problem | None:
    try:
        schema.project(fresh, record)
    except (
        AssertionError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        MulliganError,
    ) as error:
        where = f"record {record.seq} of {record.journal}"
        return Problem("projection", where, f"it does not fold: {error!r}")
    return None


def _in_order(tx: Tx, journals: list[str]) -> Iterator[RecordRow]:
    """All records in the order of their ordinals, with only a page of each journal in memory."""
    page_rows = max(8, PAGE_ROWS // max(1, len(journals)))
    return heapq.merge(*(rows_of_journal(tx, journal, page_rows) for journal in journals), key=attrgetter("ordinal"))


def _differences(tx: Tx, rebuilt: Store, table: Table[Any]) -> Iterator[Problem]:
    kept = {table.key_of(row): row for row in tx.select(table)}
    with rebuilt.read() as fresh:
        folded = {table.key_of(row): row for row in fresh.select(table)}
    for key in kept.keys() | folded.keys():
        if kept.get(key) != folded.get(key):
            where = f"{table.name} {' '.join(_shown(value) for value in key)}"
            yield Problem("projection", where, _difference(kept.get(key), folded.get(key), table))


def _difference(kept: object, folded: object, table: Table[Any]) -> str:
    if kept is None:
        return "the journals give this row, and it is not there"
    if folded is None:
        return "this row is there, and the journals do not give it"
    columns = [column for column in table.columns if getattr(kept, column) != getattr(folded, column)]
    return f"it differs from what the journals give in {', '.join(columns)}"


def _shown(value: Value) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
