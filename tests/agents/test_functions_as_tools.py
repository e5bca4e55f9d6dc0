"""Plain functions as tools, scripts as models, states as sessions: what makes an agent ten lines long."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import mulligan
from mulligan import (
    BudgetTracker,
    ExecutionState,
    MainLoop,
    MulliganError,
    Plan,
    PromptEvaluationError,
    ProviderToolCall,
    RestoreFailedError,
    Session,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    ToolValidationError,
    agent_loop,
    tool,
)
from mulligan.agents import langgraph, openai_agents, pydantic_ai
from mulligan.agents.loop import LoopEvent, ToolEnded
from mulligan.agents.providers import Ask, Mock, Reply, Said
from mulligan.api import Mulligan
from mulligan.session.state.types import Unknown


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


def told(session: mulligan.Session) -> list[str]:
    messages: list[dict[str, Any]] = session.messages()  # type: ignore[attr-defined]  # a durable one
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


class Line(BaseModel):
    text: str
    number: int = 0


class Page(BaseModel):
    lines: list[Line]


class TestToolFromFunction:
    def test_name_description_and_schema_come_from_the_function(self) -> None:
        @tool
        def look(path: str, times: Annotated[int, Field(description="how often", ge=1)] = 1) -> str:
            """Look at a file.

            Closely.
            """
            return path * times

        assert (look.name, look.description, look.read_only) == ("look", "Look at a file.\n\nClosely.", False)
        assert look.parameters["properties"] == {
            "path": {"type": "string"},
            "times": {"type": "integer", "description": "how often", "minimum": 1, "default": 1},
        }
        assert look("ab", times=2) == "abab"

    def test_name_and_description_can_be_given(self) -> None:
        made = tool(name="other-name", description="Words.", read_only=True)(functools.partial(print))
        assert (made.name, made.description, made.read_only) == ("other-name", "Words.", True)

    def test_shared_types_of_arguments_are_defined_once(self) -> None:
        def compare(left: Page, right: Page, how: Literal["fast", "well"], context: ToolContext) -> None: ...

        schema = tool(compare).parameters
        assert schema["properties"]["left"] == schema["properties"]["right"] == {"$ref": "#/$defs/Page"}
        assert sorted(schema["$defs"]) == ["Line", "Page"]
        assert schema["required"] == ["left", "right", "how"]

    @pytest.mark.parametrize("given", [lambda: None, functools.partial(print), "print", 3])
    def test_a_function_without_a_valid_tool_name_is_refused(self, given: Any) -> None:
        with pytest.raises(ToolValidationError):
            tool(given)

    @pytest.mark.parametrize("keyed", [True, False])
    def test_a_runner_takes_plain_functions(self, keyed: bool) -> None:
        def note(state: ExecutionState, objective: str) -> str:
            """Note a plan."""
            state.session[Plan].append(Plan(objective))
            return f"noted {objective}"

        state = ExecutionState(Session())
        runner = ToolRunner(state, {"note": note} if keyed else [note])
        result = runner.execute(ProviderToolCall("1", "note", {"objective": "tea"}))
        assert (result.success, result.message) == (True, "noted tea")
        assert state.session[Plan].latest() == Plan("tea")
        assert runner.tool_registry["note"].description == "Note a plan."
        assert not runner.execute(ProviderToolCall("2", "note", {"objective": 3})).success

    def test_a_runner_names_a_function_by_its_key_and_refuses_what_cannot_be_called(self) -> None:
        state = ExecutionState(Session())
        runner = ToolRunner(state, {"two": lambda: 2})
        assert runner.execute(ProviderToolCall("1", "two")).value == 2
        wrong: Any = {"two": "2"}
        with pytest.raises(ToolValidationError):
            ToolRunner(state, wrong)

    def test_two_tools_of_one_name_are_refused_everywhere(self, opened: Mulligan) -> None:
        def look() -> None: ...

        session = opened.session("s")
        for offer in (openai_agents.tools_for, pydantic_ai.tools_for, langgraph.tools_for):
            with pytest.raises(ToolValidationError):
                offer(session, [look, look])
        with pytest.raises(ToolValidationError):
            agent_loop("go", session=session, provider=["done"], tools=[look, look])
        with pytest.raises(ToolValidationError):
            MainLoop(Mock(), tools=[look, look])


class TestToolRun:
    def test_the_loop_takes_functions_and_scripts(self, opened: Mulligan, tmp_path: Path) -> None:
        def save(path: str, text: str, context: ToolContext) -> str:
            context.filesystem.write(path, text)
            context.session.broadcast(Plan(text))
            if not text:
                raise ValueError("nothing to save")
            return "saved"

        asked = [{"tool": "save", "args": {"path": name, "text": text}} for name, text in (("a", "x"), ("b", ""))]
        done = agent_loop("go", session="s", provider=[*asked, "half of it"], tools=[save])
        session = opened.session("s")
        assert (done.text, told(session)) == ("half of it", ["saved", "save failed: nothing to save"])
        assert (os.listdir(tmp_path / "work"), session[Plan].all()) == (["a"], (Plan("x"),))

    @pytest.mark.parametrize("inside", [False, True], ids=["plain", "inside an event loop"])
    def test_async_functions_are_awaited(self, opened: Mulligan, inside: bool) -> None:
        async def wait(number: int) -> str:
            await asyncio.sleep(0)
            return f"waited {number}"

        def go() -> None:
            agent_loop("go", session="s", provider=[{"tool": "wait", "args": {"number": 3}}, "done"], tools=[wait])

        async def going() -> None:
            go()

        asyncio.run(going()) if inside else go()
        assert told(opened.session("s")) == ["waited 3"]

    def test_a_context_without_a_workspace_has_no_filesystem(self) -> None:
        context = ToolContext(ExecutionState(Session()))
        with pytest.raises(mulligan.ExecutionStateError):
            _ = context.filesystem

    def test_the_loop_refuses_a_state_in_memory(self, opened: Mulligan) -> None:
        with pytest.raises(MulliganError) as caught:
            agent_loop("go", session=ExecutionState(Session()), provider=["done"])
        assert caught.value.code == "invalid_params"


@dataclass(frozen=True)
class Odd:
    lock: object

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"times": "two"}, "look: times: Input should be a valid integer"),
            ({"times": 1, "pages": [{"lines": [{"text": 3}]}]}, "look: pages.0.lines.0.text: Input should be a valid"),
        ],
    )
    def test_the_model_gets_the_name_of_the_wrong_argument(self, opened: Mulligan, given: Any, words: str) -> None:
        def look(times: int, pages: list[Page] | None = None) -> str:
            return "looked"

        agent_loop("go", session="s", provider=[{"tool": "look", "args": given}, "done"], tools=[look])
        (answer,) = told(opened.session("s"))
        assert words in answer

    def test_the_model_gets_the_error_of_arguments_taken_as_one_object(self) -> None:
        def save(line: Line) -> None: ...

        with pytest.raises(ToolValidationError) as caught:
            tool(save).bound({"text": 3}, ToolContext(ExecutionState(Session())))
        assert str(caught.value) == "save: text: Input should be a valid string"


class TestToolLog:
    @pytest.mark.parametrize("value", [threading.Lock(), {1, 2}, b"\xff", object, {"deep": [object()]}])
    def test_a_function_may_return_anything_and_the_log_stores_its_json_form(
        self, opened: Mulligan, value: Any
    ) -> None:
        def give() -> Any:
            return value

        agent_loop("go", session="s", provider=[{"tool": "give"}, "done"], tools=[give])
        (entry,) = opened.session("s")[ToolInvoked].all()
        assert (entry.result.success, entry.result.message) == (True, str(value))
        assert entry.result.value in (value, None)

    def test_the_log_truncates_long_texts_and_the_transcript_does_not(self, opened: Mulligan) -> None:
        def repeat(text: str) -> str:
            return text * 2

        text = "x" * 5000
        asked = [{"tool": "repeat", "args": {"text": text}}, {"tool": "repeat", "args": {"text": "short"}}]
        agent_loop("go", session="s", provider=[*asked, "done"], tools=[repeat])
        session = opened.session("s")
        long, short = session[ToolInvoked].all()
        cut = "x" * 4000
        assert (long.params, short.params) == ({"text": f"{cut}… (5000 characters)"}, {"text": "short"})
        assert (long.result.message, long.result.value) == (f"{cut}… (10000 characters)",) * 2
        assert (told(session), short.result.value) == ([text * 2, "shortshort"], "shortshort")

    def test_state_that_cannot_be_stored_fails_only_its_call(self, opened: Mulligan, tmp_path: Path) -> None:
        def odd(how: str, context: ToolContext) -> ToolResult[Odd] | None:
            context.filesystem.write("a.txt", "x")
            value = Odd(threading.Lock())
            if how == "event":
                context.session.broadcast(value)
                return None
            return ToolResult("odd", value)

        session = opened.session("s")
        asked = [{"tool": "odd", "args": {"how": how}} for how in ("event", "value")]
        agent_loop("go", session=session, provider=[*asked, "done"], tools=[odd])
        words = "odd failed: An item of the slice Odd cannot be stored: A lock cannot be part of a snapshot's JSON."
        assert told(session) == [words, words]
        assert (session[Odd].all(), os.listdir(tmp_path / "work")) == ((), [])
        assert [entry.result.success for entry in session[ToolInvoked].all()] == [False, False]
        with session.call("next") as call:
            assert call.write_file("a.txt", "free again").ok

    def test_a_call_that_cannot_be_stored_still_ends(self, opened: Mulligan, tmp_path: Path) -> None:
        session = opened.session("s")
        for policy in (mulligan.SlicePolicy.STATE, mulligan.SlicePolicy.LOG):
            session[Odd].register(Odd, mulligan.append_all, policy=policy)
            with pytest.raises(mulligan.ExecutionStateError), session.call("odd") as call:
                call.write_file("a.txt", "x")
                session.broadcast(Odd(threading.Lock()))
            assert (call.status, session[Odd].all(), os.listdir(tmp_path / "work")) == ("aborted", (), [])
        with session.call("next") as call:
            assert call.write_file("a.txt", "free again").ok

    def test_log_records_with_types_of_another_program_do_not_stop_a_run(
        self, opened: Mulligan, tmp_path: Path
    ) -> None:
        theirs = """
import dataclasses, sys, mulligan
@dataclasses.dataclass(frozen=True)
class Theirs:
    number: int
def give():
    return Theirs(3)
with mulligan.open(sys.argv[1], store=sys.argv[2]):
    mulligan.agent_loop("go", session="s", provider=[{"tool": "give"}, "done"], tools=[give])
"""
        command = [sys.executable, "-c", theirs, str(tmp_path / "work"), str(tmp_path / "home")]
        subprocess.run(command, check=True)

        def ours() -> str:
            return "ours"

        agent_loop("go", session="s", provider=[{"tool": "ours"}, "done"], tools=[ours])
        values = [entry.result.value for entry in opened.session("s")[ToolInvoked].all()]
        assert values == [Unknown("__main__:Theirs", {"number": 3}), "ours"]
        opened.session("s").clear_slices()
        assert opened.session("s")[ToolInvoked].all() == ()


class Box:
    def __init__(self) -> None:
        self.value, self.is_stuck = 0, False

    def snapshot(self, *, tag: str | None = None) -> int:
        return self.value

    def restore(self, snapshot: int) -> None:
        if self.is_stuck:
            raise OSError("stuck")
        self.value = snapshot


def late(_: Box) -> None:
    raise mulligan.DeadlineExceededError("too late")


def interrupted(_: Box) -> None:
    raise KeyboardInterrupt


def cancelled(_: Box) -> None:
    raise asyncio.CancelledError


def stuck(box: Box) -> None:
    box.is_stuck = True
    raise ValueError("broke")


@dataclass
class Run:
    box: Box
    state: ExecutionState
    raised: type[BaseException] | None = None


def run_with(opened: Mulligan, end: Any) -> Run:
    """A tool that touches every kind of participant, and then ends in its way."""
    box = Box()
    run = Run(box, opened.session("s").execution_state({Box: box}, rng=random.Random(7)))

    def touch(context: ToolContext) -> str:
        context.filesystem.write("a.txt", "x")
        context.session.broadcast(Plan("x"))
        box.value += 1
        assert context.rng is not None
        context.rng.random()
        end(box)
        return "touched"

    with pytest.raises(BaseException) as caught:
        agent_loop("go", session=run.state, provider=[{"tool": "touch"}, "done"], tools=[touch])
    run.raised = caught.type
    return run


class TestAtomicity:
    @pytest.mark.parametrize(
        ("end", "raised"),
        [(late, PromptEvaluationError), (interrupted, KeyboardInterrupt), (cancelled, asyncio.CancelledError)],
    )
    def test_however_a_run_ends_early_no_participant_keeps_changes(
        self, opened: Mulligan, tmp_path: Path, end: Any, raised: type[BaseException]
    ) -> None:
        run = run_with(opened, end)
        session = opened.session("s")
        assert run.raised is raised
        assert run.state.rng is not None
        assert (run.box.value, run.state.rng.getstate()) == (0, random.Random(7).getstate())
        assert (os.listdir(tmp_path / "work"), session[Plan].all()) == ([], ())
        assert [entry.result.success for entry in session[ToolInvoked].all()] == [False]
        assert agent_loop("again", session=session, provider=["goes on"]).text == "goes on"

    def test_if_one_participant_cannot_be_restored_none_is(self, opened: Mulligan, tmp_path: Path) -> None:
        run = run_with(opened, stuck)
        session = opened.session("s")
        assert run.raised is RestoreFailedError
        assert run.state.rng is not None
        assert (run.box.value, run.state.rng.getstate() != random.Random(7).getstate()) == (1, True)
        assert (os.listdir(tmp_path / "work"), session[Plan].all()) == (["a.txt"], (Plan("x"),))

    def test_random_state_is_restored_from_a_checkpoint_in_another_process(
        self, opened: Mulligan, tmp_path: Path
    ) -> None:
        def roll(context: ToolContext) -> str:
            assert context.rng is not None
            return str(context.rng.random())

        state = opened.session("s").execution_state(rng=random.Random(5))
        agent_loop("roll", session=state, provider=[{"tool": "roll"}, {"tool": "roll"}, "done"], tools=[roll])
        again = """
import random, sys, mulligan
with mulligan.open(sys.argv[1], store=sys.argv[2]) as m:
    state = m.session("s").execution_state(rng=random.Random(1))
    mulligan.rollback_to_tool(state, state.checkpoints, "call_1_0")
    print(state.rng.random())
"""
        command = [sys.executable, "-c", again, str(tmp_path / "work"), str(tmp_path / "home")]
        rolled = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        assert rolled == told(opened.session("s"))[1]


class TestRun:
    def test_a_budget_among_the_resources_counts(self, opened: Mulligan) -> None:
        budget = BudgetTracker(limit_tokens=1)
        state = opened.session("s").execution_state({BudgetTracker: budget})
        done = agent_loop("go", session=state, provider=[{"tool": "list_dir"}, "never said"])
        assert (done.stop_reason, done.iterations) == ("budget", 1)
        assert budget.consumed.total_tokens == done.input_tokens + done.output_tokens

    def test_any_callable_that_returns_a_reply_is_a_model(self, opened: Mulligan) -> None:
        class Plain:
            def reply(self, ask: Ask) -> Iterator[Said | Reply]:
                return iter([Said("he"), Reply("hello")])

        class Own:
            def drive(self, ask: Ask, act: Any) -> Iterator[Said | Reply]:
                return iter([Reply(act(mulligan.ProviderToolCall("1", "list_dir", {})).message or "nothing")])

        assert agent_loop("go", session="s", provider=Plain()).text == "hello"
        assert agent_loop("go", session="s", provider=Own()).tool_calls == 1
        assert [entry.name for entry in opened.session("s")[ToolInvoked].all()] == ["list_dir"]
        assert MainLoop(Plain()).execute("go").text == "hello"

    def test_a_lost_connection_keeps_the_messages_so_far(self, opened: Mulligan) -> None:
        class Breaking:
            name = profile = "openai"

            def reply(self, ask: Ask) -> Iterator[Said | Reply]:
                yield Said("half a ")
                raise ConnectionError("gone")

        with pytest.raises(ConnectionError):
            agent_loop("go", session="s", provider=Breaking())
        assert opened.session("s").messages()[-1] == {"role": "assistant", "content": "half a ", "interrupted": True}

    def test_a_listener_that_raises_is_logged_and_does_not_end_the_run(
        self, opened: Mulligan, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def hear(event: LoopEvent) -> None:
            if isinstance(event, ToolEnded):
                raise BrokenPipeError("nobody looks any more")

        write = {"tool": "write_file", "args": {"path": "a.txt", "content": "x"}}
        assert agent_loop("go", session="s", provider=[write, "done"], on_event=hear).text == "done"
        assert (tmp_path / "work" / "a.txt").read_text() == "x"
        assert len(told(opened.session("s"))) == 1
        assert "ToolEnded" in caplog.text and "nobody looks any more" in caplog.text

    def test_an_interrupt_in_a_listener_ends_the_run_and_its_calls_are_logged(
        self, opened: Mulligan, tmp_path: Path
    ) -> None:
        def hear(event: LoopEvent) -> None:
            if isinstance(event, ToolEnded):
                raise KeyboardInterrupt

        write = {"tool": "write_file", "args": {"path": "a.txt", "content": "x"}}
        with pytest.raises(KeyboardInterrupt):
            agent_loop("go", session="s", provider=[write, "done"], on_event=hear)
        assert (tmp_path / "work" / "a.txt").read_text() == "x"
        assert len(told(opened.session("s"))) == 1

    def test_failing_telemetry_undoes_nothing(self, opened: Mulligan, tmp_path: Path) -> None:
        session = opened.session("s")

        def fail(event: object) -> None:
            raise RuntimeError("the listener broke")

        session.bus.subscribe(object, fail)
        write = {"tool": "write_file", "args": {"path": "a.txt", "content": "x"}}
        assert agent_loop("go", session=session, provider=[write, "done"]).text == "done"
        assert [entry.result.success for entry in session[ToolInvoked].all()] == [True]

    def test_a_permission_is_asked_once_for_each_call_that_may_change_something(self, opened: Mulligan) -> None:
        asked: list[str] = []

        def look() -> str:
            return "looked"

        def touch(name: str) -> str:
            return name

        def may(call: mulligan.ProviderToolCall, found: Any) -> bool:
            asked.append(f"{call.name} {found.name}")
            return bool(call.parsed()["name"] != "b")

        calls = [{"tool": "touch", "args": {"name": "a"}}, {"tool": "look"}, {"tool": "touch", "args": {"name": "b"}}]
        tools = [tool(read_only=True)(look), tool(touch)]
        agent_loop("go", session="s", provider=[{"tools": calls}, "done"], tools=tools, permission=may)
        assert asked == ["touch touch", "touch touch"]
        assert told(opened.session("s")) == ["a", "looked", "The user did not allow this call. Nothing was done."]
