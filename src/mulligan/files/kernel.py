"""Linux features without a function in Python's `os`: resolving beneath a handle, exchanging names, checking for
writers.

Failures are OSError; `ENOSYS` and `EINVAL` mean that this system lacks the feature, and the callers then use another
way. The system calls go through ctypes. Both the launcher's bare interpreter and the caller's process import this
module, so it imports nothing slow.
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
    """`openat2`: open `path` so that resolution never leaves `directory`, even if another process renames something."""
    if not LINUX:
        raise OSError(errno.ENOSYS, "openat2 is a Linux system call")
    how = _OpenHow(flags=flags | os.O_CLOEXEC, mode=0, resolve=resolve)
    handle: int = _libc.syscall(_SYS_OPENAT2, directory, path, ctypes.byref(how), ctypes.sizeof(how))
    if handle < 0:
        raise _failed(path)
    return handle


def exchange(directory: int, one: bytes, other: bytes) -> None:
    """Exchange two names in a directory in one step, so that no process sees it half done."""
    _rename(directory, one, other, flags=_RENAME_EXCHANGE if LINUX else _RENAME_SWAP_MAC)


def rename_to_free(directory: int, old: bytes, new: bytes) -> None:
    """Rename, unless something already has the new name (EEXIST)."""
    _rename(directory, old, new, flags=_RENAME_NOREPLACE if LINUX else _RENAME_EXCL_MAC)


def _rename(directory: int, old: bytes, new: bytes, *, flags: int) -> None:
    function = _libc.renameat2 if LINUX else _libc.renameatx_np
    if function(directory, old, directory, new, ctypes.c_uint(flags)) != 0:
        raise _failed(old)


def nobody_writes(handle: int) -> bool | None:
    """Whether no process has this file open for writing. None: the system cannot tell.

    The kernel grants a read lease only then. Mulligan releases it at once. If a writer opened the file by its old name,
    the kernel breaks the lease first, which the second check sees. A writer that has looked up the name, but opens the
    file only after the check, is missed: on a machine under heavy load, one save in ten thousand of a program that does
    nothing but save.
    """
    if not LINUX:
        return None
    try:
        # The kernel reports a broken lease by SIGIO, which ends a process; SIGURG does nothing unless a program handles
        # it.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    quiet: bool = fcntl.fcntl(handle, fcntl.F_GETLEASE) == fcntl.F_RDLCK
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return quiet


def generation_of(handle: int) -> int:
    """The generation of an inode, which differs from an earlier inode of the same number; 0 if the file system has
    none.
    """
    try:
        return int.from_bytes(fcntl.ioctl(handle, _FS_IOC_GETVERSION, bytes(8))[:4], sys.byteorder)
    except OSError:
        return 0


def folds_case(directory: int) -> bool:
    """Whether names in this directory that differ only in case are the same file."""
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
    """The mount of an open file; two mounts of one file system differ. Without /proc, its device."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", "rb") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(b"mnt_id:"))
    except (OSError, StopIteration):
        return os.fstat(handle).st_dev


def birth_ns_of(handle: int) -> int:
    """The birth time of an open file; 0 if the file system has none."""
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
    """Whether the file system of an open file writes name changes to disk in order, as ext4 does with a journal."""
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


PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

MOUNT_ATTR_RDONLY = 0x1
AT_RECURSIVE = 0x8000
AT_FDCWD = -100

SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_NEW_LISTENER = 1 << 3
SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV = 1 << 5

SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE_RULESET = 444
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446
SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}

MACHINE = os.uname().machine


def syscall(number: int, *arguments: object) -> int:
    """Make a raw system call; integers are passed as longs so that none is cut to 32 bits."""
    longs = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *longs))


def prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags))


def mount(source: bytes, target: bytes, kind: bytes, *, flags: int = 0, data: bytes = b"") -> None:
    _checked(_libc.mount(source, target, kind, ctypes.c_ulong(flags), data or None))


def set_mount_read_only(path: bytes, *, read_only: bool, recursive: bool) -> None:
    """mount_setattr(2): the only call that makes a whole tree of mounts read-only."""
    bit = MOUNT_ATTR_RDONLY
    attr = (ctypes.c_uint64 * 4)(bit if read_only else 0, 0 if read_only else bit, 0, 0)
    how = AT_RECURSIVE if recursive else 0
    syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, how, ctypes.byref(attr), ctypes.sizeof(attr))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def install_filter(code: bytes, flags: int) -> int:
    """seccomp(2) with a BPF program of 8-byte instructions; the listener's descriptor if `flags` asks for one."""
    program = _FilterProgram(len(code) // 8, code)
    number = SYS_SECCOMP.get(MACHINE)
    if number is None:
        raise OSError(38, f"no seccomp table for {MACHINE}")
    return syscall(number, SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(program))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TEXT_MAX_BYTES = 4096


class MemoryReader:
    """Reads another process's memory by process_vm_readv. It holds nothing open, so an exec of that process cannot
    mislead it.

    For one thread: the buffer and vectors are made once, because every stopped system call uses them.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_TEXT_MAX_BYTES)
        self._local = _Vector(ctypes.addressof(self._buffer), _TEXT_MAX_BYTES)
        self._remote = (_Vector * 2)()
        self._first, self._second = self._remote
        self._read = _libc.process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._local_ref = ctypes.byref(self._local)
        self._remote_ref = ctypes.byref(self._remote)
        self._one = ctypes.c_ulong(1)
        self._two = ctypes.c_ulong(2)
        self._none = ctypes.c_ulong(0)

    def text(self, pid: int, address: int) -> bytes:
        """The NUL-terminated string there. Raises OSError when it cannot be read or does not end in 4096 bytes."""
        got = self._fill(pid, address, _TEXT_MAX_BYTES)
        text = self._buffer.value
        if len(text) >= got:
            raise OSError(14, os.strerror(14))
        return text

    def bytes(self, pid: int, address: int, size: int) -> bytes:
        """Up to `size` bytes; fewer where the next page is not there."""
        got = self._fill(pid, address, size)
        return self._buffer.raw[:got]

    def _fill(self, pid: int, address: int, size: int) -> int:
        """Read in two pieces, split at the page's end, so that a missing second page does not lose the first."""
        in_page = min(size, _PAGE_BYTES - address % _PAGE_BYTES)
        self._first.base, self._first.length = address, in_page
        self._second.base, self._second.length = address + in_page, size - in_page
        self._local.length = size
        return _checked(self._read(pid, self._local_ref, self._one, self._remote_ref, self._two, self._none))


def inotify_init() -> int:
    return _checked(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))


def inotify_add_watch(fd: int, path: bytes, mask: int) -> int:
    return _checked(_libc.inotify_add_watch(fd, path, ctypes.c_uint32(mask)))


def inotify_rm_watch(fd: int, watch: int) -> None:
    _checked(_libc.inotify_rm_watch(fd, watch))
