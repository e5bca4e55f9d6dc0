"""Forks, lineage and cuts, by S3's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import mulligan.api as api
from mulligan import builtins as b
from tests.session.s3_functions import code_of, contents, say, snapshot

pytestmark = pytest.mark.usefixtures("opened")


class TestForking:
    @pytest.mark.req("S3.fork.copies_transcript", "S3.tour.fork_leaves_source", "S3.fork.sets_lineage")
    @pytest.mark.req("S3.lineage.parent_and_children")
    def test_a_child_has_the_transcript_and_goes_its_own_way(self) -> None:
        s = b.agent_session_open("s")
        say(s, "one", "two")
        b.agent_session_set_scratchpad(s, {"goals": ["g"]})
        api.innermost().sessions.get(s).pin(model="m")
        child = b.agent_session_fork(s)
        assert UUID(child).version == 7
        say(child, "what if")
        say(s, "on we go")
        assert contents(child) == ["one", "two", "what if"]
        assert contents(s) == ["one", "two", "on we go"]
        b.agent_session_set_scratchpad(child, {"goals": []})
        found = snapshot(child)
        assert (found["parent_id"], found["branched_at_event_index"], found["pinned_model"]) == ("s", None, "m")
        assert found["metadata"]["parent_session_id"] == "s"
        assert (b.agent_session_scratchpad(s), found["scratchpad_version"]) == ({"goals": ["g"]}, 2)
        assert snapshot(s)["child_ids"] == [child]

    def test_ids_of_shared_events_are_shared(self) -> None:
        s = b.agent_session_open("s")
        say(s, "one", "two")
        child = b.agent_session_fork(s)
        assert [event["id"] for event in snapshot(child)["events"]] == [event["id"] for event in snapshot(s)["events"]]

    @pytest.mark.req("S3.fork.dst_names_child", "HS3.fork_into_existing")
    def test_a_fork_gets_the_wanted_id_unless_it_is_in_use(self) -> None:
        s, other = b.agent_session_open("s"), b.agent_session_open("other")
        say(other, "mine")
        assert b.agent_session_fork(s, "named") == "named"
        b.agent_session_close("named")
        for taken in ("other", "s", "named"):
            assert code_of(lambda taken=taken: b.agent_session_fork(s, taken)) == "session_exists"  # type: ignore[misc]
            assert code_of(lambda taken=taken: b.agent_session_fork_at(s, 0, taken)) == "session_exists"  # type: ignore[misc]
        assert contents(other) == ["mine"]

    @pytest.mark.req("S3.fork.no_subscribers", "D11.fork_does_not_copy")
    def test_subscribers_and_redo_do_not_go_along(self, work: Path) -> None:
        s = b.agent_session_open("s")
        session = api.innermost().sessions.get(s)
        heard: list[str] = []
        told = b.agent_subscribe(s, lambda event: heard.append(event["text"]) if event["text"] else None)
        with session.call("c") as call:
            call.write_file("a.txt", "x")
        session.undo()
        child = b.agent_session_fork(s)
        say(child, "only here")
        say(s, "there")
        assert told.wait() and heard == ["there"]
        assert (snapshot(child)["redo_checkpoint_count"], snapshot(child)["live_clients"]) == (0, [])

    @pytest.mark.req("S3.fork_at.keeps_first", "S3.fork_at.records_branch_index", "S3.lineage.fork_at_same")
    @pytest.mark.req("D11.cuts_store_what_was_asked")
    @pytest.mark.parametrize("keep, kept, index", [(0, 0, 0), (1, 1, 1), (2, 2, 3), (3, 3, 4), (4, 3, 5), (99, 3, 5)])
    def test_fork_at_keeps_exactly_the_first_and_counts_events(self, keep: int, kept: int, index: int) -> None:
        s = b.agent_session_open("s")
        say(s, "one")
        b.agent_session_set_scratchpad(s, {})
        say(s, "two", "three")
        b.agent_session_clear_scratchpad(s)
        child = b.agent_session_fork_at(s, keep)
        found = snapshot(child)
        assert contents(child) == ["one", "two", "three"][:kept]
        assert found["branched_at_event_index"] == index
        assert [event["id"] for event in found["events"]] == [event["id"] for event in snapshot(s)["events"]][:index]
        assert found["parent_id"] == "s" and child in snapshot(s)["child_ids"]

    @pytest.mark.req("D11.branch_index_counts_events")
    def test_the_index_counts_inherited_events_too(self) -> None:
        s = b.agent_session_open("s")
        b.agent_session_set_scratchpad(s, {})
        say(s, "one", "two")
        child = b.agent_session_fork_at(s, 1)
        b.agent_session_set_scratchpad(child, {"x": 1})
        say(child, "three")
        grandchild = b.agent_session_fork_at(child, 2)
        assert snapshot(grandchild)["branched_at_event_index"] == 4
        assert len(snapshot(grandchild)["events"]) == 4
        assert snapshot(b.agent_session_fork_at(grandchild, 1))["branched_at_event_index"] == 2

    @pytest.mark.parametrize("keep", [-1, 1.0, "1", None, True])
    def test_a_count_is_a_whole_number_of_zero_or_more(self, keep: Any) -> None:
        s = b.agent_session_open("s")
        assert code_of(lambda: b.agent_session_fork_at(s, keep)) == "invalid_params"
        assert snapshot(s)["child_ids"] == []

    @pytest.mark.req("D11.cuts_store_what_was_asked")
    def test_a_cut_inside_a_tool_exchange_is_kept_as_asked(self) -> None:
        s = b.agent_session_open("s")
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
        result = {"role": "tool", "tool_call_id": "c", "content": "42"}
        for message in ({"role": "user", "content": "go"}, call, result):
            b.agent_session_inject(s, message)
        assert snapshot(b.agent_session_fork_at(s, 2))["messages"][-1] == call
        assert b.agent_session_trim(s, 1) == 1
        assert snapshot(s)["messages"] == [result]


class TestAncestry:
    @pytest.mark.req("S3.ancestry.fields", "S3.lineage.walks_to_root")
    def test_it_walks_up_to_the_root(self) -> None:
        s = b.agent_session_open("s")
        a = b.agent_session_fork(s, "a")
        c = b.agent_session_fork_at(a, 0, "c")
        other = b.agent_session_fork(s, "b")
        assert b.agent_session_ancestry(s) == {"parent_id": None, "child_ids": [a, other], "root_id": "s"}
        assert b.agent_session_ancestry(a) == {"parent_id": "s", "child_ids": [c], "root_id": "s"}
        assert b.agent_session_ancestry(c) == {"parent_id": "a", "child_ids": [], "root_id": "s"}

    def test_through_parents_that_are_closed(self) -> None:
        s = b.agent_session_open("s")
        b.agent_session_fork(b.agent_session_fork(s, "a"), "c")
        b.agent_session_close("a")
        assert b.agent_session_ancestry("c") == {"parent_id": "a", "child_ids": [], "root_id": "s"}
        assert b.agent_session_ancestry(s) == {"parent_id": None, "child_ids": ["a"], "root_id": "s"}


class TestCutting:
    @pytest.mark.req("S3.trim.keeps_last", "S3.trim.returns_kept")
    @pytest.mark.parametrize("keep, kept", [(0, []), (2, ["two", "three"]), (3, None), (9, None)])
    def test_trim_keeps_the_last(self, keep: int, kept: list[str] | None) -> None:
        s = b.agent_session_open()
        say(s, "one", "two", "three")
        wanted = ["one", "two", "three"] if kept is None else kept
        assert b.agent_session_trim(s, keep) == len(wanted)
        assert contents(s) == wanted
        assert b.agent_session_length(s) == len(wanted)
        say(s, "four")
        assert contents(s) == [*wanted, "four"]

    @pytest.mark.req("S3.loud.negative_keep_last")
    @pytest.mark.parametrize("keep", [-1, -100, "2", 1.5, None, True])
    def test_a_negative_count_is_refused(self, keep: Any) -> None:
        s = b.agent_session_open()
        say(s, "one")
        assert code_of(lambda: b.agent_session_trim(s, keep)) == "invalid_params"
        assert code_of(lambda: b.agent_session_compact(s, {"keep_last": keep or -1})) == "invalid_params"
        assert contents(s) == ["one"]

    @pytest.mark.req("HS4.trim_keeps_audit", "D11.compaction_keeps_journal")
    def test_trim_truncate_and_compact_lose_no_event(self) -> None:
        s = b.agent_session_open()
        say(s, *(str(number) for number in range(8)))
        b.agent_session_set_scratchpad(s, {})
        before = snapshot(s)["events"]
        b.agent_session_trim(s, 6)
        b.agent_session_truncate(s, 5)
        b.agent_session_compact(s, {"keep_last": 2})
        after = snapshot(s)["events"]
        assert after[: len(before)] == before
        assert [event["kind"] for event in after[len(before) :]] == ["compaction"]

    def test_truncate_keeps_the_first_and_says_where_that_ends(self) -> None:
        s = b.agent_session_open("s")
        say(s, "one", "two", "three")
        tip = api.innermost().sessions.get(s).message_ids()[1]
        assert b.agent_session_truncate(s, 2) == {
            "kept_turn_count": 2,
            "removed_turn_count": 1,
            "new_tip_turn_id": tip,
        }
        assert contents(s) == ["one", "two"]
        assert b.agent_session_truncate(s, 5)["removed_turn_count"] == 0
        assert b.agent_session_truncate(s, 0) == {
            "kept_turn_count": 0,
            "removed_turn_count": 2,
            "new_tip_turn_id": None,
        }
