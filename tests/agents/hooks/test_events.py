"""What each agent's hooks say, word for word as they say it, and what is understood."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.agents.hooks.recorder import HookEvent, parse_event
from mulligan.values.errors import MulliganError

CLAUDE = {
    "session_id": "95b7c3c5",
    "transcript_path": "/home/a/.claude/projects/-p/95b7c3c5.jsonl",
    "cwd": "/p",
    "prompt_id": "deffc6a1",
    "permission_mode": "default",
    "effort": {"level": "medium"},
    "hook_event_name": "PreToolUse",
    "tool_name": "Edit",
    "tool_input": {"file_path": "/p/a.txt", "old_string": "two", "new_string": "TWO", "replace_all": False},
    "tool_use_id": "toolu_1",
}
CODEX = {
    "session_id": "01a1e1a8",
    "turn_id": "01a1e1a9",
    "transcript_path": "/home/a/.codex/sessions/rollout.jsonl",
    "cwd": "/p",
    "hook_event_name": "PostToolUse",
    "model": "m",
    "tool_name": "Bash",
    "tool_input": {"command": "pwd; false"},
    "tool_response": "/p\n",
    "tool_use_id": "call_2",
}
GEMINI = {
    "session_id": "f09c958e",
    "transcript_path": "/home/a/.gemini/tmp/p/chats/s.jsonl",
    "cwd": "/p",
    "hook_event_name": "BeforeAgent",
    "timestamp": "2026-11-16T00:01:01.974Z",
    "prompt": "please do it",
}


def parsed(agent: str, body: dict[str, Any]) -> HookEvent:
    found = parse_event(agent, json.dumps(body).encode())
    assert found is not None
    return found


def test_events_of_claude_code_are_parsed() -> None:
    found = parsed("claude", CLAUDE)
    assert (found.kind, found.session, found.turn, found.label) == ("pre", "95b7c3c5", "deffc6a1", "toolu_1")
    assert (found.tool, found.paths(), found.transcript) == ("Edit", ["/p/a.txt"], CLAUDE["transcript_path"])


def test_a_failed_tool_of_claude_code_is_parsed() -> None:
    body = {**CLAUDE, "hook_event_name": "PostToolUseFailure", "error": "Exit code 1", "is_interrupt": False}
    found = parsed("claude", body)
    assert (found.kind, found.failed) == ("failure", "Exit code 1")


def test_events_of_codex_are_parsed() -> None:
    found = parsed("codex", CODEX)
    assert (found.kind, found.turn, found.label, found.command) == ("post", "01a1e1a9", "call_2", "pwd; false")
    assert found.paths() is None


def test_a_patch_of_codex_names_its_files() -> None:
    patch = "*** Begin Patch\n*** Update File: a.txt\n*** Move to: b/c.txt\n@@\n-x\n+y\n*** Add File: /q/d\n+z\n"
    found = parsed("codex", {**CODEX, "tool_name": "apply_patch", "tool_input": {"command": patch}})
    assert (found.paths(), found.command) == (["/p/a.txt", "/p/b/c.txt", "/q/d"], None)


def test_events_of_gemini_cli_are_parsed() -> None:
    found = parsed("gemini", GEMINI)
    assert (found.kind, found.prompt, found.turn, found.label) == ("prompt", "please do it", None, None)


@pytest.mark.parametrize("tool", ["Read", "Grep", "read_file", "list_directory", "web_search"])
def test_tools_that_only_read_are_recognized(tool: str) -> None:
    assert parsed("claude", {**CLAUDE, "tool_name": tool}).is_read_only


@pytest.mark.parametrize("tool", ["Bash", "mcp__x__write", "Task", "write_stdin", "something_new", "apply_patch"])
def test_any_other_tool_may_change_anything(tool: str) -> None:
    found = parsed("claude", {**CLAUDE, "tool_name": tool, "tool_input": {}})
    assert (found.is_read_only, found.paths()) == (False, None)


@pytest.mark.parametrize("body", [{}, [], "x", {**CLAUDE, "hook_event_name": "Notification"}, {**CLAUDE, "cwd": "p"}])
def test_events_without_a_meaning_for_us_are_ignored(body: Any) -> None:
    assert parse_event("claude", json.dumps(body).encode()) is None


def test_invalid_json_is_refused() -> None:
    with pytest.raises(MulliganError) as caught:
        parse_event("claude", b"\xff{")
    assert caught.value.code == "invalid_params"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


NAMES = ("session_id", "tool_name", "tool_input", "tool_use_id", "prompt", "error")
BODIES = st.fixed_dictionaries(
    {"hook_event_name": st.sampled_from(["PreToolUse", "Stop"])}, optional=dict.fromkeys(NAMES, ANYTHING)
)


@given(BODIES)
def test_any_event_is_parsed_or_ignored(body: dict[str, Any]) -> None:
    try:
        found = parse_event("claude", json.dumps({**body, "cwd": "/p"}).encode("utf-8", "surrogatepass"))
    except MulliganError as error:
        assert error.code == "invalid_params"
        return
    if found is not None:
        assert found.session and found.session.isprintable() and len(found.session) <= 256
        found.paths()
