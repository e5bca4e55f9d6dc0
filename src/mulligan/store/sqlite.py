"""The SQLite engine: one file, many threads, many processes.

WAL, so readers never wait; `BEGIN IMMEDIATE`, so writers queue instead of failing half-way; no checkpoint and no fsync
on the hot path in `process` mode (`housekeeping` does both in the background). `sqlite_pool` shares connections between
threads and says what happens when a process forks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape, glob
from typing import Any, TypeVar

import apsw

from mulligan.store.blobs import delete_dropped_bodies
from mulligan.store.bodies import DirectoryBodies, sync_path
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.journal import Schema
from mulligan.store.machine import note_process
from mulligan.store.migrations import SCHEMA_VERSION, newer_store
from mulligan.store.originals import Originals, wait_until_gone
from mulligan.store.owners import OwnerBytes, owner_bytes
from mulligan.store.protocol import OWNERS, BlobStore, Durability, OwnerRow
from mulligan.store.secret_key import SecretKey
from mulligan.store.sql import create_statements, delete_sql, get_sql, has_sql, put_sql, select_sql, update_sql
from mulligan.store.sqlite_file import (
    COPY_SUFFIX,
    PooledConnection,
    Waiting,
    check_directory,
    fault_of_sqlite,
    prepare_file,
)
from mulligan.store.sqlite_log import log_bytes, unread_commits
from mulligan.store.sqlite_pool import ConnectionPool
from mulligan.store.tables import Table, Value
from mulligan.values.clock import Clock, SystemClock, timestamp
from mulligan.values.digest import Digest
from mulligan.values.faults import fault, fault_of_os_error
from mulligan.values.here import Holder, block_exit
from mulligan.values.ids import OwnerId
from mulligan.values.limits import MIB_BYTES

R = TypeVar("R")

DATABASE, OWNER_FILE, BODY_DIRECTORY, ORIGINALS_DIRECTORY = "store.db", "owners.lock", "blobs", "originals"
_LONG_LOG_BYTES = 8 * MIB_BYTES
_LOOK_AFTER_S = 1.0
"""How long a thread waits to write before it looks whether the thread that writes was interrupted."""

_taking_over = fork_safe_lock()


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
        self.directory: str = os.path.abspath(directory)
        check_directory(self.directory, DATABASE, create=create)
        self.durability: Durability = durability
        self.secret_key = SecretKey(self.directory)
        originals = Originals(os.path.join(self.directory, ORIGINALS_DIRECTORY))
        self.originals: Originals | None = originals if durability == "process" else None
        self.bodies: BlobStore = bodies or DirectoryBodies(os.path.join(self.directory, BODY_DIRECTORY))
        self._clock = clock or SystemClock()
        self._path = os.path.join(self.directory, DATABASE)
        self._writing = threading.RLock()
        self._tending = threading.RLock()
        self._writer = 0
        self._transaction: _SqliteTx | None = None
        self._owner: tuple[int, OwnerId] | None = None
        self._closing: list[Callable[[], None]] = []
        self.after_write: Callable[[], None] = _nothing
        self._pool = ConnectionPool(
            self._path,
            durability=durability,
            vfs=vfs,
            stop_left=self._stop_left_transaction,
            after_fork=self._begin_anew,
        )
        with self._connection() as connection:
            prepare_file(connection, create_statements(schema.tables), directory=self.directory)

    def write(self) -> _SqliteTx:
        return _SqliteTx(self, writable=True)

    def read(self) -> _SqliteTx:
        return _SqliteTx(self, writable=False)

    def _begin(self, tx: _SqliteTx, *, writable: bool) -> None:
        """If it does not end well, and be it by an interrupt, `_stop` is to follow."""
        if not writable:
            self._connect(tx, "BEGIN", "Reading the store")
            return
        me = threading.get_ident()
        while not self._writing.acquire(timeout=_LOOK_AFTER_S):
            self._stop_left_transaction()
        self._connect(tx, "BEGIN IMMEDIATE", "Writing the store")
        self._writer, self._transaction = me, tx

    def _connect(self, tx: _SqliteTx, sql: str, doing: str) -> None:
        tx._connection = self._pool.take()
        try:
            # With the transaction: a newer version may have migrated the store since this process opened it.
            ((found,),) = tx._connection.execute(sql + "; PRAGMA user_version").fetchall()
        except apsw.Error as error:
            raise fault_of_sqlite(error, doing) from error
        if int(found or 0) > SCHEMA_VERSION:
            raise newer_store(tx._connection, int(found or 0))

    def _stop(self, tx: _SqliteTx, *, writable: bool) -> None:
        """However far it came: an interrupt does not say."""
        connection = getattr(tx, "_connection", None)
        if connection is not None:
            self._pool.give_back(connection)
        if writable:
            if self._writer == threading.get_ident():
                self._writer, self._transaction = 0, None
            with suppress(RuntimeError):  # it is not ours
                self._writing.release()

    def _check_not_writing(self) -> None:
        if self._writer != threading.get_ident() or self._transaction is None:
            return
        if self._transaction.is_held():
            raise fault("nested_transaction", "A write transaction is already open on this thread.")
        # An interrupt kept it from ending, in the moment in which it was about to.
        self._transaction.ended = True
        self._stop(self._transaction, writable=True)

    def _stop_left_transaction(self) -> None:
        """For a thread that waits to write: an interrupt may have kept another thread from ending its transaction."""
        with _taking_over:
            transaction = self._transaction
            if transaction is None or (transaction.is_held() and self._writer in sys._current_frames()):
                return
            transaction.ended = True
            self._pool.discard(transaction._connection)
            self._writing, self._writer, self._transaction = threading.RLock(), 0, None

    def _end(self, connection: PooledConnection, *, writable: bool, failed: bool) -> None:
        try:
            _roll_back(connection) if failed else _commit(connection)
        finally:
            # First of all, and without a call in between, in which an interrupt could come.
            if writable:
                self._writer, self._transaction = 0, None
                self._writing.release()
            self._pool.give_back(connection)
        if writable and not failed:
            self.after_write()

    @contextmanager
    def _connection(self) -> Iterator[apsw.Connection]:
        """A connection outside any transaction of ours, for the file as a whole."""
        connection = self._pool.take()
        try:
            yield connection
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Opening or tending the store") from error
        finally:
            self._pool.give_back(connection)

    def _begin_anew(self) -> None:
        """In a forked child. A transaction of the parent must not be committed here, so it counts as ended."""
        if self._transaction is not None:
            self._transaction.ended = True
        self._writing, self._tending = threading.RLock(), threading.RLock()
        self._writer, self._transaction = 0, None

    def owner(self) -> OwnerId:
        if self._owner is None or self._owner[0] != os.getpid():
            self._owner = (os.getpid(), self._register())
        return self._owner[1]

    def _register(self) -> OwnerId:
        """Lock the byte before the row is visible: whoever sees the row finds its owner alive."""
        with self.write() as tx:
            newest = tx.select(OWNERS, descending=True, limit=1)
            number = newest[0].id + 1 if newest else 1
            self._owner_bytes().hold(number)
            tx.put(OWNERS, OwnerRow(number, os.uname().nodename, timestamp(self._clock)))
            note_process(tx, number, self.is_alive)
        return OwnerId(number)

    def is_alive(self, owner: OwnerId) -> bool | None:
        if not os.path.exists(self._owner_file()):
            return False
        return self._owner_bytes().is_held(owner)

    def _owner_bytes(self) -> OwnerBytes:
        try:
            return owner_bytes(self._owner_file())
        except OSError as error:
            words = f"The store in {self.directory} takes no changes; choose another with MULLIGAN_HOME"
            raise fault_of_os_error(error, words) from error

    def _owner_file(self) -> str:
        return os.path.join(self.directory, OWNER_FILE)

    def on_close(self, act: Callable[[], None]) -> None:
        self._closing.append(act)

    def sync(self) -> None:
        """Bodies first, then the log that names them.

        A checkpoint that a reader holds back may skip its own sync of the log, so the log is synced by hand.
        """
        self.bodies.sync()
        try:
            sync_path(self._path + "-wal")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise fault("sync_failed", f"Syncing the store: {error.strerror}", errno=error.errno) from error
        # Another process may be copying the log at this moment; then it does the work.
        with self._tending, self._connection() as connection, suppress(apsw.BusyError):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def size_bytes(self) -> int:
        with self._connection() as connection:
            total = int(connection.pragma("page_count")) * int(connection.pragma("page_size")) - self.free_bytes()
        for folder, _, names in os.walk(os.path.join(self.directory, BODY_DIRECTORY)):
            for name in names:
                with suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    def free_bytes(self) -> int:
        """What the file holds and nobody uses; `give_back_space` returns it to the disk."""
        with self._connection() as connection:
            return int(connection.pragma("freelist_count")) * int(connection.pragma("page_size"))

    def give_back_space(self, max_pages: int | None = None) -> None:
        """Shrink the file by its free pages, all of them or at most so many: other writers wait meanwhile."""
        with self._writing, self._connection() as connection:
            connection.execute(f"PRAGMA incremental_vacuum({max_pages or 0})").fetchall()
            mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if max_pages is None else apsw.SQLITE_CHECKPOINT_PASSIVE
            # Another thread may be copying the log at this moment; then it does the work.
            with suppress(apsw.BusyError):
                connection.wal_checkpoint(mode=mode)

    def older_copies(self) -> list[str]:
        return sorted(glob(escape(self._path) + COPY_SUFFIX + "*"))

    def erase_deleted(self) -> None:
        for copy in self.older_copies():
            with suppress(FileNotFoundError):
                os.unlink(copy)
        with self._writing, self._connection() as connection:
            # Written anew as a whole: a page that is in use may still hold what a deleted row left in it.
            try:
                connection.execute("VACUUM")
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except (apsw.BusyError, apsw.LockedError) as error:
                words = "What was deleted is still in the log, because another process is reading; try again"
                raise fault_of_sqlite(error, words) from error
        if self.originals is not None and (taken := self.originals.taken()):
            self.originals.sync(taken)
            self.sync()
            self.originals.drop(taken)
        wait_until_gone(os.path.join(self.directory, ORIGINALS_DIRECTORY))

    def check(self) -> list[str]:
        with self._connection() as connection:
            rows = connection.execute("PRAGMA integrity_check(20)").fetchall()
        complaints = [str(row[0]) for row in rows if row[0] != "ok"]
        lost = self._unread_commits()
        return [*complaints, lost] if lost else complaints

    def _unread_commits(self) -> str | None:
        """Under the lock of writers, so that the log stands still."""
        with self._connection() as looking, self._connection() as still:
            try:
                still.execute("BEGIN IMMEDIATE")
                frames, _ = looking.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
                return unread_commits(self._path + "-wal", max(frames, 0))
            except apsw.ReadOnlyError:
                return None  # On such a disk SQLite does not say how far it reads.
            finally:
                _roll_back(still)

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()
        if self.originals is not None:
            self.originals.close()
        self._fold_long_log()
        self._pool.close()
        if self.durability == "power":
            # SQLite has deleted its log. Without a journal, the name could come back with another file's inode.
            with suppress(OSError):
                sync_path(self.directory)

    def _fold_long_log(self) -> None:
        """Whoever opens the file next reads all of the log; after much writing that is worth sparing them.

        Nobody is waited for, and what cannot be done is left: the log holds everything.
        """
        if not self._pool.has_idle() or log_bytes(self._path + "-wal") < _LONG_LOG_BYTES:
            return
        with self._connection() as connection, suppress(apsw.Error):
            connection.set_busy_handler(None)
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


class _SqliteTx:
    """One transaction, begun by `with` and ended with it. One cursor serves all its statements, one at a time."""

    __slots__ = ("_connection", "_execute", "_store", "_writable", "dropped", "ended", "exit_held")

    _connection: PooledConnection

    def __init__(self, store: SqliteStore, *, writable: bool) -> None:
        self._store = store
        self._writable = writable
        self.ended = True
        self.exit_held: Holder | None = None
        self.dropped: list[Digest] = []

    def is_held(self) -> bool:
        """Whether its `with` statement still runs, as far as can be known: an interrupt may have ended it too early."""
        return self.exit_held is None or self.exit_held() is not None

    def __enter__(self) -> _SqliteTx:
        store = self._store
        if self._writable:
            store._check_not_writing()
        try:
            store._begin(self, writable=self._writable)
            self._execute = self._connection.cursor().execute
            self.ended = False
        finally:
            if self.ended:
                store._stop(self, writable=self._writable)
        return self

    @block_exit
    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.ended:
            raise fault("internal", "A transaction was ended twice.")
        self.ended = True
        self._store._end(self._connection, writable=self._writable, failed=kind is not None)
        if self.dropped and kind is None:
            delete_dropped_bodies(self._store, self.dropped)

    def get(self, table: Table[R], *key: Value) -> R | None:
        rows = self._run(get_sql(table), key)
        return table.row(*rows[0]) if rows else None

    def has(self, table: Table[R], *key: Value) -> bool:
        return bool(self._run(has_sql(table), key))

    def put(self, table: Table[R], row: R) -> None:
        self._change(put_sql(table), table.values_of(row))

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        self._change(update_sql(table, tuple(columns)), (*columns.values(), *key))
        return self._connection.changes() > 0

    def delete(self, table: Table[R], *key: Value) -> bool:
        self._change(delete_sql(table), key)
        return self._connection.changes() > 0

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

    def drop_body(self, digest: Digest) -> None:
        self.dropped.append(digest)

    def _run(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        if self.ended:
            raise fault("internal", "A transaction was used after its end.")
        try:
            return self._execute(sql, values).fetchall()
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Reading the store") from error
        except UnicodeDecodeError as error:
            raise fault("store_corrupt", f"Reading the store: a text in it is not UTF-8. ({error})") from error

    def _change(self, sql: str, values: tuple[Value, ...]) -> None:
        if self.ended or not self._writable:
            raise fault("internal", "A transaction was used after its end, or to write while reading.")
        try:
            self._execute(sql, values)
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Writing the store") from error
        except (OverflowError, UnicodeEncodeError, TypeError) as error:
            raise fault("internal", f"Writing the store: a value that no column can hold. ({error})") from error


def _commit(connection: apsw.Connection) -> None:
    try:
        connection.execute("COMMIT")
    except apsw.Error as error:
        _roll_back(connection)
        raise fault_of_sqlite(error, "Committing to the store") from error


def _roll_back(connection: apsw.Connection) -> None:
    with suppress(apsw.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _nothing() -> None:
    return None


__all__ = ["SqliteStore", "Waiting"]
