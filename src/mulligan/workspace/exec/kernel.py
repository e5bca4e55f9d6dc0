"""The Linux system calls that Python has no name for, by ctypes. One door each; failures are OSError.

Both the launcher's bare interpreter and the caller's process import this, so it loads nothing heavy.
"""

from __future__ import annotations

import ctypes
import os

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

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: object) -> int:
    """A raw system call; integers are passed as longs so that none is cut to 32 bits."""
    longs = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *longs))


def prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags))


def mount(source: bytes, target: bytes, kind: bytes, *, flags: int = 0, data: bytes = b"") -> None:
    _checked(_libc.mount(source, target, kind, ctypes.c_ulong(flags), data or None))


def set_mount_read_only(path: bytes, *, read_only: bool, recursive: bool) -> None:
    """mount_setattr(2): the one call that makes a whole tree of mounts read-only."""
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
    """Reads another process's memory by process_vm_readv; nothing is kept open, so an exec cannot mislead it.

    For one thread: the buffer and vectors are made once, because this is on the way of every stop.
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
        """In two pieces, split at the page's end, so that a missing second page does not lose the first."""
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
