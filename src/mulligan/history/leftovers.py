"""What a way back leaves of a call: some of its paths were not asked for, or a conflict kept them as they are.

A call that something is left of still stands and can be taken back again: then it is about the rest. The way back says
on record which calls it took only in `part`, and of which of those it was a conflict that `left` something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mulligan.history.projection import WAYS_BACK
from mulligan.history.sites import with_parts
from mulligan.history.tables import CALLS, CHANGES, CallRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode

_LAST_ID = "\U0010ffff"


@dataclass(slots=True, frozen=True)
class Taken:
    """What is back already: of each call some places, and of some calls everything that is not files."""

    places: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    slices: frozenset[str] = frozenset()


def taken_of(tx: Tx, calls: Sequence[CallRow]) -> Taken:
    """What ways back that stand have taken of calls that stand too."""
    places: dict[str, frozenset[bytes]] = {}
    slices = set[str]()
    for way in _ways_back_since(tx, calls):
        cause = decode(way.cause or "{}")
        part = [call.id for call in calls if call.id in cause.get("part", ())]
        there = frozenset(row.place for one in with_parts(tx, [way]) for row in tx.select(CHANGES, {"call": one.id}))
        places |= {call: places.get(call, frozenset()) | there for call in part}
        slices |= set(cause.get("left", ())) if cause["verb"] != "restore" else set()
    return Taken(places, frozenset(slices))


def _ways_back_since(tx: Tx, calls: Sequence[CallRow]) -> Iterator[CallRow]:
    since = min((call.id for call in calls), default=_LAST_ID)
    for workspace in {call.workspace for call in calls}:
        for verb in WAYS_BACK:
            where = {"workspace": workspace, "status": "committed", "undone_by": None, "tool": verb}
            yield from tx.select(CALLS, where, between=("id", since, _LAST_ID), order=("id",))


def left_of(tx: Tx, calls: Sequence[CallRow]) -> frozenset[str]:
    """Those of the calls that a way back that stands could take only in part, because of a conflict."""
    return frozenset().union(*(left_by(way) for way in _ways_back_since(tx, calls)))


def left_by(row: CallRow) -> frozenset[str]:
    """The calls that a way back could take only in part, because of a conflict."""
    return frozenset(decode(row.cause).get("left", ())) if row.cause else frozenset()
