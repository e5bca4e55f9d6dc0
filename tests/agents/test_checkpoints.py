"""Resources, composite snapshots and checkpoints, in memory and in the store."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import pytest

import mulligan
from mulligan import (
    BudgetSnapshot,
    BudgetTracker,
    CheckpointStore,
    Clock,
    CompositeSnapshot,
    ExecutionState,
    Filesystem,
    FixedClock,
    InMemoryFilesystem,
    Lazy,
    Plan,
    ProviderToolCall,
    ResourceRegistry,
    Session,
    Snapshotable,
    SnapshotMetadata,
    SnapshotMismatchError,
    SystemClock,
    Tool,
    ToolCheckpoint,
    ToolContext,
    ToolResult,
    ToolRunner,
    TranscriptState,
    rollback_to_tool,
)
from mulligan.api import Mulligan
from mulligan.history.projection import SCHEMA
from mulligan.session.state.resources import TokenUsage
from mulligan.store.verify import verify
from mulligan.testing import create_execution_state, execute_tool, snapshots_equivalent
from tests.agents.test_runner import Box, Other
from tests.history.killed_process import in_child
from tests.session.state.example_slices import Added, Count, counting, number

BROKEN: tuple[dict[str, Any], ...] = (
    {"version": "9"},
    {"snapshot_id": 3},
    {"created_at": "x"},
    {"resources": 3},
    {"resources": [{"resource_type": "os:path"}]},
    {"metadata": {"phase": "never"}},
    {"metadata": {"odd": 1}},
    {"metadata": {"tag": 3}},
    {"session": []},
)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.req("D12.name.clock", "D12.name.system_clock", "D12.name.fixed_clock")
def test_the_clock_is_an_argument() -> None:
    assert isinstance(FixedClock(NOON), Clock) and isinstance(SystemClock(), Clock)
    assert FixedClock(NOON).now() == FixedClock(time=NOON).now() == NOON
    assert SystemClock().now().tzinfo is UTC
    state = ExecutionState(session=Session(), resources=ResourceRegistry.build({}), clock=FixedClock(NOON))
    assert state.snapshot().created_at == NOON


class TestRegistry:
    @pytest.mark.req(
        "S4.resources.get", "S4.resources.get_default", "S4.resources.build", "S4.resources.frozen",
        "S4.resources.snapshotable", "D12.name.resource_registry",
    )  # fmt: skip
    def test_resources_are_found_by_type_and_never_change(self) -> None:
        box, plain = Box(), object()
        registry = ResourceRegistry.build({Box: box, object: plain})
        assert registry.get(Box) is box
        assert registry.get(Other) is None
        other = Other()
        assert registry.get(Other, other) is other
        assert registry.snapshotable_resources() == {Box: box}
        assert (Box in registry, Other in registry, len(registry), set(registry)) == (True, False, 2, {Box, object})
        with pytest.raises(FrozenInstanceError):
            registry._entries = {}  # type: ignore[misc]  # that is the point
        with pytest.raises(TypeError):
            registry._entries[Other] = other  # type: ignore[index]  # that is the point

    @pytest.mark.req("S4.snapshotable.protocol", "D12.name.snapshotable")
    def test_any_object_with_snapshot_and_restore_is_a_resource(self) -> None:
        assert isinstance(Box(), Snapshotable) and isinstance(BudgetTracker(), Snapshotable)
        assert not isinstance(object(), Snapshotable)

    def test_a_lazy_resource_is_created_at_first_use(self) -> None:
        registry = ResourceRegistry.build({Box: Lazy(lambda: Box(5))})
        assert registry.snapshotable_resources() == {}
        made = registry.get(Box)
        assert made is not None and made is registry.get(Box)
        assert registry.snapshotable_resources() == {Box: made}

    @pytest.mark.req("S4.snapshotable.budget", "D12.name.budget_tracker", "D12.name.budget_snapshot")
    def test_a_budget_counts_each_evaluation(self) -> None:
        budget = BudgetTracker(limit_tokens=10)
        budget.record("a", input_tokens=1, output_tokens=2)
        taken = budget.snapshot()
        assert taken == BudgetSnapshot({"a": TokenUsage(1, 2)})
        budget.record("a", input_tokens=3)
        budget.record_cumulative("b", TokenUsage(4, 0))
        assert (budget.consumed, budget.is_exhausted) == (TokenUsage(8, 2), True)
        budget.restore(taken)
        assert (budget.consumed, budget.is_exhausted) == (TokenUsage(1, 2), False)

    @pytest.mark.req("D12.name.transcript_state")
    def test_a_transcript_is_a_resource(self) -> None:
        transcript = TranscriptState(provider_payload={"id": 1})
        transcript.append("user", "hello")
        taken = transcript.snapshot()
        transcript.append("assistant", "hi", tool_calls=[])
        transcript.provider_payload = None
        transcript.restore(taken)
        assert transcript.messages == ({"role": "user", "content": "hello"},)
        assert transcript.provider_payload == {"id": 1}


class TestComposite:
    @pytest.mark.req(
        "S4.composite.fields", "S4.metadata.fields", "S4.metadata.default_manual", "S4.metadata_phase.manual",
        "S4.composite.created_at_from_clock", "S4.composite.frozen", "S4.state.fields", "S4.state.snapshot",
        "D12.name.composite_snapshot", "D12.name.snapshot_metadata", "D12.name.execution_state",
        "D12.snapshot_metadata",
    )  # fmt: skip
    def test_a_snapshot_holds_all_resources_and_is_immutable(self) -> None:
        resources = ResourceRegistry.build({Box: Box(3), Filesystem: InMemoryFilesystem({"a": "1"})})
        state = ExecutionState(Session(), resources, FixedClock(NOON), random.Random(1), CheckpointStore())
        state.session[Plan].seed(Plan("p"))
        taken = state.snapshot(tag="here")
        assert isinstance(taken.snapshot_id, UUID)
        assert (taken.created_at, taken.session.slices) == (NOON, {Plan: (Plan("p"),)})
        assert set(taken.resources) == {Box, Filesystem, random.Random}
        assert taken.metadata == SnapshotMetadata("here", None, None, "manual")
        told = SnapshotMetadata(tool_call_id="c", tool_name="t", phase="checkpoint")
        assert state.snapshot(tag="x", metadata=told).metadata == replace(told, tag="x")
        with pytest.raises(FrozenInstanceError):
            taken.created_at = NOON  # type: ignore[misc]  # that is the point
        with pytest.raises(TypeError):
            taken.resources[Box] = 4  # type: ignore[index]  # that is the point

    @pytest.mark.req("S4.fs.registered_as_resource")
    def test_a_file_system_registered_as_a_resource_is_in_every_snapshot(self) -> None:
        files = InMemoryFilesystem()
        state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: files, BudgetTracker: BudgetTracker()}))
        files.write("config.py", "DEBUG = True")
        composite = state.snapshot(tag="pre:tool_call")
        files.write("config.py", "DEBUG = False")
        assert composite.resources[Filesystem].tag == "pre:tool_call"
        state.restore(composite)
        assert files.read("config.py").content == "DEBUG = True"

    @pytest.mark.req("S4.composite.to_json", "S4.composite.from_json")
    def test_a_snapshot_is_restored_from_json_in_another_state(self) -> None:
        state = _full_state()
        taken = state.snapshot(tag="saved")
        back = CompositeSnapshot.from_json(taken.to_json())
        assert back == taken
        other = _full_state(empty=True)
        other.restore(back)
        assert snapshots_equivalent(other.snapshot(), taken)
        assert other.rng is not None and state.rng is not None
        assert other.rng.random() == state.rng.random()

    @pytest.mark.req("S4.composite.unknown_resource_tolerated")
    def test_a_resource_missing_in_the_target_is_skipped(self) -> None:
        taken = _full_state().snapshot()
        bare = ExecutionState(Session(), ResourceRegistry.build({}))
        bare.restore(taken)
        assert bare.session[Plan].all() == (Plan("p"),)

    def test_a_resource_without_a_json_form_raises(self) -> None:
        class Strange:
            def snapshot(self, *, tag: str | None = None) -> object:
                return object()

            def restore(self, snapshot: object) -> None: ...

        state = ExecutionState(Session(), ResourceRegistry.build({Strange: Strange()}))
        with pytest.raises(SnapshotMismatchError):
            state.snapshot().to_json()

    @pytest.mark.parametrize("change", BROKEN, ids=repr)
    def test_broken_json_is_refused(self, change: Mapping[str, Any]) -> None:
        body = {**_full_state().snapshot().to_body(), **change}
        with pytest.raises(SnapshotMismatchError):
            CompositeSnapshot.from_json(json.dumps(body))

    @pytest.mark.req("S4.error.snapshot_mismatch")
    def test_a_mismatch_is_found_before_anything_is_restored(self) -> None:
        state = _full_state()
        taken = state.snapshot()
        wrong = replace(taken, resources={**taken.resources, Filesystem: BudgetSnapshot({})})
        state.session[Plan].seed(Plan("now"))
        with pytest.raises(SnapshotMismatchError):
            state.restore(wrong)
        assert state.session[Plan].all() == (Plan("now"),)

    def test_a_session_among_the_resources_is_not_captured_twice(self) -> None:
        session = Session()
        state = ExecutionState(session, ResourceRegistry.build({Session: session}))
        assert state.snapshot().resources == {}


def _full_state(*, empty: bool = False) -> ExecutionState:
    files = InMemoryFilesystem() if empty else InMemoryFilesystem({"a/b": b"\xff\0", "c": "text"})
    resources = {Filesystem: files, BudgetTracker: BudgetTracker(), TranscriptState: TranscriptState()}
    state = ExecutionState(Session(), ResourceRegistry.build(resources), rng=random.Random(0 if empty else 5))
    if not empty:
        state.session[Plan].seed(Plan("p"))
        resources[BudgetTracker].record("e", input_tokens=3)  # type: ignore[attr-defined]  # by its type
        resources[TranscriptState].append("user", "hi")  # type: ignore[attr-defined]  # by its type
    return state


def _checkpointed(count: int) -> tuple[ExecutionState, CheckpointStore]:
    state = create_execution_state()
    assert state.checkpoints is not None
    for i in range(count):
        execute_tool(Tool("tool", "", lambda i=i: Plan(str(i))), state, tool_call_id=f"call_{i}")
    return state, state.checkpoints


class TestStore:
    @pytest.mark.req("S4.checkpoints.ring_100", "S4.checkpoints.list_in_order", "D12.name.checkpoint_store")
    def test_without_a_store_the_newest_hundred_are_kept_and_older_ones_are_unknown(self) -> None:
        state, checkpoints = _checkpointed(150)
        listed = checkpoints.list_checkpoints()
        assert [one.tool_call_id for one in listed] == [f"call_{i}" for i in range(50, 150)]
        assert [i for i in range(150) if checkpoints.get(f"call_{i}") is not None] == list(range(50, 150))
        pre, post = checkpoints.get_pre_snapshot("call_53"), checkpoints.get_post_snapshot("call_53")
        assert pre is not None and post is not None
        assert (len(pre.session.slices[Plan]), len(post.session.slices[Plan])) == (53, 54)
        with pytest.raises(ValueError):
            rollback_to_tool(state, checkpoints, "call_3")
        rollback_to_tool(state, checkpoints, "call_53")
        assert len(state.session[Plan]) == 53

    @pytest.mark.req(
        "S4.checkpoints.get_pre", "S4.checkpoints.get_post", "S4.fs.rollback_to_unknown_raises",
    )  # fmt: skip
    def test_an_unknown_checkpoint_is_none(self) -> None:
        state, checkpoints = _checkpointed(1)
        assert (checkpoints.get_pre_snapshot("x"), checkpoints.get_post_snapshot("x"), checkpoints.get("x")) == (
            None,
        ) * 3
        with pytest.raises(ValueError):
            rollback_to_tool(state, checkpoints, "x")

    @pytest.mark.req(
        "S4.checkpoints.record", "S4.tool_checkpoint.tool_call_id", "S4.tool_checkpoint.tool_name",
        "S4.tool_checkpoint.pre_snapshot", "S4.tool_checkpoint.post_snapshot", "S4.tool_checkpoint.result_summary",
        "S4.tool_checkpoint.success", "S4.tool_checkpoint.elapsed", "S4.tool_checkpoint.recorded_at",
        "D12.name.tool_checkpoint",
    )  # fmt: skip
    def test_a_checkpoint_describes_its_call(self) -> None:
        state = replace(create_execution_state(), clock=FixedClock(NOON))
        pre = state.snapshot(metadata=SnapshotMetadata(tool_name="edit", phase="pre_tool"))
        post = state.snapshot()
        checkpoints = CheckpointStore()
        checkpoints.record("c", pre=pre, post=post, result=ToolResult("x" * 500), elapsed=timedelta(seconds=1))
        assert checkpoints.list_checkpoints() == (
            ToolCheckpoint("c", "edit", pre, post, "x" * 200, True, timedelta(seconds=1), NOON),
        )
        checkpoints.record("bare", pre=pre)
        assert checkpoints.get("bare") == ToolCheckpoint("bare", "edit", pre, None, None, False, None, NOON)

    @pytest.mark.req("S4.metadata_phase.pre_tool", "S4.metadata_phase.post_tool", "S4.checkpoints.automatic")
    def test_each_tool_call_makes_a_checkpoint_before_and_after(self) -> None:
        state, checkpoints = _checkpointed(1)
        execute_tool(Tool("bad", "", lambda: 1 / 0), state)
        good, bad = checkpoints.list_checkpoints()
        assert good.post_snapshot is not None
        assert (good.pre_snapshot.metadata.phase, good.post_snapshot.metadata.phase) == ("pre_tool", "post_tool")
        assert (good.tool_name, good.success, bad.success, bad.post_snapshot) == ("tool", True, False, None)

    def test_a_repeated_id_refers_to_the_newest_checkpoint(self) -> None:
        state = create_execution_state()
        for i in range(3):
            execute_tool(Tool("tool", "", lambda i=i: Plan(str(i))), state, tool_call_id="call_1")
        assert state.checkpoints is not None
        pre = state.checkpoints.get_pre_snapshot("call_1")
        assert pre is not None and len(pre.session.slices[Plan]) == 2
        assert len(state.checkpoints.list_checkpoints()) == 1

    @pytest.mark.req("S4.metadata_phase.checkpoint")
    def test_a_checkpoint_can_be_made_explicitly(self) -> None:
        state = create_execution_state()
        taken = state.checkpoint("before the refactoring")
        state.session[Plan].seed(Plan("later"))
        assert state.checkpoints is not None
        rollback_to_tool(state, state.checkpoints, "before the refactoring")
        assert (taken.metadata.phase, state.session[Plan].all()) == ("checkpoint", ())


class Named(Protocol):
    """A resource type that is only a name."""


def _open(base: Path) -> Mulligan:
    (base / "work").mkdir(exist_ok=True)
    return mulligan.open(str(base / "work"), store=str(base / "store"))


def _step(context: ToolContext, fails: bool = False) -> str:
    assert context.filesystem is not None
    context.session.dispatch(Added())
    context.filesystem.write("n.txt", str(number(context.session)))
    budget = context.resources.get(BudgetTracker)
    assert budget is not None
    budget.record("e", input_tokens=1)
    if fails:
        raise RuntimeError("no")
    return "ok"


def _durable(m: Any) -> tuple[ExecutionState, ToolRunner]:
    session = counting(m.session("s"))
    state = session.execution_state({BudgetTracker: BudgetTracker()})  # type: ignore[attr-defined]  # the durable one
    return state, ToolRunner(state, {"step": Tool("step", "", _step)}, "p")


class TestDurable:
    @pytest.mark.req("D12.checkpoints_older_from_store")
    def test_checkpoints_older_than_the_ring_and_the_process_come_from_the_store(self, tmp_path: Path) -> None:
        with _open(tmp_path) as m:
            state, runner = _durable(m)
            for i in range(110):
                assert runner.execute(ProviderToolCall(f"c{i}", "step")).success
            assert not runner.execute(ProviderToolCall("bad", "step", {"fails": True})).success
            assert state.checkpoints is not None and len(state.checkpoints._checkpoints) == 100
        with _open(tmp_path) as m:
            state, runner = _durable(m)
            checkpoints = state.checkpoints
            assert checkpoints is not None
            listed = checkpoints.list_checkpoints()
            assert [one.tool_call_id for one in listed] == [*(f"c{i}" for i in range(11, 110)), "bad"]
            assert (listed[-1].success, listed[-2].success, listed[-2].result_summary) == (False, True, "ok")
            pre = checkpoints.get_pre_snapshot("c5")
            assert pre is not None
            assert pre.session.slices == {Count: (Count(5),)}
            state.restore(pre)
            budget = state.resources.get(BudgetTracker)
            assert budget is not None and budget.consumed == TokenUsage(5, 0)
            assert (number(state.session), (tmp_path / "work/n.txt").read_text()) == (5, "5")
            assert list(verify(m.open_root.ledger.store, SCHEMA)) == []

    def test_every_boundary_can_be_reached_in_any_order(self, tmp_path: Path) -> None:
        with _open(tmp_path) as m:
            state, runner = _durable(m)
            for i in range(6):
                runner.execute(ProviderToolCall(f"c{i}", "step"))
            assert state.checkpoints is not None
            for i in (4, 1, 5, 0, 3):
                rollback_to_tool(state, state.checkpoints, f"c{i}")
                files = tmp_path / "work/n.txt"
                assert (number(state.session), files.read_text() if files.exists() else "0") == (i, str(i))

    def test_a_conflicting_edit_makes_the_restore_change_nothing(self, tmp_path: Path) -> None:
        with _open(tmp_path) as m:
            state, runner = _durable(m)
            for i in range(3):
                runner.execute(ProviderToolCall(f"c{i}", "step"))
            (tmp_path / "work/n.txt").write_text("a person's")
            assert state.checkpoints is not None
            with pytest.raises(mulligan.RestoreFailedError):
                rollback_to_tool(state, state.checkpoints, "c1")
            budget = state.resources.get(BudgetTracker)
            assert budget is not None
            assert (number(state.session), budget.consumed.input_tokens) == (3, 3)
            assert (tmp_path / "work/n.txt").read_text() == "a person's"

    def test_a_resource_without_a_json_form_is_kept_in_memory(self, tmp_path: Path) -> None:
        class Strange(Box):
            def snapshot(self, *, tag: str | None = None) -> Any:
                return object()

        with _open(tmp_path) as m:
            state = m.session("s").execution_state({Named: Strange()})
            execute_tool(Tool("tool", "", lambda: Plan("x")), state)
            assert state.checkpoints is not None
            assert state.checkpoints.get_pre_snapshot("call_tool") is not None
        with _open(tmp_path) as m:
            checkpoints = m.session("s").execution_state().checkpoints
            assert checkpoints is not None and checkpoints.get("call_tool") is None

    def test_sigkill_during_a_tool_leaves_no_trace_of_it(self, tmp_path: Path) -> None:
        def die(context: ToolContext) -> None:
            _step(context)
            os.kill(os.getpid(), signal.SIGKILL)

        def act() -> int:
            m = _open(tmp_path)
            state, runner = _durable(m)
            runner.execute(ProviderToolCall("fine", "step"))
            execute_tool(Tool("die", "", die), state)
            return 0

        assert in_child(act) == -signal.SIGKILL
        with _open(tmp_path) as m:
            state, _ = _durable(m)
            assert (number(state.session), (tmp_path / "work/n.txt").read_text()) == (1, "1")
            assert list(verify(m.open_root.ledger.store, SCHEMA)) == []
