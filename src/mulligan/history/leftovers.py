"""What a way back leaves of a call: some of its paths were not asked for, or a conflict kept them as they are.

A call that something is left of still stands and can be taken back again: then it is about the rest. The way back says
on record which calls it took only in `part`, and of which of those it was a conflict that `left` something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from mulligan.history.sites import with_parts
from mulligan.history.tables import CALLS, CHANGES, TAKEN_IN_PART, CallRow
from mulligan.store.protocol import Tx
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
