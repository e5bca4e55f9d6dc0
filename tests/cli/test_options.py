"""The options that every verb takes: what each means for it, and what its help says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mulligan.cli import VERBS, cli
from tests.cli.cli_result import Run, write

MACHINE_WORDS = re.compile(r"\b(INTEGER|FLOAT|RANGE|TEXT|FILENAME|BOOLEAN|UUID|DIRECTORY)\b")


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """The names of a verb and of those below it, each with its help."""
    # With the settings of the whole command line: click remembers the help option of a command.
    context = click.Context(command, info_name=name, **cli.context_settings)
    yield name, " ".join(command.get_help(context).split())
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from helps(inner, f"{name} {inner.name}")


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_no_programming_words(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    assert [
        (name, MACHINE_WORDS.findall(told)) for name, told in helps(command, verb) if MACHINE_WORDS.search(told)
    ] == []


def test_the_timeout_of_a_command_is_in_seconds(run: Run) -> None:
    assert "--timeout SECONDS" in run("exec", "--help").out


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("gc", ["--session ID Not used"]),
        ("doctor", ["--session ID Not used", "--root DIR Not used"]),
        ("store", ["--session ID Not used", "--root DIR Not used"]),
        ("verify", ["--root DIR Not used"]),
        ("token list", ["--session ID Not used", "--root DIR Not used"]),
        ("replay", ["--root DIR Not used"]),
        ("call", ["--json Errors as JSON; the receipt always is."]),
        ("cat", ["--json Errors as JSON; the file is printed as it is."]),
    ],
)
def test_help_says_which_option_has_no_effect(run: Run, verb: str, words: list[str]) -> None:
    told = " ".join(run(*verb.split(), "--help").out.split())
    assert [word for word in words if word not in told] == []


def test_forks_of_one_session_are_listed_merged_and_dropped_alone(run: Run, work: Path) -> None:
    for session in ("one", "two"):
        write(run, session, "x", "--session", session)
        assert run("fork", "--files", "copy", "--session", session, "--name", f"of-{session}").code == 0
    found = run("branches", "--session", "two", "--json").json
    assert [row["session_id"] for row in found] == ["of-two"]
    write(run, "new", "x", "--root", found[0]["directory"])
    for verb in (("merge", "of-two"), ("drop", "of-two", "--yes")):
        other = run(*verb, "--session", "one", "--json")
        assert (other.code, other.json["error"]["code"]) == (2, "unknown_session")
        assert (work / "new").exists() == (verb[0] == "drop")
        assert run(*verb, "--session", "two").code == 0
    assert [row["status"] for row in run("branches", "--json").json] == ["open", "dropped"]


def test_blame_of_one_session_shows_the_lines_that_it_wrote(run: Run, work: Path) -> None:
    write(run, "a", "1\n2\n", "--session", "one")
    (work / "a").write_text("1\n2\nmine\n")
    write(run, "a", "1\n2\nmine\n4\n", "--session", "two")
    found = run("blame", "a", "--session", "two", "--json").json
    assert [(line["line"], line["text"]) for line in found] == [(4, "4\n")]
    assert len(run("blame", "a", "--session", "one").out.splitlines()) == 2


def test_sessions_with_an_id_lists_only_that_session(run: Run) -> None:
    for session in ("one", "two"):
        write(run, "a", session, "--session", session)
    assert [one["id"] for one in run("sessions", "--session", "two", "--json").json] == ["two"]


@pytest.mark.req("D14.cli.options_before_sub_verb")
def test_options_before_a_sub_verb_count_for_it(run: Run, work: Path, tmp_path: Path) -> None:
    other = ("--store", str(tmp_path / "other"))
    write(run, "a", "1\n", "--session", "here", *other)
    assert run("sessions", "show", "here", *other).code == 0
    assert run("sessions", *other, "--json", "show", "here").json["id"] == "here"
    assert run("sessions", "show", "here").code != 0
    nearer = run("sessions", "--store", str(tmp_path / "nowhere"), "show", "here", *other)
    assert nearer.code == 0, "the option beside the sub-verb wins"


@pytest.mark.req("D14.cli.options_before_sub_verb")
def test_every_verb_with_sub_verbs_takes_the_common_options_itself() -> None:
    verbs = {name: cli.get_command(click.Context(cli), name) for name in VERBS}
    groups = {name: one for name, one in verbs.items() if isinstance(one, click.Group)}
    common = {"--root", "--session", "--store", "--json"}
    taken = {name: {text for option in one.params for text in option.opts} for name, one in groups.items()}
    assert {"hooks", "sessions", "store", "token"} <= taken.keys()
    assert {name: common - options for name, options in taken.items()} == {name: set() for name in taken}
