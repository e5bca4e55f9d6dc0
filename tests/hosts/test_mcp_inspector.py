"""The official inspector against our servers. It needs Node and the inspector in `.tools/mcp`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mulligan.servers.mcp.protocol import PROFILES
from tests.hosts.test_mcp_conformance import BINARIES, INSTALL, PATIENCE_MS
from tests.servers.mcp.server_process import SERVER

pytestmark = pytest.mark.hosts


def inspect(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    assert (BINARIES / "mcp-inspector").exists(), f"the inspector is missing: {INSTALL}"
    home = root.parent / "inspector_home"
    home.mkdir(exist_ok=True)
    env = {**os.environ, "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", "HOME": str(home)}
    command = [
        *(str(BINARIES / "mcp-inspector"), "--cli", "-e", f"MULLIGAN_HOME={root.parent / 'store'}"),
        *("--connect-timeout", str(PATIENCE_MS)),
        *(*SERVER, "--root", str(root), *words),
    ]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.req("D19.foreign_programs")
@pytest.mark.parametrize("era", ["legacy", "modern"])
@pytest.mark.parametrize(
    "profile", ["every tool", *(pytest.param(profile, marks=pytest.mark.slow) for profile in PROFILES)]
)
def test_every_tool_is_described_portably(root: Path, era: str, profile: str) -> None:
    chosen = () if profile == "every tool" else ("--profile", profile)
    done = inspect(root, *chosen, "--method", "tools/list", "--strict", "--protocol-era", era)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert "Error:" not in done.stderr, done.stderr


def test_a_tool_can_be_called(root: Path) -> None:
    words = ("--method", "tools/call", "--tool-name", "workspace_write_file", "--tool-arg", "path=n", "content=x")
    done = inspect(root, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["structuredContent"]["created"] is True
    assert (root / "n").read_text() == "x"


def test_a_load_of_calls_is_answered_without_error(root: Path) -> None:
    words = ("--method", "tools/call", "--tool-name", "read_file", "--tool-arg", "path=README.md")
    done = inspect(root, *words, "--load", "--load-requests", "300", "--load-concurrency", "16")
    assert done.returncode == 0, done.stdout + done.stderr
