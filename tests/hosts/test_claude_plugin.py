"""The plugin folder for Claude Code in this repository, and its marketplace file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mulligan.hosts.install import PACKAGES
from mulligan.hosts.settings import HOSTS
from mulligan.testing.agents import scripted_model
from tests.agents.hooks.hooked_workspace import HookedWorkspace
from tests.hosts.test_hooks import environment

REPOSITORY = Path(__file__).parents[2]
PLUGIN = REPOSITORY / "plugins/claude-code"


@pytest.mark.req("D14.hosts.claude_plugin")
def test_the_plugin_has_the_hooks_and_commands_that_install_writes() -> None:
    host = replace(HOSTS["claude"], answers=True)
    command = '"${CLAUDE_PLUGIN_ROOT}/hooks/mulligan-hook"'
    hooks = json.loads((PLUGIN / "hooks/hooks.json").read_text())
    assert hooks == {"hooks": {event: [host.entry(event, command)] for event in host.events}}
    commands = {f"commands/{path.name}": path.read_text() for path in (PLUGIN / "commands").iterdir()}
    assert commands == PACKAGES["claude"].files("")
    assert os.access(PLUGIN / "hooks/mulligan-hook", os.X_OK)


@pytest.mark.hosts
@pytest.mark.req("D14.hosts.claude_plugin")
def test_claude_code_installs_the_plugin_and_undo_asks_no_model(workspace: HookedWorkspace) -> None:
    programs = workspace.home / "bin"
    programs.mkdir()
    (programs / "mulligan").write_text(f"#!{sys.executable}\nfrom mulligan.cli import main\nmain()\n")
    (programs / "mulligan").chmod(0o755)
    with scripted_model([("Bash", {"command": "echo made > made.txt"})]) as model:
        env = environment(workspace, model)
        env = {**env, "PATH": f"{programs}{os.pathsep}{env['PATH']}", "MULLIGAN_HOOKS_WAIT_S": "60"}

        def claude(*words: str) -> str:
            done = subprocess.run(["claude", *words], cwd=workspace.root, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        claude("plugin", "marketplace", "add", str(REPOSITORY))
        claude("plugin", "install", "mulligan@mulligan", "--scope", "user")
        claude("--allowedTools", "Bash", "--session-id", SESSION, "-p", "work")
        assert (workspace.root / "made.txt").exists()
        asked = len(model.requests)
        assert "removed made.txt" in claude("--resume", SESSION, "-p", "/mulligan:undo")
        assert (len(model.requests), (workspace.root / "made.txt").exists()) == (asked, False)


SESSION = "5dcd820b-0000-4000-8000-000000000001"
