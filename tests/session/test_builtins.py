"""S3's own functions, by their own names: what each returns, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import mulligan.api as api
from mulligan import builtins as b
from mulligan.values.errors import MulliganError, RequestError
from tests.session.s3_functions import code_of, contents, say, snapshot

pytestmark = pytest.mark.usefixtures("opened")


class TestOpening:
    @pytest.mark.req("S3.open.nil_mints_uuid7")
    def test_without_an_id_a_uuid7_is_minted(self) -> None:
        assert UUID(b.agent_session_open()).version == 7
        assert UUID(b.agent_session_open(None)).version == 7

    @pytest.mark.req("S3.open.idempotent")
    def test_opening_a_session_twice_changes_nothing(self) -> None:
        first = b.agent_session_open("twice")
        say(first, "one")
        before = snapshot(first)
        assert b.agent_session_open("twice") == "twice"
        assert snapshot("twice") == before

    @pytest.mark.req("S3.session.unknown_input_raises", "S3.session.no_hidden_lifecycle")
    @pytest.mark.parametrize("opts", [{"mode": "reset"}, {"mode": "fork"}, {"transcript_policy": {}}])
    def test_there_are_no_options_with_a_life_of_their_own(self, opts: dict[str, Any]) -> None:
        assert code_of(lambda: b.agent_session_open("x", opts)) == "unknown_option"
        assert not b.agent_session_exists("x")

    @pytest.mark.req("S3.open.opts")
    def test_it_takes_where_to_work_and_how_roots_are_mounted(self, work: Path, tmp_path: Path) -> None:
        (work / "part").mkdir()
        opts = {
            "workspace_anchor": {"primary": str(work / "part")},
            "workspace_policy": {"default_mount_mode": "extend"},
        }
        found = snapshot(b.agent_session_open("s", opts))
        assert found["workspace_anchor"]["primary"] == str(work / "part")
        assert found["workspace_policy"]["default_mount_mode"] == "extend"
        bad = {"workspace_policy": {"default_mount_mode": "loose"}}
        with pytest.raises(MulliganError):
            b.agent_session_open("t", bad)
        assert not b.agent_session_exists("t")
        with pytest.raises(MulliganError):
            b.agent_session_open("s", bad)
        assert b.agent_session_exists("s")

    @pytest.mark.parametrize("id", ["", "  ", "a\nb", "x" * 257, 7])
    def test_an_id_that_cannot_be_one_is_refused(self, id: Any) -> None:
        assert code_of(lambda: b.agent_session_open(id)) == "invalid_id"

    @pytest.mark.req("S3.exists.safe_on_unknown", "S3.snapshot.nil_on_unknown", "S3.ancestry.nil_on_unknown")
    @pytest.mark.req("S3.loud.tolerant_four")
    def test_four_functions_tolerate_unknown_ids(self) -> None:
        assert b.agent_session_exists("nobody") is False
        assert b.agent_session_snapshot("nobody") is None
        assert b.agent_session_ancestry("nobody") is None
        assert b.agent_session_open("somebody") == "somebody"
        assert not b.agent_session_exists("nobody")

    @pytest.mark.req("D11.builtins_act_on_innermost")
    def test_they_act_on_the_innermost_workspace_else_on_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        b.agent_session_open("outer")
        (tmp_path / "inner").mkdir()
        with api.open(str(tmp_path / "inner"), store=str(tmp_path / "other")):
            assert not b.agent_session_exists("outer")
        assert b.agent_session_exists("outer")
        while api._open_workspaces:
            api._open_workspaces[-1].close()
        monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "state"))
        monkeypatch.chdir(tmp_path / "inner")
        b.agent_session_open("here")
        assert os.path.exists(tmp_path / "state" / "store.db")
        assert api.innermost().root == str(tmp_path / "inner")
        (tmp_path / "next").mkdir()
        monkeypatch.chdir(tmp_path / "next")
        assert api.innermost() is api.innermost()
        assert api.innermost().root == str(tmp_path / "next")
        monkeypatch.chdir(tmp_path / "inner")
        assert api.innermost().root == str(tmp_path / "inner") and b.agent_session_exists("here")

    @pytest.mark.req("D11.builtins_act_on_innermost")
    def test_each_thread_and_task_has_an_innermost_workspace_of_its_own(self, tmp_path: Path) -> None:
        together, found = threading.Barrier(2), dict[str, bool]()

        def opened(name: str) -> api.Mulligan:
            (tmp_path / name).mkdir()
            return api.open(str(tmp_path / name), store=str(tmp_path / f"store of {name}"))

        def in_thread(name: str) -> None:
            with opened(name) as m:
                together.wait()
                found[name] = api.innermost() is m
                together.wait()

        async def in_task(name: str) -> None:
            with opened(name) as m:
                await asyncio.sleep(0)
                found[name] = api.innermost() is m and await asyncio.to_thread(api.innermost) is m

        async def tasks() -> None:
            await asyncio.gather(in_task("three"), in_task("four"))

        threads = [threading.Thread(target=in_thread, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(tasks())
        assert found == dict.fromkeys(("one", "two", "three", "four"), True)


UNKNOWN: dict[str, Callable[[str], object]] = {
    "reset": lambda id: b.agent_session_reset(id),
    "fork": lambda id: b.agent_session_fork(id),
    "fork_at": lambda id: b.agent_session_fork_at(id, 1),
    "close": lambda id: b.agent_session_close(id),
    "trim": lambda id: b.agent_session_trim(id, 1),
    "inject": lambda id: b.agent_session_inject(id, {"role": "user", "content": "x"}),
    "length": lambda id: b.agent_session_length(id),
    "compact": lambda id: b.agent_session_compact(id, {}),
    "truncate": lambda id: b.agent_session_truncate(id, 1),
    "scratchpad": lambda id: b.agent_session_scratchpad(id),
    "set_scratchpad": lambda id: b.agent_session_set_scratchpad(id, {}),
    "clear_scratchpad": lambda id: b.agent_session_clear_scratchpad(id),
    "subscribe": lambda id: b.agent_subscribe(id, lambda _: None),
}


@pytest.mark.req("S3.loud.tolerant_four", "S3.length.unknown_raises", "S3.scratchpad.unknown_raises")
@pytest.mark.req("S3.loud_unknown.reset", "S3.loud_unknown.fork", "S3.loud_unknown.fork_at", "S3.loud_unknown.close")
@pytest.mark.req("S3.loud_unknown.trim", "S3.loud_unknown.inject", "S3.loud_unknown.length", "S3.loud_unknown.compact")
@pytest.mark.parametrize("verb", UNKNOWN)
def test_every_other_verb_raises_for_unknown_ids_and_its_error_names_the_verb(verb: str) -> None:
    with pytest.raises(RequestError) as caught:
        UNKNOWN[verb]("nobody")
    assert caught.value.code == "session_not_found"
    assert verb in str(caught.value.details["verb"]) and caught.value.details["session"] == "nobody"
    assert not b.agent_session_exists("nobody")


@pytest.mark.parametrize("id", [None, 7, b"x", [], {}, "\ud800", "a\0b"], ids=repr)
def test_an_impossible_id_counts_as_unknown(id: Any) -> None:
    assert b.agent_session_exists(id) is False
    assert b.agent_session_snapshot(id) is None and b.agent_session_ancestry(id) is None
    assert {code_of(partial(act, id)) for act in UNKNOWN.values()} == {"session_not_found"}


@pytest.mark.req("D11.close_semantics")
@pytest.mark.parametrize("verb", UNKNOWN)
def test_and_on_what_is_closed(verb: str) -> None:
    b.agent_session_open("gone")
    b.agent_session_close("gone")
    assert code_of(lambda: UNKNOWN[verb]("gone")) == "session_closed"
    assert b.agent_session_snapshot("gone") is None and b.agent_session_ancestry("gone") is None


@pytest.mark.parametrize(
    ("prompt", "system", "opts"),
    [(None, None, None), (7, None, None), (["p"], None, None), ("p", 7, None), ("p", None, {"max_iterations": 0})],
)
def test_a_loop_takes_texts_and_goes_round_at_least_once(prompt: Any, system: Any, opts: Any) -> None:
    assert code_of(lambda: b.agent_loop(prompt, system, opts)) == "invalid_params"
    stage = {"name": "s", "prompt": prompt, "system": system, "model_policy": opts}
    assert code_of(lambda: b.workflow_execute([stage])) == "invalid_params"


class TestInjecting:
    @pytest.mark.req("S3.inject.appends", "S3.length.message_count", "S3.session.owns_transcript")
    def test_a_message_is_kept_as_it_is(self) -> None:
        s = b.agent_session_open()
        message = {"role": "user", "content": "Hello!", "name": "ann", "x": {"deep": [1, None, 2.5, True]}}
        b.agent_session_inject(s, message)
        assert b.agent_session_length(s) == 1
        found = snapshot(s)
        assert found["messages"] == [message]
        assert [(event["kind"], event["role"], event["text"]) for event in found["events"]] == [
            ("message", "user", "Hello!")
        ]

    @pytest.mark.req("S3.inject.role_required", "S3.loud.inject_no_role")
    @pytest.mark.parametrize("message", [{"content": "x"}, {"role": ""}, {"role": " "}, {"role": 3}, {"role": None}])
    def test_without_a_role_it_is_refused_and_nothing_is_kept(self, message: dict[str, Any]) -> None:
        s = b.agent_session_open()
        assert code_of(lambda: b.agent_session_inject(s, message)) == "invalid_params"
        assert b.agent_session_length(s) == 0

    @pytest.mark.parametrize("message", ["text", None, [("role", "user")], 7])
    def test_a_message_that_is_no_object_is_refused(self, message: Any) -> None:
        s = b.agent_session_open()
        assert code_of(lambda: b.agent_session_inject(s, message)) == "invalid_params"

    @pytest.mark.parametrize("content", [float("nan"), 2**70, {1: "x"}, object(), "\ud800"])
    def test_content_without_a_json_form_is_refused(self, content: object) -> None:
        s = b.agent_session_open()
        assert code_of(lambda: b.agent_session_inject(s, {"role": "user", "content": content})) == "invalid_json"
        assert b.agent_session_length(s) == 0

    def test_a_tool_result_is_an_event_of_its_own_kind(self) -> None:
        s = b.agent_session_open()
        b.agent_session_inject(s, {"role": "tool_result", "content": "42", "tool_use_id": "c1"})
        assert [event["kind"] for event in snapshot(s)["events"]] == ["tool_result"]

    def test_a_message_deeper_than_json_goes_is_refused(self) -> None:
        s = b.agent_session_open()
        deep: Any = "x"
        for _ in range(100_000):
            deep = [deep]
        assert code_of(lambda: b.agent_session_inject(s, {"role": "user", "content": deep})) == "invalid_json"
        assert b.agent_session_length(s) == 0

    @pytest.mark.parametrize("id", ["a#7", "#", "ü / ../x", "s:1", "'; drop table talks; --", "%s"])
    def test_an_odd_id_is_accepted(self, id: str) -> None:
        s = b.agent_session_open(id)
        say(s, "one", "two")
        session = api.innermost().sessions.get(s)
        session.rewind(session.message_ids()[1])
        assert contents(s) == ["one"] and contents(b.agent_session_fork(s)) == ["one"]

    def test_a_large_message_comes_back_whole(self) -> None:
        s = b.agent_session_open()
        large = {"role": "tool", "content": "ü" * 300_000, "tool_call_id": "c"}
        b.agent_session_inject(s, large)
        say(s, "after")
        assert snapshot(s)["messages"] == [large, {"role": "user", "content": "after"}]


class TestSnapshot:
    @pytest.mark.req("S3.snapshot.fields", "S3.snapshot.lineage_fields", "S3.snapshot.live_fields")
    def test_every_field_is_there_even_when_nothing_is_known(self) -> None:
        found = snapshot(b.agent_session_open("s"))
        created = found.pop("created_at")
        assert created.endswith("Z") and "T" in created
        anchor, policy = found.pop("workspace_anchor"), found.pop("workspace_policy")
        assert (anchor is None or "primary" in anchor) and (policy is None or "default_mount_mode" in policy)
        assert found == {
            "_type": "transcript",
            "version": 1,
            "id": "s",
            "messages": [],
            "events": [],
            "assets": [],
            "summary": None,
            "metadata": {},
            "state": "open",
            "length": 0,
            "system_prompt": None,
            "tool_format": None,
            "scratchpad": None,
            "scratchpad_version": 0,
            "parent_id": None,
            "child_ids": [],
            "branched_at_event_index": None,
            "live_clients": [],
            "live_controller_id": None,
            "pinned_model": None,
            "pinned_reasoning_policy": None,
            "completed_turn_checkpoint_count": 0,
            "redo_checkpoint_count": 0,
        }

    @pytest.mark.req("S3.snapshot.read_only")
    def test_changing_it_changes_nothing(self) -> None:
        s = b.agent_session_open()
        say(s, "one")
        b.agent_session_set_scratchpad(s, {"goals": ["a"]})
        found = snapshot(s)
        found["messages"][0]["content"] = "other"
        found["messages"].clear()
        found["scratchpad"]["goals"].append("b")
        assert contents(s) == ["one"]
        assert b.agent_session_scratchpad(s) == {"goals": ["a"]}

    @pytest.mark.req("S3.snapshot.fields")
    def test_prompt_format_and_pins_are_in_it(self) -> None:
        s = b.agent_session_open()
        session = api.innermost().sessions.get(s)
        session.set_system_prompt("Be brief.")
        session.claim_tool_format("native")
        session.pin(model="m-1", reasoning_policy={"effort": "high"})
        found = snapshot(s)
        assert (found["system_prompt"], found["tool_format"]) == ("Be brief.", "native")
        assert (found["pinned_model"], found["pinned_reasoning_policy"]) == ("m-1", {"effort": "high"})
        assert code_of(lambda: session.claim_tool_format("text")) == "tool_format_locked"


class TestCurrentId:
    @pytest.mark.req("S3.current_id.nil_outside")
    def test_none_outside_any_session(self) -> None:
        assert b.agent_session_current_id() is None

    @pytest.mark.req("S3.current_id.innermost")
    def test_the_innermost_of_this_thread(self) -> None:
        sessions = api.innermost().sessions
        outer, inner = sessions.open("outer"), sessions.open("inner")
        seen: list[str | None] = []
        with outer.turn("work"):
            with inner.active():
                seen.append(b.agent_session_current_id())
                thread = threading.Thread(target=lambda: seen.append(b.agent_session_current_id()))
                thread.start()
                thread.join()
                with outer.call("a tool"):
                    seen.append(b.agent_session_current_id())
            seen.append(b.agent_session_current_id())
        assert seen == ["inner", None, "outer", "outer"]
        assert b.agent_session_current_id() is None


class TestReset:
    @pytest.mark.req("S3.reset.wipes_history", "S3.reset.keeps_id_and_subscribers", "S3.session.owns_lifecycle")
    def test_history_goes_and_id_lineage_pins_and_subscribers_stay(self) -> None:
        s = b.agent_session_open("s")
        session = api.innermost().sessions.get(s)
        heard: list[str] = []
        told = b.agent_subscribe(s, lambda event: heard.append(event["text"]))
        say(s, "one", "two")
        child = b.agent_session_fork(s)
        session.set_system_prompt("x")
        session.claim_tool_format("native")
        session.pin(model="m")
        b.agent_session_set_scratchpad(s, {"facts": [1]})
        b.agent_session_compact(s, {"keep_last": 1})
        b.agent_session_reset(s)
        found = snapshot(s)
        assert (found["messages"], found["events"], found["length"], found["summary"]) == ([], [], 0, None)
        assert (found["system_prompt"], found["tool_format"], found["scratchpad"]) == (None, None, None)
        assert (found["scratchpad_version"], found["pinned_model"], found["child_ids"]) == (0, "m", [child])
        say(s, "three")
        assert contents(s) == ["three"] and len(snapshot(s)["events"]) == 1
        assert told.wait()
        assert [text for text in heard if text] == ["one", "two", "three"]
        assert contents(child) == ["one", "two"]


class TestScratchpad:
    @pytest.mark.req("S3.scratchpad.get", "S3.scratchpad.set_returns", "S3.scratchpad.clear_returns")
    def test_each_change_is_a_new_version(self) -> None:
        s = b.agent_session_open()
        assert b.agent_session_scratchpad(s) is None
        assert b.agent_session_set_scratchpad(s, {"a": 1}) == {"ok": True, "version": 1, "scratchpad": {"a": 1}}
        assert b.agent_session_set_scratchpad(s, {"a": 1}) == {"ok": True, "version": 2, "scratchpad": {"a": 1}}
        assert b.agent_session_scratchpad(s) == {"a": 1}
        assert b.agent_session_clear_scratchpad(s) == {"ok": True, "version": 3, "scratchpad": None}
        assert b.agent_session_scratchpad(s) is None

    @pytest.mark.req("S3.scratchpad.set_opts")
    def test_the_event_has_sizes_and_a_reason_but_no_content(self) -> None:
        s = b.agent_session_open()
        pad = {"goals": ["secret plan", "b"], "facts": {"x": 1}, "other": 1}
        b.agent_session_set_scratchpad(s, pad, {"source": "agent", "reason": "new goal", "metadata": {"turn": 3}})
        b.agent_session_clear_scratchpad(s, {"reason": "done"})
        events = snapshot(s)["events"]
        assert [event["kind"] for event in events] == ["agent_scratchpad", "agent_scratchpad"]
        assert events[0]["metadata"] == {
            "version": 1,
            "cleared": False,
            "counts": {"goals": 2, "open_items": 0, "facts": 1, "refs": 0},
            "source": "agent",
            "reason": "new goal",
            "metadata": {"turn": 3},
        }
        assert events[1]["metadata"]["reason"] == "done" and events[1]["metadata"]["cleared"]
        assert "secret plan" not in str(events)

    @pytest.mark.parametrize(
        "pad, opts, code",
        [
            ([], None, "invalid_params"),
            ("text", None, "invalid_params"),
            ({"x": "y" * 16_384}, None, "invalid_params"),
            ({"x": {1, 2}}, None, "invalid_json"),
            ({}, {"sauce": "x"}, "unknown_option"),
            ({}, {"source": 3}, "invalid_params"),
            ({}, "source", "invalid_params"),
        ],
    )
    def test_an_invalid_scratchpad_is_refused(self, pad: Any, opts: Any, code: str) -> None:
        s = b.agent_session_open()
        assert code_of(lambda: b.agent_session_set_scratchpad(s, pad, opts)) == code
        assert (b.agent_session_scratchpad(s), snapshot(s)["scratchpad_version"]) == (None, 0)
