"""Our end of the launcher: start it once, ask it for a warden, start it again if it was killed."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.faults import fault
from mulligan.workspace.exec import wire
from mulligan.workspace.exec.command import Command

_TRIES_MAX = 3
_SOURCES = os.path.abspath(__file__).rsplit("/mulligan/", 1)[0]


@dataclass(slots=True)
class Extras:
    """What a way of catching changes adds to a command: a system call filter, namespaces, a sandbox."""

    program: bytes | None = None
    program_without_sockets: bytes | None = None
    """in place of `program` where the machine gives no network namespace"""
    listens: bool = False
    mark: int = -1
    """a descriptor into which the moment of the last process's end is written, should nobody else be there to know"""
    confinement: dict[str, Any] = field(default_factory=dict)
    tended: tuple[int, Callable[[], None]] | None = None
    """a descriptor of ours, and what to do whenever it can be read while the command runs"""


class Launcher:
    """One launcher process and the warden it keeps ready. For any thread; a fork of ours must not share it."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._channel: socket.socket | None = None
        self._pid = 0
        self._on_the_way = False

    def warm_up(self) -> None:
        """Start the process now, so that the first command does not wait for an interpreter (10 to 20 ms)."""
        with self._lock:
            if self._channel is None:
                self._start()

    def take(self) -> tuple[socket.socket, socket.socket]:
        """A warden's channel, and that of the process which waits to become a command."""
        for _ in range(_TRIES_MAX):
            ready = self._receive()
            if ready is not None:
                return socket.socket(fileno=ready[0]), socket.socket(fileno=ready[1])
        raise fault("internal", "The helper process that starts commands does not stay alive.")

    def close(self) -> None:
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a forked child: the process belongs to the parent."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._pid, self._on_the_way = None, 0, False

    def replenish(self) -> None:
        """Have the next warden made while nobody waits for it."""
        with self._lock:
            if self._channel is not None and not self._on_the_way:
                self._ask()

    def _receive(self) -> list[int] | None:
        """The descriptors of a warden, the one kept ready if there is one. None if the launcher was killed."""
        with self._lock:
            if self._channel is None:
                self._start()
            assert self._channel is not None
            if not self._on_the_way:
                self._ask()
            self._on_the_way = False
            ready = wire.receive(self._channel)
            if ready is None:
                self._stop()
                return None
            return ready[1]

    def _ask(self) -> None:
        assert self._channel is not None
        try:
            wire.send(self._channel, "more")
        except (BrokenPipeError, ConnectionResetError):
            return  # it was killed; whoever receives next will find out
        self._on_the_way = True

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._pid = _start_launcher(theirs.fileno())
        self._channel = ours
        self._ask()

    def _stop(self) -> None:
        if self._channel is None:
            return
        self._channel.close()
        self._channel, self._on_the_way = None, False
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            return  # the embedding program collects all children itself


def _start_launcher(channel_fd: int) -> int:
    from mulligan.workspace.exec.launcher import BOOT

    if not sys.executable:
        raise fault("internal", "Commands are started by a helper interpreter, and sys.executable is empty.")
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-c", BOOT, _SOURCES],
        {"PATH": os.environ.get("PATH", os.defpath)},
        file_actions=[nothing, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, channel_fd, 3)],
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
    )


LAUNCHER = Launcher()
os.register_at_fork(after_in_child=LAUNCHER.forget)
atexit.register(LAUNCHER.close)


@dataclass(slots=True)
class Spawned:
    """A command on its way: the channels of its warden and of itself until it starts, and our ends of its streams."""

    channel: socket.socket
    ordered: socket.socket | None
    order: dict[str, Any]
    given: tuple[int, ...]
    stdin: int = -1
    stdout: int = -1
    stderr: int = -1

    def give_order(self, ordered: socket.socket) -> None:
        """Tell the waiting process what to become. It has its streams then, and we keep only our ends."""
        self.ordered = ordered
        wire.send(ordered, self.order, self.given)
        self.let_go()

    def let_go(self) -> None:
        if self.given != (0, 1, 2):
            wire.close_all(self.given)
        self.given = ()


def spawn(command: Command, extras: Extras) -> Spawned:
    """Have the command started. Whether it did start is what the channels say.

    One that is to be confined gets its order later: its warden moves first and then sends the channel of a new process.
    """
    given, kept = ((0, 1, 2), (-1, -1, -1)) if command.terminal else _streams(command)
    linger_s = None if command.background else command.linger_s
    for _ in range(_TRIES_MAX):
        channel, ordered = LAUNCHER.take()
        spawned = Spawned(channel, None, _order(command, extras), given, *kept)
        try:
            wire.send(channel, (linger_s, extras.confinement), (extras.mark,) if extras.mark >= 0 else ())
            if extras.confinement:
                ordered.close()
            else:
                spawned.give_order(ordered)
        except (BrokenPipeError, ConnectionResetError):
            channel.close()  # killed while it waited; there are others
            ordered.close()
        else:
            return spawned
    wire.close_all([fd for fd in (*given, *kept) if fd > 2])
    raise fault("internal", "The processes that wait to start commands do not stay alive.")


def _streams(command: Command) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    if command.stdin:
        given_in, kept_in = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(kept_in, False)
    else:
        given_in, kept_in = _inherited(command.stdin_fd), -1
    kept_out, given_out = os.pipe2(os.O_CLOEXEC)
    kept_err, given_err = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(kept_out, False)
    os.set_blocking(kept_err, False)
    return (given_in, given_out, given_err), (kept_in, kept_out, kept_err)


def _inherited(fd: int | None) -> int:
    """A copy of our descriptor for the command; nothing to read if there is none or our caller has closed it."""
    if fd is not None:
        with suppress(OSError):
            return os.dup(fd)
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _order(command: Command, extras: Extras) -> dict[str, Any]:
    return {
        "argv": list(command.argv),
        "env": dict(command.env),
        "root": command.root,
        "cwd": command.cwd,
        "program": extras.program,
        "program_without_sockets": extras.program_without_sockets,
        "listens": extras.listens,
        "new_session": not command.terminal,
    }
