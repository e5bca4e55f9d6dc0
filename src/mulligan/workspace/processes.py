"""Which processes work in a folder: what a finished command has left running there may still write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from mulligan.values.paths import is_inside

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OURS = b"mulligan"


def left_running(folder: bytes, *, since_s: float) -> list[int]:
    """Processes of this user that work in the folder and began at or after `since_s`, in seconds since the boot.

    Hooks of Mulligan run there for a moment, too; they do not count. Without /proc the list is empty.
    """
    with suppress(OSError):
        return [pid for pid in _pids() if _began_s(pid) >= since_s and _works_in(pid, folder)]
    return []


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)


def _began_s(pid: int) -> float:
    """When a process began; long ago for one that is gone or only waits to be buried."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    # The kernel rounds down to a tick; one tick more, so that a process of the very first tick counts.
    return 0.0 if fields[0] in (b"Z", b"X") else (int(fields[19]) + 1) / _TICKS_PER_S


def _works_in(pid: int, folder: bytes) -> bool:
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
        return _OURS not in words and is_inside(os.readlink(f"/proc/{pid}/cwd".encode()), folder)
    except OSError:
        return False
