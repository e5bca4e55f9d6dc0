"""The SQLite file itself: where it may live, how a connection to it is set up, what its errors mean to us."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import apsw

from mulligan.store.protocol import Durability
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError, fault, fault_of_os_error

APPLICATION_ID = 0x4D4C4721  # "MLG!"
SCHEMA_VERSION = 1
BUSY_LIMIT_S = 30.0
_BUSY_NAP_S = 0.0004
_CHECKPOINT_PAGES = 16_384

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
    (apsw.CorruptError, "store_corrupt", "the store is damaged; run `mulligan verify` and restore it from a backup"),
    (apsw.NotADBError, "store_corrupt", "that file is not a Mulligan store"),
    (apsw.FullError, "no_space", "the disk is full; free some space and try again"),
    (apsw.ReadOnlyError, "read_only_disk", "the store's disk is read-only"),
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
    return fault("internal", f"{doing}: {error}")


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


def connect(path: str, *, durability: Durability, vfs: str | None = None) -> apsw.Connection:
    connection = apsw.Connection(path, vfs=vfs)
    connection.set_busy_handler(Waiting())
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    connection.execute("PRAGMA cell_size_check = ON; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -16384")
    connection.wal_autocheckpoint(_CHECKPOINT_PAGES)
    return connection


def prepare_file(connection: apsw.Connection, create: Sequence[str]) -> None:
    """Bring the file to our schema. An up-to-date file is only looked at; a newer or foreign one is refused."""
    version, application = (connection.pragma(name) for name in ("user_version", "application_id"))
    if version == SCHEMA_VERSION and application == APPLICATION_ID:
        return
    if application == APPLICATION_ID and version > SCHEMA_VERSION:
        raise fault(
            "store_newer",
            f"This store has format {version}; this Mulligan reads up to {SCHEMA_VERSION}. Upgrade Mulligan.",
        )
    if (version or application) and application != APPLICATION_ID:
        raise fault("store_corrupt", "That database belongs to another program; choose another directory.")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.pragma("journal_mode", "wal")
    with connection:
        for statement in create:
            connection.execute(statement)
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", SCHEMA_VERSION)


def check_directory(directory: str, database: str, *, create: bool) -> None:
    """The directory exists, is ours alone, and is on a disk of this machine."""
    try:
        if create:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        elif not os.path.exists(os.path.join(directory, database)):
            raise fault("store_unreadable", f"There is no store in {directory}.")
        kind = file_system_of(directory)
    except OSError as error:
        raise _unusable(directory, error) from error
    if kind in _NETWORK_FILE_SYSTEMS:
        raise fault(
            "network_store",
            f"{directory} is on a network file system ({kind}), where SQLite's locks do not hold. "
            "Set MULLIGAN_HOME to a local disk, or use a postgresql:// store.",
        )


def _unusable(directory: str, error: OSError) -> MulliganError:
    if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
        words = (
            f"{directory} cannot be used as a store: {error.strerror}. Choose another with MULLIGAN_HOME or --store."
        )
        return fault("store_unreadable", words)
    return fault_of_os_error(error, f"Opening the store in {directory}")


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
