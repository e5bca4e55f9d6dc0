"""Sessions from transcript files: three formats of our own, and those of other agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.api import Mulligan
from mulligan.builtins import agent_session_seed_from_jsonl
from mulligan.session.importers import ImportOptions, UnreadableFileError, read_seed, reason_to_refuse, select_messages
from mulligan.values.errors import MulliganError

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "Release it."}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "make"}'}}
ASKS: Json = {"role": "assistant", "content": "On it.", "tool_calls": [CALL]}
RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "done"}
SAYS: Json = {"role": "assistant", "content": "Released."}
TALK = [USER, ASKS, RESULT, SAYS]

EVENTS: list[Json] = [
    {"type": "system_prompt", "content": "Be brief."},
    {"type": "provider_call_request", "provider": "mock", "model": "m-1", "tool_format": "native"},
    *({"type": "message", "message": one} for one in TALK),
]
SNAPSHOTS: list[Json] = [
    {"type": "provider_call_request", "provider": "old", "model": "m-0", "messages": [USER]},
    {"type": "provider_call_response", "provider": "other", "text": "On it.", "tool_calls": [CALL]},
    {
        "type": "provider_call_request",
        "request_snapshot": {
            "messages": [USER, ASKS, RESULT],
            "provider": "mock",
            "model": "m-1",
            "system": "Be brief.",
        },
        "tool_format": "native",
    },
    {"type": "provider_call_response", "response": {"content": "Released."}},
]
RESPONSES: list[Json] = [
    {"type": "provider_call_response", "provider": "mock", "model": "m-1", "text": "On it.", "tool_calls": [CALL]},
    {"type": "provider_call_response", "text": "Released."},
]


NAMES = [
    *("type", "kind", "role", "content", "message", "messages", "results", "uuid", "sessionId", "payload"),
    *("$set", "$rewindTo", "id", "toolCalls"),
]
DOCUMENTS = st.recursive(
    st.none() | st.integers(-9, 9) | st.sampled_from([*NAMES, "user", "assistant", "response_item", "tool_results"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
)


@pytest.fixture
def seed(opened: Mulligan, tmp_path: Path) -> Any:
    """Seed from these lines, by S3's own name."""

    def seeded(lines: list[Any] | str, **opts: Any) -> Json:
        text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
        path = tmp_path / "llm_transcript.jsonl"
        path.write_text(text, "utf-8")
        return agent_session_seed_from_jsonl(str(path), opts)

    return seeded


class TestFormats:
    @pytest.mark.req(
        "S3.seed.creates_session",
        "S3.seed.prompt_visible_history",
        "S3.seed_result.ok",
        "S3.seed_result.session_id",
        "S3.seed_result.turns_loaded",
        "S3.seed_result.messages_loaded",
        "S3.seed_result.source_records",
        "S3.seed_result.source_format",
        "S3.seed_result.partial",
        "S3.seed_result.truncated",
        "S3.seed_result.provider",
        "S3.seed_result.model",
        "S3.seed_result.tool_format",
        "S3.seed.source_formats",
    )
    def test_lines_that_are_messages(self, opened: Mulligan, seed: Any) -> None:
        done = seed(EVENTS)
        session = done.pop("session_id")
        assert done.pop("source")["kind"] == "mulligan_jsonl"
        assert done == {
            "ok": True,
            "turns_loaded": 4,
            "messages_loaded": 4,
            "source_records": 6,
            "source_format": "message_events",
            "partial": False,
            "truncated": False,
            "provider": "mock",
            "model": "m-1",
            "tool_format": "native",
        }
        assert opened.sessions.get(session).messages() == TALK
        view = opened.sessions.snapshot(session)
        assert view is not None
        assert (view["system_prompt"], view["tool_format"]) == ("Be brief.", "native")

    @pytest.mark.req("S3.seed.source_formats", "S3.seed.prompt_visible_history", "S3.seed_result.source_format")
    def test_requests_that_each_hold_the_whole_list(self, opened: Mulligan, seed: Any) -> None:
        done = seed(SNAPSHOTS)
        assert (done["source_format"], done["provider"], done["model"], done["tool_format"]) == (
            "request_snapshots",
            "mock",
            "m-1",
            "native",
        )
        assert opened.sessions.get(done["session_id"]).messages() == TALK

    @pytest.mark.req(
        "S3.seed.validate_default_true", "S3.seed.responses_only_rejected", "S3.seed_result.error", "S3.seed_result.ok"
    )
    def test_a_file_with_only_answers_is_refused(self, opened: Mulligan, seed: Any) -> None:
        done = seed(RESPONSES)
        assert (done["ok"], set(done)) == (False, {"ok", "error"})
        assert "only the answers of a provider" in done["error"]
        assert opened.sessions.list() == []

    @pytest.mark.req("S3.seed.responses_only_unvalidated", "S3.seed_result.partial", "S3.seed.source_formats")
    def test_a_file_with_only_answers_is_imported_without_validation(self, opened: Mulligan, seed: Any) -> None:
        done = seed(RESPONSES, validate=False)
        assert (done["ok"], done["source_format"], done["partial"], done["messages_loaded"]) == (
            True,
            "provider_responses_only",
            True,
            2,
        )
        assert opened.sessions.get(done["session_id"]).messages() == [ASKS, SAYS]

    def test_a_message_may_lie_in_its_record(self) -> None:
        lines: list[Json] = [
            {"kind": "message", "role": "user", "text": "hello"},
            {"kind": "message", "role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "think"},
            {"kind": "tool_result", "role": "tool", "tool_call_id": "c1", "name": "run", "content": "done"},
            {"kind": "tool_result", "content": "without a role"},
        ]
        assert self._messages(lines) == [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "think"},
            {"role": "tool", "content": "done", "name": "run", "tool_call_id": "c1"},
            {"role": "tool_result", "content": "without a role"},
        ]

    def test_tool_results_come_as_messages_or_one_by_one(self) -> None:
        results = [
            {"tool_name": "a", "observation": "1"},
            {"name": "b", "rendered_result": "2"},
            {"name": "c", "output": "3"},
            {"name": "d", "content": "4", "tool_call_id": "c4"},
        ]
        lines: list[Json] = [
            {"type": "tool_results", "messages": [RESULT]},
            {"type": "tool_results", "results": results},
        ]
        assert self._messages(lines) == [
            RESULT,
            {"role": "tool", "name": "a", "content": "1"},
            {"role": "tool", "name": "b", "content": "2"},
            {"role": "tool", "name": "c", "content": "3"},
            {"role": "tool", "name": "d", "content": "4", "tool_call_id": "c4"},
        ]

    def test_only_messages_with_a_role_and_content_are_imported(self) -> None:
        odd = [{}, {"role": " ", "content": "x"}, {"role": "user"}, {"role": "user", "content": ""}, {"role": 3}]
        lines: list[Json] = [{"type": "message", "message": one} for one in odd]
        assert self._messages([*lines, {"type": "message", "message": USER}]) == [USER]

    def _messages(self, lines: list[Json]) -> list[Json]:
        return read_seed("\n".join(map(json.dumps, lines)).encode()).messages


class TestOptions:
    @pytest.mark.req("S3.seed.truncate_to_last", "S3.seed_result.truncated")
    def test_only_the_last_messages(self, opened: Mulligan, seed: Any) -> None:
        done = seed(EVENTS, truncate_to_last=2)
        assert (done["truncated"], done["messages_loaded"]) == (True, 2)
        assert opened.sessions.get(done["session_id"]).messages() == [RESULT, SAYS]
        assert seed(EVENTS, truncate_to_last=40)["truncated"] is False

    @pytest.mark.req("S3.seed.truncate_to_last")
    def test_none_at_all_if_that_is_asked_for(self, seed: Any) -> None:
        done = seed(EVENTS, truncate_to_last=0)
        assert (done["ok"], done["messages_loaded"], done["truncated"]) == (True, 0, True)

    @pytest.mark.req("S3.seed.drop_tool_calls")
    def test_only_what_was_said(self, opened: Mulligan, seed: Any) -> None:
        done = seed(EVENTS, drop_tool_calls=True)
        assert opened.sessions.get(done["session_id"]).messages() == [
            USER,
            {"role": "assistant", "content": "On it."},
            SAYS,
        ]
        assert done["truncated"] is False
        assert "tool_calls" in opened.sessions.get(seed(EVENTS)["session_id"]).messages()[1]

    @pytest.mark.req("S3.seed.drop_tool_calls")
    def test_blocks_that_are_no_text_go_and_so_do_messages_left_empty(self) -> None:
        blocks = [{"type": "tool_use", "id": "a", "name": "x", "input": {}}]
        result = [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]
        lines = [
            {"type": "message", "message": {"role": "assistant", "content": [*blocks, {"type": "text", "text": "hm"}]}},
            {"type": "message", "message": {"role": "assistant", "content": blocks}},
            {"type": "message", "message": {"role": "user", "content": result}},
        ]
        read = read_seed("\n".join(map(json.dumps, lines)).encode())
        assert select_messages(read, ImportOptions(drop_tool_calls=True)) == [
            {"role": "assistant", "content": [{"type": "text", "text": "hm"}]}
        ]

    def test_tool_calls_go_before_the_last_are_counted(self) -> None:
        read = read_seed("\n".join(map(json.dumps, EVENTS)).encode())
        assert select_messages(read, ImportOptions(drop_tool_calls=True, truncate_to_last=2))[0]["content"] == "On it."

    @pytest.mark.req("S3.seed.rename_session")
    def test_the_new_session_has_the_wanted_id_unless_it_is_taken(self, opened: Mulligan, seed: Any) -> None:
        assert seed(EVENTS, rename_session="audit-recovery")["session_id"] == "audit-recovery"
        again = seed(EVENTS, rename_session="audit-recovery")
        assert (again["ok"], "already" in again["error"]) == (False, True)
        assert opened.sessions.get("audit-recovery").length() == 4

    @pytest.mark.req("S3.seed.provider_model_guard")
    @pytest.mark.parametrize("lines", [EVENTS, SNAPSHOTS], ids=["events", "snapshots"])
    def test_provider_and_model_must_be_those_on_record(self, seed: Any, lines: list[Json]) -> None:
        assert seed(lines, provider="mock", model="m-1")["ok"] is True
        assert "provider" in seed(lines, provider="other", model="other")["error"]
        assert "model" in seed(lines, provider="mock", model="other")["error"]
        assert seed(lines, provider="other", validate=False)["ok"] is True

    @pytest.mark.req("S3.session.unknown_input_raises")
    @pytest.mark.parametrize(
        "opts",
        [
            {"truncate_last": 3},
            {"truncate_to_last": "3"},
            {"truncate_to_last": -1},
            {"truncate_to_last": True},
            {"drop_tool_calls": 1},
            {"validate": "no"},
            {"rename_session": 7},
            {"rename_session": " "},
            {"source_agent": "someone"},
            {"provider": 1},
        ],
    )
    def test_wrong_options_raise(self, seed: Any, opts: Json) -> None:
        with pytest.raises(MulliganError) as caught:
            seed(EVENTS, **opts)
        assert caught.value.code in ("unknown_option", "invalid_params", "invalid_id")

    def test_where_it_came_from_is_reported_and_kept(self, opened: Mulligan, seed: Any) -> None:
        done = seed(EVENTS, source_label="run 7", source_session_id="s-1", source_provenance={"host": "ci"})
        assert done["source"] == {
            "schema": "mulligan.session_source.v1",
            "kind": "mulligan_jsonl",
            "agent": None,
            "session_id": "s-1",
            "label": "run 7",
            "provenance": {"host": "ci"},
        }

    def test_a_long_transcript_may_be_recommended_for_compaction(self, seed: Any) -> None:
        long = [{"type": "message", "message": {"role": "user", "content": "x" * 200_000}}]
        assert seed(long, recommend_compaction=True)["compaction_recommended"] is True
        assert seed(EVENTS, recommend_compaction=True)["compaction_recommended"] is False
        assert "compaction_recommended" not in seed(EVENTS)


class TestValidation:
    @pytest.mark.req("S3.seed_result.error")
    @pytest.mark.parametrize(
        ("lines", "opts", "words"),
        [
            ([], {}, "no message"),
            ([{"type": "note"}], {"provider": "x"}, "no message"),
            ([{"type": "message", "message": RESULT}], {"drop_tool_calls": True, "provider": "x"}, "Nothing is left"),
            (RESPONSES, {"provider": "x", "model": "x"}, "only the answers of a provider"),
            (EVENTS, {"provider": "x", "model": "x"}, "provider"),
            (EVENTS, {"model": "x"}, "model"),
        ],
    )
    def test_the_first_thing_that_is_wrong_is_reported(
        self, seed: Any, lines: list[Json], opts: Json, words: str
    ) -> None:
        done = seed(lines, **opts)
        assert (done["ok"], words in done["error"]) == (False, True)

    @pytest.mark.parametrize(
        ("text", "words"),
        [("\n\n{broken", "Line 3 is not valid JSON"), ('{"type":"message"}\n[1]\n', "Line 2 is not a JSON object")],
    )
    def test_a_bad_line_is_reported_by_its_number_and_not_shown(self, seed: Any, text: str, words: str) -> None:
        done = seed(text)
        assert done["ok"] is False
        assert words in done["error"]
        assert "broken" not in done["error"]

    @pytest.mark.parametrize(
        ("path", "opts"), [("\ud800", None), ("", None), (7, None), ("x", "opts"), ("x", 7), ("x", [1])]
    )
    def test_an_invalid_path_or_option_raises(self, opened: Mulligan, path: Any, opts: Any) -> None:
        with pytest.raises(MulliganError) as caught:
            opened.sessions.seed_from_jsonl(path, opts)
        assert caught.value.code == "invalid_params"

    def test_a_file_that_is_not_there_is_an_answer(self, opened: Mulligan, tmp_path: Path) -> None:
        done = agent_session_seed_from_jsonl(str(tmp_path / "nothing.jsonl"))
        assert (done["ok"], "cannot be read" in done["error"]) == (False, True)
        assert agent_session_seed_from_jsonl(str(tmp_path))["ok"] is False

    def test_a_number_without_a_canonical_form_gives_an_answer_and_no_half_session(
        self, opened: Mulligan, seed: Any
    ) -> None:
        done = seed('{"type":"message","message":{"role":"user","content":"a","n":99999999999999999999}}\n')
        assert done["ok"] in (True, False)
        assert len(opened.sessions.list()) == int(done["ok"])

    @given(st.lists(DOCUMENTS, max_size=6), st.sampled_from([None, "claude", "codex", "gemini"]))
    def test_any_lines_give_messages_or_a_reason(self, lines: list[Any], agent: str | None) -> None:
        data = "\n".join(map(json.dumps, lines)).encode()
        try:
            read = read_seed(data, agent)
        except UnreadableFileError:
            return
        assert all(isinstance(one["role"], str) and one["role"].strip() for one in read.messages)
        assert (reason_to_refuse(read, read.messages, ImportOptions()) is None) <= bool(read.messages)
