"""A person builds an agent in Python and makes each tool call a transaction."""

from __future__ import annotations

import pytest

import mulligan
from tests.stories.user_project import UserProject


def test_a_call_that_raises_leaves_no_trace(project: UserProject) -> None:
    before = project.files()
    with mulligan.open(str(project.root), store=str(project.state)) as m:
        session = m.session()
        with pytest.raises(ZeroDivisionError), session.call("broken tool") as call:
            call.write_file("new.txt", "new\n")
            call.exec(["rm", "notes.txt"])
            assert "notes.txt" not in project.files()
            _ = 1 / 0
    assert project.files() == before


def test_undo_of_an_earlier_call_keeps_a_later_one(project: UserProject) -> None:
    with mulligan.open(str(project.root), store=str(project.state)) as m:
        session = m.session()
        with session.call("first") as call:
            call.edit_file("src/app.py", "first = 1", "first = 100")
        with session.call("second") as call:
            call.edit_file("src/app.py", "fifth = 5", "fifth = 500")
        undone = session.undo("first")
        assert [(one.path, one.outcome) for one in undone.outcomes] == [("src/app.py", "merged")]
        session.redo()
        session.undo("first", dry_run=True)
    assert project.files()["src/app.py"] == "first = 100\nsecond = 2\nthird = 3\nfourth = 4\nfifth = 500\n"


def test_a_failed_tool_of_an_agent_loop_keeps_neither_files_nor_state(project: UserProject) -> None:
    def plan_and_write(path: str, fails: bool, context: mulligan.ToolContext) -> str:
        """Write a file and plan to test it."""
        context.filesystem.write(path, "x = 1\n")
        context.session.broadcast(mulligan.Plan(f"test {path}"))
        if fails:
            raise ValueError("the tool fails after it wrote")
        return "done"

    script = [
        {"tool": "plan_and_write", "args": {"path": "good.py", "fails": False}},
        {"tool": "plan_and_write", "args": {"path": "bad.py", "fails": True}},
        "One of two is done.",
    ]
    with mulligan.open(str(project.root), store=str(project.state)) as m:
        done = mulligan.agent_loop("Write both.", session="agent", provider=script, tools=[plan_and_write])
        session = m.session("agent")
        plans = session[mulligan.Plan].all()
    assert done.text == "One of two is done."
    assert ("good.py" in project.files(), "bad.py" in project.files()) == (True, False)
    assert plans == (mulligan.Plan("test good.py"),)


def test_a_fork_works_on_its_own_files_until_it_is_merged(project: UserProject) -> None:
    with mulligan.open(str(project.root), store=str(project.state)) as m:
        session = m.session("main")
        with session.call() as call:
            call.write_file("main.txt", "main\n")
        child = session.fork(files="copy")
        with child.call() as call:
            call.edit_file("notes.txt", "do not lose me", "written by the fork")
        assert project.files()["notes.txt"] == "do not lose me\n"
        child.merge()
    assert project.files()["notes.txt"] == "written by the fork\n"
