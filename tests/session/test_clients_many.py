"""Many clients at one session, in threads and in other processes, and processes that die."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.api import Mulligan
from mulligan.effects.session import DurableSession
from mulligan.history.projection import SCHEMA
from mulligan.store.verify import verify
from mulligan.values.errors import MulliganError

CHILD = str(Path(__file__).with_name("client_process.py"))
SESSION = "shared"


class Ground:
    def __init__(self, base: Path) -> None:
        self.home, self.root = str(base / "home"), str(base / "work")
        (base / "work").mkdir()
        self.children: list[subprocess.Popen[str]] = []
        self.opened: Mulligan = mulligan.open(self.root, store=self.home)

    def start(self, what: str, name: str, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, CHILD, self.home, self.root, what, name, str(count)]
        child = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(child)
        return child

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()
        self.opened.close()


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    found = Ground(tmp_path)
    yield found
    found.close()


def line_of(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def controllers_over_time(session: DurableSession) -> list[str | None]:
    """Who was in control after each event about clients, and who gave each prompt, in the order of the journal."""
    found = []
    for event in session.events():
        if event["kind"] == "live_session_client":
            found.append(event["metadata"]["active_controller_id"])
        elif event["kind"] == "message" and "live_session" in event.get("metadata", {}):
            source = event["metadata"]["live_session"]["client_id"]
            assert source == found[-1], "a prompt is on record only while its giver is in control"
    return found


def into(mine: list[list[Any]]) -> Callable[[dict[str, Any]], None]:
    return lambda event: mine.append([event["seq"], event["kind"], event["text"]])


def events_on_record(session: DurableSession) -> list[list[Any]]:
    return [[event["seq"], event["kind"], event["text"]] for event in session.events()]


@pytest.mark.req("S3.live.many_observers_one_controller", "S3.live.observer_rights", "S3.inject_prompt.controller_only")
def test_32_observers_and_one_controller_over_threads_and_two_processes(ground: Ground) -> None:
    session = ground.opened.session(SESSION)
    session.inject({"role": "user", "content": "before anybody came"})
    elsewhere = ground.start("watch", "far", 16)
    rival = ground.start("controller", "rival", 60)
    heard: list[list[list[Any]]] = [[] for _ in range(16)]
    subscriptions = [session.subscribe(into(mine), after=0) for mine in heard]
    for number in range(16):
        session.attach(f"near{number}")
    assert line_of(elsewhere) == ["ready"] and line_of(rival) == ["ready"]
    go(rival)
    said = _struggle(session, 60)
    theirs = [line_of(rival) for _ in range(60)]
    rival.communicate()
    session.inject({"role": "user", "content": "the end"})
    assert all(one.wait(timeout_s=60) for one in subscriptions)
    what, far = line_of(elsewhere)
    assert what == "heard"
    record = events_on_record(session)
    # In the order of the journal, without a gap and without a repeat, for everybody everywhere.
    assert all(mine == record for mine in heard)
    assert all(mine == record for mine in far)
    assert [event[0] for event in record] == sorted({event[0] for event in record})
    prompts = {text for _, kind, text in record if kind == "message"} - {"before anybody came", "the end"}
    assert prompts == {*said, *(text for what, text in theirs if what == "said")}
    assert {text for what, text in theirs if what == "refused"} <= {"not_controller"}
    assert set(controllers_over_time(session)) <= {None, "rival", "mine"}
    assert sum(one["mode"] == "controller" for one in session.live_clients()) == 1
    assert list(verify(ground.opened.store, SCHEMA)) == []


def _struggle(session: DurableSession, count: int) -> set[str]:
    """Take over and prompt from two threads of one client each; what was appended."""
    said: set[str] = set()

    def fight(part: int) -> None:
        for number in range(count // 2):
            session.takeover("mine")
            text = f"mine {part} {number}"
            try:
                session.client_inject_prompt("mine", text)
                said.add(text)
            except MulliganError as error:
                assert error.code == "not_controller"

    threads = [threading.Thread(target=fight, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.req("S3.attach.second_controller_refused")
def test_of_many_parallel_attachments_exactly_one_becomes_controller(ground: Ground) -> None:
    session = ground.opened.session(SESSION)
    barrier = threading.Barrier(12)
    won: list[str] = []

    def ask(name: str) -> None:
        barrier.wait(600)
        try:
            session.attach(name, mode="controller")
            won.append(name)
        except MulliganError as error:
            assert error.code == "controller_present"

    threads = [threading.Thread(target=ask, args=(f"c{number}",)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert [one["client_id"] for one in session.live_clients()] == won


@pytest.mark.req("S3.live.belongs_to_session", "D11.sessions_durable")
def test_an_acknowledged_heartbeat_survives_kill_9(ground: Ground) -> None:
    for round_ in range(4):
        child = ground.start("beat", f"client{round_}", 0)
        told = [line_of(child) for _ in range(5 + round_)]
        child.kill()
        assert child.stdout is not None
        # `communicate` would leave out what `readline` has read ahead.
        rest = child.stdout.read()
        child.communicate()
        told += [json.loads(line) for line in rest.splitlines() if line.endswith("]")]
        with mulligan.open(ground.root, store=ground.home) as again:
            session = again.session(SESSION)
            (mine,) = [one for one in session.live_clients() if one["client_id"] == f"client{round_}"]
            assert mine["mode"] == "controller"
            assert mine["metadata"]["n"] >= max(number for _, number in told)
            texts = {message["content"] for message in session.messages()}
            assert {f"prompt {number}" for what, number in told if what == "said"} <= texts
            assert list(verify(again.store, SCHEMA)) == []
            controllers_over_time(session)
