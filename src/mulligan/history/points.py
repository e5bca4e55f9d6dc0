"""Points of a session that one can go back to or fork from, and what a way back does to the talk.

A point is a call or a message. It divides the calls of its session, and what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from mulligan.history.desk import Desk
from mulligan.history.ledger import Ledger
from mulligan.history.log import calls_of, find_call, is_reachable
from mulligan.history.tables import REDO, TURNS, CallRow
from mulligan.session.positions import (
    call_began,
    call_ended,
    check_continuable,
    has_talk,
    message_named,
    turn_began,
    turn_bounds,
    without_turn,
)
from mulligan.session.projection import WINDOWS, WindowRow
from mulligan.session.slices_back import Stretch, has_standing, has_state
from mulligan.session.tables import session_journal
from mulligan.session.transcript import Archive, head_of, seq_of, window_at, window_of
from mulligan.session.windows import Window, at_place, length, part, to_json
from mulligan.store.protocol import Tx
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.plain import plain

_END = 2**62


def archive_of(ledger: Ledger) -> Archive:
    return Archive(ledger.store, ledger.journal, ledger.clock, ledger.ids)


@plain(slots=True, frozen=True)
class Point:
    """`kept` is what was in force there, `rest` what follows it now; `later`, the calls after it, newest first.

    `since` is all of the session's journal after it.
    """

    session: SessionId | None
    call: CallRow | None
    kept: Window
    rest: Window
    later: tuple[CallRow, ...]
    since: Stretch | None = None


def find_point(desk: Desk, name: str | int, session: SessionId | None, *, side: str) -> Point:
    """A call, or a message in force by its id or by how many there are up to it. Raises `unknown_point`."""
    if side not in ("before", "after"):
        raise fault("invalid_params", "side is 'before' or 'after'.", field="side")
    if not isinstance(name, int | str):
        raise fault("invalid_params", "A point is a call, a message, or how many messages come before it.", field="at")
    if isinstance(name, int) or "#" in name:
        return _message_point(desk, name, session, side=side) or _call_point(desk, name, session, side=side)
    try:
        return _call_point(desk, name, session, side=side)
    except MulliganError as error:
        found = _message_point(desk, name, session, side=side) if error.code == "unknown_call" else None
        if found is None:
            raise
        return found


def _message_point(desk: Desk, name: str | int, session: SessionId | None, *, side: str) -> Point | None:
    if session is None:
        return None
    with desk.ledger.store.read() as tx:
        window = window_of(tx, session)
        if isinstance(name, int):
            if not 0 <= name <= length(window):
                return None
            place, source, seq = name, session, _seq_before(tx, session, window, name)
        else:
            found = message_named(tx, archive_of(desk.ledger), session, name)
            if found is None:
                return None
            source, seq, place = SessionId(found[0]), found[1], found[2] + (side == "after")
        after = seq if source == session else 0
        later, since = _calls_after(tx, desk, session, after), Stretch(session, after, _END)
        return Point(session, None, part(window, 0, place), part(window, place, _END), later, since)


def _seq_before(tx: Tx, session: SessionId, window: Window, place: int) -> int:
    """The record of the message before a place; 0, if that is not a message of this session's own."""
    source, number = at_place(window, place - 1) if place else ("", 0)
    return seq_of(tx, session, number) if source == session else 0


def _calls_after(tx: Tx, desk: Desk, session: SessionId, seq: int) -> tuple[CallRow, ...]:
    rows = (row for row in calls_of(tx, desk, session) if _is_work(tx, desk, row))
    return tuple(row for row in rows if (call_began(tx, session, row.id, row.started_at) or _END) > seq)


def _is_work(tx: Tx, desk: Desk, row: CallRow) -> bool:
    """Whether going back to before it means taking something back."""
    return row.wseq is not None and not row.external and is_reachable(tx, desk, row)


def _call_point(desk: Desk, name: str | int, session: SessionId | None, *, side: str) -> Point:
    if isinstance(name, int):
        raise fault("unknown_point", f"There is no message {name} here.", point=name)
    row = find_call(desk, name, session)
    if session is not None and row.session != session:
        raise fault("unknown_call", f"{name!r} is not a call of session {session!r}; name one of its own.", call=name)
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    session = SessionId(row.session) if row.session is not None else None
    with desk.ledger.store.read() as tx:
        later = [one for one in calls_of(tx, desk, session, after=row.id) if _is_work(tx, desk, one)]
        own = [row] if side == "before" and row.wseq is not None else []
        if session is None:
            return Point(None, row, (), (), (*later, *own))
        now = window_of(tx, session)
        began = call_began(tx, session, row.id, row.started_at)
        ended = call_ended(tx, session, row.id, row.ended_at or row.started_at)
        seq = (began - 1 if began else 0) if side == "before" else (ended or _END)
        kept = window_at(tx, session, seq)
        same = part(now, 0, length(kept)) == kept
        rest, since = part(now, length(kept), _END) if same else (), Stretch(session, seq, _END)
        return Point(session, row, kept, rest, (*later, *own), since)


# What a way back does to the talk.


@plain(slots=True, frozen=True)
class TalkMove:
    """What shall be in force in a session, worked out in the transaction that puts it there."""

    session: SessionId
    target: Callable[[Tx], Window]

    def shown(self, desk: Desk) -> dict[str, int] | None:
        """How many messages would be in force, and how many are; None if nothing changes."""
        with desk.ledger.store.read() as tx:
            now, then = window_of(tx, self.session), self.target(tx)
        return None if now == then else {"messages": length(then), "messages_before": length(now)}

    def apply_in(self, tx: Tx, ledger: Ledger, verb: str, call: str) -> None:
        window = self.target(tx)
        if window == window_of(tx, self.session):
            return
        was = head_of(tx, self.session)
        body: dict[str, Any] = {"verb": verb, "spans": to_json(window), "was": was, "call": call}
        ledger.journal.append(tx, session_journal(self.session), "window.changed", body, at=ledger.now())


def move_to(desk: Desk, point: Point) -> TalkMove | None:
    """Put in force what was at a point. Raises `not_continuable`."""
    if point.session is None:
        return None
    with desk.ledger.store.read() as tx:
        check_continuable(tx, archive_of(desk.ledger), point.kept, point.rest)
    return TalkMove(point.session, lambda _: point.kept)


def move_of_turn(desk: Desk, session: SessionId, turn: str) -> TalkMove | None:
    """Take the messages of a turn out of force; None if it was not opened by hand, or has none there."""
    with desk.ledger.store.read() as tx:
        bounds = _bounds(tx, session, turn)
        if bounds is None or not has_talk(tx, session, *bounds):
            return None
    begin, end = bounds
    return TalkMove(session, lambda tx: without_turn(tx, session, begin, end))


def _bounds(tx: Tx, session: SessionId, turn: str) -> tuple[int, int] | None:
    """Of one that is running: up to now."""
    row = tx.get(TURNS, session, turn)
    if row is None or not row.opened:
        return None
    if row.ended_at is None:
        began = turn_began(tx, session, turn, row.started_at)
        return None if began is None else (began, head_of(tx, session))
    return turn_bounds(tx, session, turn, started_at=row.started_at, ended_at=row.ended_at)


def stretch_of_turn(tx: Tx, session: SessionId, turn: str, calls: Sequence[CallRow]) -> Stretch | None:
    """Where a turn and what came after it is on record. One that was not opened by hand is nothing but its calls."""
    if not has_state(tx, session):
        return None
    bounds = _bounds(tx, session, turn)
    if bounds is not None:
        return Stretch(session, *bounds)
    places = [call_began(tx, session, row.id, row.started_at) for row in calls if row.session == session]
    began = [place for place in places if place is not None]
    return Stretch(session, min(began), min(began)) if began and len(began) == len(places) else None


def last_turn_beside_calls(
    tx: Tx, session: SessionId, last: CallRow | None, *, cancelled: Set[str] = frozenset()
) -> str | None:
    """The newest completed turn, not before that of the call, with messages or changes of slices beside its calls.

    `cancelled`: turns that are completed, or will be by then.
    """
    if not (window_of(tx, session) or has_state(tx, session)):
        return None
    since = 0 if last is None or last.session != session else _began_at(tx, last)
    opened = [row for row in tx.select(TURNS, {"session": session}) if row.opened]
    rows = [row for row in opened if row.ended_at is not None or row.id in cancelled]
    for row in sorted(rows, key=lambda row: (row.started_at, row.id), reverse=True):
        bounds = _bounds(tx, session, row.id)
        if bounds is not None and bounds[0] < since:
            break
        if bounds is not None and (has_talk(tx, session, *bounds) or has_standing(tx, Stretch(session, *bounds))):
            return row.id
    return None


def _began_at(tx: Tx, row: CallRow) -> int:
    """Where the turn of a call begins in the journal of its session."""
    session = SessionId(row.session or "")
    bounds = _bounds(tx, session, row.turn)
    return bounds[0] if bounds is not None else call_began(tx, session, row.id, row.started_at) or 0


def move_of_redo(desk: Desk, row: CallRow) -> TalkMove | None:
    """Put in force again what a way back took out; None if it did not touch the talk."""
    session, moved = _talk_moved_by(desk, row)
    if moved is None:
        return None

    def target(tx: Tx) -> Window:
        if not tx.has(REDO, session, row.id):
            raise fault("nothing_to_redo", "The talk has gone on meanwhile, so there is nothing to redo here.")
        return window_at(tx, session, moved.was)

    return TalkMove(session, target)


def move_of_undo(desk: Desk, row: CallRow) -> TalkMove | None:
    """Undoing a way back puts in force what it took out, unless the talk has gone on since: then only files return."""
    session, moved = _talk_moved_by(desk, row)
    if moved is None:
        return None

    def target(tx: Tx) -> Window:
        now = window_of(tx, session)
        return window_at(tx, session, moved.was) if now == window_at(tx, session, moved.seq) else now

    return TalkMove(session, target)


def moved_talk(desk: Desk, row: CallRow) -> bool:
    """Whether it is a way back that put another talk in force."""
    return row.way_back is not None and _talk_moved_by(desk, row)[1] is not None


def _talk_moved_by(desk: Desk, row: CallRow) -> tuple[SessionId, WindowRow | None]:
    session = SessionId(row.session or "")
    with desk.ledger.store.read() as tx:
        moved = [one for one in tx.select(WINDOWS, {"session": session}, descending=True) if one.call == row.id]
    return session, moved[0] if moved else None
