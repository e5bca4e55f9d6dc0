"""From the words of a stopped system call to a real path, as the stopped process would find it.

The kernel does the walking: the parent is opened through /proc/PID/{root,cwd,fd/N}, so its root, its working directory,
`..` and symbolic links mean what they mean to the process, and the descriptor's own name is the real path. That is
three system calls, cheap enough that nothing is cached and nothing can be stale.
"""

from __future__ import annotations

import errno
import os
import re
import stat

AT_FDCWD = 0xFFFFFF9C
_OPEN_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC if hasattr(os, "O_PATH") else 0
_DOTS = (b"", b".", b"..")
_FD_FOLDER = re.compile(rb"/proc/(\d+)(?:/task/\d+)?/fd")
_STANDARD = {b"stdin": b"0", b"stdout": b"1", b"stderr": b"2"}
_DELETED = b" (deleted)"
_MISSING_MAX = 10_000


class Refuse(Exception):
    """The call must not continue: what it would change cannot be found out. It fails with `errno`."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.errno = number


class Resolver:
    """Finds real paths for one root. `foreign` collects paths that other mounts hide from us.

    `missing` collects names whose folder was not there: such a call fails, unless another process or thread of the
    command makes the folder between our look and the kernel's.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._prefix = root if root.endswith(b"/") else root + b"/"
        self._known_folders: dict[bytes, tuple[int, int]] = {}
        self._own_mounts = os.stat("/proc/self/ns/mnt").st_ino
        self._device = os.stat(root).st_dev
        self._own_pid = b"%d" % os.getpid()
        self.foreign: set[bytes] = set()
        self.missing: set[bytes] = set()

    def inside(self, path: bytes) -> bool:
        return path.startswith(self._prefix) or path == self._root

    def name(self, pid: int, dirfd: int, raw: bytes, *, follow: bool) -> bytes | None:
        """The absolute real path the call means, inside the root or not; None if the call is bound to fail."""
        if not raw:
            return None
        head, _, last = raw.rstrip(b"/").rpartition(b"/")
        start = _start_of(pid, dirfd, raw)
        if last in _DOTS:
            return self._folder(pid, start + raw)
        parent = self._folder(pid, start + head)
        if parent is None:
            self._note_missing(start, raw)
            return None
        path = parent + last if parent == b"/" else b"%b/%b" % (parent, last)
        return self._followed(pid, parent, last, path) if follow else path

    def _note_missing(self, start: bytes, raw: bytes) -> None:
        if len(self.missing) < _MISSING_MAX:
            try:
                self.missing.add(os.path.join(os.readlink(start.rstrip(b"/")), raw))
            except OSError:
                return

    def late(self) -> list[bytes]:
        """The names whose folder was not there, and that are there now after all."""
        found = [os.path.join(os.path.realpath(os.path.dirname(one)), os.path.basename(one)) for one in self.missing]
        return [path for path in found if self.inside(path) and os.path.lexists(path)]

    def descriptor(self, pid: int, fd: int) -> bytes | None:
        """What an open descriptor stands for; None for pipes, sockets and deleted files."""
        try:
            path = os.readlink(b"/proc/%d/fd/%d" % (pid, fd))
        except PermissionError as error:
            raise Refuse(errno.EIO) from error
        except OSError:
            return None
        if not path.startswith(b"/") or (path.endswith(_DELETED) and not os.path.lexists(path)):
            return None
        return path

    def _folder(self, pid: int, path: bytes) -> bytes | None:
        try:
            fd = os.open(path, _OPEN_PARENT)
        except PermissionError as error:
            raise Refuse(errno.EACCES) from error
        except (OSError, ValueError):
            return None
        try:
            real = os.readlink(b"/proc/self/fd/%d" % fd)
            status = os.fstat(fd)
        finally:
            os.close(fd)
        self._check_mounts(pid, real, status)
        return real

    def _check_mounts(self, pid: int, real: bytes, status: os.stat_result) -> None:
        """A process with mounts of its own may mean another folder by this name, or ours by another."""
        identity = (status.st_dev, status.st_ino)
        if self.inside(real):
            if self._known_folders.get(real) == identity:
                return
            if _identity(real) == identity:
                self._known_folders[real] = identity
            else:
                self.foreign.add(real)
        elif status.st_dev == self._device and _mounts_of(pid) != self._own_mounts and _identity(real) != identity:
            self.foreign.add(real)

    def _followed(self, pid: int, parent: bytes, last: bytes, path: bytes) -> bytes | None:
        if parent.startswith(b"/proc/") or parent == b"/dev":
            return self._magic(pid, parent, last, path)
        try:
            is_link = stat.S_ISLNK(os.lstat(path).st_mode)
        except OSError:
            return path
        return os.path.realpath(path) if is_link else path

    def _magic(self, pid: int, parent: bytes, last: bytes, path: bytes) -> bytes | None:
        """/dev/stdout and /proc/self/fd/N name whatever the process has open; `self` there is us, so put it right."""
        if parent == b"/dev":
            number: bytes | None = _STANDARD.get(last)
            owner = b"%d" % pid
        else:
            match = _FD_FOLDER.fullmatch(parent)
            number = last if match and last.isdigit() else None
            owner = b"%d" % pid if match and match[1] == self._own_pid else match[1] if match else b""
        return path if number is None else self.descriptor(int(owner), int(number))


def _start_of(pid: int, dirfd: int, raw: bytes) -> bytes:
    if raw.startswith(b"/"):
        return b"/proc/%d/root" % pid
    return b"/proc/%d/cwd/" % pid if dirfd == AT_FDCWD else b"/proc/%d/fd/%d/" % (pid, dirfd)


def _identity(path: bytes) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _mounts_of(pid: int) -> int:
    try:
        return os.stat(b"/proc/%d/ns/mnt" % pid).st_ino
    except OSError:
        return 0
