"""A turn is files, talk and slices: they go back together, come forward together, and in which order."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mulligan import Plan
from mulligan.effects.session import DurableSession
from mulligan.history.outcome_text import outcome_lines
from mulligan.history.projection import SCHEMA
from mulligan.servers.acp.undo import UndoMethods
from mulligan.store.verify import verify
from mulligan.testing import FaultPlan, contents_of, plant
from mulligan.values.digest import digest_of
from mulligan.values.errors import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from tests.session.state.example_slices import Note
from tests.temp_workspace import TempWorkspace, open_temp_workspace

State = tuple[dict[str, bytes], list[str], list[str]]


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan()


@pytest.fixture
def workspace(tmp_path: Path, plan: FaultPlan) -> Iterator[TempWorkspace]:
    workspace = open_temp_workspace(tmp_path, steps=plan)
    yield workspace
    assert list(verify(workspace.open_root.ledger.store, SCHEMA)) == []
    workspace.close()


@pytest.fixture
def session(workspace: TempWorkspace) -> DurableSession:
    workspace.open_root.ledger.session(SessionId("s"), workspace.open_root.root)
    return workspace.session("s")


def turn(session: DurableSession, text: str, file: str | None = None) -> None:
    with session.turn(text):
        session.inject({"role": "user", "content": text})
        if file is not None:
            with session.call("work") as call:
                assert call.write_file(file, text).ok
                session[Plan].append(Plan(text))
        session.inject({"role": "assistant", "content": f"did {text}"})


def state(workspace: TempWorkspace, session: DurableSession) -> State:
    said = [str(message["content"]) for message in session.messages()]
    return contents_of(workspace.root), said, [plan.objective for plan in session[Plan].all()]


@pytest.mark.req("D6.rollback_turn", "D6.redo_turn")
def test_files_transcript_and_slices_of_the_last_turn_are_undone_and_redone(
    workspace: TempWorkspace, session: DurableSession
) -> None:
    turn(session, "one", "a")
    first = state(workspace, session)
    turn(session, "two", "b")
    second = state(workspace, session)
    assert first == ({"a": b"one"}, ["one", "did one"], ["one"])
    assert session.rollback().ok
    assert state(workspace, session) == first
    assert session.redo().ok
    assert state(workspace, session) == second


class TestSlicesBetweenCalls:
    """What is done to slices in a turn, but in none of its calls, is of the turn all the same."""

    @staticmethod
    def mixed(session: DurableSession, name: str) -> None:
        with session.turn(name):
            session[Plan].seed(Plan(f"{name} begins"))
            with session.call("work") as call:
                assert call.write_file(name, name).ok
                session[Plan].seed(Plan(f"{name} works"))
            session[Plan].seed([Plan(f"{name} ends"), Plan("and more")])
            session[Plan].clear(lambda plan: plan.objective == "and more")

    @pytest.mark.req("D6.rollback_turn", "D6.redo_turn")
    def test_are_undone_and_redone_with_each_turn(self, workspace: TempWorkspace, session: DurableSession) -> None:
        session[Plan].seed(Plan("first"))
        states = [state(workspace, session)]
        for name in ("one", "two"):
            self.mixed(session, name)
            states.append(state(workspace, session))
        with session.turn("three"):
            session[Plan].clear()
        states.append(state(workspace, session))
        for wanted in states[-2::-1]:
            assert session.rollback().ok and state(workspace, session) == wanted
        with pytest.raises(MulliganError) as caught:
            session.rollback()
        assert caught.value.code == "nothing_to_undo"
        for wanted in states[1:]:
            assert session.redo().ok and state(workspace, session) == wanted

    def test_can_be_rewound_to_any_point(self, workspace: TempWorkspace, session: DurableSession) -> None:
        session[Plan].seed(Plan("first"))
        self.mixed(session, "one")
        after = state(workspace, session)
        self.mixed(session, "two")
        whole = state(workspace, session)
        session.rewind("work", transcript=False)
        assert state(workspace, session) == (after[0], [], ["two begins"])
        assert session.redo().ok and state(workspace, session) == whole
        assert [plan.objective for plan in session.fork(at="work")[Plan].all()] == ["two begins"]

    def test_what_a_fork_begins_with_is_not_taken_from_it(
        self, workspace: TempWorkspace, session: DurableSession
    ) -> None:
        session[Plan].seed(Plan("first"))
        session.inject({"role": "user", "content": "before the fork"})
        child = session.fork()
        child[Plan].seed(Plan("of the child"))
        child.rewind(1)
        assert [plan.objective for plan in child[Plan].all()] == ["first"]

    def test_what_was_done_since_on_top_of_a_turn_goes_with_it_and_the_rest_stays(
        self, session: DurableSession
    ) -> None:
        with session.call("work") as call:
            assert call.write_file("a", "x").ok
            session[Plan].seed(Plan("of the call"))
        session[Plan].seed(Plan("on top of it"))
        session[Note].seed(Note("beside it"))
        back = session.rollback()
        assert back.ok and back.slices_left == ()
        assert (session[Plan].all(), session[Note].all()) == ((), (Note("beside it"),))
        assert session.redo().ok and session[Plan].all() == (Plan("on top of it"),)

    def test_one_call_that_others_built_on_says_what_stays(
        self, workspace: TempWorkspace, session: DurableSession
    ) -> None:
        session[Plan].seed(Plan("first"))
        for name in ("one", "two"):
            with session.call(name) as call:
                assert call.write_file(name, name).ok
                session[Plan].seed(Plan(name))
        undone = session.undo("one")
        assert len(undone.slices_left) == 1 and undone.to_json()["slices_left"] == list(undone.slices_left)
        assert any("slice" in line for line in outcome_lines(undone))
        assert state(workspace, session) == ({"two": b"two"}, [], ["two"])


class TestUndoingTheRollback:
    """A way back is a call, so undoing it by its id brings back all that it took."""

    def test_brings_files_transcript_and_slices_back_and_redo_reverses_it(
        self, workspace: TempWorkspace, session: DurableSession
    ) -> None:
        turn(session, "one", "a")
        turn(session, "two", "b")
        whole = state(workspace, session)
        back = session.rollback()
        rolled = state(workspace, session)
        undone = session.undo(back.call_id)
        assert undone.ok and undone.talk == {"messages": 4, "messages_before": 2}
        assert state(workspace, session) == whole
        assert session.redo().ok and state(workspace, session) == rolled
        assert session.redo().ok and state(workspace, session) == whole

    def test_counts_when_only_transcript_had_moved(self, workspace: TempWorkspace, session: DurableSession) -> None:
        turn(session, "only words")
        whole = state(workspace, session)
        back = session.rollback()
        assert state(workspace, session) == ({}, [], [])
        assert session.undo(back.call_id).ok
        assert state(workspace, session) == whole
        with pytest.raises(MulliganError) as caught:
            session.undo(back.call_id)
        assert caught.value.code == "nothing_to_undo"

    def test_leaves_transcript_alone_that_has_gone_on(self, workspace: TempWorkspace, session: DurableSession) -> None:
        turn(session, "one", "a")
        back = session.rollback()
        session.inject({"role": "user", "content": "something else"})
        undone = session.undo(back.call_id)
        assert undone.ok and undone.talk is None
        assert state(workspace, session) == ({"a": b"one"}, ["something else"], ["one"])

    def test_in_some_paths_is_about_files(self, workspace: TempWorkspace, session: DurableSession) -> None:
        turn(session, "one", "a")
        back = session.rollback()
        assert session.undo(back.call_id, ["a"]).ok
        assert state(workspace, session) == ({"a": b"one"}, [], [])


@pytest.mark.req("S0.acp.rollback_captures_redo_first", "S0.acp.rollback_moves_transcript", "S0.acp.rollback_order")
@pytest.mark.parametrize("strict", [False, True], ids=["s0", "strict"])
def test_over_acp_redo_is_kept_before_files_move_and_the_transcript_moves_last(
    workspace: TempWorkspace, session: DurableSession, plan: FaultPlan, strict: bool
) -> None:
    plant(workspace.root, {"a": "before"})
    session.inject({"role": "user", "content": "said before"})
    turn(session, "two", "a")
    present, seen = digest_of(b"two"), list[tuple[bool, bytes, int]]()

    def look(step: str, path: RepoPath) -> None:
        """Just before each step on disk: is the present content kept, what is there, how much is in force?"""
        with workspace.open_root.ledger.store.read() as tx:
            kept = workspace.open_root.ledger.blobs.has(tx, present)
        seen.append((kept, (workspace.root / "a").read_bytes(), session.length()))

    plan.act(look, lasting=True)
    told: list[Any] = []
    answer = UndoMethods(session, told.append, strict).rollback({"sessionId": "s"})
    assert seen and seen[0] == (True, b"two", 3)
    assert {(kept, length) for kept, _, length in seen} == {(True, 3)}
    assert (answer["beforeMessageCount"], answer["afterMessageCount"]) == (3, 1)
    assert state(workspace, session) == ({"a": b"before"}, ["said before"], [])
    assert session.redo().ok and (workspace.root / "a").read_bytes() == b"two"


@pytest.mark.req("S0.acp.rollback_order")
def test_a_rollback_whose_disk_fails_moves_neither_files_nor_transcript(
    workspace: TempWorkspace, session: DurableSession, plan: FaultPlan
) -> None:
    plant(workspace.root, {"a": "before"})
    turn(session, "two", "a")
    before = state(workspace, session)
    plan.fail(errno.ENOSPC, at=2)
    assert not session.rollback().ok
    assert state(workspace, session) == before
    assert session.rollback().ok
    assert state(workspace, session) == ({"a": b"before"}, [], [])
