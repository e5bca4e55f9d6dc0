"""The warden of one command: its parent, the reaper of all its descendants, and the one who kills them.

It is a process of its own so that adopting orphans (PR_SET_CHILD_SUBREAPER) never changes the program that embeds us,
and so that the command is killed even when that program dies by `kill -9`: the channel closes, the warden ends it all.
It runs in the launcher's bare interpreter.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

from mulligan.workspace.exec import confine, kernel, wire

_DEFAULTED = (
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGHUP, signal.SIGTERM),
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2),
)
_FREEZE_ROUNDS_MAX = 1000
_KILL_RETRY_S = 0.02
_SAME_INTERRUPT_S = 1.0
"""How long after our own interrupt the word of it may come that was sent to all of our group."""


class Order:
    """What to become and how, as it came over the wire."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.argv: list[bytes] = body["argv"]
        self.env: dict[bytes, bytes] = body["env"]
        self.root: bytes = body["root"]
        self.cwd: bytes = body["cwd"]
        self.program: bytes | None = body["program"]
        self.program_without_sockets: bytes | None = body["program_without_sockets"]
        self.listens: bool = body["listens"]
        self.new_session: bool = body["new_session"]


def serve(channel: socket.socket, ordered: socket.socket) -> None:
    """Keep a process ready to become the command, and watch over it until its last descendant is gone.

    Its order goes straight to it. We are told only how to watch (`linger_s`) and whether to move somewhere first; then
    the waiting process is of no use, and the channel of another one is sent back.
    """
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, _ignore)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    pid = _stand_by(ordered, confine.Rules())
    received = wire.receive(channel)
    if received is None:
        return  # nobody wants it any more; the waiting process sees its own channel close
    (linger_s, confinement), marks = received
    if confinement:
        _end(pid)
        try:
            pid = _stand_by_confined(confinement, channel)
        except confine.StepFailed as failure:
            wire.send(channel, ("failed", failure.step, failure.errno))
            return
    Watch(channel, pid, linger_s, marks).until_all_are_gone()


def _ignore(_signal: int, _frame: object) -> None:
    """A handler, not SIG_IGN: the wake-up descriptor needs one, and children must stay waitable."""


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _stand_by_confined(confinement: dict[str, Any], channel: socket.socket) -> int:
    rules = confine.enter(confinement, channel)
    orders, ordered = socket.socketpair()
    pid = _stand_by(ordered, rules)
    wire.send(channel, ("standby",), (orders.fileno(),))
    orders.close()
    return pid


def _stand_by(ordered: socket.socket, rules: confine.Rules) -> int:
    """Fork the command's process before it is the command. It waits to be told what to become."""
    pid = os.fork()
    if pid == 0:
        _become_command(ordered, rules)
    ordered.close()
    return pid


def _become_command(ordered: socket.socket, rules: confine.Rules) -> NoReturn:
    """Silence and a closed channel are success; otherwise the step that failed is the answer."""
    step = "start"
    try:
        for number in _DEFAULTED:
            signal.signal(number, signal.SIG_DFL)
        received = wire.receive(ordered)
        if received is None:
            os._exit(0)
        order, stdio = Order(received[0]), received[1]
        if order.new_session:
            os.setsid()
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        step = "cwd"
        _enter(order)
        step = "sandbox"
        rules.apply_to_self()
        step = "seccomp"
        _filter_self(order, ordered, rules)
        step = "exec"
        _execute(order)
    except OSError as error:
        wire.send(ordered, ("failed", step, error.errno or 0))
    finally:
        os._exit(127)


def _enter(order: Order) -> None:
    """Where we are then is what counts: a folder on the way may have become a link since it was judged."""
    os.chdir(order.cwd)
    if not (os.getcwdb() + b"/").startswith(order.root.rstrip(b"/") + b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def _execute(order: Order) -> None:
    """As execvp: the first that can be executed on the command's own PATH; the most telling error otherwise."""
    program = order.argv[0]
    if b"/" in program:
        os.execve(program, order.argv, order.env)
    failure = OSError(2, os.strerror(2))
    for folder in order.env.get(b"PATH", os.defpath.encode()).split(b":"):
        try:
            os.execve((folder or b".") + b"/" + program, order.argv, order.env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = error
    raise failure


def _filter_self(order: Order, channel: socket.socket, rules: confine.Rules) -> None:
    """Install the system call filter, last of all: what we did before it is not the command's doing."""
    program = order.program if rules.has_own_network else order.program_without_sockets or order.program
    if program is None:
        if order.listens or rules.without_network:
            raise OSError(38, "no filter for this machine")
        return
    if not order.listens:
        _install(program, 0)
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the kernel's own file
    flags = kernel.SECCOMP_FILTER_FLAG_NEW_LISTENER
    try:
        listener = _install(program, flags | kernel.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV)
    except OSError as error:
        if error.errno != 22:  # EINVAL: before Linux 5.19 a signal may restart a stopped call; the stop comes twice
            raise
        listener = _install(program, flags)
    wire.send(channel, ("listener",), (listener,))
    os.close(listener)


def _install(program: bytes, flags: int) -> int:
    """Without no_new_privs where we may (root), so that setuid programs keep working there."""
    try:
        return kernel.install_filter(program, flags)
    except PermissionError:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        return kernel.install_filter(program, flags)


class Watch:
    """Waits for the command and all its descendants, passing on orders from the channel."""

    def __init__(self, channel: socket.socket, main_pid: int, linger_s: float | None, marks: list[int]) -> None:
        self._channel = channel
        self._marks = marks
        self._main_pid = main_pid
        self._linger_s = linger_s
        self._main_running = True
        self._status = 0
        self._kill_at: float | None = None
        self._killing = False
        self._survivors = 0
        self._interrupts = 0
        self._interrupted_at = 0.0
        self._woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker)
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(self._woken, select.POLLIN)

    def until_all_are_gone(self) -> None:
        while self._reap():
            for fd, _ in self._poller.poll(self._patience_ms()):
                if fd == self._woken:
                    self._wake()
                else:
                    self._obey()
            if self._killing or (self._kill_at is not None and time.monotonic() >= self._kill_at):
                self._kill()
        for mark in self._marks:
            os.pwrite(mark, b"%d" % time.clock_gettime_ns(time.CLOCK_REALTIME), 0)
        try:
            wire.send(self._channel, ("gone", self._status, self._survivors))
        except (BrokenPipeError, ConnectionResetError):
            return  # nobody is there to hear it

    def _wake(self) -> None:
        """By signals, whose numbers are in the pipe."""
        try:
            interrupts = os.read(self._woken, 4096).count(signal.SIGINT)
        except BlockingIOError:
            return
        if interrupts:
            self._interrupts, self._interrupted_at = self._interrupts + interrupts, time.monotonic()

    def _reap(self) -> bool:
        """Collect everyone who ended; False when nobody is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._main_pid and self._main_running:
                self._main_ended(status)

    def _main_ended(self, status: int) -> None:
        self._main_running = False
        self._status = status
        if self._linger_s is not None:
            self._kill_at = time.monotonic() + self._linger_s

    def _patience_ms(self) -> float | None:
        if self._killing:
            return _KILL_RETRY_S * 1000
        if self._kill_at is None:
            return None
        return max(0.0, self._kill_at - time.monotonic()) * 1000 + 1

    def _obey(self) -> None:
        received = wire.receive(self._channel)
        if received is None:
            self._poller.unregister(self._channel)
            self._killing = True
            return
        order = received[0]
        if order[0] == "kill":
            self._killing = True
        elif order[0] == "signal" and not (order[1] == signal.SIGINT and self._has_come_to_all()):
            _signal_each(_descendants(), order[1])

    def _has_come_to_all(self) -> bool:
        """Whether an interrupt went to a whole group, as the terminal's do: to ourselves, and so to a command in it."""
        self._wake()
        if time.monotonic() - self._interrupted_at > _SAME_INTERRUPT_S:
            self._interrupts = 0
        if not self._interrupts or not self._main_running or os.getpgid(self._main_pid) != os.getpgrp():
            return False
        self._interrupts -= 1
        return True

    def _kill(self) -> None:
        """Freeze, then kill: a process that is stopped cannot fork away from the list it is on."""
        self._killing = True
        frozen: set[int] = set()
        for _ in range(_FREEZE_ROUNDS_MAX):
            fresh = _descendants() - frozen
            if not fresh:
                break
            _signal_each(fresh, signal.SIGSTOP)
            frozen |= fresh
        self._survivors = max(self._survivors, len(frozen) - self._main_running)
        _signal_each(frozen, signal.SIGKILL)


def _signal_each(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _descendants() -> set[int]:
    """Everyone below this process who still lives, whatever session or group they moved to."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(_parent_of(name), []).append(int(name))
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), ()):
            found.add(child)
            queue.append(child)
    return found


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b") ")[2].split(b" ", 2)[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
