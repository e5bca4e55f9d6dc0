"""The SQLite engine: one file, many threads, many processes.

WAL, so readers never wait; `BEGIN IMMEDIATE`, so writers queue instead of failing half-way; no checkpoint and no fsync
on the hot path in `process` mode (`housekeeping` does both in the background). Connections are pooled, never shared
between threads at a time, and never carried over a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import apsw

from mulligan.store.bodies import DirectoryBodies
from mulligan.store.journal import Schema
from mulligan.store.owners import owner_bytes
from mulligan.store.protocol import OWNERS, BlobStore, Durability, OwnerRow
from mulligan.store.sql import create_statements, delete_sql, get_sql, has_sql, put_sql, select_sql
from mulligan.store.sqlite_file import Waiting, check_directory, connect, fault_of_sqlite, prepare_file
from mulligan.store.tables import Table, Value
from mulligan.values.clock import Clock, SystemClock, timestamp
from mulligan.values.faults import fault
from mulligan.values.ids import OwnerId

R = TypeVar("R")

DATABASE, OWNER_FILE, BODY_DIRECTORY = "store.db", "owners.lock", "blobs"


class SqliteStore:
    """A store in a directory of its own. `create=False` refuses to make one where there is none."""

    def __init__(
        self,
        directory: str,
        schema: Schema,
        *,
        durability: Durability = "process",
        bodies: BlobStore | None = None,
        clock: Clock | None = None,
        vfs: str | None = None,
        create: bool = True,
    ) -> None:
        self.directory = os.path.abspath(directory)
        check_directory(self.directory, DATABASE, create=create)
        self.durability: Durability = durability
        self.bodies: BlobStore = bodies or DirectoryBodies(os.path.join(self.directory, BODY_DIRECTORY))
        self._clock = clock or SystemClock()
        self._path = os.path.join(self.directory, DATABASE)
        self._vfs = vfs
        self._pool: list[apsw.Connection] = []
        self._pool_pid = os.getpid()
        self._abandoned: list[apsw.Connection] = []
        self._writing = threading.Lock()
        self._local = threading.local()
        self._owner: tuple[int, OwnerId] | None = None
        self._closing: list[Callable[[], None]] = []
        with self._connection() as connection, _faults("Opening the store"):
            prepare_file(connection, create_statements(schema.tables))

    @contextmanager
    def write(self) -> Iterator[_SqliteTx]:
        if getattr(self._local, "writing", False):
            raise fault("nested_transaction", "A write transaction is already open on this thread.")
        with self._writing, self._connection() as connection:
            self._local.writing = True
            try:
                with _faults("Writing the store"):
                    connection.execute("BEGIN IMMEDIATE")
                yield from self._inside(connection, writable=True)
            finally:
                self._local.writing = False

    @contextmanager
    def read(self) -> Iterator[_SqliteTx]:
        with self._connection() as connection:
            with _faults("Reading the store"):
                connection.execute("BEGIN")
            yield from self._inside(connection, writable=False)

    def _inside(self, connection: apsw.Connection, *, writable: bool) -> Iterator[_SqliteTx]:
        tx = _SqliteTx(connection, writable=writable)
        try:
            yield tx
            tx.ended = True
            with _faults("Committing to the store"):
                connection.execute("COMMIT")
        except BaseException:
            tx.ended = True
            with suppress(apsw.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _connection(self) -> Iterator[apsw.Connection]:
        connection = self._take()
        healthy = False
        try:
            yield connection
            healthy = True
        finally:
            if healthy or not connection.in_transaction:
                self._pool.append(connection)
            else:
                connection.close(True)

    def _take(self) -> apsw.Connection:
        if os.getpid() != self._pool_pid:
            # Connections must not be used, nor closed, in a forked child: keep them alive and untouched.
            self._abandoned, self._pool, self._pool_pid = self._abandoned + self._pool, [], os.getpid()
            self._writing, self._local = threading.Lock(), threading.local()
        with suppress(IndexError):
            return self._pool.pop()
        with _faults("Opening the store"):
            return connect(self._path, durability=self.durability, vfs=self._vfs)

    def owner(self) -> OwnerId:
        if self._owner is None or self._owner[0] != os.getpid():
            self._owner = (os.getpid(), self._register())
        return self._owner[1]

    def _register(self) -> OwnerId:
        """Lock the byte before the row is visible: whoever sees the row finds its owner alive."""
        with self.write() as tx:
            newest = tx.select(OWNERS, descending=True, limit=1)
            number = newest[0].id + 1 if newest else 1
            owner_bytes(self._owner_file()).hold(number)
            tx.put(OWNERS, OwnerRow(number, os.uname().nodename, timestamp(self._clock)))
        return OwnerId(number)

    def is_alive(self, owner: OwnerId) -> bool | None:
        if not os.path.exists(self._owner_file()):
            return False
        return owner_bytes(self._owner_file()).is_held(owner)

    def _owner_file(self) -> str:
        return os.path.join(self.directory, OWNER_FILE)

    def on_close(self, act: Callable[[], None]) -> None:
        self._closing.append(act)

    def sync(self) -> None:
        """Bodies first, then the log that names them."""
        self.bodies.sync()
        with self._connection() as connection, _faults("Syncing the store"):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def size_bytes(self) -> int:
        total = 0
        for folder, _, names in os.walk(self.directory):
            for name in names:
                with suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    def give_back_space(self) -> None:
        """Shrink the file by its free pages."""
        with self._writing, self._connection() as connection, _faults("Shrinking the store"):
            connection.execute("PRAGMA incremental_vacuum").fetchall()
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def check(self) -> list[str]:
        with self._connection() as connection, _faults("Checking the store"):
            rows = connection.execute("PRAGMA integrity_check(20)").fetchall()
        return [str(row[0]) for row in rows if row[0] != "ok"]

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()
        while self._pool and self._pool_pid == os.getpid():
            self._pool.pop().close(True)


class _SqliteTx:
    def __init__(self, connection: apsw.Connection, *, writable: bool) -> None:
        self._execute = connection.execute
        self._writable = writable
        self.ended = False

    def get(self, table: Table[R], *key: Value) -> R | None:
        rows = self._run(get_sql(table), key)
        return table.make(rows[0]) if rows else None

    def has(self, table: Table[R], *key: Value) -> bool:
        return bool(self._run(has_sql(table), key))

    def put(self, table: Table[R], row: R) -> None:
        self._change(put_sql(table), table.values_of(row))

    def delete(self, table: Table[R], *key: Value) -> bool:
        return bool(self._change(delete_sql(table), key))

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
        sql, values = select_sql(table, where or {}, between=between, order=order, descending=descending)
        rows = self._run(sql, (*values, -1 if limit is None else limit))
        return [table.make(row) for row in rows]

    def count(self, table: Table[R], where: Mapping[str, Value] | None = None) -> int:
        sql, values = select_sql(table, where or {}, counting=True)
        return int(self._run(sql, (*values, -1))[0][0])

    def _run(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        if self.ended:
            raise fault("internal", "A transaction was used after its end.")
        try:
            return self._execute(sql, values).fetchall()
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Reading the store") from error

    def _change(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        if self.ended or not self._writable:
            raise fault("internal", "A transaction was used after its end, or to write while reading.")
        try:
            return self._execute(sql, values).fetchall()
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Writing the store") from error


@contextmanager
def _faults(doing: str) -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        raise fault_of_sqlite(error, doing) from error


__all__ = ["SqliteStore", "Waiting"]
