"""Real hosts, offline, with what `mulligan install` puts into them: a person types undo, and the model learns of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mulligan.testing.agents import MockModel, Step, scripted_model
from tests.agents.hooks.hooked_workspace import HookedWorkspace
from tests.hosts.terminal import Terminal, terminal
from tests.hosts.test_hooks import INSTALL, PLACES, environment

pytestmark = pytest.mark.hosts

KEY = "none-0123456789-0123456789"
DELETE = "rm -rf folder; echo KEY=2 > .env"


@dataclass
class InstalledHost:
    """A host in which Mulligan is installed, with a project of its own."""

    workspace: HookedWorkspace
    before: dict[str, bytes]

    def files(self) -> dict[str, bytes]:
        return tree(self.workspace.root)


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder, and `b"/"` for each folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"/" for path in paths}


@contextmanager
def installed(workspace: HookedWorkspace, host: str) -> Iterator[InstalledHost]:
    """Installs Mulligan, and at the end removes it: then every settings file is as it was, byte for byte."""
    assert any((place / host).exists() for place in PLACES), f"the host is missing: {INSTALL}"
    workspace.extra["MULLIGAN_HOOKS_WAIT_S"] = "60"
    folder = workspace.root / "folder"
    folder.mkdir()
    (folder / "deep.txt").write_text("deep\n")
    done = workspace.mulligan("install", host, "--yes", "--store", str(workspace.store))
    assert done.returncode == 0, done.stdout + done.stderr
    yield InstalledHost(workspace, tree(workspace.root))


def claude_settings(home: Path, root: Path) -> None:
    """What a person has answered at the first start, and settings of their own."""
    known = {"hasTrustDialogAccepted": True}
    body = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "customApiKeyResponses": {"approved": [KEY[-20:]]},
        "projects": {str(root): known},
    }
    (home / ".claude.json").write_text(json.dumps(body))
    (home / ".claude").mkdir()
    (home / ".claude/settings.json").write_text('{\n    "model": "opus"}')


def told(model: MockModel) -> str:
    """The last request of the conversation: one with tools."""
    return next(text for text in reversed(model.requests) if '"tools"' in text and "go on" in text)


@pytest.mark.req("D14.hooks.typed_commands", "D14.hooks.model_told", "D14.hosts.install", "D14.hosts.uninstall")
def test_undo_is_typed_in_claude_code(workspace: HookedWorkspace) -> None:
    claude_settings(workspace.home, workspace.root)
    settings = tree(workspace.home / ".claude")
    with installed(workspace, "claude") as host, scripted_model([]) as model:
        env = {**environment(workspace, model), "ANTHROPIC_API_KEY": KEY}
        with terminal(["claude", "--allowedTools", "Bash,Edit,Read"], cwd=workspace.root, env=env) as screen:
            screen.wait_for("for agents")
            use_host(screen, model, host, undo="/undo", other="/mulligan ")
        removed = workspace.mulligan("uninstall", "claude", "--yes", "--store", str(workspace.store))
        assert removed.returncode == 0, removed.stderr
    after = tree(workspace.home / ".claude")
    assert {name: after.get(name) for name in settings} == settings
    assert "commands" not in after


def use_host(screen: Terminal, model: MockModel, host: InstalledHost, *, undo: str, other: str) -> None:
    """Three prompts, and between them every verb. No command asks the model, and the person's edit is kept."""
    work(screen, model, [bash("echo new > made.txt")], "first")
    work(screen, model, [bash(DELETE)], "second")
    assert not (host.workspace.root / "folder").exists()
    root = host.workspace.root
    (root / "a.txt").write_text("one\nmine\n")

    answered(screen, model, undo, "reverses this")
    assert host.files() == {**host.before, "a.txt": b"one\nmine\n", "made.txt": b"new\n"}
    answered(screen, model, undo.replace("undo", "redo"), "reverses this")
    assert not (root / "folder").exists()
    answered(screen, model, f"{other}rollback", "reverses this")
    assert (root / "folder/deep.txt").read_text() == "deep\n"
    answered(screen, model, f"{other}rewind", "from prompt N on")
    answered(screen, model, f"{other}rewind 2", "Rewound")
    assert host.files() == {**host.before, "a.txt": b"one\nmine\n"}

    work(screen, model, [], "go on")
    request = told(model)
    assert request.count("read them again before you change them") == 1
    assert request.count("- undone: ") == 1
    work(screen, model, [], "go on again")
    assert told(model).count("read them again before you change them") == 1


def bash(command: str) -> Step:
    return "Bash", {"command": command}


def work(screen: Terminal, model: MockModel, steps: list[Step], prompt: str) -> None:
    """Type a prompt and wait until the model has had the result of each of its calls, and the turn is over."""
    model.steps += steps
    asked, over = len(model.requests), screen.count("done")
    screen.type(prompt)
    screen.wait_until(lambda: len(model.requests) > asked and len(model.results) == len(model.steps), prompt)
    screen.wait_for("done", over + 1)


def answered(screen: Terminal, model: MockModel, line: str, answer: str) -> None:
    """Type a command; it is answered without the model."""
    asked, before = len(model.requests), screen.count(answer)
    screen.type(line)
    screen.wait_for(answer, before + 1)
    assert len(model.requests) == asked
