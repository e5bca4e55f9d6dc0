"""Tools on an event loop: async handlers, worker threads, cancellation and deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import (
    ExecutionState,
    ExecutionStateError,
    Plan,
    PromptEvaluationError,
    ProviderToolCall,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    VisibilityExpansionRequired,
)
from mulligan.testing import execute_tool, snapshots_equivalent
from tests.agents.test_runner import Box, change_all, state_with

AnyTool = Tool[Any, Any]


def runner(state: ExecutionState, handler: Callable[..., Any], **how: Any) -> ToolRunner:
    return ToolRunner(state, {"tool": Tool("tool", "", handler, **how)}, "p")


CALL = ProviderToolCall("1", "tool")


def on_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.mark.req("D12.async_handlers")
@pytest.mark.parametrize("how", ["sync", "async", "sync inside a loop"])
def test_async_handlers_are_supported(how: str) -> None:
    state = state_with(Box())

    async def good(context: ToolContext) -> ToolResult[Plan]:
        await asyncio.sleep(0)
        change_all(context)
        return ToolResult("done", Plan("value"))

    async def inside() -> ToolResult[Any]:
        return runner(state, good).execute(CALL)

    if how == "sync":
        result = execute_tool(Tool("tool", "", good), state)
    elif how == "async":
        result = on_loop(runner(state, good).aexecute(CALL))
    else:
        result = on_loop(inside())
    assert (result.success, state.session[Plan].all()) == (True, (Plan("changed"), Plan("value")))


@pytest.mark.req("D12.async_handlers")
def test_a_sync_handler_does_not_block_the_event_loop() -> None:
    state = state_with(Box())
    seen: list[bool] = []

    def handler(context: ToolContext) -> str:
        seen.append(threading.current_thread() is threading.main_thread())
        context.session.broadcast(Plan("from the thread"))
        return "ok"

    assert on_loop(runner(state, handler).aexecute(CALL)).success
    assert (seen, state.session[Plan].all()) == ([False], (Plan("from the thread"),))


@pytest.mark.parametrize("error", [RuntimeError("x"), ValueError("x")])
def test_a_failing_async_handler_leaves_no_changes(error: Exception) -> None:
    state = state_with(Box())
    before = state.snapshot()

    async def bad(context: ToolContext) -> None:
        change_all(context)
        await asyncio.sleep(0)
        raise error

    assert not on_loop(runner(state, bad).aexecute(CALL)).success
    assert snapshots_equivalent(before, state.snapshot())


def test_a_visibility_request_propagates() -> None:
    state = state_with(Box())

    async def bad(context: ToolContext) -> None:
        change_all(context)
        raise VisibilityExpansionRequired("more")

    with pytest.raises(VisibilityExpansionRequired):
        on_loop(runner(state, bad).aexecute(CALL))
    assert state.session[Plan].all() == ()


@pytest.mark.req("D12.async_handlers", "W15.cancel_and_interrupt")
def test_cancelling_an_async_handler_aborts_the_call() -> None:
    state = state_with(Box())
    before = state.snapshot()

    async def main() -> None:
        started = asyncio.Event()

        async def waits(context: ToolContext) -> None:
            change_all(context)
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(runner(state, waits).aexecute(CALL))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    on_loop(main())
    assert snapshots_equivalent(before, state.snapshot())
    assert [entry.result.success for entry in state.session[ToolInvoked].all()] == [False]


@pytest.mark.req("W15.cancel_and_interrupt")
def test_cancelling_a_sync_handler_waits_for_its_thread_and_undoes_its_changes() -> None:
    state = state_with(Box())
    before = state.snapshot()
    go_on = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        started = asyncio.Event()

        def slow(context: ToolContext) -> None:
            change_all(context)
            loop.call_soon_threadsafe(started.set)
            go_on.wait(600)
            change_all(context)

        task = asyncio.create_task(runner(state, slow).aexecute(CALL))
        await started.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    on_loop(main())
    assert snapshots_equivalent(before, state.snapshot())


@pytest.mark.req("D12.deadline_raises")
def test_a_deadline_cancels_an_async_handler() -> None:
    state = state_with(Box())
    before = state.snapshot()

    async def forever(context: ToolContext) -> None:
        change_all(context)
        await asyncio.Event().wait()

    context = ToolContext(state, deadline=state.clock.now() + timedelta(milliseconds=50))
    with pytest.raises(PromptEvaluationError):
        on_loop(runner(state, forever).aexecute(CALL, context=context))
    assert snapshots_equivalent(before, state.snapshot())


def test_a_timeout_inside_the_handler_is_a_failed_result() -> None:
    state = state_with(Box())

    async def late(context: ToolContext) -> None:
        raise TimeoutError("mine")

    context = ToolContext(state, deadline=state.clock.now() + timedelta(hours=1))
    assert not on_loop(runner(state, late).aexecute(CALL, context=context)).success


@pytest.mark.req("W14.overlapping_calls")
def test_many_tasks_on_one_state_run_one_by_one() -> None:
    box = Box()
    state = state_with(box)

    async def bump(context: ToolContext, fails: bool) -> str:
        was = box.value
        await asyncio.sleep(0)
        box.value = was + 1
        context.session.broadcast(Plan(str(was)))
        await asyncio.sleep(0)
        if fails:
            raise RuntimeError
        return "ok"

    async def main() -> None:
        run = runner(state, bump)
        calls = [ProviderToolCall(str(i), "tool", {"fails": i % 2 == 0}) for i in range(40)]
        await asyncio.gather(*(run.aexecute(call) for call in calls))

    on_loop(main())
    assert (box.value, len(state.session[Plan])) == (20, 20)


def test_a_task_cancelled_while_waiting_does_not_block_the_next() -> None:
    state = state_with(Box())

    async def main() -> list[Any]:
        release = asyncio.Event()

        async def holds(context: ToolContext) -> str:
            await release.wait()
            return "held"

        run = runner(state, holds)
        tasks = [asyncio.create_task(run.aexecute(ProviderToolCall(str(i), "tool"))) for i in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        release.set()
        found: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
        return found

    found = on_loop(main())
    assert isinstance(found[1], asyncio.CancelledError)
    assert [found[i].message for i in (0, 2, 3)] == ["held"] * 3


def test_a_sync_call_that_would_deadlock_its_own_event_loop_raises() -> None:
    state = state_with(Box())

    async def main() -> None:
        release = asyncio.Event()

        async def holds(context: ToolContext) -> None:
            await release.wait()

        task = asyncio.create_task(runner(state, holds).aexecute(CALL))
        await asyncio.sleep(0)
        with pytest.raises(ExecutionStateError):
            runner(state, lambda: "x").execute(CALL)
        release.set()
        await task
        assert runner(state, lambda: "x").execute(CALL).success

    on_loop(main())


def test_parallel_calls_of_a_durable_session_do_not_wait_and_do_not_disturb_each_other(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with mulligan.open(str(work), store=str(tmp_path / "store")) as m:
        state = m.session().execution_state()

        async def main() -> list[ToolResult[Any]]:
            both = asyncio.Barrier(4)

            async def write(context: ToolContext, name: str, fails: bool) -> str:
                assert context.filesystem is not None
                context.filesystem.write(f"{name}.txt", name)
                context.session.broadcast(Plan(name))
                await both.wait()
                if fails:
                    raise RuntimeError(name)
                return name

            run = runner(state, write)
            calls = [ProviderToolCall(n, "tool", {"name": n, "fails": n in "bd"}) for n in "abcd"]
            return await asyncio.gather(*(run.aexecute(call) for call in calls))

        assert [result.success for result in on_loop(main())] == [True, False, True, False]
        assert sorted(path.name for path in work.iterdir()) == ["a.txt", "c.txt"]
        assert sorted(plan.objective for plan in state.session[Plan].all()) == ["a", "c"]
        assert len(state.session[ToolInvoked]) == 4


def test_cancelling_a_durable_call_restores_its_files(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("before")
    with mulligan.open(str(work), store=str(tmp_path / "store")) as m:
        state = m.session().execution_state()

        async def main() -> None:
            started = asyncio.Event()

            async def waits(context: ToolContext) -> None:
                assert context.filesystem is not None
                context.filesystem.write("a.txt", "changed")
                context.session.broadcast(Plan("changed"))
                started.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(runner(state, waits).aexecute(CALL))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        on_loop(main())
        assert (work / "a.txt").read_text() == "before"
        assert state.session[Plan].all() == ()
        assert [entry.result.success for entry in state.session[ToolInvoked].all()] == [False]
