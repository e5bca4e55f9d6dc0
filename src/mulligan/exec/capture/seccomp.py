"""The classic BPF programs that a command runs under. Pure: a machine's name in, bytes out.

1. The filter kills a program of another instruction set (32-bit, x32), because its calls have other numbers.
2. It denies io_uring, which would do file work that no filter sees, and writing by file handle.
3. Without network, it allows only pairs of connected sockets.
4. The calls of the table `CALLS` wait for the supervisor; an open call only if its flags can change something.

`CALLS` has every system call that changes a file system through a path, and every call by which a command can ask
another program to do so: the numbers, and which arguments are paths. The filter stops exactly these calls, and the
supervisor reads exactly these arguments. Calls on a descriptor that was opened for writing (write, ftruncate, mmap,
copy_file_range, ioctl FICLONE) are not in it, because the supervisor has already seen the open call.
"""

from __future__ import annotations

import errno
import os
import struct
from enum import Enum, auto

from mulligan.values.fast_dataclass import fast_dataclass


class SystemCallKind(Enum):
    """The effect of a system call on the path in its arguments."""

    # Opens the file, for writing if its flags say so.
    OPEN = auto()
    # Creates the path; fails if it exists.
    CREATE = auto()
    # Changes the file; follows symbolic links unless a flag forbids it.
    MODIFY = auto()
    # Changes the file, and does not follow a symbolic link.
    MODIFY_LINK = auto()
    REMOVE = auto()
    RENAME = auto()
    LINK = auto()
    # Changes the file of a descriptor, however it was opened.
    MODIFY_OPEN = auto()
    # Makes a socket's file.
    BIND = auto()
    # Connects to another program.
    CONNECT = auto()


# In place of a dirfd argument: relative names start at the working directory.
CWD = -1


@fast_dataclass(slots=True, frozen=True)
class SystemCall:
    """One system call.

    `dirfd`, `path`, `flags` are positions of arguments (or CWD). A `number` of 0: this machine does not have it.
    """

    name: str
    x86_64: int
    aarch64: int
    does: SystemCallKind
    dirfd: int = CWD
    path: int = 0
    flags: int | None = None
    to_dirfd: int = CWD
    to_path: int = 0
    fixed_flags: int = 0

    def number(self, machine: str) -> int:
        return self.x86_64 if machine == "x86_64" else self.aarch64


_O_CREAT_WRONLY_TRUNC = 0o1101

CALLS = (
    SystemCall("open", 2, 0, SystemCallKind.OPEN, flags=1),
    SystemCall("creat", 85, 0, SystemCallKind.OPEN, fixed_flags=_O_CREAT_WRONLY_TRUNC),
    SystemCall("openat", 257, 56, SystemCallKind.OPEN, dirfd=0, path=1, flags=2),
    SystemCall("openat2", 437, 437, SystemCallKind.OPEN, dirfd=0, path=1),
    SystemCall("truncate", 76, 45, SystemCallKind.MODIFY),
    SystemCall("rename", 82, 0, SystemCallKind.RENAME, path=0, to_path=1),
    SystemCall("renameat", 264, 38, SystemCallKind.RENAME, dirfd=0, path=1, to_dirfd=2, to_path=3),
    SystemCall("renameat2", 316, 276, SystemCallKind.RENAME, dirfd=0, path=1, to_dirfd=2, to_path=3, flags=4),
    SystemCall("mkdir", 83, 0, SystemCallKind.CREATE),
    SystemCall("mkdirat", 258, 34, SystemCallKind.CREATE, dirfd=0, path=1),
    SystemCall("mknod", 133, 0, SystemCallKind.CREATE),
    SystemCall("mknodat", 259, 33, SystemCallKind.CREATE, dirfd=0, path=1),
    SystemCall("symlink", 88, 0, SystemCallKind.CREATE, path=1),
    SystemCall("symlinkat", 266, 36, SystemCallKind.CREATE, dirfd=1, path=2),
    SystemCall("rmdir", 84, 0, SystemCallKind.REMOVE),
    SystemCall("unlink", 87, 0, SystemCallKind.REMOVE),
    SystemCall("unlinkat", 263, 35, SystemCallKind.REMOVE, dirfd=0, path=1),
    SystemCall("link", 86, 0, SystemCallKind.LINK, path=0, to_path=1),
    SystemCall("linkat", 265, 37, SystemCallKind.LINK, dirfd=0, path=1, to_dirfd=2, to_path=3, flags=4),
    SystemCall("chmod", 90, 0, SystemCallKind.MODIFY),
    SystemCall("fchmodat", 268, 53, SystemCallKind.MODIFY, dirfd=0, path=1),
    SystemCall("fchmodat2", 452, 452, SystemCallKind.MODIFY, dirfd=0, path=1, flags=3),
    SystemCall("fchmod", 91, 52, SystemCallKind.MODIFY_OPEN),
    SystemCall("chown", 92, 0, SystemCallKind.MODIFY),
    SystemCall("lchown", 94, 0, SystemCallKind.MODIFY_LINK),
    SystemCall("fchownat", 260, 54, SystemCallKind.MODIFY, dirfd=0, path=1, flags=4),
    SystemCall("fchown", 93, 55, SystemCallKind.MODIFY_OPEN),
    SystemCall("utime", 132, 0, SystemCallKind.MODIFY),
    SystemCall("utimes", 235, 0, SystemCallKind.MODIFY),
    SystemCall("futimesat", 261, 0, SystemCallKind.MODIFY, dirfd=0, path=1),
    SystemCall("utimensat", 280, 88, SystemCallKind.MODIFY, dirfd=0, path=1, flags=3),
    SystemCall("setxattr", 188, 5, SystemCallKind.MODIFY),
    SystemCall("lsetxattr", 189, 6, SystemCallKind.MODIFY_LINK),
    SystemCall("fsetxattr", 190, 7, SystemCallKind.MODIFY_OPEN),
    SystemCall("setxattrat", 463, 463, SystemCallKind.MODIFY, dirfd=0, path=1, flags=2),
    SystemCall("removexattr", 197, 14, SystemCallKind.MODIFY),
    SystemCall("lremovexattr", 198, 15, SystemCallKind.MODIFY_LINK),
    SystemCall("fremovexattr", 199, 16, SystemCallKind.MODIFY_OPEN),
    SystemCall("removexattrat", 466, 466, SystemCallKind.MODIFY, dirfd=0, path=1, flags=2),
    SystemCall("bind", 49, 200, SystemCallKind.BIND, path=1),
    SystemCall("connect", 42, 203, SystemCallKind.CONNECT, path=1),
    SystemCall("sendto", 44, 206, SystemCallKind.CONNECT, path=4),
)

IO_URING_SETUP = 425
OPEN_BY_HANDLE_AT = {"x86_64": 304, "aarch64": 265}
SOCKET = {"x86_64": 41, "aarch64": 198}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# x32 programs have the same architecture value as x86_64, and this bit in the number of each call.
X32_BIT = 0x40000000


_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_ANY_BIT = 0x45
_JUMP_AT_LEAST = 0x35
_RETURN = 0x06

_KILL = 0x80000000
_ERRNO = 0x00050000
_NOTIFY = 0x7FC00000
_ALLOW = 0x7FFF0000

_AT_NUMBER = 0
_AT_ARCH = 4
_AT_ARGUMENTS = 16

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10

# Opening with any of these can change something; every other open continues without a stop.
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_Instruction = tuple[int, int, int, int]


def program(machine: str, *, notify: bool, sockets: str = "all") -> bytes | None:
    """The filter for this machine, or None if Mulligan has no table for it. `sockets`: `all`, `inet` or `none`."""
    if machine not in AUDIT_ARCH:
        return None
    code = _same_machine(machine)
    if sockets != "all":
        code += _socket_rules(SOCKET[machine], allow_inet=sockets == "inet")
    # io_uring does file and network work in the kernel, without the system calls that this filter sees.
    if notify or sockets != "all":
        code += _when(IO_URING_SETUP, [_return(_ERRNO | errno.ENOSYS)])
    if notify:
        if_writing = [_load(_argument(2)), (_JUMP_ANY_BIT, 0, 1, WRITE_FLAGS), _return(_ERRNO | errno.EPERM)]
        code += _when(OPEN_BY_HANDLE_AT[machine], [*if_writing, _return(_ALLOW)])
        for call in CALLS:
            code += _stop_at(call, call.number(machine))
    code.append(_return(_ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _same_machine(machine: str) -> list[_Instruction]:
    # In another instruction set the numbers mean other calls, so the filter kills the process instead of guessing.
    code = [_load(_AT_ARCH), (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), _return(_KILL), _load(_AT_NUMBER)]
    if machine == "x86_64":
        code += [(_JUMP_AT_LEAST, 0, 1, X32_BIT), _return(_ERRNO | errno.ENOSYS)]
    return code


def _socket_rules(number: int, *, allow_inet: bool) -> list[_Instruction]:
    """Refuse sockets, unless their address family is one that a network namespace isolates."""
    body = [_load(_argument(0))]
    if allow_inet:
        body += [(_JUMP_EQUAL, 0, 1, _AF_INET), _return(_ALLOW), (_JUMP_EQUAL, 0, 1, _AF_INET6), _return(_ALLOW)]
    return _when(number, [*body, _return(_ERRNO | errno.EACCES)])


def _stop_at(call: SystemCall, number: int) -> list[_Instruction]:
    if not number:
        return []
    # Without an address the data goes to a connected socket, and the supervisor has seen that connection.
    if call.does is SystemCallKind.CONNECT and call.path:
        addressed = [_load(_argument(call.path)), (_JUMP_ANY_BIT, 0, 1, 0xFFFFFFFF), _return(_NOTIFY)]
        return _when(number, [*addressed, _return(_ALLOW)])
    # openat2's flags are in memory, which BPF cannot read.
    if call.does is not SystemCallKind.OPEN or call.flags is None:
        return _when(number, [_return(_NOTIFY)])
    only_writing = [_load(_argument(call.flags)), (_JUMP_ANY_BIT, 0, 1, WRITE_FLAGS), _return(_NOTIFY)]
    return _when(number, [*only_writing, _return(_ALLOW)])


def _when(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """Run `body` for one call number. It always returns, so the next test still has the number loaded."""
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _load(offset: int) -> _Instruction:
    return (_LOAD, 0, 0, offset)


def _return(value: int) -> _Instruction:
    return (_RETURN, 0, 0, value)


def _argument(index: int) -> int:
    """The low half of a 64-bit argument; both machines are little-endian."""
    return _AT_ARGUMENTS + 8 * index
