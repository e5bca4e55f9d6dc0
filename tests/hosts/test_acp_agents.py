"""A client and an agent that know nothing of us, with us between them: the same talk, and all of it can be undone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mulligan.testing.agents import MockModel, scripted_model
from tests.hosts.acp_programs import AFTER, BEFORE, GEMINI, OPENCODE, Foreign, HostWorkspace, acpx
from tests.servers.acp.client import Body, Client, connected

pytestmark = pytest.mark.hosts

BETWEEN = [sys.executable, str(Path(__file__).with_name("proxy_with_long_wait.py")), "acp", "--"]
NAMES = ("sessionId", "messageId", "toolCallId")
ADDED: Body = {"rollback": {}, "redo": {}, "restoreToolCall": {}, "fork": {}}
OURS: Body = {"rollback": {}, "redo": {}, "restoreToolCall": {}, "rewind": {}}


@pytest.fixture
def workspace(tmp_path: Path) -> HostWorkspace:
    made = HostWorkspace(Path(os.path.realpath(tmp_path)))
    made.prepare()
    return made


class Names:
    """Ids that an agent makes anew in every run, by the order in which they come."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def plain(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.plain(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {key: self._named(key, one) if key in NAMES else self.plain(one) for key, one in value.items()}

    def _named(self, key: str, id: str) -> str:
        return self._known.setdefault(id, f"{key} {len(self._known)}")


def introduced(frames: list[Body]) -> Body:
    """What the agent has said of itself."""
    (found,) = (frame["result"] for frame in frames if "agentCapabilities" in frame.get("result", {}))
    return dict(found)


def transcript(frames: list[Body]) -> list[Body]:
    """Every frame both ways after the introduction, but for what differs by nature between two runs of an agent.

    That is: the ids that it makes up; how often it repeats that a command is still running; and when it says which
    commands a person can type, which it does beside everything else.
    """
    names = Names()
    found: list[Body] = []
    for frame in (names.plain(frame) for frame in frames if "agentCapabilities" not in frame.get("result", {})):
        is_menu = frame.get("params", {}).get("update", {}).get("sessionUpdate") == "available_commands_update"
        if not is_menu and frame not in found[-1:]:
            found.append(frame)
    return found


COMMANDS = {"undo", "redo", "mulligan"}
"""The commands that the proxy announces and answers itself."""


def menus(frames: list[Body]) -> list[Body]:
    updates = [frame["params"]["update"] for frame in frames if frame.get("method") == "session/update"]
    return [one for one in updates if one["sessionUpdate"] == "available_commands_update"]


def without_ours(found: list[Body]) -> list[Body]:
    """The menus that the agent itself has announced."""
    theirs = [[one for one in menu["availableCommands"] if one["name"] not in COMMANDS] for menu in found]
    return [{**menu, "availableCommands": some} for menu, some in zip(found, theirs, strict=True) if some]


def calls(workspace: HostWorkspace) -> list[tuple[str, dict[str, str]]]:
    """What is on record, oldest first: the agent's own id of each call, and what it changed."""
    words = [sys.executable, "-m", "mulligan", "log", "--root", str(workspace.root), "--json"]
    env = {**os.environ, **workspace.environ({})}
    rows = json.loads(subprocess.run(words, env=env, capture_output=True, check=True).stdout)
    assert {(row["external"], row["status"]) for row in rows} == {(False, "committed")}
    return [(row["label"], {one["path"]: one["kind"] for one in row["changes"]}) for row in rows[::-1]]


def session_of(frames: list[Body]) -> str:
    """The one that was made at the beginning."""
    (found,) = {frame["params"]["sessionId"] for frame in frames if frame.get("method") == "session/prompt"}
    return str(found)


def run(workspace: HostWorkspace, agent: Foreign, model: MockModel) -> Iterator[list[Body]]:
    """The client's frames of the same work, without us and then with us."""
    environ = agent.settle(workspace, model)
    for before in ([], BETWEEN):
        workspace.prepare()
        yield acpx(workspace, [*before, *agent.command], "exec", "do it", **environ)


AGENTS = pytest.mark.parametrize("agent", [OPENCODE, GEMINI], ids=["opencode", "gemini"])


@pytest.mark.req("D14.acp.proxy", "D14.acp.proxy_passes_through", "D14.cli.acp", "D19.foreign_programs")
@AGENTS
def test_the_client_sees_no_difference_and_the_work_is_undone_and_redone(
    workspace: HostWorkspace, agent: Foreign
) -> None:
    with scripted_model(agent.steps(workspace.root)) as model:
        without, through = run(workspace, agent, model)
        assert workspace.files() == AFTER
        assert transcript(through) == transcript(without)
        assert without_ours(menus(through)) == menus(without)
        assert {one["name"] for one in menus(through)[-1]["availableCommands"]} >= COMMANDS

        able = introduced(without)["agentCapabilities"]
        theirs = {"sessionCapabilities": {**ADDED, **able.get("sessionCapabilities", {})}}
        added = {**able, **theirs, "_meta": {**able.get("_meta", {}), "mulligan": OURS}}
        assert introduced(through) == {**introduced(without), "agentCapabilities": added}

        changed = [files for _, files in calls(workspace)]
        assert changed == [{"a.txt": "modified"}, {".env": "modified", "gone.txt": "deleted"}]

        # The client can send nothing that the protocol does not have; another one goes on with its session.
        session = session_of(through)
        with connected(workspace.store, command=[*BETWEEN, *agent.command], **workspace.environ({})) as client:
            back = client.ask("_mulligan/session/rollback", sessionId=session)
            assert (back["status"], workspace.files()) == ("rolled_back", BEFORE)
            again = client.ask("_mulligan/session/redo", sessionId=session)
            assert (again["status"], workspace.files()) == ("redone", AFTER)


@pytest.mark.req("D14.acp.proxy", "D14.acp.proxy_tells_model", "D19.foreign_programs")
@AGENTS
def test_the_agent_goes_on_after_one_of_its_tools_was_undone(workspace: HostWorkspace, agent: Foreign) -> None:
    with scripted_model(agent.steps(workspace.root)) as model:
        environ = workspace.environ(agent.settle(workspace, model))
        with connected(workspace.store, command=[*BETWEEN, *agent.command], **environ) as client:
            client.allow = lambda asked: str(asked["options"][1]["optionId"])
            session: str = client.ask("session/new", cwd=str(workspace.root), mcpServers=[])["sessionId"]
            ask(client, session, "do it")
            assert workspace.files() == AFTER
            shell = client.updates("tool_call_update")[-1]["toolCallId"]
            restored = client.ask("session/restore_tool_call", sessionId=session, toolCallId=shell)
            assert sorted(restored["restoredPaths"]) == [str(workspace.root / name) for name in (".env", "gone.txt")]
            assert workspace.files() == {**BEFORE, "a.txt": "two\n"}
            ask(client, session, "go on")
        assert "- gone.txt (restored)" in model.requests[-1]


def ask(client: Client, session: str, text: str) -> None:
    answer = client.ask("session/prompt", sessionId=session, prompt=[{"type": "text", "text": text}])
    assert answer["stopReason"] == "end_turn"
