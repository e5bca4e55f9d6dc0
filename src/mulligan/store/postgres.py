"""The PostgreSQL engine: many hosts and processes, one store.

A write transaction takes an advisory lock for its length, so writers come one after the other; readers read a snapshot
and never wait. Nothing is kept in a session of the server, so a pooler in transaction mode may be in between.

Rows that a transaction puts wait in this process until it reads, ends, or holds many: then they go over the wire
together, in one round trip. A get of a row that the transaction has read or written needs none.

COMMIT has three outcomes here: done, not done, and a connection that broke before the answer. For the third, the engine
knows the transaction's id and asks the server on another connection (`_settle`). Until the server has answered,
this process begins no transaction, because its reads could show a state from before the commit.

What only this host needs (locks of living processes, the secret key, spools) is in a local directory, one for each
store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar
from weakref import ref

import psycopg

from mulligan.store.blobs import BESIDE, delete_dropped_bodies
from mulligan.store.fork_locks import shared_lock
from mulligan.store.host import OwnerBytes, owner_bytes, record_process
from mulligan.store.journal import HEADS, Schema
from mulligan.store.migrations import SCHEMA_VERSION
from mulligan.store.originals import Originals, wait_until_empty
from mulligan.store.postgres_server import (
    BODIES_TABLE,
    INDEXED_BYTES,
    LOCK_LIMIT_S,
    RELATIONS,
    ServerLink,
    ServerLinks,
    Statement,
    fault_of_postgres,
    indexed_form,
    indexed_texts,
    is_long,
    life_sql,
    lock_key,
    new_life,
    newer_store,
    parse_postgres_url,
    prepare_schema,
    quoted,
    range_end,
    read_about,
    stored,
)
from mulligan.store.protocol import (
    OWNERS,
    BlobStore,
    Durability,
    OwnerRow,
    Subjects,
    Table,
    Value,
    check_columns,
    check_row,
    check_update,
)
from mulligan.store.secret_key import SecretKey
from mulligan.store.sqlite_file import check_local_directory, private_folder
from mulligan.values.clock import Clock, SystemClock, monotonic_s, timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.ids import OwnerId, SystemIds
from mulligan.values.scoped_var import Holder, block_exit, holder_of

R = TypeVar("R")

OUTCOME_LIMIT_S = 30.0
"""How long a commit with an unknown outcome waits for the server's answer."""

_OUTCOME_NAP_S = 0.05
_BEGIN_TRIES = 3
_PENDING_MAX = 500
_PENDING_BYTES = 8 * 1024 * 1024
POSTGRES_DIRECTORY = "postgres"
"""The folder of the state directory that has a folder for each store on PostgreSQL."""

_ORIGINALS_DIRECTORY, _OWNER_FILE = "originals", "owners.lock"


@dataclass(frozen=True, eq=False)
class _Doubt:
    """A write transaction, for the case that its COMMIT gets no answer: its id, and the server's life that it is of."""

    transaction: str
    life: str


class PostgresStore:
    """A store in one schema of a database. `local` is the directory of this host's state, below which the store has
    one of its own."""

    def __init__(
        self,
        url: str,
        schema: Schema,
        *,
        local: str,
        durability: Durability = "process",
        bodies: Callable[[str], BlobStore] | None = None,
        clock: Clock | None = None,
        create: bool = True,
    ) -> None:
        self.url = parse_postgres_url(url)
        self.durability: Durability = durability
        self._clock = clock or SystemClock()
        self._links = ServerLinks(self.url)
        self._closing: list[Callable[[], None]] = []
        self._doubts: list[_Doubt] = []
        self._settling = shared_lock()
        self._here = threading.local()
        self._owner: tuple[int, OwnerId] | None = None
        self._locks_of: dict[int, str] = {}
        self._tables = schema.tables
        self.after_write: Callable[[], None] = lambda: None
        self.write_noticed_in = 0
        """The id of the process whose `after_write` was already called since the last sync, else 0."""
        with ExitStack() as failing:
            failing.callback(self._links.close)
            self.id = self._prepare(create=create)
            self._lock = lock_key("store", self.id)
            self.directory: str = _private_directory(os.path.join(os.path.abspath(local), POSTGRES_DIRECTORY, self.id))
            self.environment = {"MULLIGAN_HOME": os.path.abspath(local), "MULLIGAN_STORE": self.url.public}
            self._locks = _locks_id(self.directory)
            self.secret_key = SecretKey(self.directory)
            originals = Originals(os.path.join(self.directory, _ORIGINALS_DIRECTORY))
            self.originals: Originals | None = originals if durability == "process" else None
            self.bodies: BlobStore = bodies(self.id) if bodies is not None else PostgresBodies(self)
            failing.pop_all()

    def _prepare(self, *, create: bool) -> str:
        """Create or migrate the store, if that is needed. Answers its id."""
        link = self._links.take()
        try:
            return prepare_schema(link, self.url.schema, self._tables, create=create).store
        except psycopg.Error as error:
            raise fault_of_postgres(error, f"Opening the store {self.url.shown}") from error
        finally:
            self._links.give_back(link)

    def write(self, *, about: Subjects | None = None) -> _PostgresWrite:
        # One lock for all writers, so the subjects decide nothing here.
        return _PostgresWrite(self, about)

    def read(self) -> _PostgresTx:
        return _PostgresTx(self)

    def rows(self, *wanted: tuple[Any, ...]) -> list[Any]:
        statements = [_get(self.url.schema, table, key) for table, *key in wanted]
        found = self._run_alone("Reading the store", _BEGIN_READ, *statements, _COMMIT)[1:-1]
        return [_row(one[0], cursor.fetchall()) for one, cursor in zip(wanted, found, strict=True)]

    def run_statement(self, doing: str, sql: str, values: Sequence[Any] = ()) -> psycopg.RawCursor[tuple[Any, ...]]:
        """One statement that is its own transaction, and may be run again if the connection breaks."""
        return self._run_alone(doing, (sql, values))[0]

    def _run_alone(self, doing: str, *statements: Statement) -> list[psycopg.RawCursor[tuple[Any, ...]]]:
        link, done = self._begun(*statements, doing=doing)
        self._links.give_back(link)
        return done

    def _begun(self, *statements: Statement, doing: str) -> tuple[ServerLink, list[psycopg.RawCursor[tuple[Any, ...]]]]:
        """A connection on which the first statements of a transaction have run.

        If a connection broke, nothing of the transaction has happened yet, so another connection tries again: idle
        connections break when the server restarts.
        """
        self._settle_doubts()
        for attempt in range(_BEGIN_TRIES):
            link = self._links.take(fresh=attempt > 0)
            with ExitStack() as closing:
                closing.callback(link.raw.close)
                try:
                    done = link.run(*statements)
                    closing.pop_all()
                    return link, done
                except psycopg.Error as error:
                    if not _is_lost(error) or attempt == _BEGIN_TRIES - 1:
                        raise fault_of_postgres(error, doing) from error
        raise AssertionError("the last attempt returns or raises")

    # Commits without an answer.

    def _settle_doubts(self) -> None:
        if self._doubts:
            with self._settling:
                for doubt in list(self._doubts):
                    self._settle(doubt, limit_s=0.0)

    def _settle(self, doubt: _Doubt, *, limit_s: float = OUTCOME_LIMIT_S) -> bool | None:
        """Whether the transaction was committed; None if this server cannot know, so that only the rows can tell.

        Raises `in_doubt` if the server does not answer in time; the doubt then stays, and the next transaction asks
        again.
        """
        deadline = monotonic_s() + limit_s
        if doubt not in self._doubts:
            self._doubts.append(doubt)
        while True:
            with suppress(MulliganError, psycopg.Error):
                status = self._status_of(doubt)
                if status != "in progress":
                    self._doubts.remove(doubt)
                    return None if status is None else status == "committed"
            if monotonic_s() >= deadline:
                words = "The connection broke during a commit, and the server does not say yet whether it is done"
                raise fault("in_doubt", f"{words}; nothing else happens until it does. Try again.", retry=True)
            time.sleep(_OUTCOME_NAP_S)

    def _status_of(self, doubt: _Doubt) -> str | None:
        link = self._links.take(fresh=True)
        try:
            ((_, life),) = link.run((life_sql(self.url.schema), ()))[0].fetchall()
            if life != doubt.life:
                # The server crashed, or a standby took over: the id may belong to another transaction by now.
                return None
            status: str | None = link.run(("SELECT pg_xact_status($1::text::xid8)", (doubt.transaction,)))[
                0
            ].fetchall()[0][0]
            if status == "in progress":
                # Its connection is gone for us, but the server may wait for it a long time.
                link.run((_END_BACKEND, (doubt.transaction,)))
            return status
        finally:
            self._links.give_back(link)

    # This thread's write transaction.

    def begin_write(self, tx: _PostgresWrite, holder: Holder) -> tuple[ServerLink, _Doubt, int]:
        """A connection with a transaction that has the lock, what a doubt about its commit would need, and the newest
        ordinal.
        """
        open_one: tuple[int, _PostgresWrite, Holder] | None = getattr(self._here, "writer", None)
        if open_one is not None and open_one[0] == os.getpid():
            if open_one[2]() is not None and not open_one[1].ended:
                raise fault("nested_transaction", "A write transaction is already open on this thread.")
            open_one[1].drop()
        lock = (
            f"SELECT set_config('lock_timeout', '{LOCK_LIMIT_S}s', true), pg_advisory_xact_lock($1), "
            "pg_current_xact_id()::text"
        )
        newest = f'SELECT coalesce(max("ordinal"), 0) FROM {quoted(self.url.schema, HEADS)}'
        statements = (_BEGIN_WRITE, (lock, (self._lock,)), (life_sql(self.url.schema), ()), (newest, ()))
        link, done = self._begun(*statements, doing="Writing the store")
        ((found, life),) = done[2].fetchall()
        if found > SCHEMA_VERSION:
            link.raw.close()
            raise self._newer()
        self._here.writer = (os.getpid(), tx, holder)
        transaction = str(done[1].fetchall()[0][2])
        doubt = _Doubt(transaction, self._new_life() if life is None else life)
        return link, doubt, int(done[3].fetchall()[0][0])

    def _new_life(self) -> str:
        """Name the server's life after a crash, in a transaction of its own: the word must not depend on another."""
        self.run_statement("Writing the store", *new_life(self.url.schema, SystemIds().new()))
        found: str = self.run_statement("Reading the store", life_sql(self.url.schema)).fetchall()[0][1]
        return found

    def _newer(self) -> MulliganError:
        link = self._links.take()
        try:
            about = read_about(link, self.url.schema)
        finally:
            self._links.give_back(link)
        assert about is not None, "a store is never removed"
        return newer_store(about)

    def commit(self, link: ServerLink, doubt: _Doubt, statements: Iterable[Statement]) -> None:
        """Run the statements and COMMIT in one round trip. Raises if it was not committed, or if that is not known."""
        with ExitStack() as interrupted:
            # The server may be committing. The next reader must see how it ended.
            interrupted.callback(self._settle_quietly, doubt)
            interrupted.callback(link.raw.close)
            try:
                done = link.run(*statements, _COMMIT)
            except psycopg.Error as error:
                interrupted.pop_all()
                is_lost = link.raw.closed
                self._links.give_back(link)
                is_committed = self._settle(doubt) if is_lost else False
                if is_committed:
                    return
                if is_committed is None:
                    words = "The server crashed during a commit; look whether it was done before you try again"
                    raise fault("in_doubt", f"{words}.", retry=False) from error
                raise fault_of_postgres(error, "Committing to the store") from error
            interrupted.pop_all()
        self._links.give_back(link)
        if done[-1].statusmessage != "COMMIT":
            raise fault("internal", "The server rolled a transaction back instead of committing it.", retry=False)

    def _settle_quietly(self, doubt: _Doubt) -> None:
        with suppress(MulliganError):
            self._settle(doubt)

    def end_write(self) -> None:
        self._here.writer = None

    def notice_write(self) -> None:
        if self.write_noticed_in != os.getpid():
            self.after_write()

    # Owners.

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
            tx.put(OWNERS, OwnerRow(number, self._locks, timestamp(self._clock)))
            record_process(tx, number, self.is_alive)
        return OwnerId(number)

    def is_alive(self, owner: OwnerId) -> bool | None:
        locks = self._locks_of.get(owner)
        if locks is None:
            (row,) = self.rows((OWNERS, owner))
            if row is None:
                return False
            locks = self._locks_of[owner] = row.host
        return self._owner_bytes().is_held(owner) if locks == self._locks else None

    def _owner_bytes(self) -> OwnerBytes:
        try:
            return owner_bytes(os.path.join(self.directory, _OWNER_FILE))
        except OSError as error:
            raise fault_of_os_error(error, f"The directory {self.directory} cannot be changed") from error

    # Upkeep.

    def on_close(self, act: Callable[[], None]) -> None:
        self._closing.append(act)

    def sync(self) -> None:
        """Nothing to do for rows: the server syncs each commit, unless its operator chose otherwise."""
        self.bodies.sync()

    def size_bytes(self) -> int:
        tables = f"SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 {RELATIONS} AND relkind = 'r'"
        total = int(self.run_statement("Measuring the store", tables, (self.url.schema,)).fetchall()[0][0])
        if isinstance(self.bodies, PostgresBodies):
            return total
        beside = f'SELECT coalesce(sum("stored"), 0)::int8 FROM "{self.url.schema}"."blobs" WHERE "place" = $1'
        return total + int(self.run_statement("Measuring the store", beside, (BESIDE.encode(),)).fetchall()[0][0])

    def free_bytes(self) -> int:
        """The server returns free space by itself (autovacuum)."""
        return 0

    def reclaim_space(self, max_pages: int | None = None) -> None:
        """Let the server reuse the space of deleted rows now, instead of at its next autovacuum."""
        self._vacuum("VACUUM")

    def older_copies(self) -> list[str]:
        return []

    def erase_deleted(self) -> None:
        """Write each table again, without deleted rows. The server's log and its backups are its operator's."""
        self._vacuum("VACUUM (FULL)")
        if self.originals is not None and (taken := self.originals.pending()):
            self.originals.sync(taken)
            self.originals.drop(taken)
        wait_until_empty(os.path.join(self.directory, _ORIGINALS_DIRECTORY))

    def _vacuum(self, verb: str) -> None:
        for table in self._tables:
            self.run_statement("Maintaining the store", f"{verb} {quoted(self.url.schema, table)}")

    def check(self) -> list[str]:
        """Tables and indexes that are missing or that the server has marked invalid."""
        asked = (
            "SELECT relname, coalesce((SELECT indisvalid FROM pg_index i WHERE i.indexrelid = c.oid), true) "
            + RELATIONS
        )
        found = {row[0]: row[1] for row in self.run_statement("Checking the store", asked, (self.url.schema,))}
        wanted = [
            name
            for table in self._tables
            for name in (table.name, *(f"{table.name}_by_{'_'.join(index)}" for index in table.indexes))
        ]
        return [
            f"{name} is {'not valid' if name in found else 'missing'}" for name in wanted if not found.get(name, False)
        ]

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()
        if self.originals is not None:
            self.originals.close()
        self._links.close()


@dataclass(slots=True, eq=False)
class _PostgresTx:
    """A read transaction. It begins on the server with its first statement, in the same round trip."""

    _store: PostgresStore
    about: Subjects | None = None
    _link: ServerLink | None = None
    _rows: dict[tuple[object, ...], Any] = field(default_factory=dict)
    ended: bool = False
    exit_held: Holder | None = None
    is_alone: ClassVar[bool] = False
    _doing: ClassVar[str] = "Reading the store"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.ended:
            raise fault("internal", "A transaction was ended twice.")
        self.drop()

    def drop(self) -> None:
        """End without publishing anything."""
        self.ended = True
        link, self._link = self._link, None
        if link is None:
            return
        with ExitStack() as closing:
            closing.callback(link.raw.close)
            with suppress(psycopg.Error):
                link.run(("ROLLBACK", ()))
                closing.pop_all()
                self._store._links.give_back(link)

    def get(self, table: Table[R], *key: Value) -> R | None:
        name = (table, *key)
        if name not in self._rows or self.ended:
            self._rows[name] = _row(table, self._run(_get(self._schema, table, key)).fetchall())
        found: R | None = self._rows[name]
        return found

    def has(self, table: Table[R], *key: Value) -> bool:
        return self.get(table, *key) is not None

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
        check_columns(table, (*where, *(between or ())[:1], *(order or ())))
        # A column with one value orders nothing; without it, the server finds the index that has the order.
        ordered = tuple(name for name in dict.fromkeys((*(order or ()), *table.key)) if name not in where)
        sql, values = _select(self._schema, table, where, between=between, order=ordered, descending=descending)
        found = self._run((sql, (*values, limit))).fetchall()
        if any(row[-1] is not None for row in found) and _is_order_unsure(table, ordered, found):
            sql, values = _select(
                self._schema, table, where, between=between, order=ordered, descending=descending, whole=True
            )
            found = self._run((sql, (*values, limit))).fetchall()
        return [_decoded(table, row) for row in found]

    def count(self, table: Table[R], where: Mapping[str, Value] | None = None) -> int:
        check_columns(table, tuple(where or ()))
        terms, values = _conditions(table, where or {})
        sql = f"SELECT count(*) FROM {quoted(self._schema, table)}{_where(terms)}"
        return int(self._run((sql, values)).fetchall()[0][0])

    def next_ordinal(self) -> int:
        raise _misuse()

    def put(self, table: Table[R], row: R) -> None:
        raise _misuse()

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        raise _misuse()

    def delete(self, table: Table[R], *key: Value) -> bool:
        raise _misuse()

    def drop_body(self, digest: Digest) -> None:
        raise _misuse()

    @property
    def _schema(self) -> str:
        return self._store.url.schema

    def _run(self, statement: Statement) -> psycopg.RawCursor[tuple[Any, ...]]:
        if self.ended:
            raise _misuse()
        if self._link is None:
            self._link, done = self._store._begun(_BEGIN_READ, statement, doing=self._doing)
            return done[-1]
        return self._run_on(self._link, statement)

    def _run_on(self, link: ServerLink, *statements: Statement) -> psycopg.RawCursor[tuple[Any, ...]]:
        try:
            return link.run(*statements)[-1]
        except psycopg.Error as error:
            raise fault_of_postgres(error, self._doing) from error


@dataclass(slots=True, eq=False)
class _PostgresWrite(_PostgresTx):
    """A transaction that may write. `_pending` are statements that the server has not got yet."""

    dropped: list[Digest] = field(default_factory=list)
    _doubt: _Doubt | None = None
    _pending: list[Statement] = field(default_factory=list)
    _pending_bytes: int = 0
    _failed: MulliganError | None = None
    _ordinal: int = 0
    is_alone: ClassVar[bool] = True
    _doing: ClassVar[str] = "Writing the store"

    def __enter__(self) -> Self:
        self._link, self._doubt, self._ordinal = self._store.begin_write(self, holder_of(self) or ref(self))
        return self

    @block_exit
    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.ended:
            raise fault("internal", "A transaction was ended twice.")
        if kind is not None or self._failed is not None:
            self.drop()
            self._store.end_write()
            if kind is None and self._failed is not None:
                raise self._failed
            return
        link, self._link, self.ended = self._link, None, True
        assert link is not None and self._doubt is not None, "a write transaction begins with its block"
        try:
            self._store.commit(link, self._doubt, self._pending)
        finally:
            self._store.end_write()
        self._store.notice_write()
        if self.dropped:
            delete_dropped_bodies(self._store, self.dropped)

    def next_ordinal(self) -> int:
        self._check_writable()
        self._ordinal += 1
        return self._ordinal

    def put(self, table: Table[R], row: R) -> None:
        self._check_writable()
        check_row(table, row)
        self._rows[table, *table.key_of(row)] = row
        self._add((_put_sql(self._schema, table), _encoded(table, row)))

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        self._check_writable()
        check_update(table, columns)
        known = self.get(table, *key)
        if known is None:
            return False
        row = _replaced(known, columns)
        check_row(table, row)
        self._rows[table, *key] = row
        if any(name in indexed_texts(table) for name in columns):
            self._add((_put_sql(self._schema, table), _encoded(table, row)))
        else:
            sql = _update_sql(self._schema, table, tuple(columns))
            self._add((sql, (*_stored_key(table, key), *map(stored, columns.values()))))
        return True

    def delete(self, table: Table[R], *key: Value) -> bool:
        self._check_writable()
        if self.get(table, *key) is None:
            return False
        self._rows[table, *key] = None
        self._add((_delete_sql(self._schema, table), _stored_key(table, key)))
        return True

    def drop_body(self, digest: Digest) -> None:
        self._check_writable()
        self.dropped.append(digest)

    def _check_writable(self) -> None:
        if self.ended:
            raise _misuse()

    def _add(self, statement: Statement) -> None:
        self._pending.append(statement)
        self._pending_bytes += sum(len(value) for value in statement[1] if isinstance(value, bytes))
        if len(self._pending) >= _PENDING_MAX or self._pending_bytes >= _PENDING_BYTES:
            assert self._link is not None
            self._flush(self._link)

    def _run(self, statement: Statement) -> psycopg.RawCursor[tuple[Any, ...]]:
        if self.ended or self._link is None:
            raise _misuse()
        return self._flush(self._link, statement)

    def _flush(self, link: ServerLink, *last: Statement) -> psycopg.RawCursor[tuple[Any, ...]]:
        if self._failed is not None:
            # The server refuses every statement after a failed one.
            raise self._failed
        statements, self._pending, self._pending_bytes = [*self._pending, *last], [], 0
        try:
            return self._run_on(link, *statements)
        except MulliganError as error:
            self._failed = error
            raise


# Statements. Names come only from declarations in this code base; values are always bound.

_BEGIN_READ: Statement = ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", ())
_BEGIN_WRITE: Statement = ("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", ())
_COMMIT: Statement = ("COMMIT", ())
_END_BACKEND = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_xid = ($1::text::xid8)::xid"


def _is_lost(error: psycopg.Error) -> bool:
    return fault_of_postgres(error, "").code == "store_unreachable"


def _misuse() -> MulliganError:
    return fault("internal", "A transaction was used after its end, or to write while reading.")


@lru_cache(maxsize=256)
def _columns(table: Table[Any]) -> str:
    return ", ".join(f'"{name}"' for name in (*table.columns, "long"))


@lru_cache(maxsize=256)
def _key_is(table: Table[Any]) -> str:
    return " AND ".join(f'"{name}" = ${number}' for number, name in enumerate(table.key, 1))


def _stored_key(table: Table[Any], key: Sequence[Value]) -> tuple[Any, ...]:
    if len(key) != len(table.key):
        raise fault("internal", f"{table.name} has a key of {len(table.key)} columns.")
    return tuple(indexed_form(value) if isinstance(value, bytes) else value for value in map(stored, key))


def _get(schema: str, table: Table[Any], key: Sequence[Value]) -> Statement:
    return _get_sql(schema, table), _stored_key(table, key)


@lru_cache(maxsize=1024)
def _get_sql(schema: str, table: Table[Any]) -> str:
    return f"SELECT {_columns(table)} FROM {quoted(schema, table)} WHERE {_key_is(table)}"


@lru_cache(maxsize=1024)
def _put_sql(schema: str, table: Table[Any]) -> str:
    marks = ", ".join(f"${number}" for number in range(1, len(table.columns) + 2))
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name in (*table.columns, "long") if name not in table.key)
    key = ", ".join(f'"{name}"' for name in table.key)
    insert = f"INSERT INTO {quoted(schema, table)} ({_columns(table)}) VALUES ({marks})"
    return f"{insert} ON CONFLICT ({key}) DO UPDATE SET {changed}"


@lru_cache(maxsize=1024)
def _update_sql(schema: str, table: Table[Any], columns: tuple[str, ...]) -> str:
    changed = ", ".join(f'"{name}" = ${number}' for number, name in enumerate(columns, len(table.key) + 1))
    return f"UPDATE {quoted(schema, table)} SET {changed} WHERE {_key_is(table)}"


@lru_cache(maxsize=1024)
def _delete_sql(schema: str, table: Table[Any]) -> str:
    return f"DELETE FROM {quoted(schema, table)} WHERE {_key_is(table)}"


def _select(
    schema: str,
    table: Table[Any],
    where: Mapping[str, Value],
    *,
    between: tuple[str, Value, Value] | None,
    order: tuple[str, ...],
    descending: bool,
    whole: bool = False,
) -> Statement:
    """With `whole`, rows are ordered by their whole values, which no index has. The limit is the last value to bind."""
    terms, values = _conditions(table, where)
    if between is not None:
        name, low, high = between[0], stored(between[1]), stored(between[2])
        terms.append(f'"{name}" >= ${len(values) + 1}')
        if name in indexed_texts(table) and isinstance(low, bytes) and isinstance(high, bytes):
            values.append(low[:INDEXED_BYTES])
            terms.append(f'"{name}" <= ${len(values) + 1}' if is_long(high) else f'"{name}" < ${len(values) + 1}')
            values.append(range_end(high))
            if is_long(low) or is_long(high):
                terms.append(
                    f"{_whole(table, name)} >= ${len(values) + 1} AND {_whole(table, name)} < ${len(values) + 2}"
                )
                values += [low, high]
        else:
            terms.append(f'"{name}" < ${len(values) + 2}')
            values += [low, high]
    direction = " DESC" if descending else ""
    parts = [
        (_whole(table, name) if whole else f'"{name}"') + direction + _nulls(table, name, descending) for name in order
    ]
    ordered = f" ORDER BY {', '.join(parts)}" if parts else ""
    return (
        f"SELECT {_columns(table)} FROM {quoted(schema, table)}{_where(terms)}{ordered} LIMIT ${len(values) + 1}::int8",
        values,
    )


def _nulls(table: Table[Any], name: str, descending: bool) -> str:
    if not table.is_nullable(name):
        return ""
    return " NULLS LAST" if descending else " NULLS FIRST"


def _whole(table: Table[Any], name: str) -> str:
    """The value of a column even if it is long."""
    if name not in indexed_texts(table):
        return f'"{name}"'
    return f'coalesce("long"[{indexed_texts(table).index(name) + 1}], "{name}")'


def _conditions(table: Table[Any], where: Mapping[str, Value]) -> tuple[list[str], list[Any]]:
    terms, values = list[str](), list[Any]()
    for name, value in where.items():
        if value is None:
            terms.append(f'"{name}" IS NULL')
            continue
        kept = stored(value)
        values.append(indexed_form(kept) if isinstance(kept, bytes) and name in indexed_texts(table) else kept)
        terms.append(f'"{name}" = ${len(values)}')
    return terms, values


def _where(terms: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(terms)}" if terms else ""


def _is_order_unsure(table: Table[Any], order: Sequence[str], found: Iterable[tuple[Any, ...]]) -> bool:
    """Whether a row has a long value in a column that orders: the indexed forms of two such may be in another order."""
    places = [indexed_texts(table).index(name) for name in order if name in indexed_texts(table)]
    return any(row[-1] is not None and any(row[-1][place] is not None for place in places) for row in found)


# Rows.


def _encoded(table: Table[R], row: R) -> tuple[Any, ...]:
    values = [stored(value) for value in table.values_of(row)]
    texts = indexed_texts(table)
    if any(isinstance(value, bytes) and is_long(value) for value in values):
        kept = dict(zip(table.columns, values, strict=True))
        long = [kept[name] if is_long(kept[name]) else None for name in texts]  # type: ignore[arg-type]  # texts
        shorter = [indexed_form(one) if name in texts and isinstance(one, bytes) else one for name, one in kept.items()]
        return (*shorter, long if any(one is not None for one in long) else None)
    return (*values, None)


def _row(table: Table[R], found: Sequence[tuple[Any, ...]]) -> R | None:
    return _decoded(table, found[0]) if found else None


@lru_cache(maxsize=256)
def _text_places(table: Table[Any]) -> tuple[int, ...]:
    return tuple(place for place, name in enumerate(table.columns) if table.column_types[name] == "str")


def _decoded(table: Table[R], row: tuple[Any, ...]) -> R:
    *values, long = row
    if long is not None:
        for name, value in zip(indexed_texts(table), long, strict=True):
            if value is not None:
                values[table.columns.index(name)] = value
    try:
        for place in _text_places(table):
            if values[place] is not None:
                values[place] = values[place].decode()
    except UnicodeDecodeError as error:
        raise fault("store_corrupt", f"Reading the store: a text in it is not UTF-8. ({error})") from None
    return table.row(*values)


def _replaced(row: R, columns: Mapping[str, Value]) -> R:
    return replace(row, **columns)  # type: ignore[type-var]  # rows are dataclasses


# Bodies.


class PostgresBodies:
    """Large bodies in a table of the store itself, for a store without an object store. Each commit is synced."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._table = f'"{store.url.schema}"."{BODIES_TABLE}"'

    def put(self, digest: Digest, body: bytes, *, durable: bool = False) -> None:
        # The time says that a caller is about to write a row that names it, so that `sweep` leaves it.
        sql = f'INSERT INTO {self._table} VALUES ($1, $2, now()) ON CONFLICT ("digest") DO UPDATE SET "put_at" = now()'
        self._run("Writing a blob", sql, digest, bytes(body))

    def replace(self, digest: Digest, body: bytes) -> None:
        sql = (
            f"INSERT INTO {self._table} VALUES ($1, $2, now()) "
            'ON CONFLICT ("digest") DO UPDATE SET "body" = excluded."body", "put_at" = now()'
        )
        self._run("Writing a blob", sql, digest, bytes(body))

    def get(self, digest: Digest) -> bytes:
        found = self._run("Reading a blob", f'SELECT "body" FROM {self._table} WHERE "digest" = $1', digest)
        if not found:
            raise fault("missing_cas_dependency", f"The body of {digest} is gone.", digest=digest)
        return bytes(found[0][0])

    def has(self, digest: Digest) -> bool:
        return bool(self._run("Reading a blob", f'SELECT 1 FROM {self._table} WHERE "digest" = $1', digest))

    def delete(self, digest: Digest) -> None:
        self._run("Deleting a blob", f'DELETE FROM {self._table} WHERE "digest" = $1', digest)

    def sync(self, digests: Iterable[Digest] | None = None) -> None:
        return None

    def digests(self) -> Iterator[Digest]:
        after = b""
        sql = f'SELECT "digest" FROM {self._table} WHERE "digest" > $1 ORDER BY "digest" LIMIT {_PAGE}'
        while page := self._store.run_statement("Reading blobs", sql, (after,)).fetchall():
            for (raw,) in page:
                yield digest_from_raw(raw)
            after = page[-1][0]

    def sweep(self, is_named: Callable[[Digest], bool], *, before_s: float) -> tuple[int, int]:
        count = size = 0
        old = '"digest" = $1 AND "put_at" < to_timestamp($2::float8)'
        sql = f'DELETE FROM {self._table} WHERE {old} RETURNING length("body")'
        for digest in self.digests():
            if not is_named(digest):
                for (length,) in self._run("Deleting a blob", sql, digest, before_s):
                    count, size = count + 1, size + length
        return count, size

    def _run(self, doing: str, sql: str, digest: Digest, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self._store.run_statement(doing, sql, (raw_digest(digest), *values))
        return cursor.fetchall() if cursor.description else []


_PAGE = 1_000


# This host's directory.


def _private_directory(directory: str) -> str:
    try:
        check_local_directory(directory)
        private_folder(directory)
    except OSError as error:
        raise fault_of_os_error(error, f"Making the directory {directory}") from error
    return directory


_LOCKS_ID = "owners.id"


def _locks_id(directory: str) -> str:
    """Which lock file an owner has its byte in: a random id, and the file's inode, because directories are copied."""
    path = os.path.join(directory, _LOCKS_ID)
    with suppress(FileExistsError):
        draft = f"{path}.{SystemIds().new()}"
        with open(draft, "x", encoding="ascii") as file:
            file.write(SystemIds().new())
        try:
            os.link(draft, path)
        finally:
            os.unlink(draft)
    with open(path, encoding="ascii") as file:
        return f"{file.read()}/{os.fstat(file.fileno()).st_ino}"
