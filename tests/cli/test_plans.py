"""Plans: their digests, and picking files and hunks on a terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mulligan
from mulligan.history.log import is_open_turn
from mulligan.values.errors import ConflictError
from tests.cli.cli_result import Run, write
from tests.cli.test_confirmation import on_a_terminal

LINES = "".join(f"{n}\n" for n in range(30))


@pytest.mark.req("D14.cli.if_match")
@pytest.mark.parametrize("verb", ["undo", "restore", "rollback", "rewind", "redo"])
def test_a_plan_is_applied_only_if_it_has_not_changed(run: Run, work: Path, verb: str) -> None:
    write(run, "a", "one\n")
    call = write(run, "a", "two\n")
    words = [verb, *([call] if verb in ("restore", "rewind") else [])]
    if verb == "redo":
        run("undo")
    state = (work / "a").read_text()
    digest = run(*words, "--dry-run", "--json").json["digest"]
    assert run(*words, "--dry-run", "--json").json["digest"] == digest
    (work / "other").write_text("does not matter")
    (work / "a").write_text("mine\n")
    refused = run(*words, "--if-match", digest, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (1, "conflict")
    assert (work / "a").read_text() == "mine\n"
    (work / "a").write_text(state)
    done = run(*words, "--if-match", digest, "--json")
    assert (done.code, done.json["ok"], "digest" in done.json) == (0, True, False)
    assert (work / "a").read_text() != state


@pytest.mark.req("D14.cli.if_match")
def test_a_newer_call_changes_the_plan_of_a_bare_undo(run: Run, work: Path) -> None:
    write(run, "a", "one\n")
    digest = run("undo", "--dry-run", "--json").json["digest"]
    write(run, "a", "two\n")
    assert run("undo", "--if-match", digest).code == 1
    assert (work / "a").read_text() == "two\n"


@pytest.mark.req("D14.cli.if_match")
def test_the_plan_of_a_merge_has_a_digest(run: Run, work: Path) -> None:
    write(run, "a", "one\n")
    made = run("fork", "--files", "copy", "--json").json
    write(run, "a", "theirs\n", "--root", made["directory"])
    digest = run("merge", made["session_id"], "--dry-run", "--json").json["digest"]
    assert run("merge", made["session_id"], "--if-match", "0" * 64).code == 1
    assert (work / "a").read_text() == "one\n"
    assert run("merge", made["session_id"], "--if-match", digest).code == 0
    assert (work / "a").read_text() == "theirs\n"


@pytest.mark.req("D14.cli.if_match")
def test_a_python_caller_gets_a_conflict_for_another_plan(tmp_path: Path) -> None:
    with mulligan.open(str(tmp_path), store="memory:") as opened:
        session = opened.session("s")
        with session.call() as call:
            call.write_file("a", "one")
        digest = session.undo(dry_run=True).digest
        assert digest is not None
        (tmp_path / "a").write_text("mine")
        with pytest.raises(ConflictError) as refused:
            session.undo(if_match=digest)
        assert refused.value.code == "conflict"
        (tmp_path / "a").write_text("one")
        assert session.undo(if_match=digest).ok
        assert os.listdir(tmp_path) == []


@pytest.mark.req("D14.cli.if_match")
def test_a_plan_that_does_not_match_stops_no_turn(run: Run, work: Path) -> None:
    with mulligan.open(str(work)) as opened:
        session = opened.session("s")
        with session.turn("running") as turn:
            with session.call() as call:
                call.write_file("a", "x")
            with pytest.raises(ConflictError):
                session.rollback(if_match="0", cancel_open=True)
            with opened.open_root.ledger.store.read() as tx:
                assert is_open_turn(tx, "s", turn)
    assert os.listdir(work) == ["a"]


@pytest.mark.req("D14.cli.interactive")
@pytest.mark.parametrize(
    ("answers", "left"),
    [("y\nn\nn\n", (LINES.replace("25\n", "B\n"), "new\n")), ("n\ny\ny\n", (LINES.replace("3\n", "A\n", 1), None))],
)
def test_the_user_picks_hunks_and_files(run: Run, work: Path, answers: str, left: tuple[str, str | None]) -> None:
    (work / "a").write_text(LINES)
    run("exec", "--", "sh", "-c", "sed -i -e 's/^3$/A/' -e 's/^25$/B/' a; echo new > b")
    code, shown = on_a_terminal(work, "undo", "--interactive", "--yes", answer=answers)
    assert code == 0, shown
    assert (work / "a").read_text() == left[0]
    assert ((work / "b").read_text() if (work / "b").exists() else None) == left[1]


@pytest.mark.req("D14.cli.interactive")
@pytest.mark.parametrize("answers", ["n\nn\nn\n", "q\n", "d\nn\n"])
def test_picking_nothing_changes_nothing(run: Run, work: Path, answers: str) -> None:
    (work / "a").write_text(LINES)
    run("exec", "--", "sh", "-c", "sed -i -e 's/^3$/A/' -e 's/^25$/B/' a; echo new > b")
    before = run("log", "--json").out
    code, _ = on_a_terminal(work, "undo", "--interactive", answer=answers)
    assert (code, run("log", "--json").out) == (1, before)


@pytest.mark.req("D14.cli.interactive")
def test_without_a_terminal_nothing_can_be_picked(run: Run, work: Path) -> None:
    write(run, "a", "x")
    assert run("undo", "--interactive").code == 2
    assert run("undo", "--interactive", "--path", "a").code == 2
    assert os.listdir(work) == ["a"]
