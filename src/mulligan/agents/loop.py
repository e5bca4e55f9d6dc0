"""The agent loop: ask the model, run the tools it asks for, tell it what came of them, until it is done.

One run is one turn of its session: the prompt, every reply and every result are in the transcript as soon as they are
there, every tool call is a transaction, and `session.rollback()` takes the whole run back. A reply that asks only for
tools that read gets them side by side; any other, one after the other in the order asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from mulligan.agents.coding import coding_tools, runner_of, session_of
from mulligan.agents.speech import Ask, Driver, Provider, Reply, Said, name_of, profile_of
from mulligan.agents.tools import AnyTool, ProviderToolCall, Tool, ToolContext, as_tool
from mulligan.effects.session import Session
from mulligan.history.composite import ExecutionState
from mulligan.session.known import ToolResult
from mulligan.session.prompts import for_model
from mulligan.session.resources import BudgetTracker
from mulligan.values.canonical import encode
from mulligan.values.plain import plain
from mulligan.values.state_faults import PromptEvaluationError

StopReason = Literal["done", "max_iterations", "budget", "cancelled"]
May = Callable[[ProviderToolCall, Tool[Any, Any]], bool]
Tell = Callable[["LoopEvent"], None]

MAX_ITERATIONS = 50
_SIDE_BY_SIDE = 8
_NOT_ALLOWED = "The user did not allow this call. Nothing was done."
_CANCELLED = "The run was cancelled before this call was made."


@plain(slots=True, frozen=True)
class ToolStarted:
    """A tool is about to run, or about to be asked permission for."""

    call: ProviderToolCall


@plain(slots=True, frozen=True)
class ToolEnded:
    """A tool has run, and its call stands or was put back; or it was not allowed to."""

    call: ProviderToolCall
    result: ToolResult[Any]


@plain(slots=True, frozen=True)
class IterationEnded:
    """The model has spoken, for the `number`th time in this run."""

    number: int
    reply: Reply


LoopEvent = Said | ToolStarted | ToolEnded | IterationEnded


@dataclass(slots=True)
class LoopResult:
    """How a run ended. `text` is the last thing the model said."""

    session_id: str
    turn_id: str
    text: str = ""
    stop_reason: StopReason = "done"
    iterations: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    tool_calls: int = 0


@dataclass(slots=True)
class Bounds:
    """How far a run may go. A deadline raises PromptEvaluationError; the others end the run and say so.

    Without a `budget`, one among the resources of the run's state counts.
    """

    max_iterations: int = MAX_ITERATIONS
    deadline: datetime | None = None
    budget: BudgetTracker | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


class Loop:
    """One session, one model, and the tools it may use. `keeps_talk` false: the transcript is left alone.

    Given as an ExecutionState, the session's run has further resources and randomness, which go back with its calls.
    """

    def __init__(
        self,
        session: Session | ExecutionState,
        provider: Provider | Driver,
        *,
        tools: Sequence[AnyTool] | None = None,
        bounds: Bounds | None = None,
        may: May | None = None,
        tell: Tell | None = None,
        keeps_talk: bool = True,
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
        self._talk: list[dict[str, Any]] | None = None if keeps_talk else []
        self._system: str | None = None
        self._asking: dict[str, Any] = {}

    def run(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        turn_id: str | None = None,
    ) -> LoopResult:
        """Until the model is done or a bound is met. Whatever is raised, what was said and done so far stays."""
        self._system = system
        self._asking = {"model": model, "options": options or {}}
        text = prompt if isinstance(prompt, str) else _text_of(prompt)
        # The record of a turn names its prompt, and a loop that keeps no transcript stores no prompt either.
        with self._session.turn(text if self._talk is None else None, id=turn_id) as turn:
            result = LoopResult(self._session.id, turn)
            self._say({"role": "user", "content": prompt if isinstance(prompt, str) else list(prompt)})
            if isinstance(self._provider, Driver):
                self._drive(self._provider, result)
            else:
                self._go_on(self._provider, result)
        return result

    # The rounds.

    def _go_on(self, provider: Provider, result: LoopResult) -> None:
        while (stop := self._met_bound(result)) is None:
            reply = self._heard(provider.reply(self._ask()), result)
            if reply is None:
                stop = "cancelled"
                break
            if not reply.calls:
                return
            self._answer(reply.calls, result)
        result.stop_reason = stop

    def _drive(self, driver: Driver, result: LoopResult) -> None:
        """Somebody else's loop: it says everything in one reply, and our tools are called while it speaks."""
        counted = threading.RLock()

        def act(call: ProviderToolCall) -> ToolResult[Any]:
            with counted:
                result.tool_calls += 1
            return self._called(call)

        if self._met_bound(result) is None and self._heard(driver.drive(self._ask(), act), result) is None:
            result.stop_reason = "cancelled"

    def _met_bound(self, result: LoopResult) -> StopReason | None:
        bounds = self._bounds
        if bounds.cancelled.is_set():
            return "cancelled"
        if bounds.deadline is not None and self._state.clock.now() >= bounds.deadline:
            raise PromptEvaluationError(f"The deadline {bounds.deadline.isoformat()} has passed.")
        if self._budget is not None and self._budget.is_exhausted:
            return "budget"
        return "max_iterations" if result.iterations >= bounds.max_iterations else None

    def _ask(self) -> Ask:
        if self._talk is None:
            prompt = self._session.for_model("openai", system=self._system)
        else:
            prompt = for_model(self._talk, "openai", system=self._system)
        return Ask(prompt.messages, self._tools, **self._asking)

    def _heard(self, pieces: Iterator[Said | Reply], result: LoopResult) -> Reply | None:
        """The reply, kept as soon as it is whole. None: cancelled in the middle.

        However it is cut short, by a cancel, an interrupt or a line that breaks, what was said until then is kept.
        """
        text: list[str] = []
        reply: Reply | None = None
        try:
            with closing(_one_by_one(pieces)) as told:
                reply = self._whole(told, text)
        finally:
            if reply is None:
                result.text = "".join(text)
                if text:
                    self._say({"role": "assistant", "content": result.text, "interrupted": True})
        if reply is not None:
            self._count(reply, result)
        return reply

    def _whole(self, pieces: Iterator[Said | Reply], text: list[str]) -> Reply | None:
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
            spent = {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens}
            self._budget.record(result.turn_id, **spent)
        if reply.text or reply.calls:
            self._say(_message_of(reply))
        self._tell(IterationEnded(result.iterations, reply))
        if self._talk is None:
            told = {"iteration": result.iterations, "stop": reply.stop, "tool_calls": len(reply.calls)}
            self._session.emit("iteration_end", told)

    # Tools.

    def _answer(self, calls: Sequence[ProviderToolCall], result: LoopResult) -> None:
        """Results are told in the order asked, each as soon as it is there. If one of the calls ends the run, the model
        learns of the rest, when it is asked again, that they were cut off."""
        result.tool_calls += len(calls)
        if len(calls) > 1 and all(self._only_reads(call) for call in calls):
            with ThreadPoolExecutor(min(len(calls), _SIDE_BY_SIDE)) as pool:
                answers = list(pool.map(lambda run: run[0].run(self._called, run[1]), _each_with_context(calls)))
            for call, answer in zip(calls, answers, strict=True):
                self._say(_result_message(call, answer))
            return
        for call in calls:
            answer = self._ran(call)
            # Said before it is told: whatever a listener raises, the model will know what was done.
            self._say(_result_message(call, answer))
            self._tell(ToolEnded(call, answer))

    def _only_reads(self, call: ProviderToolCall) -> bool:
        tool = self._runner.tool_registry.get(call.name)
        return tool is not None and tool.read_only

    def _called(self, call: ProviderToolCall) -> ToolResult[Any]:
        answer = self._ran(call)
        self._tell(ToolEnded(call, answer))
        return answer

    def _ran(self, call: ProviderToolCall) -> ToolResult[Any]:
        self._tell(ToolStarted(call))
        if self._bounds.cancelled.is_set():
            return ToolResult(_CANCELLED, success=False)
        tool = self._runner.tool_registry.get(call.name)
        if self._may is not None and tool is not None and not tool.read_only and not self._may(call, tool):
            return ToolResult(_NOT_ALLOWED, success=False)
        return self._runner.execute(call, context=ToolContext(self._state, deadline=self._bounds.deadline))

    def _say(self, message: dict[str, Any]) -> None:
        if self._talk is None:
            self._session.inject(message)
        else:
            self._talk.append(message)


def _each_with_context(calls: Sequence[ProviderToolCall]) -> list[tuple[Any, ProviderToolCall]]:
    return [(copy_context(), call) for call in calls]


def _one_by_one(pieces: Iterable[Said | Reply]) -> Generator[Said | Reply]:
    """Closed with what it takes them from, if that can be closed."""
    yield from pieces


def _message_of(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in reply.calls
        ]
    return message


def _arguments(call: ProviderToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else encode(call.arguments).decode("utf-8")


def _result_message(call: ProviderToolCall, result: ToolResult[Any]) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.message}
    return message if result.success else message | {"is_error": True}


def _text_of(blocks: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(block["text"]) for block in blocks if isinstance(block.get("text"), str))
