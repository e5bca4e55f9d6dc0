"""The client of the launcher process: starts it once, asks it for init processes, restarts it if it was killed."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from typing import Any

from mulligan.exec.command import Command
from mulligan.exec.init import BOOT, close_all, receive_message, send_message
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass

_TRIES_MAX = 3
_SOURCES = os.path.abspath(__file__).rsplit("/mulligan/", 1)[0]


@fast_dataclass(slots=True)
class StartOptions:
    """Options that a capture strategy adds to a command: a system call filter, namespaces, a sandbox."""

    program: bytes | None = None
    # Used instead of `program` if the machine refuses a network namespace.
    program_without_sockets: bytes | None = None
    listens: bool = False
    # Init writes the end time of the last process into this descriptor, because Mulligan may have died by then.
    mark: int = -1
    confinement: dict[str, Any] = field(default_factory=dict)
    # A descriptor of ours, and the function to call whenever it can be read while the command runs.
    tended: tuple[int, Callable[[], None]] | None = None


class Launcher:
    """One launcher process with the init process that it holds ready.

    For any thread; a forked child must not share it.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._channel: socket.socket | None = None
        self._pid = 0
        self._on_the_way = False

    def warm_up(self) -> None:
        """Start the launcher now, so that the first command does not wait for an interpreter (10 to 20 ms)."""
        with self._lock:
            if self._channel is None:
                self._start()

    def take(self) -> tuple[socket.socket, socket.socket]:
        """The channels of an init process and of the process that waits to become a command."""
        for _ in range(_TRIES_MAX):
            ready = self._receive()
            if ready is not None:
                return socket.socket(fileno=ready[0]), socket.socket(fileno=ready[1])
        raise fault("internal", "The helper process that starts commands does not stay alive.")

    def close(self) -> None:
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """Forget the launcher in a forked child, because it belongs to the parent."""
        if self._channel is not None:
            self._channel.close()
        # Close only our copy of the channel: waiting for the process or killing it is up to the parent.
        self._channel, self._pid, self._on_the_way = None, 0, False

    def replenish(self) -> None:
        """Let the launcher fork the next init process while no command waits for it."""
        with self._lock:
            if self._channel is not None and not self._on_the_way:
                self._ask()

    def _receive(self) -> list[int] | None:
        """The descriptors of an init process, which the launcher may have ready. None if the launcher was killed."""
        with self._lock:
            if self._channel is None:
                self._start()
            assert self._channel is not None
            if not self._on_the_way:
                self._ask()
            self._on_the_way = False
            ready = receive_message(self._channel)
            if ready is None:
                self._stop()
                return None
            return ready[1]

    def _ask(self) -> None:
        assert self._channel is not None
        try:
            send_message(self._channel, "more")
        except (BrokenPipeError, ConnectionResetError):
            return  # The launcher was killed. The next `_receive` notices and starts another.
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
    if not sys.executable:
        raise fault("internal", "Commands are started by a helper interpreter, and sys.executable is empty.")
    # posix_spawn does not copy the page tables of a large program, as fork does.
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


@fast_dataclass(slots=True)
class StartedCommand:
    """A starting command: the channels of its init process and of itself, and our ends of its streams."""

    channel: socket.socket
    ordered: socket.socket | None
    order: dict[str, Any]
    given: tuple[int, ...]
    stdin: int = -1
    stdout: int = -1
    stderr: int = -1

    def give_order(self, ordered: socket.socket) -> None:
        """Send the order to the waiting process, with its ends of the streams; close them here."""
        self.ordered = ordered
        send_message(ordered, self.order, self.given)
        self.let_go()

    def let_go(self) -> None:
        if self.given != (0, 1, 2):
            close_all(self.given)
        self.given = ()


def spawn(command: Command, extras: StartOptions) -> StartedCommand:
    """Let a waiting process run the command. Its channels tell whether it did start.

    A confined command gets its order later: init moves into its namespaces first and then sends the channel of a new
    process.
    """
    given, kept = ((0, 1, 2), (-1, -1, -1)) if command.terminal else _streams(command)
    # The descendants of a background command may live on; init kills those of other commands after a moment.
    linger_s = None if command.background else command.linger_s
    for _ in range(_TRIES_MAX):
        channel, ordered = LAUNCHER.take()
        spawned = StartedCommand(channel, None, _order(command, extras), given, *kept)
        try:
            send_message(channel, (linger_s, extras.confinement), (extras.mark,) if extras.mark >= 0 else ())
            if extras.confinement:
                ordered.close()
            else:
                spawned.give_order(ordered)
        except (BrokenPipeError, ConnectionResetError):
            channel.close()  # the process was killed while it waited; take another one
            ordered.close()
        else:
            return spawned
    close_all([fd for fd in (*given, *kept) if fd > 2])
    raise fault("internal", "The processes that wait to start commands do not stay alive.")


def _streams(command: Command) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    if command.stdin:
        given_in, kept_in = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(kept_in, False)
    else:
        given_in, kept_in = _inherited(command.stdin_fd), -1
    kept_out, given_out = os.pipe2(os.O_CLOEXEC)
    kept_err, given_err = os.pipe2(os.O_CLOEXEC)
    # `pump` serves all streams in one loop, so a read or write of one stream must not block it.
    os.set_blocking(kept_out, False)
    os.set_blocking(kept_err, False)
    return (given_in, given_out, given_err), (kept_in, kept_out, kept_err)


def _inherited(fd: int | None) -> int:
    """A copy of the caller's descriptor for the command; /dev/null if there is none or the caller has closed it."""
    if fd is not None:
        with suppress(OSError):
            return os.dup(fd)
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _order(command: Command, extras: StartOptions) -> dict[str, Any]:
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
