"""The SQLite file: its directory, the set-up of connections, Mulligan's errors for SQLite's, and a check of the log.

Why the log needs a check: when SQLite opens a database, it reads its log up to the first page with a wrong checksum,
and ignores the rest as the unfinished work of a killed writer. That is right at the end of a log. But if a byte further
in is damaged, SQLite ignores every commit after it, and nothing inside the database shows that: the rest is sound, only
older. A killed writer leaves no commit record, so a commit record beyond the place where SQLite stopped is a lost one.

Format of the log: https://sqlite.org/fileformat2.html#the_write_ahead_log.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from typing import Any

import apsw

from mulligan.store.blob_files import sync_path
from mulligan.store.fork_locks import ThreadMark
from mulligan.store.migrations import SCHEMA_VERSION, STEPS, Step, migrate, newer_store, note_version
from mulligan.store.protocol import Durability, Table, check_update
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass

_HEAD_BYTES, _FRAME_HEAD_BYTES = 32, 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
"""The first number of a log tells the byte order of its checksums."""


@fast_dataclass(slots=True, frozen=True)
class _Head:
    order: str
    page_bytes: int
    salts: bytes
    checksum: tuple[int, int]

    @property
    def frame_bytes(self) -> int:
        return _FRAME_HEAD_BYTES + self.page_bytes

    def offset_of(self, frame: int) -> int:
        return _HEAD_BYTES + frame * self.frame_bytes


def log_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def unread_commits(path: str, frames_seen: int) -> str | None:
    """The damage of the log at `path`, of which SQLite reads `frames_seen` pages, as a phrase; None if there is none.

    The caller makes sure that no process writes the log meanwhile.
    """
    if log_bytes(path) <= _HEAD_BYTES:
        return None
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = _head(os.pread(handle, _HEAD_BYTES, 0))
        if head is None:
            return "the head of its log is damaged: what the log holds cannot be read"
        lost = _lost(handle, head, frames_seen)
    finally:
        os.close(handle)
    return f"its log is damaged after page {frames_seen}: {lost} commits behind it cannot be read" if lost else None


def _lost(handle: int, head: _Head, frames_seen: int) -> int:
    frames = (os.fstat(handle).st_size - _HEAD_BYTES) // head.frame_bytes
    broken = _first_broken(handle, head, frames_seen)
    if broken is None:
        return 0  # SQLite has copied the whole log into the main file, and the next writer starts it again.
    commits = _commits(handle, head, range(frames_seen, frames))
    # A writer leaves this when it overwrites an older log and dies between the two halves of its last page.
    was_torn = commits == [broken] and broken + 1 < frames
    return 0 if was_torn else len(commits)


def _head(raw: bytes) -> _Head | None:
    magic, _, page_bytes, serial = struct.unpack(">4I", raw[:16])
    order = _MAGIC.get(magic)
    if order is None:
        return None
    # A writer that restarts the log may die after it has written only the new serial number.
    for number in (serial, serial - 1):
        head = raw[:12] + struct.pack(">I", number & 0xFFFFFFFF) + raw[16:24]
        checksum = _checksum(order, head, (0, 0))
        if struct.pack(">2I", *checksum) == raw[24:]:
            return _Head(order, page_bytes, raw[16:24], checksum)
    return None


def _checksum(order: str, data: bytes, seed: tuple[int, int]) -> tuple[int, int]:
    first, second = seed
    for one, other in struct.iter_unpack(f"{order}2I", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


def _first_broken(handle: int, head: _Head, first: int) -> int | None:
    """The first page from `first` on with a wrong checksum; None if a whole transaction is valid."""
    checksum = head.checksum
    if first:
        checksum = struct.unpack(">2I", _frame(handle, head, first - 1)[16:24])
    while len(raw := _frame(handle, head, first)) == head.frame_bytes:
        checksum = _checksum(head.order, raw[_FRAME_HEAD_BYTES:], _checksum(head.order, raw[:8], checksum))
        if raw[8:24] != head.salts + struct.pack(">2I", *checksum):
            return first
        if _is_commit(raw):
            return None
        first += 1
    return first


def _commits(handle: int, head: _Head, frames: range) -> list[int]:
    """Pages that end a transaction. Pages with other salts are left over from an earlier log in the same file."""
    heads = ((number, os.pread(handle, _FRAME_HEAD_BYTES, head.offset_of(number))) for number in frames)
    return [number for number, raw in heads if raw[8:16] == head.salts and _is_commit(raw)]


def _frame(handle: int, head: _Head, number: int) -> bytes:
    return os.pread(handle, head.frame_bytes, head.offset_of(number))


def _is_commit(frame: bytes) -> bool:
    return frame[4:8] != bytes(4)


__all__ = ["log_bytes", "unread_commits"]


TRUST_OWNER = "MULLIGAN_TRUST_OWNER"
APPLICATION_ID = 0x4D4C4721  # "MLG!"
BUSY_LIMIT_S = 30.0
_BUSY_NAP_S = 0.0004
_CHECKPOINT_PAGES = 16_384
_LOG_KEPT_BYTES = 64 * 1024 * 1024

_NETWORK_FILE_SYSTEMS = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "lustre",
        "ncpfs",
        "webdav",
        "afpfs",
    ]
)

_CODES: tuple[tuple[type[apsw.Error], str, str], ...] = (
    (apsw.CorruptError, "store_corrupt", "the store is damaged; restore it from a backup"),
    (
        apsw.NotADBError,
        "store_corrupt",
        "that file is not a Mulligan store; restore it from a backup, or choose another with MULLIGAN_HOME",
    ),
    (apsw.FullError, "no_space", "the disk is full; free some space and try again"),
    (apsw.ReadOnlyError, "read_only_disk", "the store's disk is read-only; choose another with MULLIGAN_HOME"),
    (apsw.BusyError, "store_busy", "another process has been writing for too long; try again"),
    (apsw.LockedError, "store_busy", "another process has been writing for too long; try again"),
    (apsw.CantOpenError, "store_unreadable", "the store cannot be opened; check its permissions"),
    (apsw.PermissionsError, "store_unreadable", "the store cannot be opened; check its permissions"),
    (apsw.IOError, "io_error", "the disk under the store failed"),
)


def misuse_error() -> MulliganError:
    return fault("internal", "A transaction was used after its end, or to write while reading.")


def write_fault(error: Exception) -> MulliganError:
    if isinstance(error, apsw.Error):
        return fault_of_sqlite(error, "Writing the store")
    return fault("internal", f"Writing the store: a value that no column can hold. ({error})")


def fault_of_sqlite(error: apsw.Error, doing: str) -> MulliganError:
    for kind, code, words in _CODES:
        if isinstance(error, kind):
            return fault(code, f"{doing}: {words}. ({error})")
    if isinstance(error, apsw.SQLError) and str(error).startswith("no such"):
        # The file states a format that has every table and column of our statements.
        return fault(
            "store_corrupt",
            f"{doing}: the store lacks a table or column of its format; restore it from a backup. ({error})",
        )
    return fault("internal", f"{doing}: {error}")


_TYPES = {"str": "TEXT", "int": "INTEGER", "bytes": "BLOB"}


def create_statements(tables: Iterable[Table[Any]]) -> list[str]:
    return [statement for table in tables for statement in _table_statements(table)]


def _table_statements(table: Table[Any]) -> list[str]:
    types = {
        name: _TYPES[kind] + (" NOT NULL" if name in table.key else "") for name, kind in table.column_types.items()
    }
    columns = ", ".join(f'"{name}" {kind}' for name, kind in types.items())
    # Rows with a body are in a rowid table, so that large values are not in the inner pages of a B-tree.
    kept = "STRICT" if "body" in table.columns else "STRICT, WITHOUT ROWID"
    made = [f'CREATE TABLE IF NOT EXISTS "{table.name}" ({columns}, PRIMARY KEY ({column_list(table.key)})) {kept}']
    for index in table.indexes:
        label = f"{table.name}_by_{'_'.join(index)}"
        made.append(
            f'CREATE INDEX IF NOT EXISTS "{label}" ON "{table.name}" ({column_list(index)}){_partly(table, index)}'
        )
    return made


def _partly(table: Table[Any], index: tuple[str, ...]) -> str:
    """An index on a single nullable column holds only the rows that have a value there."""
    return f' WHERE "{index[0]}" IS NOT NULL' if len(index) == 1 and table.is_nullable(index[0]) else ""


def column_list(columns: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


@cache
def get_sql(table: Table[Any]) -> str:
    return f'SELECT {column_list(table.columns)} FROM "{table.name}" WHERE {_key_is(table)}'


@cache
def has_sql(table: Table[Any]) -> str:
    return f'SELECT 1 FROM "{table.name}" WHERE {_key_is(table)}'


@cache
def put_sql(table: Table[Any], count: int = 1) -> str:
    """An upsert, because SQLite's REPLACE deletes the old row first. It writes every index; `update_sql` does not."""
    marks = ", ".join([f"({', '.join('?' * len(table.columns))})"] * count)
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name in table.columns if name not in table.key)
    action = f"UPDATE SET {changed}" if changed else "NOTHING"
    insert = f'INSERT INTO "{table.name}" ({column_list(table.columns)}) VALUES {marks}'
    return f"{insert} ON CONFLICT ({column_list(table.key)}) DO {action}"


@cache
def delete_sql(table: Table[Any]) -> str:
    return f'DELETE FROM "{table.name}" WHERE {_key_is(table)}'


@cache
def update_sql(table: Table[Any], columns: tuple[str, ...]) -> str:
    """SQLite writes only the indexes of the named columns."""
    check_update(table, columns)
    changed = ", ".join(f'"{name}" = ?' for name in columns)
    return f'UPDATE "{table.name}" SET {changed} WHERE {_key_is(table)}'


def _key_is(table: Table[Any]) -> str:
    return " AND ".join(f'"{name}" = ?' for name in table.key)


@lru_cache(maxsize=1024)
def select_sql(
    table: Table[Any],
    equal: tuple[str, ...],
    nulls: frozenset[str],
    *,
    ranged: str | None,
    order: tuple[str, ...],
    descending: bool,
) -> str:
    """The values to bind: those of `equal` that are not in `nulls`, the two ends of the range, and the limit."""
    terms = [f'"{name}" IS NULL' if name in nulls else f'"{name}" = ?' for name in equal]
    if ranged:
        terms.append(f'"{ranged}" >= ? AND "{ranged}" < ?')
    condition = f" WHERE {' AND '.join(terms)}" if terms else ""
    direction = " DESC" if descending else ""
    ordered = ", ".join(f'"{name}"{direction}' for name in dict.fromkeys((*order, *table.key)))
    return f'SELECT {column_list(table.columns)} FROM "{table.name}"{condition} ORDER BY {ordered} LIMIT ?'


def roll_back(connection: apsw.Connection) -> None:
    with suppress(apsw.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _turn_off_memory_statistics() -> None:
    """Turn off memory statistics: each allocation would take one lock, which a forked child may inherit locked.

    SQLite allows this only while it is not in use. If the program already uses SQLite, its setting stays.
    """
    if not apsw.connections() and apsw.vfs_names()[:1] == ["unix"]:
        apsw.shutdown()
        apsw.config(apsw.SQLITE_CONFIG_MEMSTATUS, False)
        apsw.initialize()


_turn_off_memory_statistics()


class PooledConnection(apsw.Connection):
    """A connection of the pool. `user` is the thread that has it, None for none.

    `checked_data` is SQLite's data version when the store's format was last checked. The data version changes with
    every commit of any process, so while it stays, the format stays. `rows` caches rows of that data version by table
    and key; None for a row that does not exist.
    """

    def __init__(self, path: str, *, vfs: str | None = None) -> None:
        super().__init__(path, vfs=vfs)
        self.user: ThreadMark | None = None
        self.checked_data = -1
        self.rows: dict[tuple[object, ...], Any] = {}


class BusyWait:
    """A busy handler with short sleeps, so that a queue of small commits runs at the speed of the commits.

    It calls `before_wait` once before it waits.
    """

    def __init__(self, before_wait: Callable[[], None] = lambda: None) -> None:
        self._before_wait = before_wait
        self._since = 0.0

    def __call__(self, tries: int) -> bool:
        now = monotonic_s()
        if tries == 0:
            self._since = now
            self._before_wait()
        if now - self._since > BUSY_LIMIT_S:
            return False
        time.sleep(_BUSY_NAP_S)
        return True


def connect(
    path: str, *, durability: Durability, vfs: str | None = None, wait: BusyWait | None = None
) -> PooledConnection:
    connection = PooledConnection(path, vfs=vfs)
    connection.set_busy_handler(wait or BusyWait())
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    # Otherwise SQLite plans a statement again whenever a bound value changes, which takes longer than running it.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    connection.config(
        apsw.SQLITE_DBCONFIG_DQS_DML, 0
    )  # Otherwise SQLite reads the name of an unknown column as a text.
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    connection.execute("PRAGMA cell_size_check = ON; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -16384")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_KEPT_BYTES}")
    connection.wal_autocheckpoint(_CHECKPOINT_PAGES)
    return connection


def prepare_file(
    connection: apsw.Connection,
    create: Callable[[], Sequence[str]],
    *,
    directory: str,
    version: int = SCHEMA_VERSION,
    steps: Mapping[int, Step] = STEPS,
) -> None:
    """Create or migrate the file; an up-to-date file is not written. Raises for a newer file, or another program's.

    `create` gives the statements that create the tables of a new file.
    """
    if _format_and_application(connection) == (version, APPLICATION_ID):
        return
    with _directory_lock(directory):
        found, application = _format_and_application(connection)
        _refuse_what_is_not_ours(connection, found, application, newest=version)
        if application == 0:
            _refuse_unread(connection)
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.pragma("journal_mode", "wal")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if application == 0:
                _create(connection, create(), version)
            else:
                copy_before_migration(connection, found)
                migrate(connection, to=version, steps=steps)
            note_version(connection)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


COPY_SUFFIX = ".format-"


def copy_before_migration(connection: apsw.Connection, found: int) -> None:
    """Copy the database to `store.db.format-N`. The caller's transaction keeps other writers out meanwhile."""
    target = f"{connection.filename}{COPY_SUFFIX}{found}"
    with suppress(FileNotFoundError):
        os.unlink(target + ".part")
    reader = apsw.Connection(connection.filename, vfs=connection.open_vfs)
    try:
        reader.execute("VACUUM INTO ?", (target + ".part",))
    finally:
        reader.close()
    os.chmod(target + ".part", 0o600)
    os.rename(target + ".part", target)


def _format_and_application(connection: apsw.Connection) -> tuple[int, int]:
    return int(connection.pragma("user_version")), int(connection.pragma("application_id"))


def _refuse_what_is_not_ours(connection: apsw.Connection, found: int, application: int, *, newest: int) -> None:
    if application == APPLICATION_ID and found > newest:
        raise newer_store(connection, found)
    used = found or application or connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    if used and application != APPLICATION_ID:
        raise fault("store_corrupt", "That database belongs to another program; choose another directory.")


def _refuse_unread(connection: apsw.Connection) -> None:
    """Refuse an empty file whose log holds commits: it is a store with a damaged log, not a new one."""
    frames, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
    lost = unread_commits(connection.filename + "-wal", max(frames, 0))
    if lost:
        raise fault("store_corrupt", f"The store is damaged: {lost}. Restore it from a backup.")


def _create(connection: apsw.Connection, statements: Sequence[str], version: int) -> None:
    for statement in statements:
        connection.execute(statement)
    connection.pragma("application_id", APPLICATION_ID)
    connection.pragma("user_version", version)


@contextmanager
def _directory_lock(directory: str) -> Iterator[None]:
    """Held by the one process that creates or migrates the store in a directory."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_directory(directory: str, database: str, *, create: bool) -> None:
    """Check that the directory is trusted and on a local disk, and create it with an empty file if `create` is set."""
    path = os.path.join(directory, database)
    try:
        refuse_untrusted(directory)
        _refuse_damaged_store(directory, path)
        if not create and not is_there(path):
            raise fault("store_unreadable", f"There is no store in {directory}. Check --store, --root, MULLIGAN_HOME.")
        _refuse_network(directory)
        if create and not os.path.exists(path):
            _make_directory(directory)
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _unusable(directory, error) from error


def check_local_directory(directory: str) -> None:
    """Refuse a directory that others prepared, or on a network disk. Raises `untrusted_owner`, `network_store`."""
    refuse_untrusted(directory)
    _refuse_network(directory)


def private_folder(path: str) -> None:
    """Creates the folder, and missing folders above it, for its owner only."""
    if os.path.isdir(path):
        return
    private_folder(os.path.dirname(path))
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)


def refuse_untrusted(path: str) -> None:
    """Refuse a directory or socket that belongs to another user, or that others can write: they may have prepared it.

    Raises `untrusted_owner`, but not for the superuser, nor if the user sets `MULLIGAN_TRUST_OWNER=1`.
    """
    user = os.geteuid()
    if user == 0 or os.environ.get(TRUST_OWNER) == "1" or not is_there(path):
        return
    status = os.stat(path)
    if status.st_uid != user:
        words = f"{path} belongs to user {status.st_uid}, not to you. Choose another with MULLIGAN_HOME or --store"
    elif stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        words = f"Others can write to {path}. Run `chmod go-w {path}`"
    else:
        return
    raise fault("untrusted_owner", f"{words}, or set {TRUST_OWNER}=1 if you trust them.", path=path)


def _make_directory(directory: str) -> None:
    """Make a directory and its missing parents, and sync their names: SQLite syncs only names inside the directory."""
    above, made = directory, list[str]()
    while not os.path.lexists(above):
        above = os.path.dirname(above)
        made.append(above)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    for parent in made:
        sync_path(parent)


def is_there(path: str) -> bool:
    """As `os.path.exists`, but raises if permissions hide the answer, instead of answering False."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _refuse_damaged_store(directory: str, path: str) -> None:
    """Refuse a store whose main file is gone or empty: SQLite would delete its log as for a new store, and gc its
    bodies.
    """
    log = path + "-wal"
    remains = os.path.isdir(os.path.join(directory, "blobs")) or (os.path.exists(log) and os.stat(log).st_size > 0)
    # Check the main file last: another process may create the store right now, and it creates that file first.
    if remains and not (os.path.exists(path) and os.stat(path).st_size):
        raise fault(
            "store_corrupt",
            f"The main file of the store in {directory} is missing or empty. Restore it from a backup, "
            "or choose another directory with MULLIGAN_HOME or --store.",
        )


def _refuse_network(directory: str) -> None:
    """Refuse a network file system, judged by the nearest existing parent: a new directory is on the same disk."""
    nearest = directory
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    kind = file_system_of(nearest)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise fault(
            "network_store",
            f"{directory} is on a network file system ({kind}), where file locks do not hold. "
            "Set MULLIGAN_HOME to a directory on a local disk.",
        )


def _unusable(directory: str, error: OSError) -> MulliganError:
    words = f"{directory} cannot be used as a store: {error.strerror}. Choose another with MULLIGAN_HOME or --store."
    if isinstance(
        error, PermissionError | FileNotFoundError | NotADirectoryError | FileExistsError | IsADirectoryError
    ):
        return fault("store_unreadable", words)
    return fault(fault_of_os_error(error, "").code, words, errno=error.errno)


def file_system_of(directory: str) -> str:
    """The type of a directory's file system; "" if the system has no /proc/self/mountinfo."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields, _, tail = line.partition(" - ")
                if fields.split()[2] == wanted:
                    return tail.split()[0]
    except OSError:
        return ""
    return ""
