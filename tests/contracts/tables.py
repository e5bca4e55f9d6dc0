"""The tables and the schema that the contract suites put into the store they judge."""

from __future__ import annotations

from mulligan.store.blobs import BLOBS, BODIES
from mulligan.store.claims import CLAIMS
from mulligan.store.journal import HEADS, RECORDS, REFS, Record, Schema
from mulligan.store.protocol import OWNERS, Tx
from mulligan.store.tables import Table
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class Thing:
    """A row with every kind of column, and a key of two."""

    shelf: str
    number: int
    label: str | None = None
    weight: int | None = None
    print: bytes | None = None


@plain(slots=True, frozen=True)
class Parcel:
    """A row with a body, which engines may keep in another way."""

    name: str
    body: bytes


@plain(slots=True, frozen=True)
class Sum:
    """What the records of kind `added` come to, per journal."""

    journal: str
    total: int


THINGS: Table[Thing] = Table("things", Thing, key=("shelf", "number"), indexes=(("label",), ("shelf", "weight")))
PARCELS: Table[Parcel] = Table("parcels", Parcel, key=("name",))
PRINTS: Table[Parcel] = Table("prints", Parcel, key=("body", "name"))
SUMS: Table[Sum] = Table("sums", Sum, key=("journal",), projected=True)


def _add(tx: Tx, record: Record) -> None:
    before = tx.get(SUMS, record.journal)
    tx.put(SUMS, Sum(record.journal, (before.total if before else 0) + int(record.payload["amount"])))


CONTRACT_SCHEMA = Schema(
    tables=(RECORDS, HEADS, REFS, BLOBS, BODIES, OWNERS, CLAIMS, THINGS, PARCELS, PRINTS, SUMS),
    projectors={"added": _add},
)
