"""A process that a hooked command leaves running: whose doing its changes are, and what undo does with them."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mulligan.values.clock import since_boot_s
from tests.agents.hooks.test_recorder import Agent, agent, cat, coverage_of, tree  # noqa: F401

WAIT_S = 120.0


class Background:
    """A process that does one step of its work for each line that it reads; a shell starts it and ends at once."""

    def __init__(self, agent: Agent, folder: Path, label: str, *steps: str) -> None:  # noqa: F811
        self._gates = [folder / f"{label}{number}" for number in range(len(steps) + 1)]
        for gate in self._gates:
            os.mkfifo(gate)
        self._pid = folder / f"{label}-pid"
        lines = [f"read go < {gate}; {step}" for gate, step in zip(self._gates, steps, strict=False)]
        inner = "; ".join([f"echo $$ > {self._pid}", *lines, f"read go < {self._gates[-1]}"])
        self.command = f"setsid sh -c '{inner}' & "
        self._next = 0
        agent.shell(label, self.command, pid=os.getpid())

    def step(self, done: Path, content: str) -> None:
        """Let the process do its next step, and wait until the file has this content."""
        self._gates[self._next].write_text("go\n")
        self._next += 1
        wait_until(lambda: done.is_file() and done.read_text() == content)

    def end(self) -> None:
        pid = int(self._pid.read_text())
        for gate in self._gates[self._next :]:
            gate.write_text("go\n")
        wait_until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        os.sched_yield()


@contextmanager
def background(agent: Agent, folder: Path, label: str, *steps: str) -> Iterator[Background]:  # noqa: F811
    made = Background(agent, folder, label, *steps)
    try:
        yield made
    finally:
        made.end()


def changed(agent: Agent) -> list[tuple[str | None, dict[str, str]]]:  # noqa: F811
    """Of each call with changes its title and its changes, oldest first; an outside edit has no title."""
    return [
        (row["tool"], {one["path"]: one["kind"] for one in row["changes"]}) for row in agent.log() if row["changes"]
    ]


@pytest.mark.req("D14.hooks.left_running")
def test_what_a_process_writes_after_its_call_is_recorded_for_the_call(agent: Agent, tmp_path: Path) -> None:  # noqa: F811
    before = tree(agent.root)
    with background(agent, tmp_path, "serve", "rm a.txt; echo 1 > log.txt", "echo 2 >> log.txt") as process:
        assert coverage_of(agent, "serve") == [(".", "background")]
        process.step(agent.root / "log.txt", "1\n")
        agent.say("stop")
        assert changed(agent) == [("Bash", {"a.txt": "deleted", "log.txt": "created"})]
        process.step(agent.root / "log.txt", "1\n2\n")
        agent.say("stop")
        assert changed(agent)[1:] == [("Bash", {"log.txt": "modified"})]
        done = agent.undo("serve")
        assert (done.ok, {one.path for one in done.outcomes}) == (True, {"a.txt", "log.txt"})
        assert tree(agent.root) == before
        assert agent.log()[0]["status"] == "undone"
    agent.opened.session("s1").redo()
    assert (agent.root / "log.txt").read_text() == "1\n2\n"


@pytest.mark.req("D14.hooks.left_running")
def test_what_a_process_writes_after_the_undo_of_its_call_is_undone_by_the_next_undo(
    agent: Agent,  # noqa: F811
    tmp_path: Path,
) -> None:
    with background(agent, tmp_path, "serve", "echo 1 > one.txt", "echo 2 > two.txt") as process:
        process.step(agent.root / "one.txt", "1\n")
        agent.say("stop")
        agent.undo()
        process.step(agent.root / "two.txt", "2\n")
        agent.say("stop")
        agent.undo("serve")
    assert not (agent.root / "one.txt").exists() and not (agent.root / "two.txt").exists()


@pytest.mark.req("D14.hooks.left_running")
def test_a_process_that_goes_on_does_not_end_redo(agent: Agent, tmp_path: Path) -> None:  # noqa: F811
    agent.shell("c1", "echo changed > a.txt")
    with background(agent, tmp_path, "serve", "echo 1 > log.txt") as process:
        agent.undo("c1")
        process.step(agent.root / "log.txt", "1\n")
        agent.say("stop")
        agent.opened.session("s1").redo()
    assert (agent.root / "a.txt").read_text() == "changed\n"


@pytest.mark.req("D14.hooks.left_running_shared")
def test_changes_in_a_later_window_carry_both_calls_and_undo_of_either_leaves_them(
    agent: Agent,  # noqa: F811
    tmp_path: Path,
) -> None:
    with background(agent, tmp_path, "serve", "echo 1 > log.txt", "echo 2 > other.txt") as process:
        process.step(agent.root / "log.txt", "1\n")
        agent.say("stop")
        told: dict[str, Any] = {"label": "test", "tool": "Bash", "input": {"command": "npm test"}, "pid": os.getpid()}
        agent.say("pre", **told)
        process.step(agent.root / "other.txt", "2\n")
        agent.say("post", **told)
    ids = {row["label"]: row["id"] for row in agent.log()}
    (row,) = [row for row in agent.log() if row["label"] == "test"]
    whose = {"reason": "ambiguous", "attribution": "window", "calls": f"{ids['test']} {ids['serve']}"}
    assert row["coverage"] == [{"path": "other.txt", **whose}]
    for label in ("test", "serve"):
        outcomes = {one.path: (one.outcome, one.reason) for one in agent.undo(label).outcomes}
        assert outcomes["other.txt"] == ("conflicted", "ambiguous")
        assert (agent.root / "other.txt").read_text() == "2\n"
    assert not (agent.root / "log.txt").exists()


@pytest.mark.req("D14.hooks.left_running_shared")
def test_a_rollback_of_both_calls_undoes_what_either_of_them_changed(agent: Agent, tmp_path: Path) -> None:  # noqa: F811
    before = tree(agent.root)
    agent.say("prompt", prompt="serve and test")
    with background(agent, tmp_path, "serve", "echo 2 > other.txt") as process:
        told: dict[str, Any] = {"label": "test", "tool": "Bash", "input": {"command": "npm test"}, "pid": os.getpid()}
        agent.say("pre", **told)
        process.step(agent.root / "other.txt", "2\n")
        agent.say("post", **told)
        agent.shell("more", "echo x > log.txt", pid=os.getpid())
    agent.say("stop")
    agent.opened.session("s1").rollback()
    assert (agent.root / "other.txt").exists() == ("other.txt" in before)


@pytest.mark.req("D14.hooks.left_running")
def test_what_changes_after_the_process_has_ended_is_nobodys(agent: Agent, tmp_path: Path) -> None:  # noqa: F811
    with background(agent, tmp_path, "serve", "echo 1 > log.txt") as process:
        process.step(agent.root / "log.txt", "1\n")
    agent.recorder.watch()
    (agent.root / "log.txt").write_text("1\nmine\n")
    agent.say("stop")
    assert [(row["external"], len(row["changes"])) for row in agent.log()] == [(False, 0), (False, 1), (True, 1)]
    agent.undo("serve")
    assert (agent.root / "log.txt").read_text() == "1\nmine\n"


@pytest.mark.req("D14.hooks.left_running")
def test_another_process_of_mulligan_finds_the_running_process_again(agent: Agent, tmp_path: Path) -> None:  # noqa: F811
    with background(agent, tmp_path, "serve", "echo 1 > log.txt") as process:
        agent.restart()
        process.step(agent.root / "log.txt", "1\n")
        agent.say("stop")
    agent.undo("serve")
    assert not (agent.root / "log.txt").exists()


@pytest.mark.req("D14.hooks.left_running")
def test_a_program_that_the_agent_starts_for_itself_is_not_the_commands(agent: Agent) -> None:  # noqa: F811
    """For example a language server: below the agent, since the command began, and not the command."""
    told: dict[str, Any] = {"label": "edit", "tool": "Bash", "input": {"command": "true"}, "pid": os.getpid()}
    agent.say("pre", **told)
    with cat(agent.root):
        agent.say("post", **told)
    assert coverage_of(agent, "edit") == []


@pytest.mark.req("D14.hooks.left_running")
def test_a_shell_that_the_agent_keeps_for_its_command_is_the_commands(agent: Agent) -> None:  # noqa: F811
    """As Claude Code does with `run_in_background`: the shell stays its child, and has the command in its words."""
    command = """read go; echo 'late' > late.txt"""
    told: dict[str, Any] = {"label": "shell", "tool": "Bash", "input": {"command": command}, "pid": os.getpid()}
    agent.say("pre", **told)
    words = ["sh", "-c", f"shopt -u x 2>/dev/null; eval {shlex.quote(command)} && pwd -P >/dev/null"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, cwd=agent.root) as running:
        agent.say("post", **told)
        assert coverage_of(agent, "shell") == [(".", "background")]
        running.communicate(b"go\n")
    agent.say("stop")
    assert changed(agent) == [("Bash", {"late.txt": "created"})]


@pytest.mark.req("D14.hooks.left_running")
def test_a_persons_program_in_another_session_is_not_the_commands(agent: Agent, tmp_path: Path) -> None:  # noqa: F811
    """A person's shell is older than the command; a program in its session may have lost its parent, too."""
    gate, started = tmp_path / "gate", tmp_path / "started"
    os.mkfifo(gate)
    inner = f"cd {agent.root}; read go < {gate}; (echo $$ > {started}; read go < {gate}) & wait"
    with subprocess.Popen(["setsid", "sh", "-c", inner]):
        told: dict[str, Any] = {"label": "c1", "tool": "Bash", "input": {"command": "x"}, "pid": os.getpid()}
        # The kernel says only by ticks of its clock when a process began.
        next_ticks_s = since_boot_s() + 0.05
        wait_until(lambda: since_boot_s() > next_ticks_s)
        agent.say("pre", **told)
        gate.write_text("go\n")
        wait_until(started.exists)
        agent.say("post", **told)
        gate.write_text("go\n")
    assert coverage_of(agent, "c1") == []
