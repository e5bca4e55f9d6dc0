"""The memory engine: the simplest implementation of the contract, and the strictest.

It refuses misuse that other engines may let pass: rows of the wrong type, values of the wrong type, use after the end.
Published tables never change: a writer copies a table before its first change and publishes all its copies at once. So
a reader sees the state at which it began, and no writer waits for it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from types import TracebackType
from typing import Any, TypeVar
from weakref import ref

from mulligan.store.blob_files import MemoryBodies
from mulligan.store.blobs import delete_dropped_bodies
from mulligan.store.fork_locks import release_interrupted_lock, shared_lock
from mulligan.store.journal import Schema
from mulligan.store.originals import Originals
from mulligan.store.protocol import (
    BlobStore,
    Durability,
    Subjects,
    Table,
    Value,
    check_columns,
    check_row,
    check_update,
    sort_key,
)
from mulligan.store.secret_key import SecretKey
from mulligan.values.digest import Digest
from mulligan.values.errors import fault
from mulligan.values.ids import OwnerId
from mulligan.values.scoped_var import Holder, block_exit, holder_of

R = TypeVar("R")
_Key = tuple[Value, ...]
_Sorted = tuple[tuple[int, Any], ...]


class _Rows:
    """One table: rows by key, and the keys in order."""

    def __init__(self, by_key: dict[_Key, Any], ordered: list[tuple[_Sorted, _Key]]) -> None:
        self.by_key = by_key
        self.ordered = ordered

    def copy(self) -> _Rows:
        return _Rows(self.by_key.copy(), self.ordered.copy())

    def put(self, key: _Key, row: object) -> None:
        if key not in self.by_key:
            insort(self.ordered, (_sorted(key), key))
        self.by_key[key] = row

    def remove(self, key: _Key) -> None:
        del self.by_key[key]
        del self.ordered[bisect_left(self.ordered, (_sorted(key), key))]

    def beginning_with(self, prefix: _Key) -> Iterator[Any]:
        """Rows whose keys begin so, in order."""
        start = bisect_left(self.ordered, (_sorted(prefix),))
        for at in range(start, len(self.ordered)):
            key = self.ordered[at][1]
            if key[: len(prefix)] != prefix:
                return
            yield self.by_key[key]


def _sorted(key: _Key) -> _Sorted:
    return tuple(sort_key(value) for value in key)


class MemoryStore:
    """A store in the memory of this process."""

    def __init__(self, schema: Schema, *, bodies: BlobStore | None = None, durability: Durability = "process") -> None:
        self.bodies: BlobStore = bodies if bodies is not None else MemoryBodies()
        self.durability: Durability = durability
        self.originals: Originals | None = None
        self.directory: str | None = None
        self.environment: Mapping[str, str] = {}
        self.secret_key = SecretKey(None)
        self._rows: dict[str, _Rows] = {table.name: _Rows({}, []) for table in schema.tables}
        self._write_lock = shared_lock()
        self._writer: tuple[int, Holder] | None = None
        self._closing: list[Callable[[], None]] = []
        self._ordinal = 0

    def write(self, *, about: Subjects | None = None) -> _MemoryWrite:
        return _MemoryWrite(self, about)

    def begin_write(self, holder: Holder, about: Subjects | None) -> _MemoryTx:
        """Raises `nested_transaction`, unless an interrupt kept the open transaction from ending its block."""
        me, open_one = threading.get_ident(), self._writer
        if open_one is not None and open_one[0] == me:
            if open_one[1]() is not None:
                raise fault("nested_transaction", "A write transaction is already open on this thread.")
            release_interrupted_lock(self._write_lock)
        self._write_lock.acquire()
        self._writer = (me, holder)
        return _MemoryTx(self._rows.copy(), writable=True, about=about, ordinal=self._ordinal)

    def publish(self, tx: _MemoryTx) -> None:
        self._rows, self._ordinal = tx.rows, tx.ordinal

    def end_write(self) -> None:
        self._writer = None
        self._write_lock.release()

    def rows(self, *wanted: tuple[Any, ...]) -> list[Any]:
        with self.read() as tx:
            return [tx.get(*one) for one in wanted]

    @contextmanager
    def read(self) -> Iterator[_MemoryTx]:
        tx = _MemoryTx(self._rows, writable=False)
        try:
            yield tx
        finally:
            tx.ended = True

    def owner(self) -> OwnerId:
        return OwnerId(1)

    def is_alive(self, owner: OwnerId) -> bool | None:
        return owner == OwnerId(1)

    def on_close(self, act: Callable[[], None]) -> None:
        self._closing.append(act)

    def sync(self) -> None:
        self.bodies.sync()

    def size_bytes(self) -> int:
        return sum(
            len(value) if isinstance(value, str | bytes) else 8
            for rows in self._rows.values()
            for key in rows.by_key
            for value in key
        )

    def reclaim_space(self) -> None:
        return None

    def older_copies(self) -> list[str]:
        return []

    def erase_deleted(self) -> None:
        return None

    def check(self) -> list[str]:
        return []

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()


class _MemoryWrite:
    """The block of a write transaction."""

    def __init__(self, store: MemoryStore, about: Subjects | None) -> None:
        self.exit_held: Holder | None = None
        self._store = store
        self._about = about

    def __enter__(self) -> _MemoryTx:
        self._tx = self._store.begin_write(holder_of(self) or ref(self), self._about)
        return self._tx

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._store.publish(self._tx)
        self._tx.ended = True
        self._store.end_write()
        if kind is None and self._tx.dropped:
            delete_dropped_bodies(self._store, self._tx.dropped)


class _MemoryTx:
    def __init__(
        self, rows: dict[str, _Rows], *, writable: bool, about: Subjects | None = None, ordinal: int = 0
    ) -> None:
        self.rows = rows
        self.about = about
        self.is_alone = self._writable = writable
        self.ordinal = ordinal
        self._ours: set[str] = set()
        self.ended = False
        self.dropped: list[Digest] = []

    def next_ordinal(self) -> int:
        if self.ended or not self._writable:
            raise fault("internal", "Only an open write transaction numbers records.")
        self.ordinal += 1
        return self.ordinal

    def get(self, table: Table[R], *key: Value) -> R | None:
        found: R | None = self._of(table).by_key.get(_checked_key(table, key))
        return found

    def put(self, table: Table[R], row: R) -> None:
        rows = self._of(table, writing=True)
        check_row(table, row)
        rows.put(table.key_of(row), row)

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        rows = self._of(table, writing=True)
        check_update(table, columns)
        known: R | None = rows.by_key.get(_checked_key(table, key))
        if known is not None:
            self.put(table, replace(known, **columns))  # type: ignore[type-var]  # rows are dataclasses
        return known is not None

    def delete(self, table: Table[R], *key: Value) -> bool:
        rows = self._of(table, writing=True)
        key = _checked_key(table, key)
        if key not in rows.by_key:
            return False
        rows.remove(key)
        return True

    def select(
        self,
        table: Table[R],
        where: Mapping[str, Value] | None = None,
        *,
        between: tuple[str, Value, Value] | None = None,
        order: tuple[str, ...] | None = None,
        descending: bool = False,
        limit: int | None = None,
    ) -> list[R]:
        rows = self._of(table)
        check_columns(table, (*(where or ()), *(between or ())[:1], *(order or ())))
        known = takewhile(lambda column: column in (where or ()), table.key)
        prefix = tuple((where or {})[column] for column in known)
        found = [row for row in rows.beginning_with(prefix) if _matches(row, where, between)]
        if order:
            found.sort(key=lambda row: tuple(sort_key(getattr(row, column)) for column in order))
        if descending:
            found.reverse()
        return found[:limit]

    def has(self, table: Table[R], *key: Value) -> bool:
        return _checked_key(table, key) in self._of(table).by_key

    def count(self, table: Table[R], where: Mapping[str, Value] | None = None) -> int:
        return len(self.select(table, where))

    def drop_body(self, digest: Digest) -> None:
        self.dropped.append(digest)

    def _of(self, table: Table[R], *, writing: bool = False) -> _Rows:
        if self.ended:
            raise fault("internal", "A transaction was used after its end.")
        if writing and not self._writable:
            raise fault("internal", "A read transaction cannot write.")
        if table.name not in self.rows:
            raise fault("internal", f"The store has no table {table.name}.")
        if writing and table.name not in self._ours:
            self._ours.add(table.name)
            self.rows[table.name] = self.rows[table.name].copy()
        return self.rows[table.name]


def _matches(row: object, where: Mapping[str, Value] | None, between: tuple[str, Value, Value] | None) -> bool:
    if where and any(getattr(row, column) != value for column, value in where.items()):
        return False
    if between is None:
        return True
    column, low, high = between
    return sort_key(low) <= sort_key(getattr(row, column)) < sort_key(high)


def _checked_key(table: Table[R], key: _Key) -> _Key:
    if len(key) != len(table.key):
        raise fault("internal", f"{table.name} has a key of {len(table.key)} columns.")
    return key
