"""Real hosts, offline, with what `mulligan install` puts into them: a person types undo, and the model learns of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mulligan.hosts.settings import CLIENT
from mulligan.hosts.typed import NO_ANSWER
from mulligan.testing.agents import MockModel, Step, scripted_model
from tests.agents.hooks.hooked_workspace import HookedWorkspace
from tests.hosts.terminal import Terminal, terminal
from tests.hosts.test_hooks import INSTALL, PLACES, environment

pytestmark = pytest.mark.hosts

KEY = "none-0123456789-0123456789"
OWN_FILES = ("mulligan.js", "tui.js", "undo", "undo.md", "undo.toml", "gemini-extension.json", "commands")
DELETE = "rm -rf folder; echo KEY=2 > .env"


@dataclass(frozen=True)
class Host:
    """How a person starts one host, and what its tool for commands is called.

    `prepare` writes the person's own settings, `start` answers the questions at the start.
    """

    name: str
    command: tuple[str, ...]
    prepare: Callable[[HookedWorkspace, MockModel], None]
    start: Callable[[Terminal], None]
    tool: str
    argument: str
    undo: str
    other: str
    delete: str = DELETE
    background: Mapping[str, object] | None = None
    """What tells the host's tool to run a command in the background, if the shell's `&` does not."""
    folder: str = ""
    """The host's folder in the home directory, if it is not a dot and the host's name."""

    def step(self, command: str) -> Step:
        return self.tool, {self.argument: command, **({"description": "work"} if self.name == "opencode" else {})}


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder, and `b"/"` for each folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"/" for path in paths}


def prepare_claude(workspace: HookedWorkspace, model: MockModel) -> None:
    body = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "customApiKeyResponses": {"approved": [KEY[-20:]]},
        "projects": {str(workspace.root): {"hasTrustDialogAccepted": True}},
    }
    (workspace.home / ".claude.json").write_text(json.dumps(body))
    (workspace.home / ".claude").mkdir()
    (workspace.home / ".claude/settings.json").write_text('{\n    "model": "opus"}')


def start_claude(screen: Terminal) -> None:
    screen.wait_for("for agents")


def prepare_codex(workspace: HookedWorkspace, model: MockModel) -> None:
    (workspace.home / ".codex").mkdir()
    (workspace.home / ".codex/hooks.json").write_text('{"hooks": {}}')
    (workspace.home / ".codex/config.toml").write_text(
        f"""
model = "mock"
model_provider = "mock"
[model_providers.mock]
name = "mock"
base_url = "{model.address}/v1"
wire_api = "responses"
env_key = "MOCK_KEY"
[projects."{workspace.root}"]
trust_level = "trusted"
"""
    )


def start_codex(screen: Terminal) -> None:
    screen.wait_for("Trust all and continue")
    screen.wait_until_still()
    screen.press("2")
    screen.wait_until_still()
    screen.press("Enter")
    screen.wait_for("Ask Codex to do anything")


def prepare_gemini(workspace: HookedWorkspace, model: MockModel) -> None:
    (workspace.home / ".gemini").mkdir()
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}}}
    (workspace.home / ".gemini/settings.json").write_text(json.dumps(settings))


def start_gemini(screen: Terminal) -> None:
    screen.wait_for("Type your message")


def prepare_opencode(workspace: HookedWorkspace, model: MockModel) -> None:
    folder = workspace.home / ".config/opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{model.address}/v1", "apiKey": "none"},
        "models": {"mock": {"name": "mock", "tool_call": True}},
    }
    config = {"provider": {"mock": provider}, "permission": {"*": "allow"}, "small_model": "mock/mock"}
    schema = {"$schema": "https://opencode.ai/config.json"}  # opencode would add it
    (folder / "opencode.json").write_text(json.dumps({**schema, **config, "autoupdate": False}))
    (folder / "tui.json").write_text('{"theme": "opencode"}')


def start_opencode(screen: Terminal) -> None:
    screen.wait_for("Ask anything")
    screen.wait_until_still()


HOSTS = (
    Host(
        name="claude",
        command=("claude", "--permission-mode", "default", "--allowedTools", "Bash,Edit,Read"),
        prepare=prepare_claude,
        start=start_claude,
        tool="Bash",
        argument="command",
        undo="/undo",
        other="/mulligan ",
    ),
    Host(
        name="codex",
        command=("codex", "--disable", "daemon_auto_start", "--dangerously-bypass-approvals-and-sandbox"),
        prepare=prepare_codex,
        start=start_codex,
        tool="exec_command",
        argument="cmd",
        undo="undo",
        other="mulligan ",
        # Codex refuses `rm -rf` where nobody can approve it.
        delete="rm -r folder; echo KEY=2 > .env",
    ),
    Host(
        name="gemini",
        command=("gemini", "--yolo", "-m", "gemini-2.5-flash"),
        prepare=prepare_gemini,
        start=start_gemini,
        tool="run_shell_command",
        argument="command",
        undo="/undo",
        other="/mulligan ",
        background={"is_background": True},
    ),
    Host(
        name="opencode",
        command=("opencode", "--model", "mock/mock"),
        prepare=prepare_opencode,
        start=start_opencode,
        tool="bash",
        argument="command",
        undo="/undo",
        other="/mulligan ",
        folder=".config/opencode",
    ),
)


@pytest.mark.req("D14.hooks.typed_commands", "D14.hooks.model_told", "D14.hosts.install", "D14.hosts.uninstall")
@pytest.mark.req("D14.hooks.left_running")
@pytest.mark.parametrize(
    "host",
    [pytest.param(host, id=host.name, marks=() if host.name == "claude" else pytest.mark.slow) for host in HOSTS],
)
def test_undo_is_typed_and_the_model_learns_of_it(workspace: HookedWorkspace, host: Host) -> None:
    """Three prompts, and between them every kind of undo. No command asks the model; the person's edit is kept."""
    assert any((place / host.name).exists() for place in PLACES), f"the host is missing: {INSTALL}"
    workspace.extra["MULLIGAN_HOOKS_WAIT_S"] = "60"
    root = workspace.root
    (root / "folder").mkdir()
    (root / "folder/deep.txt").write_text("deep\n")
    before = tree(root)
    with scripted_model([]) as model:
        host.prepare(workspace, model)
        settings = tree(workspace.home / (host.folder or f".{host.name}"))
        done = workspace.mulligan("install", host.name, "--yes", "--store", str(workspace.store))
        assert done.returncode == 0, done.stdout + done.stderr
        # What the hooks of Codex's daemon would see, so the store must be in the commands.
        env = {**environment(workspace, model), "ANTHROPIC_API_KEY": KEY, "MULLIGAN_HOME": str(workspace.home / "no")}
        with terminal(host.command, cwd=root, env=env) as screen:
            host.start(screen)
            use(screen, model, host, workspace, before)
    assert not (workspace.home / "no").exists()
    removed = workspace.mulligan("uninstall", host.name, "--yes", "--store", str(workspace.store))
    assert removed.returncode == 0, removed.stderr
    after = tree(workspace.home / (host.folder or f".{host.name}"))
    config = after.pop("config.toml", b"")
    assert b"hooks" not in config and config.startswith(settings.pop("config.toml", b""))
    assert {name: after.get(name) for name in settings} == settings
    # opencode itself installs packages beside a plugin; they are not ours.
    ours = [path for path in workspace.home.rglob("*") if path.name in OWN_FILES and "node_modules" not in path.parts]
    assert ours == []


@pytest.mark.req("D14.hooks.typed_fallback")
@pytest.mark.parametrize(
    "name", ["claude", pytest.param("codex", marks=pytest.mark.slow), pytest.param("gemini", marks=pytest.mark.slow)]
)
def test_a_hook_that_fails_lets_the_model_tell_the_person(workspace: HookedWorkspace, name: str) -> None:
    """The host sends the line to its model, which must do nothing but say so."""
    (host,) = [one for one in HOSTS if one.name == name]
    with scripted_model([]) as model:
        host.prepare(workspace, model)
        done = workspace.mulligan("install", name, "--yes", "--store", str(workspace.store))
        assert done.returncode == 0, done.stdout + done.stderr
        broken = 0
        for path in (workspace.home / f".{name}").rglob("*.json"):
            text = path.read_text()
            path.write_text(text.replace(CLIENT, "/no/such/client.py"))
            broken += text.count(CLIENT)
        assert broken
        env = {**environment(workspace, model), "ANTHROPIC_API_KEY": KEY}
        with terminal(host.command, cwd=workspace.root, env=env) as screen:
            host.start(screen)
            line = "$undo" if name == "codex" else "/undo"
            screen.type(line)
            if name == "codex":
                # The first Enter takes the entry of the menu.
                screen.wait_until_still()
                screen.press("Enter")
            screen.wait_until(lambda: any(NO_ANSWER in text for text in model.requests), "the fallback")
    assert tree(workspace.root)["gone.txt"] == b"stay\n"


def use(screen: Terminal, model: MockModel, host: Host, workspace: HookedWorkspace, before: dict[str, bytes]) -> None:
    root, redo = workspace.root, host.undo.replace("undo", "redo")
    work(screen, model, [host.step("echo new > made.txt")], "first")
    work(screen, model, [host.step(host.delete)], "second")
    assert not (root / "folder").exists(), model.results
    (root / "a.txt").write_text("one\nmine\n")
    edited = {**before, "a.txt": b"one\nmine\n"}

    answered(screen, model, host.undo, "restored folder/deep.txt")
    assert tree(root) == {**edited, "made.txt": b"new\n"}
    answered(screen, model, redo, "removed folder/deep.txt")
    assert not (root / "folder").exists()
    answered(screen, model, f"{host.other}rollback", "restored folder/deep.txt")
    assert tree(root) == {**edited, "made.txt": b"new\n"}
    answered(screen, model, f"{host.other}rewind", "from prompt N on")
    answered(screen, model, f"{host.other}rewind 2", "removed made.txt")
    assert tree(root) == edited

    asked = len(model.requests)
    work(screen, model, [], "go on")
    (told,) = [text for text in model.requests[asked:] if NEWS in text]
    news = told[told.index(NEWS) :]
    assert (told.count(NEWS), news.count("undone: "), news.count(", made.txt")) == (1, 1, 1)
    asked = len(model.requests)
    work(screen, model, [], "go further")
    assert max(text.count(NEWS) for text in model.requests[asked:]) <= 1
    undo_what_a_process_left_running_wrote(screen, model, host, workspace)


def undo_what_a_process_left_running_wrote(
    screen: Terminal, model: MockModel, host: Host, workspace: HookedWorkspace
) -> None:
    """The command has ended, and its process writes a file when no call runs."""
    gate, late = workspace.home / "gate", workspace.root / "late.txt"
    os.mkfifo(gate)
    # Open in both directions, so that no side waits for the other to open it.
    told = os.open(gate, os.O_RDWR)
    try:
        server = workspace.home / "server.sh"
        server.write_text(f"read go < {gate}\necho late > late.txt\nread go < {gate}\n")
        tool, arguments = host.step(f"sh {server}" if host.background else f"setsid sh {server} > /dev/null 2>&1 &")
        work(screen, model, [(tool, {**arguments, **(host.background or {})})], "serve")
        os.write(told, b"go\n")
        screen.wait_until(lambda: late.is_file() and late.read_text() == "late\n", "late.txt")
        answered(screen, model, host.undo, "removed late.txt")
        assert not late.exists()
        os.write(told, b"go\n")
    finally:
        os.close(told)
    # In another terminal, while the host waits for its person.
    done = workspace.mulligan("redo")
    assert (done.returncode, late.exists()) == (0, True), done.stderr
    for prompt, least in (("go home", 1), ("go away", 0)):
        asked = len(model.requests)
        work(screen, model, [], prompt)
        counts = [text.count("changed through that: late.txt") for text in model.requests[asked:]]
        assert least <= max(counts) <= 1


NEWS = "read them again before you change them"


def work(screen: Terminal, model: MockModel, steps: list[Step], prompt: str) -> None:
    """Type a prompt and wait until the model has had the result of each of its calls, and the turn is over."""
    model.steps += steps
    asked, over = len(model.requests), screen.count("done")
    screen.type(prompt)
    screen.wait_until(lambda: len(model.requests) > asked and len(model.results) == len(model.steps), prompt)
    screen.wait_for("done", over + 1)
    screen.wait_until_still()


def answered(screen: Terminal, model: MockModel, line: str, answer: str) -> None:
    """Type a command; it is answered without the model."""
    asked, before = len(model.requests), screen.count(answer)
    screen.type(line)
    screen.wait_for(answer, before + 1)
    screen.wait_until_still()
    assert len(model.requests) == asked
