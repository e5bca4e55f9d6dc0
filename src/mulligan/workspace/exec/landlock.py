"""Landlock, by ctypes: writing only below the folders that are named. Runs in the launcher's bare interpreter.

Reading and executing stay free. Where the kernel can, abstract sockets of others and signals to them are out of reach.
What Landlock cannot cover (chmod, chown, times, attributes) the read-only mounts of the sandbox do.
"""

from __future__ import annotations

import ctypes
import os

from mulligan.workspace.exec import kernel

_WRITE_FILE = 1 << 1
_REMOVE_FOLDER, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_CHAR, _MAKE_FOLDER, _MAKE_FILE, _MAKE_SOCKET, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYMLINK = (
    1 << n for n in range(6, 13)
)
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_DEVICES = _MAKE_CHAR | _MAKE_BLOCK
_ORDINARY = (
    _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _MAKE_SOCKET | _MAKE_FIFO | _MAKE_SYMLINK
)

_SCOPE_ABSTRACT_SOCKETS = 1 << 0
_SCOPE_SIGNALS = 1 << 1

_VERSION_QUERY = 1
_RULE_PATH_BENEATH = 1

_HARMLESS_DEVICES = (
    *(b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom", b"/dev/tty", b"/dev/ptmx"),
    b"/dev/pts",
)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_fs", ctypes.c_uint64),
        ("handled_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """The kernel's Landlock ABI. Raises OSError where there is none."""
    return kernel.syscall(kernel.SYS_LANDLOCK_CREATE_RULESET, None, 0, _VERSION_QUERY)


def ruleset(writable: list[bytes]) -> int:
    """A ruleset that allows writing below `writable` and to the harmless devices only."""
    abi = version()
    newer = (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    attributes = _Ruleset(_ORDINARY | _DEVICES | newer, 0, scoped)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8  # an older kernel refuses fields it does not know
    fd = kernel.syscall(kernel.SYS_LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    for path in writable:
        _allow(fd, path, _ORDINARY | newer)
    for path in _HARMLESS_DEVICES:
        if os.path.exists(path):
            _allow(fd, path, _WRITE_FILE | (newer & _TRUNCATE))
    return fd


def restrict_self(fd: int) -> None:
    kernel.syscall(kernel.SYS_LANDLOCK_RESTRICT_SELF, fd, 0)


def _allow(ruleset_fd: int, path: bytes, access: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(access, parent)
        kernel.syscall(kernel.SYS_LANDLOCK_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)
