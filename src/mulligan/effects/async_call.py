"""The async form of calls: `async with session.call() as call: await call.write_file(…)`.

The code below the effects is synchronous. So each effect runs in a thread of its own, with a copy of the task's
context, and the event loop goes on meanwhile. It is no thread of a pool: twenty commands that run side by side must not
keep a twenty-first call from ending.

A thread cannot be stopped. A task that is cancelled during an effect kills the commands of the call, waits for the
thread, and only then sees `CancelledError`; so nothing acts on the files after the call has put them back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from mulligan.effects.receipt import Receipt
from mulligan.effects.verbs import CallWithId, Effects
from mulligan.values.entries import Change
from mulligan.values.faults import MulliganError, fault
from mulligan.values.here import forget_ended_blocks
from mulligan.values.paths import RepoPath

if TYPE_CHECKING:
    from mulligan.effects.handle import CallHandle

P = ParamSpec("P")
T = TypeVar("T")

_STOP_EVERY_S = 0.05


async def run_in_thread(work: Callable[[], T], stop: Callable[[], object]) -> T:
    """Run `work` while the event loop goes on. When the task is cancelled: ask `stop`, wait for the end, then raise."""
    with ThreadPoolExecutor(1, "mulligan-effect") as pool:
        begun = pool.submit(copy_context().run, work)
        try:
            running = asyncio.wrap_future(begun)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await wait_until_done(running, stop)
                raise
        finally:
            # After an interrupt no loop runs that could wait. The thread must have ended before the call is aborted.
            while not begun.done():
                stop()
                wait([begun], timeout=_STOP_EVERY_S)


async def wait_until_done(running: asyncio.Future[Any], stop: Callable[[], object]) -> None:
    """Ask `stop` again and again, because one command may follow another."""
    while not running.done():
        stop()
        try:
            await asyncio.wait([running], timeout=_STOP_EVERY_S)
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()


def _awaitable(
    effect: Callable[Concatenate[Effects, P], Receipt],
) -> Callable[Concatenate[AsyncEffects, P], Coroutine[Any, Any, Receipt]]:
    async def run(self: AsyncEffects, /, *args: P.args, **params: P.kwargs) -> Receipt:
        return await self._run(partial(effect, self._effects, *args, **params))

    update_wrapper(run, effect)
    run.__annotations__["return"] = "Receipt"
    return run


class AsyncEffects:
    """Each method is the effect of the same name in `Effects`, to be awaited."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    async def perform(self, effect: str, /, **params: Any) -> Receipt:
        """Any effect or tool by its name."""
        return await self._run(partial(self._effects.perform, effect, **params))

    read_file = _awaitable(Effects.read_file)
    write_file = _awaitable(Effects.write_file)
    edit_file = _awaitable(Effects.edit_file)
    apply_patch = _awaitable(Effects.apply_patch)
    grep = _awaitable(Effects.grep)
    glob = _awaitable(Effects.glob)
    stat = _awaitable(Effects.stat)
    exists = _awaitable(Effects.exists)
    list_dir = _awaitable(Effects.list_dir)
    delete = _awaitable(Effects.delete)
    move = _awaitable(Effects.move)
    mkdir = _awaitable(Effects.mkdir)
    exec = _awaitable(Effects.exec)
    read_blob = _awaitable(Effects.read_blob)

    async def _run(self, effect: Callable[[], Receipt]) -> Receipt:
        return effect()


class AsyncCallHandle(AsyncEffects, CallWithId):
    """One call, as `async with session.call()` gives it. Each method performs one effect; its Receipt is awaited.

    Cancelling a task during an effect kills the commands of the call. Afterwards nothing of the call is kept, even if
    the block catches the `CancelledError`: then further effects and the end of the block raise `call_not_open`.
    """

    def __init__(self, handle: CallHandle) -> None:
        super().__init__(handle)
        self._handle = handle
        self._is_cancelled = False
        self._running: set[asyncio.Task[Receipt]] = set()

    @property
    def id(self) -> str:
        """The call's own id, which `undo` and `restore` take."""
        return self._handle.id

    @property
    def status(self) -> str:
        """open, committed or aborted."""
        return self._handle.status

    @property
    def is_committed(self) -> bool:
        """Whether it is, or, for a call inside another one, whether it will be with that one."""
        return self._handle.is_committed

    @property
    def changes(self) -> list[Change]:
        """What the call has changed so far."""
        return self._handle.changes

    @property
    def conflicts(self) -> list[RepoPath]:
        """After an abort: the paths that someone else had changed; they are left as they are."""
        return self._handle.conflicts

    def fail(self, reason: str) -> None:
        """Put everything back when the block ends."""
        self._handle.fail(reason)

    def stop(self) -> None:
        """Kill the command that runs in this call; it fails as `cancelled`."""
        self._handle.stop()

    async def _run(self, effect: Callable[[], Receipt]) -> Receipt:
        if self._is_cancelled:
            raise self._cancelled_fault()
        # A task, so that the end of the block can wait for an effect that the block did not await.
        running = asyncio.ensure_future(run_in_thread(effect, self._handle.stop))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            return await running
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise

    def _cancelled_fault(self) -> MulliganError:
        return fault("call_not_open", f"Call {self.id} was cancelled during an effect; nothing of it is kept.")

    async def leave(self, error: BaseException | None) -> None:
        """End the call: wait for its effects, which are stopped if the block failed, then commit or abort.

        A task that is cancelled while the call commits sees that after the commit.
        """
        late: BaseException | None = None
        if not isinstance(error, GeneratorExit):
            late = await self._finish_effects(stop=error is not None)
        if error is None and late is None and self._is_cancelled:
            late = self._cancelled_fault()
        end = partial(_end, self._handle, late or error)
        if isinstance(error, GeneratorExit):
            # The loop that would run this coroutine further is gone.
            end()
        else:
            await run_in_thread(end, _nothing)
        forget_ended_blocks()
        if late is not None:
            raise late

    async def _finish_effects(self, *, stop: bool) -> asyncio.CancelledError | None:
        """Wait for the effects that the block did not await. The cancellation that came meanwhile, if one did."""
        cancelled: asyncio.CancelledError | None = None
        for running in list(self._running):
            try:
                if not stop:
                    await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled, stop = error, True
            if stop:
                await wait_until_done(running, self._handle.stop)
        return cancelled


def _end(handle: CallHandle, error: BaseException | None) -> None:
    type(handle).__exit__(handle, None if error is None else type(error), error, None)


def _nothing() -> None:
    """The end of a call is not stopped."""
