"""Real agent hosts, offline: a model on loopback asks for a tool that changes a file; then the change is undone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.test_mcp_conformance import BINARIES, INSTALL, PATIENCE_MS
from tests.servers.mcp.mock_model import MockModel, mock_model
from tests.servers.mcp.server_process import SERVER

pytestmark = pytest.mark.hosts

PLACES = (BINARIES, BINARIES.parent.parent.parent / "node/node_modules/.bin")
WRITE = {"path": "README.md", "content": "by the agent\n"}


def environment(root: Path, model: MockModel) -> dict[str, str]:
    home = root.parent / "host_home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "TERM", "TMPDIR")}
    return {
        **kept,
        "PATH": os.pathsep.join([*map(str, PLACES), os.environ["PATH"]]),
        "MOCK_KEY": "none",
        "HOME": str(home),
        "MULLIGAN_HOME": str(root.parent / "store"),
        "ANTHROPIC_BASE_URL": model.address,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ENABLE_TOOL_SEARCH": "false",
        "MCP_TIMEOUT": str(PATIENCE_MS),
        "MCP_TOOL_TIMEOUT": str(PATIENCE_MS),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def opencode(root: Path, model: MockModel) -> list[str]:
    provider: dict[str, Any] = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{model.address}/v1", "apiKey": "none"},
        "models": {"mock": {"name": "mock", "tool_call": True}},
    }
    server = {"type": "local", "command": [*SERVER, "--root", str(root)], "enabled": True, "timeout": PATIENCE_MS}
    config = {"provider": {"mock": provider}, "mcp": {"mulligan": server}, "permission": {"*": "allow"}}
    (root / "opencode.json").write_text(json.dumps(config))
    return ["opencode", "run", "change the readme", "--model", "mock/mock"]


def codex(root: Path, model: MockModel) -> list[str]:
    folder = root.parent / "host_home/.codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""
model = "mock"
model_provider = "mock"
[model_providers.mock]
name = "mock"
base_url = "{model.address}/v1"
wire_api = "responses"
env_key = "MOCK_KEY"
[mcp_servers.mulligan]
startup_timeout_sec = {PATIENCE_MS // 1000}
tool_timeout_sec = {PATIENCE_MS // 1000}
command = "{SERVER[0]}"
args = {json.dumps([*SERVER[1:], "--root", str(root)])}
env = {{ MULLIGAN_HOME = "{root.parent / "store"}" }}
"""
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *flags, "change the readme"]


def claude(root: Path, model: MockModel) -> list[str]:
    server = {"command": SERVER[0], "args": [*SERVER[1:], "--root", str(root)]}
    config = root.parent / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"mulligan": server}}))
    flags = ["--strict-mcp-config", "--allowedTools", "mcp__mulligan", "--output-format", "json"]
    return ["claude", "-p", "change the readme", "--mcp-config", str(config), *flags]


@pytest.mark.req("D19.foreign_programs")
@pytest.mark.parametrize("host", [opencode, codex, claude])
def test_a_host_changes_a_file_and_the_change_is_undone(root: Path, host: Any) -> None:
    assert any((place / host.__name__).exists() for place in PLACES), f"the host is missing: {INSTALL}"
    with mock_model("workspace_write_file", WRITE) as model:
        env = environment(root, model)
        command = host(root, model)
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stdout + done.stderr
        assert model.results, done.stdout + done.stderr
    assert "written_bytes" in model.results[-1]
    assert all(model.tool in tools for tools in model.first_requests)
    assert (root / "README.md").read_text() == WRITE["content"]
    undo = [sys.executable, "-m", "mulligan", "undo", "--root", str(root)]
    subprocess.run(undo, env=env, check=True, capture_output=True)
    assert (root / "README.md").read_text() == "# Toy Repo"


@pytest.mark.slow
@pytest.mark.req("D19.foreign_programs")
def test_codex_is_offered_the_tools_in_its_first_request_ten_times_of_ten(root: Path) -> None:
    """It waits for no server that is slow to answer, so being late once would show."""
    for number in range(10):
        place = root.parent / f"turn{number}" / "repo"
        shutil.copytree(root, place)
        with mock_model("workspace_write_file", WRITE) as model:
            env = environment(place, model)
            done = subprocess.run(
                codex(place, model), cwd=place, env=env, capture_output=True, stdin=subprocess.DEVNULL
            )
        assert done.returncode == 0 and model.first_requests, done.stderr
        assert all(model.tool in tools for tools in model.first_requests)
