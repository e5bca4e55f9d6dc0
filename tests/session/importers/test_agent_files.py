"""Session files of other agents: what the model saw, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.agents.loop import Loop, LoopResult
from mulligan.api import Mulligan
from mulligan.builtins import agent_loop, agent_session_seed_from_jsonl
from mulligan.session.importers import read_seed
from mulligan.session.messages import for_model, paired
from mulligan.values.errors import MulliganError

Json = dict[str, Any]
FIXTURES = Path(__file__).parent / "fixtures"


def texts(messages: list[Json]) -> list[tuple[str, str]]:
    return [(one["role"], one["content"] if isinstance(one["content"], str) else "blocks") for one in messages]


class TestOtherAgents:
    """The files were written by the real programs, talking to a model on loopback; long texts in them are shortened."""

    @pytest.mark.req("D11.seed_other_agents")
    @pytest.mark.parametrize("named", [True, False], ids=["named", "recognised"])
    @pytest.mark.parametrize(
        ("agent", "provider", "model", "said"),
        [
            ("claude", "anthropic", "claude-opus-5-5", 6),
            ("codex", "mock", "mock", 8),
            ("gemini", "google", "gemini-2.5-flash", 7),
        ],
    )
    def test_a_session_file_becomes_a_session(
        self, opened: Mulligan, agent: str, provider: str, model: str, said: int, named: bool
    ) -> None:
        opts = {"source_agent": agent} if named else {}
        done = agent_session_seed_from_jsonl(str(FIXTURES / f"{agent}_session.jsonl"), opts)
        assert (done["ok"], done["provider"], done["model"], done["messages_loaded"]) == (True, provider, model, said)
        assert (done["source"]["kind"], done["source"]["agent"]) == ("external_agent_session", agent)
        assert done["source"]["session_id"]
        messages = opened.sessions.get(done["session_id"]).messages()
        pairs = paired(messages)
        assert [len(one) for one in pairs.answers.values()] == [1]
        assert all(answer is not None for answers in pairs.answers.values() for answer in answers)
        assert pairs.orphans == {}
        assert "# Toy" in json.dumps(messages)

    @pytest.mark.req("S3.seed.provider_works")
    @pytest.mark.parametrize(
        ("agent", "provider", "model"), [("claude", "Claude", None), ("gemini", "LiteLLM", "gemini/gemini-2.5-flash")]
    )
    def test_a_loop_runs_with_the_provider_that_a_session_file_names(
        self, opened: Mulligan, monkeypatch: pytest.MonkeyPatch, agent: str, provider: str, model: str | None
    ) -> None:
        made: list[Any] = []

        def started(loop: Loop, *_: object, **__: object) -> LoopResult:
            made.append(loop._provider)
            return LoopResult("s", "t")

        # The models themselves cannot be reached from a test; what is asked of them is tested with the providers.
        monkeypatch.setattr(Loop, "run", started)
        seeded = agent_session_seed_from_jsonl(str(FIXTURES / f"{agent}_session.jsonl"), {"source_agent": agent})
        agent_loop("go on", None, {"session_id": seeded["session_id"], "provider": seeded["provider"]})
        assert [type(one).__name__ for one in made] == [provider]
        assert model is None or made[0]._settings["model"] == model

    @pytest.mark.req("S3.seed.provider_works")
    def test_a_provider_that_does_not_exist_is_refused_and_the_known_ones_are_listed(self, opened: Mulligan) -> None:
        with pytest.raises(MulliganError) as caught:
            agent_loop("go on", None, {"provider": "oss"})
        assert caught.value.code == "no_provider"
        assert caught.value.details["known"] == ["mock", "openai", "litellm", "claude", "anthropic", "google"]

    def test_claude_answers_of_several_lines_are_one_message(self) -> None:
        read = read_seed((FIXTURES / "claude_session.jsonl").read_bytes())
        assert texts(read.messages) == [
            ("user", "what does the readme say?"),
            ("assistant", "blocks"),
            ("user", "blocks"),
            ("assistant", "blocks"),
            ("user", "thanks"),
            ("assistant", "blocks"),
        ]
        assert [block["type"] for block in read.messages[1]["content"]] == ["text", "tool_use"]
        assert read.system_prompt == "You are an agent.\n\nWork in /home/dev/project."
        assert read.provenance["cwd"] == "/home/dev/project"

    def test_codex_reasoning_and_calls_go_with_the_answer(self) -> None:
        read = read_seed((FIXTURES / "codex_session.jsonl").read_bytes())
        answer = read.messages[3]
        assert (answer["reasoning"], answer["tool_calls"][0]["function"]["name"]) == (
            "Look at the file first.",
            "exec_command",
        )
        assert texts(read.messages)[-3:] == [
            ("assistant", "It says: Toy."),
            ("user", "thanks"),
            ("assistant", "You are welcome."),
        ]
        assert read.system_prompt == "You are a coding agent."

    def test_gemini_results_count_once(self) -> None:
        read = read_seed((FIXTURES / "gemini_session.jsonl").read_bytes())
        assert texts(read.messages)[1:] == [
            ("user", "what does the readme say?"),
            ("assistant", "Let me look."),
            ("tool", "# Toy\n"),
            ("assistant", "It says: Toy."),
            ("user", "thanks"),
            ("assistant", "You are welcome."),
        ]
        assert read.messages[2]["reasoning"] == "Looking at the file first."

    def test_a_last_line_that_is_still_being_written_is_left_out(self, tmp_path: Path, opened: Mulligan) -> None:
        path = tmp_path / "live.jsonl"
        path.write_bytes((FIXTURES / "claude_session.jsonl").read_bytes() + b'{"type":"user","mess')
        done = agent_session_seed_from_jsonl(str(path))
        assert (done["ok"], done["partial"], done["messages_loaded"]) == (True, True, 6)


def claude_line(uuid: str, parent: str | None, kind: str = "user", **more: Any) -> Json:
    message = more.pop("message", {"role": kind, "content": uuid})
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def said_by(lines: list[Json]) -> list[Any]:
    return [one["content"] for one in read_seed("\n".join(map(json.dumps, lines)).encode()).messages]


class TestClaudeTrees:
    def test_a_branch_that_was_rewound_is_not_seen(self) -> None:
        lines = [claude_line("a", None), claude_line("b", "a"), claude_line("c", "b"), claude_line("d", "a")]
        assert said_by(lines) == ["a", "d"]

    def test_a_compaction_begins_what_counts(self) -> None:
        boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "x", "parentUuid": None, "sessionId": "s"}
        summary = claude_line("sum", "x", isCompactSummary=True, isVisibleInTranscriptOnly=True)
        lines = [claude_line("a", None), claude_line("b", "a"), boundary, summary, claude_line("c", "sum")]
        assert said_by(lines) == ["sum", "c"]

    def test_results_of_tools_side_by_side_are_all_there(self) -> None:
        def use(uuid: str, parent: str, tool: str) -> Json:
            block = {"type": "tool_use", "id": tool, "name": "x", "input": {}}
            return claude_line(uuid, parent, "assistant", message={"id": "m", "role": "assistant", "content": [block]})

        def result(uuid: str, parent: str, tool: str) -> Json:
            block = {"type": "tool_result", "tool_use_id": tool, "content": tool}
            return claude_line(uuid, parent, message={"role": "user", "content": [block]})

        lines = [claude_line("a", None), use("b", "a", "t1"), use("c", "b", "t2"), result("d", "b", "t1")]
        lines += [result("e", "c", "t2"), claude_line("f", "e")]
        first, calls, results, last = said_by(lines)
        assert (first, last) == ("a", "f")
        assert [block["id"] for block in calls] == ["t1", "t2"]
        assert [block["tool_use_id"] for block in results] == ["t1", "t2"]

    def test_side_chains_errors_and_notes_to_the_reader_are_not_seen(self) -> None:
        lines = [
            claude_line("a", None),
            claude_line("b", "a", isSidechain=True),
            claude_line("c", "a", "assistant", isApiErrorMessage=True),
            claude_line("d", "c", "assistant", message={"role": "assistant", "model": "<synthetic>", "content": "x"}),
            claude_line("e", "d", isVisibleInTranscriptOnly=True),
            claude_line("f", "e"),
        ]
        assert said_by(lines) == ["a", "f"]

    def test_a_circle_of_parents_ends(self) -> None:
        assert said_by([claude_line("a", "b"), claude_line("b", "a")]) == ["a", "b"]


META = {"type": "session_meta", "payload": {"id": "s", "model_provider": "p", "base_instructions": {"text": "sys"}}}


def codex_item(**payload: Any) -> Json:
    return {"type": "response_item", "payload": payload}


def codex_says(role: str, text: str) -> Json:
    return codex_item(type="message", role=role, content=[{"type": "input_text", "text": text}])


class TestCodexItems:
    def test_a_compaction_replaces_all_before_it(self) -> None:
        new = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "summary"}]}]
        compacted = {"type": "compacted", "payload": {"message": "short", "replacement_history": new}}
        assert said_by([META, codex_says("user", "a"), compacted, codex_says("user", "b")]) == ["summary", "b"]
        older = {"type": "compacted", "payload": {"message": "short"}}
        assert said_by([META, codex_says("user", "a"), older]) == ["short"]

    @pytest.mark.parametrize(
        ("turns", "left"),
        [(1, ["<environment_context>", "a", "b"]), (2, ["<environment_context>"]), (9, ["<environment_context>"])],
    )
    def test_a_rollback_takes_whole_turns(self, turns: int, left: list[str]) -> None:
        talk = [codex_says("user", "<environment_context>"), codex_says("user", "a"), codex_says("assistant", "b")]
        talk += [codex_says("user", "c"), codex_says("assistant", "d")]
        back = {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": turns}}
        assert said_by([META, *talk, back]) == left

    def test_every_kind_of_call_and_output_is_read(self) -> None:
        lines = [
            META,
            codex_item(type="local_shell_call", call_id="1", action={"command": ["ls"]}),
            codex_item(type="function_call_output", call_id="1", output={"content": "a", "success": True}),
            codex_item(type="custom_tool_call", call_id="2", name="apply_patch", input="*** Begin"),
            codex_item(type="custom_tool_call_output", call_id="2", output=[{"type": "input_text", "text": "ok"}]),
        ]
        messages = read_seed("\n".join(map(json.dumps, lines)).encode()).messages
        assert [one.get("tool_calls", [{}])[0].get("function") for one in messages] == [
            {"name": "local_shell", "arguments": '{"command":["ls"]}'},
            None,
            {"name": "apply_patch", "arguments": "*** Begin"},
            None,
        ]
        assert [one["content"] for one in messages if one["role"] == "tool"] == ["a", "ok"]

    def test_files_of_early_versions_have_no_envelopes(self) -> None:
        first = {"id": "s", "timestamp": "2025-05-01T00:00:00Z", "instructions": "sys"}
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
        read = read_seed("\n".join(map(json.dumps, [first, item])).encode())
        assert (read.agent, read.system_prompt, said_by([first, item])) == ("codex", "sys", ["a"])


HEAD: Json = {"sessionId": "s", "projectHash": "h", "startTime": "2026-01-01T00:00:00Z"}


class TestGeminiFiles:
    def says(self, identifier: str, **more: Any) -> Json:
        return {"id": identifier, "type": "user", "content": [{"text": identifier}], **more}

    def test_a_later_line_replaces_the_message_with_its_id(self) -> None:
        again = self.says("a", content="other")
        assert said_by([HEAD, self.says("a"), self.says("b"), again]) == ["other", "b"]

    def test_a_rewind_takes_a_message_and_all_after_it(self) -> None:
        talk = [HEAD, self.says("a"), self.says("b"), self.says("c")]
        assert said_by([*talk, {"$rewindTo": "b"}, self.says("d")]) == ["a", "d"]
        assert said_by([*talk, {"$rewindTo": "unknown"}, self.says("d")]) == ["d"]

    def test_setting_the_messages_replaces_them_all(self) -> None:
        assert said_by([HEAD, self.says("a"), {"$set": {"messages": [self.says("b")]}}]) == ["b"]

    def test_messages_for_the_screen_alone_are_left_out(self) -> None:
        assert said_by([HEAD, self.says("a"), self.says("b", type="info"), self.says("c", type="error")]) == ["a"]

    def test_files_of_early_versions_are_one_document(self) -> None:
        call = {"id": "t", "name": "x", "args": {}, "result": [{"functionResponse": {"response": {"error": "no"}}}]}
        answer = {"id": "m", "type": "gemini", "content": "hm", "toolCalls": [call], "model": "g"}
        whole = json.dumps({**HEAD, "messages": [self.says("a"), answer]}, indent=2)
        read = read_seed(whole.encode())
        assert (read.agent, read.model) == ("gemini", "g")
        assert texts(read.messages) == [("user", "a"), ("assistant", "hm"), ("tool", "no")]


ODD: list[Any] = [None, 1, "x", [], {}, [1], {"type": "text"}, [{"type": "tool_use", "id": []}], {"id": {}}]


def damaged(value: Any, odd: st.DataObject, rate: int) -> Any:
    """The value with some of its members replaced by what nobody expects there."""
    if isinstance(value, dict):
        return {key: _maybe(item, odd, rate) for key, item in value.items()}
    return [_maybe(item, odd, rate) for item in value] if isinstance(value, list) else value


def _maybe(item: Any, odd: st.DataObject, rate: int) -> Any:
    if odd.draw(st.integers(0, rate)) == 1:
        return odd.draw(st.sampled_from(ODD))
    return damaged(item, odd, rate)


@pytest.mark.parametrize("agent", ["claude", "codex", "gemini"])
@given(data=st.data())
def test_whatever_is_wrong_with_a_file_what_is_left_can_be_sent(agent: str, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in (FIXTURES / f"{agent}_session.jsonl").read_text().splitlines()]
    first = data.draw(st.integers(0, len(lines) - 1))
    lines[first : first + 2] = [damaged(line, data, 12) for line in lines[first : first + 2]]
    seed = read_seed("\n".join(map(json.dumps, lines)).encode(), agent)
    for_model(seed.messages, "openai")
    for_model(seed.messages, "anthropic")
