"""The part of the background process that runs verbs of other processes: one fork of it for each verb.

It has imported every module that the verbs need, has one thread, and opens no store, so a fork of it is a fresh process
that need not import anything. The fork takes over the caller's standard streams, folder and environment and then runs
the verb as any process would, to the exit handlers. The caller (`mulligan.command_client`) waits for its end.
"""

from __future__ import annotations

import array
import atexit
import gc
import io
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from mulligan.command_client import COLD, SOCKET
from mulligan.values.clock import monotonic_s

_READY_FORKS = 2
"""The second serves the next command of a script while another fork is made."""
_HANDLES = 4
_MESSAGE_MAX = 16 * 1024 * 1024
_READ_S = 5.0
_CREDENTIALS = struct.Struct("=iII")
_NAMESPACES = ("mnt", "user", "pid", "net")
_SAME_STATUS = ("Uid", "Gid", "Groups", "CapEff", "CapBnd")
_UNCONFINED = {"TracerPid": "0", "NoNewPrivs": "0", "Seccomp": "0"}
"""The status of an unconfined process. A sandboxed or traced caller must run the verb itself, because a fork of this
process has none of its restrictions."""


PRELOADED = (
    "mulligan.cli.inspect",
    "mulligan.cli.undo",
    "mulligan.cli.exec",
    "mulligan.api",
    "mulligan.agents.hooks.socket",
    "mulligan.effects.patch",
    "mulligan.effects.perform",
    "mulligan.effects.read",
    "mulligan.effects.sessions",
    "mulligan.servers.mcp.dispatch",
    "mulligan.history.power_cuts",
    "mulligan.history.undo",
    "mulligan.session.bundle.redaction",
    "mulligan.store.maintenance",
    "mulligan.store.sqlite",
)
"""Modules that a served verb needs, imported in advance together with what they import."""


_REHEARSED = (
    ["log", "--store", "memory:"],
    ["call", "exists", "--args", '{"path": "proc"}', "--store", "memory:"],
)


class Request(NamedTuple):
    """A verb to run for another process. `umask` is that of the caller."""

    argv: list[str]
    environment: dict[bytes, bytes]
    text_errors: list[str]
    handles: list[int]
    umask: int
    pid: int


_Served = tuple[socket.socket, Request]


class CommandServer:
    """The command server, as seen by the background process."""

    def __init__(self, process: int, life: int, used: mmap.mmap) -> None:
        self._process = process
        self._life = life
        self._used = used

    @property
    def used_at_s(self) -> float:
        """When it last ran a verb, as `monotonic_s` counts."""
        used: float = struct.unpack("=d", self._used[:8])[0]
        return used

    @property
    def has_ended(self) -> bool:
        try:
            return os.waitpid(self._process, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def begin(self, folder: str) -> None:
        """Let it serve the socket in this folder, which belongs to the background process. Once."""
        os.write(self._life, os.fsencode(folder) + b"\0")

    def close(self) -> None:
        os.close(self._life)


def start(run: Callable[[list[str]], int], *, lock: int | None = None) -> CommandServer | int:
    """Fork the command server, which waits for `begin`. The caller has one thread: a fork takes no other along.

    Returns in this process, and in each fork that has run a verb: then the exit code. `run` runs one verb. `lock` is
    the background process's own, if it has it already: a long verb must not keep it.
    """
    ends, life = os.pipe()
    used = mmap.mmap(-1, 8)
    used[:8] = struct.pack("=d", monotonic_s())
    process = os.fork()
    if process:
        os.close(ends)
        return CommandServer(process, life, used)
    os.close(life)
    if lock is not None:
        os.close(lock)
    _leave_terminal()
    folder = _folder_to_serve(ends)
    if folder is None:
        return 0
    for name in PRELOADED:
        import_module(name)
    served = _serve(_Listening(folder, _listen(folder), ends, used, _loaded_sources(), run))
    return 0 if served is None else _run(*served, run)


def _leave_terminal() -> None:
    """Ctrl-C is for the process that started us, and a reader of its output must not wait for our end."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nothing, handle)
    os.close(nothing)


def _folder_to_serve(ends: int) -> str | None:
    """What `begin` wrote; None if the background process has ended, or closed us, without it."""
    told = b""
    while not told.endswith(b"\0"):
        piece = os.read(ends, 4_096)
        if not piece:
            return None
        told += piece
    return os.fsdecode(told[:-1])


class _Listening(NamedTuple):
    """State that the command server and its forks share. `ends` is readable once the background process has ended."""

    folder: str
    listener: socket.socket
    ends: int
    used: mmap.mmap
    sources: dict[str, int]
    run: Callable[[list[str]], int]


def _serve(shared: _Listening) -> _Served | None:
    """Keep some forks ready until the background process ends. Returns in a fork that has a caller; else None."""
    address = os.path.join(shared.folder, SOCKET)
    own = os.stat(address).st_ino
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page
    ready_forks: set[int] = set()
    while True:
        while len(ready_forks) < _READY_FORKS:
            is_ready, ready = os.pipe()  # the fork closes its end when it has a caller
            if os.fork() == 0:
                for other in (is_ready, *ready_forks):
                    os.close(other)
                return _wait_for_caller(shared, ready)
            os.close(ready)
            ready_forks.add(is_ready)
        woken, _, _ = select.select([*ready_forks, shared.ends], [], [])
        if shared.ends in woken or _is_outdated(shared.sources):
            with suppress(OSError):
                if os.stat(address).st_ino == own:
                    os.unlink(address)
            return None
        for gone in woken:
            os.close(gone)
            ready_forks.discard(gone)


def _wait_for_caller(shared: _Listening, ready: int) -> _Served | None:
    """Run in a ready fork: wait for a caller. First it runs verbs on an empty store, so that the kernel copies the
    shared memory pages before a caller waits."""
    for argv in _REHEARSED:
        shared.run(argv)
    while True:
        woken, _, _ = select.select([shared.listener.fileno(), shared.ends], [], [])
        if shared.ends in woken:
            return None
        try:
            caller, _ = shared.listener.accept()
        except OSError:
            continue  # another fork has taken this caller, or the caller has gone
        shared.used[:8] = struct.pack("=d", monotonic_s())
        if _is_outdated(shared.sources):
            caller.sendall(COLD)
            return None
        request = _accept(caller)
        if request is not None:
            shared.listener.close()
            os.close(shared.ends)
            os.close(ready)
            return caller, request
        caller.close()


def _listen(folder: str) -> socket.socket:
    os.chdir(folder)
    with suppress(FileNotFoundError):
        os.unlink(SOCKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(SOCKET)
    finally:
        os.umask(before)
    listener.listen(64)
    listener.setblocking(False)
    os.chdir("/")
    return listener


def _loaded_sources() -> dict[str, int]:
    """When each of Mulligan's loaded source files changed last."""
    names = [name for name in sys.modules if name.partition(".")[0] == "mulligan"]
    files = [getattr(sys.modules[name], "__file__", None) for name in names]
    return {file: _changed_ns(file) for file in files if file is not None}


def _is_outdated(sources: dict[str, int]) -> bool:
    """Whether another version of Mulligan was installed after this process imported its modules."""
    return any(_changed_ns(file) != changed_ns for file, changed_ns in sources.items())


def _changed_ns(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def _accept(caller: socket.socket) -> Request | None:
    """The request; None if the caller differs in user, groups, rights, limits, namespaces or root directory."""
    caller.settimeout(_READ_S)
    handles = array.array("i")
    try:
        pid, uid, _ = _CREDENTIALS.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        head, ancillary, _, _ = caller.recvmsg(8, socket.CMSG_SPACE(_HANDLES * handles.itemsize))
        for _, _, data in ancillary:
            handles.frombytes(data)
        message = _read(caller, int.from_bytes(head, sys.byteorder))
        status = _status(pid)
        if len(handles) == _HANDLES and message is not None and uid == os.geteuid() and _is_like_us(pid, status):
            return _parse(message, list(handles), int(status["Umask"], 8), pid)
        caller.sendall(COLD)
    except (OSError, ValueError, KeyError):
        pass
    for handle in handles:
        os.close(handle)
    return None


def _read(caller: socket.socket, size: int) -> bytes | None:
    if size > _MESSAGE_MAX:
        return None
    data = bytearray()
    while len(data) < size and (piece := caller.recv(size - len(data))):
        data += piece
    return bytes(data) if len(data) == size else None


def _parse(message: bytes, handles: list[int], umask: int, pid: int) -> Request:
    words = message.split(b"\0")
    errors, count, rest = [one.decode() for one in words[:3]], int(words[3]), words[4:]
    argv = [os.fsdecode(one) for one in rest[:count]]
    pairs = (one.partition(b"=") for one in rest[count:])
    return Request(argv, {name: value for name, _, value in pairs if name}, errors, handles, umask, pid)


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def _is_like_us(pid: int, theirs: dict[str, str]) -> bool:
    ours = _status(os.getpid())
    if any(theirs.get(name) != value for name, value in _UNCONFINED.items()):
        return False
    if any(theirs[name].split() != ours[name].split() for name in _SAME_STATUS):
        return False
    theirs_at, ours_at = os.stat(f"/proc/{pid}/root"), os.stat("/")
    if (theirs_at.st_dev, theirs_at.st_ino) != (ours_at.st_dev, ours_at.st_ino):
        return False
    names = [f"ns/{name}" for name in _NAMESPACES]
    if any(os.readlink(f"/proc/{pid}/{name}") != os.readlink(f"/proc/self/{name}") for name in names):
        return False
    with open(f"/proc/{pid}/limits", "rb") as limits, open("/proc/self/limits", "rb") as own:
        return limits.read() == own.read()


def _run(caller: socket.socket, request: Request, run: Callable[[list[str]], int]) -> int:
    """Take over the caller's streams, folder and environment, and run the verb."""
    os.setpgid(0, 0)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    caller.settimeout(None)
    caller.sendall(os.getpid().to_bytes(4, sys.byteorder))
    for stream, handle in enumerate(request.handles[:3]):
        os.dup2(handle, stream)
    with suppress(OSError):
        os.fchdir(request.handles[3])
    for handle in request.handles:
        os.close(handle)
    os.umask(request.umask)
    os.environb.clear()
    os.environb.update(request.environment)
    os.environb[b"MULLIGAN_CALLER_PID"] = b"%d" % request.pid
    time.tzset()
    _open_streams(request)
    sys.argv = ["mulligan", *request.argv]
    code = [1]

    def end() -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        with suppress(OSError):
            caller.sendall(bytes(code))
        os._exit(code[0])

    # Exit handlers run last in, first out. After all others have run, the verb is done, and we exit at once, without
    # letting Python deallocate its objects.
    atexit.register(end)
    code[0] = run(request.argv) & 0xFF
    return code[0]


def _open_streams(request: Request) -> None:
    """Open the standard streams as Python does at its start."""
    at_once = bool(request.environment.get(b"PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = os.fdopen(number, "wb" if number else "rb", closefd=False)
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors=request.text_errors[number],
            newline="\n" if number else None,
            line_buffering=number == 2 or os.isatty(number),
            write_through=at_once and number > 0,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
