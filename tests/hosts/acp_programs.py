"""Agents and a client that other people wrote, offline: how each is run, and what its model is to ask for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mulligan.testing.agents import MockModel, Step
from tests.servers.acp.client import Body

TOOLS = Path(__file__).parents[2] / ".tools"
# The newest Node comes first: the client does not run with the one that many machines have.
PLACES = [TOOLS / folder / "node_modules/.bin" for folder in ("mcp", "agents")]
INSTALL = "make test-hosts installs it"
BEFORE = {".env": "KEY=1\n", "a.txt": "one\n", "gone.txt": "here\n"}
AFTER = {".env": "KEY=2\n", "a.txt": "two\n"}
SHELL = "rm gone.txt; echo KEY=2 > .env"


def program(name: str) -> str:
    found = next((place / name for place in PLACES if (place / name).exists()), None)
    assert found is not None, f"{name} is missing: {INSTALL}"
    return str(found)


@dataclass(frozen=True)
class HostWorkspace:
    """A folder to work in, a home and a store, and nothing of this machine's."""

    base: Path

    @property
    def root(self) -> Path:
        return self.base / "work"

    @property
    def store(self) -> Path:
        return self.base / "store"

    def prepare(self) -> None:
        """The files as they were before anybody worked on them."""
        for folder in (self.root, self.base / "user"):
            folder.mkdir(exist_ok=True)
        for name, content in BEFORE.items():
            (self.root / name).write_text(content)

    def files(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in sorted(self.root.iterdir())}

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([*map(str, PLACES), os.environ["PATH"]])
        # The client gives up on an agent that is slow to start; on a busy machine, all are.
        patience = dict.fromkeys(
            ("ACPX_GEMINI_ACP_STARTUP_TIMEOUT_MS", "ACPX_CLAUDE_ACP_SESSION_CREATE_TIMEOUT_MS"), "600000"
        )
        return {"PATH": path, "HOME": str(self.base / "user"), "MULLIGAN_HOME": str(self.store), **patience, **more}


@dataclass(frozen=True)
class Foreign:
    """An agent. `steps`: for its model, an edit of a.txt and then the command; `settle`: the settings it needs."""

    words: Sequence[str]
    steps: Callable[[Path], list[Step]]
    settle: Callable[[HostWorkspace, MockModel], dict[str, str]]

    @property
    def command(self) -> list[str]:
        return [program(self.words[0]), *self.words[1:]]


def _opencode_steps(root: Path) -> list[Step]:
    file = str(root / "a.txt")
    write = {"filePath": file, "content": "two\n"}
    return [("read", {"filePath": file}), ("write", write), ("bash", {"command": SHELL, "description": "tidy"})]


def _opencode_settings(workspace: HostWorkspace, model: MockModel) -> dict[str, str]:
    provider: Body = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{model.address}/v1", "apiKey": "none"},
        "models": {"mock": {"name": "mock", "tool_call": True}},
    }
    config = {"provider": {"mock": provider}, "model": "mock/mock", "permission": {"*": "allow"}}
    file = workspace.base / "opencode.json"
    file.write_text(json.dumps(config))
    return {"OPENCODE_CONFIG": str(file), "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _gemini_steps(root: Path) -> list[Step]:
    edit = {"file_path": str(root / "a.txt"), "old_string": "one", "new_string": "two", "instruction": "count"}
    return [("replace", edit), ("run_shell_command", {"command": SHELL})]


def _gemini_settings(workspace: HostWorkspace, model: MockModel) -> dict[str, str]:
    folder = workspace.base / "user/.gemini"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}}))
    return {
        "GOOGLE_GEMINI_BASE_URL": model.address,
        "GEMINI_API_KEY": "none",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }


OPENCODE = Foreign(["opencode", "acp"], _opencode_steps, _opencode_settings)
GEMINI = Foreign(["gemini", "--acp", "-m", "gemini-2.5-flash"], _gemini_steps, _gemini_settings)


def acpx(workspace: HostWorkspace, agent: Sequence[str], *words: str, **environ: str) -> list[Body]:
    """What the client printed: every frame that it sent and was sent, in order."""
    command = [program("acpx"), "--agent", shlex.join(agent), "--format", "json", "--approve-all", *words]
    env = {**os.environ, **workspace.environ(environ)}
    done = subprocess.run(
        command, cwd=workspace.root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
