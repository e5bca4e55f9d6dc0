"""Runs a quick verb in the background process, which has imported everything already; else the caller runs it itself.

Nearly all the time of `mulligan status` is import. This module imports nothing that the interpreter has not loaded, but
for built-in modules. The background process forks a child for the verb, and the child gets this process's standard
streams, folder and environment, so that the answer, the questions and the modes of files are the same.
"""

import os
import sys

try:
    # What `signal` and `socket` are made of: importing those takes as long as starting Python.
    import _signal as signal  # type: ignore[import-not-found]
    import _socket as socket
except ImportError:
    import signal
    import socket  # type: ignore[no-redef]

from mulligan.agents.hooks.client import (
    background_command,
    background_folder,
    now_ns,
    start_detached,
    state_home,
    untrusted,
)

SOCKET = "commands.sock"
COLD = b"\0\0\0\0"
"""The answer of a background process that must not serve this caller."""

_SERVED = frozenset({"status", "log", "show", "diff", "undo", "redo", "call"})
_STARTS_COMMANDS = frozenset({"shell", "exec", "host.exec", "host.session.open", "host.session.signal"})
"""The command must be a child of the caller: terminal, job control, limits and namespaces are the caller's."""
_SETTINGS_FOR_PYTHON = frozenset({"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"})
_START_AGAIN_NS = 5 * 1_000_000_000
_CONNECT_S = 1.0


def run_in_background(argv: list[str]) -> "int | None":
    """The exit code of the verb; None if this process has to run it."""
    if not _may_be_served(argv):
        return None
    home = state_home(os.environ)
    folder = background_folder(home)
    address = os.path.join(folder, SOCKET)
    if untrusted(home) or untrusted(folder) or untrusted(address):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not _connect(connection, folder):
            _start(home, folder)
            return None
        return _ask(connection, argv)
    finally:
        connection.close()


def _may_be_served(argv: list[str]) -> bool:
    """Whether another process gives the same answer. Settings of the loader or of Python may be there to change it."""
    if not argv or argv[0] not in _SERVED or (argv[0] == "call" and not _STARTS_COMMANDS.isdisjoint(argv)):
        return False
    if any(one.startswith("--store") for one in argv) or not hasattr(socket, "SO_PEERCRED"):
        return False
    for name in os.environ:
        if name.startswith(("LD_", "PYTHON")) and name not in _SETTINGS_FOR_PYTHON:
            return False
    off = "off" in (os.environ.get("MULLIGAN_BACKGROUND"), os.environ.get("MULLIGAN_HOOKS_PROCESS"))
    return not off and "MULLIGAN_CALL" not in os.environ and "MULLIGAN_STORE" not in os.environ


def _connect(connection: "socket.socket", folder: str) -> bool:
    # The name of a socket has at most 107 bytes, and the folder may have more.
    try:
        handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(f"/proc/self/fd/{handle}/{SOCKET}")
    except OSError:
        return False
    finally:
        os.close(handle)
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(peer[4:8], sys.byteorder) == os.geteuid()


def _start(home: str, folder: str) -> None:
    """Start the background process for the next verb. Reads write nothing, so only where there is a store already."""
    if not os.path.exists(os.path.join(home, "store.db")):
        return
    mark = os.path.join(folder, "started")
    try:
        for made in (os.path.dirname(folder), folder):
            if not os.path.isdir(made):
                os.mkdir(made, 0o700)
        handle = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(handle)
            if status.st_size and 0 <= now_ns() - status.st_mtime_ns < _START_AGAIN_NS:
                return
            os.pwrite(handle, b"1", 0)
        finally:
            os.close(handle)
    except OSError:
        return
    start_detached([*background_command(), "hooks", "keep", "--store", home])


def _ask(connection: "socket.socket", argv: list[str]) -> "int | None":
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if {one.encoding for one in streams} != {"utf-8"}:
        return None
    words = [*(os.fsencode(one.errors or "strict") for one in streams), b"%d" % len(argv), *map(os.fsencode, argv)]
    environment = [name + b"=" + value for name, value in os.environb.items()]
    message = b"\0".join([*words, *environment])
    try:
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    forward = _Forward()
    try:
        handles = b"".join(one.to_bytes(4, sys.byteorder) for one in (0, 1, 2, here))
        head = len(message).to_bytes(8, sys.byteorder)
        connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
        rest = memoryview(message)
        while rest:
            rest = rest[connection.send(rest) :]
        worker = connection.recv(4)
        if len(worker) < 4 or worker == COLD:
            return None
        forward.begin(int.from_bytes(worker, sys.byteorder))
        connection.settimeout(None)
        answer = connection.recv(1)
        return answer[0] if answer else 128 + 9  # without an answer, the worker was killed
    except OSError:
        return None if forward.worker is None else 128 + 9
    finally:
        forward.end()
        os.close(here)


class _Forward:
    """Passes this process's signals on to the worker, so that Ctrl-C reaches it. Early ones wait until it runs."""

    def __init__(self) -> None:
        self.worker: int | None = None
        self._early: list[int] = []
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)

    def begin(self, worker: int) -> None:
        self.worker = worker
        for number in self._early:
            self._take(number, None)

    def _take(self, number: int, _: object) -> None:
        if self.worker is None:
            self._early.append(number)
            return
        try:
            os.kill(self.worker, number)
        except OSError:
            return

    def end(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.worker is None:
            for number in self._early:
                os.kill(os.getpid(), number)
