"""Sessions outlive memory, processes and kill -9, and the tables are what the journals say."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

import mulligan.api as api
from mulligan.effects.session import DurableSession
from mulligan.effects.sessions import Sessions
from mulligan.history.projection import SCHEMA
from mulligan.session.lifecycle import LIVE_SESSIONS, LiveSessions
from mulligan.store.verify import verify
from mulligan.values.errors import RequestError
from mulligan.values.ids import SessionId
from tests.session.example_messages import user
from tests.session.state.example_slices import Added, counting
from tests.session.state.example_slices import number as counted

CHILD = Path(__file__).with_name("writer_process.py")


def is_sound(opened: api.Mulligan) -> None:
    assert [one for one in verify(opened.open_root.ledger.store, SCHEMA) if one.severity != "harmless"] == []


class TestMemory:
    @pytest.mark.req("S3.lru.cap_128")
    def test_at_most_128_are_live_by_default(self, opened: api.Mulligan) -> None:
        for number in range(LIVE_SESSIONS + 10):
            opened.sessions.open(f"s{number}")
        assert LIVE_SESSIONS == 128
        assert opened.sessions.live.ids() == [f"s{number}" for number in range(10, 138)]

    @pytest.mark.req("S3.lru.least_recent_out", "HS5.eviction_loses_nothing", "D11.sessions_durable")
    def test_the_session_used_longest_ago_leaves_memory_and_loses_nothing(
        self, opened: api.Mulligan, work: Path
    ) -> None:
        sessions = Sessions(opened.open_root, opened.boundary, cap=2)
        first = sessions.open("first")
        with first.turn("t"):
            first.inject(user("one"))
            with first.call("w") as call:
                call.write_file("a.txt", "x")
        first.set_scratchpad({"a": 1})
        child = first.fork(dst="child").id
        first.rollback()
        view = first.view()
        del first
        sessions.open("second")
        sessions.get("first")
        sessions.open("third")
        assert sessions.live.ids() == ["first", "third"]
        sessions.open("fourth")
        assert "first" not in sessions.live.ids() and sessions.exists("first")
        again = sessions.get("first")
        assert again.view() == view and view["child_ids"] == [child]
        again.redo()
        assert (work / "a.txt").exists() and again.messages() == [user("one")]

    @pytest.mark.req("HS5.eviction_loses_nothing")
    @pytest.mark.parametrize("held", [True, False])
    def test_reducers_stay_registered_while_the_session_is_open(self, opened: api.Mulligan, held: bool) -> None:
        sessions = Sessions(opened.open_root, opened.boundary, cap=1)
        first = counting(sessions.open("one"))
        in_hand = [first] if held else []
        del first
        sessions.open("two")
        gc.collect()
        again = sessions.get("one")
        again.dispatch(Added())
        assert counted(again) == 1 and (again in in_hand) is held
        sessions.close("one")
        assert not sessions.open("one").has_reducers()

    def test_one_without_a_holder_leaves_memory(self, opened: api.Mulligan) -> None:
        sessions = Sessions(opened.open_root, opened.boundary, cap=1)
        left = weakref.ref(sessions.open("one"))
        sessions.open("two")
        gc.collect()
        assert left() is None

    def test_asking_does_not_count_as_using(self, opened: api.Mulligan) -> None:
        sessions = Sessions(opened.open_root, opened.boundary, cap=2)
        sessions.open("one")
        sessions.open("two")
        assert sessions.exists("one") and sessions.snapshot("one") and sessions.ancestry("one")
        sessions.open("three")
        assert sessions.live.ids() == ["two", "three"]

    def test_a_subscriber_of_one_that_left_memory_still_gets_events(self, opened: api.Mulligan) -> None:
        sessions = Sessions(opened.open_root, opened.boundary, cap=1)
        heard: list[str] = []
        told = sessions.open("one").subscribe(lambda event: heard.append(event["text"]))
        sessions.open("two")
        sessions.get("one").inject(user("hi"))
        assert told.wait() and heard == ["hi"]

    def test_many_threads_share_one_live_object(self) -> None:
        live: LiveSessions[threading.Event] = LiveSessions(4)
        found: list[object] = []
        make = threading.Event
        threads = [threading.Thread(target=lambda: found.append(live.get(SessionId("s"), make))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, found))) == 1

    def test_a_cap_of_nothing_is_refused(self) -> None:
        with pytest.raises(RequestError):
            LiveSessions(0)


class TestReopening:
    @pytest.mark.req("D11.sessions_durable")
    def test_everything_is_there_after_a_restart(self, tmp_path: Path) -> None:
        (tmp_path / "w").mkdir()
        with api.open(str(tmp_path / "w"), store=str(tmp_path / "store")) as opened:
            session = opened.session("s")
            for number in range(20):
                with session.turn(str(number)):
                    session.inject(user(str(number)))
            session.compact(keep_last=3)
            session.set_scratchpad({"goals": ["x"]})
            session.inject(user("ü" * 80_000))
            session.fork(dst="kid").trim(2)
            session.rollback()
            before = {id: opened.sessions.snapshot(id) for id in ("s", "kid")}
            listed = opened.sessions.list()
        with api.open(str(tmp_path / "w"), store=str(tmp_path / "store")) as opened:
            assert {id: opened.sessions.snapshot(id) for id in ("s", "kid")} == before
            assert opened.sessions.list() == listed
            opened.session("s").redo()
            is_sound(opened)

    @pytest.mark.parametrize("after", [1, 7, 23])
    def test_acknowledged_messages_survive_kill_9(self, tmp_path: Path, after: int) -> None:
        (tmp_path / "w").mkdir()
        store = str(tmp_path / "store")
        with api.open(str(tmp_path / "w"), store=store) as opened:
            parent = opened.session("parent")
            with parent.turn("t"):
                parent.inject(user("before"))
            parent.fork(dst="s")
            parent.rollback()
        arguments = [sys.executable, str(CHILD), str(tmp_path / "w"), store, "s", "100000", "x"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(after):
                acknowledged = int(child.stdout.readline())
            child.kill()
            rest = child.stdout.read().split()
            acknowledged = int(rest[-1]) if rest else acknowledged
        with api.open(str(tmp_path / "w"), store=store) as opened:
            session = opened.session("s")
            texts = [message["content"] for message in session.messages()]
            assert texts[: acknowledged + 2] == ["before", *(f"x {number}" for number in range(acknowledged + 1))]
            assert len(texts) <= acknowledged + 3
            full = (acknowledged + 1) // 5
            pad = session.scratchpad()
            assert (pad is None and full == 0) or pad in ({"facts": [full * 5 - 1]}, {"facts": [full * 5 + 4]})
            assert opened.sessions.ancestry("s") == {"parent_id": "parent", "child_ids": [], "root_id": "parent"}
            parent = opened.session("parent")
            parent.redo()
            assert parent.messages() == [user("before")]
            is_sound(opened)


def test_two_threads_that_append_and_fork_at_once_see_whole_states(session: DurableSession) -> None:
    children: list[str] = []

    def fork() -> None:
        children.extend(session.fork().id for _ in range(10))

    def write() -> None:
        for number in range(50):
            session.inject(user(str(number)))

    threads = [threading.Thread(target=fork), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sessions = Sessions(session._open_root, session._boundary)
    for child in children:
        texts = [message["content"] for message in sessions.get(child).messages()]
        assert texts == [str(number) for number in range(len(texts))]


def test_the_list_of_sessions(opened: api.Mulligan) -> None:
    opened.session("a").inject(user("x"))
    opened.session("a").fork(dst="b")
    opened.sessions.close("a")
    assert [(one["id"], one["length"], one["parent_id"]) for one in opened.sessions.list()] == [("b", 1, "a")]
    assert [one["id"] for one in opened.sessions.list(closed=True)] == ["a", "b"]
