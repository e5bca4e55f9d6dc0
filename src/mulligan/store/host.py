"""Which machine this is (its boot id and its host id in a store), and which processes of it are alive.

A host id says on which machine a root's path is. It is `MULLIGAN_HOST`, else a random id that the store keeps for each
machine id. A container may have another machine id than the machine it runs on, or none. But all containers have the
boot id of the one kernel, which the store keeps too, so the processes of one boot agree on their host id.

Each process holds a POSIX lock on its own byte of one file while it lives. Mulligan does not use process ids: they are
reused, and mean nothing in another container. The kernel drops the lock however the process ends. A process loses its
POSIX locks on a file when *any* of its handles on that file is closed, so each process opens the file once and never
closes it; a forked child holds none of its parent's locks and opens the file again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Mapping
from hashlib import sha256

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.migrations import SCHEMA_VERSION, program_name
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.ids import OwnerId, SystemIds, parse_user_id

_HOST_OF_MACHINE, _HOST_OF_BOOT = "host_of_machine:", "host_of_boot:"
_PROCESS = "process:"
SHARED = "shared"
"""The row of META that says that other machines use this store."""

_MACHINE_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")


def boot_id() -> str:
    """The id of the present boot; "" if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return _boot_time()


def _boot_time() -> str:
    """The start of the machine on systems that keep it as a `kern.boottime` value."""
    ask = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    answer, size = (ctypes.c_int64 * 2)(), ctypes.c_size_t(16)
    if ask is None or ask(b"kern.boottime", ctypes.byref(answer), ctypes.byref(size), None, 0) != 0:
        return ""
    return f"boottime:{answer[0]}"


def known_host(tx: Tx, environ: Mapping[str, str]) -> str:
    """The host id that the store has for this machine; "" if the store has not seen this machine."""
    chosen = environ.get("MULLIGAN_HOST")
    if chosen:
        return parse_user_id(chosen, "MULLIGAN_HOST")
    for name in _names():
        row = tx.get(META, name)
        if row is not None:
            return row.value
    # A container without a machine id may be the first process after a reboot. Only a copied store has two hosts.
    if tx.get(META, SHARED) is not None:
        return ""
    hosts = {row.value for row in tx.select(META) if row.key.startswith(_HOST_OF_MACHINE)}
    return hosts.pop() if len(hosts) == 1 and not _machine_id() else ""


def current_host(tx: Tx, environ: Mapping[str, str]) -> str:
    """The host id of this machine. It writes: a machine that the store has not seen gets a new id."""
    host = known_host(tx, environ) or SystemIds().new()
    for name in [] if environ.get("MULLIGAN_HOST") else _names():
        if tx.get(META, name) != MetaRow(name, host):
            # A host has one boot at a time, so the rows of earlier boots go.
            for row in tx.select(META):
                if row.key.startswith(_HOST_OF_BOOT) and row.value == host:
                    tx.delete(META, row.key)
            tx.put(META, MetaRow(name, host))
    return host


def _names() -> list[str]:
    """Keys of the rows that name this host. The machine id is confidential, so the store has only a hash of it."""
    machine, boot = _machine_id(), boot_id()
    of_machine = _HOST_OF_MACHINE + sha256(b"mulligan host\n" + machine.encode()).hexdigest()[:32]
    return [*([of_machine] if machine else []), *([_HOST_OF_BOOT + boot] if boot else [])]


def _machine_id() -> str:
    for name in _MACHINE_ID_FILES:
        try:
            with open(name, encoding="ascii") as file:
                text = file.read().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text and text != "uninitialized":
            return text
    return ""


def record_process(tx: Tx, owner: int, is_alive: Callable[[OwnerId], bool | None]) -> None:
    """Record which format this process reads, for `doctor`, and delete the rows of processes that have ended."""
    for row in _process_rows(tx):
        if is_alive(OwnerId(int(row.key.removeprefix(_PROCESS)))) is False:
            tx.delete(META, row.key)
    tx.put(META, MetaRow(f"{_PROCESS}{owner}", f"{SCHEMA_VERSION} {os.getpid()} {program_name()}"))


def older_processes(tx: Tx, is_alive: Callable[[OwnerId], bool | None]) -> list[str]:
    """The living processes that read only older formats than this one, each as a phrase for a person."""
    found = []
    for row in _process_rows(tx):
        reads, pid, program = row.value.split(" ", 2)
        if int(reads) < SCHEMA_VERSION and is_alive(OwnerId(int(row.key.removeprefix(_PROCESS)))):
            found.append(f"{program} (process {pid}) reads formats up to {reads}, and the store has {SCHEMA_VERSION}")
    return found


def _process_rows(tx: Tx) -> list[MetaRow]:
    return tx.select(META, between=("key", _PROCESS, _PROCESS[:-1] + ";"))


_lock = fork_safe_lock()
_open: dict[tuple[int, int], OwnerBytes] = {}
_abandoned: list[dict[tuple[int, int], OwnerBytes]] = []
_pid = os.getpid()


class OwnerBytes:
    """The lock file of one store, as this process holds it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._mine: set[int] = set()

    def hold(self, number: int) -> None:
        """Lock our byte. Numbers are never reused, so no other process can hold it."""
        fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        self._mine.add(number)

    def is_held(self, number: int) -> bool:
        """Whether a living process holds that byte. Nothing stays locked.

        It tries a shared lock, so that two processes that test the byte at once do not mistake each other for the
        owner.
        """
        if number in self._mine:
            return True
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return True
            raise
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, number)
        return False


def owner_bytes(path: str) -> OwnerBytes:
    """This process's only handle on the lock file at `path`. The file is created if it does not exist."""
    global _open, _pid
    with _lock:
        if os.getpid() != _pid:
            _abandoned.append(_open)
            _open, _pid = {}, os.getpid()
        known = _open.get(_identity(path))
        if known is None:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            known = _open[_identity(path)] = OwnerBytes(handle)
        return known


def _identity(path: str) -> tuple[int, int]:
    """Device and inode of the file, without opening it: closing a second handle would drop our locks."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (status.st_dev, status.st_ino)
