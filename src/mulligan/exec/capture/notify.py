"""The strategy `notify`: each changing system call of the command waits until its preimage is safe.

A thread of ours reads the kernel's notifications, finds the paths, reports first touches to the preimage keeper and
lets the call continue. If the thread ends for any reason the listener closes, and the kernel fails every further
changing call (ENOSYS): the command fails closed. The kernel reads the arguments again after we let the call continue,
so a hostile program can change them in between: this records changes, it is no security border.

`Resolver` turns the arguments of a stopped system call into a real path, as the stopped process would find it. The
kernel does the walking: the parent is opened through /proc/PID/{root,cwd,fd/N}, so its root, its working directory,
`..` and symbolic links mean what they mean to the process, and the descriptor's own name is the real path. That is
three system calls, cheap enough that nothing is cached and nothing can be stale.

`OutsideEffects` notes what no undo can reach: files outside the root, other programs, the network. The receipt lists
it as coverage, in bounded length. `Capture` is the protocol of all strategies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Literal, Protocol, TypeAlias

from mulligan.exec.capture import seccomp
from mulligan.exec.capture.seccomp import CALLS, CWD, SystemCall, SystemCallKind
from mulligan.exec.capture.touched_paths import OtherWriters, PreimageKeeper, TouchedPaths, WriteKind, look
from mulligan.exec.command import Command
from mulligan.exec.start import StartOptions
from mulligan.files import kernel
from mulligan.values.errors import MulliganError, Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass

# The value -100 as an unsigned 32-bit number, as a notification has it.
AT_FDCWD = 0xFFFFFF9C
_OPEN_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC if hasattr(os, "O_PATH") else 0
_DOTS = (b"", b".", b"..")
_FD_FOLDER = re.compile(rb"/proc/(\d+)(?:/task/\d+)?/fd")
_STANDARD = {b"stdin": b"0", b"stdout": b"1", b"stderr": b"2"}
_DELETED = b" (deleted)"
_MISSING_MAX = 10_000


class CallRefusedError(Exception):
    """The system call fails with `errno`, because Mulligan cannot tell what it would change."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.errno = number


class Resolver:
    """Finds real paths for one root. `foreign` collects paths that another mount hides from this process.

    `missing` collects names whose folder did not exist. Such a call fails, unless another process or thread of the
    command creates the folder after our check and before the kernel's.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._prefix = root if root.endswith(b"/") else root + b"/"
        self._known_folders: dict[bytes, tuple[int, int]] = {}
        # A process in another mount namespace may see another folder under the same name.
        self._own_mounts = os.stat("/proc/self/ns/mnt").st_ino
        self._device = os.stat(root).st_dev
        self._own_pid = b"%d" % os.getpid()
        self.foreign: set[bytes] = set()
        self.missing: set[bytes] = set()

    def inside(self, path: bytes) -> bool:
        return path.startswith(self._prefix) or path == self._root

    def name(self, pid: int, dirfd: int, raw: bytes, *, follow: bool) -> bytes | None:
        """The absolute real path that the call refers to, inside the root or not; None if the call is bound to fail."""
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

    def created_after_all(self) -> list[bytes]:
        """The missing names that exist now after all."""
        found = [os.path.join(os.path.realpath(os.path.dirname(one)), os.path.basename(one)) for one in self.missing]
        return [path for path in found if self.inside(path) and os.path.lexists(path)]

    def descriptor(self, pid: int, fd: int) -> bytes | None:
        """The path of an open descriptor; None for pipes, sockets and deleted files."""
        try:
            path = os.readlink(b"/proc/%d/fd/%d" % (pid, fd))
        except PermissionError as error:
            raise CallRefusedError(errno.EIO) from error
        except OSError:
            return None
        if not path.startswith(b"/") or (path.endswith(_DELETED) and not os.path.lexists(path)):
            return None
        return path

    def _folder(self, pid: int, path: bytes) -> bytes | None:
        try:
            fd = os.open(path, _OPEN_PARENT)
        except PermissionError as error:
            raise CallRefusedError(errno.EACCES) from error
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
        """Note a path that is a different folder in the mount namespace of the stopped process than in ours."""
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
        """Resolve /dev/stdout and /proc/self/fd/N for the stopped process: read by us, `self` would be Mulligan."""
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


# More paths than this are listed by the folders they are in; more addresses than this not at all.
LISTED_MAX = 64

_TICK_NS = 20_000_000
_SYSTEM = (b"/dev/", b"/proc/", b"/sys/")
_SHARED_MEMORY = b"/dev/shm/"
_DNS_PORT = 53


class OutsideEffects:
    """The effects of one command that undo cannot reach. For one thread."""

    def __init__(self) -> None:
        # The kernel stamps files with the time of its last tick, which is up to a tick ago.
        self._since_ns = time.clock_gettime_ns(time.CLOCK_REALTIME) - _TICK_NS
        self._outside: dict[bytes, bool] = {}
        self._addresses: dict[bytes, str] = {}
        self._own: set[bytes] = set()

    def may_change(self, path: bytes) -> None:
        """Note that the command is about to change a path outside the root."""
        if path in self._outside or (path.startswith(_SYSTEM) and not path.startswith(_SHARED_MEMORY)):
            return
        self._outside[path] = look_quietly(path) is not None

    def bound(self, address: bytes) -> None:
        """Note an address at which the command itself listens, so that connecting to it does not count."""
        self._own.add(address)

    def connected(self, address: bytes, reason: str) -> None:
        if address not in self._own and len(self._addresses) < LISTED_MAX:
            self._addresses[address] = reason

    def coverage(self) -> dict[bytes, str]:
        changed = [path for path, existed in self._outside.items() if self._has_changed(path, existed)]
        return dict.fromkeys(_summarised(changed), "outside_root") | self._addresses

    def _has_changed(self, path: bytes, existed: bool) -> bool:
        """Whether a path outside changed.

        A file that the command made and removed, or could not open after all, does not count.
        """
        status = look_quietly(path)
        if status is None:
            return existed
        plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)
        return plain and status.st_ctime_ns >= self._since_ns


def look_quietly(path: bytes) -> os.stat_result | None:
    try:
        return look(path)
    except OSError:
        return None


def _summarised(paths: list[bytes]) -> list[bytes]:
    found = set(paths)
    while len(found) > LISTED_MAX:
        deepest = max(path.count(b"/") for path in found)
        if deepest <= 1:
            break
        found = {path.rpartition(b"/")[0] if path.count(b"/") == deepest else path for path in found}
    return sorted(found)


def unix_name(raw: bytes) -> bytes | None:
    """The name in a Unix socket's address, with @ for an abstract one; None for other addresses and for no name."""
    if len(raw) < 3 or int.from_bytes(raw[:2], "little") != socket.AF_UNIX:
        return None
    if raw[2]:
        return raw[2:].split(b"\0", 1)[0]
    return b"@" + raw[3:].rstrip(b"\0") if len(raw) > 3 else None


def internet_address(raw: bytes) -> tuple[bytes, str] | None:
    """A network address as text, and the reason for coverage.

    An address of this machine usually belongs to another program.
    """
    family = int.from_bytes(raw[:2], "little")
    port = int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET and len(raw) >= 8:
        host = socket.inet_ntop(socket.AF_INET, raw[4:8])
        shown = f"{host}:{port}"
    elif family == socket.AF_INET6 and len(raw) >= 24:
        host = socket.inet_ntop(socket.AF_INET6, raw[8:24])
        shown = f"[{host}]:{port}"
    else:
        return None
    local = (host.startswith("127.") or host == "::1") and port != _DNS_PORT
    return shown.encode("ascii"), "other_daemon" if local else "network"


_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_STILL_WAITS = 0x40082102
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
    """Decides on the stopped system calls of one command.

    Call `start` when the listener is here, `join` after the last descendant.
    """

    def __init__(self, root: bytes, keeper: PreimageKeeper) -> None:
        self._memory = kernel.MemoryReader()
        self._resolver = Resolver(root)
        self._other_writers = OtherWriters(keeper)
        self._touched_paths = TouchedPaths(root, self._other_writers)
        self._device = os.stat(root).st_dev
        self._handlers = self._table()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._outside_effects = OutsideEffects()
        self._names_outside: set[bytes] = set()
        self.stops = 0

    @property
    def touched(self) -> frozenset[bytes]:
        return frozenset(self._touched_paths.touched)

    def coverage(self) -> tuple[tuple[bytes, str], ...]:
        """The paths that may have changed without a preimage, each with the reason."""
        linked = dict.fromkeys(self._touched_paths.with_unknown_links | self._names_outside, "hard_link")
        mounted = dict.fromkeys(self._resolver.foreign, "other_mounts")
        return tuple(sorted((self._outside_effects.coverage() | linked | mounted).items()))

    def shared(self) -> frozenset[bytes]:
        """Touched paths that another process changed too, while the command ran."""
        return self._other_writers.changed_by_others(self.touched)

    def start(self, listener: int) -> None:
        # The thread gets a copy of our context variables, so that it records changes in the current call.
        serve = partial(copy_context().run, self._serve, listener)
        self._thread = threading.Thread(target=serve, name="mulligan-notify", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the last answer. Raises the error that stopped the supervisor, if there was one."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            for path in (missed := self._resolver.created_after_all()):
                self._other_writers.ignore_changes_of(path)
            self._touched_paths.add_missed(missed)
            if self._thread.is_alive():
                raise fault("internal", "The command still waits for an answer after all its processes ended.")
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._other_writers.close()

    def _serve(self, listener: int) -> None:
        """Serve the listener, and close it even after an error, so that the kernel fails every further change."""
        try:
            self._answer_all(listener)
        finally:
            self._failure = sys.exc_info()[1]
            os.close(listener)

    def _answer_all(self, listener: int) -> None:
        # Wake the stopped process on the same processor, which is faster. Linux before 6.6 does not know this flag.
        with suppress(OSError):
            fcntl.ioctl(listener, _SET_FLAGS, _WAKE_BESIDE)
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        request = bytearray(_EMPTY_REQUEST)
        while not poller.poll()[0][1] & (select.POLLHUP | select.POLLERR):
            # The kernel refuses a buffer that is not all zeros.
            request[:] = _EMPTY_REQUEST
            try:
                fcntl.ioctl(listener, _RECEIVE, request)
            except (FileNotFoundError, InterruptedError):
                continue  # the process was killed or interrupted before we read the notification
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
        """Decide on a stopped call: 0 lets it continue, any other number is the error it fails with."""
        identity, pid, _, number, _, _, *_ = stop
        try:
            act = self._handlers[number](pid, stop[6:])
            # We read its memory by process id. If the process died meanwhile, another may have got that id, so what we
            # read counts only if the notification is still pending.
            if act is None or not _still_waits(listener, identity):
                return 0
            act()
        except CallRefusedError as refused:
            return refused.errno
        # If Mulligan could not store the preimage, the change must not happen: the command sees an input/output error.
        except (OSError, MulliganError, Refused):
            return errno.EIO
        return 0

    def _table(self) -> dict[int, Handler]:
        makers: dict[SystemCallKind, Callable[[SystemCall], Handler]] = {
            SystemCallKind.OPEN: self._on_open,
            SystemCallKind.CREATE: self._on_create,
            SystemCallKind.MODIFY: self._on_modify,
            SystemCallKind.MODIFY_LINK: self._on_modify,
            SystemCallKind.REMOVE: self._on_remove,
            SystemCallKind.RENAME: self._on_rename,
            SystemCallKind.LINK: self._on_link,
            SystemCallKind.MODIFY_OPEN: self._on_modify_open,
            SystemCallKind.BIND: self._on_bind,
            SystemCallKind.CONNECT: self._on_connect,
        }
        numbered = ((call.number(kernel.MACHINE), call) for call in CALLS)
        return {number: makers[call.does](call) for number, call in numbered if number}

    def _on_open(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            flags = self._open_flags(call, pid, arguments)
            # O_TMPFILE contains the bit of O_DIRECTORY, so all its bits must be compared.
            if flags & _O_TMPFILE == _O_TMPFILE and _O_TMPFILE:
                return None  # The file has no name yet; the supervisor stops the call that links it into a folder.
            # open(2) does not follow a final link if O_CREAT and O_EXCL are set.
            exclusive = flags & os.O_EXCL and flags & os.O_CREAT
            path = self._path(call, pid, arguments, follow=not (flags & os.O_NOFOLLOW or exclusive))
            if path is None:
                return None
            if not self._resolver.inside(path):
                return self._outside(path)
            return lambda: self._opened(path, flags)

        return handle

    def _opened(self, path: bytes, flags: int) -> None:
        self._other_writers.expect(path, WriteKind.WRITTEN, *((WriteKind.CREATED,) if flags & os.O_CREAT else ()))
        self._touched_paths.opened(path, flags)

    def _open_flags(self, call: SystemCall, pid: int, arguments: Arguments) -> int:
        if call.flags is not None:
            return arguments[call.flags]
        if call.fixed_flags:
            return call.fixed_flags
        return int(_OPEN_HOW.unpack(self._read(pid, arguments[2], _OPEN_HOW.size))[0])

    def _outside(self, path: bytes) -> Act | None:
        """Note a path outside.

        It may be a hard link of a file inside, so the receipt lists it: undo cannot reach it.
        """
        self._outside_effects.may_change(path)
        status = look(path)
        if (
            status is not None
            and status.st_nlink > 1
            and status.st_dev == self._device
            and stat.S_ISREG(status.st_mode)
        ):
            self._names_outside.add(path)
        return None

    def _on_create(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            path = self._path(call, pid, arguments, follow=False)
            return self._inside(path, self._touched_paths.created, WriteKind.CREATED)

        return handle

    def _on_remove(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            path = self._path(call, pid, arguments, follow=False)
            return self._inside(path, self._touched_paths.removed, WriteKind.REMOVED)

        return handle

    def _on_modify(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            flags = arguments[call.flags] if call.flags is not None else 0
            follow = call.does is SystemCallKind.MODIFY and not flags & _AT_SYMLINK_NOFOLLOW
            if call.dirfd != CWD and (not arguments[call.path] or flags & _AT_EMPTY_PATH):
                path = self._path_or_descriptor(call, pid, arguments, follow=follow)
            else:
                path = self._path(call, pid, arguments, follow=follow)
            return self._inside(path, self._touched_paths.modified)

        return handle

    def _on_modify_open(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            return self._inside(self._resolver.descriptor(pid, arguments[0] & 0xFFFFFFFF), self._touched_paths.modified)

        return handle

    def _on_rename(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            old = self._path(call, pid, arguments, follow=False)
            new = self._target(call, pid, arguments)
            if old is not None and new is None and self._resolver.inside(old):
                return lambda: self._touched_paths.moved_out(old)
            if old is None or new is None or old == new:
                return None
            flags = arguments[call.flags] if call.flags is not None else 0
            inside = (self._resolver.inside(old), self._resolver.inside(new))
            for path in (path for path, is_ours in zip((old, new), inside, strict=True) if not is_ours):
                self._outside_effects.may_change(path)
            if not any(inside) or (flags & _RENAME_NOREPLACE and look(new) and new not in self._touched_paths.touched):
                return None
            return lambda: self._renamed(old, new, inside)

        return handle

    def _renamed(self, old: bytes, new: bytes, inside: tuple[bool, bool]) -> None:
        if all(inside):
            self._other_writers.expect_move(old, new)
        else:
            self._other_writers.ignore_changes_of(new if inside[1] else old)
        self._touched_paths.renamed(old, new, inside=inside)

    def _on_link(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            flags = arguments[call.flags] if call.flags is not None else 0
            old = self._path_or_descriptor(call, pid, arguments, follow=bool(flags & _AT_SYMLINK_FOLLOW))
            new = self._target(call, pid, arguments)
            ours = [path if path is not None and self._resolver.inside(path) else None for path in (old, new)]
            return None if ours == [None, None] else lambda: self._linked(*ours)

        return handle

    def _linked(self, old: bytes | None, new: bytes | None) -> None:
        if new is not None:
            self._other_writers.expect(new, WriteKind.CREATED)
        self._touched_paths.linked(old, new)

    def _on_bind(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            raw = self._read(pid, arguments[1], min(arguments[2], _SOCKADDR_MAX_BYTES))
            name = unix_name(raw)
            if name is None or name.startswith(b"@"):
                self._outside_effects.bound(name or (internet_address(raw) or (b"", ""))[0])
                return None
            path = self._resolver.name(pid, AT_FDCWD, name, follow=False)
            self._outside_effects.bound(path or name)
            return self._inside(path, self._touched_paths.created, WriteKind.CREATED)

        return handle

    def _on_connect(self, call: SystemCall) -> Handler:
        def handle(pid: int, arguments: Arguments) -> Act | None:
            size = min(arguments[call.path + 1], _SOCKADDR_MAX_BYTES)
            raw = self._read(pid, arguments[call.path], size)
            name = unix_name(raw)
            if name is not None and not name.startswith(b"@"):
                name = self._resolver.name(pid, AT_FDCWD, name, follow=True)
                name = None if name is None or look(name) is None else name
            found = (name, "other_daemon") if name is not None else internet_address(raw)
            return None if found is None else lambda: self._outside_effects.connected(*found)

        return handle

    def _inside(self, path: bytes | None, then: Callable[[bytes], None], *kinds: WriteKind) -> Act | None:
        if path is None:
            return None
        if not self._resolver.inside(path):
            self._outside_effects.may_change(path)
            return None

        def act() -> None:
            self._other_writers.expect(path, *kinds)
            then(path)

        return act

    def _path(self, call: SystemCall, pid: int, arguments: Arguments, *, follow: bool) -> bytes | None:
        dirfd = AT_FDCWD if call.dirfd == CWD else arguments[call.dirfd] & 0xFFFFFFFF
        return self._resolver.name(pid, dirfd, self._text(pid, arguments[call.path]), follow=follow)

    def _target(self, call: SystemCall, pid: int, arguments: Arguments) -> bytes | None:
        dirfd = AT_FDCWD if call.to_dirfd == CWD else arguments[call.to_dirfd] & 0xFFFFFFFF
        return self._resolver.name(pid, dirfd, self._text(pid, arguments[call.to_path]), follow=False)

    def _path_or_descriptor(self, call: SystemCall, pid: int, arguments: Arguments, *, follow: bool) -> bytes | None:
        """The path of a call that takes a name or a descriptor.

        An empty or missing name means the descriptor itself.
        """
        if call.dirfd != CWD and (not arguments[call.path] or not self._text(pid, arguments[call.path])):
            dirfd = arguments[call.dirfd] & 0xFFFFFFFF
            if dirfd == AT_FDCWD:
                return self._resolver.name(pid, AT_FDCWD, b".", follow=True)
            return self._resolver.descriptor(pid, dirfd)
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


def _unreadable(error: OSError) -> CallRefusedError:
    """The error for memory that we cannot read.

    A bad address fails as in the kernel; a process that hides its memory may change nothing.
    """
    return CallRefusedError(errno.EFAULT if error.errno in (errno.EFAULT, errno.ESRCH) else errno.EIO)


def _still_waits(listener: int, identity: int) -> bool:
    """Whether the stopped call still waits. If not, its process id may belong to another process now."""
    try:
        fcntl.ioctl(listener, _STILL_WAITS, struct.pack("=Q", identity))
    except FileNotFoundError:
        return False
    return True


StrategyName: TypeAlias = Literal["notify", "watch", "scan", "overlay", "bare"]
Attribution: TypeAlias = Literal["call", "window"]
Coverage: TypeAlias = tuple[tuple[bytes, str], ...]


@fast_dataclass(slots=True, frozen=True)
class CaughtPaths:
    """Absolute real paths that may have changed.

    With attribution `window`, other processes may have changed them too.
    """

    touched: frozenset[bytes]
    coverage: Coverage = ()
    stops: int = 0
    attribution: Attribution = "call"
    # The touched paths that another program changed as well while the command ran.
    shared: frozenset[bytes] = frozenset()


class Capture(Protocol):
    """A strategy for one command. The caller calls `begin` once, `received` as the command starts, then `end`."""

    @property
    def name(self) -> StrategyName: ...

    def begin(self, command: Command) -> StartOptions:
        """Get ready. Answers the options that the strategy adds to the command's start."""

    def received(self, word: str, fds: list[int]) -> None:
        """Take over a descriptor that the command's process sent."""

    def end(self) -> CaughtPaths:
        """The changed paths, after the last descendant has ended. Raises an error that stopped the capture."""


class Notify:
    """Captures each change before it happens. The supervisor's thread calls `keeper`.

    `caught` is set once `end` was called, even if it raised. If `lingers`, it continues to count the writes of other
    programs until the caller calls `late`, which it must do.
    """

    name: StrategyName = "notify"

    def __init__(self, keeper: PreimageKeeper, *, lingers: bool = False) -> None:
        self.caught = CaughtPaths(frozenset())
        self._lingers = lingers
        self._keeper = keeper
        self._supervisor: Supervisor | None = None

    def begin(self, command: Command) -> StartOptions:
        self._supervisor = Supervisor(command.root, self._keeper)
        return StartOptions(program=seccomp.program(kernel.MACHINE, notify=True), listens=True)

    def received(self, word: str, fds: list[int]) -> None:
        assert self._supervisor is not None
        self._supervisor.start(fds[0])

    def end(self) -> CaughtPaths:
        supervisor = self._supervisor
        assert supervisor is not None
        try:
            supervisor.join()
        finally:
            touched, shared = supervisor.touched, supervisor.shared()
            self.caught = CaughtPaths(touched, supervisor.coverage(), supervisor.stops, shared=shared)
            # Another program may have opened a file before the command ended and save it later; `late` checks for that.
            if not touched or not self._lingers:
                supervisor.close()
        return self.caught

    def late(self) -> frozenset[bytes]:
        """The paths touched by the command that another process changed after `end`."""
        if self._supervisor is None:
            return frozenset()
        try:
            return self._supervisor.shared() - self.caught.shared
        finally:
            self._supervisor.close()
