"""The files of a root at a point of its history, computed without changing any file.

A point lies between two changes of a workspace. A path then held what the first change after the point found; a path
without such a change still holds the same. So this costs as much time as there were changes since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mulligan.history.log import calls_of
from mulligan.history.multi_root import contains, path_in_root
from mulligan.history.open_root import OpenRoot
from mulligan.history.tables import CALLS, CHANGES, WSEQ_END, CallRow, change_from_row
from mulligan.store.protocol import Tx
from mulligan.values.entries import Change, Entry
from mulligan.values.errors import fault
from mulligan.values.paths import RepoPath, path_bytes

_OVERLAP = 200
"""If this many successive calls ended before a point, all earlier ones did too."""


@dataclass(frozen=True, slots=True, order=True)
class PointInHistory:
    """The point before the change at this position of the workspace."""

    wseq: int


def point_named(tx: Tx, open_root: OpenRoot, call: str, *, side: Literal["before", "after"]) -> PointInHistory:
    """The point before or after a call of this workspace, by its whole id. Raises `unknown_call`."""
    row = tx.get(CALLS, call)
    if row is None or not any(True for _ in calls_of(tx, open_root, None, only={"id": call})):
        raise fault("unknown_call", f"{call!r} is not a call here.", call=call)
    if row.wseq is not None:
        return PointInHistory(row.wseq + (side == "after"))
    # The call changed nothing, so both sides equal the state after the change before it.
    earlier = (one.wseq for one in calls_of(tx, open_root, None, before=row.id) if one.wseq is not None)
    return PointInHistory(next(earlier, 0) + 1)


def entry_at(tx: Tx, open_root: OpenRoot, path: RepoPath, point: PointInHistory) -> Entry | None:
    """The entry of a path at a point; None if no recorded change of it came after the point."""
    place = open_root.disk.root.place_of(path)
    rows = tx.select(CHANGES, {"place": place}, between=("wseq", point.wseq, WSEQ_END), order=("wseq",), limit=1)
    return change_from_row(rows[0]).before if rows else None


def changes_between(
    tx: Tx, open_root: OpenRoot, first: PointInHistory, last: PointInHistory | None
) -> dict[RepoPath, Change]:
    """Every path of the root that changed between two points, with its entries at both.

    `last` None: up to the newest change.
    """
    upto = WSEQ_END if last is None else last.wseq
    found: dict[RepoPath, Change] = {}
    for row in sorted(_calls_between(tx, open_root, first.wseq, upto), key=lambda row: row.wseq or 0):
        for one in tx.select(CHANGES, {"call": row.id}):
            if not contains(open_root.root, one.place):
                continue
            change = change_from_row(one)
            path = path_in_root(open_root.root, one.place, change.path)
            known = found.get(path)
            found[path] = Change(path, change.before if known is None else known.before, change.after)
    return {path: found[path] for path in sorted(found, key=path_bytes)}


def _calls_between(tx: Tx, open_root: OpenRoot, first: int, upto: int) -> list[CallRow]:
    """The calls with changes between two positions.

    Calls are ordered by begin and changes by end, so overlapping calls need `_OVERLAP`.
    """
    found: list[CallRow] = []
    before = 0
    for row in calls_of(tx, open_root, None):
        if row.wseq is None:
            continue
        if first <= row.wseq < upto:
            found.append(row)
        before = before + 1 if row.wseq < first else 0
        if before >= _OVERLAP:
            break
    return found
