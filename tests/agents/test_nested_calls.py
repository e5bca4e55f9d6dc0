"""Several calls inside one tool call, and what their failures and listeners may change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import (
    BudgetTracker,
    DurableSession,
    ExecutionState,
    Filesystem,
    HostFilesystem,
    InMemoryFilesystem,
    MulliganError,
    Plan,
    ProviderToolCall,
    ResourceRegistry,
    Session,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
)
from mulligan.testing import execute_tool

NAMES = ("one", "two", "three", "four")


def files_of(state: ExecutionState) -> Any:
    return state.resources.get(Filesystem)


def budget_of(state: ExecutionState) -> BudgetTracker:
    found = state.resources.get(BudgetTracker)
    assert found is not None
    return found


@pytest.fixture(params=["memory", "host", "durable"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ExecutionState]:
    root = tmp_path / "root"
    root.mkdir()
    if request.param == "durable":
        with mulligan.open(root, store=str(tmp_path / "store")) as opened:
            yield opened.session("s").execution_state({BudgetTracker: BudgetTracker()})
        return
    files = InMemoryFilesystem() if request.param == "memory" else HostFilesystem(root)
    yield ExecutionState(Session(), ResourceRegistry.build({Filesystem: files, BudgetTracker: BudgetTracker()}))


def held(state: ExecutionState) -> tuple[list[str], list[str], list[str]]:
    """The names that are in files, in the budget and in the slice."""
    files = sorted(one.name for one in files_of(state).list())
    return files, sorted(budget_of(state).snapshot().usage), sorted(one.objective for one in state.session[Plan].all())


def leave_name(context: ToolContext, name: str, fails: bool) -> ToolResult[None]:
    files_of(context.execution_state).write(name, name)
    budget_of(context.execution_state).record(name, input_tokens=1)
    context.session[Plan].append(Plan(name))
    return ToolResult(name, success=not fails)


async def leave_name_slowly(context: ToolContext, name: str, fails: bool) -> ToolResult[None]:
    """Every sibling has begun before the first one ends, if they run side by side."""
    await asyncio.sleep(0.01)
    result = leave_name(context, name, fails)
    await asyncio.sleep(0.01 * NAMES.index(name))
    return result


def inner_runner(state: ExecutionState) -> ToolRunner:
    tools: dict[str, Tool[Any, Any]] = {
        "sync": Tool("sync", "", leave_name),
        "slow": Tool("slow", "", leave_name_slowly),
    }
    return ToolRunner(state, tools)


def inner_call(name: str, tool: str, failing: str) -> ProviderToolCall:
    return ProviderToolCall(name, tool, {"name": name, "fails": name == failing})


def by_gather(state: ExecutionState, failing: str) -> None:
    runner = inner_runner(state)

    async def all_of_them() -> None:
        await asyncio.gather(*(runner.aexecute(inner_call(name, "slow", failing)) for name in NAMES))

    asyncio.run(all_of_them())


def by_threads(state: ExecutionState, failing: str) -> None:
    runner = inner_runner(state)
    with ThreadPoolExecutor(len(NAMES)) as pool:
        futures = [pool.submit(copy_context().run, runner.execute, inner_call(name, "sync", failing)) for name in NAMES]
        for future in futures:
            future.result()


WAYS: dict[str, Callable[[ExecutionState, str], None]] = {"gather": by_gather, "threads": by_threads}


@pytest.mark.req("W14.overlapping_calls")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("failing", NAMES)
def test_a_failing_parallel_call_in_a_tool_undoes_only_its_own_changes(
    state: ExecutionState, way: str, failing: str
) -> None:
    def parent(context: ToolContext) -> str:
        WAYS[way](context.execution_state, failing)
        return "ok"

    assert execute_tool(Tool("parent", "", parent), state).success
    rest = sorted(set(NAMES) - {failing})
    assert held(state) == (rest, rest, rest)


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_tool_undoes_its_nested_calls_and_logs_them_as_failed(state: ExecutionState, way: str) -> None:
    def parent(context: ToolContext) -> str:
        WAYS[way](context.execution_state, "two")
        assert [len(part) for part in held(context.execution_state)] == [3, 3, 3]
        raise RuntimeError("the parent fails")

    assert not execute_tool(Tool("parent", "", parent), state).success
    assert held(state) == ([], [], [])
    log = [(entry.name, entry.result.success, entry.result.value) for entry in state.session[ToolInvoked].all()]
    assert sorted({name for name, _, _ in log}) == ["parent", "slow" if way == "gather" else "sync"]
    assert len(log) == 5 and not any(success or value for _, success, value in log)


def test_a_tool_whose_commit_is_refused_is_logged_as_failed(tmp_path: Path) -> None:
    """Two sessions in one process change a slice, and the reducer of one of them cannot go on top of the other's."""
    session = Session()
    state = ExecutionState(session)

    def once(view: Any, event: Plan) -> Any:
        if len(view) > 0:
            raise ValueError("only one")
        return (event,)

    session[Plan].register(Plan, once)

    def act(context: ToolContext) -> str:
        context.session.dispatch(Plan("mine"))
        # A thread without the context of this call: somebody else.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(session.dispatch, Plan("theirs")).result()
        return "ok"

    with pytest.raises(MulliganError):
        execute_tool(Tool("act", "", act), state)
    assert session[Plan].all() == (Plan("theirs"),)
    assert [entry.result.success for entry in session[ToolInvoked].all()] == [False]


class Stop(BaseException):
    """Neither an error nor an interrupt."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError, Stop])
def test_an_exception_of_a_listener_does_not_undo_a_commit(state: ExecutionState, error: type[BaseException]) -> None:
    heard: list[object] = []

    def refuse(event: object) -> None:
        raise error

    state.session.bus.subscribe(ToolInvoked, refuse)
    state.session.bus.subscribe(ToolInvoked, heard.append)
    caught: BaseException | None = None
    try:
        inner_runner(state).execute(inner_call("one", "sync", ""))
    except (KeyboardInterrupt, SystemExit, asyncio.CancelledError, Stop) as raised:
        caught = raised
    assert (caught is None) == issubclass(error, Exception)
    assert held(state) == (["one"], ["one"], ["one"])
    assert [entry.result.success for entry in state.session[ToolInvoked].all()] == [True]
    assert len(heard) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state.session.bus, "_listeners", [])
        inner_runner(state).execute(inner_call("two", "sync", ""))
    assert held(state) == (["one", "two"],) * 3


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except MulliganError as error:
        return error.code
    return "allowed"


def test_a_task_that_outlives_its_failed_call_cannot_change_anything(state: ExecutionState) -> None:
    told: list[str] = []

    def tries(context: ToolContext) -> list[Callable[[], object]]:
        files, budget, session = files_of(state), budget_of(state), context.session
        found: list[Callable[[], object]] = [
            lambda: files.write("late", "x"),
            lambda: files.mkdir("late"),
            lambda: budget.record("late", input_tokens=1),
            lambda: context.resources.get(BudgetTracker),
            lambda: session[Plan].append(Plan("late")),
            lambda: session.dispatch(Plan("late")),
            lambda: inner_runner(state).execute(inner_call("one", "sync", "")),
        ]
        if isinstance(session, DurableSession):
            found += [lambda: session.call(), lambda: session.perform("write_file", {"path": "late", "content": "x"})]
        return found

    async def main() -> None:
        over = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []

        async def later(context: ToolContext, acts: list[Callable[[], object]]) -> None:
            await over.wait()
            told.extend(refused(act) for act in acts)

        async def fails(context: ToolContext) -> ToolResult[None]:
            leave_name(context, "one", False)
            tasks.append(asyncio.create_task(later(context, tries(context))))
            return ToolResult("no", success=False)

        runner = ToolRunner(state, {"fails": Tool("fails", "", fails)})
        assert not (await runner.aexecute(ProviderToolCall("1", "fails"))).success
        over.set()
        await asyncio.gather(*tasks)

    run(main())
    assert set(told) == {"call_not_open"} and len(told) >= 7
    assert held(state) == ([], [], [])
    assert inner_runner(state).execute(inner_call("two", "sync", "")).success
    assert held(state) == (["two"],) * 3


def test_a_task_of_a_nested_call_that_was_undone_is_refused(state: ExecutionState) -> None:
    told: list[str] = []

    async def main() -> None:
        over = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []

        async def later() -> None:
            await over.wait()
            told.append(refused(lambda: state.session[Plan].append(Plan("late"))))

        async def good() -> str:
            tasks.append(asyncio.create_task(later()))
            return "ok"

        async def outer(context: ToolContext) -> ToolResult[None]:
            inner = ToolRunner(state, {"good": Tool("good", "", good)})
            assert (await inner.aexecute(ProviderToolCall("2", "good"))).success
            return ToolResult("no", success=False)

        runner = ToolRunner(state, {"outer": Tool("outer", "", outer)})
        assert not (await runner.aexecute(ProviderToolCall("1", "outer"))).success
        over.set()
        await asyncio.gather(*tasks)

    run(main())
    assert (told, state.session[Plan].all()) == (["call_not_open"], ())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))
