"""The acceptance criteria of the execution state document, as written there, on every kind of state we have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import (
    BudgetTracker,
    CheckpointStore,
    ExecutionState,
    Filesystem,
    HostFilesystem,
    Plan,
    ResourceRegistry,
    Session,
    Tool,
    ToolContext,
    ToolResult,
    VisibilityExpansionRequired,
    rollback_to_tool,
)
from mulligan.testing import create_execution_state, execute_tool, snapshots_equivalent


@pytest.fixture(params=["memory", "host", "durable"])
def execution_state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ExecutionState]:
    (tmp_path / "work").mkdir()
    if request.param == "memory":
        yield create_execution_state()
    elif request.param == "host":
        with HostFilesystem(_root=str(tmp_path / "work")) as files:
            resources = ResourceRegistry.build({Filesystem: files, BudgetTracker: BudgetTracker()})
            yield ExecutionState(session=Session(), resources=resources, checkpoints=CheckpointStore())
    else:
        with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "store")) as m:
            yield m.session().execution_state({BudgetTracker: BudgetTracker()})


def files_of(state: ExecutionState) -> Filesystem:
    found = state.resources.get(Filesystem)
    assert found is not None
    return found


def mutate(context: ToolContext) -> None:
    assert context.filesystem is not None
    context.filesystem.write("file.txt", "changed")
    context.filesystem.write("data.txt", "changed")
    context.filesystem.write("new/file.txt", "new")
    context.session.broadcast(Plan(objective="changed", status="active"))
    budget = context.resources.get(BudgetTracker)
    assert budget is not None
    budget.record("test", input_tokens=100)


def fail(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Plan]:
    mutate(context)
    return ToolResult("it did not work", Plan("a value"), success=False)


def expand(params: dict[str, Any], *, context: ToolContext) -> ToolResult[None]:
    mutate(context)
    raise VisibilityExpansionRequired("more, please")


mutating_tool: Tool[Any, Any] = Tool("mutating_tool", "Changes everything, then fails.", fail)
expanding_tool: Tool[Any, Any] = Tool("expanding_tool", "Changes everything, then wants to see more.", expand)


@pytest.mark.req("S4.accept.failure_leaves_no_trace", "D12.testing.execute_tool", "S4.tx.success_false_rolls_back")
def test_tool_failure_rollback(execution_state: ExecutionState) -> None:
    fs = files_of(execution_state)
    session = execution_state.session

    # Initial state
    fs.write("file.txt", "original")
    session[Plan].seed(Plan(objective="test", status="active"))

    # Tool fails after mutations
    result = execute_tool(
        mutating_tool,
        execution_state=execution_state,
    )

    assert not result.success
    assert fs.read("file.txt").content == "original"
    latest = session[Plan].latest()
    assert latest is not None and latest.objective == "test"
    assert not fs.exists("new")


@pytest.mark.req(
    "S4.accept.visibility_is_clean",
    "D12.testing.snapshots_equivalent",
    "S4.tx.visibility_rolls_back_reraises",
    "D12.name.visibility_expansion_required",
)
def test_visibility_expansion_rollback(execution_state: ExecutionState) -> None:
    fs = files_of(execution_state)

    fs.write("data.txt", "before")
    snapshot_before = execution_state.snapshot()

    with pytest.raises(VisibilityExpansionRequired):
        execute_tool(
            expanding_tool,  # Mutates state then raises
            execution_state=execution_state,
        )

    snapshot_after = execution_state.snapshot()
    assert snapshots_equivalent(snapshot_before, snapshot_after)
    assert fs.read("data.txt").content == "before"


def writes(name: str) -> Tool[Any, Any]:
    def write(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Plan]:
        assert context.filesystem is not None
        context.filesystem.write("log.txt", name, mode="append")
        return ToolResult(f"wrote {name}", Plan(name))

    return Tool(f"tool_{name}", f"Writes {name}.", write)


@pytest.mark.req(
    "S4.accept.rollback_to_boundary",
    "S4.principle.boundaries_addressable",
    "S4.checkpoints.automatic",
    "S4.fs.rollback_to_tool",
    "S4.fs.restore_includes_files",
    "D12.name.rollback_to_tool",
)
def test_rollback_to_tool_boundary(execution_state: ExecutionState) -> None:
    checkpoints = execution_state.checkpoints
    assert checkpoints is not None

    # Run several tools
    for name in "abc":
        assert execute_tool(writes(name), execution_state).success

    # Rollback to before tool_b
    pre_b = checkpoints.get_pre_snapshot("call_b")
    assert pre_b is not None
    execution_state.restore(pre_b)

    # State matches exactly pre-tool_b
    assert execution_state.session[Plan].all() == (Plan("a"),)
    assert files_of(execution_state).read("log.txt").content == "a"
    assert snapshots_equivalent(execution_state.snapshot(), pre_b)

    # And any other boundary can be reached from there
    post_c = checkpoints.get_post_snapshot("call_c")
    assert post_c is not None
    execution_state.restore(post_c)
    assert files_of(execution_state).read("log.txt").content == "abc"
    rollback_to_tool(execution_state, checkpoints, "call_a")
    assert (execution_state.session[Plan].all(), files_of(execution_state).exists("log.txt")) == ((), False)


@pytest.mark.req(
    "S4.principle.hermetic_root", "D12.testing.create_execution_state", "S4.state.section_state_in_resources"
)
def test_two_states_share_nothing(execution_state: ExecutionState) -> None:
    other = create_execution_state()
    assert execute_tool(writes("x"), execution_state).success
    assert snapshots_equivalent(other.snapshot(), create_execution_state().snapshot())
    assert not snapshots_equivalent(other.snapshot(), execution_state.snapshot())
