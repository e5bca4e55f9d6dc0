"""Subscribers receive every event, in order and without a gap, from any thread and process, and block no writer."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import mulligan.api as api
from mulligan import builtins as b
from mulligan.effects.session import DurableSession
from mulligan.session.subscribers import hub_of
from mulligan.values.errors import MulliganError
from tests.session.example_messages import user

CHILD = Path(__file__).with_name("writer_process.py")


class ReceivedEvents:
    """Remembers what it was subscription, in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    @property
    def texts(self) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == "message"]


@pytest.mark.req("S3.subscribe.appends", "S3.session.owns_subscribers")
def test_every_callback_of_a_session_gets_the_event(session: DurableSession) -> None:
    one, two = ReceivedEvents(), ReceivedEvents()
    first, second = b.agent_subscribe("s", one), b.agent_subscribe("s", two)
    session.inject(user("hello"))
    session.emit("iteration_end", {"iteration": 1})
    assert first.wait() and second.wait()
    assert [event["kind"] for event in one.events] == ["message", "iteration_end"]
    assert one.events == two.events == session.events()
    assert [subscription.callback for subscription in session.subscriptions()] == [one, two]


def test_inside_a_callback_the_session_is_the_current_one(session: DurableSession) -> None:
    seen: list[str | None] = []
    subscription = session.subscribe(lambda event: seen.append(b.agent_session_current_id()))
    session.inject(user("hello"))
    assert subscription.wait()
    assert seen == ["s"] and b.agent_session_current_id() is None


def test_a_callback_may_write_to_its_session(session: DurableSession) -> None:
    def answer(event: dict[str, Any]) -> None:
        if event["role"] == "user":
            session.inject({"role": "assistant", "content": "heard " + event["text"]})

    subscription = session.subscribe(answer)
    session.inject(user("you"))
    assert subscription.wait()
    assert [message["content"] for message in session.messages()] == ["you", "heard you"]


def test_a_subscription_can_begin_at_an_earlier_record(session: DurableSession) -> None:
    for number in range(5):
        session.inject(user(str(number)))
    received = ReceivedEvents()
    subscription = session.subscribe(received, after=session.events()[1]["seq"])
    assert subscription.wait()
    assert received.texts == ["2", "3", "4"]


def test_a_slow_subscriber_blocks_neither_the_writer_nor_the_others(session: DurableSession) -> None:
    gate = threading.Event()
    slow_texts: list[str] = []

    def slow(event: dict[str, Any]) -> None:
        gate.wait(600)
        slow_texts.append(event["text"])

    quick = ReceivedEvents()
    stuck, running = session.subscribe(slow), session.subscribe(quick)
    for number in range(300):
        session.inject(user(str(number)))
    assert running.wait()
    assert quick.texts == [str(number) for number in range(300)] and slow_texts == []
    gate.set()
    assert stuck.wait()
    assert slow_texts == quick.texts


@pytest.mark.req("S3.subscribe.survives_errors")
def test_a_subscriber_that_raises_stays_subscribed_and_its_error_is_logged(
    session: DurableSession, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def failing(event: dict[str, Any]) -> None:
        calls.append(event["text"])
        raise ZeroDivisionError(event["text"])

    received = ReceivedEvents()
    broken, sound = session.subscribe(failing), session.subscribe(received)
    for text in ("one", "two"):
        session.inject(user(text))
    assert sound.wait() and broken.wait()
    assert calls == ["one", "two"] and received.texts == ["one", "two"]
    assert not broken.ended and isinstance(broken.error, ZeroDivisionError)
    assert len(session.subscriptions()) == 2
    logged = [record.exc_info[1] for record in caplog.records if record.name == "mulligan.events" and record.exc_info]
    assert [str(error) for error in logged] == ["one", "two"]


@pytest.mark.req("S3.subscribe.other_events")
def test_subscribers_receive_cuts_forks_and_undo_operations(session: DurableSession) -> None:
    received = ReceivedEvents()
    subscription = session.subscribe(received)
    with session.turn("p"):
        for text in ("one", "two", "three"):
            session.inject(user(text))
    session.trim(2)
    session.truncate(1)
    child = session.fork_at(1)
    session.rollback()
    session.redo()
    session.inject(user("four"))
    session.rewind(session.message_ids()[0], side="after")
    session.reset()
    assert subscription.wait()
    kinds = [event["kind"] for event in received.events]
    cuts = [kind for kind in kinds if kind in ("trim", "truncate", "fork", "rollback", "redo", "rewind", "reset")]
    assert cuts == ["trim", "truncate", "fork", "rollback", "redo", "rewind", "reset"]
    assert next(event for event in received.events if event["kind"] == "fork")["metadata"] == {"child_id": child}
    assert len({event["id"] for event in received.events}) == len(received.events)


@pytest.mark.req("S3.subscribe.other_events")
def test_subscribers_receive_calls_that_begin_end_and_are_undone(session: DurableSession) -> None:
    received = ReceivedEvents()
    subscription = session.subscribe(received)
    with session.call("tidy") as call:
        call.write_file("a.txt", "x")
    undo = session.undo()
    assert subscription.wait()
    seen = [(event["kind"], event["metadata"]) for event in received.events]
    assert [kind for kind, _ in seen] == [
        "call_begun",
        "call_ended",
        "call_begun",
        "call_ended",
        "undo",
        "call_undone",
    ]
    assert seen[0][1]["call_id"] == call.id and seen[0][1]["tool"] == "tidy"
    assert seen[1][1] == {"call_id": call.id, "status": "committed", "changes": 1, "paths": ["a.txt"]}
    assert seen[5][1] == {"call_ids": [call.id], "by": undo.call_id}


@pytest.mark.parametrize("callback", [None, 7, "print"])
def test_a_subscriber_must_be_a_function(session: DurableSession, callback: Any) -> None:
    with pytest.raises(MulliganError) as caught:
        session.subscribe(callback)
    assert caught.value.code == "invalid_params" and not session.subscriptions()


def test_closing_a_subscription_ends_it(session: DurableSession) -> None:
    received = ReceivedEvents()
    subscription = session.subscribe(received)
    session.inject(user("one"))
    assert subscription.wait()
    subscription.close()
    subscription.join(600)
    session.inject(user("two"))
    assert received.texts == ["one"] and session.subscriptions() == []


def test_closing_the_store_ends_them_all(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    opened = api.open(str(tmp_path / "w"), store=str(tmp_path / "store"))
    session, received = opened.session("s"), ReceivedEvents()
    subscription = session.subscribe(received)
    session.inject(user("one"))
    assert subscription.wait()
    hub = hub_of(opened.open_root.ledger.store)
    opened.close()
    assert subscription.ended and hub.of(session.id) == []


def test_reset_and_rewinding_leave_no_gap(session: DurableSession) -> None:
    received = ReceivedEvents()
    subscription = session.subscribe(received)
    with session.turn("t"):
        session.inject(user("one"))
    session.rollback()
    session.inject(user("two"))
    session.reset()
    session.inject(user("three"))
    assert subscription.wait()
    assert received.texts == ["one", "two", "three"]


def test_many_subscribers_get_all_events_of_threads_and_processes_in_order(
    session: DurableSession, tmp_path: Path, work: Path
) -> None:
    subscribers = [ReceivedEvents() for _ in range(32)]
    subscriptions = [session.subscribe(received) for received in subscribers]
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
    assert [child.wait(600) for child in children] == [0, 0]
    assert all(one.wait(timeout_s=60) for one in subscriptions)
    record = session.events()
    assert [event["seq"] for event in record] == sorted(event["seq"] for event in record)
    assert all(received.events == record for received in subscribers)
    for name in ("left", "right", "up", "down"):
        texts = [text for text in subscribers[0].texts if text.startswith(name)]
        assert texts == [f"{name} {number}" for number in range(40)]
