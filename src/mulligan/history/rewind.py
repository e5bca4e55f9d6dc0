"""Finds the calls, points, turns and messages for rewind, rollback and redo.

A point is a call or a message. It divides the calls and the messages of its session (`find_point`). A `TranscriptMove`
changes the context window.

Rollback undoes the last completed turn (`last_turn`). A turn that failed, was cancelled or only read is still a turn:
the rollback then finds nothing to undo, and leaves the turn before it. A call outside any turn counts as a turn only if
it changed something. What the children of a session do while a turn of it runs is part of that turn. A child is a
session that was forked or opened from another one; its own children count too. Only work on the same files counts: a
child with a copy of the files works on its own, until a user merges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import islice
from typing import Any

from mulligan.history.ledger import Ledger
from mulligan.history.log import (
    calls_of,
    can_be_undone,
    find_call,
    is_open_turn,
    is_reachable,
    newest_to_undo,
    open_calls_of,
    workspace_of,
)
from mulligan.history.open_root import OpenRoot
from mulligan.history.partial_undo import left_by_conflicts
from mulligan.history.plan import OnConflict
from mulligan.history.processes import is_agent_running
from mulligan.history.tables import CALLS, REDO, TURNS, CallRow, TurnRow
from mulligan.session.lifecycle import (
    call_begin_seq,
    call_end_seq,
    check_continuable,
    find_message,
    has_turn_messages,
    turn_begin_seq,
    turn_bounds,
    without_turn,
)
from mulligan.session.state.slice_rows import JournalRange, has_changes_outside_calls, has_state
from mulligan.session.tables import (
    SESSIONS,
    WINDOWS,
    Window,
    WindowRow,
    at_place,
    length,
    part,
    session_journal,
    spans_to_json,
)
from mulligan.session.transcript_log import Archive, head_of, seq_of, window_at, window_of
from mulligan.store.journal import RECORDS, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import OwnerId, SessionId

_END = 2**62
_LAST_ID = "\U0010ffff"
_CALLS_SEARCHED = 50
_TURN_VERBS = frozenset({"rollback", "rewind"})

TurnKey = tuple[SessionId, str]
"""A turn: its session, and its id."""


def archive_of(ledger: Ledger) -> Archive:
    return Archive(ledger.store, ledger.journal, ledger.clock, ledger.ids)


@fast_dataclass(slots=True, frozen=True)
class Point:
    """A point of a session. `kept`: the context window there. `rest`: the messages that follow it now.

    `later`: the calls after it, newest first. `since`: the part of the session's journal after it.
    """

    session: SessionId | None
    call: CallRow | None
    kept: Window
    rest: Window
    later: tuple[CallRow, ...]
    since: JournalRange | None = None


def find_point(open_root: OpenRoot, name: str | int, session: SessionId | None, *, side: str) -> Point:
    """Find a call by name, or a message of the context window by id or by the number of messages before it.

    Raises `unknown_point`.
    """
    if side not in ("before", "after"):
        raise fault("invalid_params", "side is 'before' or 'after'.", field="side")
    if not isinstance(name, int | str):
        raise fault("invalid_params", "A point is a call, a message, or how many messages come before it.", field="at")
    # The ids of messages have a "#"; any other name may be the id of a call or of a message.
    if isinstance(name, int) or "#" in name:
        return _message_point(open_root, name, session, side=side) or _call_point(open_root, name, session, side=side)
    try:
        return _call_point(open_root, name, session, side=side)
    except MulliganError as error:
        found = _message_point(open_root, name, session, side=side) if error.code == "unknown_call" else None
        if found is None:
            raise
        return found


def _message_point(open_root: OpenRoot, name: str | int, session: SessionId | None, *, side: str) -> Point | None:
    if session is None:
        return None
    with open_root.ledger.store.read() as tx:
        window = window_of(tx, session)
        if isinstance(name, int):
            if not 0 <= name <= length(window):
                return None
            previous = at_place(window, name - 1) if name else ("", 0)
            seq = seq_of(tx, session, previous[1]) if previous[0] == session else 0
            # A number counts messages of the context window, whichever session they came from.
            place, source = name, session
        else:
            found = find_message(tx, archive_of(open_root.ledger), session, name)
            if found is None:
                return None
            source, seq, place = SessionId(found[0]), found[1], found[2] + (side == "after")
        # A message that came from a parent is older than every record of this session.
        after = seq if source == session else 0
        later, since = _calls_after(tx, open_root, session, after), JournalRange(session, after, _END)
        return Point(session, None, part(window, 0, place), part(window, place, _END), later, since)


def _calls_after(tx: Tx, open_root: OpenRoot, session: SessionId, seq: int) -> tuple[CallRow, ...]:
    # Only a session's own calls: a rewind does not undo the work of others in the same root.
    rows = (row for row in calls_of(tx, open_root, session) if _is_work(tx, open_root, row))
    return tuple(row for row in rows if (call_begin_seq(tx, session, row.id, row.started_at) or _END) > seq)


def _is_work(tx: Tx, open_root: OpenRoot, row: CallRow) -> bool:
    """Whether a rewind to before the call has something to undo."""
    return row.wseq is not None and not row.external and is_reachable(tx, open_root, row)


def _call_point(open_root: OpenRoot, name: str | int, session: SessionId | None, *, side: str) -> Point:
    if isinstance(name, int):
        raise fault("unknown_point", f"There is no message {name} here.", point=name)
    row = find_call(open_root, name, session)
    if session is not None and row.session != session:
        raise fault("unknown_call", f"{name!r} is not a call of session {session!r}; name one of its own.", call=name)
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    session = SessionId(row.session) if row.session is not None else None
    with open_root.ledger.store.read() as tx:
        later = [one for one in calls_of(tx, open_root, session, after=row.id) if _is_work(tx, open_root, one)]
        # A call that changed nothing has no place in the workspace.
        own = [row] if side == "before" and row.wseq is not None else []
        if session is None:
            return Point(None, row, (), (), (*later, *own))
        now = window_of(tx, session)
        began = call_begin_seq(tx, session, row.id, row.started_at)
        ended = call_end_seq(tx, session, row.id, row.ended_at or row.started_at)
        seq = (began - 1 if began else 0) if side == "before" else (ended or _END)
        kept = window_at(tx, session, seq)
        # After a compaction or a rewind, the context window at the point is no beginning of the present one.
        same = part(now, 0, length(kept)) == kept
        rest, since = part(now, length(kept), _END) if same else (), JournalRange(session, seq, _END)
        return Point(session, row, kept, rest, (*later, *own), since)


# Messages.


@fast_dataclass(slots=True, frozen=True)
class TranscriptMove:
    """Changes the context window of a session. `target` computes the new one in the transaction that sets it."""

    session: SessionId
    target: Callable[[Tx], Window]

    def shown(self, open_root: OpenRoot) -> dict[str, int] | None:
        """The number of messages in the context window after and before; None if nothing changes."""
        with open_root.ledger.store.read() as tx:
            now, then = window_of(tx, self.session), self.target(tx)
        return None if now == then else {"messages": length(then), "messages_before": length(now)}

    def apply_in(self, tx: Tx, ledger: Ledger, verb: str, call: str) -> None:
        window = self.target(tx)
        if window == window_of(tx, self.session):
            return
        # Redo reads the earlier context window from this row.
        was = head_of(tx, self.session)
        body: dict[str, Any] = {"verb": verb, "spans": spans_to_json(window), "was": was, "call": call}
        ledger.journal.append(tx, session_journal(self.session), "window.changed", body, at=ledger.now())


def move_to(open_root: OpenRoot, point: Point) -> TranscriptMove | None:
    """Restore the context window of a point. Raises `not_continuable`."""
    if point.session is None:
        return None
    with open_root.ledger.store.read() as tx:
        check_continuable(tx, archive_of(open_root.ledger), point.kept, point.rest)
    return TranscriptMove(point.session, lambda _: point.kept)


def move_of_turn(open_root: OpenRoot, session: SessionId, turn: str) -> TranscriptMove | None:
    """Remove the messages of a turn from the context window.

    None if no caller opened the turn, or it has no messages there.
    """
    with open_root.ledger.store.read() as tx:
        bounds = _bounds_of(tx, session, turn)
        if bounds is None or not has_turn_messages(tx, session, *bounds):
            return None
    begin, end = bounds
    return TranscriptMove(session, lambda tx: without_turn(tx, session, begin, end))


def _bounds_of(tx: Tx, session: SessionId, turn: str) -> tuple[int, int] | None:
    """The records of a turn that a caller opened, first and last; of a running turn, up to now."""
    row = tx.get(TURNS, session, turn)
    if row is None or not row.opened:
        return None
    if row.ended_at is None:
        began = turn_begin_seq(tx, session, turn, row.started_at)
        return None if began is None else (began, head_of(tx, session))
    return turn_bounds(tx, session, turn, started_at=row.started_at, ended_at=row.ended_at)


def stretch_of_turn(tx: Tx, session: SessionId, turn: str, calls: Sequence[CallRow]) -> JournalRange | None:
    """The part of the journal that holds a turn. A turn that no caller opened consists of its calls."""
    if not has_state(tx, session):
        return None
    bounds = _bounds_of(tx, session, turn)
    if bounds is not None:
        return JournalRange(session, *bounds)
    places = [call_begin_seq(tx, session, row.id, row.started_at) for row in calls if row.session == session]
    began = [place for place in places if place is not None]
    return JournalRange(session, min(began), min(began)) if began and len(began) == len(places) else None


def newest_turn_with_messages(
    tx: Tx, session: SessionId, last: CallRow | None, *, cancelled: Set[str] = frozenset()
) -> str | None:
    """The newest completed turn with messages in the context window, or with changes of slices outside of calls.

    It is not older than the turn of the call `last`. `cancelled`: turns that count as completed.
    """
    if not (window_of(tx, session) or has_state(tx, session)):
        return None
    since = 0 if last is None or last.session != session else _began_at(tx, last)
    opened = [row for row in tx.select(TURNS, {"session": session}) if row.opened]
    rows = [row for row in opened if row.ended_at is not None or row.id in cancelled]
    for row in sorted(rows, key=lambda row: (row.started_at, row.id), reverse=True):
        bounds = _bounds_of(tx, session, row.id)
        # The turn of the last call is at least as new as every turn from here on.
        if bounds is not None and bounds[0] < since:
            break
        if bounds is not None and (
            has_turn_messages(tx, session, *bounds) or has_changes_outside_calls(tx, JournalRange(session, *bounds))
        ):
            return row.id
    return None


def _began_at(tx: Tx, row: CallRow) -> int:
    """Where the turn of a call begins in the journal of its session."""
    session = SessionId(row.session or "")
    bounds = _bounds_of(tx, session, row.turn)
    return bounds[0] if bounds is not None else call_begin_seq(tx, session, row.id, row.started_at) or 0


def move_of_redo(open_root: OpenRoot, row: CallRow) -> TranscriptMove | None:
    """Restore the messages that an undo operation removed from the context window; None if it removed none."""
    session, moved = _move_of_call(open_root, row)
    if moved is None:
        return None

    def target(tx: Tx) -> Window:
        # Inside the transaction, because a message that came in between ends the redo.
        if not tx.has(REDO, session, row.id):
            raise fault(
                "nothing_to_redo", "The transcript has new messages since the undo, so there is nothing to redo here."
            )
        return window_at(tx, session, moved.was)

    return TranscriptMove(session, target)


def move_of_undo(open_root: OpenRoot, row: CallRow) -> TranscriptMove | None:
    """The undo of an undo operation restores the messages that it removed from the context window.

    If the transcript has continued since, the messages stay as they are, and only files return.
    """
    session, moved = _move_of_call(open_root, row)
    if moved is None:
        return None

    def target(tx: Tx) -> Window:
        now = window_of(tx, session)
        return window_at(tx, session, moved.was) if now == window_at(tx, session, moved.seq) else now

    return TranscriptMove(session, target)


def moved_transcript(open_root: OpenRoot, row: CallRow) -> bool:
    """Whether a call is an undo operation that changed the transcript."""
    return row.way_back is not None and _move_of_call(open_root, row)[1] is not None


def _move_of_call(open_root: OpenRoot, row: CallRow) -> tuple[SessionId, WindowRow | None]:
    session = SessionId(row.session or "")
    with open_root.ledger.store.read() as tx:
        moved = [one for one in tx.select(WINDOWS, {"session": session}, descending=True) if one.call == row.id]
    return session, moved[0] if moved else None


# Turns.


@fast_dataclass(slots=True, frozen=True)
class TurnSpan:
    """A completed turn of a session, and when it ran. A call outside any turn is a turn of its own."""

    turn: str
    started_at: str
    ended_at: str

    def holds(self, moment: str) -> bool:
        return self.started_at <= moment <= self.ended_at


def span_of(tx: Tx, session: SessionId, turn: str) -> TurnSpan | None:
    """None for a turn that is still running."""
    row = tx.get(TURNS, session, turn)
    if row is not None and row.opened:
        return None if row.ended_at is None else TurnSpan(turn, row.started_at, row.ended_at)
    calls = tx.select(CALLS, {"session": session, "turn": turn})
    ends = [call.ended_at for call in calls if call.ended_at is not None]
    if not calls or len(ends) < len(calls):
        return None
    return TurnSpan(turn, min(call.started_at for call in calls), max(ends))


def work_of_children(tx: Tx, open_root: OpenRoot, session: SessionId, span: TurnSpan) -> list[CallRow]:
    """The calls of a session's descendants during a turn that are not undone."""
    return [call for call in _work_of_descendants(tx, open_root, session) if span.holds(call.started_at)]


def newest_with_children(
    tx: Tx, open_root: OpenRoot, session: SessionId, *, on_conflict: OnConflict = "merge"
) -> TurnSpan | None:
    """The newest turn of a session during which its descendants made a call that is not undone.

    A call that an earlier undo left in part, because of a conflict, counts only if the caller overwrites.
    """
    work = list(_work_of_descendants(tx, open_root, session))
    tried = left_by_conflicts(tx, work) if on_conflict != "overwrite" else ()
    moments = sorted((call.started_at for call in work if call.id not in tried), reverse=True)
    spans = (span for moment in moments if (span := _span_at(tx, open_root, session, moment)) is not None)
    return next(spans, None)


def _work_of_descendants(tx: Tx, open_root: OpenRoot, session: SessionId) -> Iterator[CallRow]:
    workspace = workspace_of(tx, open_root)
    for child in _descendants(tx, session):
        rows = calls_of(tx, open_root, child, only={"status": "committed", "undone_by": None})
        yield from (row for row in rows if row.workspace == workspace and can_be_undone(row))


def _descendants(tx: Tx, session: SessionId) -> Iterator[SessionId]:
    waiting, seen = [str(session)], {str(session)}
    while waiting:
        for row in tx.select(SESSIONS, {"parent": waiting.pop()}):
            if row.id not in seen:
                seen.add(row.id)
                waiting.append(row.id)
                yield SessionId(row.id)


def _span_at(tx: Tx, open_root: OpenRoot, session: SessionId, moment: str) -> TurnSpan | None:
    """The newest completed turn that was running at a moment."""
    # A call outside any turn has its own id as its turn.
    opened = (row.id for row in tx.select(TURNS, {"session": session}) if row.opened)
    alone = (row.id for row in islice(calls_of(tx, open_root, session), _CALLS_SEARCHED) if row.turn == row.id)
    spans = [span for turn in (*opened, *alone) if (span := span_of(tx, session, turn)) and span.holds(moment)]
    return max(spans, key=lambda span: span.started_at, default=None)


@fast_dataclass(slots=True, frozen=True)
class TurnQuery:
    """Where `last_turn` searches. `scope` None: in the whole workspace. `cancelled`: turns that count as completed."""

    scope: SessionId | None
    session: SessionId | None
    on_conflict: OnConflict
    cancelled: Set[str] = frozenset()


def last_turn(tx: Tx, open_root: OpenRoot, query: TurnQuery) -> TurnKey:
    """The newest completed turn that was not rolled back. Raises `nothing_to_undo`."""
    own = _newest_with_own_work(tx, open_root, query)
    found = _newer_of_children(tx, open_root, own, query)
    if query.session is not None:
        idle = _idle_turn_after(tx, open_root, query.session, after=found, but=query.cancelled)
        if idle is not None:
            return idle
    if found is None:
        raise fault("nothing_to_undo", "There is no completed turn to roll back.")
    return found


def work_of(tx: Tx, open_root: OpenRoot, session: SessionId, turn: str) -> list[CallRow]:
    """The calls of a turn that are not undone, with those of the session's descendants."""
    span = span_of(tx, session, turn)
    children = [] if span is None else work_of_children(tx, open_root, session, span)
    rows = [*tx.select(CALLS, {"session": session, "turn": turn}), *children]
    return [row for row in rows if can_be_undone(row) and is_reachable(tx, open_root, row)]


def _newest_with_own_work(tx: Tx, open_root: OpenRoot, query: TurnQuery) -> TurnKey | None:
    """The newest turn with calls that are not undone, messages in the context window, or changes of slices outside
    calls.
    """
    session = query.session
    last = newest_to_undo(tx, open_root, query.scope, on_conflict=query.on_conflict)
    if session is not None:
        turn = newest_turn_with_messages(tx, session, last, cancelled=query.cancelled)
        if turn is not None:
            return session, turn
    return (SessionId(last.session), last.turn) if last is not None and last.session is not None else None


def _newer_of_children(tx: Tx, open_root: OpenRoot, own: TurnKey | None, query: TurnQuery) -> TurnKey | None:
    """The turn with the session's own work, or a later one in which only its descendants worked."""
    session = query.session
    if session is None:
        return own
    delegated = newest_with_children(tx, open_root, session, on_conflict=query.on_conflict)
    if delegated is None:
        return own
    span = None if own is None else span_of(tx, *own)
    is_newer = own is not None and (span is None or span.started_at >= delegated.started_at)
    return own if is_newer else (session, delegated.turn)


def _idle_turn_after(
    tx: Tx, open_root: OpenRoot, session: SessionId, *, after: TurnKey | None, but: Set[str]
) -> TurnKey | None:
    """The newest later turn that changed nothing and was not rolled back either."""
    span = None if after is None else span_of(tx, *after)
    if after is not None and span is None:
        return None  # The turn `after` is running, and the caller will cancel it.
    # `gone`: turns that were rolled back. A rewind undid every call whose id is not before `reach`.
    gone, reach = set(but), _LAST_ID
    for row in calls_of(tx, open_root, session):
        if (session, row.turn) == after or (span is not None and row.started_at < span.started_at):
            return None
        cause = row.undoes
        if cause.verb in _TURN_VERBS and row.status == "committed" and row.undone_by is None:
            gone.add(cause.turn or "")
            reach = min(reach, *cause.of, *cause.part, _LAST_ID)
        is_work = row.turn != row.id and row.way_back is None
        if is_work and row.turn not in gone and row.id < reach:
            return session, row.turn
    return None


def close_open_turns(open_root: OpenRoot, session: SessionId, *, cancel: bool, dry_run: bool = False) -> set[str]:
    """Cancel the turns that are still running, or raise `turn_open`. Returns them."""
    _end_dead_turns(open_root, session)
    with open_root.ledger.store.read() as tx:
        running = open_calls_of(tx, session)
        turns = {row.id for row in tx.select(TURNS, {"session": session}) if row.is_open}
        turns |= {row.turn for row in running}
    if not turns:
        return turns
    if not cancel or not all(open_root.can_cancel(row.id) for row in running):
        words = f"A turn of session {session} is still running; stop it first, or cancel it with --cancel-open"
        raise fault("turn_open", f"{words} (cancel_open=True).")
    if not dry_run:
        for row in running:
            open_root.cancel(row.id)
        _end_turns(open_root, session, turns, "cancelled")
    return turns


def _end_dead_turns(open_root: OpenRoot, session: SessionId) -> None:
    """A turn ends with the process that it ran in, and so do its calls."""
    with open_root.ledger.store.read() as tx:
        rows = [row for row in tx.select(TURNS, {"session": session, "ended_at": None}) if row.is_open]
        dead = {row.id for row in rows if _is_dead(tx, open_root, session, row)}
        is_working = bool(open_calls_of(tx, session))
    if is_working:
        # Imported here, as below, to keep start-up fast: open calls are rare when a user undoes.
        from mulligan.history.recovery import recover

        recover(open_root)
    if dead:
        _end_turns(open_root, session, dead, "process_died")


def _is_dead(tx: Tx, open_root: OpenRoot, session: SessionId, row: TurnRow) -> bool:
    seq = turn_begin_seq(tx, session, row.id, row.started_at)
    record = None if seq is None else tx.get(RECORDS, session_journal(session), seq)
    opener = {} if record is None else parse_record(record).payload
    if "owner" in opener:
        return open_root.ledger.store.is_alive(OwnerId(opener["owner"])) is False
    pid = opener.get("pid")
    return not is_agent_running(pid if isinstance(pid, int) else None, opener.get("born"))


def _end_turns(open_root: OpenRoot, session: SessionId, turns: Set[str], reason: str) -> None:
    ledger = open_root.ledger
    with ledger.store.write() as tx:
        for turn in sorted(turns):
            if is_open_turn(tx, session, turn):
                body = {"session": session, "turn": turn, "reason": reason}
                ledger.journal.append(tx, session_journal(session), "turn.ended", body, at=ledger.now())
