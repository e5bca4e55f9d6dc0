"""`acpx`, a real headless client that somebody else wrote: it starts a new agent process for each command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.acp_programs import HostWorkspace, acpx

pytestmark = pytest.mark.hosts

AGENT = [sys.executable, "-m", "mulligan", "acp", "--provider", "mock"]


@pytest.mark.req("D14.acp.own_agent", "D14.acp.session_new", "D14.acp.session_list", "D14.acp.session_close")
def test_new_prompt_list_resume_in_a_fresh_process_and_close(tmp_path: Path) -> None:
    workspace = HostWorkspace(tmp_path)
    workspace.prepare()
    (made,) = acpx(workspace, AGENT, "sessions", "new", "--name", "one")
    session = made["acpxSessionId"]
    for prompt in ("remember the plum", "again"):
        frames = acpx(workspace, AGENT, "prompt", "-s", "one", prompt)
        said = [
            frame["params"]["update"]["content"]["text"]
            for frame in frames
            if frame.get("method") == "session/update"
            and frame["params"]["update"]["sessionUpdate"] == "agent_message_chunk"
        ]
        assert "".join(said) == f"You said: {prompt}"
    (listed,) = acpx(workspace, AGENT, "sessions", "list")
    assert [(one["sessionId"], one["title"]) for one in listed["sessions"]] == [(session, "remember the plum")]
    assert acpx(workspace, AGENT, "sessions", "close", "one")[0]["action"] == "session_closed"
    shown = subprocess.run(
        [sys.executable, "-m", "mulligan", "sessions", "--json"],
        env={**os.environ, **workspace.environ({})},
        cwd=workspace.root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout) == []
