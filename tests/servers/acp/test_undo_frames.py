"""The frames of the ways back, key for key: S0's own JSON as it stands there, and the same for strict clients.

Of `rollback` and `redo` S0 shows no frames; theirs are ours, and the golden keeps them from changing unnoticed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.servers.acp.client import Body, Client
from tests.servers.acp.test_agent import PROMPT, AgentWorkspace, new, wrote

GOLDEN: Body = json.loads((Path(__file__).parents[2] / "golden/acp_s0.json").read_text("utf-8"))
OUR_ID = re.compile(r"\b[0-9a-f]{8}-?[0-9a-f]{4}-?7[0-9a-f]{3}-?[0-9a-f]{4}-?[0-9a-f]{12}\b")


def as_golden(frame: object, workspace: AgentWorkspace, session: str) -> Any:
    """With the golden's own session and folder, and `1` for whatever the turn is called on record."""
    text = json.dumps(frame).replace(session, "sess_abc").replace(str(workspace.root), "/work")
    return json.loads(OUR_ID.sub("1", text.replace("turn_", "turn_ ")).replace("turn_ ", "turn_"))


def part_of(frame: Body, wanted: Body) -> Body:
    """As much of a frame as the golden speaks of, to the depth that it does."""
    return {
        name: part_of(frame[name], value) if isinstance(value, dict) and value else frame.get(name)
        for name, value in wanted.items()
    }


def exchanged(client: Client, workspace: AgentWorkspace, request: Body, session: str) -> dict[str, Any]:
    """What came of a request, and the update that came with it."""
    seen = len(client.updates())
    result = client.ask(request["method"], **{**request["params"], "sessionId": session})
    client.wait_for_update(lambda _: len(client.updates()) > seen)
    (update,) = [frame["params"] for frame in client.frames if frame.get("method") == "session/update"][seen:]
    return {
        "request": request,
        "update": as_golden(update, workspace, session),
        "result": as_golden(result, workspace, session),
    }


@pytest.mark.req(
    "S0.acp.capabilities_in_initialize",
    "S0.acp.capability_values_are_objects",
    "S0.acp.restore_method",
    "S0.acp.restore_update_frame",
    "S0.acp.restore_update_status",
    "S0.acp.restore_update_kind",
    "S0.acp.restore_update_paths",
    "S0.acp.rollback_method",
    "S0.acp.redo_method",
    "D14.acp.s0_frames",
    "D14.acp.strict_frames",
    "D14.acp.advertised",
    "D19.goldens",
)
@pytest.mark.parametrize("spelling", GOLDEN)
def test_the_frames_are_the_golden_ones(tmp_path: Path, spelling: str) -> None:
    golden = GOLDEN[spelling]
    workspace = AgentWorkspace(Path(os.path.realpath(tmp_path)))
    (workspace.root / "src").mkdir()
    (workspace.root / "src/lib.rs").write_text("before\n")
    with workspace.agent(wrote("src/lib.rs", "after\n", "tc_42"), "done") as client:
        said = client.ask("initialize", protocolVersion=1, clientCapabilities={})
        able = golden["agentCapabilities"]
        assert part_of(said["agentCapabilities"], able) == able
        session = new(client, workspace)
        client.ask("session/prompt", sessionId=session, prompt=PROMPT)
        for way in ("rollback", "redo", "restore"):
            assert exchanged(client, workspace, golden[way]["request"], session) == golden[way]
