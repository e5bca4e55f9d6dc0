"""One call at a time where parallel ones could not be told apart: resources that are captured and put back whole.

Threads and tasks wait in one line. Calls made inside the one that holds the gate wait for each other in a line of their
own: if one of them fails, it puts back only what it did itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from types import TracebackType

from mulligan.session.orphans import Watched, abort_orphans, watch
from mulligan.store.fork_locks import shared_lock
from mulligan.values.here import Here, Holder, block_exit, holder_of
from mulligan.values.state_faults import ExecutionStateError

_LOOK_EVERY_S = 0.2


class Gate:
    """`root` is the gate of the whole state; this may be the one of the calls inside a call."""

    def __init__(self, root: Gate | None = None) -> None:
        self.root: Gate = root or self
        self.holder: Passage | None = None
        self._lock = shared_lock()
        self._waiting: deque[Passage] = deque()

    def passed(self) -> Passing:
        """A block, for `with` or `async with`, in which no other call made beside this one runs."""
        return Passing(self._here())

    def _here(self) -> Gate:
        return next((gate for gate in _inside.all() if gate.root is self), self)

    def queue(self, passage: Passage) -> None:
        """The gate is free, or it will be this one's turn."""
        with self._lock:
            self._waiting.append(passage)
            if self.holder is None:
                self.holder = self._waiting[0]

    def leave(self, passage: Passage) -> None:
        """Whether it waited or held the gate, the next one's turn comes. Any number of times."""
        with self._lock:
            if passage in self._waiting:
                self._waiting.remove(passage)
            if self.holder is passage or self.holder is None:
                self.holder = self._waiting[0] if self._waiting else None
            following = self.holder
        if following is not None and following is not passage:
            following.wake()


_inside: Here[Gate] = Here("mulligan_gates")
"""The gate for calls made inside the call that is made here."""


class Passage:
    """One call in line at a gate."""

    def __init__(self, gate: Gate) -> None:
        self.watched: Watched | None = None
        self.loop = _loop_here()
        self.thread = threading.get_ident()
        self._gate = gate
        self._free = threading.Event()
        self._is_free_on_loop = asyncio.Event()
        self._block = _inside.block(Gate(gate.root))

    def enter(self, holder: Holder | None) -> None:
        """Waits as a thread. Raises instead of waiting for a call that only this very thread could finish."""
        self.loop = None
        self._gate.queue(self)
        while self._gate.holder is not self:
            self._check_can_end()
            self._free.wait(_LOOK_EVERY_S)
            abort_orphans()
        self._block.enter(holder)

    def _check_can_end(self) -> None:
        ahead = self._gate.holder
        if ahead is None or ahead is self:
            return
        if ahead.loop is not None and ahead.loop is _loop_here():
            words = "Another tool call of this run is in progress on this event loop; await it first."
            raise ExecutionStateError(words)

    async def aenter(self, holder: Holder | None) -> None:
        """Waits as a task. A call that was interrupted and holds the gate is looked for every now and then."""
        self._gate.queue(self)
        while self._gate.holder is not self:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._is_free_on_loop.wait()
            abort_orphans()
        self._block.enter(holder)

    def wake(self) -> None:
        self._free.set()
        if self.loop is not None:
            # A loop that is closed runs nobody who waits.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._is_free_on_loop.set)

    def leave(self) -> None:
        """Any number of times."""
        self._block.end()
        self._gate.leave(self)
        if self.watched is not None:
            self.watched.forget()

    def abort_orphan(self) -> None:
        self.leave()


class Passing:
    """The block around a call that passes a gate."""

    def __init__(self, gate: Gate) -> None:
        self.exit_held: Holder | None = None
        self._passage = Passage(gate)

    def __enter__(self) -> None:
        passage, inside = self._passage, False
        passage.watched = watch(self, passage)
        try:
            passage.enter(holder_of(self))
            inside = True
        finally:
            if not inside:
                passage.leave()

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._passage.leave()

    async def __aenter__(self) -> None:
        passage, inside = self._passage, False
        holder = holder_of(self)
        passage.watched = watch(self, passage)
        try:
            await passage.aenter(holder)
            inside = True
        finally:
            if not inside:
                passage.leave()

    @block_exit
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._passage.leave()


def _loop_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
