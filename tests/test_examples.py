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
}


def test_every_example_is_known_here() -> None:
    assert sorted(SHOWS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_an_example_runs_and_shows_its_point(name: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == SHOWS[name]
