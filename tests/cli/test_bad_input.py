"""Whatever a person or a script gets wrong: one line that says what, an exit code of 1 or 2, and nothing is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from mulligan.testing import tree_of
from tests.cli.cli_result import Run

NOT_TEXT = "\udcff"
NO_SUCH = "no-such-thing"
LOOKING = ("status", "log", "branches", "blame")
DOING = ("redo", "rollback", "fork", "drop")
NAMING = ("show", "diff", "undo", "restore", "rewind", "merge", "pin", "coverage", "cat")
"""Verbs whose first argument is the name of a call, a point or a fork."""
VERBS = (*LOOKING, *DOING, *NAMING)


@pytest.fixture
def worked(run: Run, work: Path) -> Path:
    for content in ("1", "2"):
        assert run("call", "write_file", "--args", f'{{"path": "f", "content": "{content}"}}').code == 0
    return work


def is_one_line(text: str) -> bool:
    return text.startswith("mulligan: ") and text.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--no-such-option",), id="option"),
        pytest.param(("a", "b", "c", "d", "--no-such-option"), id="too many"),
        pytest.param(("--session", ""), id="blank session"),
        pytest.param(("--session", NOT_TEXT), id="session not text"),
        pytest.param(("--root", "/no/such/folder"), id="no root"),
    ],
)
def test_every_verb_refuses_invalid_arguments(run: Run, worked: Path, verb: str, options: tuple[str, ...]) -> None:
    before = tree_of(worked)
    done = run(verb, *options)
    assert (done.code, done.out) == (2, "") and is_one_line(done.err), done
    assert tree_of(worked) == before


@pytest.mark.parametrize("verb", NAMING)
@pytest.mark.parametrize("name", [NO_SUCH, NOT_TEXT, "../../etc/passwd", "x" * 5_000, "%s"])
def test_a_missing_call_session_or_path_is_reported(run: Run, worked: Path, verb: str, name: str) -> None:
    before = tree_of(worked)
    arguments = (verb, name, "f") if verb == "cat" else (verb, name)
    done = run(*arguments)
    assert (done.code, done.out) == (2, "") and is_one_line(done.err), done
    machine = run(*arguments, "--json")
    assert machine.code == 2 and machine.json["error"]["code"] in ("unknown_call", "unknown_session", "bad_usage"), (
        machine
    )
    assert tree_of(worked) == before


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "", "a\nb", NOT_TEXT])
def test_invalid_paths_and_paths_outside_are_refused_or_skipped(run: Run, worked: Path, path: str) -> None:
    before = tree_of(worked)
    (newest, *_) = run("log", "--json").json
    for arguments in (("restore", newest["id"], path), ("undo", "--path", path), ("cat", newest["id"], path)):
        done = run(*arguments)
        assert done.code in (1, 2) and "Traceback" not in done.err, done
    assert tree_of(worked) == before


def test_a_fork_of_an_unknown_session_is_refused(run: Run, worked: Path) -> None:
    done = run("fork", "--session", "a-slip")
    assert (done.code, done.out) == (2, "") and "a-slip" in done.err
    assert run("fork", "--session", "default").code == 0
