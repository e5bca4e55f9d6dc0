"""How sessions end, and the whole table of S3's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mulligan.api as api
from mulligan import Plan, ProviderToolCall, ToolRunner, tool
from mulligan import builtins as b
from mulligan.effects.session import DurableSession
from mulligan.effects.sessions import Sessions
from mulligan.session.lifecycle import is_deleted
from mulligan.session.state.session import Session as State
from mulligan.session.tables import session_journal
from mulligan.store.journal import records_of
from mulligan.testing import contents_of
from mulligan.values.ids import SessionId
from tests.session.s3_functions import code_of, contents, say, snapshot

pytestmark = pytest.mark.usefixtures("opened")


def _use_tool(session: DurableSession) -> None:
    tools = {"look": tool(name="look", description="Looks.")(lambda: "ok")}
    ToolRunner(session.execution_state(), tools).execute(ProviderToolCall("c", "look", {}))


def _in_turn(session: DurableSession) -> None:
    with session.turn("more"):
        pass


def _in_call(session: DurableSession) -> None:
    with session.call("more"):
        pass


VERBS: dict[str, Callable[[DurableSession], object]] = {
    "seed": lambda session: session[Plan].seed(Plan("after")),
    "append": lambda session: session[Plan].append(Plan("after")),
    "clear": lambda session: session.clear_slices(),
    "dispatch": lambda session: session.dispatch(Plan("after")),
    "rollback": lambda session: State.rollback(session, session.snapshot()),
    "turn": _in_turn,
    "call": _in_call,
    "tool": _use_tool,
}


class TestClosing:
    @pytest.mark.req("S3.close.evicts", "D11.close_semantics", "S3.lru.close_regardless")
    def test_it_is_gone_at_once_and_its_history_can_still_be_undone(self, work: Path) -> None:
        sessions = api.innermost().sessions
        session = sessions.open("s")
        with session.call("w") as call:
            call.write_file("a.txt", "x")
        b.agent_session_close("s")
        assert not b.agent_session_exists("s") and "s" not in sessions.live.ids()
        session.undo()
        assert not (work / "a.txt").exists()
        assert not b.agent_session_exists("s")

    @pytest.mark.req("D11.close_semantics")
    @pytest.mark.parametrize("verb", VERBS)
    def test_no_call_or_turn_begins_in_a_closed_session(self, verb: str) -> None:
        session = api.innermost().sessions.open("s")
        session[Plan].seed(Plan("before"))
        session.close("done")
        journal = session_journal(session.id)
        with session.archive.store.read() as tx:
            before = list(records_of(tx, journal))
        assert code_of(lambda: VERBS[verb](session)) == "session_closed"
        with session.archive.store.read() as tx:
            assert list(records_of(tx, journal)) == before
        assert session[Plan].all() == (Plan("before"),)

    @pytest.mark.req("D11.close_semantics")
    def test_an_open_call_ends_when_its_session_closes_and_can_be_undone(self, work: Path) -> None:
        session = api.innermost().sessions.open("s")
        with session.turn("last"), session.call("w") as call:
            call.write_file("a.txt", "x")
            session[Plan].seed(Plan("done"))
            session.close("done")
            assert call.write_file("b.txt", "x").error_code == "session_closed"
        assert (call.status, session[Plan].all(), contents_of(work)) == ("committed", (Plan("done"),), {"a.txt": b"x"})
        assert session.undo().ok
        assert (session[Plan].all(), contents_of(work)) == ((), {})

    @pytest.mark.req("S3.close.records_event", "S3.close.status_forms", "S3.close.reason_before_removal")
    @pytest.mark.parametrize(
        "status, told",
        [
            (None, {"reason": "closed", "status": "closed"}),
            ("timeout", {"reason": "timeout", "status": "timeout"}),
            (
                {"reason": "timeout", "n": 1},
                {"reason": "timeout", "status": "timeout", "metadata": {"reason": "timeout", "n": 1}},
            ),
            (
                {"stop_reason": "max", "status": "failed"},
                {"reason": "max", "status": "failed", "metadata": {"stop_reason": "max", "status": "failed"}},
            ),
            ({}, {"reason": "closed", "status": "closed", "metadata": {}}),
        ],
    )
    def test_the_reason_is_reported_to_subscribers_and_on_record(self, status: Any, told: dict[str, Any]) -> None:
        s = b.agent_session_open("s")
        heard: list[dict[str, Any]] = []
        subscription = b.agent_subscribe(s, heard.append)
        b.agent_session_close(s, status)
        subscription.wait()
        subscription.join(600)
        assert [(event["kind"], event["metadata"]) for event in heard] == [("agent_session_closed", told)]
        b.agent_session_open(s)
        assert [(event["kind"], event["metadata"]) for event in snapshot(s)["events"]] == [
            ("agent_session_closed", told)
        ]

    @pytest.mark.parametrize("status", ["", "  ", 7, ["x"], {"reason": ""}, {"reason": 3}])
    def test_an_empty_reason_is_refused(self, status: Any) -> None:
        s = b.agent_session_open("s")
        assert code_of(lambda: b.agent_session_close(s, status)) == "invalid_params"
        assert b.agent_session_exists(s)

    @pytest.mark.req("D11.reopen")
    def test_opening_it_again_goes_on(self) -> None:
        s = b.agent_session_open("s")
        say(s, "one")
        b.agent_session_set_scratchpad(s, {"a": 1})
        b.agent_session_close(s)
        assert b.agent_session_open("s") == "s"
        say(s, "two")
        assert contents(s) == ["one", "two"] and b.agent_session_scratchpad(s) == {"a": 1}

    @pytest.mark.req("D11.close_semantics")
    def test_a_close_for_good_is_distinguished_however_much_is_dropped_after_it(self) -> None:
        sessions = api.innermost().sessions
        session = sessions.open("s")

        def deleted(name: str) -> bool:
            with session.archive.store.read() as tx:
                return is_deleted(tx, SessionId(name))

        for number in range(210):
            with session.call("w") as call:
                call.write_file("a.txt", f"{number}")
        assert (deleted("s"), deleted("nobody")) == (False, False)
        sessions.close("s", "client_request")
        assert not deleted("s")
        sessions.open("s")
        assert len(sessions.delete("s")) == 210
        assert deleted("s")
        sessions.open("s")
        assert not deleted("s")


S3_TABLE = {
    "agent_session_open": ["id", "opts"],
    "agent_session_exists": ["id"],
    "agent_session_current_id": [],
    "agent_session_length": ["id"],
    "agent_session_snapshot": ["id"],
    "agent_session_ancestry": ["id"],
    "agent_session_reset": ["id"],
    "agent_session_fork": ["src", "dst"],
    "agent_session_fork_at": ["src", "keep_first", "dst"],
    "agent_session_scratchpad": ["id"],
    "agent_session_set_scratchpad": ["id", "scratchpad", "opts"],
    "agent_session_clear_scratchpad": ["id", "opts"],
    "agent_session_trim": ["id", "keep_last"],
    "agent_session_compact": ["id", "opts"],
    "agent_session_attach": ["id", "client_id", "opts"],
    "agent_session_takeover": ["id", "client_id", "opts"],
    "agent_session_detach": ["id", "client_id", "opts"],
    "agent_session_heartbeat": ["id", "client_id", "opts"],
    "agent_session_live_clients": ["id"],
    "agent_session_client_inject_prompt": ["id", "client_id", "content", "opts"],
    "agent_session_route_permission": ["id", "client_id", "request", "opts"],
    "agent_session_inject": ["id", "message"],
    "agent_session_seed_from_jsonl": ["jsonl_path", "opts"],
    "agent_session_workspace_anchor": ["id"],
    "agent_session_set_workspace_anchor": ["id", "anchor"],
    "agent_session_workspace_policy": ["id"],
    "agent_session_set_workspace_policy": ["id", "policy"],
    "agent_session_add_root": ["id", "root", "opts"],
    "agent_session_remove_root": ["id", "root"],
    "agent_session_list_roots": ["id"],
    "agent_session_close": ["id", "status"],
    "agent_subscribe": ["id", "cb"],
}
OF_ALL_SESSIONS = {"open", "exists", "current_id", "snapshot", "ancestry", "seed_from_jsonl"}


@pytest.mark.req("D2.public_names_kept", "D11.builtins", "D11.builtin_agent_subscribe")
@pytest.mark.parametrize("name", S3_TABLE)
def test_each_function_has_its_name_and_parameters(name: str) -> None:
    assert list(inspect.signature(getattr(b, name)).parameters) == S3_TABLE[name]
    assert name in b.__all__


@pytest.mark.req("D11.methods")
@pytest.mark.parametrize("name", S3_TABLE)
def test_each_is_a_method_in_python_form_too(name: str) -> None:
    verb = name.removeprefix("agent_session_").removeprefix("agent_")
    assert callable(getattr(Sessions if verb in OF_ALL_SESSIONS else DurableSession, verb))


@pytest.mark.req("S3.session.owns_lifecycle", "S3.tour.fork_leaves_source")
def test_the_quick_tour() -> None:
    s = b.agent_session_open()
    b.agent_session_inject(s, {"role": "user", "content": "Hello!"})
    branch = b.agent_session_fork(s)
    b.agent_session_inject(branch, {"role": "user", "content": "what if …"})
    replay_branch = b.agent_session_fork_at(s, 1)
    ancestry = b.agent_session_ancestry(replay_branch)
    assert ancestry is not None and ancestry["root_id"] == s
    b.agent_session_close(branch)
    b.agent_session_close(replay_branch)
    assert contents(s) == ["Hello!"]


@pytest.mark.req("D11.delete_drops_preimages")
class TestForgetting:
    def test_deleting_a_session_drops_its_preimages_and_leaves_a_record(self, work: Path) -> None:
        sessions = api.innermost().sessions
        session = sessions.open("s")
        (work / "a.txt").write_text("what it was " * 100)
        with session.call("w") as call:
            call.write_file("a.txt", "new")
        session.inject({"role": "user", "content": "said"})
        (dropped,) = sessions.delete("s")
        assert dropped == call.id and not sessions.exists("s")
        session.undo()
        assert (work / "a.txt").read_text() == "new"
        ledger = api.innermost().open_root.ledger
        with ledger.store.read() as tx:
            kinds = [record.kind for record in records_of(tx, "s:s")]
        assert "call.evicted" in kinds and "session.closed" in kinds
        assert b.agent_session_open("s") == "s" and contents("s") == ["said"]
        assert code_of(lambda: sessions.delete("nobody")) == "session_not_found"

    def test_so_does_dropping_its_snapshots(self, work: Path) -> None:
        (work / "a.txt").write_text("what it was")
        b.hostlib_fs_snapshot(session_id="s", scope_id="c1", paths=[str(work / "a.txt")])
        with api.innermost().session("s").call("write") as call:
            call.write_file("a.txt", "new")
        assert b.drop_session_snapshots("s") == ["c1"]
        assert b.hostlib_fs_list_snapshots(session_id="s") == {"snapshots": []}
        undone = api.innermost().session("s").undo(call.id)
        assert [(one.path, one.outcome, one.reason) for one in undone.outcomes] == [("a.txt", "skipped", "evicted")]
        assert (work / "a.txt").read_text() == "new"
        ledger = api.innermost().open_root.ledger
        with ledger.store.read() as tx:
            assert {"scope.dropped", "call.evicted"} <= {record.kind for record in records_of(tx, "s:s")}
