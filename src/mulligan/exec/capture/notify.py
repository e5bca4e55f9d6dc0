"""The `notify` way: each changing system call of the command waits until its preimage is safe.

A thread of ours reads the kernel's notifications, finds the paths, tells the witness about first touches and lets the
call continue. If the thread ends for any reason the listener closes, and the kernel fails every further changing call
(ENOSYS): the command fails closed. The call is read again by the kernel after we let it go, so a hostile program can
change its words in between: this records, it is no security border.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial

from mulligan.values.faults import MulliganError, fault
from mulligan.values.refusal import Refused
from mulligan.workspace.exec import kernel
from mulligan.workspace.exec.beyond import Beyond, internet_address, unix_name
from mulligan.workspace.exec.bystanders import Bystanders, Deed
from mulligan.workspace.exec.ledger import Ledger, Witness, look
from mulligan.workspace.exec.resolve import AT_FDCWD, Refuse, Resolver
from mulligan.workspace.exec.syscalls import CALLS, CWD, Call, Does

_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_STILL_THERE = 0x40082102
_SET_FLAGS = 0x40082104
_WAKE_BESIDE = 1
_CONTINUE = 1

_REQUEST = struct.Struct("=QII i I Q 6Q".replace(" ", ""))
_ANSWER = struct.Struct("=QqiI")
_EMPTY_REQUEST = bytes(_REQUEST.size)

_AT_SYMLINK_NOFOLLOW = 0x100
_AT_SYMLINK_FOLLOW = 0x400
_AT_EMPTY_PATH = 0x1000
_RENAME_NOREPLACE = 1
_OPEN_HOW = struct.Struct("=QQQ")
_SOCKADDR_MAX_BYTES = 110
_JOIN_S = 10.0
_O_TMPFILE = getattr(os, "O_TMPFILE", 0)

Arguments = tuple[int, ...]


class Supervisor:
    """Answers the stops of one command. `start` it when the listener is here, `join` it after the last descendant."""

    def __init__(self, root: bytes, witness: Witness) -> None:
        self._memory = kernel.MemoryReader()
        self._resolver = Resolver(root)
        self._bystanders = Bystanders(witness)
        self._ledger = Ledger(root, self._bystanders)
        self._device = os.stat(root).st_dev
        self._handlers = self._table()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._beyond = Beyond()
        self._names_outside: set[bytes] = set()
        self.stops = 0

    @property
    def touched(self) -> frozenset[bytes]:
        return frozenset(self._ledger.touched)

    def coverage(self) -> tuple[tuple[bytes, str], ...]:
        """What may have changed and was not captured, with the reason."""
        linked = dict.fromkeys(self._ledger.unsure | self._names_outside, "hard_link")
        mounted = dict.fromkeys(self._resolver.foreign, "other_mounts")
        return tuple(sorted((self._beyond.coverage() | linked | mounted).items()))

    def shared(self) -> frozenset[bytes]:
        """Touched paths that somebody else has changed too, while the command ran."""
        return self._bystanders.were_at(self.touched)

    def start(self, listener: int) -> None:
        # What the command does is done in the block of the call that it runs in.
        serve = partial(copy_context().run, self._serve, listener)
        self._thread = threading.Thread(target=serve, name="mulligan-notify", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the last answer. Raises what broke the supervisor, if anything did."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._add_late(self._resolver.late())
            if self._thread.is_alive():
                raise fault("internal", "The command still waits for an answer after all its processes ended.")
        if self._failure is not None:
            raise self._failure

    def _add_late(self, paths: list[bytes]) -> None:
        self._ledger.late(paths)
        for path in paths:
            self._bystanders.forgive(path)

    def close(self) -> None:
        self._bystanders.close()

    def _serve(self, listener: int) -> None:
        """Whatever ends this, the listener closes, and with it the command's power to change anything."""
        try:
            self._answer_all(listener)
        finally:
            self._failure = sys.exc_info()[1]
            os.close(listener)

    def _answer_all(self, listener: int) -> None:
        # Who waits for us need not be woken on another processor. Before Linux 6.6 the kernel knows no such wish.
        with suppress(OSError):
            fcntl.ioctl(listener, _SET_FLAGS, _WAKE_BESIDE)
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        request = bytearray(_EMPTY_REQUEST)
        while not poller.poll()[0][1] & (select.POLLHUP | select.POLLERR):
            request[:] = _EMPTY_REQUEST
            try:
                fcntl.ioctl(listener, _RECEIVE, request)
            except (FileNotFoundError, InterruptedError):
                continue  # the process was killed or interrupted before we looked
            self._answer(listener, request)

    def _answer(self, listener: int, request: bytearray) -> None:
        stop = _REQUEST.unpack(request)
        self.stops += 1
        refusal = self._judge(listener, stop)
        flags = 0 if refusal else _CONTINUE
        try:
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(stop[0], 0, -refusal, flags))
        except FileNotFoundError:
            return  # it died while waiting

    def _judge(self, listener: int, stop: tuple[int, ...]) -> int:
        """0 to let the call go on, else the error number it fails with."""
        identity, pid, _, number, _, _, *_ = stop
        try:
            act = self._handlers[number](pid, stop[6:])
            if act is None or not _still_there(listener, identity):
                return 0
            act()
        except Refuse as refused:
            return refused.errno
        except (OSError, MulliganError, Refused):
            return errno.EIO
        return 0

    def _table(self) -> dict[int, Handler]:
        makers: dict[Does, Callable[[Call], Handler]] = {
            Does.OPEN: self._on_open,
            Does.CREATE: self._on_create,
            Does.MODIFY: self._on_modify,
            Does.MODIFY_LINK: self._on_modify,
            Does.REMOVE: self._on_remove,
            Does.RENAME: self._on_rename,
            Does.LINK: self._on_link,
            Does.MODIFY_OPEN: self._on_modify_open,
            Does.BIND: self._on_bind,
            Does.CONNECT: self._on_connect,
        }
        numbered = ((call.number(kernel.MACHINE), call) for call in CALLS)
        return {number: makers[call.does](call) for number, call in numbered if number}

    def _on_open(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            flags = self._open_flags(call, pid, arguments)
            if flags & _O_TMPFILE == _O_TMPFILE and _O_TMPFILE:
                return None  # no name yet; linking it in is a stop of its own
            exclusive = flags & os.O_EXCL and flags & os.O_CREAT
            path = self._path(call, pid, arguments, follow=not (flags & os.O_NOFOLLOW or exclusive))
            if path is None:
                return None
            if not self._resolver.inside(path):
                return self._outside(path)
            return lambda: self._opened(path, flags)

        return handle

    def _opened(self, path: bytes, flags: int) -> None:
        self._bystanders.expect(path, Deed.WRITTEN, *((Deed.CREATED,) if flags & os.O_CREAT else ()))
        self._ledger.opened(path, flags)

    def _open_flags(self, call: Call, pid: int, arguments: Arguments) -> int:
        if call.flags is not None:
            return arguments[call.flags]
        if call.fixed_flags:
            return call.fixed_flags
        return int(_OPEN_HOW.unpack(self._read(pid, arguments[2], _OPEN_HOW.size))[0])

    def _outside(self, path: bytes) -> Act | None:
        """Not ours, unless it is another name of a file of ours: that we can say, not undo."""
        self._beyond.may_change(path)
        status = look(path)
        if (
            status is not None
            and status.st_nlink > 1
            and status.st_dev == self._device
            and stat.S_ISREG(status.st_mode)
        ):
            self._names_outside.add(path)
        return None

    def _on_create(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            path = self._path(call, pid, arguments, follow=False)
            return self._inside(path, self._ledger.created, Deed.CREATED)

        return handle

    def _on_remove(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            path = self._path(call, pid, arguments, follow=False)
            return self._inside(path, self._ledger.removed, Deed.REMOVED)

        return handle

    def _on_modify(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            flags = arguments[call.flags] if call.flags is not None else 0
            follow = call.does is Does.MODIFY and not flags & _AT_SYMLINK_NOFOLLOW
            if call.dirfd != CWD and (not arguments[call.path] or flags & _AT_EMPTY_PATH):
                path = self._path_or_descriptor(call, pid, arguments, follow=follow)
            else:
                path = self._path(call, pid, arguments, follow=follow)
            return self._inside(path, self._ledger.modified)

        return handle

    def _on_modify_open(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            return self._inside(self._resolver.descriptor(pid, arguments[0] & 0xFFFFFFFF), self._ledger.modified)

        return handle

    def _on_rename(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            old = self._path(call, pid, arguments, follow=False)
            new = self._target(call, pid, arguments)
            if old is not None and new is None and self._resolver.inside(old):
                return lambda: self._ledger.leaving(old)
            if old is None or new is None or old == new:
                return None
            flags = arguments[call.flags] if call.flags is not None else 0
            inside = (self._resolver.inside(old), self._resolver.inside(new))
            for path in (path for path, is_ours in zip((old, new), inside, strict=True) if not is_ours):
                self._beyond.may_change(path)
            if not any(inside) or (flags & _RENAME_NOREPLACE and look(new) and new not in self._ledger.touched):
                return None
            return lambda: self._renamed(old, new, inside)

        return handle

    def _renamed(self, old: bytes, new: bytes, inside: tuple[bool, bool]) -> None:
        if all(inside):
            self._bystanders.expect_move(old, new)
        else:
            self._bystanders.forgive(new if inside[1] else old)
        self._ledger.renamed(old, new, inside=inside)

    def _on_link(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            flags = arguments[call.flags] if call.flags is not None else 0
            old = self._path_or_descriptor(call, pid, arguments, follow=bool(flags & _AT_SYMLINK_FOLLOW))
            new = self._target(call, pid, arguments)
            ours = [path if path is not None and self._resolver.inside(path) else None for path in (old, new)]
            return None if ours == [None, None] else lambda: self._linked(*ours)

        return handle

    def _linked(self, old: bytes | None, new: bytes | None) -> None:
        if new is not None:
            self._bystanders.expect(new, Deed.CREATED)
        self._ledger.linked(old, new)

    def _on_bind(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            raw = self._read(pid, arguments[1], min(arguments[2], _SOCKADDR_MAX_BYTES))
            name = unix_name(raw)
            if name is None or name.startswith(b"@"):
                self._beyond.bound(name or (internet_address(raw) or (b"", ""))[0])
                return None
            path = self._resolver.name(pid, AT_FDCWD, name, follow=False)
            self._beyond.bound(path or name)
            return self._inside(path, self._ledger.created, Deed.CREATED)

        return handle

    def _on_connect(self, call: Call) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            size = min(arguments[call.path + 1], _SOCKADDR_MAX_BYTES)
            raw = self._read(pid, arguments[call.path], size)
            name = unix_name(raw)
            if name is not None and not name.startswith(b"@"):
                name = self._resolver.name(pid, AT_FDCWD, name, follow=True)
                name = None if name is None or look(name) is None else name
            found = (name, "other_daemon") if name is not None else internet_address(raw)
            return None if found is None else lambda: self._beyond.connected(*found)

        return handle

    def _inside(self, path: bytes | None, then: Callable[[bytes], None], *deeds: Deed) -> Act | None:
        if path is None:
            return None
        if not self._resolver.inside(path):
            self._beyond.may_change(path)
            return None
        return lambda: self._change(path, then, deeds)

    def _change(self, path: bytes, then: Callable[[bytes], None], deeds: tuple[Deed, ...]) -> None:
        self._bystanders.expect(path, *deeds)
        then(path)

    def _path(self, call: Call, pid: int, arguments: Arguments, *, follow: bool) -> bytes | None:
        dirfd = AT_FDCWD if call.dirfd == CWD else arguments[call.dirfd] & 0xFFFFFFFF
        return self._resolver.name(pid, dirfd, self._text(pid, arguments[call.path]), follow=follow)

    def _target(self, call: Call, pid: int, arguments: Arguments) -> bytes | None:
        dirfd = AT_FDCWD if call.to_dirfd == CWD else arguments[call.to_dirfd] & 0xFFFFFFFF
        return self._resolver.name(pid, dirfd, self._text(pid, arguments[call.to_path]), follow=False)

    def _path_or_descriptor(self, call: Call, pid: int, arguments: Arguments, *, follow: bool) -> bytes | None:
        """An empty or missing name means the descriptor itself."""
        if call.dirfd != CWD and (not arguments[call.path] or not self._text(pid, arguments[call.path])):
            dirfd = arguments[call.dirfd] & 0xFFFFFFFF
            return (
                self._resolver.name(pid, AT_FDCWD, b".", follow=True)
                if dirfd == AT_FDCWD
                else (self._resolver.descriptor(pid, dirfd))
            )
        return self._path(call, pid, arguments, follow=follow)

    def _text(self, pid: int, address: int) -> bytes:
        try:
            return self._memory.text(pid, address)
        except OSError as error:
            raise _unreadable(error) from error

    def _read(self, pid: int, address: int, size: int) -> bytes:
        try:
            return self._memory.bytes(pid, address, size)
        except OSError as error:
            raise _unreadable(error) from error


Act = Callable[[], None]
Handler = Callable[[int, Arguments], "Act | None"]


def _unreadable(error: OSError) -> Refuse:
    """A bad address fails the call as the kernel would; a process that hides its memory may change nothing."""
    return Refuse(errno.EFAULT if error.errno in (errno.EFAULT, errno.ESRCH) else errno.EIO)


def _still_there(listener: int, identity: int) -> bool:
    """The process we read is the one that waits: its number was not given to another meanwhile."""
    try:
        fcntl.ioctl(listener, _STILL_THERE, struct.pack("=Q", identity))
    except FileNotFoundError:
        return False
    return True
