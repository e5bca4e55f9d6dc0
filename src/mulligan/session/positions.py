"""Places in a session's journal, and the talk that was in force there.

Calls, turns and messages of a session are records of one journal, so any of them is a place in its talk. Nothing extra
is kept for that: times never run backwards in a journal, so the record that a time belongs to is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from mulligan.session.messages import is_continuable
from mulligan.session.projection import APPENDED, INSERTED, window_row
from mulligan.session.tables import session_journal
from mulligan.session.transcript import (
    Archive,
    Message,
    entries_of,
    head_of,
    id_of,
    number_at,
    seq_of,
    window_at,
    window_of,
)
from mulligan.session.windows import Span, Window, length, normal, part, place_of, without
from mulligan.store.journal import RECORDS, Record, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId

_NEAR = 32


def record_at(tx: Tx, session: SessionId, at: str, matches: Callable[[Record], bool]) -> int | None:
    """The record of that time that matches; None if the journal has none."""
    for seq in count(_first_at(tx, session, at)):
        row = tx.get(RECORDS, session_journal(session), seq)
        record = None if row is None else parse_record(row)
        if record is None or record.at != at:
            break
        if matches(record):
            return seq
    return None


def _first_at(tx: Tx, session: SessionId, at: str) -> int:
    """The first record that is not earlier."""
    low, high = 1, head_of(tx, session) + 1
    while low < high:
        middle = (low + high) // 2
        row = tx.get(RECORDS, session_journal(session), middle)
        if row is None or parse_record(row).at >= at:
            high = middle
        else:
            low = middle + 1
    return low


def call_began(tx: Tx, session: SessionId, call: str, at: str) -> int | None:
    return record_at(tx, session, at, lambda one: one.kind == "call.begun" and one.payload["call"] == call)


def call_ended(tx: Tx, session: SessionId, call: str, at: str) -> int | None:
    return record_at(tx, session, at, lambda one: one.kind == "call.ended" and one.payload["call"] == call)


def turn_began(tx: Tx, session: SessionId, turn: str, at: str) -> int | None:
    return record_at(tx, session, at, lambda one: one.kind == "turn.opened" and one.payload["turn"] == turn)


def turn_bounds(tx: Tx, session: SessionId, turn: str, *, started_at: str, ended_at: str) -> tuple[int, int] | None:
    """Where a turn that was opened by hand begins and ends."""
    begin = turn_began(tx, session, turn, started_at)
    end = record_at(tx, session, ended_at, lambda one: one.kind == "turn.ended" and one.payload["turn"] == turn)
    return None if begin is None or end is None else (begin, end)


def message_named(tx: Tx, archive: Archive, session: SessionId, name: str) -> tuple[str, int, int] | None:
    """The message with that id, if it is in force: the session it was written in, its record and its place."""
    window = window_of(tx, session)
    source, mark, digits = name.rpartition("#")
    if mark and digits.isdecimal():
        row = tx.get(RECORDS, session_journal(SessionId(source)), int(digits))
        record = None if row is None else parse_record(row)
        if record is not None and record.kind in (APPENDED, INSERTED) and id_of(record) == name:
            place = place_of(window, source, number_at(tx, SessionId(source), record.seq) - 1)
            return None if place is None else (source, record.seq, place)
    for place, entry in enumerate(entries_of(tx, archive, window)):
        if entry.id == name:
            return entry.session, entry.seq, place
    return None


def check_continuable(tx: Tx, archive: Archive, before: Window, after: Window = ()) -> None:
    """Raise `not_continuable` if a cut between two windows is inside a tool exchange. Only what is near it is read."""
    last: list[Message] = []
    for message in _backwards(tx, archive, before):
        last.insert(0, message)
        if message.get("role") == "assistant":
            break
    if is_continuable(last, _upto_assistant(tx, archive, after)):
        return
    words = "A model could not go on from inside a tool exchange. Choose a message before or after it"
    raise fault("not_continuable", f"{words}, or leave the talk as it is.", messages=length(before))


def _backwards(tx: Tx, archive: Archive, window: Window) -> Iterator[Message]:
    place = length(window)
    while place > 0:
        start = max(0, place - _NEAR)
        yield from reversed([entry.message for entry in entries_of(tx, archive, part(window, start, place))])
        place = start


def _upto_assistant(tx: Tx, archive: Archive, window: Window) -> Sequence[Message]:
    found: list[Message] = []
    for entry in entries_of(tx, archive, window):
        if entry.message.get("role") == "assistant":
            break
        found.append(entry.message)
    return found


def without_turn(tx: Tx, session: SessionId, begin: int, end: int) -> Window:
    """What is in force without the messages of a turn.

    If the window was changed otherwise since the turn began, it is the window of that time, and what was said after
    the turn.
    """
    now, first, last = window_of(tx, session), number_at(tx, session, begin), number_at(tx, session, end)
    taken = without(now, Span(session, first, last))
    if window_row(tx, session).seq == window_row(tx, session, upto=begin).seq:
        return taken
    then = window_at(tx, session, begin)
    later = [span for span in taken if span.session == session and span.stop > last]
    said = [Span(session, max(span.start, last), span.stop) for span in later]
    return normal((*then, *_appended(tx, session, said)))


def _appended(tx: Tx, session: SessionId, spans: Sequence[Span]) -> Iterator[Span]:
    """Without the messages that only a change of the window put there, such as summaries of what is back in force."""
    for span in spans:
        for number in range(span.start, span.stop):
            row = tx.get(RECORDS, session_journal(session), seq_of(tx, session, number))
            if row is not None and parse_record(row).kind == APPENDED:
                yield Span(session, number, number + 1)


def has_talk(tx: Tx, session: SessionId, begin: int, end: int) -> bool:
    """Whether messages of a turn are in force."""
    window = window_of(tx, session)
    own = Span(session, number_at(tx, session, begin), number_at(tx, session, end))
    return len(own) > 0 and length(without(window, own)) < length(window)
