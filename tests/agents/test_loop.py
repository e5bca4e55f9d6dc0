"""The loop against a scripted model: what is said, done, kept and taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import builtins
from mulligan.agents.loop import Bounds, IterationEnded, Loop, LoopEvent, ToolEnded, ToolStarted
from mulligan.agents.providers import Ask, Mock, Reply, Said
from mulligan.agents.tools import ProviderToolCall, Tool
from mulligan.api import Mulligan, agent_loop
from mulligan.session.state.resources import BudgetTracker
from mulligan.store.journal import RECORDS
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError, PromptEvaluationError


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


def wrote(path: str, content: str) -> dict[str, Any]:
    return {"tool": "write_file", "args": {"path": path, "content": content}}


class TestRun:
    @pytest.mark.req("S0.capture.loop_sets_current_call")
    def test_the_loop_runs_tools_until_the_model_is_done(self, opened: Mulligan, tmp_path: Path) -> None:
        model = Mock([wrote("a.txt", "one\n"), {"tool": "read_file", "args": {"path": "a.txt"}}, "It says one."])
        session = opened.session("s")
        result = agent_loop("write and read", session=session, provider=model)
        assert (result.text, result.stop_reason, result.iterations, result.tool_calls) == ("It says one.", "done", 3, 2)
        assert (tmp_path / "work" / "a.txt").read_text() == "one\n"
        roles = [message["role"] for message in session.messages()]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert model.asked[2].messages[-1]["content"] == "one\n"
        assert session.undo("call_0_0").ok
        assert not (tmp_path / "work" / "a.txt").exists()

    def test_rollback_undoes_one_run_with_its_messages(self, opened: Mulligan, tmp_path: Path) -> None:
        session = opened.session("s")
        agent_loop("first", session=session, provider=Mock([wrote("a.txt", "one\n"), "done"]))
        agent_loop("second", session=session, provider=Mock([wrote("a.txt", "two\n"), wrote("b.txt", "x"), "done"]))
        assert session.rollback().ok
        assert {file.name: file.read_text() for file in (tmp_path / "work").iterdir()} == {"a.txt": "one\n"}
        assert [message["content"] for message in session.messages() if message["role"] == "user"] == ["first"]
        assert session.redo().ok
        assert (tmp_path / "work" / "b.txt").read_text() == "x"
        assert len(session.messages()) == 10

    @pytest.mark.req("S3.tour.loop_loads_prefix", "S3.tour.second_call_sees_first")
    def test_a_second_run_sees_the_messages_of_the_first(self, opened: Mulligan) -> None:
        model = Mock(["Hello there."])
        agent_loop("hello", session="s", provider=model)
        agent_loop("what do you remember?", session="s", provider=model)
        assert [one["content"] for one in model.asked[1].messages] == ["hello", "Hello there.", "what do you remember?"]

    @pytest.mark.req("S3.tour.anonymous_not_persisted", "D11.anonymous_loop_calls")
    def test_without_a_session_messages_are_dropped_and_file_changes_are_kept(
        self, opened: Mulligan, tmp_path: Path
    ) -> None:
        model = Mock([wrote("a.txt", "x"), "the secret answer"])
        result = agent_loop("the secret prompt", provider=model, system="the secret system prompt")
        assert result.text == "the secret answer"
        assert opened.sessions.list(closed=True) == []
        assert opened.session(result.session_id).messages() == []
        with opened.store.read() as tx:
            assert not [row for row in tx.select(RECORDS) if b"secret" in row.body]
        assert opened.session(result.session_id).undo().ok
        assert not (tmp_path / "work" / "a.txt").exists()

    @pytest.mark.req("S1.edit_file.failure_surfaces")
    def test_a_failed_tool_leaves_no_trace_and_the_model_gets_the_error(self, opened: Mulligan, tmp_path: Path) -> None:
        def half(path: str) -> None:
            (tmp_path / "half").write_text(path)
            raise ValueError("broke in the middle")

        model = Mock([{"tool": "half", "args": {"path": "x"}}, {"tool": "nonsense"}, {"tool": "half"}, "I see."])
        agent_loop("go", session="s", provider=model, tools=[Tool("half", "Breaks.", half)])
        told = [message for message in opened.session("s").messages() if message["role"] == "tool"]
        assert [message["is_error"] for message in told] == [True, True, True]

    @pytest.mark.req("S1.profile.batch_semantics_kept")
    def test_reading_tools_run_in_parallel_and_results_keep_their_order(self, opened: Mulligan) -> None:
        both = threading.Barrier(2)

        def look(name: str) -> str:
            both.wait(timeout=600)
            return name

        asked = {"tools": [{"tool": "look", "args": {"name": "one"}}, {"tool": "look", "args": {"name": "two"}}]}
        tools: list[Tool[Any, Any]] = [Tool("look", "Looks.", look, read_only=True)]
        agent_loop("go", session="s", provider=Mock([asked, "done"]), tools=tools)
        told = [message["content"] for message in opened.session("s").messages() if message["role"] == "tool"]
        assert told == ["one", "two"]


class TestLimits:
    def test_a_denied_tool_does_not_run(self, opened: Mulligan, tmp_path: Path) -> None:
        asked: list[str] = []

        def never(call: ProviderToolCall, tool: Tool[Any, Any] | None) -> bool:
            asked.append(call.name)
            return False

        tools = [wrote("a", "x"), {"tool": "no_such_tool", "args": {}}]
        model = Mock([{"tools": tools}, {"tool": "read_file", "args": {"path": "a"}}, "ok"])
        agent_loop("go", session="s", provider=model, permission=never)
        assert (asked, list((tmp_path / "work").iterdir())) == (["write_file"], [])

    def test_iteration_and_budget_limits_end_a_run_with_a_reason(self, opened: Mulligan) -> None:
        forever = [{"tool": "list_dir", "args": {"path": "."}}] * 10
        assert agent_loop("go", provider=Mock(forever), bounds=Bounds(2)).stop_reason == "max_iterations"
        spent = Reply("", (ProviderToolCall("1", "list_dir", {"path": "."}),), "tool_calls", 50, 50)
        budget = BudgetTracker(limit_tokens=150)
        result = agent_loop("go", provider=Mock([spent] * 10), bounds=Bounds(budget=budget))
        assert (result.stop_reason, result.iterations, budget.consumed.total_tokens) == ("budget", 2, 200)

    def test_after_its_deadline_the_loop_does_not_ask_the_model(self, opened: Mulligan) -> None:
        model = Mock(["never"])
        with pytest.raises(PromptEvaluationError):
            over = Bounds(deadline=SystemClock().now() - timedelta(seconds=1))
            agent_loop("go", session="s", provider=model, bounds=over)
        assert model.asked == []

    def test_a_cancelled_run_keeps_the_messages_so_far(self, opened: Mulligan) -> None:
        class Slow:
            name = profile = "openai"

            def reply(self, ask: Ask) -> Iterator[Said | Reply]:
                yield Said("half of ")
                yield Said("a sentence")
                yield Reply("half of a sentence")

        bounds = Bounds()
        session = opened.session("s")
        loop = Loop(session, Slow(), bounds=bounds, tell=lambda event: bounds.cancelled.set())
        result = loop.run("go")
        assert (result.stop_reason, result.text) == ("cancelled", "half of ")
        assert session.messages()[-1] == {"role": "assistant", "content": "half of ", "interrupted": True}

    def test_a_missing_or_unknown_provider_is_an_error(self, opened: Mulligan, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MULLIGAN_PROVIDER", raising=False)
        for given in (None, "nonsense"):
            with pytest.raises(MulliganError) as caught:
                agent_loop("go", provider=given)
            assert caught.value.code == "no_provider"
        monkeypatch.setenv("MULLIGAN_PROVIDER", "mock")
        assert agent_loop("go").text == "You said: go"


def test_events_are_delivered_while_the_run_goes_on(opened: Mulligan) -> None:
    events: list[LoopEvent] = []
    agent_loop("go", provider=Mock([wrote("a", "x"), "done"]), on_event=events.append)
    kinds = [type(event) for event in events]
    assert kinds == [IterationEnded, ToolStarted, ToolEnded, Said, IterationEnded]


class TestBuiltinFunctions:
    @pytest.mark.req(
        "S3.workflow.shared_session",
        "S3.workflow.stable_stage_id",
        "S3.workflow.session_from_model_policy",
        "D11.builtin_workflow_execute",
    )
    def test_workflow_stages_of_one_session_share_its_messages(self, opened: Mulligan) -> None:
        shared = builtins.agent_session_open()
        policy = {"session_id": shared, "provider": "mock"}
        done = builtins.workflow_execute(
            [
                {"name": "plan", "prompt": "one", "model_policy": policy},
                {"name": "build", "prompt": "two", "model_policy": policy},
                {"name": "check", "prompt": "three"},
            ]
        )
        assert [stage["session_id"] for stage in done["stages"]] == [shared, shared, f"{done['workflow_id']}:check"]
        assert builtins.agent_session_length(shared) == 4
        assert builtins.agent_session_length(done["stages"][2]["session_id"]) == 2

    @pytest.mark.req("S3.workflow.fork_before")
    def test_a_stage_can_run_on_a_fork_made_before(self, opened: Mulligan) -> None:
        source = builtins.agent_session_open()
        builtins.agent_session_inject(source, {"role": "user", "content": "before"})
        fork = builtins.agent_session_fork(source)
        policy = {"session_id": fork, "provider": "mock"}
        builtins.workflow_execute([{"name": "a", "prompt": "what if", "model_policy": policy}])
        assert (builtins.agent_session_length(source), builtins.agent_session_length(fork)) == (1, 3)

    def test_an_invalid_stage_is_refused_before_any_stage_runs(self, opened: Mulligan) -> None:
        shared = builtins.agent_session_open()
        good = {"name": "a", "prompt": "b", "model_policy": {"session_id": shared}}
        for bad in ({"name": "x"}, {"prompt": "x"}, {"name": "x", "prompt": "y", "mode": "reset"}):
            with pytest.raises(MulliganError):
                builtins.workflow_execute([good, bad])
        assert builtins.agent_session_length(shared) == 0

    @pytest.mark.req("D11.builtin_agent_loop", "S3.tour.loop_persists")
    def test_agent_loop_stores_messages_in_its_session_and_refuses_unknown_options(self, opened: Mulligan) -> None:
        session = builtins.agent_session_open()
        builtins.agent_session_inject(session, {"role": "user", "content": "Hello!"})
        first = builtins.agent_loop("continue the greeting", None, {"session_id": session, "provider": "mock"})
        assert (first["text"], builtins.agent_session_length(session)) == ("You said: continue the greeting", 3)
        with pytest.raises(MulliganError) as caught:
            builtins.agent_loop("x", None, {"transcript_policy": "reset"})
        assert caught.value.code == "unknown_option"

    @pytest.mark.req("S3.subscribe.iteration_end", "S3.subscribe.current_id_inside")
    def test_subscribers_get_each_iteration_with_its_session(self, opened: Mulligan) -> None:
        session = builtins.agent_session_open()
        heard: list[tuple[str, str | None]] = []
        done = threading.Event()

        def hear(event: Any) -> None:
            heard.append((event["kind"], builtins.agent_session_current_id()))
            if event["kind"] == "iteration_end":
                done.set()

        builtins.agent_subscribe(session, hear)
        builtins.agent_loop("hi", None, {"session_id": session})
        assert done.wait(timeout=600)
        assert ("iteration_end", session) in heard
        assert builtins.agent_session_current_id() is None
