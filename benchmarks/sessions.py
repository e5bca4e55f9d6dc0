"""The cost of transcripts: appending a message, forking, opening a long session, and the size on disk.

    python benchmarks/sessions.py [--messages N] [--langgraph N]

Goals: append of a message at most 0.4 ms (p50), flat from 10 to 100 000 messages (at most 1.5
times); fork of a session with 10 000 messages at most 5 ms; open of one with 100 000 at most 50 ms to its first use; a
session of 10 000 messages takes at most 1.5 times their UTF-8 bytes and 400 bytes each. Beside them, on the same
transcript, the SQLite checkpointer of LangGraph, which keeps the state of a thread once per step.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from typing import Any

from timing import directory_bytes, quantile, timed_us

import mulligan
from mulligan import Session
from mulligan.values.canonical import encode

APPEND_GOAL_US, FLAT_GOAL, FORK_GOAL_US, OPEN_GOAL_US = 400.0, 1.5, 5_000.0, 50_000.0
STORED_TIMES_GOAL, STORED_EACH_GOAL_BYTES = 1.5, 400
SAMPLE = 500


def message(number: int) -> dict[str, Any]:
    """A turn of an agent at work: a question, a tool call, its output, an answer."""
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "shell", "arguments": '{"cmd":"ls"}'}}
    return (
        {"role": "user", "content": f"Please look at part {number} of the task and say what is left to do there."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number - 1}", "content": f"file_{number}.py: ok\n" * 12},
        {"role": "assistant", "content": f"Part {number} is done; what is left is the last check and a note on it."},
    )[number % 4]


def append_upto(session: Session, start: int, count: int) -> list[float]:
    return timed_us(lambda number: session.inject(message(number)), range(start, count))


def line(what: str, value: str, goal: str, met: bool) -> None:
    print(f"{what:<52} {value:>14}   goal {goal:<14} {'ok' if met else 'MISSED'}")


def appending(session: Session, count: int) -> None:
    """In windows of a few hundred messages at growing lengths, nothing else between them."""
    first: float | None = None
    at = 10
    append_upto(session, 0, at)
    while at < count:
        found = quantile(append_upto(session, at, min(at + SAMPLE, count)), 0.5)
        first = first or found
        line(f"append, {at} messages there", f"{found / 1000:.3f} ms", "0.4 ms", found <= APPEND_GOAL_US)
        last = min(at + SAMPLE, count)
        at = min(max(at * 10, last), count)
        append_upto(session, last, at)
    found = quantile(append_upto(session, count, count + SAMPLE), 0.5)
    line(f"append, {count} messages there", f"{found / 1000:.3f} ms", "0.4 ms", found <= APPEND_GOAL_US)
    line(
        "  beside the first",
        f"{found / (first or found):.2f} x",
        f"{FLAT_GOAL} x",
        found <= FLAT_GOAL * (first or found),
    )


def forking(session: Session, count: int) -> None:
    found = quantile(timed_us(lambda _: session.fork(), range(50)), 0.5)
    line(f"fork of {count} messages", f"{found / 1000:.3f} ms", "5 ms", found <= FORK_GOAL_US)
    found = quantile(timed_us(lambda number: session.fork_at(count // 2 + number), range(50)), 0.5)
    line(f"fork_at in the middle of {count}", f"{found / 1000:.3f} ms", "5 ms", found <= FORK_GOAL_US)


def opening_long(work: str, home: str, name: str, count: int) -> None:
    times: list[float] = []
    for _ in range(9):
        start = time.perf_counter()
        with mulligan.open(work, store=home) as opened:
            session = opened.session(name)
            assert session.length() >= count and len(session.messages(count - 10, count)) == 10
            session.inject(message(0))
            times.append((time.perf_counter() - start) * 1e6)
    found = quantile(sorted(times), 0.5)
    line(f"open of {count} to its first use", f"{found / 1000:.1f} ms", "50 ms", found <= OPEN_GOAL_US)


def stored(folder: str, count: int) -> None:
    work, home = os.path.join(folder, "small"), os.path.join(folder, "small-home")
    os.mkdir(work)
    sizes = []
    for upto in (0, count):
        with mulligan.open(work, store=home) as opened:
            append_upto(opened.session("s"), 0, upto)
        sizes.append(directory_bytes(home))
    took = sizes[1] - sizes[0]
    plain = sum(len(encode(message(number))) for number in range(count))
    goal = STORED_TIMES_GOAL * plain + STORED_EACH_GOAL_BYTES * count
    line(
        f"stored, {count} messages of {plain // count} bytes",
        f"{took / count:.0f} B each",
        f"{goal / count:.0f} B",
        took <= goal,
    )


def langgraph(folder: str, count: int) -> None:
    """The same transcript, one checkpoint a message, as its graphs make them; its own quiet settings."""
    from langgraph.checkpoint.base import empty_checkpoint
    from langgraph.checkpoint.sqlite import SqliteSaver

    path = os.path.join(folder, "langgraph.db")
    connection = sqlite3.connect(path, check_same_thread=False)
    saver = SqliteSaver(connection)
    config: Any = {"configurable": {"thread_id": "s", "checkpoint_ns": ""}}
    said: list[dict[str, Any]] = []
    times: list[float] = []
    for number in range(count):
        said.append(message(number))
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": list(said)}
        checkpoint["channel_versions"] = {"messages": number + 1}
        start = time.perf_counter()
        config = saver.put(config, checkpoint, {"source": "loop", "step": number}, {"messages": number + 1})
        times.append((time.perf_counter() - start) * 1e6)
    connection.close()
    early, late = quantile(times[10:60], 0.5), quantile(times[-50:], 0.5)
    size = os.stat(path).st_size
    print(
        f"LangGraph SqliteSaver: append {early / 1000:.3f} ms at 10 messages, {late / 1000:.3f} ms at {count};", end=" "
    )
    print(f"{size / count:.0f} B each after {count} messages ({size / 1e6:.1f} MB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--langgraph", type=int, default=1_000, help="messages for LangGraph; 0 leaves it out")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mulligan-bench-") as folder:
        work, home = os.path.join(folder, "work"), os.path.join(folder, "home")
        os.mkdir(work)
        with mulligan.open(work, store=home) as opened:
            appending(opened.session("long"), asked.messages)
            tenth = opened.session("tenth")
            append_upto(tenth, 0, 10_000)
            forking(tenth, 10_000)
        opening_long(work, home, "long", asked.messages)
        stored(folder, 10_000)
        if asked.langgraph:
            langgraph(folder, asked.langgraph)


if __name__ == "__main__":
    main()
