"""The background process runs quick verbs for other processes, and nobody can tell the difference but by the clock."""

from __future__ import annotations

import os
import pty
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mulligan.agents.hooks.socket import ask_background, background_folder

NOT_SERVED = 99
# What `mulligan` does, but a verb that the background process does not take is not run at all.
ASK = f"""
import sys
from mulligan.command_client import run_in_background
code = run_in_background(sys.argv[1:])
sys.exit({NOT_SERVED} if code is None else code)
"""
ASKED = [sys.executable, "-c", ASK]
WHOLE = [sys.executable, "-m", "mulligan"]


@dataclass(frozen=True)
class Caller:
    """Somebody at a prompt, with a store of their own."""

    folder: Path
    home: Path
    environ: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
        return kept | {"MULLIGAN_HOME": str(self.home), "MULLIGAN_BACKGROUND": "on"} | self.environ

    def run(
        self, *argv: str, program: list[str] = ASKED, before: Callable[[], object] | None = None
    ) -> tuple[int, str, str]:
        done = subprocess.run(
            [*program, *argv],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            preexec_fn=before,
        )
        return done.returncode, done.stdout, done.stderr

    def is_served(self, **how: Callable[[], object]) -> bool:
        return self.run("status", **how)[0] != NOT_SERVED  # type: ignore[arg-type]

    def wait_until_served(self) -> None:
        while not self.is_served():
            pass

    def cold(self, *argv: str) -> tuple[int, str, str]:
        return Caller(self.folder, self.home, {"MULLIGAN_BACKGROUND": "off"}).run(*argv, program=WHOLE)


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    made = Caller(tmp_path / "work", tmp_path / "home")
    made.folder.mkdir()
    code, _, said = made.cold("call", "write_file", "--args", '{"path": "a", "content": "one\\n"}')
    assert code == 0, said
    yield made
    ask_background(background_folder(str(made.home)), b"stop")


@pytest.fixture
def served(caller: Caller) -> Caller:
    caller.wait_until_served()
    return caller


@pytest.mark.req("D14.cli.background_same_answers")
@pytest.mark.req("D14.cli.background_same_answers")
@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["log", "--json"],
        ["diff"],
        ["undo", "--dry-run"],
        ["undo", "nosuch"],
        ["redo"],
        ["show", "nosuch"],
        ["call", "read_file", "--args", '{"path": "a"}', "--json"],
        ["call", "read_file", "--args", "not json"],
        ["log", "--limit", "x"],
    ],
    ids=" ".join,
)
def test_a_served_verb_answers_as_any_process_does(served: Caller, argv: list[str]) -> None:
    mine, cold = served.run(*argv), served.cold(*argv)
    ids = [one.partition('"call_id":"')[2][:36] for one in (mine[1], cold[1])]
    assert mine == (cold[0], cold[1].replace(ids[1], ids[0]) if ids[1] else cold[1], cold[2])


def test_undo_and_redo_change_the_files_of_the_caller(served: Caller) -> None:
    assert served.run("undo")[0] == 0 and not (served.folder / "a").exists()
    assert served.run("redo")[0] == 0 and (served.folder / "a").read_text() == "one\n"


@pytest.mark.req("D14.cli.background_same_answers")
def test_files_get_the_mode_that_the_caller_s_umask_gives(served: Caller) -> None:
    code, _, said = served.run(
        "call", "write_file", "--args", '{"path": "b", "content": "x"}', before=lambda: os.umask(0o027)
    )
    assert (code, said, (served.folder / "b").stat().st_mode & 0o777) == (0, "", 0o640)


def test_two_calls_have_two_ids(served: Caller) -> None:
    lines = [served.run("call", "exists", "--args", '{"path": "a"}')[1] for _ in range(6)]
    assert len(set(lines)) == 6


def at_terminal(caller: Caller, *argv: str) -> tuple[subprocess.Popen[bytes], int]:
    controller, terminal = pty.openpty()
    child = subprocess.Popen(
        [*ASKED, *argv], stdin=terminal, stdout=terminal, stderr=terminal, cwd=caller.folder, env=caller.environment()
    )
    os.close(terminal)
    return child, controller


def read_until(controller: int, words: bytes) -> bytes:
    shown = b""
    with suppress(OSError):
        while words not in shown and (more := os.read(controller, 1024)):
            shown += more
    return shown


def interrupt_until_terminal_closes(child: subprocess.Popen[bytes], controller: int) -> None:
    """Interrupts again after a while, as a person does: Python misses a signal that arrives between prompt and read."""
    child.send_signal(signal.SIGINT)
    with suppress(OSError):
        while True:
            if not select.select([controller], [], [], 5.0)[0]:
                child.send_signal(signal.SIGINT)
            elif not os.read(controller, 1024):
                return


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", ["a"]), (b"y\n", [])])
def test_a_served_verb_asks_at_the_terminal_of_the_caller(served: Caller, answer: bytes, left: list[str]) -> None:
    child, controller = at_terminal(served, "undo")
    assert b"would remove a" in read_until(controller, b"]: ")
    os.write(controller, answer)
    read_until(controller, b"no such words")
    os.close(controller)
    assert (child.wait(), os.listdir(served.folder)) == (1 if left else 0, left)


@pytest.mark.req("D14.cli.background_same_answers")
def test_an_interrupt_of_the_caller_ends_the_verb_and_changes_nothing(served: Caller) -> None:
    child, controller = at_terminal(served, "undo")
    read_until(controller, b"]: ")
    interrupt_until_terminal_closes(child, controller)
    os.close(controller)
    assert (child.wait(), os.listdir(served.folder)) == (130, ["a"])


@pytest.mark.req("D14.cli.background_serves_its_like")
@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "MULLIGAN_CALL", "MULLIGAN_STORE"])
def test_a_setting_that_may_change_the_answer_makes_the_caller_run_the_verb_itself(served: Caller, name: str) -> None:
    assert not Caller(served.folder, served.home, {name: ""}).is_served()


@pytest.mark.req("D14.cli.background_serves_its_like")
@pytest.mark.parametrize(
    "confine",
    [
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        lambda: os.setgroups([1]) if os.geteuid() == 0 else resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
    ],
    ids=["limits", "groups"],
)
def test_a_process_with_other_limits_or_rights_runs_the_verb_itself(
    served: Caller, confine: Callable[[], object]
) -> None:
    assert not served.is_served(before=confine)


@pytest.mark.req("D14.cli.background_serves_its_like")
def test_a_command_that_mulligan_runs_runs_the_verb_itself(served: Caller) -> None:
    """Its system calls are watched, and a fork of the background process would not be."""
    inside = [*ASKED, "status"]
    code, _, said = Caller(served.folder, served.home).run(
        "exec", "--", "env", "-u", "MULLIGAN_CALL", *inside, program=WHOLE
    )
    assert (code, said) == (NOT_SERVED, "")


@pytest.mark.req("D14.cli.background_serves_its_like")
@pytest.mark.parametrize(
    "argv", [["exec", "--", "true"], ["call", "shell", "--args", '{"command": "true"}'], ["verify"]]
)
def test_verbs_that_start_commands_or_take_long_stay_with_the_caller(served: Caller, argv: list[str]) -> None:
    assert served.run(*argv)[0] == NOT_SERVED


def test_a_killed_background_process_is_replaced(served: Caller) -> None:
    answer = ask_background(background_folder(str(served.home)), b"status")
    assert answer is not None
    os.kill(int(answer.partition(b'"pid":')[2].rstrip(b"}")), signal.SIGKILL)
    assert served.run("log", "--json", program=WHOLE)[0] == 0
    served.wait_until_served()


def test_without_a_store_no_process_starts_and_nothing_is_written(tmp_path: Path) -> None:
    new = Caller(tmp_path, tmp_path / "home")
    assert new.run("status", program=WHOLE)[0] == 0
    assert os.listdir(tmp_path) == []


LOADED = """
import sys
from mulligan.cli import run
from mulligan.cli.command_server import PRELOADED
for name in PRELOADED:
    __import__(name)
before = set(sys.modules)
run(sys.argv[1:])
print([name for name in sys.modules if name.startswith("mulligan") and name not in before], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["log"],
        ["show", "default"],
        ["diff"],
        ["undo"],
        ["call", "write_file", "--args", '{"path": "b", "content": "x"}'],
        ["call", "grep", "--args", '{"pattern": "o"}'],
    ],
    ids=" ".join,
)
def test_a_fork_has_imported_all_that_a_verb_needs(caller: Caller, argv: list[str]) -> None:
    assert caller.run(*argv, program=[sys.executable, "-c", LOADED])[2].splitlines()[-1] == "[]"


def test_the_caller_imports_hardly_anything() -> None:
    asked = "import sys; before = set(sys.modules); import mulligan.command_client; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    ours = {"mulligan", "mulligan.agents", "mulligan.agents.hooks", "mulligan.agents.hooks.client"}
    assert set(eval(done.stdout)) <= ours | {"mulligan.command_client", "_socket", "__future__"}
