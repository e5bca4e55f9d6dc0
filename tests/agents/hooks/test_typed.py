"""Commands typed into an agent's prompt, and what the model learns afterwards: through real hooks."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mulligan.hosts.news import NEWS_MAX_BYTES
from mulligan.hosts.typed import SPELLINGS, VERBS, TypedCommand, parse_typed
from tests.agents.hooks.hooked_workspace import HookedWorkspace
from tests.agents.hooks.test_recorder import Agent

COMMAND = "rm gone.txt; echo KEY=2 > .env"


@pytest.fixture(autouse=True)
def _patience(workspace: HookedWorkspace) -> None:
    """A busy machine may need more than the four seconds that a person waits for an answer."""
    workspace.extra["MULLIGAN_HOOKS_WAIT_S"] = "60"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    root = tmp_path / "project"
    (root / "a.txt").write_text("one\ntwo\n")
    made = Agent(root, tmp_path / "store")
    yield made
    made.close()


def worked(workspace: HookedWorkspace) -> str:
    """One prompt with one command. Returns the short id of its call."""
    assert workspace.prompt("change it", "p1") is None

    def act() -> None:
        (workspace.root / "gone.txt").unlink()
        (workspace.root / ".env").write_text("KEY=2\n")

    workspace.tool("Bash", {"command": COMMAND}, "toolu_1", act)
    workspace.hook("Stop")
    return str(workspace.log()[0]["id"][-8:])


def touch(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).touch()


@pytest.mark.req("D14.hooks.typed_commands")
class TestSpelling:
    @pytest.mark.parametrize(
        ("host", "prompt", "words"),
        [
            ("claude", "/undo", ["undo"]),
            ("claude", " /undo 5dcd820b\n", ["undo", "5dcd820b"]),
            ("claude", "/mulligan", ["status"]),
            ("claude", "/mulligan restore 'a b.txt'", ["restore", "a b.txt"]),
            ("claude", "/mulligan:undo x", ["undo", "x"]),
            ("claude", "/mulligan:mulligan rollback", ["rollback"]),
            ("claude", "/mulligan it's", ["it's"]),
            ("claude", "undo", None),
            ("claude", "/undone", None),
            ("claude", "/rewind", None),
            ("claude", "please /undo", None),
            ("codex", "undo", ["undo"]),
            ("codex", "undo 5dcd820b", ["undo", "5dcd820b"]),
            ("codex", "undo the last change", None),
            ("codex", "redo it", None),
            ("codex", "$undo", ["undo"]),
            ("codex", "$mulligan:undo 5dcd820b", ["undo", "5dcd820b"]),
            ("codex", "mulligan rewind 2", ["rewind", "2"]),
            ("codex", "mulligan is broken, mend it", None),
            ("codex", "/undo --yes", ["undo", "--yes"]),
            ("gemini", "mulligan: undo 3", ["undo", "3"]),
            ("gemini", "/undo 3", ["undo", "3"]),
            ("gemini", "undo", None),
            ("zed", "/undo", None),
        ],
    )
    def test_a_prompt_is_a_command_only_in_the_spelling_of_its_host(
        self, host: str, prompt: str, words: list[str] | None
    ) -> None:
        found = parse_typed(host, prompt)
        assert found == (None if words is None else TypedCommand(host, words[0], tuple(words[1:])))

    @pytest.mark.parametrize("host", sorted(SPELLINGS))
    def test_each_line_that_mulligan_prints_is_a_command(self, host: str) -> None:
        lines = {verb: SPELLINGS[host].line(verb, "5dcd820b") for verb in VERBS}
        assert {verb: parse_typed(host, line) for verb, line in lines.items()} == {
            verb: TypedCommand(host, verb, ("5dcd820b",)) for verb in VERBS
        }


@pytest.mark.req("D14.hooks.typed_commands")
class TestCommands:
    def test_undo_and_redo_say_what_they_did_and_how_to_reverse_it(self, workspace: HookedWorkspace) -> None:
        call = worked(workspace)
        assert workspace.typed("/undo") == (
            f"Undid Bash: {COMMAND} ({call}):\n  restored .env\n  restored gone.txt\n`/redo` reverses this."
        )
        assert (workspace.root / "gone.txt").read_text() == "stay\n"
        assert (workspace.root / ".env").read_text() == "KEY=1\n"
        redone = workspace.typed("/redo", "typed2").splitlines()
        assert redone[:3] == [f"Redid Bash: {COMMAND} ({call}):", "  restored .env", "  removed gone.txt"]
        reverse = redone[3].split("`")[1]
        assert workspace.typed(reverse, "typed3").startswith(f"Undid Bash: {COMMAND} ({call}):")
        assert (workspace.root / "gone.txt").exists()

    def test_every_verb_answers(self, workspace: HookedWorkspace) -> None:
        call = worked(workspace)
        assert workspace.typed("/mulligan", "t1") == (
            f"{workspace.root}: this session has 1 call on record\n`/undo` would undo Bash: {COMMAND} ({call})"
        )
        logged = workspace.typed("/mulligan log", "t2")
        assert logged.startswith(call)
        assert logged.endswith(f"  Bash: {COMMAND}: M .env +1 -1, D gone.txt +0 -1")
        assert "-KEY=1\n+KEY=2\n" in workspace.typed("/mulligan diff", "t3")
        listed = workspace.typed("/mulligan rewind", "t4").splitlines()[0]
        assert listed.startswith("  1  ") and listed.endswith(" change it: .env, gone.txt")
        assert "  restored gone.txt\n" in workspace.typed("/mulligan restore gone.txt", "t5")
        assert (workspace.root / ".env").read_text() == "KEY=2\n"
        assert workspace.typed("/mulligan rollback", "t6").startswith("Rolled back")
        assert (workspace.root / ".env").read_text() == "KEY=1\n"
        assert workspace.typed("/undo", "t7") == "There is nothing to undo here."
        assert workspace.typed("/mulligan dance", "t8").startswith("Mulligan has no command 'dance'.\nCommands: /undo")
        assert workspace.typed("/undo --force", "t9").startswith("Mulligan does not know --force here.\nCommands:")

    def test_rewind_takes_back_the_last_prompts_and_says_how_to_rewind_the_conversation(
        self, workspace: HookedWorkspace
    ) -> None:
        worked(workspace)
        workspace.prompt("and now the folder", "p2")
        made = workspace.root / "made"
        told: dict[str, Any] = {
            "tool_name": "Bash",
            "tool_input": {"command": "mkdir made"},
            "tool_use_id": "toolu_2",
            "prompt_id": "p2",
        }
        workspace.hook("PreToolUse", **told)
        made.mkdir()
        workspace.hook("PostToolUse", **told)
        workspace.hook("Stop", prompt_id="p2")
        listed = workspace.typed("/mulligan rewind", "t1").splitlines()
        assert listed[0].endswith(" and now the folder: made") and listed[1].endswith(" change it: .env, gone.txt")
        answer = workspace.typed("/mulligan rewind 2", "t2")
        assert "  removed made\n" in answer and "`/rewind` brings the conversation back too" in answer
        assert not made.exists() and (workspace.root / "gone.txt").exists()

    def test_a_command_begins_no_turn_and_works_in_its_own_session(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        other = workspace.root / "other.txt"
        told: dict[str, Any] = {
            "session_id": "s2",
            "tool_name": "Write",
            "tool_input": {"file_path": str(other)},
            "tool_use_id": "w",
        }
        workspace.hook("PreToolUse", **told)
        other.write_text("the second agent's\n")
        workspace.hook("PostToolUse", **told)
        assert "restored gone.txt" in workspace.typed("/undo", "t1")
        assert other.read_text() == "the second agent's\n"
        rows = workspace.log()
        assert [(row["tool"], row["session_id"], row["status"]) for row in rows] == [
            ("undo", "s1", "committed"),
            ("Write", "s2", "committed"),
            ("Bash", "s1", "undone"),
        ]
        assert "prompt" not in workspace.typed("/mulligan rewind", "t2").split("change it")[0]

    def test_two_hooks_that_report_one_prompt_undo_once(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        first = workspace.typed("/undo", "same")
        assert workspace.typed("/undo", "same") == first
        assert [row["tool"] for row in workspace.log()] == ["undo", "Bash"]

    def test_names_cannot_reach_the_terminal(self, workspace: HookedWorkspace) -> None:
        workspace.prompt("change it", "p1")
        name = "\x1b[31mred\u202e"
        workspace.tool("Bash", {"command": f"touch '{name}'\n"}, "t", (workspace.root / name).touch)
        for verb in ("status", "log", "diff", "rewind", "undo"):
            assert all(char.isprintable() or char == "\n" for char in workspace.typed(f"/mulligan {verb}", verb))


@pytest.mark.req("D14.hooks.typed_plan")
class TestPlan:
    def test_an_undo_of_many_paths_shows_its_plan_and_the_line_that_applies_it(
        self, workspace: HookedWorkspace
    ) -> None:
        many = workspace.root / "many"

        def make() -> None:
            many.mkdir()
            for number in range(60):
                (many / f"{number}.txt").write_text("x\n")

        workspace.prompt("make many", "p1")
        workspace.tool("Bash", {"command": "make"}, "toolu_1", make)
        call = workspace.log()[0]["id"][-8:]
        planned = workspace.typed("/undo", "t1").splitlines()
        assert planned[0] == f"Nothing is changed yet. The undo of Bash: make ({call}) would change 61 paths:"
        assert planned[1:] == ["  would remove many and 60 in it", f"`/undo {call} --yes` applies this."]
        assert len(list(many.iterdir())) == 60
        assert "removed many" in workspace.typed(f"/undo {call} --yes", "t2")
        assert not many.exists()

    def test_a_conflict_shows_the_plan_and_leaves_the_persons_edit(self, workspace: HookedWorkspace) -> None:
        call = worked(workspace)
        (workspace.root / ".env").write_text("KEY=mine\n")
        planned = workspace.typed("/undo", "t1")
        assert planned == (
            f"Nothing is changed yet. The undo of Bash: {COMMAND} ({call}) would change 1 path and leave 1 conflict:\n"
            "  would restore gone.txt\n"
            "  would leave .env as it is: you changed the same lines\n"
            f"`/undo {call} --yes` applies this.\n"
            f"`/undo {call} --overwrite` also replaces your own changes there."
        )
        assert not (workspace.root / "gone.txt").exists()
        assert "left .env as it is" in workspace.typed(f"/undo {call} --yes", "t2")
        assert (workspace.root / "gone.txt").exists()
        assert (workspace.root / ".env").read_text() == "KEY=mine\n"

    def test_a_dry_run_changes_nothing(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        assert "would restore gone.txt" in workspace.typed("/undo --dry-run")
        assert not (workspace.root / "gone.txt").exists()


@pytest.mark.req("D14.hooks.typed_late")
class TestTime:
    def test_a_slow_undo_is_announced_and_finishes(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        del workspace.extra["MULLIGAN_HOOKS_WAIT_S"]
        (database,) = workspace.store.glob("*.db")
        writer = sqlite3.connect(database, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        try:
            answer = workspace.typed("/undo")
        finally:
            writer.execute("ROLLBACK")
            writer.close()
        assert answer == (
            "Mulligan is still working on the undo. It finishes in the background; `/mulligan status` shows it."
        )
        while not (workspace.root / "gone.txt").exists():
            os.sched_yield()

    def test_a_command_that_came_too_late_is_not_run(self, agent: Agent) -> None:
        agent.say("prompt", prompt="change it")
        agent.shell("t1", "rm a.txt")
        agent.say("prompt", prompt="/undo", turn="p2", answers=True, late=True)
        assert not (agent.root / "a.txt").exists()
        assert [row["tool"] for row in agent.log()] == ["Bash"]

    def test_a_hook_without_answers_leaves_a_command_alone(self, agent: Agent) -> None:
        agent.say("prompt", prompt="change it")
        agent.shell("t1", "rm a.txt")
        agent.say("prompt", prompt="/undo", turn="p2")
        assert not (agent.root / "a.txt").exists()


@pytest.mark.req("D14.hooks.model_told")
class TestNews:
    def test_an_undo_in_another_terminal_and_an_edit_are_told_once(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        workspace.undo()
        (workspace.root / ".env").write_text("KEY=mine\n")
        (workspace.root / "gone.txt").unlink()
        assert workspace.news("p2") == (
            "Mulligan: these files are not as you left them; read them again before you change them.\n"
            f"- undone: Bash: {COMMAND} [toolu_1]\n"
            "- files that changed through that: .env, gone.txt"
        )
        assert workspace.news("p3") is None

    def test_an_edit_alone_is_told(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        (workspace.root / ".env").write_text("KEY=mine\n")
        assert (workspace.news("p2") or "").splitlines()[1:] == ["- edited by the person or another program: .env"]
        workspace.stop()  # what was told outlives the background process
        assert workspace.news("p3") is None

    def test_a_typed_undo_is_told_at_the_next_prompt_and_so_is_its_redo(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        workspace.typed("/undo", "t1")
        assert f"- undone: Bash: {COMMAND} [toolu_1]\n" in (workspace.news("p2") or "")
        workspace.typed("/redo", "t2")
        assert f"- done again: Bash: {COMMAND} [toolu_1]\n" in (workspace.news("p3") or "")
        assert workspace.news("p4") is None

    def test_other_agents_are_told_nothing_of_it(self, workspace: HookedWorkspace) -> None:
        worked(workspace)
        assert workspace.prompt("hello", "q1", agent="codex") is None
        workspace.typed("/undo", "t1")
        given = {"session_id": "s2"}
        assert workspace.hook("UserPromptSubmit", prompt="hi", prompt_id="q2", **given).stdout == b""

    def test_news_stay_short(self, workspace: HookedWorkspace) -> None:
        workspace.prompt("make many", "p1")
        names = [f"{'long name ' * 20}{number}" for number in range(40)]
        workspace.tool("Bash", {"command": "make"}, "t", lambda: touch(workspace.root, names))
        workspace.undo()
        told = workspace.news("p2") or ""
        assert len(told.encode()) <= NEWS_MAX_BYTES
        assert "- undone: Bash: make [t]\n" in told and told.endswith("`mulligan log` lists it.")


@pytest.mark.req("D14.log.names_commands")
def test_the_log_names_the_command_of_a_call_on_one_short_line(workspace: HookedWorkspace) -> None:
    worked(workspace)
    long = "printf '\\033[31m'\n" + "echo x; " * 30
    workspace.tool("Bash", {"command": long}, "toolu_2", lambda: (workspace.root / "made.txt").write_text("x\n"))
    newest, oldest = workspace.mulligan("log").stdout.splitlines()
    assert f"  Bash: {COMMAND}" in oldest and "M .env +1 -1, D gone.txt +0 -1" in oldest
    assert newest.index("A made.txt") == oldest.index("M .env")
    assert max(map(len, (newest, oldest))) <= 120 and "\x1b" not in newest
    assert workspace.mulligan("show").stdout.startswith(newest[:10])


@pytest.mark.req("D14.hooks.prompts_of_hosts")
@pytest.mark.parametrize(
    ("agent_name", "fields"),
    [
        ("claude", {"prompt": "<task-notification>\n<tool-use-id>toolu_1</tool-use-id>"}),
        ("codex", {"prompt": "undo", "agent_id": "worker-1"}),
    ],
)
def test_a_prompt_that_the_host_makes_begins_no_turn_and_undoes_nothing(
    workspace: HookedWorkspace, agent_name: str, fields: dict[str, str]
) -> None:
    worked(workspace)
    assert workspace.hook("UserPromptSubmit", agent=agent_name, **{"prompt_id": "p2", **fields}).stdout == b""
    assert [row["status"] for row in workspace.log()] == ["committed"]
    (listed, _) = workspace.typed("/mulligan rewind").splitlines()
    assert "change it" in listed
