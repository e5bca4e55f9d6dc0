"""Every example runs, offline, and says what it shows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOWS = {
    "async_calls.py": [
        "written side by side: ['one.txt', 'two.txt']",
        "cancelled:            ['one.txt', 'two.txt'], 'first draft'",
        "undone:               ['two.txt']",
    ],
    "first_undo.py": [
        "after the crash:  ['milk', 'bread', 'eggs']",
        "after the undo:   ['milk', 'bread', 'eggs', 'my own line']",
    ],
    "langgraph_agent.py": [
        "it says:      Noted.",
        "its file:     by a graph",
        "checkpoints:  5",
        "undone:       ()",
    ],
    "openai_agents_sdk.py": [
        "it says:   done",
        "messages:  ['user', 'assistant', 'tool', 'assistant']",
        "its file:  by an agent of the SDK",
        "undone:    ()",
    ],
    "parallel_branches.py": [
        "scores:   [1, 100, 1]",
        "merged:   n * (n + 1) // 2",
        "or not:   def total(n): ...",
    ],
    "pydantic_ai_agent.py": [
        'the agent:   {"remember":"written down","forget":"forget failed: on second thoughts, no"}',
        "the file:    ['a']",
        "rolled back: ()",
    ],
    "share_session.py": [
        "shared:    Deploy <root>/app with <redacted:github_token:44>.",
        "redacted:  <redacted:github_token:44>",
        "redacted:  <root>",
        "same again: True",
        "goes on:   2 messages",
    ],
    "transactional_agent.py": [
        "One of two is saved. ('hello.py',) (Plan(objective='test hello.py', status='active', steps=()),)",
        "Taken back: () ()",
    ],
    "sessions.py": [
        "the branch:      5 messages, from plan",
        "after rollback:  4 messages, ['list.txt']",
        "after redo:      8 messages, ['budget.txt', 'list.txt']",
        "a model is sent: ['assistant', 'tool', 'assistant', 'user', 'assistant', 'tool', 'assistant']",
        "compacted to:    5 messages",
        "told in order:   ['message', 'message', 'call_begun', 'call_ended'] and 18 more",
    ],
}
TEN = 10


def test_every_example_is_known_here() -> None:
    assert sorted(SHOWS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_an_example_runs_and_shows_its_point(name: str, tmp_path: Path) -> None:
    nowhere = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    kept = {key: value for key, value in os.environ.items() if not key.endswith(("_API_KEY", "_proxy"))}
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
        env={**kept, **nowhere, "MULLIGAN_HOME": str(tmp_path / "home")},
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, SHOWS[name]), done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == []


def test_the_ten_line_agent_has_ten_lines() -> None:
    """Besides what the stand-in for a model says, and what is printed to look at it."""
    text = (EXAMPLES / "transactional_agent.py").read_text("utf-8")
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    words = [ast.unparse(node) for node in statements]
    stage = [one for one in words if one.startswith(("print(", "SCRIPT", "GOOD", "'", '"'))]
    assert len(words) - len(stage) == TEN
