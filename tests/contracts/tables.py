"""The tables and the schema that the contract suites use."""

from __future__ import annotations

from mulligan.store.blobs import BLOBS, BODIES
from mulligan.store.journal import HEADS, RECORDS, REFS, Record, Schema
from mulligan.store.protocol import CLAIMS, OWNERS, Table, Tx
from mulligan.values.fast_dataclass import fast_dataclass


@fast_dataclass(slots=True, frozen=True)
class Thing:
    """A row with every kind of column, and a key of two."""

    group: str
    number: int
    label: str | None = None
    weight: int | None = None
    print: bytes | None = None


@fast_dataclass(slots=True, frozen=True)
class Parcel:
    """A row with a body. An engine may store a table with a body in another way."""

    name: str
    body: bytes


@fast_dataclass(slots=True, frozen=True)
class Sum:
    """The sum of the records of kind `added`, for each journal."""

    journal: str
    total: int


THINGS: Table[Thing] = Table("things", Thing, key=("group", "number"), indexes=(("label",), ("group", "weight")))
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
