"""Every system call that changes a file system by name, as a table: its numbers and where its names are.

So is every one by which it may speak to somebody else who does. The filter stops exactly these; the supervisor reads
exactly these arguments. What works on a descriptor that was opened
for writing (write, ftruncate, mmap, copy_file_range, ioctl FICLONE) is not here: opening it was the stop.
"""

from __future__ import annotations

from enum import Enum, auto

from mulligan.values.plain import plain


class Does(Enum):
    """What a call does to the name it is given."""

    OPEN = auto()
    """opens it, for writing if its flags say so"""
    CREATE = auto()
    """makes it; fails if it is there"""
    MODIFY = auto()
    """changes what is there, through symbolic links unless told otherwise"""
    MODIFY_LINK = auto()
    """changes what is there, a symbolic link itself included"""
    REMOVE = auto()
    RENAME = auto()
    LINK = auto()
    MODIFY_OPEN = auto()
    """changes what a descriptor stands for, however it was opened"""
    BIND = auto()
    """makes a socket's file"""
    CONNECT = auto()
    """speaks to somebody else"""


CWD = -1
"""In place of a dirfd argument: relative names start at the working directory."""


@plain(slots=True, frozen=True)
class Call:
    """One system call. `dirfd`, `path`, `flags` are argument positions (or CWD); a number of 0 means there is none."""

    name: str
    x86_64: int
    aarch64: int
    does: Does
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
    Call("open", 2, 0, Does.OPEN, flags=1),
    Call("creat", 85, 0, Does.OPEN, fixed_flags=_O_CREAT_WRONLY_TRUNC),
    Call("openat", 257, 56, Does.OPEN, dirfd=0, path=1, flags=2),
    Call("openat2", 437, 437, Does.OPEN, dirfd=0, path=1),
    Call("truncate", 76, 45, Does.MODIFY),
    Call("rename", 82, 0, Does.RENAME, path=0, to_path=1),
    Call("renameat", 264, 38, Does.RENAME, dirfd=0, path=1, to_dirfd=2, to_path=3),
    Call("renameat2", 316, 276, Does.RENAME, dirfd=0, path=1, to_dirfd=2, to_path=3, flags=4),
    Call("mkdir", 83, 0, Does.CREATE),
    Call("mkdirat", 258, 34, Does.CREATE, dirfd=0, path=1),
    Call("mknod", 133, 0, Does.CREATE),
    Call("mknodat", 259, 33, Does.CREATE, dirfd=0, path=1),
    Call("symlink", 88, 0, Does.CREATE, path=1),
    Call("symlinkat", 266, 36, Does.CREATE, dirfd=1, path=2),
    Call("rmdir", 84, 0, Does.REMOVE),
    Call("unlink", 87, 0, Does.REMOVE),
    Call("unlinkat", 263, 35, Does.REMOVE, dirfd=0, path=1),
    Call("link", 86, 0, Does.LINK, path=0, to_path=1),
    Call("linkat", 265, 37, Does.LINK, dirfd=0, path=1, to_dirfd=2, to_path=3, flags=4),
    Call("chmod", 90, 0, Does.MODIFY),
    Call("fchmodat", 268, 53, Does.MODIFY, dirfd=0, path=1),
    Call("fchmodat2", 452, 452, Does.MODIFY, dirfd=0, path=1, flags=3),
    Call("fchmod", 91, 52, Does.MODIFY_OPEN),
    Call("chown", 92, 0, Does.MODIFY),
    Call("lchown", 94, 0, Does.MODIFY_LINK),
    Call("fchownat", 260, 54, Does.MODIFY, dirfd=0, path=1, flags=4),
    Call("fchown", 93, 55, Does.MODIFY_OPEN),
    Call("utime", 132, 0, Does.MODIFY),
    Call("utimes", 235, 0, Does.MODIFY),
    Call("futimesat", 261, 0, Does.MODIFY, dirfd=0, path=1),
    Call("utimensat", 280, 88, Does.MODIFY, dirfd=0, path=1, flags=3),
    Call("setxattr", 188, 5, Does.MODIFY),
    Call("lsetxattr", 189, 6, Does.MODIFY_LINK),
    Call("fsetxattr", 190, 7, Does.MODIFY_OPEN),
    Call("setxattrat", 463, 463, Does.MODIFY, dirfd=0, path=1, flags=2),
    Call("removexattr", 197, 14, Does.MODIFY),
    Call("lremovexattr", 198, 15, Does.MODIFY_LINK),
    Call("fremovexattr", 199, 16, Does.MODIFY_OPEN),
    Call("removexattrat", 466, 466, Does.MODIFY, dirfd=0, path=1, flags=2),
    Call("bind", 49, 200, Does.BIND, path=1),
    Call("connect", 42, 203, Does.CONNECT, path=1),
    Call("sendto", 44, 206, Does.CONNECT, path=4),
)

IO_URING_SETUP = 425
OPEN_BY_HANDLE_AT = {"x86_64": 304, "aarch64": 265}
SOCKET = {"x86_64": 41, "aarch64": 198}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
