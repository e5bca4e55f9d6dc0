"""Moves bytes between a running command and Mulligan, and enforces its deadline, until its last descendant has ended.

One loop waits for every event: output, space in the input pipe, a message of the init process, an order of another
thread, the deadline. So the deadline covers the time for input and output as well as the work itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from mulligan.exec.command import Sink, Stream
from mulligan.exec.init import close_all, receive_message, send_message
from mulligan.exec.start import StartedCommand
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass

_CHUNK_BYTES = 1 << 16
_KILL_PATIENCE_S = 5.0
# poll(2) accepts at most a few weeks, so a longer wait wakes up once an hour.
_PATIENCE_MAX_MS = 3_600_000.0
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class CommandHandle:
    """Lets other threads cancel a running command or send it a signal. Close it when the run is over."""

    def __init__(self) -> None:
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._orders: deque[tuple[str, int]] = deque()

    def cancel(self) -> None:
        """Kill the command and its descendants; if it has not started yet, as soon as it starts."""
        self._give("kill", 0)

    def signal(self, number: int) -> None:
        """Send a signal to the command and all its descendants."""
        self._give("signal", int(number))

    def fileno(self) -> int:
        return self._woken

    @contextmanager
    def woken_by_signals(self) -> Iterator[None]:
        """Let a signal that arrives just before the wait begins end the wait too; else we would notice it too late.

        This works only in the main thread, where Python handles signals. If other code (asyncio) has set the wake-up
        descriptor, it stays, because that code would miss its signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        others = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        try:
            yield
        finally:
            if others == -1:
                signal.set_wakeup_fd(-1)

    def take(self) -> list[tuple[str, int]]:
        """The orders since the last call."""
        try:
            os.read(self._woken, 4096)
        except BlockingIOError:
            return []
        taken = []
        while self._orders:
            taken.append(self._orders.popleft())
        return taken

    def close(self) -> None:
        close_all((self._woken, self._waker))

    def __enter__(self) -> CommandHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _give(self, order: str, number: int) -> None:
        self._orders.append((order, number))
        os.write(self._waker, b"!")


@fast_dataclass(slots=True)
class CommandEnding:
    """How the command ended. `failed` is the step that the machine refused; then no program ran."""

    status: int = 0
    timed_out: bool = False
    cancelled: bool = False
    survivors: int = 0
    failed: tuple[str, int] | None = None


Received = Callable[[str, list[int]], None]


class Pump:
    def __init__(
        self,
        spawned: StartedCommand,
        sink: Sink,
        *,
        stdin: bytes,
        deadline: float | None,
        handle: CommandHandle,
        received: Received,
    ) -> None:
        self._spawned = spawned
        self._channel = spawned.channel
        self._sink = sink
        self._input = memoryview(stdin)
        self._stdin = spawned.stdin
        self._streams: dict[int, Stream] = {}
        self._deadline = deadline
        self._handle = handle
        self._received = received
        self._give_up_at: float | None = None
        self._all_gone = False
        self._watched: dict[int, Callable[[], None]] = {}
        self.ending = CommandEnding()
        self._poller = select.poll()
        self._listen(spawned)

    def watch_descriptor(self, fd: int, act: Callable[[], None]) -> None:
        """Call `act` whenever this descriptor can be read while the command runs."""
        self._watched[fd] = act
        self._poller.register(fd, select.POLLIN)

    def run(self) -> CommandEnding:
        """Run until the last descendant has ended. If this raises, the command is killed before the error leaves."""
        over = False
        try:
            with self._handle.woken_by_signals():
                self._loop()
            over = True
        finally:
            if not over:
                self._kill_and_wait()
            self._close()
        return self.ending

    def _kill_and_wait(self) -> None:
        """Drop the output, kill the command and wait for its end."""
        self._sink = _NullSink()
        self._kill()
        self._loop()

    def _listen(self, spawned: StartedCommand) -> None:
        self._poller.register(self._channel, select.POLLIN)
        self._poller.register(self._handle, select.POLLIN)
        if spawned.ordered is not None:
            self._poller.register(spawned.ordered, select.POLLIN)
        if spawned.stdin >= 0:
            self._poller.register(spawned.stdin, select.POLLOUT)
        named: tuple[tuple[int, Stream], ...] = ((spawned.stdout, "stdout"), (spawned.stderr, "stderr"))
        for fd, stream in named:
            if fd >= 0:
                self._streams[fd] = stream
                self._poller.register(fd, select.POLLIN)

    def _loop(self) -> None:
        while not self._all_gone:
            for fd, _ in self._poller.poll(self._wait_ms()):
                self._serve(fd)
            self._check_deadline()
        while self._spawned.ordered is not None:
            self._read_command_process()  # The last message of the command's process may arrive after init's.
        for fd in list(self._streams):
            self._drain(fd)

    def _serve(self, fd: int) -> None:
        if fd in self._streams:
            self._pass_on(fd)
        elif fd == self._stdin:
            self._feed()
        elif fd == self._channel.fileno():
            self._read_init()
        elif fd == self._handle.fileno():
            self._carry_out_orders()
        elif fd in self._watched:
            self._watched[fd]()
        else:
            self._read_command_process()

    def _pass_on(self, fd: int) -> bool:
        """Pass on what one read gives; False when the pipe is empty."""
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data and self._is_taken(self._streams[fd], data):
            return True
        self._forget(fd)
        del self._streams[fd]
        return False

    def _is_taken(self, stream: Stream, data: bytes) -> bool:
        """Write to the sink; False if its reader is gone.

        Then the command's pipe breaks, as it would without Mulligan.
        """
        try:
            self._sink.write(stream, data)
        except BrokenPipeError:
            return False
        return True

    def _drain(self, fd: int) -> None:
        """Read the rest of the pipe, but do not wait for its end: an unrelated process may hold it open."""
        while self._pass_on(fd):
            pass

    def _feed(self) -> None:
        try:
            written = os.write(self._stdin, self._input[:_CHUNK_BYTES])
        except BlockingIOError:
            return
        except BrokenPipeError:
            written = len(self._input)
        self._input = self._input[written:]
        if not self._input:
            self._forget(self._stdin)
            self._stdin = -1

    def _forget(self, fd: int) -> None:
        self._poller.unregister(fd)
        os.close(fd)

    def _read_init(self) -> None:
        message = receive_message(self._channel)
        if message is None:
            # Without the init process, no process reaps or kills the descendants of the command.
            raise fault("internal", "The process that watches over the command was killed; the command may still run.")
        (word, *rest), fds = message
        if word == "upper":
            self._received(word, fds)
        elif word == "standby":
            ordered = socket.socket(fileno=fds[0])
            self._spawned.give_order(ordered)
            self._poller.register(ordered, select.POLLIN)
        else:
            self._all_gone = True
            if word == "failed":
                self.ending.failed = (rest[0], rest[1])
            else:
                self.ending.status, self.ending.survivors = rest

    def _read_command_process(self) -> None:
        """Read from the process that becomes the command: it sends its listener, or its failure, or closes when it
        executes.
        """
        ordered = self._spawned.ordered
        assert ordered is not None
        message = receive_message(ordered)
        if message is None:
            self._poller.unregister(ordered)
            ordered.close()
            self._spawned.ordered = None
        elif message[0][0] == "listener":
            self._received("listener", message[1])
        else:
            self.ending.failed = (message[0][1], message[0][2])

    def _carry_out_orders(self) -> None:
        for order, number in self._handle.take():
            if order == "kill":
                self.ending.cancelled = True
                self._kill()
            else:
                send_message(self._channel, ("signal", number))

    def _check_deadline(self) -> None:
        now = monotonic_s()
        if self._give_up_at is not None:
            if now >= self._give_up_at and not self._all_gone:
                self._all_gone = True
                raise fault("internal", "A descendant of the command could not be killed.")
        elif self._deadline is not None and now >= self._deadline:
            self.ending.timed_out = True
            self._kill()

    def _kill(self) -> None:
        # A second kill must not extend the time limit that the first one set.
        if self._give_up_at is None:
            self._give_up_at = monotonic_s() + _KILL_PATIENCE_S
            try:
                send_message(self._channel, ("kill",))
            except (BrokenPipeError, ConnectionResetError):
                self._all_gone = True

    def _wait_ms(self) -> float | None:
        until = self._give_up_at if self._give_up_at is not None else self._deadline
        return None if until is None else min(_PATIENCE_MAX_MS, max(0.0, until - monotonic_s()) * 1000 + 1)

    def _close(self) -> None:
        self._channel.close()
        if self._spawned.ordered is not None:
            self._spawned.ordered.close()
        self._spawned.let_go()
        for fd in (*self._streams, self._stdin):
            if fd >= 0:
                os.close(fd)


class _NullSink:
    """A sink that drops the output."""

    def write(self, stream: Stream, data: bytes) -> None:
        pass
