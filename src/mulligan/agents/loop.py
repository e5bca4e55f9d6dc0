"""The agent loop: `run_rounds` asks the model, runs the tools it asks for and sends it the results, until it is done.

It has two interfaces. `Loop` runs on a durable session: one run is one turn, the transcript gets each message at once,
and `session.rollback()` undoes the whole run. If a reply asks only for read-only tools, they run in parallel; otherwise
they run in the order asked. `MainLoop` is S4's interface and needs no store. In both, every tool call is a transaction.
`PLANNING` is the tool with which a model keeps its plan in the session's state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any, Literal

from mulligan.agents.coding_tools import coding_tools, runner_of, session_of
from mulligan.agents.providers import (
    Act,
    Ask,
    Driver,
    Message,
    Model,
    Provider,
    Reply,
    Said,
    name_of,
    profile_of,
    provider_of,
)
from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import AnyTool, ProviderToolCall, Tool, ToolContext, as_tool, by_name
from mulligan.effects.session import DurableSession
from mulligan.history.checkpoint import ExecutionState
from mulligan.session.messages import for_model
from mulligan.session.state.resources import BudgetTracker, ResourceRegistry
from mulligan.session.state.session import Session
from mulligan.session.state.slices import (
    UPDATE_PLAN,
    Plan,
    PlanStep,
    PromptExecuted,
    PromptRendered,
    StepStatus,
    ToolResult,
    VisibilityOverrides,
)
from mulligan.session.state.types import TYPES
from mulligan.store.fork_locks import shared_lock
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.errors import PromptEvaluationError, VisibilityExpansionRequired
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.scoped_var import check_call_open

StopReason = Literal["done", "max_iterations", "budget", "cancelled"]
May = Callable[[ProviderToolCall, Tool[Any, Any]], bool]
Tell = Callable[["LoopEvent"], None]

MAX_ITERATIONS = 50
_PARALLEL_CALLS = 8
_NOT_ALLOWED = "The user did not allow this call. Nothing was done."
_CANCELLED = "The run was cancelled before this call was made."


@fast_dataclass(slots=True, frozen=True)
class ToolStarted:
    """A tool is about to run, or Mulligan is about to ask for permission."""

    call: ProviderToolCall


@fast_dataclass(slots=True, frozen=True)
class ToolEnded:
    """A tool call was committed, rolled back, or not allowed."""

    call: ProviderToolCall
    result: ToolResult[Any]


@fast_dataclass(slots=True, frozen=True)
class IterationEnded:
    """The model has sent its `number`th reply of this run."""

    number: int
    reply: Reply


LoopEvent = Said | ToolStarted | ToolEnded | IterationEnded


@fast_dataclass(slots=True)
class LoopResult:
    """How a run ended. `text` is the model's last message."""

    session_id: str
    turn_id: str
    text: str = ""
    stop_reason: StopReason = "done"
    iterations: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    tool_calls: int = 0


@fast_dataclass(slots=True)
class Bounds:
    """The limits of a run. A deadline raises PromptEvaluationError; the others end the run with a `stop_reason`.

    Without a `budget`, the loop uses a BudgetTracker among the resources of the run's state.
    """

    max_iterations: int = MAX_ITERATIONS
    deadline: datetime | None = None
    budget: BudgetTracker | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


def run_rounds(
    provider: Provider | Driver,
    *,
    bound: Callable[[], StopReason | None],
    ask: Callable[[], Ask],
    hear: Callable[[Iterator[Said | Reply]], Reply | None],
    act: Act,
    answer: Callable[[Sequence[ProviderToolCall]], None],
) -> StopReason:
    """The one loop behind `Loop` and `MainLoop`: ask the model and run the tools it asks for, until it is done.

    `bound` names the limit that stops the run, or raises. `hear` reads a reply; None means that the run was cancelled.
    A driver has a loop of its own: it runs each tool through `act`, and its one reply asks for no tools.
    """
    while (stop := bound()) is None:
        asked = ask()
        reply = hear(provider.drive(asked, act) if isinstance(provider, Driver) else provider.reply(asked))
        if reply is None:
            return "cancelled"
        if not reply.calls:
            return "done"
        answer(reply.calls)
    return stop


class Loop:
    """One session, one model, and its tools. With `keeps_transcript` false the session's transcript does not change.

    An ExecutionState instead of a session adds resources and randomness, which failed calls restore.
    """

    def __init__(
        self,
        session: DurableSession | ExecutionState,
        provider: Provider | Driver,
        *,
        tools: Sequence[AnyTool] | None = None,
        bounds: Bounds | None = None,
        may: May | None = None,
        tell: Tell | None = None,
        keeps_transcript: bool = True,
    ) -> None:
        self._session, self._provider = session_of(session), provider
        self._bounds = bounds or Bounds()
        if tools is None:
            tools = coding_tools(self._session, profile_of(provider), cancelled=self._bounds.cancelled)
        self._tools = [as_tool(one) for one in tools]
        self._runner = runner_of(session, self._tools, adapter=name_of(provider))
        self._state = self._runner.execution_state
        self._budget = self._bounds.budget or self._state.resources.get(BudgetTracker)
        self._may = may
        self._tell: Tell = tell or (lambda event: None)
        self._messages: list[dict[str, Any]] | None = None if keeps_transcript else []
        self._system: str | None = None
        self._asking: dict[str, Any] = {}
        self._counting = threading.RLock()

    def run(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        turn_id: str | None = None,
    ) -> LoopResult:
        """Runs until the model is done or a bound is met. If it raises, the messages and calls so far are kept."""
        self._system = system
        self._asking = {"model": model, "options": options or {}}
        text = prompt if isinstance(prompt, str) else _text_of(prompt)
        # The record of a turn names its prompt, and a loop that keeps no transcript stores no prompt either.
        with self._session.turn(text if self._messages is None else None, id=turn_id) as turn:
            result = LoopResult(self._session.id, turn)
            self._append_message({"role": "user", "content": prompt if isinstance(prompt, str) else list(prompt)})
            result.stop_reason = run_rounds(
                self._provider,
                bound=lambda: self._reached_bound(result),
                ask=self._ask,
                hear=lambda pieces: self._read_reply(pieces, result),
                act=lambda call: self._run_for_driver(call, result),
                answer=lambda calls: self._answer(calls, result),
            )
        return result

    def _run_for_driver(self, call: ProviderToolCall, result: LoopResult) -> ToolResult[Any]:
        with self._counting:
            result.tool_calls += 1
        return self._run_and_report(call)

    def _reached_bound(self, result: LoopResult) -> StopReason | None:
        bounds = self._bounds
        if bounds.cancelled.is_set():
            return "cancelled"
        if bounds.deadline is not None and self._state.clock.now() >= bounds.deadline:
            raise PromptEvaluationError(f"The deadline {bounds.deadline.isoformat()} has passed.")
        if self._budget is not None and self._budget.is_exhausted:
            return "budget"
        return "max_iterations" if result.iterations >= bounds.max_iterations else None

    def _ask(self) -> Ask:
        if self._messages is None:
            prompt = self._session.for_model("openai", system=self._system)
        else:
            prompt = for_model(self._messages, "openai", system=self._system)
        return Ask(prompt.messages, self._tools, **self._asking)

    def _read_reply(self, pieces: Iterator[Said | Reply], result: LoopResult) -> Reply | None:
        """The reply, which goes into the transcript once it is complete. None: the run was cancelled.

        If a cancel, an interrupt or a lost connection cuts the reply off, the transcript gets the text so far.
        """
        text: list[str] = []
        reply: Reply | None = None
        try:
            with closing(_closable(pieces)) as stream:
                reply = self._read_pieces(stream, text)
        finally:
            if reply is None:
                result.text = "".join(text)
                if text:
                    self._append_message({"role": "assistant", "content": result.text, "interrupted": True})
        if reply is not None:
            self._count(reply, result)
        return reply

    def _read_pieces(self, pieces: Iterator[Said | Reply], text: list[str]) -> Reply | None:
        for piece in pieces:
            if isinstance(piece, Reply):
                return piece
            text.append(piece.text)
            self._tell(piece)
            if self._bounds.cancelled.is_set():
                break
        return None

    def _count(self, reply: Reply, result: LoopResult) -> None:
        result.iterations += 1
        result.text = reply.text
        result.input_tokens += reply.input_tokens
        result.output_tokens += reply.output_tokens
        if self._budget is not None:
            self._budget.record(result.turn_id, input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
        if reply.text or reply.calls:
            self._append_message({"role": "assistant", "content": reply.text, **calls_wanted(reply)})
        self._tell(IterationEnded(result.iterations, reply))
        if self._messages is None:
            facts = {"iteration": result.iterations, "stop": reply.stop, "tool_calls": len(reply.calls)}
            self._session.emit("iteration_end", facts)

    # Tools.

    def _answer(self, calls: Sequence[ProviderToolCall], result: LoopResult) -> None:
        """Runs the calls and adds each result to the transcript, in the order asked.

        If one of the calls ends the run, the next request tells the model that the remaining calls did not run.
        """
        result.tool_calls += len(calls)
        if len(calls) > 1 and all(self._only_reads(call) for call in calls):
            with ThreadPoolExecutor(min(len(calls), _PARALLEL_CALLS)) as pool:
                runs = [pool.submit(copy_context().run, self._run_and_report, call) for call in calls]
                answers = [run.result() for run in runs]
            for call, answer in zip(calls, answers, strict=True):
                self._append_message(_result_message(call, answer))
            return
        for call in calls:
            answer = self._run_call(call)
            # The transcript first: a listener may raise, and the model must still learn the result.
            self._append_message(_result_message(call, answer))
            self._tell(ToolEnded(call, answer))

    def _only_reads(self, call: ProviderToolCall) -> bool:
        tool = self._runner.tool_registry.get(call.name)
        return tool is not None and tool.read_only

    def _run_and_report(self, call: ProviderToolCall) -> ToolResult[Any]:
        answer = self._run_call(call)
        self._tell(ToolEnded(call, answer))
        return answer

    def _run_call(self, call: ProviderToolCall) -> ToolResult[Any]:
        self._tell(ToolStarted(call))
        if self._bounds.cancelled.is_set():
            return ToolResult(_CANCELLED, success=False)
        tool = self._runner.tool_registry.get(call.name)
        if self._may is not None and tool is not None and not tool.read_only and not self._may(call, tool):
            return ToolResult(_NOT_ALLOWED, success=False)
        return self._runner.execute(call, context=ToolContext(self._state, deadline=self._bounds.deadline))

    def _append_message(self, message: dict[str, Any]) -> None:
        if self._messages is None:
            self._session.inject(message)
        else:
            self._messages.append(message)


def _closable(pieces: Iterable[Said | Reply]) -> Generator[Said | Reply]:
    """A generator, so that closing it also closes a provider's generator."""
    yield from pieces


def _result_message(call: ProviderToolCall, result: ToolResult[Any]) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.message}
    return message if result.success else message | {"is_error": True}


def _text_of(blocks: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(block["text"]) for block in blocks if isinstance(block.get("text"), str))


ROUNDS_MAX = 100
EXPANSIONS_MAX = 10


@fast_dataclass(slots=True, frozen=True)
class TranscriptSnapshot:
    messages: tuple[Message, ...]
    provider_payload: Any = None


class TranscriptState:
    """The messages of an evaluation, and the provider's own data. It is a resource of the run's state."""

    def __init__(self, messages: Iterable[Message] = (), provider_payload: Any = None) -> None:
        self._messages: tuple[Message, ...] = tuple(dict(message) for message in messages)
        self.provider_payload = provider_payload
        self._lock = shared_lock()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, oldest first."""
        return self._messages

    def append(self, role: str, content: str, **more: Any) -> None:
        """Adds a message; `more` are further keys of it."""
        check_call_open()
        with self._lock:
            self._messages = (*self._messages, {"role": role, "content": content, **more})

    def snapshot(self, *, tag: str | None = None) -> TranscriptSnapshot:
        """The messages so far."""
        return TranscriptSnapshot(self._messages, self.provider_payload)

    def restore(self, snapshot: TranscriptSnapshot) -> None:
        """Removes the messages since the snapshot."""
        with self._lock:
            self._messages, self.provider_payload = tuple(snapshot.messages), snapshot.provider_payload


TYPES.register(TranscriptSnapshot, "mulligan:TranscriptSnapshot")
TYPES.name(TranscriptState, "mulligan:TranscriptState")


@fast_dataclass(slots=True, frozen=True)
class PromptResponse:
    """The model's last message, and the state after it."""

    text: str
    execution_state: ExecutionState
    prompt_name: str = ""


Prompt = str | Callable[[VisibilityOverrides], str]
"""The prompt's text, or a function that makes it from the sections that are visible."""


class MainLoop:
    """Evaluates prompts with one model and one set of tools. Everything it changes is in the execution state.

    Unlike `agent_loop` it needs no store: without the state of a durable session, everything is in memory. `provider`
    and `tools` are the same as for `agent_loop`.
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
        """Runs until the model asks for no more tools, on the given state or on a new one.

        If a tool asks for more sections of the prompt, the loop rolls the call back, shows the sections and starts the
        evaluation again. Raises PromptEvaluationError when time, tokens or rounds are used up.
        """
        state = execution_state
        if state is None:
            resources = {TranscriptState: TranscriptState(), BudgetTracker: BudgetTracker()}
            state = ExecutionState(Session(clock=self._clock), ResourceRegistry.build(resources), self._clock)
        for _ in range(EXPANSIONS_MAX):
            try:
                return self._evaluate(prompt, state, deadline)
            except VisibilityExpansionRequired as wanted:
                _show_sections(state.session, wanted)
        raise self._evaluation_error("The prompt was expanded too many times.", "expansion")

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

        budget = state.resources.get(BudgetTracker)
        rounds = count()

        def bound() -> None:
            if next(rounds) >= ROUNDS_MAX:
                raise self._evaluation_error(f"The model asked for tools {ROUNDS_MAX} times.", "rounds")
            if deadline is not None and state.clock.now() >= deadline:
                raise self._evaluation_error("The deadline has passed.", "deadline")
            if budget is not None and budget.is_exhausted:
                raise self._evaluation_error("The token budget is used up.", "budget")

        def hear(pieces: Iterator[Said | Reply]) -> Reply:
            found = [piece for piece in pieces if isinstance(piece, Reply)]
            reply = found[-1] if found else Reply()
            if budget is not None:
                budget.record(self._prompt_name, input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
            transcript.append("assistant", reply.text, **calls_wanted(reply))
            return reply

        def act(call: ProviderToolCall) -> ToolResult[Any]:
            return runner.execute(call, context=context)

        def answer(calls: Sequence[ProviderToolCall]) -> None:
            for call in calls:
                result = act(call)
                said = result.message if result.success else f"Error: {result.message}"
                transcript.append("tool", said, tool_call_id=call.id)

        def ask() -> Ask:
            return Ask(transcript.messages, tuple(self._tools.values()))

        run_rounds(self._provider, bound=bound, ask=ask, hear=hear, act=act, answer=answer)
        return str(transcript.messages[-1]["content"])

    def _evaluation_error(self, message: str, phase: str) -> PromptEvaluationError:
        return PromptEvaluationError(message, prompt_name=self._prompt_name, phase=phase)


_PLAIN = VisibilityOverrides()


def _show_sections(session: Session, wanted: VisibilityExpansionRequired) -> None:
    latest = session[VisibilityOverrides].latest() or _PLAIN
    asked = wanted.requested_overrides
    more = dict(asked) if isinstance(asked, Mapping) else {}
    session[VisibilityOverrides].seed(VisibilityOverrides({**latest.overrides, **more}))


def calls_wanted(reply: Reply) -> dict[str, Any]:
    """The calls in the form of chat completions."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in reply.calls
    ]
    return {"tool_calls": calls} if calls else {}


@dataclass(frozen=True)
class Step:
    title: str
    status: StepStatus = "pending"


def update_plan(steps: list[Step], context: ToolContext, objective: str = "") -> str:
    """Write down your plan, step by step, and how far you are.

    Give the whole plan each time, with at most one step in progress. Use it for work of several steps.
    """
    numbered = tuple(PlanStep(step.title, step.status, number) for number, step in enumerate(steps, 1))
    is_done = bool(steps) and all(step.status == "done" for step in steps)
    context.session.broadcast(Plan(objective, "completed" if is_done else "active", numbered))
    return "The plan is noted."


PLANNING: Tool[object, object] = Tool(UPDATE_PLAN, str(update_plan.__doc__), update_plan)
