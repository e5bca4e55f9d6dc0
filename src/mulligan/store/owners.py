"""Who is alive: each process holds a POSIX lock on its own byte of one file for as long as it lives.

No pids: they are reused and mean nothing in another container. The kernel drops the lock however the process ends. A
process's POSIX locks on a file vanish when *any* of its handles on that file closes, so the file is opened once per
process and never closed; a forked child holds none of its parent's locks and opens the file anew.
"""

from __future__ import annotations

import errno
import fcntl
import os

from mulligan.store.fork_locks import fork_safe_lock

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
        """Lock our byte. Numbers are never reused, so nobody else can hold it."""
        fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        self._mine.add(number)

    def is_held(self, number: int) -> bool:
        """Does any living process hold that byte? Asking leaves nothing locked.

        Asked with a shared lock, so that two who ask at once do not take each other for the owner.
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
    """The one handle of this process on the lock file at `path`, created if need be."""
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
    """What file the path names, found without opening it: closing a second handle would drop our locks."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (status.st_dev, status.st_ino)
