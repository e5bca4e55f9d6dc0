"""Running tools: each call is a transaction over everything the run's state holds.

A call that fails, in whatever way, leaves the slices, resources and randomness as they were, and one entry in the log.
A call that succeeds stands as a whole. It is the same for every provider: this is the only place that does it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import Any

from mulligan.agents.gate import Gate, Passing
from mulligan.agents.tools import AnyTool, ProviderToolCall, Tool, ToolContext, as_result, registry_of
from mulligan.effects.async_call import run_in_thread
from mulligan.history.composite import CompositeSnapshot, ExecutionState, restoring_together
from mulligan.session.known import ToolInvoked, ToolResult
from mulligan.session.orphans import Watched, abort_orphans, watch
from mulligan.session.resources import Births, watching_births
from mulligan.session.snapshot import SnapshotMetadata
from mulligan.session.state import Attempt
from mulligan.session.types import has_json_form
from mulligan.store.fork_locks import shared_lock
from mulligan.values.faults import MulliganError
from mulligan.values.here import Holder, block_exit, holder_of
from mulligan.values.plain import plain
from mulligan.values.state_faults import (
    DeadlineExceededError,
    ExecutionStateError,
    PromptEvaluationError,
    RestoreFailedError,
    ToolValidationError,
    VisibilityExpansionRequired,
)

RENDERED_CHARACTERS = 1000
LOGGED_CHARACTERS = 4000
_making_gates = shared_lock()


@dataclass(slots=True)
class ToolExecutionOutcome:
    """What a tool call has come to so far."""

    result: ToolResult[Any] | None = None
    tool: Tool[Any, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


class _Transaction:
    """One tool call around a state. Entered before the handler runs; left, it commits or puts back, and logs.

    An ordinary exception ends here and becomes a failed result; what must be seen by others is raised again.
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
        """Whatever command the handler is waiting for ends now."""
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
        """Whether the exception ends here."""
        ended = False
        try:
            found = self._finished(error)
            ended = True
        finally:
            if not ended:
                self._ending.give_up()
        if _is_deadline(found):
            words = f"{self._call.name} ran past the deadline; nothing of it was kept."
            raise PromptEvaluationError(words, prompt_name=self._context.prompt_name, phase="tool") from found
        if found is not None and error is None and _is_for_others(found):
            raise found
        return error is not None and not _is_for_others(error)

    def _finished(self, error: BaseException | None) -> BaseException | None:
        """What the call failed with, or None."""
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
    """What a tool call began from, and how it ends. Every step may be asked for again after an interrupt."""

    def __init__(
        self, state: ExecutionState, call: ProviderToolCall, context: ToolContext, outcome: ToolExecutionOutcome
    ) -> None:
        self.watched: Watched | None = None
        self._state = state
        self._call = call
        self._context = context
        self._outcome = outcome
        self._births = Births()
        self._births_block = watching_births(self._births)
        self._attempt: Attempt | None = None
        self._entry: ToolInvoked | None = None

    def begin(self, holder: Holder | None) -> None:
        state = self._state
        metadata = SnapshotMetadata(f"pre:{self._call.id}", self._call.id, self._call.name, "pre_tool")
        self._parts = (state.session, state.resources, state.clock, state.rng)
        self._started: datetime = state.clock.now()
        self._pre = state.snapshot(metadata=metadata)
        self._births_block.enter(holder)
        self._attempt = state.session.attempt(self._call.name, self._call.id)
        self._attempt.__enter__()

    def stop(self) -> None:
        if self._attempt is not None:
            self._attempt.stop()

    @property
    def is_over(self) -> bool:
        """Whether it is committed, or nothing of it is left; or it never began."""
        return self._attempt is None or self._attempt.is_over

    # Success.

    def take_value(self) -> Exception | None:
        """A value that is a dataclass is an event of its own: it goes to the slice of its type.

        What is wrong, if something is that the tool has to answer for: a reducer refused, or it cannot be stored.
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
        """The entry that says so is a part of what is committed: without the commit, the log does not claim success."""
        attempt = self._begun
        self._log(self._outcome.result or ToolResult(""))
        try:
            attempt.__exit__(None, None, None)
        finally:
            # Whatever a listener raises, the call has been committed then.
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
        """Resources first: if they cannot all be put back, nothing is, and the call stands as the handler left it."""
        try:
            self._restore_resources()
        except (MulliganError, OSError) as stuck:
            self._leave(keep=True)
            words = f"{self._message()}; and then the state could not be put back: {stuck}"
            if error is not None and not isinstance(error, Exception):
                # Who is interrupted or cancelled must learn of that first.
                error.add_note(words)
                return
            raise RestoreFailedError(words, tool_error=self._message()) from (error or stuck)
        self._leave(keep=False)
        self._record(post=False)

    def give_up(self) -> None:
        """An interrupt came while the call began or ended, or its commit was refused."""
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
        # What a failed call gave is no state; the log tells only what it said.
        self._log(replace(result, value=None, success=False))
        if not keep:
            error = self._outcome.error
            self._begun.fail(type(error).__name__ if error is not None else "success_false")
        self._begun.__exit__(None, None, None)
        self._forget()

    def _forget(self) -> None:
        self._births_block.end()
        if self.watched is not None:
            self.watched.forget()

    def _restore_resources(self) -> None:
        state = self._state
        state.session, state.resources, state.clock, state.rng = self._parts
        if self._is_read_only:
            return
        with restoring_together(state.captured_whole(), self._pre.resources):
            for lazy, made, first in reversed(self._births.born):
                if first is not None:
                    made.restore(first)
                lazy.forget()

    @property
    def _is_read_only(self) -> bool:
        return self._outcome.tool is not None and self._outcome.tool.read_only

    def _message(self) -> str:
        return self._outcome.result.message if self._outcome.result is not None else ""

    # The record.

    def _log(self, result: ToolResult[Any]) -> None:
        """In the changes of this very call, also if it is aborted from another thread."""
        self._entry = ToolInvoked(
            name=self._call.name,
            params={name: _cut(value) for name, value in self._outcome.params.items()},
            result=_for_log(result),
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


def _for_log(result: ToolResult[Any]) -> ToolResult[Any]:
    """Logs only grow, and are read whole: so long texts are cut, and a value that cannot be stored is left out."""
    value = _cut(result.value) if has_json_form(result.value) else None
    return ToolResult(_cut(result.message), value, result.success)


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= LOGGED_CHARACTERS:
        return value
    return f"{value[:LOGGED_CHARACTERS]}… ({len(value)} characters)"


def _is_deadline(error: BaseException | None) -> bool:
    """A tool that found that time is over."""
    return isinstance(error, MulliganError) and error.code == "deadline_exceeded"


def _is_for_others(error: BaseException) -> bool:
    """What is not the tool's to answer for: retries, broken state, and the end of the process or task."""
    passed_on = VisibilityExpansionRequired | PromptEvaluationError | RestoreFailedError
    return not isinstance(error, Exception) or isinstance(error, passed_on)


def _as_failure(tool: str, error: BaseException) -> ToolResult[Any]:
    said = str(error) or type(error).__name__
    kind = "got wrong arguments" if isinstance(error, ToolValidationError) else "failed"
    return ToolResult(f"{tool} {kind}: {said}", None, success=False)


class tool_execution:
    """A tool call as a block. If the context knows the tool, it has run when the block begins and the outcome has its
    result; else the block does the work and sets `outcome.result`. Leaving the block commits or puts everything back:

        with tool_execution(context=context, tool_call=call, execution_state=state) as outcome:
            outcome.result = ToolResult("done")
    """

    def __init__(self, *, context: ToolContext, tool_call: ProviderToolCall, execution_state: ExecutionState) -> None:
        self.exit_held: Holder | None = None
        self._context = replace(context, execution_state=execution_state, tool_call_id=tool_call.id)
        self._call = tool_call
        self._ending = _BlockEnding(_passing(self._context, tool_call), self._transaction_of(execution_state))
        self._is_over = False

    def _transaction_of(self, state: ExecutionState) -> _Transaction:
        return _Transaction(state, self._call, self._context)

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
        """The handler's own failure ends the transaction at once; its success leaves it open for the block."""
        self._is_over = True
        with _Leaving(self._ending.transaction) as leaving:
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
    """How a tool call as a block ends: the transaction, then the gate."""

    def __init__(self, passing: Passing | nullcontext[None], transaction: _Transaction) -> None:
        self.watched: Watched | None = None
        self.transaction = transaction
        self._passing = passing

    def begin(self) -> ToolExecutionOutcome:
        self._passing.__enter__()
        return self.transaction.__enter__()

    def forget_if_over(self) -> None:
        """If it is not, because an interrupt came, it is aborted before the next call."""
        if self.transaction.is_over:
            self.transaction.abort_orphan()
            self._passing.__exit__(None, None, None)
            if self.watched is not None:
                self.watched.forget()

    def abort_orphan(self) -> str | None:
        name = self.transaction.abort_orphan()
        self.forget_if_over()
        return name


class _Leaving:
    """Leaves a transaction, if that is needed, as its own block would."""

    def __init__(self, transaction: _Transaction) -> None:
        self.is_needed = True
        self._transaction = transaction

    def __enter__(self) -> _Leaving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.is_needed and self._transaction.leave(error)


@dataclass(slots=True, init=False)
class ToolRunner:
    """Runs the tools of a registry on one state, each call as a transaction. Safe to use from many threads and tasks:
    calls whose resources are captured whole wait for each other, unless the tool is read-only."""

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
        """Tools by name, or in a list. A plain function becomes a tool, as `tool` makes one."""
        self.execution_state = execution_state
        self.tool_registry = registry_of(tool_registry)
        self.prompt_name = prompt_name
        self.adapter = adapter

    def execute(self, tool_call: ProviderToolCall, *, context: ToolContext | None = None) -> ToolResult[Any]:
        """The tool's result; a failed one if it raised. Async handlers are run to their end.

        Raises VisibilityExpansionRequired, PromptEvaluationError for a deadline, RestoreFailedError, and whatever ends
        the process; in each case nothing of the call is left.
        """
        abort_orphans()
        told = self._context(tool_call, context)
        with _passing(told, tool_call):
            transaction = _Transaction(self.execution_state, tool_call, told)
            with transaction as outcome:
                outcome.result = _run_here(_prepared(outcome, tool_call, told))
            return transaction.outcome.result or ToolResult("")

    async def aexecute(self, tool_call: ProviderToolCall, *, context: ToolContext | None = None) -> ToolResult[Any]:
        """The same for an event loop: sync handlers run in a worker thread. Cancelling it aborts the call.

        A thread cannot be stopped, so who cancels waits for the handler; but the commands that it runs are killed.
        """
        abort_orphans()
        told = self._context(tool_call, context)
        async with _passing(told, tool_call):
            transaction = _Transaction(self.execution_state, tool_call, told)
            with transaction as outcome:
                outcome.result = await _run_async(_prepared(outcome, tool_call, told), transaction.stop)
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


@plain(slots=True, frozen=True)
class _Prepared:
    tool: Tool[Any, Any]
    call: Callable[[], Any]
    context: ToolContext


def _prepared(outcome: ToolExecutionOutcome, call: ProviderToolCall, context: ToolContext) -> _Prepared:
    """Find the tool, read its arguments, look at the clock."""
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
        given = _to_its_end(_awaited(given, prepared.context))
    return _in_time(as_result(given), prepared.context)


def _to_its_end(coroutine: Any) -> Any:
    """Run a coroutine from sync code; from inside an event loop, on a loop of its own in another thread."""
    if _is_loop_running():
        return _in_thread(copy_context(), lambda: asyncio.run(coroutine))
    return asyncio.run(coroutine)


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(context: Any, act: Callable[[], Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, act).result()


async def _run_async(prepared: _Prepared, stop: Callable[[], None]) -> ToolResult[Any]:
    context = prepared.context
    if prepared.tool.is_async:
        given = await _awaited(prepared.call(), context)
    else:
        given = await run_in_thread(prepared.call, stop)
        if inspect.isawaitable(given):
            given = await _awaited(given, context)
    return _in_time(as_result(given), context)


async def _awaited(given: Any, context: ToolContext) -> Any:
    """With the deadline as a limit, so that a handler that only waits is cut short."""
    left_s = None if context.deadline is None else (context.deadline - context.clock.now()).total_seconds()
    try:
        async with asyncio.timeout(left_s) as limit:
            return await given
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceededError("The deadline passed while the tool was at work.") from None


def _in_time(result: ToolResult[Any], context: ToolContext) -> ToolResult[Any]:
    context.check_deadline()
    return result


def _gate_of(state: ExecutionState) -> Gate:
    with _making_gates:
        if not isinstance(state.gate, Gate):
            state.gate = Gate()
        return state.gate


def _needs_gate(context: ToolContext, call: ProviderToolCall) -> bool:
    """Where nothing is captured whole, calls cannot harm each other; nor can one that only reads."""
    tool = context.tools.get(call.name)
    return bool(context.execution_state.captured_whole()) and not (tool is not None and tool.read_only)


def _passing(context: ToolContext, call: ProviderToolCall) -> Passing | nullcontext[None]:
    return _gate_of(context.execution_state).passed() if _needs_gate(context, call) else nullcontext()
