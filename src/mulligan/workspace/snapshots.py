"""Snapshots in the store: one row for each, folded from `snapshot.created`, and what each was made from.

A snapshot that is created again after a while has a second record: it was last created then. `snapshot.evicted` says
which of its bodies went; the last of those records ends it.

The content of a snapshot decides its id; where it came from does not, so lineage is a table of its own. The first
parent recorded stays, and nothing is its own parent.
"""

from __future__ import annotations

from mulligan.store.journal import Record
from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.canonical import encode
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class SnapshotRow:
    """`manifest` is the digest of the blob that holds it, with what is kept beside it. Created last at `created_at`."""

    root: str
    id: str
    fingerprint: str
    manifest: str
    created_at: str


@plain(slots=True, frozen=True)
class LineageRow:
    root: str
    child: str
    parent: str


SNAPSHOTS: Table[SnapshotRow] = Table("snapshots", SnapshotRow, key=("root", "id"), projected=True)
LINEAGE: Table[LineageRow] = Table("lineage", LineageRow, key=("root", "child"), projected=True)


def project_snapshot_created(tx: Tx, record: Record) -> None:
    body = record.payload
    text = encode(body["fingerprint"]).decode("utf-8")
    tx.put(SNAPSHOTS, SnapshotRow(body["root"], body["snapshot"], text, body["manifest"], record.at))


def project_snapshot_evicted(tx: Tx, record: Record) -> None:
    body = record.payload
    if body["is_last"]:
        tx.delete(SNAPSHOTS, body["root"], body["snapshot"])
        tx.delete(LINEAGE, body["root"], body["snapshot"])


def project_snapshot_derived(tx: Tx, record: Record) -> None:
    body = record.payload
    if body["snapshot"] != body["from"] and not tx.has(LINEAGE, body["root"], body["snapshot"]):
        tx.put(LINEAGE, LineageRow(body["root"], body["snapshot"], body["from"]))
