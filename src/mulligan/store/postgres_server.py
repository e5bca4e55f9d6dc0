"""A PostgreSQL server as the store sees it: the URL, connections, Mulligan's errors for the server's, and tables.

Text is stored as the bytes of its UTF-8 form, because PostgreSQL's own text refuses NUL and sorts by the rules of a
language. An index entry has at most 2 704 bytes, so an indexed column holds a long value only as its first bytes and
the digest of the whole (`indexed_form`); the hidden column `long` of the row then has the value itself. Each table is
in a schema of its own name (default `mulligan`), because a pooler in transaction mode does not keep a search path.

No message of the server's client library reaches a person unchecked: it may quote a part of the URL, and so a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote

import psycopg
from psycopg.abc import Params
from psycopg.types.numeric import Int8BinaryDumper

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.host import SHARED
from mulligan.store.migrations import SCHEMA_VERSION
from mulligan.store.protocol import META, Table, Value
from mulligan.values import VERSION
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SystemIds

Statement: TypeAlias = tuple[str, Sequence[Any]]
"""SQL with $1, $2, … and the values to bind."""

DEFAULT_SCHEMA = "mulligan"
LOCK_LIMIT_S = 30
_OLDEST_SERVER = 140_000
_CONNECT_LIMIT_S = 10
_IDLE_MAX = 8

_URL = re.compile(
    r"postgres(?:ql)?://"
    r"(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^@/?#\s]*))?@)?"
    r"(?P<hosts>[A-Za-z0-9_.%\[\]:,-]*)"
    r"(?:/(?P<database>[^@/?#\s]*))?"
    r"(?:\?(?P<options>[^#\s]*))?\Z"
)
_HOST = re.compile(r"(?:[A-Za-z0-9_.%-]*|\[[0-9a-fA-F:.%]+\])(?::\d{1,5})?\Z")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}\Z")
URL_HELP = (
    "Write it as postgresql://USER@HOST:5432/DATABASE; a password belongs in MULLIGAN_STORE or PGPASSFILE, "
    "with reserved characters as %XX."
)


@fast_dataclass(slots=True, frozen=True)
class PostgresUrl:
    """Where a store is. `public` is the URL without its password; the client library gets that as `text`, without our
    own option, and the password apart. `shown` is for messages."""

    public: str
    text: str
    shown: str
    password: str
    schema: str


_hidden_passwords: dict[str, str] = {}


def hide_password(environ: MutableMapping[str, str]) -> None:
    """Take the password out of `MULLIGAN_STORE` and `PGPASSWORD`, so that no child process gets it."""
    url = parse_postgres_url(environ["MULLIGAN_STORE"])
    password = url.password or environ.get("PGPASSWORD", "")
    if password:
        _hidden_passwords[url.public] = password
    environ.pop("PGPASSWORD", None)
    environ["MULLIGAN_STORE"] = url.public


def parse_postgres_url(url: str) -> PostgresUrl:
    """Raises `invalid_store_url`; the error never quotes the URL, because a part of it may be a password."""
    found = _URL.match(url)
    hosts = found["hosts"].split(",") if found else []
    if found is None or not all(_HOST.match(host) for host in hosts):
        raise fault("invalid_store_url", f"The PostgreSQL URL is malformed. {URL_HELP}")
    options = parse_qsl(found["options"] or "", keep_blank_values=True)
    schema = next((value for name, value in options if name == "schema"), DEFAULT_SCHEMA)
    if not _SCHEMA.match(schema):
        words = "schema=… in the PostgreSQL URL must be a plain name: lower-case letters, digits and '_'."
        raise fault("invalid_store_url", words)
    secrets = [value for name, value in options if name == "password"]
    password = unquote(found["password"] or "") or next(iter(secrets), "")
    parts = [one for one in (found["options"] or "").split("&") if one and not one.startswith("password=")]
    kept = [one for one in parts if not one.startswith("schema=")]
    place = found["hosts"] + ("" if found["database"] is None else "/" + found["database"])
    signed = "" if found["user"] is None else found["user"] + "@"
    base = f"postgresql://{signed}{place}"
    public, text = (base + ("?" + "&".join(some) if some else "") for some in (parts, kept))
    shown = f"postgresql://{signed}{place}" + ("" if schema == DEFAULT_SCHEMA else f"?schema={schema}")
    try:
        psycopg.conninfo.conninfo_to_dict(text)
    except psycopg.ProgrammingError:
        raise fault("invalid_store_url", f"The PostgreSQL URL has an option that is not known. {URL_HELP}") from None
    return PostgresUrl(public, text, shown, password or _hidden_passwords.get(public, ""), schema)


# Errors.

_TRY_AGAIN = "nothing was changed; try again"
_BY_STATE: Mapping[str, tuple[str, str, bool]] = MappingProxyType(
    {
        "55P03": ("store_busy", f"another process has been writing for too long; {_TRY_AGAIN}", True),
        "57014": ("store_busy", f"the server cancelled the statement; {_TRY_AGAIN}", True),
        "40001": ("store_busy", f"another process wrote at the same time; {_TRY_AGAIN}", True),
        "40P01": ("store_busy", f"another process wrote at the same time; {_TRY_AGAIN}", True),
        "53300": ("store_busy", f"the server has no connection left; {_TRY_AGAIN}, or raise max_connections", True),
        "53200": ("store_busy", f"the server is out of memory; {_TRY_AGAIN}", True),
        "53100": ("no_space", "the server's disk is full; free some space and try again", True),
        "25006": (
            "read_only_disk",
            "the server accepts no writes: it is a replica or read-only; name the primary server "
            "(target_session_attrs=read-write chooses it among several hosts)",
            False,
        ),
        "28P01": (
            "store_unreadable",
            "the server refused the user or the password; check MULLIGAN_STORE or PGPASSFILE",
            False,
        ),
        "28000": ("store_unreadable", "the server refused the user; check the URL and the server's pg_hba.conf", False),
        "3D000": ("store_unreadable", "the server has no such database; create it with createdb", False),
        "42501": (
            "store_unreadable",
            "the user lacks rights; run GRANT CREATE, CONNECT ON DATABASE … TO …, or let the owner of the schema work",
            False,
        ),
        "42P01": ("store_corrupt", "the store lacks a table of its format; restore it from a backup", False),
        "42703": ("store_corrupt", "the store lacks a column of its format; restore it from a backup", False),
    }
)
_BY_CLASS: Mapping[str, tuple[str, str, bool]] = MappingProxyType(
    {
        "08": ("store_unreachable", f"the connection to the server was lost; {_TRY_AGAIN}", True),
        "57": ("store_unreachable", f"the server is shutting down or starting; {_TRY_AGAIN}", True),
        "53": ("store_busy", f"the server is short of something; {_TRY_AGAIN}", True),
        "58": ("io_error", "the server's disk failed", False),
        "XX": ("store_corrupt", "the server found damage in its files; restore it from a backup", False),
    }
)
_UNREACHABLE = "the server cannot be reached; check that it runs and that the URL names it, then try again"


def fault_of_postgres(error: psycopg.Error, doing: str) -> MulliganError:
    """Mulligan's error; `retry` in its details says whether the same request may work later."""
    state = error.sqlstate
    if state is None and isinstance(error, psycopg.OperationalError):
        return fault("store_unreachable", f"{doing}: {_BY_CLASS['08'][1]}.", retry=True)
    found = _BY_STATE.get(state or "") or _BY_CLASS.get((state or "")[:2])
    if found is None:
        return fault("internal", f"{doing}: the server answered with error {state}.", retry=False, state=state)
    code, words, retry = found
    return fault(code, f"{doing}: {words}.", retry=retry, state=state)


_REFUSALS = (
    ("28P01", re.compile("password authentication failed|no password supplied")),
    (
        "28000",
        re.compile("no pg_hba.conf entry|authentication failed|role .* does not exist|is not permitted to log in"),
    ),
    ("3D000", re.compile("database .* does not exist")),
    ("53300", re.compile("too many (?:clients|connections)|remaining connection slots")),
    ("57P03", re.compile("is starting up|is shutting down|in recovery mode|not yet accepting")),
    ("25006", re.compile("session is read-only|server is in hot standby|session is not read-only")),
    ("42501", re.compile("permission denied for database")),
)
"""The client library gives no code for a refused connection, only the server's words."""


def fault_of_connecting(error: psycopg.Error, url: PostgresUrl) -> MulliganError:
    doing = f"Opening the store {url.shown}"
    for state, words in _REFUSALS:
        if error.sqlstate == state or words.search(str(error)):
            code, said, retry = _BY_STATE.get(state) or _BY_CLASS[state[:2]]
            return fault(code, f"{doing}: {said}.", retry=retry, state=state)
    return fault("store_unreachable", f"{doing}: {_UNREACHABLE}.", retry=True)


# Connections.


class ServerLink:
    """A connection and what the server said about itself when it was made."""

    def __init__(self, raw: psycopg.Connection[tuple[Any, ...]], facts: tuple[Any, ...]) -> None:
        self.raw = raw
        self.backend, self.is_replica, self.is_read_only = facts

    def run(self, *statements: Statement) -> list[psycopg.RawCursor[tuple[Any, ...]]]:
        """Run the statements in one round trip. Raises psycopg.Error; what came after a failed one did not run."""
        if len(statements) == 1:
            return [self._execute(*statements[0])]
        with self.raw.pipeline():
            return [self._execute(*one) for one in statements]

    def _execute(self, sql: str, values: Params) -> psycopg.RawCursor[tuple[Any, ...]]:
        cursor = psycopg.RawCursor(self.raw)
        return cursor.execute(sql.encode(), values, binary=True)

    @property
    def is_usable(self) -> bool:
        return not self.raw.closed and self.raw.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


_FACTS = "SELECT pg_backend_pid(), pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'"


def connect(url: PostgresUrl) -> ServerLink:
    """Raises Mulligan's errors. A server that was reached through a pooler gets no prepared statements."""
    try:
        raw = psycopg.connect(
            url.text,
            password=url.password or None,
            autocommit=True,
            connect_timeout=_CONNECT_LIMIT_S,
            application_name="mulligan",
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=15_000,
        )
    except psycopg.Error as error:
        raise fault_of_connecting(error, url) from None
    with ExitStack() as closing:
        closing.callback(raw.close)
        if raw.info.server_version < _OLDEST_SERVER:
            version = raw.info.server_version // 10_000
            words = f"Opening the store {url.shown}: the server is PostgreSQL {version}; Mulligan needs 14 or newer."
            raise fault("store_unreadable", words, retry=False)
        raw.adapters.register_dumper(int, Int8BinaryDumper)
        try:
            link = ServerLink(raw, raw.execute(_FACTS).fetchall()[0])
        except psycopg.Error as error:
            raise fault_of_connecting(error, url) from None
        if link.backend != raw.info.backend_pid:
            # A pooler answers for the server, and hands each transaction to another connection.
            raw.prepare_threshold = None
        closing.pop_all()
        return link


class ServerLinks:
    """The connections of this process to one server. A forked child leaves its parent's alone, and makes its own."""

    def __init__(self, url: PostgresUrl) -> None:
        self.url = url
        self._process = os.getpid()
        self._idle: list[ServerLink] = []
        self._inherited: list[ServerLink] = []
        self._lock = fork_safe_lock()
        self.is_closed = False

    def take(self, *, fresh: bool = False) -> ServerLink:
        """A connection that no other thread has. Its server may have gone since it was last used, unless `fresh`."""
        with self._lock:
            self._leave_inherited()
            while self._idle:
                link = self._idle.pop()
                if not fresh and link.is_usable:
                    return link
                link.raw.close()
        return connect(self.url)

    def give_back(self, link: ServerLink) -> None:
        with self._lock:
            self._leave_inherited()
            if link.is_usable and not self.is_closed and len(self._idle) < _IDLE_MAX:
                self._idle.append(link)
                return
        link.raw.close()

    def _leave_inherited(self) -> None:
        """In a forked child: to close the parent's connections would end them for the parent too."""
        if self._process != os.getpid():
            self._inherited += self._idle
            self._idle, self._process = [], os.getpid()

    def close(self) -> None:
        with self._lock:
            self._leave_inherited()
            self.is_closed = True
            while self._idle:
                self._idle.pop().raw.close()


# Tables.

INDEXED_BYTES = 400
"""Six such columns and their digests are in one index entry."""
_TEXTS_AN_INDEX = 6


def is_long(value: bytes | None) -> bool:
    return value is not None and len(value) > INDEXED_BYTES


def indexed_form(value: bytes) -> bytes:
    """What an indexed column holds. It sorts as the value does, except among long values with the same beginning."""
    return value if len(value) <= INDEXED_BYTES else value[:INDEXED_BYTES] + sha256(value).digest()


def range_end(value: bytes) -> bytes:
    """At least every indexed form of a smaller value."""
    return value if len(value) <= INDEXED_BYTES else value[:INDEXED_BYTES] + b"\xff" * 33


@lru_cache(maxsize=256)
def indexed_texts(table: Table[Any]) -> tuple[str, ...]:
    """The columns of text or bytes that are in the key or in an index; a long value is in `long` at their place."""
    named = {*table.key, *(name for index in table.indexes for name in index)}
    return tuple(name for name in table.columns if name in named and table.column_types[name] != "int")


def quoted(schema: str, table: Table[Any]) -> str:
    return f'"{schema}"."{table.name}"'


def create_statements(schema: str, tables: Iterable[Table[Any]]) -> list[str]:
    return [statement for table in tables for statement in _table_statements(schema, table)]


def _table_statements(schema: str, table: Table[Any]) -> list[str]:
    columns = [
        f'"{name}" {"int8" if kind == "int" else "bytea"}' + (" NOT NULL" if name in table.key else "")
        for name, kind in table.column_types.items()
    ]
    columns += ['"long" bytea[]', f"PRIMARY KEY ({_names(table.key)})"]
    made = [f"CREATE TABLE {quoted(schema, table)} ({', '.join(columns)})"]
    for index in table.indexes:
        whole = _with_key(table, index)
        only = f' WHERE "{index[0]}" IS NOT NULL' if len(index) == 1 and table.is_nullable(index[0]) else ""
        ordered = ", ".join(f'"{name}"' + (" NULLS FIRST" if table.is_nullable(name) else "") for name in whole)
        label = f"{table.name}_by_{'_'.join(index)}"
        made.append(f'CREATE INDEX "{label}" ON {quoted(schema, table)} ({ordered}){only}')
    return made


def _with_key(table: Table[Any], index: tuple[str, ...]) -> tuple[str, ...]:
    """The index, and the key after it, so that rows come in the order of `select`; unless that makes it too long."""
    whole = tuple(dict.fromkeys((*index, *table.key)))
    return whole if sum(table.column_types[name] != "int" for name in whole) <= _TEXTS_AN_INDEX else index


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


Step: TypeAlias = Callable[[psycopg.Connection[tuple[Any, ...]], str], None]
STEPS: Mapping[int, Step] = MappingProxyType({})
"""For each older format, the step that leads to the next one. The first format on PostgreSQL is the present one."""

BODIES_TABLE = "mulligan_bodies"
"""The table of large bodies of a store without an object store."""

_LIFE = "mulligan_life"
"""A table with one row, a random word. The server empties it when it crashes and when a standby takes over, because the
table is not in its log. After that, ids of lost transactions may belong to others."""

_ABOUT = "mulligan_store"
"""The table with one row: the id of the store, its format, and the version of Mulligan that made the format."""


@fast_dataclass(slots=True, frozen=True)
class About:
    store: str
    format: int
    written_by: str


def lock_key(*parts: str) -> int:
    """The number of an advisory lock: locks are numbered for the whole database."""
    return int.from_bytes(sha256("\0".join(("mulligan", *parts)).encode()).digest()[:8], "big", signed=True)


RELATIONS = "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE nspname = $1"
"""The tables and indexes of a schema."""


def read_about(link: ServerLink, schema: str) -> About | None:
    """None if the schema has no store. Raises `store_unreadable` if it has other tables."""
    asked = f"SELECT relname {RELATIONS} AND relkind IN ('r', 'p', 'v')"
    names = {row[0] for row in link.run((asked, (schema,)))[0].fetchall()}
    if _ABOUT not in names:
        if names:
            words = f"The schema {schema} has tables of another program; name another one with ?schema=NAME in the URL."
            raise fault("store_unreadable", words, retry=False)
        return None
    row = link.run((f'SELECT "store", "format", "written_by" FROM "{schema}"."{_ABOUT}"', ()))[0].fetchall()
    return About(*row[0])


def life_sql(schema: str) -> str:
    """The format, and the word of the server's present life; NULL after a crash."""
    return f'SELECT "format", (SELECT "word" FROM "{schema}"."{_LIFE}") FROM "{schema}"."{_ABOUT}"'


def new_life(schema: str, word: str) -> Statement:
    return f'INSERT INTO "{schema}"."{_LIFE}" ("word") VALUES ($1) ON CONFLICT DO NOTHING', (word,)


def prepare_schema(
    link: ServerLink,
    schema: str,
    tables: Iterable[Table[Any]],
    *,
    create: bool,
    version: int = SCHEMA_VERSION,
    steps: Mapping[int, Step] = STEPS,
) -> About:
    """Create the store or migrate it forward, under a lock; a store in the present format is only read."""
    about = read_about(link, schema)
    if about is None and not create:
        raise fault("store_unreadable", f"There is no store in the schema {schema} of this database yet.", retry=False)
    if about is None or about.format < version:
        if link.is_replica or link.is_read_only:
            code, words, retry = _BY_STATE["25006"]
            raise fault(code, f"Creating the store: {words}.", retry=retry)
        with link.raw.transaction():
            link.raw.execute(f"SET LOCAL lock_timeout = '{LOCK_LIMIT_S}s'")
            link.raw.execute(f"SELECT pg_advisory_xact_lock({lock_key('prepare', schema)})")
            about = read_about(link, schema)
            if about is None:
                _create(link, schema, tables, version)
            elif about.format < version:
                _migrate(link, schema, about, version=version, steps=steps)
        about = read_about(link, schema)
    assert about is not None
    if about.format > version:
        raise newer_store(about)
    return about


def _create(link: ServerLink, schema: str, tables: Iterable[Table[Any]], version: int) -> None:
    exists = link.raw.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchall()
    if not exists:
        link.raw.execute(f'CREATE SCHEMA "{schema}"')
    columns = '"store" text NOT NULL, "format" int NOT NULL, "written_by" text NOT NULL'
    about = f'CREATE TABLE "{schema}"."{_ABOUT}" ({columns})'
    columns = '"digest" bytea PRIMARY KEY, "body" bytea NOT NULL, "put_at" timestamptz NOT NULL'
    bodies = f'CREATE TABLE "{schema}"."{BODIES_TABLE}" ({columns})'
    columns = '"one" bool PRIMARY KEY DEFAULT true CHECK ("one"), "word" text NOT NULL'
    life = f'CREATE UNLOGGED TABLE "{schema}"."{_LIFE}" ({columns})'
    for statement in (about, bodies, life, *create_statements(schema, tables)):
        link.raw.execute(statement)
    meta = quoted(schema, META)
    link.raw.execute(f'INSERT INTO {meta} ("key", "value") VALUES (%s, %s)', (SHARED.encode(), b"1"))
    row = (SystemIds().new(), version, VERSION)
    link.raw.execute(f'INSERT INTO "{schema}"."{_ABOUT}" VALUES (%s, %s, %s)', row)


def _migrate(link: ServerLink, schema: str, about: About, *, version: int, steps: Mapping[int, Step]) -> None:
    # Writers hold this lock shared or alone, so none of them is half-way.
    link.raw.execute(f"SELECT pg_advisory_xact_lock({lock_key('store', about.store)})")
    for stage in range(about.format, version):
        step = steps.get(stage)
        if step is None:
            words = f"This store has format {about.format}, which this Mulligan no longer reads."
            raise fault("store_unreadable", words, retry=False)
        step(link.raw, schema)
    link.raw.execute(f'UPDATE "{schema}"."{_ABOUT}" SET "format" = %s, "written_by" = %s', (version, VERSION))


def newer_store(about: About) -> MulliganError:
    words = (
        f"Mulligan {about.written_by} has migrated this store to format {about.format}; this process runs Mulligan "
        f"{VERSION}, which reads formats up to {SCHEMA_VERSION}. Restart it with the newer one."
    )
    return fault("store_newer", words, format=about.format, pid=os.getpid())


def stored(value: Value) -> int | bytes | None:
    """The value as a column holds it."""
    return value.encode() if isinstance(value, str) else value
