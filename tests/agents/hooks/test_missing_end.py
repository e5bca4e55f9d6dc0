"""Calls whose end no hook reports: a background command of Codex, a patch written as a command, an interrupted call."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from tests.agents.hooks.test_recorder import Agent, agent, coverage_of  # noqa: F401


def told(label: str, command: str) -> dict[str, Any]:
    body = {"label": label, "tool": "Bash", "input": {"command": command}, "pid": os.getpid()}
    return {"agent": "codex", **body}


def begun(agent: Agent) -> set[str | None]:  # noqa: F811
    return {row["label"] for row in agent.log() if row["status"] == "open"}


@pytest.mark.req("D14.hooks.end_missed")
def test_the_next_call_ends_a_call_whose_command_has_ended(agent: Agent) -> None:  # noqa: F811
    agent.say("pre", **told("patch", "apply_patch <<EOF"))
    (agent.root / "a.txt").write_text("patched\n")
    agent.say("pre", **told("next", "ls"))
    assert (begun(agent), coverage_of(agent, "patch")) == ({"next"}, [(".", "end_missed")])
    agent.say("post", **told("patch", "apply_patch <<EOF"))
    (agent.root / "b.txt").write_text("next\n")
    agent.say("post", **told("next", "ls"))
    assert agent.changes() == [("patch", {"a.txt": "modified"}), ("next", {"b.txt": "created"})]
    assert coverage_of(agent, "next") == []


@pytest.mark.req("D14.hooks.end_missed")
def test_the_end_of_the_turn_ends_a_call_whose_command_still_runs(agent: Agent) -> None:  # noqa: F811
    command = "read go; echo late > late.txt"
    agent.say("pre", **told("background", command))
    with subprocess.Popen(["bash", "-lc", command], stdin=subprocess.PIPE, cwd=agent.root) as running:
        agent.say("pre", **told("next", "ls"))
        agent.say("post", **told("next", "ls"))
        assert begun(agent) == {"background"}
        agent.say("stop")
        assert coverage_of(agent, "background") == [(".", "end_missed"), (".", "background")]
        running.communicate(b"go\n")
    agent.say("session_start")
    assert [row["tool"] for row in agent.log() if "late.txt" in str(row["changes"])] == ["Bash"]
    agent.undo("background")
    assert not (agent.root / "late.txt").exists()


@pytest.mark.req("D14.hooks.end_missed")
def test_no_outcome_is_claimed_for_a_call_that_was_interrupted(agent: Agent) -> None:  # noqa: F811
    agent.say("prompt", prompt="first")
    agent.say("pre", label="c1", tool="Bash", input={"command": "x"})
    agent.say("prompt", turn="p2", prompt="second")
    assert (begun(agent), coverage_of(agent, "c1")) == (set(), [(".", "end_missed")])
    assert agent.log()[0]["changes"] == []
