"""Which turn a rollback is about: the last completed one.

That a turn failed, was cancelled, or only looked makes it no less a turn: there is then nothing of it to take back, and
the turn before it stays. A call outside any turn is one only if it did something.
"""

from __future__ import annotations

from collections.abc import Set

from mulligan.history.desk import Desk
from mulligan.history.families import newest_with_children, span_of, work_of_children
from mulligan.history.log import calls_of, can_be_undone, is_open_turn, is_reachable, newest_standing, open_calls_of
from mulligan.history.plans import OnConflict
from mulligan.history.points import last_turn_beside_calls
from mulligan.history.tables import CALLS, TURNS, CallRow, TurnRow
from mulligan.session.positions import turn_began
from mulligan.session.tables import session_journal
from mulligan.store.journal import RECORDS, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.faults import fault
from mulligan.values.ids import OwnerId, SessionId
from mulligan.values.plain import plain

Named = tuple[SessionId, str]
"""A turn: whose, and its id."""

_OVER_TURNS = frozenset({"rollback", "rewind"})
_LAST_ID = "\U0010ffff"


@plain(slots=True, frozen=True)
class Sought:
    """In which session, and how: None looks at the whole workspace. `cancelled` are turns that do not count."""

    scope: SessionId | None
    session: SessionId | None
    on_conflict: OnConflict
    cancelled: Set[str] = frozenset()


def last_turn(tx: Tx, desk: Desk, sought: Sought) -> Named:
    """The newest completed turn that was not rolled back. Raises `nothing_to_undo`."""
    own = _newest_with_something(tx, desk, sought)
    found = _or_of_children(tx, desk, own, sought)
    idle = None if sought.session is None else _idle_since(tx, desk, sought.session, after=found, but=sought.cancelled)
    if idle is not None:
        return idle
    if found is None:
        raise fault("nothing_to_undo", "There is no completed turn to roll back.")
    return found


def work_of(tx: Tx, desk: Desk, session: SessionId, turn: str) -> list[CallRow]:
    """What stands of a turn, and what the session's children did in it."""
    span = span_of(tx, session, turn)
    children = [] if span is None else work_of_children(tx, desk, session, span)
    rows = [*tx.select(CALLS, {"session": session, "turn": turn}), *children]
    return [row for row in rows if can_be_undone(row) and is_reachable(tx, desk, row)]


def _newest_with_something(tx: Tx, desk: Desk, sought: Sought) -> Named | None:
    """Of which something stands: work of its calls, messages in force, or changes of slices outside calls."""
    session = sought.session
    last = newest_standing(tx, desk, sought.scope, on_conflict=sought.on_conflict)
    if session is not None:
        beside = last_turn_beside_calls(tx, session, last, cancelled=sought.cancelled)
        if beside is not None:
            return session, beside
    return (SessionId(last.session), last.turn) if last is not None and last.session is not None else None


def _or_of_children(tx: Tx, desk: Desk, own: Named | None, sought: Sought) -> Named | None:
    """The turn with work of the session's own, or a later one in which only its children did something."""
    session = sought.session
    delegated = None if session is None else newest_with_children(tx, desk, session, on_conflict=sought.on_conflict)
    if session is None or delegated is None:
        return own
    span = None if own is None else span_of(tx, *own)
    is_newer = own is not None and (span is None or span.started_at >= delegated.started_at)
    return own if is_newer else (session, delegated.turn)


def _idle_since(tx: Tx, desk: Desk, session: SessionId, *, after: Named | None, but: Set[str]) -> Named | None:
    """The newest turn after one, of which nothing stands although nobody has rolled it back."""
    span = None if after is None else span_of(tx, *after)
    if after is not None and span is None:
        return None  # it is running, and about to be cancelled
    gone, reach = set(but), _LAST_ID
    for row in calls_of(tx, desk, session):
        if (session, row.turn) == after or (span is not None and row.started_at < span.started_at):
            return None
        cause = row.why
        if cause.get("verb") in _OVER_TURNS and row.status == "committed" and row.undone_by is None:
            gone.add(cause.get("turn", ""))
            reach = min(reach, *cause.get("of", ()), *cause.get("part", ()), _LAST_ID)
        is_work = row.turn != row.id and row.way_back is None
        if is_work and row.turn not in gone and row.id < reach:
            return session, row.turn
    return None


def close_open_turns(desk: Desk, session: SessionId, *, cancel: bool, dry_run: bool = False) -> set[str]:
    """A turn that is still running is cancelled first, or nothing is rolled back. Which turns these are."""
    _end_dead(desk, session)
    with desk.ledger.store.read() as tx:
        running = open_calls_of(tx, session)
        turns = {row.id for row in tx.select(TURNS, {"session": session}) if row.is_open}
        turns |= {row.turn for row in running}
    if not turns:
        return turns
    if not cancel or not all(desk.can_cancel(row.id) for row in running):
        words = f"A turn of session {session} is still running; stop it first, or cancel it with --cancel-open"
        raise fault("turn_open", f"{words} (cancel_open=True).")
    if not dry_run:
        for row in running:
            desk.cancel(row.id)
        _end(desk, session, turns, "cancelled")
    return turns


def _end_dead(desk: Desk, session: SessionId) -> None:
    """A turn is over with the process that it ran in, and so are its calls."""
    with desk.ledger.store.read() as tx:
        rows = [row for row in tx.select(TURNS, {"session": session, "ended_at": None}) if row.is_open]
        dead = {row.id for row in rows if _is_dead(tx, desk, session, row)}
        is_working = bool(open_calls_of(tx, session))
    if is_working:
        # Loaded here, as below: hardly anybody goes back while somebody is at work.
        from mulligan.history.recovery import recover

        recover(desk)
    if dead:
        _end(desk, session, dead, "process_died")


def _is_dead(tx: Tx, desk: Desk, session: SessionId, row: TurnRow) -> bool:
    seq = turn_began(tx, session, row.id, row.started_at)
    record = None if seq is None else tx.get(RECORDS, session_journal(session), seq)
    opener = {} if record is None else parse_record(record).payload
    if "owner" in opener:
        return desk.ledger.store.is_alive(OwnerId(opener["owner"])) is False
    from mulligan.history.observing import is_running

    return not is_running(opener)


def _end(desk: Desk, session: SessionId, turns: Set[str], reason: str) -> None:
    ledger = desk.ledger
    with ledger.store.write() as tx:
        for turn in sorted(turns):
            if is_open_turn(tx, session, turn):
                body = {"session": session, "turn": turn, "reason": reason}
                ledger.journal.append(tx, session_journal(session), "turn.ended", body, at=ledger.now())
