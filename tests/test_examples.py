"""Every example runs, offline, and says what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOWS = {
    "first_undo.py": [
        "after the crash:  ['milk', 'bread', 'eggs']",
        "after the undo:   ['milk', 'bread', 'eggs', 'my own line']",
    ],
    "share_session.py": [
        "shared:    Deploy <root>/app with <redacted:github_token:44>.",
        "redacted:  <redacted:github_token:44>",
        "redacted:  <root>",
        "same again: True",
        "goes on:   2 messages",
    ],
    "transactional_agent.py": [
        "the file:  print('hello')",
        "the plan:  ['check hello.py']",
        "the log:   [True, False]",
        "rolled back:  [] ()",
    ],
    "sessions.py": [
        "the branch:      5 messages, from plan",
        "after rollback:  4 messages, ['list.txt']",
        "after redo:      8 messages, ['budget.txt', 'list.txt']",
        "a model is sent: ['assistant', 'tool', 'assistant', 'user', 'assistant', 'tool', 'assistant']",
        "compacted to:    5 messages",
        "told in order:   ['message', 'message', 'message', 'message'] and 5 more",
    ],
}


def test_every_example_is_known_here() -> None:
    assert sorted(SHOWS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_an_example_runs_and_shows_its_point(name: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == SHOWS[name]
