"""Talk goes back and forward together with files: rollback, redo, rewind, fork."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mulligan.api as api
from mulligan.effects.session import DurableSession
from mulligan.history.cause import UndoOperation
from mulligan.history.projection import SCHEMA
from mulligan.history.rewind import move_of_redo
from mulligan.store.protocol import Tx
from mulligan.store.verify import verify
from mulligan.values.errors import MulliganError
from mulligan.values.ids import CallId
from tests.session.example_messages import Message, assistant, calling, result, user


def turn(session: DurableSession, prompt: str, file: str | None = None, answer: str | None = None) -> str:
    """A whole turn: what the user says, what the agent does and says."""
    with session.turn(prompt) as id:
        session.inject(user(prompt))
        if file is not None:
            with session.call("write", tool_call_id=f"c-{file}") as call:
                session.inject(calling(f"c-{file}"))
                call.write_file(file, prompt)
            session.inject(result(f"c-{file}"))
        session.inject(assistant(answer or f"done: {prompt}"))
    return id


def said(session: DurableSession) -> list[str]:
    return [str(message["content"]) for message in session.messages() if message["role"] == "user"]


def code_of(act: Any) -> str:
    with pytest.raises(MulliganError) as caught:
        act()
    return caught.value.code


def sound(opened: api.Mulligan) -> None:
    problems = [one for one in verify(opened.open_root.ledger.store, SCHEMA) if one.severity != "harmless"]
    assert problems == []


class TestRollback:
    def test_a_turn_is_undone_with_its_transcript_and_comes_again(
        self, opened: api.Mulligan, session: DurableSession, work: Path
    ) -> None:
        turn(session, "one", "a.txt")
        before = session.messages()
        turn(session, "two", "b.txt")
        after = session.messages()
        done = session.rollback()
        assert done.ok and done.talk == {"messages": 4, "messages_before": 8}
        assert session.messages() == before and not (work / "b.txt").exists()
        again = session.redo()
        assert again.ok and again.to_json()["talk"] == {"messages": 8, "messages_before": 4}
        assert session.messages() == after and (work / "b.txt").read_text() == "two"
        sound(opened)

    def test_turns_without_files_count_too(self, session: DurableSession, work: Path) -> None:
        turn(session, "one", "a.txt")
        turn(session, "two")
        turn(session, "three")
        for left in (["one", "two"], ["one"], []):
            session.rollback()
            assert said(session) == left
        assert not (work / "a.txt").exists()
        assert code_of(session.rollback) == "nothing_to_undo"
        for back in (["one"], ["one", "two"], ["one", "two", "three"]):
            session.redo()
            assert said(session) == back
        assert (work / "a.txt").exists()
        assert code_of(session.redo) == "nothing_to_redo"

    def test_a_dry_run_reports_and_changes_nothing(self, session: DurableSession, work: Path) -> None:
        turn(session, "one", "a.txt")
        before = session.messages()
        done = session.rollback(dry_run=True)
        assert done.talk == {"messages": 0, "messages_before": 4} and done.call_id is None
        assert session.messages() == before and (work / "a.txt").exists()

    def test_the_next_message_ends_the_redo_stack_and_events_do_not(self, session: DurableSession) -> None:
        turn(session, "one", "a.txt")
        session.rollback()
        session.emit("live_session_client", {"change": "heartbeat"})
        session.set_scratchpad({})
        assert session.view()["redo_checkpoint_count"] == 1
        session.inject(user("new"))
        assert session.view()["redo_checkpoint_count"] == 0
        assert code_of(session.redo) == "nothing_to_redo"

    @pytest.mark.req("H11.audit_survives_rollback")
    def test_audit_events_appended_since_survive(self, session: DurableSession) -> None:
        with session.turn("one"):
            session.inject(user("one"))
            session.emit("permission_route", {"id": "p"})
        session.emit("live_session_client", {"change": "attached"})
        before = session.events()
        session.rollback()
        assert session.messages() == []
        assert session.events() == before
        assert [event["kind"] for event in before] == ["message", "permission_route", "live_session_client"]

    @pytest.mark.req("HS13.checkpoints_are_positions")
    def test_turns_and_undo_operations_store_each_message_once(
        self, opened: api.Mulligan, session: DurableSession
    ) -> None:
        turn(session, "a needle in the store", "a.txt")
        for _ in range(5):
            session.rollback()
            session.redo()
        with opened.open_root.ledger.store.read() as tx:
            texts = [str(row) for table in SCHEMA.tables for row in tx.select(table)]
        marked = [text for text in texts if "done: a needle in the store" in text]
        assert len(marked) == 1 and marked[0].startswith("RecordRow")

    def test_rollback_removes_the_turn_and_not_later_messages(self, session: DurableSession) -> None:
        session.inject(user("before"))
        turn(session, "one")
        session.inject(user("after"))
        session.rollback()
        assert said(session) == ["before", "after"]
        session.redo()
        assert said(session) == ["before", "one", "after"]

    def test_a_turn_that_compacted_gives_back_the_context_window(self, session: DurableSession) -> None:
        for number in range(6):
            session.inject(user(str(number)))
        with session.turn("big"):
            session.inject(user("big"))
            session.compact(keep_last=1)
        session.inject(user("after"))
        session.rollback()
        assert said(session) == [*map(str, range(6)), "after"]
        session.redo()
        assert session.length() == 3

    def test_another_sessions_transcript_is_left_alone(self, opened: api.Mulligan, session: DurableSession) -> None:
        other = opened.session("other")
        turn(session, "mine", "a.txt")
        turn(other, "theirs", "b.txt")
        session.rollback()
        assert (said(session), said(other)) == ([], ["theirs"])

    def test_the_transcript_stays_if_no_file_could_be_rolled_back(self, session: DurableSession, work: Path) -> None:
        turn(session, "one", "a.txt")
        (work / "a.txt").write_text("somebody's")
        before = session.messages()
        done = session.rollback(on_conflict="refuse")
        assert not done.ok and done.talk is None and session.messages() == before
        assert (work / "a.txt").read_text() == "somebody's"

    def test_a_dry_run_promises_no_transcript_that_then_stays(self, session: DurableSession, work: Path) -> None:
        turn(session, "one", "a.txt")
        (work / "a.txt").write_text("somebody's")
        planned = session.rollback(dry_run=True, on_conflict="refuse")
        assert not planned.ok and planned.talk is None

    def test_a_conflict_on_its_only_file_leaves_the_file_and_not_the_transcript(
        self, session: DurableSession, work: Path
    ) -> None:
        turn(session, "one", "a.txt")
        (work / "a.txt").write_text("somebody's")
        planned, done = session.rollback(dry_run=True), session.rollback()
        assert (planned.ok, planned.talk, planned.outcomes) == (done.ok, done.talk, done.outcomes)
        assert not done.ok and done.talk == {"messages": 0, "messages_before": 4} and said(session) == []
        assert (work / "a.txt").read_text() == "somebody's"
        assert session.redo().talk == {"messages": 4, "messages_before": 0} and said(session) == ["one"]

    def test_a_closed_session_can_still_be_undone(
        self, opened: api.Mulligan, session: DurableSession, work: Path
    ) -> None:
        turn(session, "one", "a.txt")
        session.close()
        session.rollback()
        assert not (work / "a.txt").exists()
        assert said(opened.session("s")) == []


class TestTogether:
    def test_transcript_moves_only_if_the_call_commits(
        self, opened: api.Mulligan, session: DurableSession, work: Path
    ) -> None:
        """A message that comes between planning a redo and its commit ends it: neither files nor talk move."""
        turn(session, "one", "a.txt")
        done = session.rollback()
        open_root = opened.open_root
        move = move_of_redo(open_root, open_root.ledger.call_row(CallId(str(done.call_id))))
        assert move is not None
        session.inject(user("meanwhile"))
        call = open_root.call(session.id, tool="redo", cause=UndoOperation("redo", (str(done.call_id),)))

        def moved(tx: Tx, status: str) -> bool:
            if status == "committed":
                move.apply_in(tx, open_root.ledger, "redo", call.id)
            return False

        call.at_end.append(moved)
        with pytest.raises(MulliganError) as caught, call:
            (work / "b.txt").write_text("theirs")
        assert caught.value.code == "nothing_to_redo" and call.status == "aborted"
        assert said(session) == ["meanwhile"] and not (work / "a.txt").exists()
        sound(opened)

    def test_a_fork_stays_when_its_source_is_undone(self, session: DurableSession) -> None:
        turn(session, "one")
        turn(session, "two")
        child = session.fork()
        session.rollback()
        session.reset()
        assert said(child) == ["one", "two"]
        assert code_of(session.redo) == "nothing_to_redo"


class TestRewind:
    def test_to_a_message_by_id_and_by_place(self, session: DurableSession, work: Path) -> None:
        turn(session, "one", "a.txt")
        turn(session, "two", "b.txt")
        turn(session, "three", "c.txt")
        ids = session.message_ids()
        session.rewind(ids[4])
        assert said(session) == ["one"] and {path.name for path in work.iterdir()} == {"a.txt"}
        session.redo()
        session.rewind(8)
        assert said(session) == ["one", "two"] and {path.name for path in work.iterdir()} == {"a.txt", "b.txt"}
        session.redo()
        session.rewind(ids[3], side="after")
        assert said(session) == ["one"] and {path.name for path in work.iterdir()} == {"a.txt"}
        session.redo()
        session.rewind(0)
        assert said(session) == [] and list(work.iterdir()) == []
        session.redo()
        assert said(session) == ["one", "two", "three"] and len(list(work.iterdir())) == 3

    @pytest.mark.req("D6.rewind.files_only", "D6.rewind.talk_only")
    def test_files_or_transcript_alone(self, session: DurableSession, work: Path) -> None:
        turn(session, "one", "a.txt")
        session.rewind(0, transcript=False)
        assert said(session) == ["one"] and not (work / "a.txt").exists()
        session.redo()
        session.rewind(0, files=False)
        assert said(session) == [] and (work / "a.txt").exists()

    @pytest.mark.req("D11.not_continuable", "D6.rewind_continuable")
    def test_a_point_inside_a_tool_exchange_is_refused(self, session: DurableSession, work: Path) -> None:
        turn(session, "one", "a.txt")
        before = session.messages()
        ids = session.message_ids()
        for point, side in ((ids[2], "before"), (2, "before"), ("c-a.txt", "before"), (ids[1], "after")):
            assert code_of(lambda p=point, s=side: session.rewind(p, s)) == "not_continuable"
        assert session.messages() == before and (work / "a.txt").exists()
        assert session.rewind("c-a.txt", transcript=False).ok
        assert not (work / "a.txt").exists()

    def test_a_rewind_to_a_call_removes_the_messages_after_it(self, session: DurableSession, work: Path) -> None:
        session.inject(user("go"))
        for name in ("a.txt", "b.txt"):
            with session.call("w", tool_call_id=name) as call:
                call.write_file(name, "x")
            session.inject(assistant(f"wrote {name}"))
        session.rewind("b.txt")
        assert [message["content"] for message in session.messages()] == ["go", "wrote a.txt"]
        assert {path.name for path in work.iterdir()} == {"a.txt"}
        session.redo()
        session.rewind("a.txt", "after")
        assert [message["content"] for message in session.messages()] == ["go"]
        assert {path.name for path in work.iterdir()} == {"a.txt"}

    @pytest.mark.parametrize("point", ["nothing", 99, "s#99999", "other#1"])
    def test_a_point_that_is_none_is_refused(self, session: DurableSession, point: Any) -> None:
        session.inject(user("go"))
        assert code_of(lambda: session.rewind(point)) in ("unknown_point", "unknown_call")
        assert code_of(lambda: session.rewind(0, "beside")) == "invalid_params"

    def test_a_message_that_came_with_its_own_name_is_found_by_it(self, session: DurableSession) -> None:
        session.inject(user("one"), id="msg-1")
        session.inject(user("two"), id="msg-2")
        session.rewind("msg-2")
        assert said(session) == ["one"]
        assert session.message_ids() == ["msg-1"]

    def test_a_message_of_the_parent(self, session: DurableSession, work: Path) -> None:
        turn(session, "one")
        child = session.fork()
        turn(child, "two", "b.txt")
        child.rewind(session.message_ids()[1], "after")
        assert said(child) == ["one"] and not (work / "b.txt").exists()


class TestFork:
    @pytest.mark.req("HS14.fork_by_id_or_position")
    def test_at_a_message_by_id_or_place(self, session: DurableSession) -> None:
        turn(session, "one", "a.txt")
        turn(session, "two", "b.txt")
        ids = session.message_ids()
        assert said(session.fork(at=ids[3])) == ["one"]
        assert said(session.fork(at=4)) == ["one"]
        assert said(session.fork(at=0)) == []
        assert session.fork(at=4).view()["branched_at_event_index"] == 4
        assert code_of(lambda: session.fork(at=99)) == "unknown_point"

    @pytest.mark.req("D11.not_continuable")
    def test_inside_a_tool_exchange_is_refused(self, session: DurableSession) -> None:
        turn(session, "one", "a.txt")
        for point in (session.message_ids()[1], 2, "c-a.txt"):
            assert code_of(lambda p=point: session.fork(at=p)) == "not_continuable"
        assert session.view()["child_ids"] == []

    def test_with_files_of_its_own_as_of_that_point(self, session: DurableSession, work: Path, tmp_path: Path) -> None:
        turn(session, "one", "a.txt")
        turn(session, "two", "b.txt")
        child = session.fork(at=4, files="copy", to=str(tmp_path / "copy"), dst="kid")
        assert (child.id, child.root, said(child)) == ("kid", str(tmp_path / "copy"), ["one"])
        assert {path.name for path in (tmp_path / "copy").iterdir()} == {"a.txt"}
        turn(child, "three", "c.txt")
        assert not (work / "c.txt").exists() and (tmp_path / "copy" / "c.txt").exists()
        assert said(session) == ["one", "two"]

    @pytest.mark.parametrize("files, to", [("steal", None), ("steal", "x")])
    def test_it_says_what_it_needs(self, session: DurableSession, files: Any, to: Any) -> None:
        assert code_of(lambda: session.fork(files=files, to=to)) == "invalid_params"

    def test_a_fork_of_a_fork_after_rollbacks_and_compaction(
        self, opened: api.Mulligan, session: DurableSession
    ) -> None:
        for number in range(8):
            turn(session, str(number))
        session.rollback()
        session.compact(keep_last=4)
        child = session.fork()
        turn(child, "x")
        child.rollback()
        grandchild = child.fork(at=child.length())
        assert grandchild.messages() == session.messages()
        session.reset()
        assert [message["role"] for message in grandchild.messages()] == ["user", *["user", "assistant"] * 2]
        sound(opened)


@dataclass(frozen=True)
class Goal:
    text: str


class TestWhatAForkHas:
    @pytest.mark.req("D11.fork_copies")
    @pytest.mark.parametrize("way", ["fork", "fork_at"])
    def test_transcript_slices_scratchpad_roots_and_pins(
        self, opened: api.Mulligan, session: DurableSession, tmp_path: Path, way: str
    ) -> None:
        (tmp_path / "beside").mkdir()
        session.inject(user("one"))
        session[Goal].append(Goal("ship"))
        session.set_scratchpad({"goals": ["g"]})
        session.pin(model="m")
        session.set_workspace_policy({"default_mount_mode": "extend"})
        session.add_root(str(tmp_path / "beside"))
        child = session.fork() if way == "fork" else opened.session(session.fork_at(1))
        assert child.messages() == [user("one")]
        assert child[Goal].all() == (Goal("ship"),)
        assert child.scratchpad() == {"goals": ["g"]} and child.view()["pinned_model"] == "m"
        assert child.list_roots() == session.list_roots() and child.workspace_policy() == session.workspace_policy()
        child[Goal].clear()
        child.inject(user("two"))
        assert (session[Goal].all(), session.messages()) == ((Goal("ship"),), [user("one")])
        sound(opened)


class TestBudget:
    def test_reject_refuses_and_remembers(self, session: DurableSession) -> None:
        session.set_budget({"max_messages": 2})
        for text in ("one", "two"):
            session.inject(user(text))
        for _ in range(3):
            assert code_of(lambda: session.inject(user("three"))) == "transcript_budget_exceeded"
        assert said(session) == ["one", "two"]
        action = session.view()["metadata"]["transcript_budget"]["last_action"]
        assert (action["action"], action["reason"], action["usage_attempted"]) == ("rejected", "message_count", 3)
        session.set_budget(None)
        session.inject(user("three"))

    @pytest.mark.parametrize("recovery, left", [("trim", ["3", "4", "5"]), ("compact", ["3", "4", "5"])])
    def test_trim_and_compact_make_space_and_say_so(
        self, session: DurableSession, recovery: str, left: list[str]
    ) -> None:
        session.set_budget({"max_messages": 5, "recovery": recovery, "keep_last": 2})
        for number in range(6):
            session.inject(user(str(number)))
        kept = session.messages()
        assert [message["content"] for message in kept][-3:] == left
        assert ("compaction" in kept[0].get("metadata", {})) is (recovery == "compact")
        assert session.length() <= 5
        assert [event["kind"] for event in session.events()].count("transcript_budget") == 1

    def test_events_never_fill_it(self, session: DurableSession) -> None:
        session.set_budget({"max_messages": 1})
        for _ in range(50):
            session.emit("live_session_client", {"change": "heartbeat"})
        session.inject(user("one"))
        assert session.length() == 1

    @pytest.mark.parametrize(
        "budget",
        [
            {},
            {"max_messages": -1},
            {"max_messages": "2"},
            {"max_messages": 2, "recovery": "pray"},
            {"max": 1},
            "2",
            {"max_messages": 2, "recovery": "trim", "keep_last": 2},
        ],
    )
    def test_an_invalid_budget_is_refused(self, session: DurableSession, budget: Any) -> None:
        assert code_of(lambda: session.set_budget(budget)) in ("invalid_params", "unknown_option")

    def test_tightening_below_what_is_there_is_refused(self, session: DurableSession) -> None:
        for number in range(3):
            session.inject(user(str(number)))
        assert code_of(lambda: session.set_budget({"max_messages": 2})) == "transcript_budget_exceeded"


@pytest.mark.req("W24.sessions_do_not_share")
def test_two_sessions_in_one_directory_share_no_state(opened: api.Mulligan) -> None:
    one, two = opened.session("one"), opened.session("two")
    messages: list[Message] = [user("mine")]
    one.inject(messages[0])
    one.set_scratchpad({"a": 1})
    assert (two.messages(), two.scratchpad(), two.events()) == ([], None, [])
