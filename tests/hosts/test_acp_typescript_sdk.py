"""The protocol's own TypeScript SDK as a client of `mulligan acp`: the ways back, in both spellings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.acp_programs import INSTALL, TOOLS, program
from tests.servers.acp.client import Body

pytestmark = pytest.mark.hosts

SDK = TOOLS / "agents/node_modules/@agentclientprotocol/sdk/dist/v1/stable/acp.js"
HERE = Path(__file__).parent
BEFORE, AFTER = {"a.txt": "before\n"}, {"a.txt": "after\n", "b.txt": "new\n"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/a.txt").write_text("before\n")
    return Path(os.path.realpath(tmp_path))


def driven(base: Path, prefix: str) -> Body:
    """What the SDK saw of a prompt that writes two files and of our ways back."""
    assert SDK.exists(), f"the SDK is missing: {INSTALL}"
    written = [("tc_1", "a.txt", "after\n"), ("tc_2", "b.txt", "new\n")]
    tools = [{"tool": "write_file", "args": {"path": path, "content": text}, "id": id} for id, path, text in written]
    (base / "script").write_text(json.dumps({"tools": tools}) + '\n"done"\n')
    environ = {"ACP_SDK": SDK.as_uri(), "SCRIPT": str(base / "script"), "MULLIGAN_HOME": str(base / "home")}
    agent = [sys.executable, str(HERE.parent / "servers" / "acp" / "scripted_agent.py")]
    command = [program("node"), str(HERE / "acp_typescript_client.mjs"), str(base / "work"), prefix, *agent]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: Body = json.loads(done.stdout)
    return found


def of_ways_back(updates: list[Body]) -> list[Body]:
    return [update for update in updates if "_meta" in update]


@pytest.mark.req(
    "S0.acp.rollback_method",
    "S0.acp.redo_method",
    "S0.acp.restore_method",
    "D14.acp.s0_frames",
    "D14.acp.strict_frames",
    "D19.foreign_programs",
)
@pytest.mark.parametrize("prefix", ["", "_mulligan/"])
def test_a_turn_is_undone_and_redone_and_a_call_is_restored(base: Path, prefix: str) -> None:
    seen = driven(base, prefix)
    steps = [(step["method"].removeprefix(prefix), step["files"]) for step in seen["steps"]]
    assert steps == [
        ("session/prompt", AFTER),
        ("session/rollback", BEFORE),
        ("session/redo", AFTER),
        ("session/restore_tool_call", {**AFTER, **BEFORE}),
        ("session/nonsense", {**AFTER, **BEFORE}),
        ("session/close", {**AFTER, **BEFORE}),
    ]
    _, back, again, restored, nonsense, closed = [step["result"] for step in seen["steps"]]
    assert (back["status"], again["status"]) == ("rolled_back", "redone")
    paths = [str(base / "work" / name) for name in ("a.txt", "b.txt")]
    assert restored == {"toolCallId": "tc_1", "restoredPaths": paths[:1], "skippedPathsWithReasons": []}
    assert (nonsense["error"]["code"], closed) == (-32601, {})


@pytest.mark.req("D14.acp.strict_frames", "D19.foreign_programs")
def test_every_update_of_the_strict_spelling_is_valid(base: Path) -> None:
    seen = driven(base, "_mulligan/")
    assert seen["taken"] == seen["came"]
    kinds = [(update["sessionUpdate"], update["_meta"]["mulligan"]["kind"]) for update in of_ways_back(seen["came"])]
    assert kinds == [
        ("session_info_update", "session_rollback"),
        ("session_info_update", "session_redo"),
        ("tool_call_update", "tool_call_restored"),
    ]


@pytest.mark.req("D14.acp.s0_frames", "D19.foreign_programs")
def test_of_the_documents_spelling_the_sdk_takes_what_the_protocol_knows(base: Path) -> None:
    """It sends and answers S0's methods, drops updates of unknown kinds, and an unknown status out of a known one."""
    seen = driven(base, "")
    back, again, restored = of_ways_back(seen["came"])
    assert (back["sessionUpdate"], again["sessionUpdate"]) == ("session_rollback", "session_redo")
    assert restored["status"] == "restored"
    taken: list[Any] = of_ways_back(seen["taken"])
    assert taken == [{name: value for name, value in restored.items() if name != "status"}]
    assert [one for one in seen["came"] if one not in (back, again, restored)] == seen["taken"][:-1]
