"""What reaches the terminal: no sequence of a name, a command or a prompt; and what helps while typing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

import mulligan
from mulligan.history import observe
from mulligan.history.observe import Observed
from mulligan.values.ids import SessionId, TurnId
from mulligan.values.paths import RepoPath
from tests.cli.cli_result import Run, write

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\u202egpj\x9b31m"


@pytest.mark.req("D14.cli.no_escapes")
def test_no_verb_sends_a_sequence_of_a_name_a_command_or_a_prompt_to_the_terminal(run: Run, work: Path) -> None:
    name = f"a{HOSTILE}b"
    with mulligan.open(str(work)) as opened:
        session = opened.session("s")
        with session.turn(prompt=f"say {HOSTILE}", id="t1"):
            for number in range(2):
                about = {"agent": f"x{HOSTILE}", "command": f"echo {HOSTILE}"}
                seen = Observed(
                    SessionId(session.id), f"Ba{HOSTILE}sh", TurnId("t1"), f"l{HOSTILE}", [RepoPath(name)], about=about
                )
                call = observe.begin(opened.open_root, seen)
                (work / name).write_text(f"{number}{HOSTILE}\n")
                observe.finish(opened.open_root, call)
    (work / f"{name}2").write_text("by a person")
    write(run, f"{name}2", f"x{HOSTILE}\n")
    newest, *_, first = (row["id"] for row in run("log", "--json").json if not row["external"])
    fork = run("fork", "--files", "copy", "--session", "default", "--json").json["session_id"]
    verbs = [
        ("status",),
        ("log",),
        ("log", "--by-prompt"),
        ("log", "--grep", HOSTILE),
        ("show",),
        ("show", first),
        ("diff", first),
        ("diff", "--stat"),
        ("diff", first, newest, "--stat"),
        ("coverage",),
        ("blame", name),
        ("branches",),
        ("sessions",),
        ("merge", fork, "--dry-run"),
        ("undo",),
        ("undo", newest, "--dry-run"),
        ("undo", first, "--dry-run"),
        ("undo", first, "--path", f"no{HOSTILE}"),
        ("undo", HOSTILE),
        ("restore", first, "--dry-run"),
        ("rollback", "--session", "default", "--dry-run"),
        ("rewind", newest, "--dry-run"),
        ("undo", newest),
        ("redo", "--session", "default"),
        ("pin", newest),
        ("store",),
        ("du",),
        (f"lo{HOSTILE}g",),
    ]
    for verb in verbs:
        done = run(*verb)
        # A diff in a pipe is for `git apply`, so it has the bytes as they are.
        shown = done.err if verb[0] == "diff" and "--stat" not in verb else done.out + done.err
        assert [c for c in shown if c in "\x1b\x07\r\x9b\u202e"] == [], (verb, shown)


@pytest.mark.req("D14.cli.suggestions")
def test_a_mistyped_verb_is_answered_with_the_nearest(run: Run) -> None:
    done = run("unod")
    assert (done.code, "undo" in done.err) == (2, True)
    assert "Did you mean" not in run("xyzzyq").err


@pytest.mark.req("D14.cli.completions")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_a_script_for_the_shell(run: Run, shell: str) -> None:
    done = run("completions", shell)
    assert (done.code, "_MULLIGAN_COMPLETE" in done.out) == (0, True)
    assert run("completions", shell, "--json").json["script"].strip() == done.out.strip()


@pytest.mark.req("D14.cli.completions")
def test_bash_completes_verbs_and_options(run: Run, work: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mulligan"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mulligan "$@"\n')
    program.chmod(0o755)
    assert which("bash") is not None
    script = tmp_path / "completions.bash"
    script.write_text(run("completions", "bash").out)
    for words, wanted in ((["mulligan", "stat"], {"status"}), (["mulligan", "undo", "--inter"], {"--interactive"})):
        line = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            '_mulligan_completion mulligan; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environ, check=False)
        assert set(done.stdout.split()) == wanted, done


@pytest.mark.req("D14.cli.diff_stat")
def test_diff_stat_counts_the_lines_of_each_file(run: Run, work: Path) -> None:
    first = write(run, "a", "1\n2\n")
    write(run, "b", "1\n")
    last = write(run, "a", "1\n3\n4\n")
    done = run("diff", first, last, "--stat")
    assert done.out.splitlines()[-1] == "2 files changed, +5 -1"
    assert [line.split("|")[0].strip() for line in done.out.splitlines()[:-1]] == ["a", "b"]
    assert run("diff", first, last, "--stat", "--json").json["stat"] == [
        {"path": "a", "added": 4, "removed": 1},
        {"path": "b", "added": 1, "removed": 0},
    ]
    assert json.loads(run("diff", "--json").out).keys() == {"calls", "diff", "files"}


@pytest.mark.req("D14.cli.other_stores")
def test_status_and_undo_say_that_another_store_knows_the_folder(
    run: Run, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    other = tmp_path / "person" / ".local" / "state" / "mulligan"
    write(run, "a", "x", "--store", str(other))
    assert run("status", "--json").json["other_stores"] == [str(other)]
    assert str(other) in run("status").out
    for verb in ("undo", "redo"):
        done = run(verb)
        assert (done.code, str(other) in done.err) == (2, True)
    assert run("status", "--store", str(other), "--json").json["other_stores"] == []
    findings = run("doctor", "--json").json["findings"]
    assert [one["value"] for one in findings if one["name"] == "other store"] == [f"{other}: knows 1 folder"]


@pytest.mark.req("D14.cli.doctor_hosts")
def test_doctor_lists_hosts_and_hooks_and_how_to_mend_them(
    run: Run, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    (tmp_path / "person").mkdir()
    program = tmp_path / "bin" / "gemini"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 0.9.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    def findings() -> dict[str, str]:
        return {one["name"]: one["value"] for one in run("doctor", "--json").json["findings"]}

    assert findings()["host gemini"] == "0.9.1: no undo; `mulligan install gemini` sets it up"
    assert "hooks of claude" not in findings()
    assert run("hooks", "install", "claude", "--project").code == 0
    assert findings()["hooks of claude"].startswith("installed in ")
