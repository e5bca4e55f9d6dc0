"""Sub-agents: what the children of a session do while a turn of it runs is part of that turn.

A child is a session that was forked or opened from another one; its own children count too. Only work on the same files
counts: a child with a copy of them has those for itself, until it is merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from mulligan.history.desk import Desk
from mulligan.history.leftovers import left_of
from mulligan.history.log import calls_of, can_be_undone, workspace_of
from mulligan.history.plans import OnConflict
from mulligan.history.tables import CALLS, TURNS, CallRow
from mulligan.session.tables import SESSIONS
from mulligan.store.protocol import Tx
from mulligan.values.ids import SessionId
from mulligan.values.plain import plain

_CALLS_LOOKED_AT = 50


@plain(slots=True, frozen=True)
class Span:
    """A completed turn of a session, and when it ran. A call outside any turn is a turn of its own."""

    turn: str
    started_at: str
    ended_at: str

    def holds(self, moment: str) -> bool:
        return self.started_at <= moment <= self.ended_at


def span_of(tx: Tx, session: SessionId, turn: str) -> Span | None:
    """None for a turn that is still running."""
    row = tx.get(TURNS, session, turn)
    if row is not None and row.opened:
        return None if row.ended_at is None else Span(turn, row.started_at, row.ended_at)
    calls = tx.select(CALLS, {"session": session, "turn": turn})
    ends = [call.ended_at for call in calls if call.ended_at is not None]
    return Span(turn, min(call.started_at for call in calls), max(ends)) if calls and len(ends) == len(calls) else None


def work_of_children(tx: Tx, desk: Desk, session: SessionId, span: Span) -> list[CallRow]:
    """What they did during a turn and what of it stands."""
    return [call for call in _standing_work_of_children(tx, desk, session) if span.holds(call.started_at)]


def newest_with_children(tx: Tx, desk: Desk, session: SessionId, *, on_conflict: OnConflict = "merge") -> Span | None:
    """The newest turn of a session during which its children did something that stands.

    What a conflict left of it is met again only by who overwrites.
    """
    work = list(_standing_work_of_children(tx, desk, session))
    tried = left_of(tx, work) if on_conflict != "overwrite" else ()
    moments = sorted((call.started_at for call in work if call.id not in tried), reverse=True)
    spans = (span for moment in moments if (span := _span_at(tx, desk, session, moment)) is not None)
    return next(spans, None)


def _standing_work_of_children(tx: Tx, desk: Desk, session: SessionId) -> Iterator[CallRow]:
    workspace = workspace_of(tx, desk)
    for child in _descendants(tx, session):
        rows = calls_of(tx, desk, child, only={"status": "committed", "undone_by": None})
        yield from (row for row in rows if row.workspace == workspace and can_be_undone(row))


def _descendants(tx: Tx, session: SessionId) -> Iterator[SessionId]:
    ahead, seen = [str(session)], {str(session)}
    while ahead:
        for row in tx.select(SESSIONS, {"parent": ahead.pop()}):
            if row.id not in seen:
                seen.add(row.id)
                ahead.append(row.id)
                yield SessionId(row.id)


def _span_at(tx: Tx, desk: Desk, session: SessionId, moment: str) -> Span | None:
    """The newest completed turn that was running at a moment."""
    opened = (row.id for row in tx.select(TURNS, {"session": session}) if row.opened)
    alone = (row.id for row in islice(calls_of(tx, desk, session), _CALLS_LOOKED_AT) if row.turn == row.id)
    spans = [span for turn in (*opened, *alone) if (span := span_of(tx, session, turn)) and span.holds(moment)]
    return max(spans, key=lambda span: span.started_at, default=None)
