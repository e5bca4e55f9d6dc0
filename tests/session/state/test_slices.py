"""Typed slices in memory: events, policies, snapshots and what goes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any
from uuid import UUID

import pytest

from mulligan import (
    EventBus,
    FixedClock,
    Plan,
    PromptExecuted,
    PromptRendered,
    Session,
    SessionSnapshotAdapter,
    SlicePolicy,
    Snapshotable,
    SnapshotMismatchError,
    ToolInvoked,
    VisibilityOverrides,
    WorkspaceDigest,
    append_all,
    reducer,
    replace_latest,
    upsert_by,
)
from mulligan.session.state.slices import Append, Clear, Extend, Replace
from mulligan.values.errors import MulliganError
from tests.session.state.example_slices import NOON, Added, Count, Note, Seen, counting, invoked, number


@dataclass(slots=True, frozen=True)
class UpdateStep:
    status: str


class TestSlices:
    @pytest.mark.req("S4.session.seed_and_latest", "D12.session_without_store", "D12.name.session")
    def test_a_slice_is_seeded_read_and_searched(self) -> None:
        session = Session()
        session[Plan].seed(Plan("one"))
        assert session[Plan].latest() == Plan("one")
        session[Plan].seed([Plan("a"), Plan("b"), Plan("c")])
        assert session[Plan].all() == (Plan("a"), Plan("b"), Plan("c"))
        assert session[Plan].where(lambda plan: plan.objective > "a") == (Plan("b"), Plan("c"))
        session[Plan].clear(lambda plan: plan.objective == "b")
        session[Plan].append(Plan("d"))
        assert [plan.objective for plan in session[Plan].all()] == ["a", "c", "d"]
        session[Plan].clear()
        assert (session[Plan].all(), session[Plan].latest(), len(session[Plan])) == ((), None, 0)

    @pytest.mark.parametrize("wrong", [Note("x"), "text", [Plan("a"), Note("b")]])
    def test_a_slice_holds_nothing_but_its_type(self, wrong: object) -> None:
        session = Session()
        session[Plan].seed(Plan("kept"))
        with pytest.raises(TypeError):
            session[Plan].seed(wrong)  # type: ignore[arg-type]  # that is the point
        assert session[Plan].all() == (Plan("kept"),)

    @pytest.mark.req("S4.slice.append_all", "D12.name.append_all")
    def test_append_all_keeps_every_event(self) -> None:
        session = Session()
        session[Note].register(Note, append_all)
        for text in "abc":
            session.dispatch(Note(text))
        assert session[Note].all() == (Note("a"), Note("b"), Note("c"))

    def test_ready_reducers_replace_or_upsert(self) -> None:
        session = Session()
        session[Note].register(Note, upsert_by(lambda note: note.text[0]))
        session[Plan].register(Plan, replace_latest)
        for text in ("a1", "b1", "a2"):
            session.dispatch(Note(text))
            session.dispatch(Plan(text))
        assert session[Note].all() == (Note("b1"), Note("a2"))
        assert session[Plan].all() == (Plan("a2"),)

    @pytest.mark.parametrize(
        ("given", "becomes"),
        [
            (Append(Note("n")), "abn"),
            (Extend([Note("n"), Note("m")]), "abnm"),
            (Replace([Note("n")]), "n"),
            (Clear(), ""),
            (Clear(lambda note: note.text == "a"), "b"),
            ((Note("x"), Note("y")), "xy"),
            ([], ""),
            (Note("z"), "z"),
        ],
    )
    def test_a_reducer_gives_an_operation_or_the_new_items(self, given: object, becomes: str) -> None:
        session = Session()
        session[Note].seed([Note("a"), Note("b")])
        session[Note].register(Added, lambda view, event: given)
        assert session.dispatch(Added())
        assert "".join(note.text for note in session[Note].all()) == becomes

    def test_an_event_without_reducers_is_kept_in_the_slice_of_its_own_type(self) -> None:
        session = Session()
        session.broadcast(Note("a"))
        assert session[Note].all() == (Note("a"),)

    def test_several_reducers_see_each_other_in_order(self) -> None:
        session = counting(Session())
        session[Count].register(Added, lambda view, event: Count(view[-1].number * 10))
        session[Note].register(Added, lambda view, event, *, context: Note(str(context[Count].latest())))
        session.dispatch(Added(2))
        assert session[Count].all() == (Count(20),)
        assert session[Note].all() == (Note("Count(number=20)"),)

    def test_a_declarative_slice_brings_its_reducers(self) -> None:
        @dataclass(slots=True, frozen=True)
        class Tally:
            total: int = 0

            @reducer(on=Added)
            def added(self, event: Added) -> Tally:
                return replace(self, total=self.total + event.by)

        session = Session()
        session.install(Tally, initial=Tally)
        session.dispatch(Added(2))
        session.dispatch(Added(3))
        assert session[Tally].all() == (Tally(5),)
        with pytest.raises(TypeError):
            session.install(dict)
        with pytest.raises(ValueError):
            session.install(Plan)


class TestEvents:
    @pytest.mark.req("S4.session.broadcast", "S4.slice.register_with_policy")
    def test_broadcast_runs_the_reducers_of_an_event(self) -> None:
        session = Session()
        session[Plan].seed(Plan("work"))

        def plan_reducer(view: Sequence[Plan], event: UpdateStep, *, context: object) -> Plan:
            return replace(view[-1], status="completed")

        session[Plan].register(UpdateStep, plan_reducer, policy=SlicePolicy.STATE)
        assert session.broadcast(UpdateStep("done")).ok
        assert session[Plan].latest() == Plan("work", "completed")

    @pytest.mark.req("W20.concurrent_dispatch", "D5.dispatch_serialised")
    @pytest.mark.parametrize("threads", [2, 8])
    def test_increments_from_many_threads_all_count(self, threads: int) -> None:
        session = counting(Session())
        _in_threads(threads, lambda: [session.dispatch(Added()) for _ in range(200 // threads)])
        assert number(session) == 200

    @pytest.mark.req("W21.reducer_error_reported")
    def test_if_a_reducer_raises_no_slice_changes(self) -> None:
        session = counting(Session())
        session[Note].register(Added, lambda view, event: Note(f"{1 / 0}"))
        result = session.dispatch(Added())
        assert (result.ok, bool(result), [type(error) for error in result.errors]) == (
            False,
            False,
            [ZeroDivisionError],
        )
        with pytest.raises(ExceptionGroup):
            result.raise_if_errors()
        assert (session[Count].all(), session[Note].all()) == ((), ())

    @pytest.mark.parametrize("given", [None, 3, "text", {"a": 1}])
    def test_a_reducer_that_gives_nonsense_is_reported(self, given: object) -> None:
        session = Session()
        session[Note].seed(Note("kept"))
        session[Note].register(Added, lambda view, event: given)
        assert not session.dispatch(Added()).ok
        assert session[Note].all() == (Note("kept"),)

    @pytest.mark.req("D12.name.event_bus")
    def test_listeners_receive_published_events_and_may_fail(self) -> None:
        bus = EventBus()
        heard: list[object] = []
        end = bus.subscribe(Note, heard.append)
        bus.subscribe(object, lambda event: 1 / 0)
        session = Session(bus=bus)
        assert session.dispatch(Note("a")).ok
        end()
        assert session.dispatch(Note("b")).ok
        assert heard == [Note("a")]
        assert session[Note].all() == (Note("a"), Note("b"))
        assert not bus.publish(Note("c")).ok

    def test_listeners_receive_the_events_of_a_transaction_after_its_end(self) -> None:
        heard: list[object] = []
        session = counting(Session())
        session.bus.subscribe(object, heard.append)
        with session.attempt("tool", "1"):
            session.dispatch(Added())
            assert heard == []
        with pytest.raises(RuntimeError), session.attempt("tool", "2"):
            session.dispatch(Added())
            session.dispatch(Seen("log"))
            raise RuntimeError
        assert heard == [Added(), Seen("log")]


class TestPolicies:
    @pytest.mark.req("S4.slice.enum_values", "D12.name.slice_policy")
    def test_there_are_three(self) -> None:
        assert {policy.name: policy.value for policy in SlicePolicy} == {
            "STATE": "state",
            "LOG": "log",
            "CACHE": "cache",
        }

    @pytest.mark.req(
        "S4.slice.plan_default_state",
        "S4.slice.visibility_default_state",
        "S4.slice.digest_default_cache",
        "S4.slice.tool_invoked_default_log",
        "S4.slice.prompt_rendered_default_log",
        "S4.slice.prompt_executed_default_log",
        "S4.slice.custom_default_state",
        "D12.name.plan",
        "D12.name.visibility_overrides",
        "D12.name.workspace_digest",
        "D12.name.tool_invoked",
        "D12.name.prompt_rendered",
        "D12.name.prompt_executed",
    )
    def test_defaults_are_as_documented(self) -> None:
        session = Session()
        kinds = (Plan, VisibilityOverrides, WorkspaceDigest, ToolInvoked, PromptRendered, PromptExecuted, Note)
        found = {kind.__name__: session.snapshot(include_all=True).policies.get(kind) for kind in kinds[:-1]}
        assert found == {
            "Plan": SlicePolicy.STATE,
            "VisibilityOverrides": SlicePolicy.STATE,
            "WorkspaceDigest": SlicePolicy.CACHE,
            "ToolInvoked": SlicePolicy.LOG,
            "PromptRendered": SlicePolicy.LOG,
            "PromptExecuted": SlicePolicy.LOG,
        }
        session[Note].append(Note("a"))
        assert session.snapshot().policies[Note] is SlicePolicy.STATE

    def test_the_policy_given_last_holds_and_none_changes_nothing(self) -> None:
        session = Session()
        session[Note].register(Note, append_all, policy=SlicePolicy.CACHE)
        session[Note].register(Note, append_all, policy=SlicePolicy.LOG)
        session[Note].register(Added, append_all)
        assert session.policy_of(Note) is SlicePolicy.LOG


class TestSnapshots:
    @pytest.mark.req("S4.session.snapshot_then_rollback")
    def test_a_rollback_undoes_what_was_broadcast_since(self) -> None:
        session = counting(Session())
        session[Plan].seed(Plan("initial"))
        session.broadcast(Added())
        taken = session.snapshot()
        session.broadcast(Added())
        session.broadcast(Plan("other"))
        session.broadcast(Note("slices that came later are emptied"))
        session.rollback(taken)
        assert (number(session), session[Plan].all(), session[Note].all()) == (1, (Plan("initial"),), ())

    @pytest.mark.req(
        "S4.session.snapshot_policies",
        "S4.session.snapshot_include_all",
        "S4.session.rollback_preserve_logs",
        "S4.session.full_rollback",
        "S4.slice.log_preserved",
    )
    def test_logs_are_restored_only_with_a_full_snapshot_and_if_requested(self) -> None:
        session = counting(Session())
        session[ToolInvoked].append(invoked("first"))
        usual, full = session.snapshot(), session.snapshot(include_all=True)
        assert (set(usual.slices), set(full.slices)) == (set(), {ToolInvoked})
        assert set(session.snapshot(policies=frozenset({SlicePolicy.LOG})).slices) == {ToolInvoked}
        session[ToolInvoked].append(invoked("second"))
        session.rollback(usual)
        session.rollback(full)
        assert len(session[ToolInvoked]) == 2
        session.rollback(full, preserve_logs=False)
        assert session[ToolInvoked].all() == (invoked("first"),)

    def test_a_full_snapshot_takes_an_empty_log_back_too(self) -> None:
        session = Session()
        full = session.snapshot(include_all=True)
        session[ToolInvoked].append(invoked())
        session.rollback(full, preserve_logs=False)
        assert session[ToolInvoked].all() == ()

    @pytest.mark.req("D12.log_never_emptied")
    def test_a_log_that_is_not_held_is_never_emptied(self) -> None:
        session = counting(Session())
        taken = session.snapshot()
        session[ToolInvoked].append(invoked())
        session.dispatch(Seen("a"))
        session.rollback(taken, preserve_logs=False)
        assert (len(session[ToolInvoked]), len(session[Seen])) == (1, 1)

    @pytest.mark.req("D12.rollback_empties_cache", "S4.slice.cache_recomputable")
    def test_caches_that_are_not_held_are_emptied(self) -> None:
        session = Session()
        session[WorkspaceDigest].append(WorkspaceDigest("a", "old"))
        taken, full = session.snapshot(), session.snapshot(include_all=True)
        session.rollback(taken)
        assert session[WorkspaceDigest].all() == ()
        session.rollback(full)
        assert session[WorkspaceDigest].all() == (WorkspaceDigest("a", "old"),)

    @pytest.mark.req("S4.error.snapshot_mismatch", "D12.name.snapshot_mismatch_error")
    def test_a_snapshot_of_another_structure_is_refused_whole(self) -> None:
        session = counting(Session())
        session.dispatch(Added())
        taken = session.snapshot()
        session[Count].register(Note, append_all, policy=SlicePolicy.LOG)
        session.dispatch(Added())
        wrongs: list[Any] = [taken, None, {"slices": {}}]
        for wrong in wrongs:
            with pytest.raises(SnapshotMismatchError):
                session.rollback(wrong)
        assert number(session) == 2

    @pytest.mark.req("S4.session.snapshot_fields", "D12.name.snapshot", "S4.snapshotable.session")
    def test_a_snapshot_has_tuples_parent_children_and_tags(self) -> None:
        parent = Session(session_id=UUID(int=1))
        session = Session(parent=parent, tags={"who": "me"}, clock=FixedClock(NOON))
        Session(parent=session, session_id=UUID(int=2))
        session[Plan].seed([Plan("a"), Plan("b")])
        taken = session.snapshot(tag="now")
        assert taken.slices == {Plan: (Plan("a"), Plan("b"))}
        assert type(taken.slices[Plan]) is tuple
        assert (taken.created_at, taken.parent_id, taken.children_ids) == (NOON, UUID(int=1), (UUID(int=2),))
        assert dict(taken.tags) == {"who": "me", "tag": "now"}
        assert taken.policies[Plan] is SlicePolicy.STATE

    @pytest.mark.req("S4.snapshotable.immutable")
    def test_it_never_changes(self) -> None:
        session = Session()
        session[Note].append(Note("a"))
        taken = session.snapshot()
        session[Note].append(Note("b"))
        session.rollback(taken)
        session[Note].append(Note("c"))
        assert taken.slices == {Note: (Note("a"),)}
        with pytest.raises(FrozenInstanceError):
            taken.created_at = NOON  # type: ignore[misc]  # that is the point
        with pytest.raises(TypeError):
            taken.slices[Note] = ()  # type: ignore[index]  # that is the point
        with pytest.raises(TypeError):
            taken.policies[Note] = SlicePolicy.LOG  # type: ignore[index]  # that is the point

    @pytest.mark.req("S4.snapshotable.session_adapter", "D12.name.session_snapshot_adapter")
    def test_the_adapter_makes_a_session_a_resource(self) -> None:
        session = counting(Session())
        adapter = SessionSnapshotAdapter(session)
        assert isinstance(adapter, Snapshotable)
        taken = adapter.snapshot(tag="x")
        session.dispatch(Added())
        adapter.restore(taken)
        assert number(session) == 0

    @pytest.mark.req("W29.snapshot_cost")
    def test_it_shares_items_instead_of_copying_them(self) -> None:
        session = Session()
        session[Note].seed(Note(str(i)) for i in range(10_000))
        first, second = session.snapshot(), session.snapshot()
        assert first.items_of(Note) is second.items_of(Note)


class TestTransactions:
    @pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_leaving_by_any_exception_leaves_only_logs(self, how: type[BaseException]) -> None:
        session = counting(Session())
        session[WorkspaceDigest].append(WorkspaceDigest("a", "b"))
        with pytest.raises(how), session.attempt("tool", "1"):
            session.dispatch(Added())
            session.dispatch(Seen("log"))
            session[WorkspaceDigest].clear()
            assert number(session) == 1
            raise how
        assert (number(session), session[Seen].all(), len(session[WorkspaceDigest])) == (0, (Seen("log"),), 1)

    def test_others_see_a_transaction_only_when_it_is_published(self) -> None:
        session = counting(Session())
        seen: list[int] = []
        with session.attempt("tool", "1"):
            session.dispatch(Added())
            _in_threads(1, lambda: seen.append(number(session)))
        _in_threads(1, lambda: seen.append(number(session)))
        assert seen == [0, 1]

    @pytest.mark.req("W14.overlapping_calls")
    def test_a_failing_call_does_not_undo_an_overlapping_one(self) -> None:
        session = counting(Session())
        with pytest.raises(RuntimeError), session.attempt("a", "1"):
            session.dispatch(Added(100))
            _in_threads(1, lambda: _added(session, 1))
            raise RuntimeError
        with session.attempt("c", "3"):
            session.dispatch(Added(10))
            _in_threads(1, lambda: _added(session, 1))
        assert number(session) == 12

    def test_one_inside_another_fails_alone(self) -> None:
        session = counting(Session())
        with session.attempt("outer", "1"):
            session.dispatch(Added(1))
            with session.attempt("inner", "2"):
                session.dispatch(Added(10))
            with pytest.raises(RuntimeError), session.attempt("inner", "3"):
                session.dispatch(Added(100))
                session.dispatch(Seen("log"))
                raise RuntimeError
        assert (number(session), session[Seen].all()) == (11, (Seen("log"),))

    def test_one_inside_a_failing_one_fails_with_it(self) -> None:
        session = counting(Session())
        with pytest.raises(RuntimeError), session.attempt("outer", "1"):
            with session.attempt("inner", "2"):
                session.dispatch(Added(10))
            raise RuntimeError
        assert number(session) == 0

    def test_an_event_after_the_end_of_a_call_is_no_part_of_the_call(self) -> None:
        import contextvars

        session = counting(Session())
        with session.attempt("outer", "1"):
            with session.attempt("inner", "2"):
                later = contextvars.copy_context()
            assert later.run(session.dispatch, Added()).ok
            assert number(session) == 1
            session.dispatch(Added())
        assert later.run(session.dispatch, Added()).ok
        assert number(session) == 3

    def test_an_event_of_a_failed_call_changes_nothing(self) -> None:
        import contextvars

        from mulligan import ExecutionStateError

        session = counting(Session())
        with pytest.raises(RuntimeError), session.attempt("tool", "1"):
            later = contextvars.copy_context()
            raise RuntimeError
        with pytest.raises(ExecutionStateError):
            later.run(session.dispatch, Added())
        assert number(session) == 0

    def test_a_change_that_cannot_be_made_on_top_of_others_was_never_made(self) -> None:
        session = Session()

        def only_once(view: Sequence[Count], event: Added) -> Count:
            if view:
                raise ValueError("taken")
            return Count(event.by)

        session[Count].register(Added, only_once)
        with pytest.raises((ValueError, MulliganError)), session.attempt("tool", "1"):
            session.dispatch(Added(1))
            session.dispatch(Note("with it"))
            _in_threads(1, lambda: session.dispatch(Added(2)))
        assert (session[Count].all(), session[Note].all()) == ((Count(2),), ())


def _added(session: Session, by: int) -> None:
    with session.attempt("other", "2"):
        session.dispatch(Added(by))


def _in_threads(count: int, act: Callable[[], object]) -> None:
    threads = [threading.Thread(target=act) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
