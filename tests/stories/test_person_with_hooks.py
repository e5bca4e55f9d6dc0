"""A person works with Claude Code. Hooks report its tool calls to Mulligan; the person undoes calls in a terminal."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.agents.hooks.hooked_workspace import HookedWorkspace
from tests.stories.user_project import UserProject


@pytest.fixture
def agent(project: UserProject) -> Iterator[HookedWorkspace]:
    """Claude Code as Mulligan sees it: one hook process before each tool call and one after it."""
    home = project.root.parent / "home"
    home.mkdir()
    agent = HookedWorkspace(project.root, home, project.state)
    yield agent
    agent.stop()


def run_tool(agent: HookedWorkspace, command: str, label: str) -> None:
    """The agent runs a shell command in the project."""
    agent.tool("Bash", {"command": command}, label, lambda: subprocess.run(command, shell=True, cwd=agent.root))


def test_a_person_undoes_a_shell_command_of_the_agent(project: UserProject, agent: HookedWorkspace) -> None:
    before = project.files()
    agent.hook("UserPromptSubmit", prompt="tidy up")
    run_tool(agent, "rm -rf src; echo KEY=2 > .env; echo junk > junk.txt", "toolu_1")
    assert project.files() == {
        "notes.txt": "do not lose me\n",
        ".gitignore": ".env\n",
        ".env": "KEY=2\n",
        "junk.txt": "junk\n",
    }

    (row,) = agent.log()
    assert (row["label"], row["tool"], row["status"]) == ("toolu_1", "Bash", "committed")
    assert {change["path"]: change["kind"] for change in row["changes"]} == {
        "src": "deleted",
        "src/app.py": "deleted",
        ".env": "modified",
        "junk.txt": "created",
    }

    agent.undo("toolu_1")
    assert project.files() == before


def test_undo_keeps_what_the_person_typed_into_the_same_file(project: UserProject, agent: HookedWorkspace) -> None:
    file = project.root / "src/app.py"
    agent.hook("UserPromptSubmit", prompt="rename first")
    run_tool(agent, "sed -i s/first/renamed/ src/app.py", "toolu_1")
    file.write_text(file.read_text().replace("fifth = 5", "fifth = 55"))

    agent.undo("toolu_1")
    assert file.read_text() == "first = 1\nsecond = 2\nthird = 3\nfourth = 4\nfifth = 55\n"


def test_rollback_undoes_a_whole_prompt_and_redo_brings_it_back(project: UserProject, agent: HookedWorkspace) -> None:
    before = project.files()
    agent.hook("UserPromptSubmit", prompt="two steps")
    run_tool(agent, "echo one > one.txt", "toolu_1")
    run_tool(agent, "rm notes.txt", "toolu_2")
    after = project.files()
    agent.hook("Stop")

    agent.mulligan("rollback")
    assert project.files() == before
    agent.mulligan("redo")
    assert project.files() == after
