"""How the records of a session fold into tables. Pure rules: the same records always give the same rows.

`message.appended`  one more message of the context window; also an event
`message.inserted`  a summary or a shortened message; a later `window.changed` adds it to the window
`event.appended`    an event that is not a message: never counted as one and never sent to a model
`facts.set`         small named values of the session; null removes one; may carry an event
`window.changed`    the context window is now another list of spans; may carry facts and an event
`session.closed`, `session.reopened`

A message body is in its record and nowhere else. RUNS says which record holds message number n: messages with
consecutive records are one run. The run that still grows is in the session's own row, so that an append writes one row.

The context window is a list of spans of message numbers, from this session and from the sessions it was forked from. A
message never moves: it keeps its number in the journal of the session it was written in. Forks, cuts, compactions and
undo operations only write another list; no message is copied and none is lost.

Other tables hold the session itself, its boundary and its attached clients.

The `graph_` tables hold the checkpoints of graph frameworks (LangGraph). A thread has namespaces, a namespace has
checkpoints ordered by id, a checkpoint has writes that wait for the next step. A channel's value is stored once per
version. These rows are not folded from a journal: the framework deletes and prunes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from mulligan.store.journal import Record
from mulligan.store.protocol import Table, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId


@fast_dataclass(slots=True, frozen=True)
class SessionRow:
    """One session. An anonymous session exists only so that its calls can be undone; no list shows it."""

    id: str
    root: str
    created_at: str
    closed_at: str | None = None
    parent: str | None = None
    anonymous: int = 0


SESSIONS: Table[SessionRow] = Table(
    "sessions", SessionRow, key=("id",), indexes=(("root",), ("parent",)), projected=True
)


@fast_dataclass(slots=True, frozen=True)
class BoundaryRow:
    """The boundary of a session. `body` is JSON with capability, policy, workdir and environment."""

    session: str
    body: str
    started_at_ns: int
    expires_at_ns: int | None
    ended_at_ns: int | None


BOUNDARIES: Table[BoundaryRow] = Table("boundaries", BoundaryRow, key=("session",), projected=True)


@fast_dataclass(slots=True, frozen=True)
class ClientRow:
    """One attached client. `beat_told_at`: when one of its heartbeats last became an event."""

    session: str
    client: str
    mode: str
    attached_at: str
    last_seen_at: str
    prompt_injection: int
    permission_routing: int
    metadata: str
    beat_told_at: str | None = None


CLIENTS: Table[ClientRow] = Table("clients", ClientRow, key=("session", "client"))


@lru_cache(maxsize=1_024)
def session_journal(session: SessionId) -> str:
    return f"s:{session}"


def project_session_opened(tx: Tx, record: Record) -> None:
    body = record.payload
    anonymous = int(body.get("anonymous", False))
    tx.put(SESSIONS, SessionRow(body["session"], body["root"], record.at, None, body.get("parent"), anonymous))


def project_boundary_attached(tx: Tx, record: Record) -> None:
    body = record.payload
    text = encode(body["boundary"]).decode("utf-8")
    tx.put(BOUNDARIES, BoundaryRow(body["session"], text, body["started_at_ns"], body.get("expires_at_ns"), None))


def project_boundary_ended(tx: Tx, record: Record) -> None:
    row = tx.get(BOUNDARIES, record.payload["session"])
    if row is not None:
        tx.put(BOUNDARIES, replace(row, ended_at_ns=record.payload["ended_at_ns"]))


class MessageSpan(NamedTuple):
    """Messages `start` up to, not including, `stop` of one session's journal."""

    session: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Window = tuple[MessageSpan, ...]


def normal(spans: Iterable[MessageSpan]) -> Window:
    """The same messages in the fewest spans."""
    found: list[MessageSpan] = []
    for span in spans:
        if span.stop <= span.start:
            continue
        last = found[-1] if found else None
        if last is not None and last.session == span.session and last.stop == span.start:
            found[-1] = MessageSpan(span.session, last.start, span.stop)
        else:
            found.append(span)
    return tuple(found)


def length(window: Window) -> int:
    return sum(len(span) for span in window)


def part(window: Window, start: int, stop: int) -> Window:
    """The messages of the window from place `start` up to, not including, `stop`."""
    return normal(_part(window, start, stop))


def _part(window: Window, start: int, stop: int) -> Iterator[MessageSpan]:
    at = 0
    for span in window:
        first, last = max(start - at, 0), min(stop - at, len(span))
        yield MessageSpan(span.session, span.start + first, span.start + max(first, last))
        at += len(span)


def without(window: Window, gone: MessageSpan) -> Window:
    """The window without the messages of one span."""
    return normal(_without(window, gone))


def _without(window: Window, gone: MessageSpan) -> Iterator[MessageSpan]:
    for span in window:
        if span.session != gone.session:
            yield span
            continue
        yield MessageSpan(span.session, span.start, min(span.stop, gone.start))
        yield MessageSpan(span.session, max(span.start, gone.stop), span.stop)


def place_of(window: Window, session: str, number: int) -> int | None:
    """The place of a message in the window; None if the window does not have it."""
    at = 0
    for span in window:
        if span.session == session and span.start <= number < span.stop:
            return at + number - span.start
        at += len(span)
    return None


def at_place(window: Window, place: int) -> tuple[str, int]:
    """The session and number of the message at a place of the window."""
    for span in window:
        if place < len(span):
            return span.session, span.start + place
        place -= len(span)
    raise IndexError(place)


def spans_to_text(window: Window) -> str:
    return encode([list(span) for span in window]).decode("utf-8")


def spans_from_text(text: str) -> Window:
    return spans_from_json(decode(text))


def spans_from_json(body: Sequence[Sequence[str | int]]) -> Window:
    return tuple(MessageSpan(str(session), int(start), int(stop)) for session, start, stop in body)


def spans_to_json(window: Window) -> list[list[str | int]]:
    return [list(span) for span in window]


class InheritedEvents(NamedTuple):
    """Events that a fork has from a session above it: those in its records `after` up to and including `upto`.

    `events`: how many they are. `before`: how many events that session's journal has before them.
    """

    session: str
    after: int
    upto: int
    events: int
    before: int


def inherited_from_json(body: Sequence[Sequence[Any]]) -> list[InheritedEvents]:
    return [InheritedEvents(*one) for one in body]


@fast_dataclass(slots=True, frozen=True)
class TranscriptRow:
    """Counters of a session's transcript.

    `messages` and `events` count the records of its own journal. The context window has the `kept` messages of the
    newest window row and its own messages from `tail` on. The `run_` columns are the run that still grows. `log_base`
    counts inherited events, `log_from` its own events before the last reset.
    """

    session: str
    messages: int = 0
    events: int = 0
    kept: int = 0
    tail: int = 0
    run_first: int = 0
    run_seq: int = 0
    run_events: int = 0
    run_inserted: int = 0
    log_base: int = 0
    log_from: int = 0


@fast_dataclass(slots=True, frozen=True)
class RunRow:
    """A run: messages from number `first` up to the next run are in the records from `seq` on, one each.

    `events`: how many events the journal has before them. `inserted`: these messages are not events.
    """

    session: str
    first: int
    seq: int
    events: int
    inserted: int


@fast_dataclass(slots=True, frozen=True)
class WindowRow:
    """The context window since record `seq`: these spans and the session's own messages from `tail` on.

    `log` lists the inherited events (see `InheritedEvents`); its own events begin after `log_after`.
    `was` is the record whose window this one replaced; `call` is the undo operation that changed the window, if any.
    """

    session: str
    seq: int
    tail: int
    spans: str
    log: str
    log_after: int
    verb: str
    was: int
    call: str | None


@fast_dataclass(slots=True, frozen=True)
class FactRow:
    session: str
    name: str
    value: str


TRANSCRIPTS: Table[TranscriptRow] = Table("talks", TranscriptRow, key=("session",), projected=True)
RUNS: Table[RunRow] = Table("message_runs", RunRow, key=("session", "first"), projected=True)
WINDOWS: Table[WindowRow] = Table("talk_windows", WindowRow, key=("session", "seq"), projected=True)
FACTS: Table[FactRow] = Table("facts", FactRow, key=("session", "name"), projected=True)

APPENDED, INSERTED = "message.appended", "message.inserted"
# Records that are, or may carry, an event.
EVENT_KINDS = frozenset({APPENDED, "event.appended", "facts.set", "window.changed", "session.closed"})


def session_of(journal: str) -> str:
    """The session whose journal that is."""
    return journal[2:]


def transcript_row(tx: Tx, session: str) -> TranscriptRow:
    return tx.get(TRANSCRIPTS, session) or TranscriptRow(session)


def window_row(tx: Tx, session: str, *, upto: int = 2**62) -> WindowRow:
    """The newest window row at or before a record."""
    found = tx.select(WINDOWS, {"session": session}, between=("seq", 0, upto + 1), descending=True, limit=1)
    return found[0] if found else WindowRow(session, 0, 0, "[]", "[]", 0, "open", 0, None)


def project_message(tx: Tx, record: Record) -> None:
    session, inserted = session_of(record.journal), int(record.kind == INSERTED)
    row = transcript_row(tx, session)
    follows = row.messages and row.run_seq + row.messages - row.run_first == record.seq
    if not follows or row.run_inserted != inserted:
        if row.messages:
            tx.put(RUNS, RunRow(session, row.run_first, row.run_seq, row.run_events, row.run_inserted))
        row = replace(row, run_first=row.messages, run_seq=record.seq, run_events=row.events, run_inserted=inserted)
    tx.put(TRANSCRIPTS, replace(row, messages=row.messages + 1, events=row.events + 1 - inserted))


def project_event(tx: Tx, record: Record) -> None:
    row = transcript_row(tx, session_of(record.journal))
    tx.put(TRANSCRIPTS, _with_event(row, record))


def _with_event(row: TranscriptRow, record: Record) -> TranscriptRow:
    return replace(row, events=row.events + 1) if "event" in record.payload else row


def project_facts(tx: Tx, record: Record) -> None:
    _put_facts(tx, record)
    if "event" in record.payload:
        project_event(tx, record)


def _put_facts(tx: Tx, record: Record) -> None:
    session = session_of(record.journal)
    for name, value in record.payload.get("facts", {}).items():
        if value is None:
            tx.delete(FACTS, session, name)
        else:
            tx.put(FACTS, FactRow(session, name, encode(value).decode("utf-8")))


def project_window(tx: Tx, record: Record) -> None:
    body, session = record.payload, session_of(record.journal)
    row, before = transcript_row(tx, session), window_row(tx, session)
    spans = spans_from_json(body["spans"])
    if "log" in body:
        row = replace(row, log_base=sum(one.events for one in inherited_from_json(body["log"])), log_from=row.events)
    tx.put(
        WINDOWS,
        WindowRow(
            session=session,
            seq=record.seq,
            tail=row.messages,
            spans=spans_to_text(spans),
            log=_text(body["log"]) if "log" in body else before.log,
            log_after=body["log_after"] if "log" in body else before.log_after,
            verb=body["verb"],
            was=body["was"],
            call=body.get("call"),
        ),
    )
    tx.put(TRANSCRIPTS, _with_event(replace(row, kept=length(spans), tail=row.messages), record))
    _put_facts(tx, record)


def project_session_closed(tx: Tx, record: Record) -> None:
    session = session_of(record.journal)
    row = tx.get(SESSIONS, session)
    if row is not None:
        tx.put(SESSIONS, replace(row, closed_at=record.at))
    project_event(tx, record)


def project_session_reopened(tx: Tx, record: Record) -> None:
    row = tx.get(SESSIONS, session_of(record.journal))
    if row is not None:
        tx.put(SESSIONS, replace(row, closed_at=None))


def _text(value: Any) -> str:
    return encode(value).decode("utf-8")


TRANSCRIPT_TABLES: tuple[Table[Any], ...] = (TRANSCRIPTS, RUNS, WINDOWS, FACTS)


@fast_dataclass(slots=True, frozen=True)
class GraphCheckpointRow:
    """One checkpoint without its values. `kind` is how the framework's serialiser says it wrote `body`."""

    thread: str
    space: str
    id: str
    parent: str | None
    run: str | None
    kind: str
    body: bytes
    about_kind: str
    about: bytes


@fast_dataclass(slots=True, frozen=True)
class GraphValueRow:
    """The value of one version of a channel."""

    thread: str
    space: str
    channel: str
    version: str
    kind: str
    body: bytes


@fast_dataclass(slots=True, frozen=True)
class GraphWriteRow:
    """A task's write after a checkpoint, which waits for the next checkpoint."""

    thread: str
    space: str
    point: str
    task: str
    ordinal: int
    path: str
    channel: str
    kind: str
    body: bytes


GRAPH_CHECKPOINTS: Table[GraphCheckpointRow] = Table(
    "graph_points", GraphCheckpointRow, key=("thread", "space", "id"), indexes=(("run",),)
)
GRAPH_VALUES: Table[GraphValueRow] = Table("graph_values", GraphValueRow, key=("thread", "space", "channel", "version"))
GRAPH_WRITES: Table[GraphWriteRow] = Table(
    "graph_writes", GraphWriteRow, key=("thread", "space", "point", "task", "ordinal")
)

GRAPH_TABLES = (GRAPH_CHECKPOINTS, GRAPH_VALUES, GRAPH_WRITES)


def graph_checkpoints_of(tx: Tx, thread: str, space: str | None = None) -> list[GraphCheckpointRow]:
    """The checkpoints of a thread, newest first; of all namespaces unless one is given."""
    where = {"thread": thread} if space is None else {"thread": thread, "space": space}
    return tx.select(GRAPH_CHECKPOINTS, where, order=("thread", "space", "id"), descending=True)


def newest(tx: Tx, thread: str, space: str) -> GraphCheckpointRow | None:
    found = tx.select(GRAPH_CHECKPOINTS, {"thread": thread, "space": space}, order=("id",), descending=True, limit=1)
    return found[0] if found else None


def threads(tx: Tx) -> list[str]:
    return sorted({row.thread for row in tx.select(GRAPH_CHECKPOINTS)})


def writes_of(tx: Tx, point: GraphCheckpointRow) -> list[GraphWriteRow]:
    """The writes in the order in which a running graph applies them."""
    rows = tx.select(GRAPH_WRITES, {"thread": point.thread, "space": point.space, "point": point.id})
    return sorted(rows, key=lambda row: (row.path, row.task, row.ordinal))


def put_writes(tx: Tx, rows: Iterable[GraphWriteRow]) -> None:
    """Store writes. A task that runs again keeps its first writes; only special writes (negative ordinals) change."""
    for row in rows:
        if row.ordinal < 0 or not tx.has(GRAPH_WRITES, *GRAPH_WRITES.key_of(row)):
            tx.put(GRAPH_WRITES, row)


def delete_points(tx: Tx, points: Collection[GraphCheckpointRow]) -> None:
    for point in points:
        tx.delete(GRAPH_CHECKPOINTS, *GRAPH_CHECKPOINTS.key_of(point))
        for write in writes_of(tx, point):
            tx.delete(GRAPH_WRITES, *GRAPH_WRITES.key_of(write))


def delete_values(tx: Tx, thread: str, kept: Collection[tuple[str, str, str]]) -> None:
    """Delete the thread's values except the kept ones, each (namespace, channel, version)."""
    for row in tx.select(GRAPH_VALUES, {"thread": thread}):
        if (row.space, row.channel, row.version) not in kept:
            tx.delete(GRAPH_VALUES, *GRAPH_VALUES.key_of(row))


def copy_thread(tx: Tx, source: str, target: str) -> None:
    for point in graph_checkpoints_of(tx, source):
        tx.put(GRAPH_CHECKPOINTS, replace(point, thread=target))
        for write in writes_of(tx, point):
            tx.put(GRAPH_WRITES, replace(write, thread=target))
    for value in tx.select(GRAPH_VALUES, {"thread": source}):
        tx.put(GRAPH_VALUES, replace(value, thread=target))


def graph_checkpoints_of_runs(tx: Tx, runs: Iterable[str]) -> Iterator[GraphCheckpointRow]:
    for run in runs:
        yield from tx.select(GRAPH_CHECKPOINTS, {"run": run})
