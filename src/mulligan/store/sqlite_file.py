"""The SQLite file itself: where it may live, how a connection to it is set up, what its errors mean to us."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import apsw

from mulligan.store.bodies import sync_path
from mulligan.store.migrations import SCHEMA_VERSION, STEPS, Step, migrate, newer_store, note_version
from mulligan.store.protocol import Durability
from mulligan.store.sqlite_log import unread_commits
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError, fault, fault_of_os_error

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


def fault_of_sqlite(error: apsw.Error, doing: str) -> MulliganError:
    for kind, code, words in _CODES:
        if isinstance(error, kind):
            return fault(code, f"{doing}: {words}. ({error})")
    if isinstance(error, apsw.SQLError) and str(error).startswith("no such"):
        # Our statements are made from the schema that the file's version names.
        return fault(
            "store_corrupt", f"{doing}: the store lacks what its format has; restore it from a backup. ({error})"
        )
    return fault("internal", f"{doing}: {error}")


def _turn_off_memory_statistics() -> None:
    """They make every allocation take one lock of the process, which a forked child may inherit locked.

    SQLite must not be in use meanwhile. A program that uses it before us keeps what it has.
    """
    if not apsw.connections() and apsw.vfs_names()[:1] == ["unix"]:
        apsw.shutdown()
        apsw.config(apsw.SQLITE_CONFIG_MEMSTATUS, False)
        apsw.initialize()


_turn_off_memory_statistics()


class PooledConnection(apsw.Connection):
    """`user` is the thread that has the connection, 0 for none."""

    user: int = 0


class Waiting:
    """A busy handler: short naps, so that a queue of small commits moves at the speed of the commits."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self, tries: int) -> bool:
        now = monotonic_s()
        if tries == 0:
            self._since = now
        if now - self._since > BUSY_LIMIT_S:
            return False
        time.sleep(_BUSY_NAP_S)
        return True


def connect(path: str, *, durability: Durability, vfs: str | None = None) -> PooledConnection:
    connection = PooledConnection(path, vfs=vfs)
    connection.set_busy_handler(Waiting())
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    # Else a statement is planned anew whenever a value bound to it changes, which takes longer than running it.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)  # else a column that does not exist is taken for a text
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    connection.execute("PRAGMA cell_size_check = ON; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -16384")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_KEPT_BYTES}")
    connection.wal_autocheckpoint(_CHECKPOINT_PAGES)
    return connection


def prepare_file(
    connection: apsw.Connection,
    create: Sequence[str],
    *,
    directory: str,
    version: int = SCHEMA_VERSION,
    steps: Mapping[int, Step] = STEPS,
) -> None:
    """Bring the file to our schema. An up-to-date file is only looked at; a newer or foreign one is refused."""
    if _standing(connection) == (version, APPLICATION_ID):
        return
    with _alone_in(directory):
        found, application = _standing(connection)
        _refuse_what_is_not_ours(connection, found, application, newest=version)
        if application == 0:
            _refuse_unread(connection)
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.pragma("journal_mode", "wal")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if application == 0:
                _create(connection, create, version)
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
    """Copy the database beside itself, as `store.db.format-N`. Our transaction keeps every writer out meanwhile."""
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


def _standing(connection: apsw.Connection) -> tuple[int, int]:
    return int(connection.pragma("user_version")), int(connection.pragma("application_id"))


def _refuse_what_is_not_ours(connection: apsw.Connection, found: int, application: int, *, newest: int) -> None:
    if application == APPLICATION_ID and found > newest:
        raise newer_store(connection, found)
    used = found or application or connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    if used and application != APPLICATION_ID:
        raise fault("store_corrupt", "That database belongs to another program; choose another directory.")


def _refuse_unread(connection: apsw.Connection) -> None:
    """A file without our tables whose log holds commits is a store that lost its log, not a new one."""
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
def _alone_in(directory: str) -> Iterator[None]:
    """Only one process at a time makes or changes the format of the store in a directory."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_directory(directory: str, database: str, *, create: bool) -> None:
    """The directory is on a disk of this machine, and what we make there is ours alone. Looks before it makes."""
    path = os.path.join(directory, database)
    try:
        refuse_untrusted(directory)
        _refuse_remains(directory, path)
        if not create and not is_there(path):
            raise fault("store_unreadable", f"There is no store in {directory}. Check --store, --root, MULLIGAN_HOME.")
        _refuse_network(directory)
        if create and not os.path.exists(path):
            _make_directory(directory)
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _unusable(directory, error) from error


def refuse_untrusted(path: str) -> None:
    """Refuse what another user could have prepared: a directory or socket that is not ours, or that others can write.

    Raises `untrusted_owner`. The superuser may, and so may a caller who sets `MULLIGAN_TRUST_OWNER=1`.
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
    """Make it and what is missing above it. Each name is synced: SQLite syncs only the names inside the directory."""
    above, made = directory, list[str]()
    while not os.path.lexists(above):
        above = os.path.dirname(above)
        made.append(above)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    for parent in made:
        sync_path(parent)


def is_there(path: str) -> bool:
    """As `os.path.exists`, but a place that may not be looked into raises instead of passing for an empty one."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _refuse_remains(directory: str, path: str) -> None:
    """A store whose main file is gone or empty is no new one: SQLite would delete its log, and we forget its bodies."""
    log = path + "-wal"
    remains = os.path.isdir(os.path.join(directory, "blobs")) or (os.path.exists(log) and os.stat(log).st_size > 0)
    # Looked at last: a store that is being made beside us has its main file before anything else.
    if remains and not (os.path.exists(path) and os.stat(path).st_size):
        raise fault(
            "store_corrupt",
            f"The main file of the store in {directory} is gone, the rest is there. Restore it from a backup, "
            "or choose another directory with MULLIGAN_HOME or --store.",
        )


def _refuse_network(directory: str) -> None:
    """By the nearest directory that exists: what we would make would be on the same disk."""
    nearest = directory
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    kind = file_system_of(nearest)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise fault(
            "network_store",
            f"{directory} is on a network file system ({kind}), where SQLite's locks do not hold. "
            "Set MULLIGAN_HOME to a local disk, or use a postgresql:// store.",
        )


_WRONG_PLACE = (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError, IsADirectoryError)


def _unusable(directory: str, error: OSError) -> MulliganError:
    words = f"{directory} cannot be used as a store: {error.strerror}. Choose another with MULLIGAN_HOME or --store."
    if isinstance(
        error, PermissionError | FileNotFoundError | NotADirectoryError | FileExistsError | IsADirectoryError
    ):
        return fault("store_unreadable", words)
    return fault(fault_of_os_error(error, "").code, words, errno=error.errno)


def file_system_of(directory: str) -> str:
    """The type of the file system a directory is on; "" where the system does not say."""
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
