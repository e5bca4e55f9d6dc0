"""The reader of the journals: what is sent when, to whom, and what becomes of a client that does not keep up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import mulligan
from mulligan.api import Mulligan
from mulligan.history.rewind import archive_of
from mulligan.servers.http import app as app_module
from mulligan.servers.http import events as module
from mulligan.servers.http.events import EventReader, every_event
from mulligan.values.clock import monotonic_s


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "root").mkdir()
    with mulligan.open(tmp_path / "root", store=tmp_path / "home") as found:
        yield found


@contextmanager
def reader_of(opened: Mulligan) -> Iterator[EventReader]:
    found = EventReader(archive_of(opened.open_root.ledger))
    found.start(asyncio.get_running_loop())
    try:
        yield found
    finally:
        found.close()


def work(opened: Mulligan, calls: int) -> list[str]:
    """Calls of an agent; their ids."""
    session, ids = opened.session("work"), []
    for number in range(calls):
        with session.call(f"step {number}") as call:
            call.write_file("a.txt", f"{number}\n")
        ids.append(call.id)
    return ids


def ended_in(piece: bytes) -> list[str]:
    """The calls whose end a piece of a stream tells."""
    told = [json.loads(line[6:]) for line in piece.decode().splitlines() if line.startswith("data: {")]
    return [str(one["metadata"]["call_id"]) for one in told if one["kind"] == "call_ended"]


def last_id(piece: bytes) -> int:
    return int([line for line in piece.decode().splitlines() if line.startswith("id: ")][-1][4:])


def in_a_loop(act: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(act(), 300)

    asyncio.run(run())


def stream_of(reader: EventReader, after: int | None) -> Any:
    return aclosing(cast("Any", reader.stream(every_event, after)))


async def until_read(reader: EventReader, opened: Mulligan, calls: int) -> list[str]:
    """Work of an agent that the reader has seen when this returns."""
    seen = reader.newest
    ids = await asyncio.to_thread(work, opened, calls)
    while reader.newest < seen + 2 * calls:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the loop publishes what the thread found
    return ids


def test_a_client_that_falls_behind_is_disconnected_and_loses_nothing(
    opened: Mulligan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RING_EVENTS", 8)

    async def act() -> None:
        with reader_of(opened) as reader:
            async with stream_of(reader, None) as stream:
                assert (await anext(stream)).startswith(b"retry: ")
                first = await until_read(reader, opened, 1)
                begun = b""
                while not ended_in(begun):
                    begun += await anext(stream)
                assert ended_in(begun) == first
                # The client does nothing while more happens than the ring holds.
                missed = await until_read(reader, opened, 20)
                rest = [piece async for piece in stream]
                assert ended_in(b"".join(rest)) == []
            async with stream_of(reader, last_id(begun)) as again:
                heard: list[str] = []
                while heard[-1:] != missed[-1:]:
                    heard += ended_in(await anext(again))
                assert heard == missed

    in_a_loop(act)


def test_events_are_gathered_and_sent_at_most_ten_times_a_second(opened: Mulligan) -> None:
    async def act() -> None:
        with reader_of(opened) as reader:
            async with stream_of(reader, None) as stream:
                await anext(stream)
                working = asyncio.ensure_future(asyncio.to_thread(work, opened, 60))
                began_s, pieces, heard = monotonic_s(), 0, list[str]()
                while len(heard) < 60:
                    heard += ended_in(await anext(stream))
                    pieces += 1
                    assert pieces <= (monotonic_s() - began_s) / module.SEND_EVERY_S + 2
                assert heard == await working

    in_a_loop(act)


def test_a_silent_stream_gets_a_comment(opened: Mulligan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.COMMENT_EVERY_S == 15
    monkeypatch.setattr(module, "COMMENT_EVERY_S", 0.01)

    async def act() -> None:
        with reader_of(opened) as reader:
            async with stream_of(reader, None) as stream:
                await anext(stream)
                assert [await anext(stream), await anext(stream)] == [b": still here\n\n"] * 2

    in_a_loop(act)


def test_a_client_that_takes_no_bytes_is_disconnected_and_its_place_is_free_again(
    opened: Mulligan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STUCK_S", 0.05)

    async def act() -> None:
        with reader_of(opened) as reader:
            reader.enter("client")

            async def frames() -> AsyncIterator[bytes]:
                try:
                    async for piece in reader.stream(every_event, None):
                        yield piece
                finally:
                    reader.leave("client")

            never = asyncio.Event()

            async def receive() -> dict[str, Any]:
                await never.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message.get("body"):
                    await never.wait()

            scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
            await app_module.EventStream(frames(), media_type="text/event-stream")(scope, receive, send)
            while reader.streams:
                await asyncio.sleep(0)

    in_a_loop(act)
