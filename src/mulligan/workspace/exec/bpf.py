"""The classic BPF programs that a command runs under. Pure: a machine's name in, bytes out.

1. A program of another instruction set (32-bit, x32) is stopped dead: its calls have other numbers.
2. io_uring is denied: it would do file work that no filter sees. So is writing by file handle.
3. Without network: no sockets but pairs.
4. Calls of the table wait for the supervisor; opening only if its flags can change something.
"""

from __future__ import annotations

import errno
import os
import struct

from mulligan.workspace.exec import syscalls
from mulligan.workspace.exec.syscalls import Call, Does

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

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_Instruction = tuple[int, int, int, int]


def program(machine: str, *, notify: bool, sockets: str = "all") -> bytes | None:
    """The filter for this machine, or None where we have no table. `sockets`: `all`, `inet` or `none`."""
    if machine not in syscalls.AUDIT_ARCH:
        return None
    code = _same_machine(machine)
    if sockets != "all":
        code += _socket_rules(syscalls.SOCKET[machine], allow_inet=sockets == "inet")
    if notify or sockets != "all":
        code += _when(syscalls.IO_URING_SETUP, [_return(_ERRNO | errno.ENOSYS)])
    if notify:
        code += _by_handle(syscalls.OPEN_BY_HANDLE_AT[machine])
        for call in syscalls.CALLS:
            code += _stop_at(call, call.number(machine))
    code.append(_return(_ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _same_machine(machine: str) -> list[_Instruction]:
    code = [_load(_AT_ARCH), (_JUMP_EQUAL, 1, 0, syscalls.AUDIT_ARCH[machine]), _return(_KILL), _load(_AT_NUMBER)]
    if machine == "x86_64":
        code += [(_JUMP_AT_LEAST, 0, 1, syscalls.X32_BIT), _return(_ERRNO | errno.ENOSYS)]
    return code


def _socket_rules(number: int, *, allow_inet: bool) -> list[_Instruction]:
    """A refusal unless the address family is one that a network namespace of its own keeps inside."""
    body = [_load(_argument(0))]
    if allow_inet:
        body += [(_JUMP_EQUAL, 0, 1, _AF_INET), _return(_ALLOW), (_JUMP_EQUAL, 0, 1, _AF_INET6), _return(_ALLOW)]
    return _when(number, [*body, _return(_ERRNO | errno.EACCES)])


def _by_handle(number: int) -> list[_Instruction]:
    denied = [_load(_argument(2)), (_JUMP_ANY_BIT, 0, 1, WRITE_FLAGS), _return(_ERRNO | errno.EPERM), _return(_ALLOW)]
    return _when(number, denied)


def _stop_at(call: Call, number: int) -> list[_Instruction]:
    if not number:
        return []
    if call.does is Does.CONNECT and call.path:  # without an address it goes where it was connected to before
        addressed = [_load(_argument(call.path)), (_JUMP_ANY_BIT, 0, 1, 0xFFFFFFFF), _return(_NOTIFY)]
        return _when(number, [*addressed, _return(_ALLOW)])
    if call.does is not Does.OPEN or call.flags is None:  # openat2's flags are in memory, which BPF cannot read
        return _when(number, [_return(_NOTIFY)])
    only_writing = [_load(_argument(call.flags)), (_JUMP_ANY_BIT, 0, 1, WRITE_FLAGS), _return(_NOTIFY)]
    return _when(number, [*only_writing, _return(_ALLOW)])


def _when(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """`body` always returns, so the call number is still loaded for whoever jumps over it."""
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _load(offset: int) -> _Instruction:
    return (_LOAD, 0, 0, offset)


def _return(value: int) -> _Instruction:
    return (_RETURN, 0, 0, value)


def _argument(index: int) -> int:
    """The low half of a 64-bit argument; both machines are little-endian."""
    return _AT_ARGUMENTS + 8 * index
