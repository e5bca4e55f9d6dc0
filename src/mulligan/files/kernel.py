"""What the kernel offers beyond Python's `os`: resolving beneath a handle, exchanging names, asking who writes.

Each function says with an OSError what went wrong; `ENOSYS` and `EINVAL` mean that this system does not have it, and
callers know another way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import sys
from functools import cache

LINUX = sys.platform == "linux"

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_RENAME_SWAP_MAC = 2
_RENAME_EXCL_MAC = 4

_SYS_OPENAT2 = 437
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_GETVERSION = 0x80087601
_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_STATX_BYTES, _STATX_BTIME_AT = 256, 80
_STATFS_BYTES = 256
_OVERLAYFS_MAGIC = 0x794C7630
_EXT_MAGIC = 0xEF53
_FS_CASEFOLD_FLAG = 0x40000000
_PC_CASE_SENSITIVE_MAC = 11

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _failed(path: bytes) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), os.fsdecode(path))


def open_beneath(directory: int, path: bytes, flags: int, *, resolve: int) -> int:
    """`openat2`: open `path` so that resolution never leaves `directory`, whatever anybody renames meanwhile."""
    if not LINUX:
        raise OSError(errno.ENOSYS, "openat2 is a Linux system call")
    how = _OpenHow(flags=flags | os.O_CLOEXEC, mode=0, resolve=resolve)
    handle: int = _libc.syscall(_SYS_OPENAT2, directory, path, ctypes.byref(how), ctypes.sizeof(how))
    if handle < 0:
        raise _failed(path)
    return handle


def exchange(directory: int, one: bytes, other: bytes) -> None:
    """Swap what two names in a directory stand for, in one step that nobody can see half done."""
    _rename(directory, one, other, flags=_RENAME_EXCHANGE if LINUX else _RENAME_SWAP_MAC)


def rename_to_free(directory: int, old: bytes, new: bytes) -> None:
    """Rename, unless something already has the new name (EEXIST)."""
    _rename(directory, old, new, flags=_RENAME_NOREPLACE if LINUX else _RENAME_EXCL_MAC)


def _rename(directory: int, old: bytes, new: bytes, *, flags: int) -> None:
    function = _libc.renameat2 if LINUX else _libc.renameatx_np
    if function(directory, old, directory, new, ctypes.c_uint(flags)) != 0:
        raise _failed(old)


def nobody_writes(handle: int) -> bool | None:
    """Whether no process has this file open for writing. None: the system cannot say.

    A read lease is granted only then. It is given back at once; a writer who opened the file by a name it still had
    makes the kernel break the lease first, which the second look sees. One who has looked up the name and is kept from
    opening the file until we are done is seen by nobody: on a machine under heavy load, one save in ten thousand of
    somebody who does nothing but save.
    """
    if not LINUX:
        return None
    try:
        # The kernel tells of a broken lease by SIGIO, which ends a process; SIGURG, unless asked for, does nothing.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    quiet: bool = fcntl.fcntl(handle, fcntl.F_GETLEASE) == fcntl.F_RDLCK
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return quiet


def generation_of(handle: int) -> int:
    """What tells an inode from an earlier one of the same number; 0 where the file system does not say."""
    try:
        return int.from_bytes(fcntl.ioctl(handle, _FS_IOC_GETVERSION, bytes(8))[:4], sys.byteorder)
    except OSError:
        return 0


def folds_case(directory: int) -> bool:
    """Whether names in this directory differ only up to case."""
    if not LINUX:
        return os.fpathconf(directory, _PC_CASE_SENSITIVE_MAC) == 0
    try:
        flags = fcntl.ioctl(directory, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        return False
    return bool(int.from_bytes(flags[:4], sys.byteorder) & _FS_CASEFOLD_FLAG)


def real_path_of(handle: int) -> bytes:
    """The present absolute path of an open directory."""
    if LINUX:
        return os.readlink(b"/proc/self/fd/%d" % handle)
    buffer = fcntl.fcntl(handle, 50, bytes(1024))  # F_GETPATH
    return buffer.split(b"\0", 1)[0]


def mount_of(handle: int) -> int:
    """The mount that an open file lies on; two mounts of one file system differ. Without /proc, its device."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", "rb") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(b"mnt_id:"))
    except (OSError, StopIteration):
        return os.fstat(handle).st_dev


def birth_ns_of(handle: int) -> int:
    """When an open file was made. 0 where the file system does not say."""
    ask = getattr(_libc, "statx", None)
    if ask is None:
        return int(getattr(os.fstat(handle), "st_birthtime", 0.0) * 1e9)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if ask(handle, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_BTIME), answer) != 0:
        return 0
    mask, seconds, nanoseconds = (
        struct.unpack_from("=I", answer)[0],
        *struct.unpack_from("=qI", answer, _STATX_BTIME_AT),
    )
    return seconds * 1_000_000_000 + nanoseconds if mask & _STATX_BTIME else 0


def is_on_overlay(handle: int) -> bool:
    """Whether an open file is on an overlay file system, such as the root of most containers."""
    return _file_system_of(handle) == _OVERLAYFS_MAGIC


def keeps_order(handle: int) -> bool:
    """Whether the file system of an open file writes the changes of its names in order. Ext4 does so by its journal."""
    return _file_system_of(handle) != _EXT_MAGIC or _has_journal(os.fstat(handle).st_dev)


@cache
def _has_journal(device: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
        return any(journal.rpartition("-")[0] == name for journal in os.listdir("/proc/fs/jbd2"))
    except OSError:
        return False


def _file_system_of(handle: int) -> int:
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if not LINUX or _libc.fstatfs(handle, answer) != 0:
        return 0
    return int(struct.unpack_from("=l" if ctypes.sizeof(ctypes.c_long) == 4 else "=q", answer)[0])
