"""Live clients of a session: who is there, who is in control, and what only that one may do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mulligan
from mulligan import builtins
from mulligan.api import Mulligan
from mulligan.effects.session import DurableSession
from mulligan.session.clients import CLIENTS_MAX
from mulligan.values.errors import MulliganError
from tests.session.manual_clock import HandClock
from tests.session.store_size import settled_bytes

Json = dict[str, Any]


class Room:
    """A session with a clock that a test sets."""

    def __init__(self, base: Path, *, store: str = "memory:") -> None:
        (base / "work").mkdir(exist_ok=True)
        self.clock = HandClock()
        self.opened: Mulligan = mulligan.open(str(base / "work"), store=store, clock=self.clock)
        self.session: DurableSession = self.opened.session("s")

    def events(self, kind: str = "live_session_client") -> list[Json]:
        return [one["metadata"] for one in self.session.events() if one["kind"] == kind]

    def modes(self) -> dict[str, str]:
        return {one["client_id"]: one["mode"] for one in self.session.live_clients()}

    def refused(self, act: Callable[[], object]) -> MulliganError:
        """Nothing is changed by what is refused."""
        before = self.opened.sessions.snapshot("s")
        with pytest.raises(MulliganError) as caught:
            act()
        assert self.opened.sessions.snapshot("s") == before
        return caught.value


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    found = Room(tmp_path)
    yield found
    found.opened.close()


def client(room: Room, name: str, mode: str = "observer", **fields: Any) -> Json:
    rights = mode == "controller"
    return {
        "client_id": name,
        "mode": mode,
        "attached_at": room.clock.text,
        "last_seen_at": room.clock.text,
        "prompt_injection": rights,
        "permission_routing": rights,
        "metadata": {},
        "stale": False,
        **fields,
    }


class TestAttach:
    @pytest.mark.req("S3.attach.mode", "S3.live.many_observers_one_controller", "S3.live.client_event")
    def test_observers_and_a_controller(self, room: Room) -> None:
        first = room.session.attach("portal")
        assert first == {
            "client": client(room, "portal"),
            "previous_controller_id": None,
            "active_controller_id": None,
            "clients": [client(room, "portal")],
        }
        second = room.session.attach("  beta ", mode="controller", metadata={"v": 1})
        beta = client(room, "beta", "controller", metadata={"v": 1})
        assert second == {
            "client": beta,
            "previous_controller_id": None,
            "active_controller_id": "beta",
            "clients": [beta, client(room, "portal")],
        }
        told = room.events()
        assert [(one["action"], one["client"]["client_id"], one["active_controller_id"]) for one in told] == [
            ("attached", "portal", None),
            ("attached", "beta", "beta"),
        ]

    @pytest.mark.req("S3.attach.second_controller_refused")
    def test_a_second_controller_must_ask_for_takeover(self, room: Room) -> None:
        room.session.attach("tui", mode="controller")
        refused = room.refused(lambda: room.session.attach("web", mode="controller"))
        assert (refused.code, refused.details["controller_id"]) == ("controller_present", "tui")
        done = room.session.attach("web", {"mode": "controller", "takeover": True})
        assert (done["previous_controller_id"], done["active_controller_id"]) == ("tui", "web")
        assert room.modes() == {"tui": "observer", "web": "controller"}

    def test_attaching_again_keeps_the_time_of_coming_and_what_was_said(self, room: Room) -> None:
        came = room.clock.text
        room.session.attach("tui", mode="controller", metadata={"a": 1})
        room.clock.pass_by(seconds=5)
        again = room.session.attach("tui", mode="controller")
        expected = client(room, "tui", "controller", attached_at=came, metadata={"a": 1})
        assert (again["client"], again["previous_controller_id"]) == (expected, "tui")
        released = room.session.attach("tui", mode="observer", metadata={})
        assert (released["active_controller_id"], released["client"]["metadata"]) == (None, {})
        assert released["client"]["prompt_injection"] is released["client"]["permission_routing"] is False

    def test_a_controller_may_decline_rights(self, room: Room) -> None:
        found = room.session.attach("tui", mode="controller", prompt_injection=False)["client"]
        assert (found["prompt_injection"], found["permission_routing"]) == (False, True)

    @pytest.mark.parametrize(
        ("client_id", "opts", "code"),
        [
            ("", {}, "invalid_id"),
            ("  ", {}, "invalid_id"),
            (7, {}, "invalid_id"),
            ("x" * 300, {}, "invalid_id"),
            ("c", {"mode": "boss"}, "invalid_params"),
            ("c", {"mode": 1}, "invalid_params"),
            ("c", {"prompt_injection": True}, "invalid_params"),
            ("c", {"permission_routing": True, "mode": "observer"}, "invalid_params"),
            ("c", {"takeover": True, "mode": "observer"}, "invalid_params"),
            ("c", {"takeover": "yes"}, "invalid_params"),
            ("c", {"metadata": [1]}, "invalid_params"),
            ("c", {"metadata": {"x": "y" * 20_000}}, "invalid_params"),
            ("c", {"metadata": {"x": float("nan")}}, "invalid_json"),
            ("c", {"colour": "red"}, "unknown_option"),
            ("c", [1], "invalid_params"),
        ],
    )
    @pytest.mark.req("S3.session.unknown_input_raises")
    def test_an_invalid_attachment_is_refused(self, room: Room, client_id: Any, opts: Any, code: str) -> None:
        assert room.refused(lambda: room.session.attach(client_id, opts)).code == code

    def test_there_is_a_limit(self, room: Room) -> None:
        for number in range(CLIENTS_MAX):
            room.session.attach(f"c{number}")
        with pytest.raises(MulliganError) as caught:
            room.session.attach("one more")
        assert caught.value.code == "too_many_clients"
        room.session.attach("c7")
        room.session.detach("c8")
        room.session.attach("one more")


class TestTakeover:
    @pytest.mark.req("S3.takeover.attaches_controller", "S3.takeover.demotes", "HS7.one_vocabulary")
    def test_it_makes_a_controller_and_an_observer(self, room: Room) -> None:
        room.session.attach("tui", mode="controller")
        room.clock.pass_by(seconds=1)
        done = room.session.takeover("mobile", metadata={"reason": "operator handoff"})
        assert done["client"] == client(room, "mobile", "controller", metadata={"reason": "operator handoff"})
        assert (done["previous_controller_id"], done["active_controller_id"]) == ("tui", "mobile")
        before = room.clock.time - timedelta(seconds=1)
        stamp = HandClock(before).text
        assert done["clients"][1] == client(room, "tui", attached_at=stamp, last_seen_at=stamp)
        assert [one["action"] for one in room.events()] == ["attached", "takeover"]
        assert room.events()[1]["previous_controller_id"] == "tui"

    def test_with_no_one_in_control_it_is_the_first(self, room: Room) -> None:
        assert room.session.takeover("a")["previous_controller_id"] is None
        assert room.session.takeover("a")["previous_controller_id"] == "a"
        assert room.session.attach("b", takeover=True)["active_controller_id"] == "b"

    @pytest.mark.parametrize("opts", [{"mode": "observer"}, {"takeover": False}, {"x": 1}])
    def test_it_has_no_other_options(self, room: Room, opts: Json) -> None:
        assert room.refused(lambda: room.session.takeover("a", opts)).code == "unknown_option"


class TestDetach:
    @pytest.mark.req("S3.detach.removes", "S3.detach.releases_control", "S3.live.detach_reason", "S3.live.client_event")
    def test_the_controller_leaves_no_client_in_control(self, room: Room) -> None:
        room.session.attach("a")
        room.session.attach("b", mode="controller")
        gone = room.session.detach("b", reason="client_exit")
        assert gone == {
            "client": None,
            "previous_controller_id": "b",
            "active_controller_id": None,
            "clients": [client(room, "a")],
        }
        told = room.events()[-1]
        assert (told["action"], told["client_id"], told["reason"]) == ("detached", "b", "client_exit")
        room.session.detach("a")
        assert (room.events()[-1]["reason"], room.session.live_clients()) == ("client_detached", [])

    @pytest.mark.parametrize("verb", ["detach", "heartbeat"])
    def test_another_writer_who_is_not_there_cannot_go(self, room: Room, verb: str) -> None:
        assert room.refused(lambda: getattr(room.session, verb)("ghost")).code == "client_not_attached"
        assert room.refused(lambda: getattr(room.session, verb)("ghost", {"x": 1})).code == "unknown_option"


class TestHeartbeat:
    @pytest.mark.req("S3.heartbeat.refreshes", "S3.live.heartbeat_event")
    def test_it_refreshes_and_replaces_metadata_if_given(self, room: Room) -> None:
        room.session.attach("a", metadata={"at": "top"})
        came = room.clock.text
        room.clock.pass_by(seconds=10)
        seen = room.session.heartbeat("a")
        expected = client(room, "a", attached_at=came, metadata={"at": "top"})
        assert (seen["client"], seen["clients"]) == (expected, [expected])
        assert room.session.heartbeat("a", {"metadata": {"at": "end"}})["client"]["metadata"] == {"at": "end"}
        assert room.session.heartbeat("a", {"metadata": None})["client"]["metadata"] == {"at": "end"}
        assert [one["action"] for one in room.events()] == ["attached", "heartbeat", "heartbeat"]
        assert [one.get("metadata") for one in room.events()[1:]] == [None, {"at": "end"}]

    @pytest.mark.req("D11.heartbeat_coalesced")
    def test_one_that_changes_nothing_is_reported_at_most_every_ten_minutes(self, room: Room) -> None:
        room.session.attach("a", metadata={"x": 1})
        beats = []
        for _ in range(360):
            room.clock.pass_by(seconds=10)
            room.session.heartbeat("a", metadata={"x": 1})
            beats.append(sum(one["action"] == "heartbeat" for one in room.events()))
        assert beats[0] == 1 and beats[-1] == 6
        assert room.session.live_clients()[0]["last_seen_at"] == room.clock.text

    @pytest.mark.req("D11.stale_after_60_s", "HS2.dead_controller_visible")
    def test_a_silent_client_is_stale_and_stays_controller_until_a_takeover(self, room: Room) -> None:
        room.session.attach("a", mode="controller")
        room.session.attach("b")
        room.clock.pass_by(seconds=59.9)
        room.session.heartbeat("b")
        room.clock.pass_by(seconds=0.1)
        assert [one["stale"] for one in room.session.live_clients()] == [True, False]
        assert room.refused(lambda: room.session.attach("b", mode="controller")).code == "controller_present"
        assert room.session.takeover("b")["previous_controller_id"] == "a"
        room.session.heartbeat("a")
        assert [one["stale"] for one in room.session.live_clients()] == [False, False]

    @pytest.mark.req("D11.presence_is_log", "HS1.heartbeats_fill_nothing", "D11.heartbeat_coalesced")
    def test_a_week_of_heartbeats_adds_few_records(self, tmp_path: Path) -> None:
        room = Room(tmp_path, store=str(tmp_path / "home"))
        room.session.attach("portal", metadata={"agent": "browser", "window": 3})
        room.session.inject({"role": "user", "content": "hello"})
        room.opened.close()
        before = settled_bytes(tmp_path / "home")
        room = Room(tmp_path, store=str(tmp_path / "home"))
        for _ in range(7 * 24 * 360):
            room.clock.pass_by(seconds=10)
            room.session.heartbeat("portal")
        assert room.session.length() == 1
        assert len(room.events()) <= 1 + 7 * 24 * 6
        assert room.session.live_clients()[0]["last_seen_at"] == room.clock.text
        room.opened.close()
        assert settled_bytes(tmp_path / "home") - before <= 2_000_000

    @pytest.mark.req("H10.heartbeat_keeps_redo", "D11.presence_is_log", "H11.audit_survives_rollback")
    def test_attach_detach_and_heartbeat_keep_the_redo_stack(self, room: Room) -> None:
        with room.session.turn("write"), room.session.call() as call:
            call.write_file("a.txt", "one\n")
        file = Path(room.opened.root) / "a.txt"
        room.session.attach("a", mode="controller")
        assert room.session.rollback().ok and not file.exists()
        room.session.heartbeat("a", metadata={"new": 1})
        room.session.takeover("b")
        room.session.route_permission("b", {"id": "p"})
        room.session.detach("a")
        told = len(room.events())
        assert room.session.redo().ok and file.read_text() == "one\n"
        assert room.session.rollback().ok
        assert len(room.events()) == told
        room.session.client_inject_prompt("b", "something new")
        assert room.refused(lambda: room.session.redo()).code == "nothing_to_redo"


class TestWhatOnlyTheControllerMayDo:
    @pytest.mark.req("S3.inject_prompt.controller_only", "S3.live.prompt_metadata", "S3.live.controller_rights")
    def test_a_prompt_is_a_user_message_that_says_who_gave_it(self, room: Room) -> None:
        room.session.attach("tui", mode="controller")
        room.clock.pass_by(seconds=30)
        builtins.agent_session_client_inject_prompt("s", "tui", "go on", {"metadata": {"key": "enter"}})
        source = {
            "client_id": "tui",
            "mode": "controller",
            "source": "live_session_attach",
            "metadata": {"key": "enter"},
        }
        assert room.session.messages() == [{"role": "user", "content": "go on", "metadata": {"live_session": source}}]
        assert room.session.live_clients()[0]["last_seen_at"] == room.clock.text
        event = room.session.events()[-1]
        assert (event["kind"], event["metadata"]) == ("message", {"live_session": source})

    @pytest.mark.req("S3.route_permission.records", "S3.live.permission_event", "S3.live.controller_rights")
    @pytest.mark.parametrize(
        ("request_", "name"),
        [
            ({"id": "r1", "request_id": "r2", "tool": "sh"}, "r1"),
            ({"request_id": "r2"}, "r2"),
            ({"id": "", "request_id": 7}, "7"),
            ({"id": None}, "permission_request"),
            ({}, "permission_request"),
        ],
    )
    def test_a_route_is_an_event_and_an_answer(self, room: Room, request_: Json, name: str) -> None:
        room.session.attach("tui", mode="controller")
        answer = room.session.route_permission("tui", request_, metadata={"ui": "modal"})
        rest = {"request_id": name, "request": request_, "metadata": {"ui": "modal"}}
        shown = client(room, "tui", "controller")
        assert answer == {"action": "permission_routed", "client": shown, **rest}
        told = {"action": "permission_routed", "client_id": "tui", **rest}
        assert room.events("live_session_permission_route") == [told]

    @pytest.mark.req("S3.inject_prompt.controller_only", "S3.live.controller_rights", "S3.live.observer_rights")
    def test_no_other_client_may_and_the_checks_come_in_order(self, room: Room) -> None:
        acts: list[Callable[[str], object]] = [
            lambda name: room.session.client_inject_prompt(name, "x"),
            lambda name: room.session.route_permission(name, {}),
        ]
        room.session.attach("eye")
        room.session.attach("hand", mode="controller", prompt_injection=False, permission_routing=False)
        for act in acts:
            assert [room.refused(partial(act, who)).code for who in ("ghost", "eye", "hand")] == [
                "not_controller",
                "not_controller",
                "client_may_not",
            ]
        assert room.refused(lambda: acts[0]("eye")).details["controller_id"] == "hand"
        room.session.takeover("eye")
        assert room.refused(lambda: acts[0]("hand")).code == "not_controller"
        for act in acts:
            act("eye")
        room.session.detach("eye")
        assert [room.refused(partial(act, "eye")).code for act in acts] == ["not_controller"] * 2

    @pytest.mark.parametrize("content", ["", "  ", None, 7, [], {"text": "x"}])
    def test_an_empty_prompt_is_refused(self, room: Room, content: Any) -> None:
        room.session.attach("tui", mode="controller")
        assert room.refused(lambda: room.session.client_inject_prompt("tui", content)).code == "invalid_params"

    @pytest.mark.parametrize("request_", [None, "x", [1], {"x": "y" * 300_000}])
    def test_a_request_is_an_object_of_some_size(self, room: Room, request_: Any) -> None:
        room.session.attach("tui", mode="controller")
        assert room.refused(lambda: room.session.route_permission("tui", request_)).code == "invalid_params"

    def test_a_prompt_keeps_to_the_budget_of_messages(self, room: Room) -> None:
        room.session.attach("tui", mode="controller")
        room.session.set_budget({"max_messages": 1})
        room.session.client_inject_prompt("tui", "one")
        with pytest.raises(MulliganError) as caught:
            room.session.client_inject_prompt("tui", "two")
        assert caught.value.code == "transcript_budget_exceeded"
        assert room.session.length() == 1

    def test_a_large_prompt_is_kept_whole(self, room: Room) -> None:
        room.session.attach("tui", mode="controller")
        text = "long " * 100_000
        room.session.client_inject_prompt("tui", text)
        assert room.session.messages()[0]["content"] == text


class TestLifecycle:
    @pytest.mark.req("S3.snapshot.live_fields", "S3.live_clients.lists", "S3.session.owns_live_clients")
    def test_the_view_shows_them(self, room: Room) -> None:
        room.session.attach("b", mode="controller")
        room.session.attach("a")
        view = builtins.agent_session_snapshot("s")
        assert view is not None
        assert view["live_controller_id"] == "b"
        assert view["live_clients"] == [client(room, "a"), client(room, "b", "controller")]
        assert view["live_clients"] == builtins.agent_session_live_clients("s")

    @pytest.mark.req("D11.fork_does_not_copy")
    def test_a_fork_begins_without_clients(self, room: Room) -> None:
        room.session.attach("b", mode="controller")
        child = room.session.fork()
        assert child.live_clients() == []
        child.attach("c", mode="controller")
        assert room.modes() == {"b": "controller"}

    def test_a_reset_leaves_them_and_a_close_lets_them_go(self, room: Room) -> None:
        room.session.attach("b", mode="controller")
        room.session.reset()
        assert room.modes() == {"b": "controller"}
        room.session.close("done")
        with pytest.raises(MulliganError) as caught:
            room.session.attach("b")
        assert caught.value.code == "session_closed"
        assert room.opened.session("s").live_clients() == []

    @pytest.mark.req("S3.session.unknown_input_raises", "S3.loud.tolerant_four")
    @pytest.mark.parametrize(
        "act",
        [
            lambda: builtins.agent_session_attach("ghost", "c"),
            lambda: builtins.agent_session_takeover("ghost", "c"),
            lambda: builtins.agent_session_detach("ghost", "c"),
            lambda: builtins.agent_session_heartbeat("ghost", "c"),
            lambda: builtins.agent_session_live_clients("ghost"),
            lambda: builtins.agent_session_client_inject_prompt("ghost", "c", "x"),
            lambda: builtins.agent_session_route_permission("ghost", "c", {}),
        ],
    )
    def test_an_unknown_session_raises(self, room: Room, act: Callable[[], object]) -> None:
        refused = room.refused(act)
        assert refused.code == "session_not_found" and "ghost" in refused.message
        assert str(refused.details["verb"]).startswith("agent_session_")

    @pytest.mark.req("S3.live.belongs_to_session", "S3.takeover.attaches_controller")
    def test_the_documents_own_example(self, room: Room) -> None:
        s = builtins.agent_session_open("incident-debug")
        builtins.agent_session_attach(s, "portal", {"mode": "observer"})
        builtins.agent_session_attach(s, "tui", {"mode": "controller"})
        builtins.agent_session_takeover(s, "mobile", {"metadata": {"reason": "operator handoff"}})
        builtins.agent_session_client_inject_prompt(s, "mobile", "continue from the failing test")
        builtins.agent_session_detach(s, "mobile", {"reason": "client_exit"})
        seen = {one["client_id"]: one["mode"] for one in builtins.agent_session_live_clients(s)}
        assert seen == {"portal": "observer", "tui": "observer"}
        assert builtins.agent_session_length(s) == 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["observe", "control", "takeover", "detach", "heartbeat", "prompt"]),
        st.sampled_from(["a", "b", "c"]),
    ),
    max_size=25,
)


@pytest.mark.req("S3.live.many_observers_one_controller", "S3.inject_prompt.controller_only")
@given(STEPS)
@settings(max_examples=40)
def test_there_is_always_at_most_one_controller_and_only_its_prompts_count(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]]
) -> None:
    room = Room(tmp_path_factory.mktemp("room"))
    controller: str | None = None
    attached: set[str] = set()
    prompts = 0
    acts: dict[str, Callable[[str], object]] = {
        "observe": lambda who: room.session.attach(who),
        "control": lambda who: room.session.attach(who, mode="controller"),
        "takeover": lambda who: room.session.takeover(who),
        "detach": lambda who: room.session.detach(who),
        "heartbeat": lambda who: room.session.heartbeat(who),
        "prompt": lambda who: room.session.client_inject_prompt(who, "x"),
    }
    for what, who in steps:
        allowed = {
            "observe": True,
            "control": controller in (None, who),
            "takeover": True,
            "detach": who in attached,
            "heartbeat": who in attached,
            "prompt": controller == who,
        }[what]
        try:
            acts[what](who)
            assert allowed
        except MulliganError:
            assert not allowed
            continue
        if what in ("observe", "detach"):
            controller = None if controller == who else controller
        if what in ("control", "takeover"):
            controller = who
        attached = (attached - {who}) if what == "detach" else attached | {who}
        prompts += what == "prompt"
        modes = room.modes()
        assert set(modes) == attached
        assert [name for name, mode in modes.items() if mode == "controller"] == ([controller] if controller else [])
        assert room.session.length() == prompts
    room.opened.close()
