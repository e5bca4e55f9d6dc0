"""Live events: one thread reads the journals, and every client reads what that thread found.

1. One thread looks whether the store has grown and turns new records into events. It keeps the newest in a ring.
2. A client is a coroutine with a place in the ring, so it needs neither a thread nor a queue. All clients send what is
   new together, at most ten times a second.
3. The id of an event is the ordinal of its record among all records of the store. A client that comes back with
   `Last-Event-ID` first reads the journals from there, then goes on with the ring.
4. A client that falls behind the ring, or does not take its bytes, is disconnected. It comes back and loses nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio.to_thread

from mulligan.session.subscribers import live_events_in
from mulligan.session.transcript_log import Archive
from mulligan.store.journal import HEADS, ORDINAL_END, RECORDS, HeadRow, RecordRow, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.fast_dataclass import fast_dataclass

POLL_S = 0.05
SEND_EVERY_S = 0.1
COMMENT_EVERY_S = 15.0
STUCK_S = 30.0
RING_EVENTS = 20_000
RETRY_MS = 1_000
_PAGE_RECORDS = 500
_PATHS_SHOWN = 50
_HIDDEN = frozenset({"message", "tool_result"})
_WHOLE = b"event: reset\ndata: {}\n\n"


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """One event as it goes over the wire. `workspace` is set for an external edit, `session` for everything else."""

    ordinal: int
    session: str | None
    workspace: str | None
    frame: bytes


Wanted = Callable[[LiveEvent], bool]


def every_event(_: LiveEvent) -> bool:
    return True


def events_in(tx: Tx, archive: Archive, row: RecordRow) -> list[LiveEvent]:
    """What clients hear of one record; nothing for most kinds."""
    record = parse_record(row)
    if record.journal.startswith("s:"):
        session = record.journal[2:]
        found = [{**event, "session_id": session} for event in live_events_in(tx, archive, record)]
        return [_live(row.ordinal, session, None, _told(event)) for event in found]
    if record.kind != "external":
        return []
    body = record.payload
    changes = body.get("changes", [])
    event = {
        "kind": "external_edit",
        "session_id": None,
        "metadata": {
            "call_id": body["id"],
            "root": body["root"],
            "changes": len(changes),
            "paths": [change["path"] for change in changes[:_PATHS_SHOWN]],
        },
    }
    return [_live(row.ordinal, None, body.get("workspace") or record.journal[2:], event)]


def _told(event: dict[str, Any]) -> dict[str, Any]:
    """What was said is read from the transcript; the event only says that there is more."""
    told: dict[str, Any] = {name: event[name] for name in ("id", "kind", "session_id", "metadata") if name in event}
    return told if event["kind"] not in _HIDDEN else {**told, "role": event.get("role")}


def _live(ordinal: int, session: str | None, workspace: str | None, event: dict[str, Any]) -> LiveEvent:
    return LiveEvent(ordinal, session, workspace, b"id: %d\ndata: %s\n\n" % (ordinal, encode(event)))


class TooManyStreams(Exception):
    """The server, or one token, has as many streams as it may have."""


@fast_dataclass(slots=True)
class EventReader:
    """Reads the journals once for all clients. `start` begins a thread; `close` ends it."""

    archive: Archive
    streams_max: int = 1_000
    streams_per_key_max: int = 200
    _ring: deque[LiveEvent] = field(default_factory=lambda: deque(maxlen=RING_EVENTS))
    _first: int = 0
    """every event after this ordinal is in the ring"""
    _seen: int = 0
    _waiting: set[asyncio.Event] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _streams: dict[str, int] = field(default_factory=dict)
    _is_ending: bool = False
    _is_due: bool = False
    _sent_at: float = 0.0
    _batches: dict[tuple[Wanted, int], tuple[int, bytes]] = field(default_factory=dict)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        with self.archive.store.read() as tx:
            newest = tx.select(HEADS, order=("ordinal",), descending=True, limit=1)
        self._first = self._seen = newest[0].ordinal if newest else 0
        self._thread = threading.Thread(target=self._run, name="mulligan-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def end_streams(self) -> None:
        """Every client is disconnected, and may come back to the next server."""
        self._is_ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._publish, [])

    @property
    def newest(self) -> int:
        return self._seen

    @property
    def streams(self) -> int:
        return sum(self._streams.values())

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            found = self._look()
            if found and self._loop is not None:
                self._loop.call_soon_threadsafe(self._publish, found)

    def _look(self) -> list[LiveEvent]:
        """The events of all records since the last look, in the order of the records."""
        with self.archive.store.read() as tx:
            found: list[LiveEvent] = []
            changed = _changed_since(tx, self._seen)
            for head in changed:
                for row in _records(tx, head.journal, _first_after(tx, head, self._seen) - 1):
                    found += events_in(tx, self.archive, row)
        if changed:
            self._seen = changed[-1].ordinal
        return sorted(found, key=lambda event: event.ordinal)

    def _publish(self, found: list[LiveEvent]) -> None:
        """On the loop: the ring belongs to its thread."""
        dropped = len(self._ring) + len(found) - RING_EVENTS
        if dropped > 0:
            self._first = max(self._first, (*self._ring, *found)[dropped - 1].ordinal)
        self._ring.extend(found)
        if not self._is_due and self._loop is not None:
            self._is_due = True
            self._loop.call_later(max(0.0, self._sent_at + SEND_EVERY_S - monotonic_s()), self._wake)

    def _wake(self) -> None:
        """All clients go on together, at most ten times a second. So those at the same place send the same bytes."""
        self._is_due, self._sent_at = False, monotonic_s()
        self._batches.clear()
        for waiting in self._waiting:
            waiting.set()

    def _batch(self, wanted: Wanted, place: int) -> tuple[int, bytes]:
        """What a client at a place has not got yet, and its place after that."""
        known = self._batches.get((wanted, place))
        if known is None:
            new = list(_after(self._ring, place))
            last = new[-1].ordinal if new else place
            known = last, b"".join(event.frame for event in new if wanted(event))
            self._batches[wanted, place] = known
        return known

    def enter(self, key: str) -> None:
        """Raises `TooManyStreams`. Each `enter` has its `leave`."""
        if self.streams >= self.streams_max or self._streams.get(key, 0) >= self.streams_per_key_max:
            raise TooManyStreams
        self._streams[key] = self._streams.get(key, 0) + 1

    def leave(self, key: str) -> None:
        self._streams[key] -= 1
        if not self._streams[key]:
            del self._streams[key]

    async def stream(self, wanted: Wanted, after: int | None) -> AsyncIterator[bytes]:
        """Bytes for one client, until it falls behind. `after`: the last event that it has; None: only what comes."""
        # The place comes first: a client that has read the first bytes hears everything that happens from then on.
        place = self._ring[-1].ordinal if self._ring else self._first
        yield b"retry: %d\n\n" % RETRY_MS
        if after is not None and after < place:
            place = after
            while place < self._first:
                page = await anyio.to_thread.run_sync(partial(self._page, place))
                if not page:
                    break
                place = page[-1].ordinal
                if frames := b"".join(event.frame for event in page if wanted(event)):
                    yield frames
        waiting = asyncio.Event()
        self._waiting.add(waiting)
        try:
            async for frames in self._follow(wanted, place, waiting):
                yield frames
        finally:
            self._waiting.discard(waiting)

    async def _follow(self, wanted: Wanted, place: int, waiting: asyncio.Event) -> AsyncIterator[bytes]:
        said = monotonic_s()
        while place >= self._first and not self._is_ending:
            waiting.clear()
            place, frames = self._batch(wanted, place)
            if frames:
                said = monotonic_s()
                yield frames
            try:
                await asyncio.wait_for(waiting.wait(), max(0.0, said + COMMENT_EVERY_S - monotonic_s()))
            except TimeoutError:
                said = monotonic_s()
                yield b": still here\n\n"

    def _page(self, after: int) -> list[LiveEvent]:
        """The first events after an ordinal, from the journals."""
        with self.archive.store.read() as tx:
            rows: list[RecordRow] = []
            for head in _changed_since(tx, after):
                first = _first_after(tx, head, after)
                rows += tx.select(RECORDS, {"journal": head.journal}, between=("seq", first, first + _PAGE_RECORDS))
            rows = sorted(rows, key=lambda row: row.ordinal)[:_PAGE_RECORDS]
            found = [event for row in rows for event in events_in(tx, self.archive, row)]
            if rows and (not found or found[-1].ordinal != rows[-1].ordinal):
                # The records after the last event have none; the next page begins after them.
                found.append(LiveEvent(rows[-1].ordinal, None, None, b""))
            return found


def _records(tx: Tx, journal: str, after: int) -> Iterator[RecordRow]:
    while rows := tx.select(RECORDS, {"journal": journal}, between=("seq", after + 1, 2**62), limit=_PAGE_RECORDS):
        yield from rows
        after = rows[-1].seq


def _changed_since(tx: Tx, ordinal: int) -> list[HeadRow]:
    """The journals with a record after an ordinal, in the order of their newest records."""
    return tx.select(HEADS, between=("ordinal", ordinal + 1, ORDINAL_END), order=("ordinal",))


def _first_after(tx: Tx, head: HeadRow, ordinal: int) -> int:
    """The first record of a journal that came after an ordinal. Ordinals rise with the place in a journal."""
    low, high = 1, head.seq
    while low < high:
        middle = (low + high) // 2
        row = tx.get(RECORDS, head.journal, middle)
        if row is None or row.ordinal <= ordinal:
            low = middle + 1
        else:
            high = middle
    return low


def _after(ring: Iterable[LiveEvent], place: int) -> Iterator[LiveEvent]:
    """The newest events are at the end, and a client mostly misses few of them."""
    new: list[LiveEvent] = []
    for event in reversed(ring):  # type: ignore[call-overload]  # a deque can be read from its end
        if event.ordinal <= place:
            break
        new.append(event)
    return reversed(new)
