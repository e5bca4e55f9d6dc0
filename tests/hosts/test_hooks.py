"""Real agents, offline, with our hooks in their settings: what they edit and what they run comes back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_room.hooks.people import Site
from mulligan.testing.mock_model import MockModel, Step, scripted_model

TOOLS = Path(__file__).parents[3] / ".tools"
PLACES = [TOOLS / folder / "node_modules/.bin" for folder in ("mcp", "node", "agents")]
INSTALL = "make .tools/.installed"

SHELL = "echo KEY=2 > .env; rm gone.txt"
FAILING = "mkdir made; echo x > made/x; exit 3"


def environment(site: Site, model: MockModel) -> dict[str, str]:
    return {
        **site.env,
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


def claude_steps(root: Path) -> list[Step]:
    file = str(root / "a.txt")
    return [
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "two", "new_string": "TWO"}),
        ("Bash", {"command": SHELL}),
        ("Bash", {"command": FAILING}),
    ]


def claude(site: Site, model: MockModel) -> list[str]:
    return ["claude", "-p", "please change it", "--allowedTools", "Edit,Bash,Read"]


def gemini_steps(root: Path) -> list[Step]:
    edit = {"file_path": str(root / "a.txt"), "old_string": "two", "new_string": "TWO", "instruction": "shout"}
    commands: list[Step] = [("run_shell_command", {"command": one}) for one in (SHELL, FAILING)]
    return [("replace", edit), *commands]


def gemini(site: Site, model: MockModel) -> list[str]:
    file = site.home / ".gemini/settings.json"
    hooks = json.loads(file.read_text())
    file.write_text(json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}, **hooks}))
    return ["gemini", "-p", "please change it", "--yolo", "-m", "gemini-2.5-flash"]


def codex_steps(root: Path) -> list[Step]:
    edit = "sed -i s/two/TWO/ a.txt"
    return [("exec_command", {"cmd": one}) for one in (edit, SHELL, FAILING)]


def codex(site: Site, model: MockModel) -> list[str]:
    (site.home / ".codex/config.toml").write_text(
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


AGENTS: list[tuple[Callable[[Site, MockModel], list[str]], Callable[[Path], list[Step]]]] = [
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
    site: Site, agent: Callable[[Site, MockModel], list[str]], steps: Callable[[Path], list[Step]]
) -> None:
    assert any((place / agent.__name__).exists() for place in PLACES), f"the agent is missing: {INSTALL}"
    assert site.mulligan("hooks", "install", agent.__name__).returncode == 0
    with scripted_model(steps(site.root)) as model:
        done = subprocess.run(
            agent(site, model),
            cwd=site.root,
            env=environment(site, model),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(model.results) == len(steps(site.root)), done.stdout + done.stderr
    rows = site.log()[::-1]
    assert [{one["path"]: one["kind"] for one in row["changes"]} for row in rows] == [
        {"a.txt": "modified"},
        {".env": "modified", "gone.txt": "deleted"},
        {"made": "created", "made/x": "created"},
    ]
    assert [(row["status"], row["external"], row["coverage"]) for row in rows] == [("committed", False, [])] * 3
    assert len({row["turn_id"] for row in rows}) == 1
    shown = json.loads(site.mulligan("show", rows[0]["id"], "--json").stdout)
    assert (shown["prompt"], Path(shown["transcript"]).exists()) == ("please change it", True)

    site.undo(rows[1]["id"])
    assert (site.root / ".env").read_text() == "KEY=1\n"
    assert (site.root / "gone.txt").read_text() == "stay\n"
    assert (site.root / "made/x").exists()
    site.undo(rows[0]["id"])
    assert (site.root / "a.txt").read_text() == "one\ntwo\n"
    site.undo(rows[2]["id"])
    assert not (site.root / "made").exists()
