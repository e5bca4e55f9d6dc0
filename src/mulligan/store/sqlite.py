"""The SQLite engine: one file, many threads, many processes.

The store uses SQLite's write-ahead log, so readers never wait; `BEGIN IMMEDIATE`, so writers queue instead of failing
half-way; and in `process` mode no call checkpoints or syncs (`maintenance` does both in the background). SQL is made
from `Table` values: names come only from declarations in this code base, values are always bound.

`ConnectionPool` shares the connections of one store between the threads of a process. A forked child has only the
thread that forked, and a lock of SQLite that another thread held at that moment stays locked in the child for ever.
SQLite has such locks for its allocator, page cache, random numbers and list of file systems, and for each open file. It
also remembers file locks of the parent that the child does not have. So Mulligan does four things:

1. It turns off the lock of the allocator, because threads take it without a connection, too.
2. Before a fork it waits until no other thread has a connection, and closes all connections, so the child inherits
neither a held lock nor an open file.
3. It also waits for imports of other threads, because the child could not import the same modules.
4. The child opens its first connection in a separate thread. If a program that embeds Mulligan uses SQLite itself, one
of its threads may have held a lock. Then that first connection never opens, and the child gets `forked_unsafely`.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import partial
from glob import escape, glob
from itertools import chain, starmap
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet

import apsw

from mulligan.store.blob_files import DirectoryBodies, sync_path
from mulligan.store.blobs import delete_dropped_bodies
from mulligan.store.fork_locks import (
    ThreadMark,
    fork_safe_lock,
    forked_unsafely,
    here,
    importing_threads,
    is_any_running,
)
from mulligan.store.host import OwnerBytes, owner_bytes, record_process
from mulligan.store.journal import Schema
from mulligan.store.migrations import SCHEMA_VERSION, newer_store
from mulligan.store.originals import Originals, wait_until_empty
from mulligan.store.protocol import OWNERS, BlobStore, Durability, OwnerRow, Subjects, Table, Value
from mulligan.store.secret_key import SecretKey
from mulligan.store.sqlite_file import (
    BUSY_LIMIT_S,
    COPY_SUFFIX,
    BusyWait,
    PooledConnection,
    check_directory,
    connect,
    create_statements,
    delete_sql,
    fault_of_sqlite,
    get_sql,
    has_sql,
    log_bytes,
    misuse_error,
    prepare_file,
    put_sql,
    roll_back,
    select_sql,
    unread_commits,
    update_sql,
    write_fault,
)
from mulligan.values.clock import Clock, SystemClock, monotonic_s, timestamp
from mulligan.values.digest import Digest
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import OwnerId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.scoped_var import Holder, block_exit

_NONE: frozenset[str] = frozenset()


FORK_WAIT_S = BUSY_LIMIT_S
"""How long a fork waits for threads that use a connection."""

_POLL_S = 0.0002
_COLLECT_AFTER_S = 0.1
_CHECK_LIMIT_S = 10.0


class ConnectionPool:
    """Connections to one file. Each is used by one thread at a time and by no process but the one that opened it.

    `end_interrupted` ends transactions that an interrupt kept from ending; a statement or a fork that has to wait calls
    it.
    `after_fork` runs in a forked child, before anything else uses the pool there.
    """

    def __init__(
        self,
        path: str,
        *,
        durability: Durability,
        vfs: str | None,
        end_interrupted: Callable[[], None],
        after_fork: Callable[[], None],
    ) -> None:
        self._path, self._durability, self._vfs = path, durability, vfs
        self._idle: list[PooledConnection] = []
        # Weak: if an interrupt separates a connection from its transaction, garbage collection closes it.
        self._open: WeakSet[PooledConnection] = WeakSet()
        self.end_interrupted, self.after_fork = end_interrupted, after_fork
        with _process.changing:
            _process.pools.add(self)

    def take(self) -> PooledConnection:
        """A connection for this thread. Raises the faults of opening a store."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._opened()
            connection.user = here.mark
            # Read after `user` is set, because a forking thread sets `forker` first and reads the users then.
            if not _process.forker or _process.may_continue(connection):
                return connection
            connection.user = None
            self._idle.append(connection)
            with _process.forking:
                pass

    def give_back(self, connection: PooledConnection) -> None:
        try:
            if not connection.in_transaction:
                connection.user = None
                self._idle.append(connection)
                return
        except apsw.ConnectionClosedError:
            # Another thread closed it, because this thread seemed to have ended.
            return
        self.discard(connection)

    def discard_interrupted_writers(self, current: PooledConnection | None) -> None:
        """Close connections of this thread and of ended threads, other than `current`, that still write though
        interrupts ended their transactions.
        """
        users = [one for one in self._open if one.user is not None and (one.user is here.mark or one.user() is None)]
        for connection in users:
            if connection is not current and connection.txn_state("main") == apsw.SQLITE_TXN_WRITE:
                self.discard(connection)

    def has_idle(self) -> bool:
        return bool(self._idle)

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self.discard(self._idle.pop())

    def _opened(self) -> PooledConnection:
        try:
            with _process.changing:
                if _process.must_check:
                    _process.check(lambda: self._connect().pragma("user_version"))
                connection = self._connect()
                self._open.add(connection)
                return connection
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Opening the store") from error

    def _connect(self) -> PooledConnection:
        return connect(self._path, durability=self._durability, vfs=self._vfs, wait=BusyWait(self.end_interrupted))

    def discard(self, connection: PooledConnection) -> None:
        """Close a connection and roll back its transaction."""
        with _process.changing:
            self._drop(connection)

    def _drop(self, connection: PooledConnection) -> None:
        self._open.discard(connection)
        connection.close(True)

    def drained(self, forker: ThreadMark) -> bool:
        """Close unused connections; answer whether only `forker` uses any. The caller holds `changing`."""
        with suppress(IndexError):
            while True:
                self._drop(self._idle.pop())
        for connection in list(self._open):
            # Its thread was interrupted and has ended; a traceback may still refer to the connection.
            if connection.user is not None and connection.user() is None:
                self._drop(connection)
        return all(connection.user is forker for connection in self._open)

    def discard_lost(self) -> None:
        """Close what an interrupt took from a thread while it took or returned it: without a user, and not idle."""
        lost = [one for one in self._open if one.user is None and one not in self._idle]
        if lost and not is_any_running(_HANDLING):
            for connection in lost:
                if connection.user is None and connection not in self._idle:
                    self.discard(connection)

    def users(self) -> Iterable[tuple[PooledConnection, ThreadMark | None]]:
        return [(connection, connection.user) for connection in self._open]

    def abandon(self) -> None:
        """In a forked child: never use or close the parent's connections. Closing could roll back its transaction."""
        left = [*self._idle, *self._open]
        self._idle, self._open = [], WeakSet()
        if left:
            import ctypes  # Hardly ever needed: after a fork inside a transaction, or one that skipped Python's hooks.

            for connection in left:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        self.after_fork()


_HANDLING = frozenset(one.__code__ for one in (ConnectionPool.take, ConnectionPool.give_back))


class _Process:
    """The state that the pools of this process share. One thread at a time forks."""

    def __init__(self) -> None:
        self.pools: WeakSet[ConnectionPool] = WeakSet()
        self.forker: ThreadMark | None = None
        """The thread that is about to fork."""
        self.must_check = False
        self.is_unsafe = False
        self._new_locks()

    def _new_locks(self) -> None:
        self.forking = threading.RLock()
        """Held from before a fork until after it; threads that need a connection meanwhile wait for it."""
        self.changing = threading.RLock()
        """Held to open or close a connection, and during the fork itself. It is always acquired last."""

    def may_continue(self, connection: PooledConnection) -> bool:
        """Whether this thread may use a connection during a fork.

        It may if it forks itself, or if the forking thread waits for it anyway: it has another connection, or imports.
        """
        with self.changing:
            others = [other for pool in self.pools for other, user in pool.users() if user is here.mark]
        is_importing = threading.get_ident() in importing_threads()
        return self.forker in (None, here.mark) or others != [connection] or is_importing

    def before_fork(self) -> None:
        self.forking.acquire()
        self.forker, importer = here.mark, threading.get_ident()
        began_s = monotonic_s()
        deadline_s, collect_s = began_s + FORK_WAIT_S, began_s + _COLLECT_AFTER_S
        while True:
            if monotonic_s() > collect_s:
                # An interrupt may have left a connection to the garbage collector, which closes it.
                collect_s = deadline_s
                for pool in list(self.pools):
                    pool.end_interrupted()
                gc.collect()
                for pool in list(self.pools):
                    pool.discard_lost()
            self.changing.acquire()
            drained = [pool.drained(self.forker) for pool in self.pools]
            if (all(drained) and importing_threads() <= {importer}) or monotonic_s() > deadline_s:
                return
            self.changing.release()
            time.sleep(_POLL_S)

    def after_fork_in_parent(self) -> None:
        # Python forks even if an interrupt ended `before_fork` early. Then releasing a lock that we do not hold raises.
        if self.forker is here.mark:
            self.forker = None
        for lock in (self.changing, self.forking):
            with suppress(RuntimeError):
                lock.release()

    def after_fork_in_child(self) -> None:
        others = [user for pool in self.pools for _, user in pool.users() if user not in (None, here.mark)]
        self.is_unsafe = self.is_unsafe or bool(others)
        self.must_check, self.forker = True, None
        self._new_locks()
        for pool in list(self.pools):
            pool.abandon()

    def check(self, use: Callable[[], object]) -> None:
        """Raise if SQLite does not work in this forked child. A thread tries it, because `use` may never return."""
        if not self.is_unsafe:
            trial = threading.Thread(target=_use_for_trial, args=(use,), name="mulligan-fork-check", daemon=True)
            trial.start()
            trial.join(_CHECK_LIMIT_S)
            self.is_unsafe = trial.is_alive()
        if self.is_unsafe:
            raise forked_unsafely()
        self.must_check = False


def _use_for_trial(use: Callable[[], object]) -> None:
    # The caller does the same next, and reports an error.
    with suppress(apsw.Error):
        use()


_process = _Process()
os.register_at_fork(
    before=_process.before_fork,
    after_in_parent=_process.after_fork_in_parent,
    after_in_child=_process.after_fork_in_child,
)


R = TypeVar("R")

DATABASE, OWNER_FILE, BODY_DIRECTORY, ORIGINALS_DIRECTORY = "store.db", "owners.lock", "blobs", "originals"
_LONG_LOG_BYTES = 8 * MIB_BYTES
_WRITER_CHECK_S = 1.0
"""After this wait a writer checks whether an interrupt kept the thread that holds the lock from releasing it."""

_interrupt_lock = fork_safe_lock()


class SqliteStore:
    """A store in its own directory. With `create=False`, a missing store raises instead of being created."""

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
        self.environment = {"MULLIGAN_HOME": self.directory}
        check_directory(self.directory, DATABASE, create=create)
        self.durability: Durability = durability
        self.secret_key = SecretKey(self.directory)
        originals = Originals(os.path.join(self.directory, ORIGINALS_DIRECTORY))
        self.originals: Originals | None = originals if durability == "process" else None
        self.bodies: BlobStore = bodies or DirectoryBodies(os.path.join(self.directory, BODY_DIRECTORY))
        self._clock = clock or SystemClock()
        self._path = os.path.join(self.directory, DATABASE)
        self._write_lock = threading.RLock()
        self._checkpoint_lock = threading.RLock()
        self._writer: ThreadMark | None = None
        self._transaction: _SqliteTx | None = None
        self._owner: tuple[int, OwnerId] | None = None
        self._closing: list[Callable[[], None]] = []
        self.after_write: Callable[[], None] = lambda: None
        self.write_noticed_in = 0
        """The id of the process whose `after_write` was already called since the last sync, else 0."""
        self._pool = ConnectionPool(
            self._path,
            durability=durability,
            vfs=vfs,
            end_interrupted=self._end_interrupted_transaction,
            after_fork=self._reset_after_fork,
        )
        with self._connection() as connection:
            prepare_file(connection, partial(create_statements, schema.tables), directory=self.directory)

    def write(self, *, about: Subjects | None = None) -> _SqliteWrite:
        # SQLite has one queue for all writers, so the subjects decide nothing here.
        return _SqliteWrite(self, about, _is_checked=True)

    def read(self) -> _SqliteTx:
        return _SqliteTx(self)

    def rows(self, *wanted: tuple[Any, ...]) -> list[Any]:
        connection = self._pool.take()
        try:
            found = list(map(connection.rows.__getitem__, wanted))
            # SQLite notices commits of other connections only when it runs a statement.
            connection.execute("PRAGMA data_version").fetchall()
            if connection.data_version() == connection.checked_data:
                return found
        except (KeyError, apsw.Error):
            pass  # The transaction below reads the rows, or raises the fault.
        finally:
            self._pool.give_back(connection)
        with self.read() as tx:
            return [tx.get(*one) for one in wanted]

    def _begin(self, tx: _SqliteTx, *, writable: bool) -> None:
        """Begin a transaction. If this raises, even by an interrupt, the caller must call `_stop`."""
        if writable:
            while not self._write_lock.acquire(timeout=_WRITER_CHECK_S):
                self._end_interrupted_transaction()
        connection = tx._connection = self._pool.take()
        tx._execute = connection.cursor().execute
        try:
            tx._execute("BEGIN IMMEDIATE" if writable else "BEGIN")
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Writing the store" if writable else "Reading the store") from error
        if writable:
            if connection.data_version() != connection.checked_data:
                tx._check_data()
            # The transaction takes the cached rows and returns them with its commit. However else it ends, even by an
            # interrupt, the connection then caches no row that only this transaction wrote.
            tx._rows, connection.rows = connection.rows, {}
            self._writer, self._transaction = here.mark, tx

    def _stop(self, tx: _SqliteTx, *, writable: bool) -> None:
        """Release what `_begin` acquired. It works after any line of `_begin`: an interrupt can come anywhere."""
        connection = getattr(tx, "_connection", None)
        if connection is not None:
            self._pool.give_back(connection)
        if writable:
            if self._writer is here.mark:
                self._transaction, self._writer = None, None
            with suppress(RuntimeError):  # This thread does not hold it.
                self._write_lock.release()

    def _check_not_writing(self) -> None:
        if self._writer is not None and self._writer() is None:
            # The lock that the ended thread holds would admit a new thread with the same ident.
            self._end_interrupted_transaction()
        if self._writer is not here.mark or self._transaction is None:
            return
        if self._transaction.is_held():
            raise fault("nested_transaction", "A write transaction is already open on this thread.")
        # An interrupt stopped the last transaction of this thread while it ended, so this ends it.
        self._transaction.ended = True
        self._stop(self._transaction, writable=True)

    def _end_interrupted_transaction(self) -> None:
        """End write transactions that an interrupt kept their threads from ending. Waiting writers call this."""
        with _interrupt_lock:
            transaction, writer = self._transaction, self._writer
            if transaction is None or writer is None:
                self._pool.discard_interrupted_writers(None)
            elif transaction.is_held() and writer() is not None:
                self._pool.discard_interrupted_writers(transaction._connection)
            else:
                transaction.ended = True
                self._pool.discard(transaction._connection)
                self._write_lock, self._transaction, self._writer = threading.RLock(), None, None

    def _end(self, tx: _SqliteTx, *, writable: bool, failed: bool) -> None:
        connection = tx._connection
        try:
            if failed:
                roll_back(connection)
                if writable:
                    # A rollback changes the data version too, and the writer has checked the format already.
                    connection.checked_data = connection.data_version()
            else:
                try:
                    if tx._waiting:
                        tx._write_waiting()
                    tx._execute("COMMIT")
                except apsw.Error as error:
                    roll_back(connection)
                    raise fault_of_sqlite(error, "Committing to the store") from error
                if writable:
                    # The writer has checked the format, and no other commit came before its own data version.
                    connection.checked_data, connection.rows = connection.data_version(), tx._rows
        finally:
            # These lines come first and call nothing before the release, so an interrupt hardly ever comes in between.
            if writable:
                self._transaction, self._writer = None, None
                self._write_lock.release()
            self._pool.give_back(connection)
        if writable and not failed and self.write_noticed_in != os.getpid():
            self.after_write()

    @contextmanager
    def _connection(self) -> Iterator[apsw.Connection]:
        """A connection outside our transactions, for statements about the whole file."""
        connection = self._pool.take()
        try:
            yield connection
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Opening or maintaining the store") from error
        finally:
            self._pool.give_back(connection)

    def _reset_after_fork(self) -> None:
        """In a forked child. A transaction of the parent must not be committed here, so it counts as ended."""
        if self._transaction is not None:
            self._transaction.ended = True
        self._write_lock, self._checkpoint_lock = threading.RLock(), threading.RLock()
        self._transaction, self._writer = None, None

    def owner(self) -> OwnerId:
        if self._owner is None or self._owner[0] != os.getpid():
            self._owner = (os.getpid(), self._register())
        return self._owner[1]

    def _register(self) -> OwnerId:
        """Lock the byte before the row is visible, so that every process that sees the row finds its owner alive."""
        with self.write() as tx:
            newest = tx.select(OWNERS, descending=True, limit=1)
            number = newest[0].id + 1 if newest else 1
            self._owner_bytes().hold(number)
            tx.put(OWNERS, OwnerRow(number, os.uname().nodename, timestamp(self._clock)))
            record_process(tx, number, self.is_alive)
        return OwnerId(number)

    def is_alive(self, owner: OwnerId) -> bool | None:
        if not os.path.exists(self._owner_file()):
            return False
        return self._owner_bytes().is_held(owner)

    def _owner_bytes(self) -> OwnerBytes:
        try:
            return owner_bytes(self._owner_file())
        except OSError as error:
            words = f"The store in {self.directory} cannot be changed; choose another with MULLIGAN_HOME"
            raise fault_of_os_error(error, words) from error

    def _owner_file(self) -> str:
        return os.path.join(self.directory, OWNER_FILE)

    def on_close(self, act: Callable[[], None]) -> None:
        self._closing.append(act)

    def sync(self) -> None:
        """Bodies first, then the log that names them.

        SQLite may skip its sync of the log when a reader holds the checkpoint back, so this syncs the log itself.
        """
        self.bodies.sync()
        try:
            sync_path(self._path + "-wal")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise fault("sync_failed", f"Syncing the store: {error.strerror}", errno=error.errno) from error
        # BusyError: another process is doing a checkpoint at this moment.
        with self._checkpoint_lock, self._connection() as connection, suppress(apsw.BusyError):
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
        """The bytes of free pages in the file; `reclaim_space` returns them to the disk."""
        with self._connection() as connection:
            return int(connection.pragma("freelist_count")) * int(connection.pragma("page_size"))

    def reclaim_space(self, max_pages: int | None = None) -> None:
        """Remove free pages from the file, all or at most `max_pages`, because other writers wait meanwhile."""
        with self._write_lock, self._connection() as connection:
            connection.execute(f"PRAGMA incremental_vacuum({max_pages or 0})").fetchall()
            mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if max_pages is None else apsw.SQLITE_CHECKPOINT_PASSIVE
            # BusyError: another thread is doing a checkpoint at this moment.
            with suppress(apsw.BusyError):
                connection.wal_checkpoint(mode=mode)

    def older_copies(self) -> list[str]:
        return sorted(glob(escape(self._path) + COPY_SUFFIX + "*"))

    def erase_deleted(self) -> None:
        for copy in self.older_copies():
            with suppress(FileNotFoundError):
                os.unlink(copy)
        with self._write_lock, self._connection() as connection:
            # VACUUM writes every page again: a page that is in use may still hold bytes of a deleted row.
            try:
                connection.execute("VACUUM")
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except (apsw.BusyError, apsw.LockedError) as error:
                words = "Deleted data is still in the log, because another process is reading; try again"
                raise fault_of_sqlite(error, words) from error
        if self.originals is not None and (taken := self.originals.pending()):
            self.originals.sync(taken)
            self.sync()
            self.originals.drop(taken)
        wait_until_empty(os.path.join(self.directory, ORIGINALS_DIRECTORY))

    def check(self) -> list[str]:
        with self._connection() as connection:
            rows = connection.execute("PRAGMA integrity_check(20)").fetchall()
        complaints = [str(row[0]) for row in rows if row[0] != "ok"]
        lost = self._unread_commits()
        return [*complaints, lost] if lost else complaints

    def _unread_commits(self) -> str | None:
        """Look for commits in the log that SQLite does not read, while a write transaction keeps the log unchanged."""
        with self._connection() as reader, self._connection() as writer:
            try:
                writer.execute("BEGIN IMMEDIATE")
                frames, _ = reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
                return unread_commits(self._path + "-wal", max(frames, 0))
            except apsw.ReadOnlyError:
                return None  # On a read-only disk SQLite does not tell how far it reads.
            finally:
                roll_back(writer)

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()
        if self.originals is not None:
            self.originals.close()
        self._fold_long_log()
        self._pool.close()
        if self.durability == "power":
            # SQLite has deleted its log. On a file system without a journal, a power cut could bring the name back with
            # the inode of another file.
            with suppress(OSError):
                sync_path(self.directory)

    def _fold_long_log(self) -> None:
        """Checkpoint a long log, because the next process that opens the store would have to read all of it.

        This waits for no other process and ignores failures, because nothing is lost while the log stays.
        """
        if not self._pool.has_idle() or log_bytes(self._path + "-wal") < _LONG_LOG_BYTES:
            return
        with self._connection() as connection, suppress(apsw.Error):
            connection.set_busy_handler(None)
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


@fast_dataclass(slots=True, eq=False)
class _SqliteTx:
    """One transaction, which begins and ends with its `with` block. One cursor runs all its statements.

    A connection caches the rows it has read and written by their key, until SQLite reports a commit of another
    connection. This pays, because a call reads the same few rows again and again: its session, its root, the heads of
    its journals. A read transaction learns with its first statement whether the cache is valid, a write transaction
    when it begins.
    """

    _store: SqliteStore
    about: Subjects | None = None
    _is_checked: bool = False
    _rows: dict[tuple[object, ...], Any] = field(default_factory=dict)
    ended: bool = True
    exit_held: Holder | None = None
    dropped: list[Digest] = field(default_factory=list)
    _waiting: dict[Table[Any], dict[tuple[Value, ...], tuple[Value, ...]]] = field(default_factory=dict)
    """Rows that were put and are not in the database yet, by table and key; only a writer has any."""
    _connection: PooledConnection = field(init=False)
    _execute: Callable[..., apsw.Cursor] = field(init=False)
    _writable: ClassVar[bool] = False
    is_alone: ClassVar[bool] = False

    def is_held(self) -> bool:
        """Whether its `with` statement still runs. An interrupt may have ended it early without calling `__exit__`."""
        return self.exit_held is None or self.exit_held() is not None

    def _write_waiting(self) -> None:
        raise misuse_error()

    def __enter__(self) -> Self:
        store = self._store
        if self._writable and store._transaction is not None:
            store._check_not_writing()
        try:
            store._begin(self, writable=self._writable)
            self.ended = False
        finally:
            if self.ended:
                store._stop(self, writable=self._writable)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.ended:
            raise fault("internal", "A transaction was ended twice.")
        self.ended = True
        self._store._end(self, writable=self._writable, failed=kind is not None)

    def get(self, table: Table[R], *key: Value) -> R | None:
        name = (table, *key)
        if name in self._rows and not self.ended:
            known: R | None = self._rows[name]
            return known
        # The same as `_run`. Most statements of Mulligan are `get`, so another function call here would cost much.
        if self.ended:
            raise misuse_error()
        if table in self._waiting and key in self._waiting[table]:
            return table.row(*self._waiting[table][key])
        try:
            found = self._execute(get_sql(table), key).fetchall()
            if not self._is_checked:
                self._check_read()
        except (apsw.Error, UnicodeDecodeError) as error:
            raise self._read_fault(error) from error
        row = table.row(*found[0]) if found else None
        if not table.large:
            self._rows[name] = row
        return row

    def has(self, table: Table[R], *key: Value) -> bool:
        if self.ended:
            raise misuse_error()
        name = (table, *key)
        if name in self._rows:
            return self._rows[name] is not None
        return key in self._waiting.get(table, ()) or bool(self._run(has_sql(table), key))

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
        where = where or {}
        nulls, values = _NONE, tuple(where.values())
        if None in values:
            nulls = frozenset([name for name, value in where.items() if value is None])
            values = tuple([value for value in values if value is not None])
        if between is not None:
            values += between[1:]
        if self.ended:
            raise misuse_error()
        if table in self._waiting:
            self._write_waiting()
        known = None
        if table.sparse and between is None and self._is_checked:
            known = self._rows.setdefault((table, _EMPTY), set())
            if (*where.items(),) in known:
                return []
        ranged = None if between is None else between[0]
        sql = select_sql(table, tuple(where), nulls, ranged=ranged, order=order or table.key, descending=descending)
        try:
            found = self._execute(sql, (*values, -1 if limit is None else limit)).fetchall()
            if not self._is_checked:
                self._check_read()
        except (apsw.Error, UnicodeDecodeError) as error:
            raise self._read_fault(error) from error
        if known is not None and not found:
            known.add((*where.items(),))
        return list(starmap(table.row, found))

    def count(self, table: Table[R], where: Mapping[str, Value] | None = None) -> int:
        if table in self._waiting and not self.ended:
            self._write_waiting()
        terms = " AND ".join(f'"{name}" IS ?' for name in where or ()) or "1"
        return int(self._run(f'SELECT count(*) FROM "{table.name}" WHERE {terms}', tuple((where or {}).values()))[0][0])

    def next_ordinal(self) -> int:
        raise misuse_error()

    def put(self, table: Table[R], row: R) -> None:
        raise misuse_error()

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        raise misuse_error()

    def delete(self, table: Table[R], *key: Value) -> bool:
        raise misuse_error()

    def drop_body(self, digest: Digest) -> None:
        self.dropped.append(digest)

    def _run(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        if self.ended:
            raise misuse_error()
        try:
            found = self._execute(sql, values).fetchall()
            if not self._is_checked:
                self._check_read()
            return found
        except (apsw.Error, UnicodeDecodeError) as error:
            raise self._read_fault(error) from error

    def _check_read(self) -> None:
        """Check the cache after the first statement: SQLite fixes the state that a transaction reads only then."""
        if self._connection.data_version() != self._connection.checked_data:
            self._check_data()
        self._is_checked, self._rows = True, self._connection.rows

    def _check_data(self) -> None:
        """Drop the cache and check the format, because another connection has committed.

        Raises `store_newer` if a newer version has migrated the store since this process opened it.
        """
        connection = self._connection
        connection.rows = {}
        try:
            data, found = connection.data_version(), int(connection.pragma("user_version") or 0)
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Reading the store") from error
        if found > SCHEMA_VERSION:
            raise newer_store(connection, found)
        connection.checked_data = data

    def _read_fault(self, error: apsw.Error | UnicodeDecodeError) -> MulliganError:
        if isinstance(error, UnicodeDecodeError):
            return fault("store_corrupt", f"Reading the store: a text in it is not UTF-8. ({error})")
        if not self._is_checked:
            self._check_data()
        return fault_of_sqlite(error, "Reading the store")


@fast_dataclass(slots=True, eq=False)
class _SqliteWrite(_SqliteTx):
    """A transaction that may write. `block_exit` shows waiting writers whether an interrupt ended its block early."""

    _writable: ClassVar[bool] = True
    is_alone: ClassVar[bool] = True

    @block_exit
    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.ended:
            raise fault("internal", "A transaction was ended twice.")
        self.ended = True
        self._store._end(self, writable=True, failed=kind is not None)
        if self.dropped and kind is None:
            delete_dropped_bodies(self._store, self.dropped)

    def next_ordinal(self) -> int:
        if self.ended:
            raise misuse_error()
        # Among the cached rows, because it stays right for as long as they do.
        newest = self._rows.get(_NEWEST)
        if newest is None:
            self._write_waiting()
            newest = self._run('SELECT max("ordinal") FROM "heads"', ())[0][0] or 0
        self._rows[_NEWEST] = newest = newest + 1
        return int(newest)

    def put(self, table: Table[R], row: R) -> None:
        if self.ended:
            raise misuse_error()
        values = table.values_of(row)
        key = table.key_in(values)
        # Written before the commit, or before a read needs it, in one statement with the other rows of its table.
        waiting = self._waiting.setdefault(table, {})
        waiting[key] = values
        if len(waiting) == _WAITING_MAX:
            self._write_waiting()
        if not table.large:
            if len(self._rows) > _ROWS_MAX:
                self._rows.clear()
            self._rows[table, *key] = row
            if table.sparse:
                self._note_present(table, row)

    def _note_present(self, table: Table[R], row: R) -> None:
        """Forget the selections that were empty and would have this row."""
        known = self._rows.get((table, _EMPTY), ())
        for where in tuple(known):
            for column, value in where:
                if getattr(row, column) != value:
                    break
            else:
                known.discard(where)

    def _write_waiting(self) -> None:
        try:
            for table, rows in self._waiting.items():
                self._execute(put_sql(table, len(rows)), [*chain.from_iterable(rows.values())])
        except _WRITE_ERRORS as error:
            raise write_fault(error) from error
        self._waiting.clear()

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        if self.ended:
            raise misuse_error()
        self._rows.pop((table, *key), None)
        self._rows.pop((table, _EMPTY), None)
        if table in self._waiting:
            self._write_waiting()
        try:
            self._execute(update_sql(table, tuple(columns)), (*columns.values(), *key))
        except _WRITE_ERRORS as error:
            raise write_fault(error) from error
        return self._connection.changes() > 0

    def delete(self, table: Table[R], *key: Value) -> bool:
        if self.ended:
            raise misuse_error()
        if not table.large:
            self._rows[table, *key] = None
        if table in self._waiting:
            self._write_waiting()
        try:
            self._execute(delete_sql(table), key)
        except _WRITE_ERRORS as error:
            raise write_fault(error) from error
        return self._connection.changes() > 0


_EMPTY = object()
_WAITING_MAX = 64
_NEWEST = ("the newest ordinal",)
_ROWS_MAX = 4_096
_WRITE_ERRORS = (apsw.Error, OverflowError, UnicodeEncodeError, TypeError)


__all__ = ["BusyWait", "SqliteStore"]
