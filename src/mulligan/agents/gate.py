"""One call at a time where parallel ones could not be told apart: resources that are captured and put back whole.

Threads and tasks wait in one line. A call made inside the one that holds the gate passes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.state_faults import ExecutionStateError

_held: ContextVar[tuple[int, ...]] = ContextVar("mulligan_gates", default=())


class Gate:
    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._is_taken = False
        self._holder: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Callable[[], None]] = deque()

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Waits as a thread. Raises instead of waiting for a task that only this very thread could finish."""
        if id(self) in _held.get():
            yield
            return
        self._wait_here()
        with self._inside(None):
            yield

    def _wait_here(self) -> None:
        free = threading.Event()
        if self._take_or_queue(free.set):
            return
        if self._holder is not None and self._holder is _loop_here():
            self._leave_line(free.set)
            raise ExecutionStateError(
                "Another tool call of this run is in progress on this event loop; await it first."
            )
        with self._in_line(free.set):
            free.wait()

    @asynccontextmanager
    async def apassed(self) -> AsyncIterator[None]:
        if id(self) in _held.get():
            yield
            return
        loop = asyncio.get_running_loop()
        free = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(free.set)

        if not self._take_or_queue(wake):
            with self._in_line(wake):
                await free.wait()
        with self._inside(loop):
            yield

    @contextmanager
    def _inside(self, loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
        token = _held.set((*_held.get(), id(self)))
        self._holder = loop
        try:
            yield
        finally:
            _held.reset(token)
            self._holder = None
            self._hand_on()

    @contextmanager
    def _in_line(self, wake: Callable[[], None]) -> Iterator[None]:
        came = False
        try:
            yield
            came = True
        finally:
            if not came:
                self._leave_line(wake)

    def _take_or_queue(self, wake: Callable[[], None]) -> bool:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return True
            self._waiting.append(wake)
            return False

    def _hand_on(self) -> None:
        """The gate stays taken and goes to whoever has waited longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft()()
            else:
                self._is_taken = False

    def _leave_line(self, wake: Callable[[], None]) -> None:
        """Somebody will not wait any longer. If it was their turn already, it is the next one's."""
        with self._lock:
            if wake in self._waiting:
                self._waiting.remove(wake)
                return
        self._hand_on()


def _loop_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
