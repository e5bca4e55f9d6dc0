"""What a way back leaves of a call: some of its paths were not asked for, or a conflict kept them as they are.

A call that something is left of still stands and can be taken back again: then it is about the rest. The way back says
on record which calls it took only in `part`, and of which of those it was a conflict that `left` something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from mulligan.history.sites import main_of, with_parts
from mulligan.history.tables import CALLS, CHANGES, TAKEN_IN_PART, WSEQ_END, CallRow, ChangeRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.entries import entry_from_json, same_state
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class Taken:
    """What is back already: of each call some places, and of some calls everything that is not files."""

    places: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    slices: frozenset[str] = frozenset()


def taken_of(tx: Tx, calls: Sequence[CallRow]) -> Taken:
    """What ways back that stand have taken of calls that stand too."""
    places: dict[str, frozenset[bytes]] = {}
    slices = set[str]()
    for way in _ways_back_of(tx, calls):
        cause = way.why
        part = [call.id for call in calls if call.id in cause.get("part", ())]
        there = frozenset(row.place for one in with_parts(tx, [way]) for row in tx.select(CHANGES, {"call": one.id}))
        places |= {call: places.get(call, frozenset()) | there for call in part}
        slices |= set(cause.get("left", ())) if cause["verb"] != "restore" else set()
    return Taken(places, frozenset(slices))


def _ways_back_of(tx: Tx, calls: Sequence[CallRow]) -> list[CallRow]:
    """Those that stand and took a part of one of the calls."""
    ways = {row.by for call in calls for row in tx.select(TAKEN_IN_PART, {"call": call.id})}
    rows = [row for way in sorted(ways) if (row := tx.get(CALLS, way)) is not None]
    return [row for row in rows if row.undone_by is None]


def left_of(tx: Tx, calls: Sequence[CallRow]) -> frozenset[str]:
    """Those of the calls that a way back that stands could take only in part, because of a conflict."""
    left = {call for way in _ways_back_of(tx, calls) for call in way.why.get("left", ())}
    return frozenset(call.id for call in calls if call.id in left)


def without_undone(tx: Tx, row: ChangeRow) -> ChangeRow:
    """A call's change of a path, as if the calls below it had not been that were undone while it was on top of them.

    One call creates a file, the next moves it away; undo of the first finds nothing to do. What undo of the second puts
    back is then what was there before the first.
    """
    below: ChangeRow | None = row
    while below is not None:
        row, below = replace(row, before=below.before), _undone_without_effect(tx, below)
    return row


def _undone_without_effect(tx: Tx, row: ChangeRow) -> ChangeRow | None:
    """The change just below at the same place, if its call is undone and that has changed nothing there."""
    earlier = tx.select(
        CHANGES, {"place": row.place}, between=("wseq", 0, row.wseq), order=("wseq",), descending=True, limit=1
    )
    if not earlier or not same_state(entry_from_json(decode(earlier[0].after)), entry_from_json(decode(row.before))):
        return None
    call = tx.get(CALLS, earlier[0].call)
    if call is None or call.undone_by is None:
        return None
    later = tx.select(CHANGES, {"place": row.place}, between=("wseq", earlier[0].wseq + 1, WSEQ_END))
    calls = (tx.get(CALLS, one.call) for one in later)
    return None if any(main_of(one) == call.undone_by for one in calls if one is not None) else earlier[0]
