"""`mulligan attach` and `mulligan takeover`, as a person and a script use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.api import Mulligan
from mulligan.effects.session import DurableSession

COMMAND = [sys.executable, "-m", "mulligan.cli"]


class Desk:
    """A session in this process, and a command line beside it."""

    def __init__(self, base: Path) -> None:
        self.root, self.home = base / "work", base / "home"
        self.root.mkdir()
        self.opened: Mulligan = mulligan.open(str(self.root), store=str(self.home))
        self.session: DurableSession = self.opened.session("s")
        self.started: list[subprocess.Popen[str]] = []

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "MULLIGAN_HOME": str(self.home)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *arguments, "--root", str(self.root)]
        return subprocess.run(command, capture_output=True, text=True, env=self.environ, check=False)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*COMMAND, "attach", *arguments, "--root", str(self.root)]
        child = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environ)
        self.started.append(child)
        return child

    def clients(self) -> dict[str, str]:
        return {one["client_id"]: one["mode"] for one in self.session.live_clients()}


@pytest.fixture
def open_root(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path)
    yield found
    for child in found.started:
        child.kill()
        child.communicate()
    found.opened.close()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def event_of(child: subprocess.Popen[str]) -> Any:
    return json.loads(line_of(child))


@pytest.mark.req("D14.cli.attach")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_attach_prints_every_event_until_it_is_stopped(open_root: Desk, how: signal.Signals) -> None:
    open_root.session.inject({"role": "user", "content": "earlier"})
    child = open_root.start("s", "--client", "eye", "--json")
    came = event_of(child)
    assert (came["kind"], came["metadata"]["action"]) == ("live_session_client", "attached")
    assert open_root.clients() == {"eye": "observer"}
    for number in range(3):
        open_root.session.inject({"role": "assistant", "content": f"line {number}"})
    told = [event_of(child) for _ in range(3)]
    assert told == open_root.session.events(after=came["seq"])
    child.send_signal(how)
    assert child.wait(600) == 0
    assert open_root.clients() == {}
    gone = open_root.session.events()[-1]["metadata"]
    assert (gone["action"], gone["reason"]) == ("detached", "client_exit")


@pytest.mark.req("D14.cli.attach")
def test_attach_shows_lines_a_terminal_cannot_act_on_and_what_came_before(open_root: Desk) -> None:
    open_root.session.inject({"role": "user", "content": "first \x1b[31mline\nsecond"})
    child = open_root.start("s", "--after", "0")
    line = line_of(child)
    assert "user: first \\x1b[31mline …" in line and "\x1b" not in line
    assert "attached cli-" in line_of(child)
    open_root.session.close("done")
    assert "agent_session_closed" in line_of(child)
    assert child.wait(600) == 0
    assert child.communicate()[1] == ""


def test_a_reader_that_goes_ends_it(open_root: Desk) -> None:
    child = open_root.start("s", "--client", "eye")
    line_of(child)
    assert child.stdout is not None
    child.stdout.close()
    open_root.session.inject({"role": "user", "content": "into the void"})
    assert child.wait(600) in (0, 1)
    assert open_root.clients() == {}


@pytest.mark.req("D14.cli.attach", "S3.attach.second_controller_refused")
def test_a_second_controller_needs_takeover(open_root: Desk) -> None:
    open_root.session.attach("tui", mode="controller")
    refused = open_root.run("attach", "s", "--client", "web", "--mode", "controller", "--json")
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (1, "controller_present")
    child = open_root.start("s", "--client", "web", "--takeover", "--json")
    assert event_of(child)["metadata"]["action"] == "takeover"
    assert open_root.clients() == {"tui": "observer", "web": "controller"}


@pytest.mark.req("D14.cli.takeover", "HS7.one_vocabulary")
def test_takeover_puts_a_client_in_control(open_root: Desk) -> None:
    open_root.session.attach("tui", mode="controller")
    done = open_root.run("takeover", "s", "--client", "ops", "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert (answer["previous_controller_id"], answer["active_controller_id"]) == ("tui", "ops")
    assert open_root.clients() == {"tui": "observer", "ops": "controller"}
    assert open_root.session.events()[-1]["metadata"]["action"] == "takeover"
    assert open_root.run("takeover", "s").stdout == "cli is in control of s; ops is an observer now.\n"


@pytest.mark.parametrize("verb", ["attach", "takeover"])
def test_an_unknown_session_is_bad_usage(open_root: Desk, verb: str) -> None:
    assert open_root.run(verb, "ghost").returncode == 2
    assert open_root.run(verb).returncode == 2
