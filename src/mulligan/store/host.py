"""Which machine this is: the id of its present boot, and the host id that a store keeps for it.

A host id says whose paths a root's path belongs to. It is `MULLIGAN_HOST`, else a random id that the store keeps for
each machine id. Containers may have another machine id than the machine they run on, or none. All of them have the boot
id of the one kernel, which the store keeps too, so the processes of one boot agree on their host id.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from hashlib import sha256

from mulligan.store.migrations import SCHEMA_VERSION, program_name
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.ids import OwnerId, SystemIds, parse_user_id

_HOST_OF_MACHINE, _HOST_OF_BOOT = "host_of_machine:", "host_of_boot:"
_PROCESS = "process:"
_MACHINE_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")


def boot_id() -> str:
    """Names this run of the machine; "" where the system does not say."""
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
    """The host id of this machine as far as the store knows it; "" if the store has not seen this machine."""
    chosen = environ.get("MULLIGAN_HOST")
    if chosen:
        return parse_user_id(chosen, "MULLIGAN_HOST")
    for name in _names():
        row = tx.get(META, name)
        if row is not None:
            return row.value
    # A container without a machine id may be the first to come after a reboot. Only a copied store has two hosts.
    hosts = {row.value for row in tx.select(META) if row.key.startswith(_HOST_OF_MACHINE)}
    return hosts.pop() if len(hosts) == 1 and not _machine_id() else ""


def host_here(tx: Tx, environ: Mapping[str, str]) -> str:
    """The host id of this machine. The transaction may write: a machine that the store has not seen gets an id."""
    host = known_host(tx, environ) or SystemIds().new()
    for name in [] if environ.get("MULLIGAN_HOST") else _names():
        if tx.get(META, name) != MetaRow(name, host):
            _forget_boots(tx, host)
            tx.put(META, MetaRow(name, host))
    return host


def _forget_boots(tx: Tx, host: str) -> None:
    """A host has one boot at a time."""
    for row in tx.select(META):
        if row.key.startswith(_HOST_OF_BOOT) and row.value == host:
            tx.delete(META, row.key)


def _names() -> list[str]:
    """The rows that say which host this is. The machine id itself is confidential, so the store has only its hash."""
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


def note_process(tx: Tx, owner: int, is_alive: Callable[[OwnerId], bool | None]) -> None:
    """Which format a process works with, for `doctor`. Rows of processes that have ended go."""
    for row in _process_rows(tx):
        if is_alive(OwnerId(int(row.key.removeprefix(_PROCESS)))) is False:
            tx.delete(META, row.key)
    tx.put(META, MetaRow(f"{_PROCESS}{owner}", f"{SCHEMA_VERSION} {os.getpid()} {program_name()}"))


def older_processes(tx: Tx, is_alive: Callable[[OwnerId], bool | None]) -> list[str]:
    """The living processes whose version of Mulligan reads only older formats than ours, each in words."""
    found = []
    for row in _process_rows(tx):
        reads, pid, program = row.value.split(" ", 2)
        if int(reads) < SCHEMA_VERSION and is_alive(OwnerId(int(row.key.removeprefix(_PROCESS)))):
            found.append(f"{program} (process {pid}) reads formats up to {reads}, and the store has {SCHEMA_VERSION}")
    return found


def _process_rows(tx: Tx) -> list[MetaRow]:
    return tx.select(META, between=("key", _PROCESS, _PROCESS[:-1] + ";"))
