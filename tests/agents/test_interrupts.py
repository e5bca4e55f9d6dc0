"""An interrupt at any line of a call, and two in a row: the call is committed or has left no trace."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
    MainLoop,
    Plan,
    ProviderToolCall,
    ResourceRegistry,
    Session,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    tool_execution,
)
from tests.interrupts import Lines, lines_of, pairs, sample, variables_set


@dataclass
class World:
    """A state, and how it looks: what its calls change, and how often each is said to have succeeded."""

    state: ExecutionState
    root: Path | None = None
    close: Callable[[], None] = lambda: None
    told: list[object] = field(default_factory=list)

    def look(self) -> tuple[object, ...]:
        files = {name: (self.root / name).read_bytes() for name in os.listdir(self.root)} if self.root else {}
        budget = self.state.resources.get(BudgetTracker)
        assert budget is not None
        spent = sorted((one for one in budget.snapshot().usage if one.isdigit()), key=int)
        return files, spent, self.state.session[Plan].all()

    def successes(self) -> list[str]:
        return [entry.call_id for entry in self.state.session[ToolInvoked].all() if entry.result.success]


def memory(base: Path) -> World:
    return World(ExecutionState(Session(), ResourceRegistry.build({BudgetTracker: BudgetTracker()})))


def host(base: Path) -> World:
    root = base / "host"
    root.mkdir()
    files = HostFilesystem(str(root))
    resources = ResourceRegistry.build({BudgetTracker: BudgetTracker(), Filesystem: files})
    return World(ExecutionState(Session(), resources), root, files.close)


def durable(base: Path, store: str | None = None) -> World:
    root = base / "durable"
    root.mkdir()
    opened = mulligan.open(root, store=store or str(base / "store"))
    state = opened.session("s").execution_state({BudgetTracker: BudgetTracker()})
    return World(state, root, opened.close)


def unstored(base: Path) -> World:
    """A session of a workspace whose store is in memory."""
    return durable(base, "memory:")


STATES = {"memory": memory, "host": host, "durable": durable, "memory store": unstored}


def act(context: ToolContext, number: str) -> ToolResult[Plan]:
    """A tool that changes everything there is, and whose value is an event too."""
    files, budget = context.resources.get(Filesystem), context.resources.get(BudgetTracker)
    assert budget is not None
    budget.record(number, input_tokens=1)
    if files is not None:
        files.write("a", number)
    return ToolResult("done", Plan(number))


def act_and_fail(context: ToolContext, number: str) -> ToolResult[Plan]:
    return replace(act(context, number), success=False)


TOOLS: dict[str, Tool[Any, Any]] = {"act": Tool("act", "", act), "fail": Tool("fail", "", act_and_fail)}


def by_execute(world: World, number: str) -> None:
    ToolRunner(world.state, TOOLS).execute(ProviderToolCall(number, "act", {"number": number}))


def by_failing_execute(world: World, number: str) -> None:
    ToolRunner(world.state, TOOLS).execute(ProviderToolCall(number, "fail", {"number": number}))


def by_aexecute(world: World, number: str) -> None:
    asyncio.run(ToolRunner(world.state, TOOLS).aexecute(ProviderToolCall(number, "act", {"number": number})))


def by_block(world: World, number: str) -> None:
    call = ProviderToolCall(number, "act", {"number": number})
    context = ToolContext(world.state)
    with tool_execution(context=context, tool_call=call, execution_state=world.state) as outcome:
        outcome.result = act(context, number)


def by_main_loop(world: World, number: str) -> None:
    reply = {"tool": "act", "id": number, "args": {"number": number}}
    MainLoop([reply, "done"], tools=list(TOOLS.values())).execute("go", world.state)


def by_agent_loop(world: World, number: str) -> None:
    reply = {"tool": "act", "id": number, "args": {"number": number}}
    mulligan.agent_loop("go", session=world.state, provider=[reply, "done"], tools=list(TOOLS.values()))


def by_call(world: World, number: str) -> None:
    session = world.state.session
    assert isinstance(session, DurableSession)
    with session.call(tool_call_id=number) as call:
        assert call.write_file("a", number).ok
        session[Plan].append(Plan(number))


def by_failing_call(world: World, number: str) -> None:
    session = world.state.session
    assert isinstance(session, DurableSession)
    with session.call(tool_call_id=number) as call:
        assert call.write_file("a", number).ok
        session[Plan].append(Plan(number))
        call.fail("it went wrong")


def by_nested_call(world: World, number: str) -> None:
    """The call inside is committed with the one around it."""
    session = world.state.session
    assert isinstance(session, DurableSession)
    with session.call(tool_call_id=number), session.call() as call:
        session[Plan].append(Plan(number))
        assert call.write_file("a", number).ok


WAYS = {
    "execute": by_execute,
    "failing execute": by_failing_execute,
    "aexecute": by_aexecute,
    "tool_execution": by_block,
    "MainLoop": by_main_loop,
}
DURABLE_WAYS = {
    "call": by_call,
    "failing call": by_failing_call,
    "call in a call": by_nested_call,
    "agent_loop": by_agent_loop,
}
COMMITTING: dict[Callable[[World, str], None], Callable[[World, str], None]] = {
    by_failing_execute: by_execute,
    by_failing_call: by_call,
}
"""The same way without the failure."""


# An interrupt may hit the finalizer of a generator that an earlier interrupt left. Python can only report that one.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CALLS_MAX = 100


class Attempts:
    """Runs one call after another with interrupts, and checks after each that it happened whole or not at all."""

    def __init__(
        self, make: Callable[[], World], way: Callable[[World, str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        self._make = make
        self._world = make()
        self._way = way
        self._caplog = caplog
        self._number = 0
        self._is_tool = way not in DURABLE_WAYS.values() or way is by_agent_loop

    def count(self) -> int:
        self._call()
        return lines_of(self._call)

    def _call(self) -> None:
        self._number += 1
        self._way(self._world, str(self._number))

    def close(self) -> None:
        self._world.close()

    def _renew(self) -> None:
        """Each call adds to the state, and a state that has grown makes each call slower."""
        self.close()
        self._world, self._number = self._make(), 0
        self._call()

    def interrupt(self, *at: int) -> None:
        if self._number > CALLS_MAX:
            self._renew()
        before = self._world.look()
        self._caplog.clear()
        lines = Lines(*at)
        lines.run(self._call)
        interrupted = str(self._number)
        with ToolRunner(self._world.state, TOOLS).execution_state.session.attempt("next", "next"):
            pass
        after = self._world.look()
        assert variables_set() == {}, lines.where
        whole = Plan(interrupted) in self._world.state.session[Plan].all()
        assert not (whole and self._way in COMMITTING), lines.where
        assert not self._is_tool or whole == (interrupted in self._world.successes()), lines.where
        assert after == (self.expected(before, interrupted) if whole else before), lines.where
        warnings = [record for record in self._caplog.records if record.name == "mulligan.calls"]
        assert len(warnings) <= 1 and not (whole and warnings), lines.where
        self._number += 1
        COMMITTING.get(self._way, self._way)(self._world, str(self._number))
        assert Plan(str(self._number)) == self._world.state.session[Plan].latest(), lines.where

    def expected(self, before: tuple[Any, ...], number: str) -> tuple[object, ...]:
        files = {"a": number.encode()} if self._world.root else {}
        spent = [*before[1], number] if self._is_tool else before[1]
        return files, spent, (*before[2], Plan(number))


TOOL_CASES = [(state, way) for state in STATES for way in WAYS]
CASES = TOOL_CASES + [("durable", way) for way in DURABLE_WAYS] + [("memory store", way) for way in DURABLE_WAYS]


@pytest.fixture
def attempts(request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Attempts]:
    state, way = request.param
    caplog.set_level(logging.WARNING)
    number = itertools.count()

    def make() -> World:
        base = tmp_path / str(next(number))
        base.mkdir()
        return STATES[state](base)

    running = Attempts(make, {**WAYS, **DURABLE_WAYS}[way], caplog)
    yield running
    running.close()
    assert variables_set() == {}


every_case = pytest.mark.parametrize("attempts", CASES, ids=lambda case: " ".join(case), indirect=True)


# If a trace function raises, Python 3.11 may keep the exception, and with it frames and connections, until the thread
# ends. So tests that fork later must not run in the same process: the fast lane runs these in processes of their own.
@pytest.mark.slow
@every_case
def test_an_interrupt_at_any_line_leaves_a_call_whole_or_without_trace(attempts: Attempts) -> None:
    for at in sample(16, attempts.count(), seed=1):
        attempts.interrupt(at)


@pytest.mark.slow
@every_case
def test_two_interrupts_in_a_row_leave_a_call_whole_or_without_trace(attempts: Attempts) -> None:
    for at in pairs(16, attempts.count(), seed=2):
        attempts.interrupt(*at)


@pytest.mark.req("W15.cancel_and_interrupt")
@pytest.mark.parametrize("name", ["an_interrupt_at_any_line", "two_interrupts_in_a_row"])
def test_in_a_process_of_its_own_every_case_holds(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", __file__, "-m", "slow", "-k", name]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
    assert f"{len(CASES)} passed" in done.stdout


@pytest.mark.slow
@every_case
def test_an_interrupt_at_each_line_leaves_a_call_whole_or_without_trace(attempts: Attempts) -> None:
    for at in range(1, attempts.count() + 1):
        attempts.interrupt(at)


@pytest.mark.slow
@every_case
def test_two_interrupts_at_many_pairs_of_lines_leave_a_call_whole_or_without_trace(attempts: Attempts) -> None:
    for at in pairs(1_000, attempts.count(), seed=3):
        attempts.interrupt(*at)


@pytest.mark.parametrize("state", STATES)
def test_the_next_call_and_close_abort_a_call_whose_block_is_gone_and_log_its_id_once(
    state: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback of the interrupt, which keeps the frames, is still held when the next call begins."""
    world = STATES[state](tmp_path)
    by_execute(world, "1")
    before = world.look()
    kept: list[BaseException] = []

    def interrupted(number: str) -> None:
        """The handler has returned, and two interrupts keep the call from ending."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mulligan.agents.runner._Ending.take_value", stop)
            patch.setattr("mulligan.agents.runner._Ending.give_up", stop)
            try:
                by_execute(world, number)
            except KeyboardInterrupt as error:
                kept.append(error)

    interrupted("2")
    by_execute(world, "3")
    assert world.look() == Attempts(lambda: world, by_execute, caplog).expected(before, "3")
    assert variables_set() == {}
    (warning,) = [record for record in caplog.records if record.name == "mulligan.calls"]
    calls = [entry for entry in world.state.session[ToolInvoked].all() if entry.call_id == "2"]
    assert [entry.result.success for entry in calls] == [False]
    caplog.clear()
    session = world.state.session
    if isinstance(session, DurableSession):
        assert session.undo("3").ok
        interrupted("4")
        world.close()
        assert len([record for record in caplog.records if record.name == "mulligan.calls"]) == 1
        assert (world.root / "a").read_bytes() == b"1" if world.root else False
    assert len(kept) >= 1 and warning.levelno == logging.WARNING


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_call_in_a_suspended_generator_goes_on(tmp_path: Path) -> None:
    world = durable(tmp_path)
    session = world.state.session
    assert isinstance(session, DurableSession)

    def steps() -> Iterator[None]:
        with session.call() as call:
            assert call.write_file("a", "in the generator").ok
            yield

    def other() -> None:
        with session.call() as call:
            assert call.write_file("b", "of another thread").ok

    generator = steps()
    next(generator)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(other).result()
    assert list(generator) == []
    assert world.look()[0] == {"a": b"in the generator", "b": b"of another thread"}
    world.close()


def test_a_call_that_an_exit_stack_holds_goes_on_and_ends_when_nothing_refers_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = durable(tmp_path)
    session = world.state.session
    assert isinstance(session, DurableSession)
    with ExitStack() as stack:
        call = stack.enter_context(session.call())
        assert call.write_file("a", "1").ok
        with session.call() as inner:
            assert inner.write_file("b", "2").ok and inner.id == call.id
    assert world.look()[0] == {"a": b"1", "b": b"2"}
    lost = session.call()
    lost.__enter__()
    assert lost.write_file("a", "lost").ok
    name = lost.id
    del lost
    with session.call():
        pass
    assert world.look()[0] == {"a": b"1", "b": b"2"}
    assert [name in record.getMessage() for record in caplog.records if record.name == "mulligan.calls"] == [True]
    world.close()
