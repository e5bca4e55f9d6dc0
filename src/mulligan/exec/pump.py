"""Moves bytes between a running command and us, and keeps its deadline, until its last descendant is gone.

One loop over everything that can happen: output, room for input, the warden's word, an order from another thread, time.
So the deadline covers feeding the input and draining the pipes as much as the work itself.
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
from dataclasses import dataclass
from types import TracebackType

from mulligan.values.clock import monotonic_s
from mulligan.values.faults import fault
from mulligan.workspace.exec import wire
from mulligan.workspace.exec.output import Sink, Stream
from mulligan.workspace.exec.spawn import Spawned

_CHUNK_BYTES = 1 << 16
_KILL_PATIENCE_S = 5.0
_PATIENCE_MAX_MS = 3_600_000.0
"""The kernel waits no longer than a few weeks at a time, and nothing is lost by looking at the clock before."""
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Handle:
    """How other threads reach a running command: cancel it, or send it a signal. Close it when the run is over."""

    def __init__(self) -> None:
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._orders: deque[tuple[str, int]] = deque()

    def cancel(self) -> None:
        """Kill it and everything it started. Before it runs: as soon as it does."""
        self._give("kill", 0)

    def signal(self, number: int) -> None:
        """Send a signal to it and all its descendants."""
        self._give("signal", int(number))

    def fileno(self) -> int:
        return self._woken

    @contextmanager
    def woken_by_signals(self) -> Iterator[None]:
        """A signal that comes just before we begin to wait ends the waiting as well: else nobody would see it come.

        In the main thread, where signals are handled; not if somebody else is woken by them, who would miss them then.
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
        """Orders given since the last time."""
        try:
            os.read(self._woken, 4096)
        except BlockingIOError:
            return []
        taken = []
        while self._orders:
            taken.append(self._orders.popleft())
        return taken

    def close(self) -> None:
        wire.close_all((self._woken, self._waker))

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _give(self, order: str, number: int) -> None:
        self._orders.append((order, number))
        os.write(self._waker, b"!")


@dataclass(slots=True)
class Ending:
    """How it went. `failed` is the step the machine refused: then nothing was run."""

    status: int = 0
    timed_out: bool = False
    cancelled: bool = False
    survivors: int = 0
    failed: tuple[str, int] | None = None


Received = Callable[[str, list[int]], None]


class Pump:
    def __init__(
        self, spawned: Spawned, sink: Sink, *, stdin: bytes, deadline: float | None, handle: Handle, received: Received
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
        self._tended: dict[int, Callable[[], None]] = {}
        self.ending = Ending()
        self._poller = select.poll()
        self._listen(spawned)

    def tend(self, fd: int, act: Callable[[], None]) -> None:
        """Somebody else's descriptor, served along with the command's while it runs."""
        self._tended[fd] = act
        self._poller.register(fd, select.POLLIN)

    def run(self) -> Ending:
        """Until all is over. Whatever goes wrong here, the command is killed first and the error comes after."""
        over = False
        try:
            with self._handle.woken_by_signals():
                self._loop()
            over = True
        finally:
            if not over:
                self._bury()
            self._close()
        return self.ending

    def _bury(self) -> None:
        """Nobody takes the output any more; wait for the end all the same."""
        self._sink = _Nowhere()
        self._kill()
        self._loop()

    def _listen(self, spawned: Spawned) -> None:
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
            for fd, _ in self._poller.poll(self._patience_ms()):
                self._serve(fd)
            self._keep_time()
        while self._spawned.ordered is not None:
            self._hear_from_itself()  # its last word may come after the warden's
        for fd in list(self._streams):
            self._drain(fd)

    def _serve(self, fd: int) -> None:
        if fd in self._streams:
            self._pass_on(fd)
        elif fd == self._stdin:
            self._feed()
        elif fd == self._channel.fileno():
            self._hear()
        elif fd == self._handle.fileno():
            self._obey()
        elif fd in self._tended:
            self._tended[fd]()
        else:
            self._hear_from_itself()

    def _pass_on(self, fd: int) -> bool:
        """One read; False when there is nothing more for now."""
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
        """False when whoever we pass it on to has gone: then the command's own pipe breaks, as without us."""
        try:
            self._sink.write(stream, data)
        except BrokenPipeError:
            return False
        return True

    def _drain(self, fd: int) -> None:
        """What was written before the last writer we know of ended. A stranger who holds the pipe is not waited for."""
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

    def _hear(self) -> None:
        message = wire.receive(self._channel)
        if message is None:
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

    def _hear_from_itself(self) -> None:
        """The process that becomes the command: its listener, its failure, or silence when it is the command."""
        ordered = self._spawned.ordered
        assert ordered is not None
        message = wire.receive(ordered)
        if message is None:
            self._poller.unregister(ordered)
            ordered.close()
            self._spawned.ordered = None
        elif message[0][0] == "listener":
            self._received("listener", message[1])
        else:
            self.ending.failed = (message[0][1], message[0][2])

    def _obey(self) -> None:
        for order, number in self._handle.take():
            if order == "kill":
                self.ending.cancelled = True
                self._kill()
            else:
                wire.send(self._channel, ("signal", number))

    def _keep_time(self) -> None:
        now = monotonic_s()
        if self._give_up_at is not None:
            if now >= self._give_up_at and not self._all_gone:
                self._all_gone = True
                raise fault("internal", "A descendant of the command could not be killed.")
        elif self._deadline is not None and now >= self._deadline:
            self.ending.timed_out = True
            self._kill()

    def _kill(self) -> None:
        if self._give_up_at is None:
            self._give_up_at = monotonic_s() + _KILL_PATIENCE_S
            try:
                wire.send(self._channel, ("kill",))
            except (BrokenPipeError, ConnectionResetError):
                self._all_gone = True

    def _patience_ms(self) -> float | None:
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


class _Nowhere:
    """Takes output that nobody can take any more."""

    def write(self, stream: Stream, data: bytes) -> None:
        pass
