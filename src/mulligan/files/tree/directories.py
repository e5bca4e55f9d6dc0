"""Opening what lies below a directory that is already open, one name at a time and never through a symlink."""

from __future__ import annotations

import os
import stat
from types import TracebackType

from mulligan.values.paths import ROOT

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Non-blocking, so that a FIFO put in a file's place cannot hold us up."""
OPEN_MAX = 128
"""How many directories, one in the other, are kept open; of a longer chain the first ones and the last."""


class Handles:
    """The chain of directories from the root to the last one asked for, kept open for the next, nearby question."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._names: list[str] = []
        self._fds: list[int] = []
        self._path: str = ROOT

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._keep(0)

    def directory(self, path: str) -> int:
        """A descriptor of the directory, valid until the next call. Raises OSError, ELOOP or ENOTDIR for a symlink."""
        if path != self._path:
            names = [] if path == ROOT else path.split("/")
            self._keep(_common(names, self._names))
            self._path = ""  # no path at all until every name is open
            for name in names[len(self._names) :]:
                self._add(os.open(name, OPEN_DIRECTORY, dir_fd=self._last()), name)
            self._path = path
        return self._last()

    def open_directory(self, path: str) -> int:
        """A descriptor of one's own. Two that were duplicated share one place in the listing: threads that read it
        at a time would each get a part of the names."""
        return os.open(".", OPEN_DIRECTORY, dir_fd=self.directory(path))

    def open_file(self, path: str) -> int:
        """An own descriptor of a regular file. Raises OSError, also for anything else that goes by that name."""
        parent, _, name = path.rpartition("/")
        return open_regular(self.directory(parent or ROOT), name)[0]

    def size_bytes(self, path: str) -> int:
        """The size of a file; 0 when there is none."""
        parent, _, name = path.rpartition("/")
        try:
            return os.stat(name, dir_fd=self.directory(parent or ROOT), follow_symlinks=False).st_size
        except OSError:
            return 0

    def _last(self) -> int:
        return self._fds[-1] if self._fds else self._root_fd

    def _add(self, fd: int, name: str) -> None:
        if len(self._fds) == OPEN_MAX:
            os.close(self._fds.pop())
        self._fds.append(fd)
        self._names.append(name)

    def _keep(self, count: int) -> None:
        if OPEN_MAX <= count < len(self._names):
            count = OPEN_MAX - 1  # what comes between is no longer open
        for fd in reversed(self._fds[count:]):
            os.close(fd)
        del self._fds[count:], self._names[count:]
        self._path = "/".join(self._names) or ROOT


def _common(left: list[str], right: list[str]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def open_regular(dir_fd: int, name: str) -> tuple[int, os.stat_result]:
    """Open a regular file of a directory, with what the descriptor says of it. Raises OSError for anything else."""
    fd = os.open(name, OPEN_FILE, dir_fd=dir_fd)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status
    os.close(fd)
    raise OSError(0, "not a regular file", name)


def read_regular(dir_fd: int, name: str, max_bytes: int) -> bytes | None:
    """The bytes of a regular file of a directory; None when there is none, it cannot be read or it is too big."""
    try:
        fd, status = open_regular(dir_fd, name)
    except OSError:
        return None
    try:
        return None if status.st_size > max_bytes else os.read(fd, max_bytes)
    except OSError:
        return None
    finally:
        os.close(fd)
