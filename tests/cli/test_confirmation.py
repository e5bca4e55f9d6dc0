"""On a terminal a verb that takes something away shows what it would do, and asks."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import mulligan
from mulligan.history.log import is_open_turn
from tests.cli.cli_result import Run, write


def on_a_terminal(work: Path, *arguments: str, answer: str) -> tuple[int, str]:
    """The exit code and what was shown; the answer is typed if something is asked."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "mulligan.cli", *arguments]
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=work)
    os.close(terminal)
    shown = b""
    # A terminal whose last user has gone is told by an error.
    with suppress(OSError):
        while more := os.read(controller, 1024):
            shown += more
            if answer and (b"]: " in shown or b"? " in shown):
                os.write(controller, answer.encode())
                answer = ""
    os.close(controller)
    return child.wait(timeout=600), shown.decode()


@pytest.mark.req("D14.cli.asks_on_terminal")
@pytest.mark.parametrize(("answer", "left"), [("n\n", ["a"]), ("y\n", []), ("\n", [])])
def test_on_a_terminal_undo_shows_its_plan_and_asks(run: Run, work: Path, answer: str, left: list[str]) -> None:
    write(run, "a", "x")
    code, shown = on_a_terminal(work, "undo", answer=answer)
    assert ("would remove a" in shown, os.listdir(work), code) == (True, left, 1 if left else 0)


@pytest.mark.req("D14.cli.asks_on_terminal")
def test_on_a_terminal_overwriting_a_persons_work_needs_a_yes(run: Run, work: Path) -> None:
    (work / "a").write_text("before")
    write(run, "a", "agent")
    (work / "a").write_text("mine")
    code, shown = on_a_terminal(work, "undo", "--on-conflict", "overwrite", answer="\n")
    assert ("would replace your version of a" in shown, code, (work / "a").read_text()) == (True, 1, "mine")
    assert "would replace your version of a" in run("undo", "--on-conflict", "overwrite", "--dry-run").out
    code, shown = on_a_terminal(work, "undo", "--on-conflict", "overwrite", answer="y\n")
    assert ("replaced your version of a" in shown, code, (work / "a").read_text()) == (True, 0, "before")


@pytest.mark.req("D14.cli.asks_on_terminal")
def test_on_a_terminal_without_changes_there_is_no_question(run: Run, work: Path) -> None:
    (work / "a").write_text("before")
    write(run, "a", "agent")
    (work / "a").write_text("mine")
    code, shown = on_a_terminal(work, "undo", answer="n\n")
    assert ("Go ahead?" in shown, "left a as it is" in shown, code) == (False, True, 1)


@pytest.mark.req("D14.cli.asks_on_terminal")
def test_on_a_terminal_stopping_a_running_turn_needs_a_yes(work: Path) -> None:
    with mulligan.open(str(work)) as opened:
        session = opened.session("s")
        with session.call() as call:
            call.write_file("a", "x")
        with session.turn("running") as turn:
            for answer, is_open, code in (("n\n", True, 1), ("y\n", False, 0)):
                rollback = ("rollback", "--session", "s", "--cancel-open")
                assert on_a_terminal(work, *rollback, answer=answer)[0] == code
                with opened.open_root.ledger.store.read() as tx:
                    assert is_open_turn(tx, "s", turn) is is_open
    assert os.listdir(work) == []


@pytest.mark.req("D14.cli.asks_on_terminal")
def test_on_a_terminal_the_answer_no_changes_nothing(run: Run, work: Path) -> None:
    write(run, "a", "x")
    made = run("fork", "--files", "copy", "--json").json
    write(run, "b", "x", "--root", made["directory"])
    for verb in (["gc"], ["drop", made["session_id"]], ["merge", made["session_id"]], ["sessions", "reset", "default"]):
        code, shown = on_a_terminal(work, *verb, answer="n\n")
        assert (code, "--yes" in shown) == (1, False), verb
    assert os.path.isdir(made["directory"]) and os.listdir(work) == ["a"]


@pytest.mark.req("D14.cli.asks_on_terminal")
def test_on_a_terminal_merge_shows_its_plan_and_asks(run: Run, work: Path) -> None:
    (work / "a").write_text("before")
    made = run("fork", "--files", "copy", "--json").json
    write(run, "a", "theirs", "--root", made["directory"])
    (work / "a").write_text("mine")
    merge = ("merge", made["session_id"], "--on-conflict", "overwrite")
    code, shown = on_a_terminal(work, *merge, answer="\n")
    assert ("would replace your version of a" in shown, code, (work / "a").read_text()) == (True, 1, "mine")
    code, shown = on_a_terminal(work, *merge, answer="y\n")
    assert ("would bring in a" in shown, code, (work / "a").read_text()) == (True, 0, "theirs")


@pytest.mark.req("D14.cli.yes_needed")
@pytest.mark.parametrize(
    "verb", [("gc",), ("drop", "fork"), ("undo", "--on-conflict", "overwrite"), ("sessions", "reset", "x")]
)
def test_on_a_terminal_a_script_that_wants_json_is_not_asked(run: Run, work: Path, verb: tuple[str, ...]) -> None:
    (work / "a").write_text("before")
    write(run, "a", "x")
    fork = run("fork", "--files", "copy", "--session", "default", "--json").json["session_id"]
    (work / "a").write_text("mine")
    asked = (fork if word == "fork" else word for word in verb)
    code, shown = on_a_terminal(work, *asked, "--json", answer="y\n")
    assert (code, "--yes" in shown, (work / "a").read_text()) == (2, True, "mine")
