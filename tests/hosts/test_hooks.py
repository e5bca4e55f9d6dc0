"""Real agents, offline, with our hooks in their settings: what they edit and what they run comes back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mulligan.testing.agents import MockModel, Step, scripted_model
from tests.agents.hooks.hooked_workspace import HookedWorkspace

pytestmark = pytest.mark.hosts

TOOLS = Path(__file__).parents[2] / ".tools"
PLACES = [TOOLS / folder / "node_modules/.bin" for folder in ("mcp", "node", "agents")]
INSTALL = "make test-hosts installs it"

SHELL = "echo KEY=2 > .env; rm gone.txt"
FAILING = "mkdir made; echo x > made/x; exit 3"


def environment(workspace: HookedWorkspace, model: MockModel) -> dict[str, str]:
    return {
        **workspace.env,
        "MULLIGAN_HOOKS_WAIT_S": "60",
        "PATH": os.pathsep.join([*map(str, PLACES), os.environ["PATH"]]),
        "ANTHROPIC_BASE_URL": model.address,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "MOCK_KEY": "none",
        "GOOGLE_GEMINI_BASE_URL": model.address,
        "GEMINI_API_KEY": "none",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }


def wait_for_minutes(workspace: HookedWorkspace, agent: str) -> None:
    """Hooks that the agent does not give up on: on a busy machine, they are slow to start."""
    (file,) = (path for path in workspace.home.glob(f".{agent}/*.json") if "hooks" in json.loads(path.read_text()))
    settings = json.loads(file.read_text())
    for hook in (hook for entries in settings["hooks"].values() for entry in entries for hook in entry["hooks"]):
        hook["timeout"] *= 100
    file.write_text(json.dumps(settings))


def claude_steps(root: Path) -> list[Step]:
    file = str(root / "a.txt")
    return [
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "two", "new_string": "TWO"}),
        ("Bash", {"command": SHELL}),
        ("Bash", {"command": FAILING}),
    ]


def claude(workspace: HookedWorkspace, model: MockModel) -> list[str]:
    return ["claude", "-p", "please change it", "--allowedTools", "Edit,Bash,Read"]


def gemini_steps(root: Path) -> list[Step]:
    edit = {"file_path": str(root / "a.txt"), "old_string": "two", "new_string": "TWO", "instruction": "shout"}
    commands: list[Step] = [("run_shell_command", {"command": one}) for one in (SHELL, FAILING)]
    return [("replace", edit), *commands]


def gemini(workspace: HookedWorkspace, model: MockModel) -> list[str]:
    file = workspace.home / ".gemini/settings.json"
    hooks = json.loads(file.read_text())
    file.write_text(json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}, **hooks}))
    return ["gemini", "-p", "please change it", "--yolo", "-m", "gemini-2.5-flash"]


def codex_steps(root: Path) -> list[Step]:
    edit = "sed -i s/two/TWO/ a.txt"
    return [("exec_command", {"cmd": one}) for one in (edit, SHELL, FAILING)]


def codex(workspace: HookedWorkspace, model: MockModel) -> list[str]:
    (workspace.home / ".codex/config.toml").write_text(
        f"""
model = "mock"
model_provider = "mock"
[model_providers.mock]
name = "mock"
base_url = "{model.address}/v1"
wire_api = "responses"
env_key = "MOCK_KEY"
"""
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--dangerously-bypass-hook-trust"]
    return ["codex", "exec", *flags, "please change it"]


AGENTS: list[tuple[Callable[[HookedWorkspace, MockModel], list[str]], Callable[[Path], list[Step]]]] = [
    (claude, claude_steps),
    (gemini, gemini_steps),
    (codex, codex_steps),
]


@pytest.mark.req(
    "D14.hooks.install_claude",
    "D14.hooks.install_gemini",
    "D14.hooks.install_codex",
    "D14.hooks.edits_and_shell",
    "D19.foreign_programs",
)
@pytest.mark.parametrize(("agent", "steps"), AGENTS, ids=["claude", "gemini", "codex"])
def test_what_an_agent_edits_and_runs_comes_back(
    workspace: HookedWorkspace,
    agent: Callable[[HookedWorkspace, MockModel], list[str]],
    steps: Callable[[Path], list[Step]],
) -> None:
    assert any((place / agent.__name__).exists() for place in PLACES), f"the agent is missing: {INSTALL}"
    assert workspace.mulligan("hooks", "install", agent.__name__).returncode == 0
    wait_for_minutes(workspace, agent.__name__)
    with scripted_model(steps(workspace.root)) as model:
        done = subprocess.run(
            agent(workspace, model),
            cwd=workspace.root,
            env=environment(workspace, model),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(model.results) == len(steps(workspace.root)), done.stdout + done.stderr
    rows = workspace.log()[::-1]
    assert [{one["path"]: one["kind"] for one in row["changes"]} for row in rows] == [
        {"a.txt": "modified"},
        {".env": "modified", "gone.txt": "deleted"},
        {"made": "created", "made/x": "created"},
    ]
    assert [(row["status"], row["external"], row["coverage"]) for row in rows] == [("committed", False, [])] * 3
    assert len({row["turn_id"] for row in rows}) == 1
    shown = json.loads(workspace.mulligan("show", rows[0]["id"], "--json").stdout)
    assert (shown["prompt"], Path(shown["transcript"]).exists()) == ("please change it", True)

    workspace.undo(rows[1]["id"])
    assert (workspace.root / ".env").read_text() == "KEY=1\n"
    assert (workspace.root / "gone.txt").read_text() == "stay\n"
    assert (workspace.root / "made/x").exists()
    workspace.undo(rows[0]["id"])
    assert (workspace.root / "a.txt").read_text() == "one\ntwo\n"
    workspace.undo(rows[2]["id"])
    assert not (workspace.root / "made").exists()
