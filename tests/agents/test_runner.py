"""Tool calls as transactions: every way a call can end, and what is left of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mulligan import (
    BudgetTracker,
    CheckpointStore,
    DeadlineExceededError,
    EventBus,
    ExecutionState,
    ExecutionStateError,
    Filesystem,
    FixedClock,
    InMemoryFilesystem,
    Lazy,
    Plan,
    PromptEvaluationError,
    ProviderToolCall,
    ResourceRegistry,
    RestoreFailedError,
    Session,
    Tool,
    ToolContext,
    ToolExecutionOutcome,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    ToolValidationError,
    VisibilityExpansionRequired,
    WorkspaceDigest,
    tool_execution,
)
from mulligan.testing import SteppingClock, create_execution_state, execute_tool, snapshots_equivalent

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
Handler = Callable[..., Any]
AnyTool = Tool[Any, Any]
WRONG = ("not json", "[1]", "3", {"no": "such"}, '{"number": "x"}', "{}", '{"number": true}')


class Box:
    """A resource of somebody's own. `broken` makes its restore fail."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.broken: Exception | None = None
        self.tags: list[str | None] = []

    def snapshot(self, *, tag: str | None = None) -> int:
        self.tags.append(tag)
        return self.value

    def restore(self, snapshot: int) -> None:
        if self.broken is not None:
            raise self.broken
        self.value = snapshot


class Other(Box):
    """One more."""


def state_with(*boxes: Box, **more: Any) -> ExecutionState:
    resources = {type(box): box for box in boxes} | {Filesystem: InMemoryFilesystem()}
    return ExecutionState(Session(), ResourceRegistry.build(resources), rng=random.Random(7), **more)


def change_all(context: ToolContext) -> None:
    assert context.filesystem is not None and context.rng is not None
    context.filesystem.write("a.txt", "changed")
    context.session.broadcast(Plan("changed"))
    context.session[WorkspaceDigest].append(WorkspaceDigest("k", "stale"))
    context.rng.random()
    for kind in (Box, Other):
        box = context.resources.get(kind)
        if box is not None:
            box.value += 1


def raising(error: BaseException) -> Handler:
    def handler(context: ToolContext) -> None:
        change_all(context)
        raise error

    return handler


def run(state: ExecutionState, handler: Handler, given: dict[str, Any] | None = None, **how: Any) -> ToolResult[Any]:
    return execute_tool(Tool("tool", "", handler, **how), state, given)


class TestOutcomes:
    @pytest.mark.req(
        "S4.tx.exception_rolls_back", "S4.tx.every_tool_wrapped", "W19.raising_handler_logged", "D12.name.tool_result"
    )
    def test_an_exception_becomes_a_failed_result_and_leaves_one_log_entry(self) -> None:
        state = state_with(Box(), Other())
        before = state.snapshot()
        result = run(state, raising(RuntimeError("boom")))
        assert (result.success, result.value, "boom" in result.message) == (False, None, True)
        assert snapshots_equivalent(before, state.snapshot())
        assert state.session[WorkspaceDigest].all() == ()
        (entry,) = state.session[ToolInvoked].all()
        assert (entry.name, entry.result, entry.call_id) == ("tool", result, "call_tool")

    @pytest.mark.req("S4.tx.success_false_rolls_back", "W18.failed_value_not_appended")
    def test_the_value_of_a_failed_tool_enters_no_slice_and_no_log(self) -> None:
        state = state_with()

        def handler(context: ToolContext) -> ToolResult[Plan]:
            change_all(context)
            return ToolResult("no", Plan("of the failed one"), success=False)

        result = run(state, handler)
        assert result == ToolResult("no", Plan("of the failed one"), success=False)
        assert state.session[Plan].all() == ()
        assert [entry.result for entry in state.session[ToolInvoked].all()] == [ToolResult("no", None, success=False)]

    @pytest.mark.req(
        "S4.tx.success_commits", "S4.tx.snapshot_before", "S4.tx.metadata_pre_tool", "S4.tx.runner_execute"
    )
    def test_a_successful_call_commits_and_dispatches_its_value(self) -> None:
        box = Box()
        state = state_with(box, checkpoints=CheckpointStore())

        def handler(context: ToolContext) -> ToolResult[Plan]:
            change_all(context)
            return ToolResult("done", Plan("value"))

        assert run(state, handler).success
        assert (box.value, box.tags[0]) == (1, "pre:call_tool")
        assert state.session[Plan].all() == (Plan("changed"), Plan("value"))
        assert len(state.session[WorkspaceDigest]) == 1
        assert state.checkpoints is not None
        pre = state.checkpoints.get_pre_snapshot("call_tool")
        assert pre is not None
        assert (pre.metadata.tag, pre.metadata.tool_call_id) == ("pre:call_tool", "call_tool")
        assert (pre.metadata.tool_name, pre.metadata.phase) == ("tool", "pre_tool")

    @pytest.mark.req("S4.tx.validation_error_rolls_back", "D12.name.tool_validation_error")
    @pytest.mark.parametrize("error", [ToolValidationError("bad"), ValueError("bad"), TypeError("bad")])
    def test_a_validation_error_becomes_a_failed_result(self, error: Exception) -> None:
        state = state_with(Box())
        before = state.snapshot()
        assert not run(state, raising(error)).success
        assert snapshots_equivalent(before, state.snapshot())

    @pytest.mark.req("S4.tx.visibility_rolls_back_reraises", "D12.name.visibility_expansion_required")
    def test_a_visibility_request_is_raised_again(self) -> None:
        state = state_with(Box())
        before = state.snapshot()
        wish = VisibilityExpansionRequired("more", requested_overrides={"a": "full"})
        with pytest.raises(VisibilityExpansionRequired) as caught:
            run(state, raising(wish))
        assert caught.value.requested_overrides == {"a": "full"}
        assert snapshots_equivalent(before, state.snapshot())
        assert len(state.session[ToolInvoked]) == 1

    @pytest.mark.req(
        "S4.tx.deadline_rolls_back_converts", "D12.deadline_raises", "D12.name.deadline_exceeded_error",
        "D12.name.prompt_evaluation_error",
    )  # fmt: skip
    def test_an_exceeded_deadline_becomes_an_evaluation_error(self) -> None:
        state = state_with(Box())
        before = state.snapshot()
        with pytest.raises(PromptEvaluationError) as caught:
            run(state, raising(DeadlineExceededError("late")))
        assert (caught.value.prompt_name, caught.value.phase) == ("test", "tool")
        assert isinstance(caught.value.__cause__, DeadlineExceededError)
        assert snapshots_equivalent(before, state.snapshot())

    @pytest.mark.parametrize("late", ["before", "after"])
    def test_the_deadline_is_checked_before_and_after_the_handler(self, late: str) -> None:
        clock = SteppingClock(NOON, step=timedelta(0))
        state = replace(state_with(Box()), clock=clock)
        ran: list[bool] = []

        def handler(context: ToolContext) -> str:
            ran.append(True)
            change_all(context)
            clock.advance(timedelta(minutes=2))
            return "done"

        if late == "before":
            clock.advance(timedelta(minutes=2))
        before = state.snapshot()
        context = ToolContext(state, deadline=NOON + timedelta(minutes=1))
        with pytest.raises(PromptEvaluationError):
            execute_tool(Tool("tool", "", handler), state, context=context)
        assert ran == ([] if late == "before" else [True])
        assert snapshots_equivalent(before, state.snapshot())

    @pytest.mark.req("W15.cancel_and_interrupt")
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
    def test_system_exit_and_interrupts_roll_back_and_propagate(self, error: BaseException) -> None:
        state = state_with(Box(), Other())
        before = state.snapshot()
        with pytest.raises(type(error)):
            run(state, raising(error))
        assert snapshots_equivalent(before, state.snapshot())
        assert len(state.session[ToolInvoked]) == 1

    @pytest.mark.parametrize("arguments", WRONG)
    def test_invalid_arguments_are_a_failed_result(self, arguments: Any) -> None:
        state = create_execution_state()
        tool: AnyTool = Tool("tool", "", _takes_number)
        runner = ToolRunner(state, {"tool": tool}, "p")
        result = runner.execute(ProviderToolCall("1", "tool", arguments))
        assert not result.success
        assert len(state.session[ToolInvoked]) == 1
        assert runner.execute(ProviderToolCall("2", "tool", '{"number": 3}')) == ToolResult("4", 4)

    def test_an_unknown_tool_is_a_failed_result(self) -> None:
        state = create_execution_state()
        assert not ToolRunner(state, {}, "p").execute(ProviderToolCall("1", "none")).success
        assert [entry.name for entry in state.session[ToolInvoked].all()] == ["none"]


def _takes_number(number: int) -> int:
    return number + 1


class TestRestore:
    @pytest.mark.req("W17.restore_failure_is_whole", "D12.restore_two_phase", "D12.name.restore_failed_error")
    def test_if_one_resource_cannot_be_restored_none_is(self) -> None:
        good, bad = Box(), Other()
        state = state_with(good, bad)
        bad.broken = OSError("disk on fire")
        with pytest.raises(RestoreFailedError) as caught:
            run(state, raising(RuntimeError("the tool's own error")))
        assert "the tool's own error" in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError)
        files = state.resources.get(Filesystem)
        assert files is not None and files.read("a.txt").content == "changed"
        assert (good.value, bad.value, state.session[Plan].all()) == (1, 1, (Plan("changed"),))
        assert len(state.session[ToolInvoked]) == 1

    @pytest.mark.req("D12.restore_two_phase", "S4.state.restore", "S4.composite.restores_session_and_resources")
    @pytest.mark.parametrize("order", [0, 1])
    def test_restore_is_all_or_none(self, order: int) -> None:
        boxes = [Box(), Other()]
        state = state_with(*boxes)
        taken = state.snapshot()
        change_all(ToolContext(state))
        changed = state.snapshot()
        boxes[order].broken = RuntimeError("stuck")
        with pytest.raises(RestoreFailedError):
            state.restore(taken)
        assert snapshots_equivalent(state.snapshot(), changed)
        boxes[order].broken = None
        state.restore(taken)
        assert snapshots_equivalent(state.snapshot(), taken)

    def test_an_interrupt_during_a_restore_leaves_all_or_none_restored(self) -> None:
        first, second = Box(), Other()
        state = state_with(first, second)
        taken = state.snapshot()
        change_all(ToolContext(state))
        changed = state.snapshot()
        second.broken = KeyboardInterrupt()  # type: ignore[assignment]  # that is the point

        def restore_once(snapshot: int) -> None:
            broken, second.broken = second.broken, None
            if broken is not None:
                raise broken
            second.value = snapshot

        second.restore = restore_once  # type: ignore[method-assign]  # that is the point
        with pytest.raises(KeyboardInterrupt):
            state.restore(taken)
        assert snapshots_equivalent(state.snapshot(), changed)

    @pytest.mark.req("W16.resource_built_in_call")
    def test_a_resource_first_built_inside_the_failing_tool_is_rolled_back(self) -> None:
        made: list[Box] = []

        def make() -> Box:
            made.append(Box(40))
            return made[-1]

        state = ExecutionState(Session(), ResourceRegistry.build({Box: Lazy(make)}))

        def handler(context: ToolContext, fails: bool) -> str:
            box = context.resources.get(Box)
            assert box is not None
            box.value += 2
            if fails:
                raise RuntimeError
            return str(box.value)

        assert not run(state, handler, {"fails": True}).success
        assert [box.value for box in made] == [40]
        assert state.snapshot().resources == {}
        assert run(state, handler, {"fails": False}).message == "42"
        assert not run(state, handler, {"fails": True}).success
        assert [box.value for box in made] == [40, 42]

    def test_a_registry_that_a_failing_tool_set_is_removed(self) -> None:
        state = state_with(Box())
        was = state.resources

        def handler(context: ToolContext) -> None:
            context.execution_state.resources = ResourceRegistry.build({})
            context.execution_state.rng = None
            raise RuntimeError

        run(state, handler)
        assert state.resources is was and state.rng is not None

    @pytest.mark.req("S4.rng.injected")
    def test_random_state_is_rolled_back_too(self) -> None:
        one, other = state_with(), state_with()

        def draw(context: ToolContext, fails: bool = False) -> str:
            assert context.rng is not None
            number = str(context.rng.random())
            if fails:
                raise RuntimeError
            return number

        first = [run(one, draw).message for _ in range(3)]
        run(other, draw, {"fails": True})
        assert [run(other, draw).message for _ in range(3)] == first


class TestTelemetry:
    def test_a_listener_that_fails_undoes_nothing(self) -> None:
        bus = EventBus()
        bus.subscribe(object, lambda event: 1 / 0)
        state = ExecutionState(Session(bus=bus), ResourceRegistry.build({Box: Box()}))
        assert run(state, lambda context: Plan("stands")).success
        assert state.session[Plan].all() == (Plan("stands"),)

    def test_a_bus_that_fails_undoes_nothing(self) -> None:
        class Broken(EventBus):
            def publish(self, event: object) -> Any:
                raise RuntimeError("telemetry is down")

        state = ExecutionState(Session(bus=Broken()))
        assert run(state, lambda context: Plan("stands")).success
        assert state.session[Plan].all() == (Plan("stands"),)

    def test_listeners_get_failed_calls_too(self) -> None:
        heard: list[bool] = []
        state = create_execution_state()
        state.session.bus.subscribe(ToolInvoked, lambda event: heard.append(event.result.success))
        run(state, lambda context: "fine")
        run(state, raising(RuntimeError()))
        assert heard == [True, False]


class TestToolExecution:
    @pytest.mark.req("S4.tx.tool_execution", "D12.name.tool_execution", "D12.name.tool_execution_outcome")
    def test_tool_execution_runs_the_block_as_the_tool(self) -> None:
        state = state_with(Box())
        call, context = ProviderToolCall("1", "by_hand"), ToolContext(state)
        with tool_execution(context=context, tool_call=call, execution_state=state) as outcome:
            assert isinstance(outcome, ToolExecutionOutcome)
            state.session.broadcast(Plan("kept"))
            outcome.result = ToolResult("done")
        before = state.snapshot()
        with tool_execution(context=context, tool_call=call, execution_state=state) as outcome:
            change_all(context)
            outcome.result = ToolResult("no", success=False)
        with tool_execution(context=context, tool_call=call, execution_state=state) as outcome:
            change_all(context)
            raise RuntimeError("boom")
        assert outcome.result is not None and not outcome.result.success
        assert snapshots_equivalent(before, state.snapshot())
        assert len(state.session[ToolInvoked]) == 3

    def test_a_registered_tool_runs_before_the_block(self) -> None:
        state = state_with(Box())
        tools: dict[str, AnyTool] = {
            "good": Tool("good", "", change_all),
            "bad": Tool("bad", "", raising(RuntimeError("boom"))),
        }
        context = ToolContext(state, tools=tools)
        before = state.snapshot()
        with tool_execution(context=context, tool_call=ProviderToolCall("1", "bad"), execution_state=state) as outcome:
            assert outcome.result is not None and not outcome.result.success
            assert snapshots_equivalent(before, state.snapshot())
        with tool_execution(context=context, tool_call=ProviderToolCall("2", "good"), execution_state=state) as outcome:
            assert outcome.result is not None and outcome.result.success
            raise RuntimeError("the block itself fails, so the call does")
        assert snapshots_equivalent(before, state.snapshot())

    @pytest.mark.parametrize("error", [VisibilityExpansionRequired("more"), KeyboardInterrupt()])
    def test_system_exceptions_propagate_out_of_the_block(self, error: BaseException) -> None:
        state = state_with(Box())
        before = state.snapshot()
        call, context = ProviderToolCall("1", "x"), ToolContext(state)
        with (
            pytest.raises(type(error)),
            tool_execution(context=context, tool_call=call, execution_state=state),
        ):
            change_all(context)
            raise error
        assert snapshots_equivalent(before, state.snapshot())


class TestHandlers:
    @pytest.mark.req(
        "D12.name.tool", "D12.name.tool_context", "S4.state.tool_context_carries_it", "D12.name.provider_tool_call"
    )
    def test_a_handler_gets_the_arguments_of_its_signature(self) -> None:
        @dataclass(frozen=True)
        class Params:
            text: str
            times: int = 2

        def whole(params: Params, *, context: ToolContext) -> str:
            return params.text * params.times

        def plain(params, *, context):  # type: ignore[no-untyped-def]  # many people's handlers have no types
            return params["text"]

        state = create_execution_state()
        cases: list[tuple[Handler, dict[str, Any], str]] = [
            (whole, {"text": "ab"}, "abab"),
            (plain, {"text": "x"}, "x"),
            (lambda text, times=1: text * times, {"text": "y", "times": 3}, "yyy"),
            (lambda: "nothing", {}, "nothing"),
            (lambda context: type(context.session).__name__, {}, "Session"),
            (lambda execution_state: str(execution_state is state), {}, "True"),
            (lambda **anything: str(sorted(anything)), {"b": 1, "a": 2}, "['a', 'b']"),
        ]
        for handler, given, said in cases:
            params = Params if handler is whole else None
            assert run(state, handler, given, params=params).message == said

    def test_the_tools_schema_is_made_from_the_signature(self) -> None:
        def handler(path: str, lines: list[int], *, context: ToolContext, mode: str = "x") -> None: ...

        assert Tool("t", "", handler).parameters == {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "mode": {"type": "string", "default": "x"},
            },
            "required": ["path", "lines"],
            "additionalProperties": False,
        }

    @pytest.mark.req("S4.tx.runner_fields", "D12.name.tool_runner")
    def test_a_runner_has_a_state_tools_and_a_name(self) -> None:
        state = create_execution_state()
        tool: AnyTool = Tool("t", "", lambda context: context.prompt_name)
        runner = ToolRunner(execution_state=state, tool_registry={"t": tool}, prompt_name="the prompt")
        assert runner.execute(ProviderToolCall("1", "t"), context=ToolContext(state)).message == "the prompt"
        assert state.session[ToolInvoked].all()[0].prompt_name == "the prompt"

    def test_a_tool_that_runs_a_tool_is_one_transaction(self) -> None:
        state = state_with(Box())
        inner: AnyTool = Tool("inner", "", raising(RuntimeError("inner")))

        def outer(context: ToolContext, fails: bool) -> str:
            change_all(context)
            nested = ToolRunner(state, {"inner": inner}, "").execute(ProviderToolCall("2", "inner"))
            assert not nested.success
            if fails:
                raise RuntimeError("outer")
            return "done"

        before = state.snapshot()
        assert not run(state, outer, {"fails": True}).success
        assert snapshots_equivalent(before, state.snapshot())
        assert run(state, outer, {"fails": False}).success
        box = state.resources.get(Box)
        assert box is not None and (box.value, state.session[Plan].all()) == (1, (Plan("changed"),))


class TestThreads:
    @pytest.mark.req("W14.overlapping_calls")
    def test_calls_that_restore_whole_resources_run_one_by_one(self) -> None:
        box = Box()
        state = state_with(box)

        def bump(context: ToolContext, fails: bool) -> str:
            was = box.value
            box.value = was + 1
            context.session.broadcast(Plan(str(was)))
            if fails:
                raise RuntimeError
            return "ok"

        runner = ToolRunner(state, {"bump": Tool("bump", "", bump)}, "")

        def work(name: int) -> None:
            for i in range(20):
                runner.execute(ProviderToolCall(f"{name}.{i}", "bump", {"fails": i % 2 == 0}))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (box.value, len(state.session[Plan]), len(state.session[ToolInvoked])) == (60, 60, 120)

    @pytest.mark.req("D9.read_only_tools")
    def test_read_only_tools_run_in_parallel(self) -> None:
        state = state_with(Box())
        both = threading.Barrier(2, timeout=600)
        runner = ToolRunner(state, {"look": Tool("look", "", lambda: str(both.wait() >= 0), read_only=True)}, "")
        found: list[ToolResult[Any]] = []
        threads = [
            threading.Thread(target=lambda: found.append(runner.execute(ProviderToolCall("1", "look"))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [result.message for result in found] == ["True", "True"]


def test_an_interrupt_with_a_failed_restore_reports_both() -> None:
    box = Box()
    state = state_with(box)
    box.broken = OSError("stuck")
    with pytest.raises(KeyboardInterrupt) as caught:
        run(state, raising(KeyboardInterrupt()))
    assert len(caught.value.__notes__) == 1
    assert (box.value, state.session[Plan].all()) == (1, (Plan("changed"),))


def test_a_reducer_that_refuses_a_tools_value_fails_the_call() -> None:
    state = state_with(Box())
    state.session[Plan].register(Plan, lambda view, event: 1 / 0)
    before = state.snapshot()

    def handler(context: ToolContext) -> Plan:
        change_all(context)
        return Plan("x")

    assert not run(state, handler).success
    assert snapshots_equivalent(before, state.snapshot())


@pytest.mark.req("S4.checkpoints.optional", "S4.state.rng_and_checkpoints_optional", "S4.state.clock_default")
def test_the_runner_works_with_an_empty_state() -> None:
    state = ExecutionState(session=Session(), resources=ResourceRegistry.build({}))
    assert (state.rng, state.checkpoints, type(state.clock).__name__) == (None, None, "SystemClock")
    assert run(state, lambda: "ok").success


def test_created_at_comes_from_the_clock() -> None:
    state = replace(create_execution_state(), clock=FixedClock(NOON))
    run(state, lambda: "ok")
    assert state.session[ToolInvoked].all()[0].created_at == NOON


def test_budgets_are_restored_after_a_failed_call() -> None:
    state = create_execution_state()
    budget = state.resources.get(BudgetTracker)
    assert budget is not None
    budget.record("a", input_tokens=1)

    def spend(context: ToolContext) -> None:
        assert budget is not None
        budget.record("a", input_tokens=5, output_tokens=5)
        raise ExecutionStateError("no")

    run(state, spend)
    assert (budget.consumed.total_tokens, budget.usage_of("a").input_tokens) == (1, 1)
