"""The transcript of a session: functions that append and read its messages and events.

A model receives the messages. The events list everything that happened, messages included. An event that is not a
message (a client attached, a permission was routed, the window was compacted) is never counted as a message or a turn,
is never sent to a model, and leaves the redo stack as it is.

Functions that end in `_in` run in the caller's transaction. None of them checks that the session is open;
`session.transcript` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from mulligan.session.tables import (
    APPENDED,
    EVENT_KINDS,
    INSERTED,
    RUNS,
    MessageSpan,
    RunRow,
    TranscriptRow,
    Window,
    inherited_from_json,
    normal,
    part,
    session_journal,
    session_of,
    spans_from_text,
    transcript_row,
    window_row,
)
from mulligan.store.blobs import Blobs, Prepared
from mulligan.store.journal import HEADS, RECORDS, Journal, Record, parse_record, records_of
from mulligan.store.protocol import Store, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, timestamp
from mulligan.values.digest import Digest
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import IdSource, SessionId
from mulligan.values.limits import RECORD_INLINE_BYTES

Message = dict[str, Any]
Event = dict[str, Any]

MESSAGE_MAX_BYTES = 64 * 1024 * 1024
_PAGE = 1_000
_END = 2**62


@fast_dataclass(slots=True)
class Archive:
    """The store as sessions see it. Thread-safe, like the store."""

    store: Store
    journal: Journal
    clock: Clock
    ids: IdSource
    blobs: Blobs = field(init=False)

    def __post_init__(self) -> None:
        self.blobs = Blobs(self.store, self.clock)

    def now(self) -> str:
        return timestamp(self.clock)


@fast_dataclass(slots=True, frozen=True)
class PackedMessage:
    """A message that is ready to write: a small one in its record, a large one in a blob that the record names."""

    body: Mapping[str, Any]
    blob: Prepared | None = None

    @property
    def refs(self) -> tuple[Digest, ...]:
        return () if self.blob is None else (self.blob.digest,)


# Writing.


def check_message(message: object) -> Message:
    """A copy of a message in canonical JSON values. Only its role is checked: a text that is not empty.

    Raises `invalid_params`.
    """
    if not isinstance(message, Mapping):
        raise fault("invalid_params", "A message must be an object with a role.", field="message")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise fault("invalid_params", "A message needs a role, such as 'user'.", field="role")
    found: Message = decode(encode(dict(message)))
    return found


def pack_message(archive: Archive, message: object, *, id: str | None = None) -> PackedMessage:
    """Check a message and pack it, outside any transaction. `id`: its id in the transcript it was imported from."""
    known = {} if id is None else {"id": id}
    checked = check_message(message)
    data = encode(checked)
    if len(data) > MESSAGE_MAX_BYTES:
        raise fault("invalid_params", f"A message may have at most {MESSAGE_MAX_BYTES} bytes.", field="message")
    if len(data) <= RECORD_INLINE_BYTES:
        return PackedMessage({**known, "message": checked})
    prepared = archive.blobs.prepare(data)
    return PackedMessage({**known, "role": checked["role"], "blob": prepared.digest, "size": len(data)}, prepared)


def append_message_in(
    tx: Tx, archive: Archive, session: SessionId, message: PackedMessage, *, inserted: bool = False
) -> Record:
    """Append a packed message. `inserted`: a later `window.changed` record adds it to the context window.

    Raises `BlobVanishedError` if gc deleted its blob in the meantime.
    """
    if message.blob is not None:
        archive.blobs.put(tx, message.blob)
    kind = INSERTED if inserted else APPENDED
    journal = session_journal(session)
    return archive.journal.append(tx, journal, kind, message.body, at=archive.now(), refs=message.refs)


def append_event_in(
    tx: Tx,
    archive: Archive,
    session: SessionId,
    kind: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    text: str = "",
    visibility: str = "internal",
) -> Record:
    """Append an event that is not a message."""
    body = {"event": event_body(kind, metadata, text=text, visibility=visibility)}
    return archive.journal.append(tx, session_journal(session), "event.appended", body, at=archive.now())


def event_body(
    kind: str, metadata: Mapping[str, Any] | None = None, *, text: str = "", visibility: str = "internal"
) -> dict[str, Any]:
    """The payload of an event. The event's id, time and position are those of its record."""
    if not kind.strip() or kind in ("message", "tool_result"):
        raise fault("invalid_params", f"An event that is not a message cannot have the kind {kind!r}.", field="kind")
    body: dict[str, Any] = {"kind": kind, "visibility": visibility}
    return body | ({"text": text} if text else {}) | ({"metadata": dict(metadata)} if metadata else {})


# The window.


def window_of(tx: Tx, session: SessionId) -> Window:
    """The context window as spans."""
    row, newest = transcript_row(tx, session), window_row(tx, session)
    return normal((*spans_from_text(newest.spans), MessageSpan(session, row.tail, row.messages)))


def window_at(tx: Tx, session: SessionId, seq: int) -> Window:
    """The context window right after a record of the session's journal."""
    then = window_row(tx, session, upto=seq)
    return normal(
        (*spans_from_text(then.spans), MessageSpan(session, then.tail, max(then.tail, number_at(tx, session, seq))))
    )


def length_of(tx: Tx, session: SessionId) -> int:
    """How many messages are in the context window."""
    row = transcript_row(tx, session)
    return row.kept + row.messages - row.tail


def head_of(tx: Tx, session: SessionId) -> int:
    """The number of the newest record of a session's journal."""
    head = tx.get(HEADS, session_journal(session))
    return 0 if head is None else head.seq


def number_at(tx: Tx, session: SessionId, seq: int) -> int:
    """How many messages the journal of a session has up to and including a record."""
    row = transcript_row(tx, session)
    if not row.messages or seq >= row.run_seq:
        return row.run_first + min(row.messages - row.run_first, seq - row.run_seq + 1) if row.messages else 0
    low, high = 0, row.run_first
    while low < high:
        run = run_holding(tx, row, (low + high) // 2)
        following = _run_after(tx, row, run)
        if following.seq <= seq:
            low = following.first
        elif run.seq > seq:
            high = run.first
        else:
            return min(following.first, run.first + seq - run.seq + 1)
    return low


def seq_of(tx: Tx, session: str, number: int) -> int:
    """The record that holds a message."""
    run = run_holding(tx, transcript_row(tx, session), number)
    return run.seq + number - run.first


def run_holding(tx: Tx, row: TranscriptRow, number: int) -> RunRow:
    """The run that a message is in."""
    if number >= row.run_first:
        return RunRow(row.session, row.run_first, row.run_seq, row.run_events, row.run_inserted)
    upto = ("first", 0, number + 1)
    return tx.select(RUNS, {"session": row.session}, between=upto, descending=True, limit=1)[0]


def _run_after(tx: Tx, row: TranscriptRow, run: RunRow) -> RunRow:
    later = tx.select(RUNS, {"session": row.session}, between=("first", run.first + 1, _END), limit=1)
    return later[0] if later else run_holding(tx, row, row.run_first)


# Reading messages.


@fast_dataclass(slots=True, frozen=True)
class Entry:
    """A message and its position: record `seq` of the session that it was written in."""

    session: str
    seq: int
    at: str
    message: Message
    id: str


def entries_in(
    tx: Tx, archive: Archive, session: SessionId, *, start: int = 0, stop: int | None = None
) -> Iterator[Entry]:
    """The messages of the context window, or a part of them, each with its position and as the caller's own copy."""
    return entries_of(tx, archive, part(window_of(tx, session), start, _END if stop is None else stop))


def entries_of(tx: Tx, archive: Archive, window: Window) -> Iterator[Entry]:
    """The messages of any window, in its order."""
    for span in window:
        for record in _records_in(tx, span):
            yield entry_of(tx, archive, record)


def _records_in(tx: Tx, span: MessageSpan) -> Iterator[Record]:
    """The records of a span of messages, read run by run."""
    row, number = transcript_row(tx, span.session), span.start
    while number < span.stop:
        run = run_holding(tx, row, number)
        following = row.messages if run.first == row.run_first else _run_after(tx, row, run).first
        stop = min(span.stop, following, number + _PAGE)
        seq = run.seq + number - run.first
        between = ("seq", seq, seq + stop - number)
        rows = tx.select(RECORDS, {"journal": session_journal(SessionId(span.session))}, between=between)
        yield from map(parse_record, rows)
        number = stop


def entry_of(tx: Tx, archive: Archive, record: Record) -> Entry:
    return Entry(session_of(record.journal), record.seq, record.at, message_in(tx, archive, record), id_of(record))


def message_in(tx: Tx, archive: Archive, record: Record) -> Message:
    """The message a record holds or names."""
    body = record.payload
    found: Message = body["message"] if "message" in body else decode(archive.blobs.read_in(tx, body["blob"]))
    return found


def id_of(record: Record) -> str:
    """The id of a message or event: its imported id, or else its session and record number."""
    known = record.payload.get("id")
    return known if isinstance(known, str) else f"{session_of(record.journal)}#{record.seq}"


# Reading events.


def count_events(tx: Tx, session: SessionId) -> int:
    row = transcript_row(tx, session)
    return row.log_base + row.events - row.log_from


def events_in(tx: Tx, archive: Archive, session: SessionId, *, after: int = 0) -> Iterator[Event]:
    """Events of the session, oldest first; inherited ones come before its own.

    `after`: only its own events after that record, for a reader that continues. A reset in between leaves no gap.
    """
    newest = window_row(tx, session)
    if not after:
        for one in inherited_from_json(decode(newest.log)):
            yield from _events_between(tx, archive, one.session, after=one.after, upto=one.upto)
    yield from _events_between(tx, archive, session, after=after or newest.log_after)


def _events_between(tx: Tx, archive: Archive, session: str, *, after: int, upto: int = _END) -> Iterator[Event]:
    for record in records_of(tx, session_journal(SessionId(session)), after=after):
        if record.seq > upto:
            return
        event = event_in(tx, archive, record)
        if event is not None:
            yield event


def event_in(tx: Tx, archive: Archive, record: Record) -> Event | None:
    """The event that a record is or carries; None if it has none."""
    if record.kind not in EVENT_KINDS:
        return None
    if record.kind == APPENDED:
        return _message_event(record, message_in(tx, archive, record))
    body = record.payload.get("event")
    return None if body is None else event_of(record, body)


def _message_event(record: Record, message: Message) -> Event:
    role = message["role"]
    event = {
        "id": id_of(record),
        "kind": "tool_result" if role == "tool_result" else "message",
        "role": role,
        "visibility": message.get("visibility", "public"),
        "text": text_of(message),
        "blocks": _blocks(message),
        "seq": record.seq,
        "at": record.at,
    }
    return event | ({"metadata": message["metadata"]} if "metadata" in message else {})


def event_of(record: Record, body: Mapping[str, Any]) -> Event:
    """An event with the id, time and position of its record."""
    text = body.get("text", "")
    event = {
        "id": id_of(record),
        "kind": body["kind"],
        "role": "system",
        "visibility": body["visibility"],
        "text": text,
        "blocks": [{"type": "text", "text": text, "visibility": body["visibility"]}] if text else [],
        "seq": record.seq,
        "at": record.at,
    }
    return event | ({"metadata": body["metadata"]} if "metadata" in body else {})


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, or the texts of its blocks, one per line."""
    return _text(message.get("content"))


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return _text(content.get("text") or content.get("content"))
    if isinstance(content, Iterable):
        return "\n".join(text for one in content if (text := _text(one)))
    return ""


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content, visibility = message.get("content"), message.get("visibility", "public")
    if isinstance(content, str):
        return [{"type": "text", "text": content, "visibility": visibility}] if content else []
    if not isinstance(content, list):
        return []
    return [{"visibility": visibility, **block} for block in content if isinstance(block, dict)]
