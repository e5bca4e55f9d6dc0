"""`acpx`, a real headless client that somebody else wrote: it starts a new agent process for each command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BINARIES = Path(__file__).parent.parent.parent / ".tools/agents/node_modules/.bin"
NODE = Path(__file__).parent.parent.parent / ".tools/mcp/node_modules/.bin"
AGENT = f"{sys.executable} -m mulligan acp --provider mock"


def acpx(base: Path, *words: str) -> list[Any]:
    """What it printed, frame by frame."""
    path = os.pathsep.join([str(NODE), str(BINARIES), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "HOME": str(base / "user"), "MULLIGAN_HOME": str(base / "home")}
    command = [str(BINARIES / "acpx"), "--agent", AGENT, "--format", "json", "--approve-all", *words]
    done = subprocess.run(
        command, cwd=base / "work", env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.req("D14.acp.own_agent", "D14.acp.session_new", "D14.acp.session_list", "D14.acp.session_close")
def test_new_prompt_list_resume_in_a_fresh_process_and_close(tmp_path: Path) -> None:
    for folder in ("work", "user"):
        (tmp_path / folder).mkdir()
    (made,) = acpx(tmp_path, "sessions", "new", "--name", "one")
    session = made["acpxSessionId"]
    for prompt in ("remember the plum", "again"):
        frames = acpx(tmp_path, "prompt", "-s", "one", prompt)
        said = [
            frame["params"]["update"]["content"]["text"]
            for frame in frames
            if frame.get("method") == "session/update"
            and frame["params"]["update"]["sessionUpdate"] == "agent_message_chunk"
        ]
        assert "".join(said) == f"You said: {prompt}"
    (listed,) = acpx(tmp_path, "sessions", "list")
    assert [(one["sessionId"], one["title"]) for one in listed["sessions"]] == [(session, "remember the plum")]
    assert acpx(tmp_path, "sessions", "close", "one")[0]["action"] == "session_closed"
    shown = subprocess.run(
        [sys.executable, "-m", "mulligan", "sessions", "--json"],
        env={**os.environ, "MULLIGAN_HOME": str(tmp_path / "home")},
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout) == []
