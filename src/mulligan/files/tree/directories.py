"""Opens what is below an open directory, one name at a time and never through a symlink, and says when a stamp is
trusted.

Adding, removing or renaming an entry sets a directory's change time. So a listing is valid while device, inode and
times stay the same, with two exceptions. A change within one tick of the clock after the listing leaves the same time:
so a listing is trusted only if the directory had not changed for longer than a tick when it was made. And network file
systems answer from caches of their own: only local file systems are trusted, others are listed each time.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple

from mulligan.values.paths import ROOT

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, so that opening a FIFO in a file's place does not wait for a writer; and never our terminal.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# The number of nested directories that stay open; of a longer chain the first ones and the last.
OPEN_MAX = 128


class Handles:
    """The chain of directories from the root to the last one, kept open because the next request is often nearby."""

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
            self._path = ""  # The chain has no path until every name is open.
            for name in names[len(self._names) :]:
                self._add(os.open(name, OPEN_DIRECTORY, dir_fd=self._last()), name)
            self._path = path
        return self._last()

    def open_directory(self, path: str) -> int:
        """A new descriptor of the directory.

        Duplicated descriptors share one position in the listing: threads that read them at the same time would each get
        a part of the names.
        """
        return os.open(".", OPEN_DIRECTORY, dir_fd=self.directory(path))

    def open_file(self, path: str) -> int:
        """A new descriptor of a regular file. Raises OSError for anything else."""
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
            count = OPEN_MAX - 1  # The directories in between are not open any more.
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
    """Open a regular file of a directory. Answers its status too. Raises OSError for anything else."""
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


_LOCAL = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"])

_FINE_REST_NS = 100_000_000
_COARSE_REST_NS = 2_500_000_000
# A change time with digits below this comes from a file system with nanoseconds, whose ticks are 10 ms or less.
_FINE_GRAIN_NS = 1_000_000


class Stamp(NamedTuple):
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def was_at_rest(stamp: Stamp, now_ns: int) -> bool:
    """Whether every change after `now_ns` gives another stamp."""
    newest = max(stamp.ctime_ns, stamp.mtime_ns)
    needed = _COARSE_REST_NS if stamp.ctime_ns % _FINE_GRAIN_NS == 0 else _FINE_REST_NS
    return now_ns - newest > needed


def is_local(fd: int) -> bool:
    """Whether an open directory is on a file system whose times can be trusted. False if that is unknown."""
    mount_id = _mount_id(fd)
    return mount_id is not None and _file_systems(mounts()).get(mount_id) in _LOCAL


def _mount_id(fd: int) -> str | None:
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
            found = [line.split()[1] for line in lines if line.startswith("mnt_id:")]
    except OSError:
        return None
    return found[0] if found else None


def mounts() -> str:
    """The kernel's table of mounts for this process; empty if the system has none."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


@lru_cache(maxsize=2)
def _file_systems(mounts: str) -> dict[str, str]:
    """Type of file system by mount id. The type is the first word after the lone dash."""
    rows = [line.split(" - ", 1) for line in mounts.splitlines()]
    return {row[0].split(" ", 1)[0]: row[1].split(" ", 1)[0] for row in rows if len(row) == 2}
