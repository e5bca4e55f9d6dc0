"""The smallest whole agent: ask the model, run the tools it wants, tell it what came of them, until it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from mulligan.agents.providers import Model, provider_of
from mulligan.agents.runner import ToolRunner
from mulligan.agents.speech import Ask, Driver, Message, Reply, Said, name_of
from mulligan.agents.tools import AnyTool, ProviderToolCall, ToolContext, as_tool, by_name
from mulligan.history.composite import ExecutionState
from mulligan.session.known import PromptExecuted, PromptRendered, ToolResult, VisibilityOverrides
from mulligan.session.resources import BudgetTracker, ResourceRegistry
from mulligan.session.state import Session
from mulligan.session.types import TYPES
from mulligan.store.fork_locks import shared_lock
from mulligan.values.call_scope import check_call_open
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.plain import plain
from mulligan.values.state_faults import PromptEvaluationError, VisibilityExpansionRequired

ROUNDS_MAX = 100
EXPANSIONS_MAX = 10


@plain(slots=True, frozen=True)
class TranscriptSnapshot:
    messages: tuple[Message, ...]
    provider_payload: Any = None


class TranscriptState:
    """What has been said in an evaluation, and what the provider wants back with it. A resource like any other."""

    def __init__(self, messages: Iterable[Message] = (), provider_payload: Any = None) -> None:
        self._messages: tuple[Message, ...] = tuple(dict(message) for message in messages)
        self.provider_payload = provider_payload
        self._lock = shared_lock()

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, oldest first."""
        return self._messages

    def append(self, role: str, content: str, **more: Any) -> None:
        """Say one more thing; `more` are further keys of the message."""
        check_call_open()
        with self._lock:
            self._messages = (*self._messages, {"role": role, "content": content, **more})

    def snapshot(self, *, tag: str | None = None) -> TranscriptSnapshot:
        """What has been said up to now."""
        return TranscriptSnapshot(self._messages, self.provider_payload)

    def restore(self, snapshot: TranscriptSnapshot) -> None:
        """Forget what was said since."""
        with self._lock:
            self._messages, self.provider_payload = tuple(snapshot.messages), snapshot.provider_payload


TYPES.register(TranscriptSnapshot, "mulligan:TranscriptSnapshot")
TYPES.name(TranscriptState, "mulligan:TranscriptState")


@plain(slots=True, frozen=True)
class PromptResponse:
    """What the model said last, and the state it was said on."""

    text: str
    execution_state: ExecutionState
    prompt_name: str = ""


Prompt = str | Callable[[VisibilityOverrides], str]
"""The words, or what makes them from which sections are shown."""


class MainLoop:
    """Evaluates prompts with one model and one set of tools. Everything it changes is in the execution state.

    Unlike `agent_loop` it needs no store: without a state of a durable session, everything lives in memory. `provider`
    and `tools` are what `agent_loop` takes.
    """

    def __init__(
        self,
        provider: Model,
        *,
        tools: Iterable[AnyTool] = (),
        prompt_name: str = "main",
        clock: Clock | None = None,
    ) -> None:
        self._provider = provider_of(provider)
        self._tools = by_name(as_tool(one) for one in tools)
        self._prompt_name = prompt_name
        self._clock = clock or SystemClock()

    def execute(
        self, prompt: Prompt, execution_state: ExecutionState | None = None, *, deadline: datetime | None = None
    ) -> PromptResponse:
        """Run until the model wants no more tools. On the state given, or on a new one.

        A tool that asks for more of the prompt to be shown is undone, the sections are shown, and the evaluation starts
        again. Raises PromptEvaluationError when time, tokens or rounds are used up.
        """
        state = execution_state or self._fresh_state()
        for _ in range(EXPANSIONS_MAX):
            try:
                return self._evaluate(prompt, state, deadline)
            except VisibilityExpansionRequired as wanted:
                _show(state.session, wanted)
        raise self._over("The prompt was expanded too many times.", "expansion")

    def _fresh_state(self) -> ExecutionState:
        resources = {TranscriptState: TranscriptState(), BudgetTracker: BudgetTracker()}
        return ExecutionState(Session(clock=self._clock), ResourceRegistry.build(resources), self._clock)

    def _evaluate(self, prompt: Prompt, state: ExecutionState, deadline: datetime | None) -> PromptResponse:
        shown = prompt if isinstance(prompt, str) else prompt(state.session[VisibilityOverrides].latest() or _PLAIN)
        now = state.clock.now()
        state.session.dispatch(PromptRendered(self._prompt_name, shown, now, name_of(self._provider)))
        transcript = state.resources.get(TranscriptState) or TranscriptState()
        before, finished = transcript.snapshot(), False
        try:
            transcript.append("user", shown)
            text = self._rounds(transcript, state, deadline)
            finished = True
        finally:
            if not finished:
                transcript.restore(before)
        state.session.dispatch(PromptExecuted(self._prompt_name, text, state.clock.now(), name_of(self._provider)))
        return PromptResponse(text, state, self._prompt_name)

    def _rounds(self, transcript: TranscriptState, state: ExecutionState, deadline: datetime | None) -> str:
        runner = ToolRunner(state, self._tools, self._prompt_name, name_of(self._provider))
        context = ToolContext(state, deadline=deadline)

        def act(call: ProviderToolCall) -> ToolResult[Any]:
            return runner.execute(call, context=context)

        for _ in range(ROUNDS_MAX):
            self._check_left(state, deadline)
            reply = self._reply(Ask(transcript.messages, tuple(self._tools.values())), act)
            self._count(state, reply)
            transcript.append("assistant", reply.text, **calls_wanted(reply))
            if not reply.calls:
                return reply.text
            for call in reply.calls:
                transcript.append("tool", _said(act(call)), tool_call_id=call.id)
        raise self._over(f"The model wanted tools {ROUNDS_MAX} times.", "rounds")

    def _reply(self, ask: Ask, act: Callable[[ProviderToolCall], ToolResult[Any]]) -> Reply:
        provider = self._provider
        pieces: Iterator[Said | Reply] = (
            provider.drive(ask, act) if isinstance(provider, Driver) else provider.reply(ask)
        )
        found = [piece for piece in pieces if isinstance(piece, Reply)]
        return found[-1] if found else Reply()

    def _check_left(self, state: ExecutionState, deadline: datetime | None) -> None:
        if deadline is not None and state.clock.now() >= deadline:
            raise self._over("The deadline has passed.", "deadline")
        budget = state.resources.get(BudgetTracker)
        if budget is not None and budget.is_exhausted:
            raise self._over("The token budget is used up.", "budget")

    def _count(self, state: ExecutionState, reply: Reply) -> None:
        budget = state.resources.get(BudgetTracker)
        if budget is not None:
            budget.record(self._prompt_name, input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)

    def _over(self, message: str, phase: str) -> PromptEvaluationError:
        return PromptEvaluationError(message, prompt_name=self._prompt_name, phase=phase)


_PLAIN = VisibilityOverrides()


def _show(session: Session, wanted: VisibilityExpansionRequired) -> None:
    latest = session[VisibilityOverrides].latest() or _PLAIN
    asked = wanted.requested_overrides
    more = dict(asked) if isinstance(asked, Mapping) else {}
    session[VisibilityOverrides].seed(VisibilityOverrides({**latest.overrides, **more}))


def calls_wanted(reply: Reply) -> dict[str, Any]:
    """The calls as chat completions list them."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in reply.calls
    ]
    return {"tool_calls": calls} if calls else {}


def _said(result: ToolResult[Any]) -> str:
    return result.message if result.success else f"Error: {result.message}"
