"""Checkpoints of graph frameworks: rows that belong to the framework and end when it says so.

A thread has namespaces, a namespace has checkpoints in the order of their ids, a checkpoint has writes that wait for
the next step. What a channel held is kept once per version, however many checkpoints refer to it. These rows are no
journal: the framework deletes and prunes them, and then they are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class GraphPointRow:
    """One checkpoint without its values. `kind` is how the framework's serialiser says it wrote `body`."""

    thread: str
    space: str
    id: str
    parent: str | None
    run: str | None
    kind: str
    body: bytes
    about_kind: str
    about: bytes


@plain(slots=True, frozen=True)
class GraphValueRow:
    """What a channel held in one of its versions."""

    thread: str
    space: str
    channel: str
    version: str
    kind: str
    body: bytes


@plain(slots=True, frozen=True)
class GraphWriteRow:
    """What a task wrote after a checkpoint, waiting for the next one."""

    thread: str
    space: str
    point: str
    task: str
    ordinal: int
    path: str
    channel: str
    kind: str
    body: bytes


POINTS: Table[GraphPointRow] = Table("graph_points", GraphPointRow, key=("thread", "space", "id"), indexes=(("run",),))
VALUES: Table[GraphValueRow] = Table("graph_values", GraphValueRow, key=("thread", "space", "channel", "version"))
WRITES: Table[GraphWriteRow] = Table("graph_writes", GraphWriteRow, key=("thread", "space", "point", "task", "ordinal"))

GRAPH_TABLES = (POINTS, VALUES, WRITES)


def points_of(tx: Tx, thread: str, space: str | None = None) -> list[GraphPointRow]:
    """Newest first; of every namespace unless one is named."""
    where = {"thread": thread} if space is None else {"thread": thread, "space": space}
    return tx.select(POINTS, where, order=("thread", "space", "id"), descending=True)


def newest(tx: Tx, thread: str, space: str) -> GraphPointRow | None:
    found = tx.select(POINTS, {"thread": thread, "space": space}, order=("id",), descending=True, limit=1)
    return found[0] if found else None


def threads(tx: Tx) -> list[str]:
    return sorted({row.thread for row in tx.select(POINTS)})


def writes_of(tx: Tx, point: GraphPointRow) -> list[GraphWriteRow]:
    """In the order in which a running graph would apply them."""
    rows = tx.select(WRITES, {"thread": point.thread, "space": point.space, "point": point.id})
    return sorted(rows, key=lambda row: (row.path, row.task, row.ordinal))


def put_writes(tx: Tx, rows: Iterable[GraphWriteRow]) -> None:
    """A task that is run again may not change what it wrote; only its special marks, below zero, are replaced."""
    for row in rows:
        if row.ordinal < 0 or not tx.has(WRITES, *WRITES.key_of(row)):
            tx.put(WRITES, row)


def delete_points(tx: Tx, points: Collection[GraphPointRow]) -> None:
    for point in points:
        tx.delete(POINTS, *POINTS.key_of(point))
        for write in writes_of(tx, point):
            tx.delete(WRITES, *WRITES.key_of(write))


def delete_values(tx: Tx, thread: str, kept: Collection[tuple[str, str, str]]) -> None:
    """The thread's values but for the kept ones, each (namespace, channel, version)."""
    for row in tx.select(VALUES, {"thread": thread}):
        if (row.space, row.channel, row.version) not in kept:
            tx.delete(VALUES, *VALUES.key_of(row))


def copy_thread(tx: Tx, source: str, target: str) -> None:
    for point in points_of(tx, source):
        tx.put(POINTS, replace(point, thread=target))
        for write in writes_of(tx, point):
            tx.put(WRITES, replace(write, thread=target))
    for value in tx.select(VALUES, {"thread": source}):
        tx.put(VALUES, replace(value, thread=target))


def points_of_runs(tx: Tx, runs: Iterable[str]) -> Iterator[GraphPointRow]:
    for run in runs:
        yield from tx.select(POINTS, {"run": run})
