"""Subscribers hear every event, in order, without a gap, from any thread and process; and hold up nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import mulligan.opening as opening
from mulligan import builtins as b
from mulligan.effects.session import Session
from mulligan.session.subscribers import hub_of
from mulligan.values.faults import MulliganError
from session.messages_made import user

CHILD = Path(__file__).with_name("writer_child.py")


class Ear:
    """Remembers what it was told, in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    @property
    def texts(self) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == "message"]


@pytest.mark.req("S3.subscribe.appends", "S3.session.owns_subscribers")
def test_every_callback_of_a_session_is_told(session: Session) -> None:
    one, two = Ear(), Ear()
    first, second = b.agent_subscribe("s", one), b.agent_subscribe("s", two)
    session.inject(user("hello"))
    session.emit("iteration_end", {"iteration": 1})
    assert first.wait() and second.wait()
    assert [event["kind"] for event in one.events] == ["message", "iteration_end"]
    assert one.events == two.events == session.events()
    assert [subscription.callback for subscription in session.subscriptions()] == [one, two]


def test_inside_a_callback_the_session_is_the_current_one(session: Session) -> None:
    seen: list[str | None] = []
    told = session.subscribe(lambda event: seen.append(b.agent_session_current_id()))
    session.inject(user("hello"))
    assert told.wait()
    assert seen == ["s"] and b.agent_session_current_id() is None


def test_a_callback_may_write_to_its_session(session: Session) -> None:
    def answer(event: dict[str, Any]) -> None:
        if event["role"] == "user":
            session.inject({"role": "assistant", "content": "heard " + event["text"]})

    told = session.subscribe(answer)
    session.inject(user("you"))
    assert told.wait()
    assert [message["content"] for message in session.messages()] == ["you", "heard you"]


def test_one_can_begin_with_what_was_said_before(session: Session) -> None:
    for number in range(5):
        session.inject(user(str(number)))
    ear = Ear()
    told = session.subscribe(ear, after=session.events()[1]["seq"])
    assert told.wait()
    assert ear.texts == ["2", "3", "4"]


def test_a_slow_one_never_blocks_the_writer_nor_the_others(session: Session) -> None:
    gate = threading.Event()
    slow_texts: list[str] = []

    def slow(event: dict[str, Any]) -> None:
        gate.wait(30)
        slow_texts.append(event["text"])

    quick = Ear()
    stuck, running = session.subscribe(slow), session.subscribe(quick)
    for number in range(300):
        session.inject(user(str(number)))
    assert running.wait()
    assert quick.texts == [str(number) for number in range(300)] and slow_texts == []
    gate.set()
    assert stuck.wait()
    assert slow_texts == quick.texts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_fails_is_told_nothing_more_and_the_others_are(session: Session) -> None:
    calls: list[str] = []

    def failing(event: dict[str, Any]) -> None:
        calls.append(event["text"])
        raise ZeroDivisionError

    ear = Ear()
    broken, sound = session.subscribe(failing), session.subscribe(ear)
    for text in ("one", "two"):
        session.inject(user(text))
    assert sound.wait()
    broken.join(10)
    assert calls == ["one"] and isinstance(broken.error, ZeroDivisionError) and broken.ended
    assert ear.texts == ["one", "two"] and len(session.subscriptions()) == 1


@pytest.mark.parametrize("callback", [None, 7, "print"])
def test_what_cannot_be_told_anything_is_refused(session: Session, callback: Any) -> None:
    with pytest.raises(MulliganError) as caught:
        session.subscribe(callback)
    assert caught.value.code == "invalid_params" and not session.subscriptions()


def test_closing_a_subscription_ends_it(session: Session) -> None:
    ear = Ear()
    told = session.subscribe(ear)
    session.inject(user("one"))
    assert told.wait()
    told.close()
    told.join(10)
    session.inject(user("two"))
    assert ear.texts == ["one"] and session.subscriptions() == []


def test_closing_the_store_ends_them_all(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    opened = opening.open(str(tmp_path / "w"), store=str(tmp_path / "store"))
    session, ear = opened.session("s"), Ear()
    told = session.subscribe(ear)
    session.inject(user("one"))
    assert told.wait()
    hub = hub_of(opened.desk.ledger.store)
    opened.close()
    assert told.ended and hub.of(session.id) == []


def test_reset_and_going_back_leave_no_gap(session: Session) -> None:
    ear = Ear()
    told = session.subscribe(ear)
    with session.turn("t"):
        session.inject(user("one"))
    session.rollback()
    session.inject(user("two"))
    session.reset()
    session.inject(user("three"))
    assert told.wait()
    assert ear.texts == ["one", "two", "three"]


def test_many_ears_many_threads_and_two_processes(session: Session, tmp_path: Path, work: Path) -> None:
    ears = [Ear() for _ in range(32)]
    told = [session.subscribe(ear) for ear in ears]
    arguments = [sys.executable, str(CHILD), str(work), str(tmp_path / "home"), "s", "40"]
    children = [subprocess.Popen([*arguments, name], stdout=subprocess.DEVNULL) for name in ("left", "right")]

    def write(name: str) -> None:
        for number in range(40):
            session.inject(user(f"{name} {number}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in ("up", "down")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait(120) for child in children] == [0, 0]
    assert all(one.wait(timeout_s=60) for one in told)
    record = session.events()
    assert [event["seq"] for event in record] == sorted(event["seq"] for event in record)
    assert all(ear.events == record for ear in ears)
    for name in ("left", "right", "up", "down"):
        heard = [text for text in ears[0].texts if text.startswith(name)]
        assert heard == [f"{name} {number}" for number in range(40)]
