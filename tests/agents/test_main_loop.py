"""The smallest whole agent: what it asks, runs, records and refuses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from mulligan import (
    BudgetTracker,
    ExecutionState,
    FixedClock,
    InMemoryFilesystem,
    MainLoop,
    Plan,
    PromptEvaluationError,
    PromptExecuted,
    PromptRendered,
    ResourceRegistry,
    Session,
    Tool,
    ToolContext,
    ToolInvoked,
    TranscriptState,
    VisibilityExpansionRequired,
    VisibilityOverrides,
)
from mulligan.agents.providers import Mock
from mulligan.testing import create_execution_state

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def write(path: str, text: str, *, context: ToolContext) -> str:
    assert context.filesystem is not None
    context.filesystem.write(path, text)
    context.session.broadcast(Plan(path))
    if text == "bad":
        raise RuntimeError("bad text")
    return f"wrote {path}"


TOOL: Tool[Any, Any] = Tool("write", "Write a file.", write)


def wants(*texts: str) -> dict[str, Any]:
    return {"tools": [{"tool": "write", "args": {"path": f"{text}.txt", "text": text}} for text in texts]}


@pytest.mark.req("S4.state.main_loop_creates_or_takes", "D12.name.main_loop", "S4.state.adapters_take_it")
def test_main_loop_runs_tools_on_the_given_state() -> None:
    model = Mock([wants("good", "bad"), "all done"])
    state = create_execution_state({TranscriptState: TranscriptState()})
    response = MainLoop(model, tools=[TOOL], prompt_name="p").execute("do it", execution_state=state)
    assert (response.text, response.execution_state) == ("all done", state)
    assert state.session[Plan].all() == (Plan("good.txt"),)
    assert [entry.result.success for entry in state.session[ToolInvoked].all()] == [True, False]
    transcript = state.resources.get(TranscriptState)
    assert transcript is not None
    assert [message["role"] for message in transcript.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert transcript.messages[2]["content"] == "wrote good.txt"
    assert transcript.messages[3]["content"].startswith("Error: ")
    assert [one.rendered_prompt for one in state.session[PromptRendered].all()] == ["do it"]
    assert [one.result for one in state.session[PromptExecuted].all()] == ["all done"]


@pytest.mark.req("S4.state.main_loop_creates_or_takes")
def test_without_a_state_main_loop_creates_one() -> None:
    response = MainLoop(Mock(["hello"])).execute("hi")
    assert isinstance(response.execution_state, ExecutionState)
    assert response.execution_state.resources.get(BudgetTracker) is not None
    assert response.execution_state.resources.get(TranscriptState) is not None


def test_sections_that_a_tool_requests_are_shown_in_a_new_evaluation() -> None:
    def look(context: ToolContext) -> str:
        if context.session[VisibilityOverrides].latest() is None:
            context.session.broadcast(Plan("never was"))
            raise VisibilityExpansionRequired("show more", requested_overrides={"notes": "full"})
        return "seen"

    def prompt(shown: VisibilityOverrides) -> str:
        return f"sections: {sorted(shown.overrides)}"

    model = Mock([{"tool": "look"}, {"tool": "look"}, "done"])
    state = create_execution_state({TranscriptState: TranscriptState()})
    response = MainLoop(model, tools=[Tool("look", "", look)]).execute(prompt, state)
    assert (response.text, state.session[Plan].all()) == ("done", ())
    assert [ask.prompt for ask in model.asked] == ["sections: []", "sections: ['notes']", "sections: ['notes']"]
    transcript = state.resources.get(TranscriptState)
    assert transcript is not None and len(transcript.messages) == 4


def test_a_tool_that_requests_sections_forever_is_stopped() -> None:
    def look() -> None:
        raise VisibilityExpansionRequired("more")

    loop = MainLoop(Mock([{"tool": "look"}] * 50), tools=[Tool("look", "", look)])
    with pytest.raises(PromptEvaluationError) as caught:
        loop.execute("x")
    assert caught.value.phase == "expansion"


@pytest.mark.parametrize(("limit", "phase"), [("budget", "budget"), ("deadline", "deadline"), ("rounds", "rounds")])
def test_time_tokens_and_iterations_are_limited(limit: str, phase: str) -> None:
    resources = {BudgetTracker: BudgetTracker(limit_tokens=1 if limit == "budget" else None)}
    state = ExecutionState(Session(), ResourceRegistry.build(resources), FixedClock(NOON))
    loop = MainLoop(Mock([{"tool": "x"}] * 200), tools=[Tool("x", "", lambda: "ok")])
    with pytest.raises(PromptEvaluationError) as caught:
        loop.execute("go on", state, deadline=NOON if limit == "deadline" else None)
    assert caught.value.phase == phase


def test_a_failed_evaluation_leaves_no_messages() -> None:
    transcript = TranscriptState()
    state = create_execution_state({TranscriptState: transcript})

    def break_off(ask: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MainLoop(Mock([wants("a"), break_off]), tools=[TOOL]).execute("x", state)
    assert transcript.messages == ()


def test_files_in_memory_are_reached_through_the_context() -> None:
    files = InMemoryFilesystem()
    from mulligan import Filesystem

    MainLoop(Mock([wants("a"), "ok"]), tools=[TOOL]).execute("x", create_execution_state({Filesystem: files}))
    assert files.glob("**") == ("a.txt",)
