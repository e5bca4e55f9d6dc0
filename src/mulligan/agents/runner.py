"""Runs tools. Each call is a transaction over the whole state of the run, for every provider.

If a call fails, the runner restores the slices, resources and randomness, and the log gets one entry. If it succeeds,
all its changes are committed together. Read `ToolRunner` first, then `_Transaction`.

Resources that are captured and restored as a whole cannot tell parallel calls apart. A `Gate` lets such calls run one
at a time: threads and tasks wait in one queue. Calls made inside the call that holds the gate have their own queue, so
a nested call that fails restores only what it changed itself.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import Any

from mulligan.agents.tools import AnyTool, ProviderToolCall, Tool, ToolContext, as_result, registry_of
from mulligan.effects.handle import run_in_thread
from mulligan.history.checkpoint import CompositeSnapshot, ExecutionState, restoring_together
from mulligan.session.state.orphan_calls import WatchedBlock, abort_orphans, watch
from mulligan.session.state.resources import CreatedResources, record_created_resources
from mulligan.session.state.session import Attempt, SnapshotMetadata
from mulligan.session.state.slices import ToolInvoked, ToolResult
from mulligan.session.state.types import has_json_form
from mulligan.store.fork_locks import shared_lock
from mulligan.values.errors import (
    DeadlineExceededError,
    ExecutionStateError,
    MulliganError,
    PromptEvaluationError,
    RestoreFailedError,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.scoped_var import Holder, ScopedVar, block_exit, holder_of

_POLL_S = 0.2


class Gate:
    """Lets one call at a time pass. `root` is the gate of the whole state; each call has a gate for nested calls."""

    def __init__(self, root: Gate | None = None) -> None:
        self.root: Gate = root or self
        self.holder: Passage | None = None
        self._lock = shared_lock()
        self._waiting: deque[Passage] = deque()

    def passed(self) -> Passing:
        """A block, for `with` or `async with`, in which no other call at the same level runs."""
        return Passing(next((gate for gate in _inside.all() if gate.root is self), self))

    def queue(self, passage: Passage) -> None:
        """Joins the queue; if the gate is free, the first in the queue gets it."""
        with self._lock:
            self._waiting.append(passage)
            if self.holder is None:
                self.holder = self._waiting[0]

    def leave(self, passage: Passage) -> None:
        """Leaves the queue or the gate, and wakes the next call. May be called any number of times."""
        with self._lock:
            if passage in self._waiting:
                self._waiting.remove(passage)
            if self.holder is passage or self.holder is None:
                self.holder = self._waiting[0] if self._waiting else None
            following = self.holder
        if following is not None and following is not passage:
            following.wake()


_inside: ScopedVar[Gate] = ScopedVar("mulligan_gates")
"""The gates for calls nested in the call that runs in this context."""


class Passage:
    """One call in the queue of a gate."""

    def __init__(self, gate: Gate) -> None:
        self.watched: WatchedBlock | None = None
        self.loop = _current_loop()
        self.thread = threading.get_ident()
        self._gate = gate
        self._free = threading.Event()
        self._is_free_on_loop = asyncio.Event()
        self._block = _inside.block(Gate(gate.root))

    def enter(self, holder: Holder | None) -> None:
        """Waits as a thread. Raises if the call ahead runs on this thread's event loop, which cannot go on then."""
        self.loop = None
        self._gate.queue(self)
        while self._gate.holder is not self:
            self._check_can_end()
            self._free.wait(_POLL_S)
            abort_orphans()
        self._block.enter(holder)

    def _check_can_end(self) -> None:
        ahead = self._gate.holder
        if ahead is None or ahead is self:
            return
        if ahead.loop is not None and ahead.loop is _current_loop():
            words = "Another tool call of this run is in progress on this event loop; await it first."
            raise ExecutionStateError(words)

    async def aenter(self, holder: Holder | None) -> None:
        """Waits as a task, and regularly aborts interrupted calls that still hold the gate."""
        self._gate.queue(self)
        while self._gate.holder is not self:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._is_free_on_loop.wait()
            abort_orphans()
        self._block.enter(holder)

    def wake(self) -> None:
        self._free.set()
        if self.loop is not None:
            # A closed loop has no waiting tasks.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._is_free_on_loop.set)

    def leave(self) -> None:
        """Leaves the gate. May be called any number of times."""
        self._block.end()
        self._gate.leave(self)
        if self.watched is not None:
            self.watched.forget()

    def abort_orphan(self) -> None:
        self.leave()


class Passing:
    """The `with` block of a call that passes a gate."""

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


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


RENDERED_CHARACTERS = 1000
LOGGED_CHARACTERS = 4000
_making_gates = shared_lock()


@fast_dataclass(slots=True)
class ToolExecutionOutcome:
    """The tool, parameters, result and error of a call, as far as they are known."""

    result: ToolResult[Any] | None = None
    tool: Tool[Any, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


class _Transaction:
    """One tool call as a `with` block around the handler. Leaving it commits or restores the state, and logs.

    An ordinary exception becomes a failed result; one that the caller must see is raised again.
    """

    def __init__(self, state: ExecutionState, call: ProviderToolCall, context: ToolContext) -> None:
        self.outcome = ToolExecutionOutcome()
        self.exit_held: Holder | None = None
        self._call = call
        self._context = context
        self._ending = _Ending(state, call, context, self.outcome)

    def __enter__(self) -> ToolExecutionOutcome:
        ending, inside = self._ending, False
        ending.watched = watch(self, ending)
        try:
            ending.begin(holder_of(self))
            inside = True
        finally:
            if not inside:
                ending.give_up()
        return self.outcome

    def stop(self) -> None:
        """Kills the command that the handler waits for."""
        self._ending.stop()

    @property
    def is_over(self) -> bool:
        return self._ending.is_over

    def abort_orphan(self) -> str | None:
        return self._ending.abort_orphan()

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.leave(error)

    def leave(self, error: BaseException | None) -> bool:
        """Commits or restores. True: the exception is handled and must not be raised again."""
        ended = False
        try:
            found = self._finished(error)
            ended = True
        finally:
            if not ended:
                self._ending.give_up()
        if isinstance(found, MulliganError) and found.code == "deadline_exceeded":
            words = f"{self._call.name} ran past the deadline; its changes were rolled back."
            raise PromptEvaluationError(words, prompt_name=self._context.prompt_name, phase="tool") from found
        if found is not None and error is None and _is_for_caller(found):
            raise found
        return error is not None and not _is_for_caller(error)

    def _finished(self, error: BaseException | None) -> BaseException | None:
        """Ends the call; returns the error it failed with, or None."""
        outcome, found = self.outcome, error
        if error is None and (outcome.result is None or outcome.result.success):
            found = self._ending.take_value()
            if found is None:
                self._ending.commit()
                return None
        outcome.error = found
        if found is not None:
            outcome.result = _as_failure(self._call.name, found)
        self._ending.abort(found)
        return found


class _Ending:
    """The state at the beginning of a tool call, and the steps that end it. After an interrupt a step may run again."""

    def __init__(
        self, state: ExecutionState, call: ProviderToolCall, context: ToolContext, outcome: ToolExecutionOutcome
    ) -> None:
        self.watched: WatchedBlock | None = None
        self._state = state
        self._call = call
        self._context = context
        self._outcome = outcome
        self._created = CreatedResources()
        self._created_block = record_created_resources(self._created)
        self._attempt: Attempt | None = None
        self._entry: ToolInvoked | None = None

    def begin(self, holder: Holder | None) -> None:
        state = self._state
        metadata = SnapshotMetadata(f"pre:{self._call.id}", self._call.id, self._call.name, "pre_tool")
        self._parts = (state.session, state.resources, state.clock, state.rng)
        self._started: datetime = state.clock.now()
        self._pre = state.snapshot(metadata=metadata)
        self._created_block.enter(holder)
        self._attempt = state.session.attempt(self._call.name, self._call.id)
        self._attempt.__enter__()

    def stop(self) -> None:
        if self._attempt is not None:
            self._attempt.stop()

    @property
    def is_over(self) -> bool:
        """Whether the call is committed or rolled back, or never began."""
        return self._attempt is None or self._attempt.is_over

    # Success.

    def take_value(self) -> Exception | None:
        """Dispatches a result value that is a dataclass to the slice of its type.

        Returns the error if a reducer refuses the value or the store cannot hold it: then the tool has failed.
        """
        value = getattr(self._outcome.result, "value", None)
        session = self._state.session
        if is_dataclass(value) and not isinstance(value, type):
            errors = session.dispatch(value).errors
            if errors:
                return errors[0]
        try:
            session.check_kept()
        except ExecutionStateError as refused:
            return refused
        return None

    def commit(self) -> None:
        """Commits. The log entry is part of the commit, so the log never claims a success that was not committed."""
        attempt = self._begun
        self._log(self._outcome.result or ToolResult(""))
        try:
            attempt.__exit__(None, None, None)
        finally:
            # A listener may raise after the commit.
            if attempt.is_committed:
                attempt.finish()
                self._record(post=True)
                self._forget()

    @property
    def _begun(self) -> Attempt:
        assert self._attempt is not None, "the call has begun"
        return self._attempt

    # Failure.

    def abort(self, error: BaseException | None) -> None:
        """Rolls back, resources first: if they cannot all be restored, none is, and the handler's changes are kept."""
        try:
            self._restore_resources()
        except (MulliganError, OSError) as stuck:
            self._leave(keep=True)
            words = f"{self._message()}; and then the state could not be restored: {stuck}"
            if error is not None and not isinstance(error, Exception):
                # An interrupt or a cancellation must reach the caller as such.
                error.add_note(words)
                return
            raise RestoreFailedError(words, tool_error=self._message()) from (error or stuck)
        self._leave(keep=False)
        self._record(post=False)

    def give_up(self) -> None:
        """Ends a call that was interrupted while it began or ended, or whose commit was refused."""
        attempt = self._attempt
        if attempt is not None:
            attempt.resolve()
            if not attempt.is_committed:
                self._fail(attempt)
            attempt.finish()
        self._forget()

    def _fail(self, attempt: Attempt) -> None:
        self._restore_resources()
        if not attempt.is_over and not any(event is self._entry for event, _ in attempt.pending.events):
            self._log(_as_failure(self._call.name, KeyboardInterrupt()))

    def abort_orphan(self) -> str | None:
        attempt = self._attempt
        was_open = attempt is not None and not attempt.is_over
        self.give_up()
        return attempt.id if attempt is not None and was_open and not attempt.is_committed else None

    def _leave(self, *, keep: bool) -> None:
        result = self._outcome.result or ToolResult("", success=False)
        # The value of a failed call never enters a slice; the log has only its message.
        self._log(replace(result, value=None, success=False))
        if not keep:
            error = self._outcome.error
            self._begun.fail(type(error).__name__ if error is not None else "success_false")
        self._begun.__exit__(None, None, None)
        self._forget()

    def _forget(self) -> None:
        self._created_block.end()
        if self.watched is not None:
            self.watched.forget()

    def _restore_resources(self) -> None:
        state = self._state
        state.session, state.resources, state.clock, state.rng = self._parts
        if self._outcome.tool is not None and self._outcome.tool.read_only:
            return
        with restoring_together(state.captured_whole(), self._pre.resources):
            for lazy, made, first in reversed(self._created.created):
                if first is not None:
                    made.restore(first)
                lazy.forget()

    def _message(self) -> str:
        return self._outcome.result.message if self._outcome.result is not None else ""

    # The record.

    def _log(self, result: ToolResult[Any]) -> None:
        """Adds the log entry to this call's changes, even if another thread aborts the call."""
        self._entry = ToolInvoked(
            name=self._call.name,
            params={name: _cut(value) for name, value in self._outcome.params.items()},
            # A log only grows and is read as a whole, so long texts are cut.
            result=ToolResult(
                _cut(result.message), _cut(result.value) if has_json_form(result.value) else None, result.success
            ),
            created_at=self._state.clock.now(),
            call_id=self._call.id,
            prompt_name=self._context.prompt_name,
            adapter=self._context.adapter,
            rendered_output=result.message[:RENDERED_CHARACTERS],
        )
        self._state.session.dispatch_in(self._begun.pending, self._entry)

    def _record(self, *, post: bool) -> None:
        state = self._state
        if state.checkpoints is None:
            return
        after: CompositeSnapshot | None = None
        if post:
            tagged = SnapshotMetadata(f"post:{self._call.id}", self._call.id, self._call.name, "post_tool")
            after = state.snapshot(metadata=tagged)
        elapsed = state.clock.now() - self._started
        state.checkpoints.record(self._call.id, pre=self._pre, post=after, result=self._outcome.result, elapsed=elapsed)


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= LOGGED_CHARACTERS:
        return value
    return f"{value[:LOGGED_CHARACTERS]}… ({len(value)} characters)"


def _is_for_caller(error: BaseException) -> bool:
    """Whether the caller must see the error: a retry, a broken state, the end of the process or task."""
    passed_on = VisibilityExpansionRequired | PromptEvaluationError | RestoreFailedError
    return not isinstance(error, Exception) or isinstance(error, passed_on)


def _as_failure(tool: str, error: BaseException) -> ToolResult[Any]:
    said = str(error) or type(error).__name__
    kind = "got wrong arguments" if isinstance(error, ToolValidationError) else "failed"
    return ToolResult(f"{tool} {kind}: {said}", None, success=False)


class tool_execution:
    """A tool call as a `with` block. If the context has the tool, it runs before the block begins, and the outcome has
    its result; otherwise the block does the work and sets `outcome.result`. Leaving the block commits or rolls back:

        with tool_execution(context=context, tool_call=call, execution_state=state) as outcome:
            outcome.result = ToolResult("done")
    """

    def __init__(self, *, context: ToolContext, tool_call: ProviderToolCall, execution_state: ExecutionState) -> None:
        self.exit_held: Holder | None = None
        self._context = replace(context, execution_state=execution_state, tool_call_id=tool_call.id)
        self._call = tool_call
        transaction = _Transaction(execution_state, tool_call, self._context)
        self._ending = _BlockEnding(_passing(self._context, tool_call), transaction)
        self._is_over = False

    def __enter__(self) -> ToolExecutionOutcome:
        abort_orphans()
        ending, inside = self._ending, False
        ending.watched = watch(self, ending)
        try:
            outcome = ending.begin()
            if self._call.name in self._context.tools:
                self._run(outcome)
            inside = True
        finally:
            if not inside:
                ending.abort_orphan()
        return outcome

    def _run(self, outcome: ToolExecutionOutcome) -> None:
        """Runs the handler. A failure ends the transaction at once; a success leaves it open for the block."""
        self._is_over = True
        with _LeaveTransaction(self._ending.transaction) as leaving:
            outcome.result = _run_here(_prepared(outcome, self._call, self._context))
            self._is_over = leaving.is_needed = not outcome.result.success

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return False if self._is_over else self._ending.transaction.leave(error)
        finally:
            self._ending.forget_if_over()


class _BlockEnding:
    """Ends `tool_execution`: first the transaction, then the gate."""

    def __init__(self, passing: Passing | nullcontext[None], transaction: _Transaction) -> None:
        self.watched: WatchedBlock | None = None
        self.transaction = transaction
        self._passing = passing

    def begin(self) -> ToolExecutionOutcome:
        self._passing.__enter__()
        return self.transaction.__enter__()

    def forget_if_over(self) -> None:
        """Leaves the gate if the transaction has ended. After an interrupt, the next call aborts it instead."""
        if self.transaction.is_over:
            self.transaction.abort_orphan()
            self._passing.__exit__(None, None, None)
            if self.watched is not None:
                self.watched.forget()

    def abort_orphan(self) -> str | None:
        name = self.transaction.abort_orphan()
        self.forget_if_over()
        return name


class _LeaveTransaction:
    """Leaves a transaction if `is_needed`, like its own block."""

    def __init__(self, transaction: _Transaction) -> None:
        self.is_needed = True
        self._transaction = transaction

    def __enter__(self) -> _LeaveTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.is_needed and self._transaction.leave(error)


@dataclass(slots=True, init=False)
class ToolRunner:
    """Runs the tools of a registry on one state, each call as a transaction.

    Thread-safe and task-safe: calls wait for each other if a resource is captured as a whole, except read-only tools.
    """

    execution_state: ExecutionState
    tool_registry: Mapping[str, Tool[Any, Any]]
    prompt_name: str
    adapter: str

    def __init__(
        self,
        execution_state: ExecutionState,
        tool_registry: Mapping[str, AnyTool] | Iterable[AnyTool],
        prompt_name: str = "",
        adapter: str = "",
    ) -> None:
        """`tool_registry` is a mapping or a list. A plain function becomes a tool, as with `tool`."""
        self.execution_state = execution_state
        self.tool_registry = registry_of(tool_registry)
        self.prompt_name = prompt_name
        self.adapter = adapter

    def execute(self, tool_call: ProviderToolCall, *, context: ToolContext | None = None) -> ToolResult[Any]:
        """The tool's result; a failed one if the handler raised. An async handler runs to its end.

        Raises VisibilityExpansionRequired, PromptEvaluationError for a deadline, RestoreFailedError, and what ends the
        process; in each case the call is rolled back.
        """
        abort_orphans()
        tool_context = self._context(tool_call, context)
        with _passing(tool_context, tool_call):
            transaction = _Transaction(self.execution_state, tool_call, tool_context)
            with transaction as outcome:
                outcome.result = _run_here(_prepared(outcome, tool_call, tool_context))
            return transaction.outcome.result or ToolResult("")

    async def aexecute(self, tool_call: ProviderToolCall, *, context: ToolContext | None = None) -> ToolResult[Any]:
        """`execute` for an event loop: sync handlers run in a worker thread. Cancelling it aborts the call.

        Python cannot stop a thread, so a cancelled call waits for its handler; Mulligan kills the handler's commands.
        """
        abort_orphans()
        tool_context = self._context(tool_call, context)
        async with _passing(tool_context, tool_call):
            transaction = _Transaction(self.execution_state, tool_call, tool_context)
            with transaction as outcome:
                outcome.result = await _run_async(_prepared(outcome, tool_call, tool_context), transaction.stop)
            return transaction.outcome.result or ToolResult("")

    def _context(self, call: ProviderToolCall, context: ToolContext | None) -> ToolContext:
        given = context or ToolContext(self.execution_state, adapter=self.adapter)
        return replace(
            given,
            execution_state=self.execution_state,
            tool_call_id=call.id,
            prompt_name=given.prompt_name or self.prompt_name,
            adapter=given.adapter or self.adapter,
            tools=self.tool_registry,
        )


@fast_dataclass(slots=True, frozen=True)
class _Prepared:
    tool: Tool[Any, Any]
    call: Callable[[], Any]
    context: ToolContext


def _prepared(outcome: ToolExecutionOutcome, call: ProviderToolCall, context: ToolContext) -> _Prepared:
    """Finds the tool, parses its arguments, checks the deadline."""
    tool = outcome.tool = context.tools.get(call.name)
    if tool is None:
        raise ToolValidationError(f"There is no tool {call.name!r}; there are {sorted(context.tools)}.")
    outcome.params = call.parsed()
    bound = tool.bound(outcome.params, context)
    context.check_deadline()
    return _Prepared(tool, bound, context)


def _run_here(prepared: _Prepared) -> ToolResult[Any]:
    given = prepared.call()
    if inspect.isawaitable(given):
        given = _run_until_done(_awaited(given, prepared.context))
    return _checked_deadline(as_result(given), prepared.context)


def _run_until_done(coroutine: Any) -> Any:
    """Runs a coroutine from sync code; inside a running event loop, on another loop in another thread."""
    if _current_loop() is None:
        return asyncio.run(coroutine)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, asyncio.run, coroutine).result()


async def _run_async(prepared: _Prepared, stop: Callable[[], None]) -> ToolResult[Any]:
    context = prepared.context
    if prepared.tool.is_async:
        given = await _awaited(prepared.call(), context)
    else:
        given = await run_in_thread(prepared.call, stop)
        if inspect.isawaitable(given):
            given = await _awaited(given, context)
    return _checked_deadline(as_result(given), context)


async def _awaited(given: Any, context: ToolContext) -> Any:
    """Awaits with the deadline as a limit, so that a handler that only waits is stopped."""
    left_s = None if context.deadline is None else (context.deadline - context.clock.now()).total_seconds()
    try:
        async with asyncio.timeout(left_s) as limit:
            return await given
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceededError("The deadline passed while the tool ran.") from None


def _checked_deadline(result: ToolResult[Any], context: ToolContext) -> ToolResult[Any]:
    context.check_deadline()
    return result


def _passing(context: ToolContext, call: ProviderToolCall) -> Passing | nullcontext[None]:
    """A block for the call. It passes the gate if a resource is captured as a whole and the tool may change it."""
    state, tool = context.execution_state, context.tools.get(call.name)
    if not state.captured_whole() or (tool is not None and tool.read_only):
        return nullcontext()
    with _making_gates:
        if not isinstance(state.gate, Gate):
            state.gate = Gate()
        return state.gate.passed()
