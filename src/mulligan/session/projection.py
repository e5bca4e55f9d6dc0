"""How the records of a session's talk fold into tables. Pure rules: the same records always give the same rows.

`message.appended`  one more message, in force from now on; also an event
`message.inserted`  a message that only a `window.changed` after it puts in force: a summary, or a shortened one
`event.appended`    an event that is no message: it is never counted as one and never sent to a model
`facts.set`         small values of the session by name; null takes one away; may carry an event
`window.changed`    another list of spans is in force from here; may carry facts and an event
`session.closed`, `session.reopened`

A message body is in its record and nowhere else. Where message number n is, RUNS says: messages whose records follow
each other are one run, and the run that still grows is in the session's own row, so that an append writes one row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mulligan.session.tables import SESSIONS
from mulligan.session.windows import from_json, length, to_text
from mulligan.store.journal import Record
from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.canonical import encode
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class TalkRow:
    """Where a session's talk stands.

    `messages` and `events` count what is in its own journal. In force are `kept` messages of the newest window row and
    its own ones from `tail` on. The `run_` columns are the run that still grows. `log_base` counts inherited events,
    `log_from` its own ones that a reset has put behind it.
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


@plain(slots=True, frozen=True)
class RunRow:
    """Messages from number `first` on, up to the next run, are in the records from `seq` on, one each.

    `events`: how many events the journal has before them. `inserted`: they are no events themselves.
    """

    session: str
    first: int
    seq: int
    events: int
    inserted: int


@plain(slots=True, frozen=True)
class WindowRow:
    """What is in force since record `seq`, besides the session's own messages from `tail` on.

    `log` lists the events this session inherited (see `lineage.LogEntry`); its own begin after `log_after`.
    `was` is the place in the journal whose window this one replaced; `call`, the way back it belongs to.
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


@plain(slots=True, frozen=True)
class FactRow:
    session: str
    name: str
    value: str


TALKS: Table[TalkRow] = Table("talks", TalkRow, key=("session",), projected=True)
RUNS: Table[RunRow] = Table("message_runs", RunRow, key=("session", "first"), projected=True)
WINDOWS: Table[WindowRow] = Table("talk_windows", WindowRow, key=("session", "seq"), projected=True)
FACTS: Table[FactRow] = Table("facts", FactRow, key=("session", "name"), projected=True)

APPENDED, INSERTED = "message.appended", "message.inserted"
EVENT_KINDS = frozenset({APPENDED, "event.appended", "facts.set", "window.changed", "session.closed"})
"""Records that are, or may carry, an event."""


def session_of(journal: str) -> str:
    """The session whose journal that is."""
    return journal[2:]


def talk_row(tx: Tx, session: str) -> TalkRow:
    return tx.get(TALKS, session) or TalkRow(session)


def window_row(tx: Tx, session: str, *, upto: int = 2**62) -> WindowRow:
    """The newest window set at or before a place of the journal."""
    found = tx.select(WINDOWS, {"session": session}, between=("seq", 0, upto + 1), descending=True, limit=1)
    return found[0] if found else WindowRow(session, 0, 0, "[]", "[]", 0, "open", 0, None)


def project_message(tx: Tx, record: Record) -> None:
    session, inserted = session_of(record.journal), int(record.kind == INSERTED)
    row = talk_row(tx, session)
    follows = row.messages and row.run_seq + row.messages - row.run_first == record.seq
    if not follows or row.run_inserted != inserted:
        if row.messages:
            tx.put(RUNS, RunRow(session, row.run_first, row.run_seq, row.run_events, row.run_inserted))
        row = replace(row, run_first=row.messages, run_seq=record.seq, run_events=row.events, run_inserted=inserted)
    tx.put(TALKS, replace(row, messages=row.messages + 1, events=row.events + 1 - inserted))


def project_event(tx: Tx, record: Record) -> None:
    row = talk_row(tx, session_of(record.journal))
    tx.put(TALKS, _with_event(row, record))


def _with_event(row: TalkRow, record: Record) -> TalkRow:
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
    row, before = talk_row(tx, session), window_row(tx, session)
    spans = from_json(body["spans"])
    if "log" in body:
        row = replace(row, log_base=sum(one[3] for one in body["log"]), log_from=row.events)
    tx.put(
        WINDOWS,
        WindowRow(
            session=session,
            seq=record.seq,
            tail=row.messages,
            spans=to_text(spans),
            log=_text(body["log"]) if "log" in body else before.log,
            log_after=body["log_after"] if "log" in body else before.log_after,
            verb=body["verb"],
            was=body["was"],
            call=body.get("call"),
        ),
    )
    tx.put(TALKS, _with_event(replace(row, kept=length(spans), tail=row.messages), record))
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


TALK_TABLES: tuple[Table[Any], ...] = (TALKS, RUNS, WINDOWS, FACTS)
