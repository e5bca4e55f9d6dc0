"""Slices of durable sessions: committed with their call, alive after kill -9, moving with every way back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import mulligan
from mulligan import ExecutionStateError, Plan, SlicePolicy, Snapshot, ToolInvoked, WorkspaceDigest, append_all
from mulligan.effects.session import DurableSession
from mulligan.history.projection import SCHEMA
from mulligan.session.state import slice_store
from mulligan.session.state.slice_rows import SLICES, item_rows
from mulligan.store.verify import verify
from mulligan.values.canonical import decode
from mulligan.values.ids import SessionId
from tests.history.killed_process import die_in, in_child
from tests.session.state.example_slices import Added, Count, Note, Seen, counting, invoked, number
from tests.temp_workspace import TempWorkspace, open_temp_workspace


def opened(base: Path) -> tuple[TempWorkspace, DurableSession]:
    workspace = open_temp_workspace(base)
    return workspace, counted(workspace)


def counted(workspace: TempWorkspace, name: str = "s") -> DurableSession:
    workspace.open_root.ledger.session(SessionId(name), workspace.open_root.root)
    session = workspace.session(name)
    counting(session)
    return session


def sound(workspace: TempWorkspace) -> bool:
    return list(verify(workspace.open_root.ledger.store, SCHEMA)) == []


def files(workspace: TempWorkspace) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(workspace.root.iterdir())}


def test_the_session_of_an_open_workspace_is_a_session(tmp_path: Path) -> None:
    with mulligan.open(str(tmp_path), store="memory:") as m:
        session = m.session()
        assert isinstance(session, mulligan.Session)
        session[Plan].seed(Plan("x"))
        assert m.session(session.id)[Plan].all() == (Plan("x"),)


class TestCalls:
    @pytest.mark.req("W15.cancel_and_interrupt")
    def test_an_interrupt_while_the_cache_takes_a_commit_repeats_no_item(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        workspace, session = opened(tmp_path)
        plans = session[Plan]
        for objective in "ab":
            with session.call():
                plans.append(Plan(objective))
        stored_slice = slice_store._StoredSlice

        def interrupt(*_: object) -> None:
            monkeypatch.setattr(slice_store, "_StoredSlice", stored_slice)
            raise KeyboardInterrupt

        monkeypatch.setattr(slice_store, "_StoredSlice", interrupt)
        with pytest.raises(KeyboardInterrupt), session.call():
            plans.append(Plan("c"))
        with session.call():
            plans.append(Plan("d"))
        with session.call():
            plans.clear(lambda plan: plan.objective == "c")
        assert [plan.objective for plan in plans.all()] == ["a", "b", "d"]
        workspace.close()
        assert [plan.objective for plan in opened(tmp_path)[1][Plan].all()] == ["a", "b", "d"]

    @pytest.mark.req("S4.slice.state_rolls_back", "S4.slice.log_preserved", "W18.failed_value_not_appended")
    @pytest.mark.req("S4.principle.state_vs_history")
    def test_files_and_state_are_restored_together_and_logs_stay(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        session.dispatch(Added())
        with pytest.raises(ZeroDivisionError), session.call("bad") as call:
            call.write_file("a.txt", "x")
            session.dispatch(Added())
            session.dispatch(Seen("log"))
            assert number(session) == 2
            raise ZeroDivisionError
        assert (number(session), session[Seen].all(), files(workspace)) == (1, (Seen("log"),), {})
        assert sound(workspace)

    def test_a_call_marked_as_failed_leaves_no_change(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        with session.call("bad") as call:
            session.dispatch(Added())
            call.fail("no good")
        assert number(session) == 0

    def test_a_part_of_a_call_fails_alone(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        with session.call("outer") as outer:
            outer.write_file("a.txt", "kept")
            session.dispatch(Added(1))
            with pytest.raises(RuntimeError), session.call("inner") as inner:
                inner.write_file("b.txt", "gone")
                session.dispatch(Added(10))
                raise RuntimeError
            with workspace.session("s").call("other object, same session"):
                session.dispatch(Added(100))
        assert (number(session), files(workspace)) == (101, {"a.txt": "kept"})

    def test_one_record_of_slices_for_each_call_and_none_for_one_that_changes_none(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        with session.call("a"):
            for _ in range(5):
                session.dispatch(Added())
        with session.call("b") as call:
            call.write_file("x", "y")
        with workspace.open_root.ledger.store.read() as tx:
            from mulligan.store.journal import records_of

            kinds = [record.kind for record in records_of(tx, "s:s")]
        assert kinds.count("slices.changed") == 1

    def test_parallel_calls_count_each_other(self, tmp_path: Path) -> None:
        workspace, _ = opened(tmp_path)

        def work(name: int) -> None:
            session = counted(workspace)
            for turn in range(5):
                with session.call(f"{name}.{turn}") as call:
                    session.dispatch(Added())
                    if turn == 4:
                        call.fail("last one")

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert number(counted(workspace)) == 32
        assert sound(workspace)

    def test_an_item_that_cannot_be_stored_fails_the_call_whole(self, tmp_path: Path) -> None:
        from dataclasses import dataclass

        @dataclass(frozen=True)
        class Odd:
            thing: object

        workspace, session = opened(tmp_path)
        with pytest.raises(ExecutionStateError), session.call("odd") as call:
            call.write_file("a.txt", "x")
            session.dispatch(Added())
            session[Odd].append(Odd(object()))
        assert (number(session), files(workspace), session[Odd].all()) == (0, {}, ())


class TestLasting:
    def test_everything_but_caches_is_there_again(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        session[Note].seed([Note("a"), Note("b"), Note("c")])
        session[Note].clear(lambda note: note.text == "b")
        session.dispatch(Added(7))
        session[ToolInvoked].append(invoked())
        session[WorkspaceDigest].append(WorkspaceDigest("k", "v"))
        workspace.close()
        workspace, session = opened(tmp_path)
        assert session[Note].all() == (Note("a"), Note("c"))
        assert (number(session), session[ToolInvoked].all(), session[WorkspaceDigest].all()) == (7, (invoked(),), ())

    def test_two_sessions_share_nothing(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        session.dispatch(Added())
        assert number(counted(workspace, "other")) == 0

    def test_a_policy_is_remembered(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        session[Note].register(Note, append_all, policy=SlicePolicy.LOG)
        taken = session.snapshot()
        session.dispatch(Note("kept"))
        workspace.close()
        session = open_temp_workspace(tmp_path).session("s")
        session.rollback(taken)
        assert session[Note].all() == (Note("kept"),)

    @pytest.mark.parametrize("at", range(1, 12))
    def test_a_death_anywhere_leaves_a_call_whole_or_without_a_trace(self, tmp_path: Path, at: int) -> None:
        workspace, session = opened(tmp_path)
        session.dispatch(Added())
        workspace.close()

        def act(workspace: TempWorkspace) -> None:
            session = counted(workspace)
            with session.call("big") as call:
                call.write_file("a.txt", "x")
                session.dispatch(Added(10))
                call.write_file("b.txt", "y")

        died = die_in(tmp_path, act, at=at)
        workspace, session = opened(tmp_path)
        found = (number(session), files(workspace))
        assert found in [(1, {}), (11, {"a.txt": "x", "b.txt": "y"})]
        assert died or found[0] == 11
        assert sound(workspace)

    def test_state_survives_kill_9(self, tmp_path: Path) -> None:
        def act() -> int:
            _, session = opened(tmp_path)
            with session.call("one"):
                session.dispatch(Added(5))
            with session.call("two"):
                session.dispatch(Added(100))
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        assert in_child(act) == -signal.SIGKILL
        _, session = opened(tmp_path)
        assert number(session) == 5

    def test_increments_of_many_processes_all_count(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        session.dispatch(Added())
        workspace.close()

        def act() -> int:
            workspace, session = opened(tmp_path)
            for i in range(10):
                with session.call(str(i)):
                    session.dispatch(Added())
            workspace.close()
            return 0

        threads = [threading.Thread(target=in_child, args=(act,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        workspace, session = opened(tmp_path)
        assert number(session) == 41
        assert sound(workspace)

    def test_a_change_of_another_process_is_seen_at_once(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        session.dispatch(Added())
        other, theirs = opened(tmp_path)
        theirs.dispatch(Added(10))
        assert number(session) == 11
        session.dispatch(Added(100))
        assert number(theirs) == 111
        other.close()


class TestGoingBack:
    def test_rollback_and_redo_step_over_turns(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        for name in ("one", "two", "three"):
            with session.turn(name):
                with session.call(name) as call:
                    session.dispatch(Added())
                    call.write_file(f"{name}.txt", name)
                with session.call("only state"):
                    session[Note].append(Note(name))
        steps = [(number(session), len(session[Note]), len(files(workspace)))]
        for _ in range(3):
            assert session.rollback().ok
            steps.append((number(session), len(session[Note]), len(files(workspace))))
        for _ in range(3):
            assert session.redo().ok
            steps.append((number(session), len(session[Note]), len(files(workspace))))
        assert steps == [(n, n, n) for n in (3, 2, 1, 0, 1, 2, 3)]
        assert sound(workspace)

    def test_a_turn_that_changed_only_state_can_be_rolled_back(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        with session.turn("t"), session.call("c"):
            session.dispatch(Added())
        assert session.rollback().ok
        assert number(session) == 0
        assert session.redo().ok
        assert number(session) == 1

    def test_undo_takes_back_one_call_and_keeps_later_ones(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        for text in "abc":
            with session.call(text):
                session[Note].append(Note(text))
        session.undo("b")
        assert session[Note].all() == (Note("a"), Note("c"))
        session.redo()
        assert session[Note].all() == (Note("a"), Note("b"), Note("c"))

    def test_an_item_that_a_later_call_replaced_stays(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        for by in (1, 10):
            with session.call(str(by)):
                session.dispatch(Added(by))
        session.undo("1")
        assert session[Count].all() == (Count(11),)

    def test_rewind_goes_to_a_call_and_back_again(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        for name in "abcd":
            with session.call(name) as call:
                session.dispatch(Added())
                call.write_file(name, name)
        session.rewind("b")
        assert (number(session), sorted(files(workspace))) == (1, ["a"])
        session.redo()
        assert (number(session), sorted(files(workspace))) == (4, ["a", "b", "c", "d"])
        session.rewind("b", side="after")
        assert number(session) == 2

    def test_logs_never_are_restored(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        with session.turn("t"), session.call("c") as call:
            call.write_file("a", "b")
            session.dispatch(Seen("log"))
        session.rollback()
        assert session[Seen].all() == (Seen("log"),)

    def test_restoring_paths_is_about_files(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        with session.call("c") as call:
            call.write_file("a", "b")
            session.dispatch(Added())
        session.restore("c")
        assert number(session) == 1

    @pytest.mark.parametrize("last", ["rollback", "undo"])
    @pytest.mark.parametrize("first", ["restore", "undo"])
    def test_slices_can_be_undone_after_only_the_files_were(self, tmp_path: Path, first: str, last: str) -> None:
        workspace, session = opened(tmp_path)
        with session.turn("t"), session.call("c") as call:
            call.write_file("a", "b")
            session.dispatch(Added())
        assert getattr(session, first)("c", ["a"]).ok and (files(workspace), number(session)) == ({}, 1)
        assert getattr(session, last)().ok and number(session) == 0
        assert session.redo().ok and (files(workspace), number(session)) == ({}, 1)
        assert session.redo().ok and (files(workspace), number(session)) == ({"a": "b"}, 1)
        assert sound(workspace)

    def test_and_so_does_a_rollback_that_was_undone_in_files_only(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        with session.turn("t"):
            session.inject({"role": "user", "content": "hi"})
            with session.call("c") as call:
                call.write_file("a", "b")
                session.dispatch(Added())
        rolled = session.rollback().call_id
        assert rolled is not None and session.undo(rolled, ["a"]).ok
        assert (files(workspace), number(session), session.length()) == ({"a": "b"}, 0, 0)
        assert session.undo(rolled).ok
        assert (files(workspace), number(session), session.length()) == ({"a": "b"}, 1, 1)
        assert sound(workspace)

    @pytest.mark.req("D12.rollback_empties_cache", "D12.log_never_emptied")
    def test_a_snapshot_puts_slices_back_also_in_another_process(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        session.dispatch(Added())
        raw = session.snapshot().to_json()
        session.dispatch(Added())
        session.dispatch(Seen("log"))
        session[WorkspaceDigest].append(WorkspaceDigest("k", "v"))
        session[Note].append(Note("later"))
        session.rollback(Snapshot.from_json(raw), preserve_logs=False)
        assert (number(session), len(session[Seen]), len(session[WorkspaceDigest])) == (1, 1, 0)
        workspace.close()
        _, session = opened(tmp_path)
        assert (number(session), session[Note].all()) == (1, ())

    def test_a_new_call_that_changes_state_ends_redo(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        with session.call("a"):
            session.dispatch(Added())
        session.undo()
        with session.call("b"):
            session[Note].append(Note("x"))
        with pytest.raises(mulligan.MulliganError) as caught:
            session.redo()
        assert caught.value.code == "nothing_to_redo"


class TestForks:
    def test_a_fork_begins_with_its_parents_slices_and_goes_its_own_way(self, tmp_path: Path) -> None:
        workspace, session = opened(tmp_path)
        session.dispatch(Added(5))
        child = session.fork()
        counting(child)
        child.dispatch(Added(1))
        session.dispatch(Added(100))
        assert (number(child), number(session)) == (6, 105)
        assert sound(workspace)

    def test_a_fork_at_an_earlier_point_has_the_slices_of_then(self, tmp_path: Path) -> None:
        _, session = opened(tmp_path)
        for text in "abc":
            with session.call(text) as call:
                session[Note].append(Note(text))
                session.dispatch(Added())
                call.write_file(text, text)
        child = session.fork("b")
        assert (child[Note].all(), number(child)) == ((Note("a"),), 1)


def test_the_slices_of_a_session_are_a_plain_document(tmp_path: Path) -> None:
    workspace, session = opened(tmp_path)
    session.dispatch(Added(2))
    session[Plan].seed(Plan("p"))
    with workspace.open_root.ledger.store.read() as tx:
        rows = tx.select(SLICES, {"session": "s"})
        items = {row.slice: [decode(one.body) for one in item_rows(tx, "s", row.slice)] for row in rows}
    assert {row.slice: {"policy": row.policy, "items": items[row.slice]} for row in rows} == {
        "mulligan:Plan": {
            "policy": "state",
            "items": [
                {
                    "$": "mulligan:Plan",
                    "v": {"objective": "p", "status": "active", "steps": {"$": "tuple", "v": []}},
                }
            ],
        },
        "tests.session.state.example_slices:Count": {
            "policy": "state",
            "items": [{"$": "tests.session.state.example_slices:Count", "v": {"number": 2}}],
        },
    }
