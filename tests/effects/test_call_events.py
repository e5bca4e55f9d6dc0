"""How many function calls, statements and pages of the log a request takes. A ratchet: a change that needs more says
why, and raises the number here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMITS = {
    # request: calls of functions below src/mulligan, files that they are in, how often a store is opened; transactions,
    # statements other than their begin and end, and pages written to SQLite's log
    "write": {"events": 300, "files": 35, "stores_opened": 0, "transactions": 2, "statements": 20, "pages": 26},
    # Reads of the calls beside which an undone call ran take two of them, and a redo stack that is no longer empty one.
    "undo": {"events": 448, "files": 39, "stores_opened": 0, "transactions": 5, "statements": 31, "pages": 26},
    # The words for outcomes are a module of their own, below the command line, because hosts show them too.
    # A bare undo first looks for other sessions that worked here, and its answer names the agent and the session.
    # The first record of a process looks whether a seal is due, and may add it.
    "command": {"events": 950, "files": 55, "stores_opened": 1, "transactions": 17, "statements": 90},
}


@pytest.mark.parametrize("request_name", LIMITS)
@pytest.mark.req("D4.one_file_call_counts")
def test_a_warm_request_takes_no_more_function_calls_statements_and_pages_than_it_did(request_name: str) -> None:
    script = Path(__file__).parents[1] / "call_events.py"
    ran = subprocess.run([sys.executable, str(script), request_name], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    over = {name: (found[name], most) for name, most in LIMITS[request_name].items() if found[name] > most}
    assert over == {}
