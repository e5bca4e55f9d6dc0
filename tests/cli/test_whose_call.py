"""Whose call a verb means, and what log, status and plans say of each call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import mulligan
from mulligan.cli.inspect import log_lines
from mulligan.history import observe
from mulligan.history.observe import Observed
from mulligan.values.clock import FixedClock, SystemClock
from mulligan.values.ids import SessionId, TurnId
from mulligan.values.paths import RepoPath
from mulligan.values.text import padded, shortened, width_of
from tests.cli.cli_result import Run, write
from tests.cli.test_confirmation import on_a_terminal


@pytest.fixture
def two_sessions(run: Run, work: Path) -> Iterator[tuple[str, str]]:
    yield write(run, "a", "x\n", "--session", "one"), write(run, "b", "x\n", "--session", "two")


@pytest.mark.req("D14.cli.whose_call")
@pytest.mark.parametrize("verb", ["undo", "rollback", "redo"])
def test_without_a_terminal_a_bare_verb_names_both_sessions_and_changes_nothing(
    run: Run, work: Path, two_sessions: tuple[str, str], verb: str
) -> None:
    if verb == "redo":
        run("undo", "--session", "one")
    before = sorted(os.listdir(work)), run("log", "--json").out
    done = run(verb)
    assert (done.code, done.out) == (2, "")
    _, *lines = done.err.splitlines()
    assert [re.split(r"  # ", line)[0].strip() for line in lines] in (
        [f"mulligan {verb} --session two", f"mulligan {verb} --session one"],
        [f"mulligan {verb} --session one", f"mulligan {verb} --session two"],
    )
    assert run(verb, "--json").json["error"]["code"] == "several_sessions"
    assert run(verb, "--yes").code == 2
    assert (sorted(os.listdir(work)), run("log", "--json").out) == before
    assert run(verb, "--session", "one").code == 0


@pytest.mark.req("D14.cli.whose_call")
@pytest.mark.parametrize(("number", "left"), [("1", ["a"]), ("2", ["b"])])
def test_on_a_terminal_the_user_chooses_the_session(
    run: Run, work: Path, two_sessions: tuple[str, str], number: str, left: list[str]
) -> None:
    code, shown = on_a_terminal(work, "undo", "--yes", answer=f"{number}\n")
    assert (code, os.listdir(work)) == (0, left)
    assert "one" in shown and "two" in shown


@pytest.mark.req("D14.cli.whose_call")
def test_a_named_call_needs_no_session(run: Run, work: Path, two_sessions: tuple[str, str]) -> None:
    assert run("undo", two_sessions[0]).code == 0
    assert os.listdir(work) == ["b"]


@pytest.mark.req("D14.cli.whose_call")
def test_a_session_that_worked_earlier_asks_nothing(run: Run, work: Path) -> None:
    earlier = FixedClock(SystemClock().now() - timedelta(minutes=11))
    with mulligan.open(str(work), clock=earlier) as opened, opened.session("one").call() as call:
        call.write_file("a", "x")
    write(run, "b", "x", "--session", "two")
    assert run("undo").code == 0
    assert os.listdir(work) == ["a"]


@pytest.mark.req("D14.cli.whose_call")
def test_a_session_that_only_reads_asks_nothing(run: Run, work: Path) -> None:
    write(run, "a", "x", "--session", "one")
    run("call", "read_file", "--args", '{"path": "a"}', "--session", "two")
    assert run("undo").code == 0


@pytest.mark.req("D14.cli.inside_agent")
def test_in_a_shell_of_an_agent_undo_means_the_session_of_the_agent(run: Run, work: Path) -> None:
    write(run, "b", "x", "--session", "two")
    with mulligan.open(str(work)) as opened:
        seen = Observed(SessionId("one"), "Write", paths=[RepoPath("a")], pid=os.getpid(), about={"agent": "claude"})
        call = observe.begin(opened.open_root, seen)
        (work / "a").write_text("x")
        observe.finish(opened.open_root, call)
    write(run, "c", "x", "--session", "two")
    # This process stands for the agent, and its child for the shell.
    command = [sys.executable, "-m", "mulligan.cli", "undo"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode, sorted(os.listdir(work))) == (0, ["b", "c"]), done


@pytest.mark.req("D14.cli.names_calls", "D14.cli.redacted", "D14.cli.acted_outside")
def test_log_show_status_and_plans_name_the_command_the_agent_and_the_prompt(run: Run, work: Path) -> None:
    secret = "ghp_" + "a1B2c3D4e5" * 3 + "abcdef"
    with mulligan.open(str(work)) as opened:
        session = opened.session("5f0c1d2e-aaaa-bbbb-cccc-0123456789ab")
        with session.turn(prompt=f"deploy with {secret}", id="t1"):
            about = {"agent": "claude", "command": f"git -c token={secret} push origin main"}
            seen = Observed(SessionId(session.id), "Bash", TurnId("t1"), paths=[RepoPath("a")], about=about)
            call = observe.begin(opened.open_root, seen)
            (work / "a").write_text("x")
            observe.finish(opened.open_root, call)
    (row,) = run("log", "--json").json
    assert (row["tool"], row["agent"], row["outside"]) == ("Bash", "claude", ["push"])
    assert row["command"].startswith("git -c token=<redacted") and row["command"].endswith("push origin main")
    assert row["prompt"].startswith("deploy with <redacted")
    for verb in (("log",), ("show",), ("status",), ("undo", "--dry-run"), ("log", "--by-prompt")):
        told, as_json = run(*verb), run(*verb, "--json")
        assert secret not in told.out + as_json.out, verb
        assert "Bash: git -c token=<redacted" in told.out or "command  git -c token=<redacted" in told.out, verb
        assert "claude" in told.out and '"agent":"claude"' in as_json.out, verb
    assert "undo cannot reach that" in run("undo", "--dry-run").out
    assert "[push]" in run("log").out


@pytest.mark.req("D14.cli.names_calls")
def test_a_command_of_exec_is_named_from_its_record(run: Run, work: Path) -> None:
    (work / "build").mkdir()
    run("exec", "--", "rm", "-rf", "build")
    assert run("log", "--json").json[0]["command"] == "rm -rf build"
    assert "exec: rm -rf build" in run("log").out and "exec: rm -rf build" in run("status").out


@pytest.mark.req("D14.cli.log_filters")
def test_log_chooses_by_path_agent_time_and_words(run: Run, work: Path) -> None:
    earlier = FixedClock(SystemClock().now() - timedelta(hours=5))
    with mulligan.open(str(work), clock=earlier) as opened, opened.session("one").call() as call:
        call.write_file("old", "x")
    (work / "folder").mkdir()
    inside = write(run, "folder/new", "x")
    run("exec", "--", "sh", "-c", "echo Hello > other")
    ids = {row["changes"][0]["path"]: row["id"] for row in run("log", "--json").json}

    def found(*options: str) -> list[str]:
        return [row["id"] for row in run("log", "--json", *options).json]

    assert found("--path", "folder") == [inside]
    assert found("--path", "old", "--path", "other") == [ids["other"], ids["old"]]
    assert found("--since", "2h") == [ids["other"], inside]
    assert found("--since", "2001-01-01") == [ids["other"], inside, ids["old"]]
    assert found("--grep", "hello") == [ids["other"]]
    assert found("--grep", "NEW") == [inside]
    assert found("--agent", "claude") == []
    assert run("log", "--since", "yesterday-ish").code == 2
    assert run("log", "--path", "nothing").out == "No such calls.\n"


@pytest.mark.req("D14.cli.log_filters")
def test_log_groups_calls_by_their_prompt(run: Run, work: Path) -> None:
    with mulligan.open(str(work)) as opened:
        session = opened.session("one")
        for number, prompt in enumerate(("make it", "fix it")):
            with session.turn(prompt=prompt):
                for name in "ab":
                    with session.call() as call:
                        call.write_file(f"{name}{number}", "x")
    groups = run("log", "--by-prompt", "--json").json
    assert [(g["prompt"], [c["changes"][0]["path"] for c in g["calls"]]) for g in groups] == [
        ("fix it", ["b1", "a1"]),
        ("make it", ["b0", "a0"]),
    ]
    lines = run("log", "--by-prompt").out.splitlines()
    assert [line for line in lines if line in ("fix it", "make it")] == ["fix it", "make it"]


@pytest.mark.req("D14.cli.columns")
@pytest.mark.parametrize("columns", [80, 120])
def test_long_and_wide_names_do_not_break_columns(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("mulligan.cli.inspect.columns_shown", lambda: columns)

    def row(command: str, path: str, agent: str = "claude") -> dict[str, object]:
        change = {"path": path, "kind": "modified", "added": 1, "removed": 1}
        return {
            "id": "01a1f5bc-40fb-7767-b758-3c253fdd33c2",
            "label": None,
            "session_id": "5f0c1d2e-aaaa-bbbb-cccc-0123456789ab",
            "tool": "Bash",
            "agent": agent,
            "command": command,
            "prompt": None,
            "outside": [],
            "status": "committed",
            "external": False,
            "started_at": "2026-01-01T00:00:00.000000Z",
            "changes": [change] * 9,
        }

    rows = [row("ls", "a"), row("日本語" * 40, "長い名前" * 30), row("e\u0301" * 90, "x" * 200, "a" * 50)]
    lines = log_lines(rows)
    assert [width_of(line) <= columns for line in lines] == [True, True, True]
    starts = {width_of(line[: line.index("Bash: ")]) for line in lines}
    assert len(starts) == 1


def test_text_is_measured_in_columns() -> None:
    assert [width_of(text) for text in ("abc", "日本", "e\u0301", "🙂")] == [3, 4, 1, 2]
    assert [shortened("日本語", most) for most in (6, 5, 4, 1)] == ["日本語", "日本…", "日…", "…"]
    assert padded("日", 4) == "日  "
