"""Where a way back takes place: in one root, or in several at once if the calls it takes back were at work in several.

What a call did in other roots are its parts. They are published with it, and they go back with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mulligan.history.desk import Desk
from mulligan.history.plans import Move, Outcome, RestorePlan
from mulligan.history.tables import CALL_PARTS, CALLS, ROOTS, CallRow, RootRow
from mulligan.session.roots import ASIDES
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.faults import fault
from mulligan.values.paths import RepoPath, text_from_wire, to_wire
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class Site:
    """A root, and the calls to be taken back there, newest first."""

    desk: Desk
    calls: tuple[CallRow, ...]


def main_of(row: CallRow) -> str:
    """The call that a part belongs to; any other call's own id."""
    found = decode(row.cause).get("part_of") if row.cause else None
    return found if isinstance(found, str) else row.id


def with_parts(tx: Tx, rows: Iterable[CallRow]) -> tuple[CallRow, ...]:
    """The calls with all that belongs to them in other roots; each once, parts before what they are parts of."""
    found: dict[str, CallRow] = {}
    for row in rows:
        main = main_of(row)
        parts = sorted((one.part for one in tx.select(CALL_PARTS, {"call": main})), reverse=True)
        for name in (*parts, main):
            one = tx.get(CALLS, name)
            if one is not None and one.status == "committed":
                found.setdefault(name, one)
        found.setdefault(row.id, row)
    return tuple(found.values())


def sites_of(desk: Desk, calls: Sequence[CallRow]) -> list[Site]:
    """One for each workspace the calls were at work in: roots that overlap are one. At least one."""
    by_workspace: dict[str, list[CallRow]] = {}
    with desk.ledger.store.read() as tx:
        for call in calls:
            root = tx.get(ROOTS, call.root)
            by_workspace.setdefault(call.workspace if root is None else root.workspace, []).append(call)
    groups: list[list[CallRow]] = list(by_workspace.values()) or [[]]
    return [Site(_home(desk, group), tuple(group)) for group in groups]


def _home(desk: Desk, calls: Sequence[CallRow]) -> Desk:
    """The desk from which every path of the calls can be reached: theirs, or a root around all of theirs."""
    roots = {call.root for call in calls}
    if len(roots) <= 1:
        return desk.at(roots.pop()) if roots else desk
    with desk.ledger.store.read() as tx:
        inner = [row for root in roots if (row := tx.get(ROOTS, root)) is not None]
        around = [row for row in tx.select(ROOTS) if all(holds(row, one.place_of(b".")) for one in inner)]
    if not around:
        raise fault("unknown_root", "These calls worked in roots that no known root contains.")
    return desk.at(max(around, key=lambda row: len(row.place)).id)


def holds(root: RootRow, place: bytes) -> bool:
    own = root.place_of(b".")
    return place == own or place.startswith(own + b"/")


def as_seen_from(desk: Desk, site: Site, plan: RestorePlan) -> RestorePlan:
    """The plan with whole paths for what is in a root beside this desk's; what is aside goes by its own name."""
    prefix = _prefix(desk, site.desk)
    if prefix is None:
        return plan

    def whole(path: RepoPath) -> RepoPath:
        return RepoPath(os.path.normpath(os.path.join(prefix, path)))

    return replace(
        plan,
        moves=tuple(_moved(move, whole(move.path)) for move in plan.moves),
        outcomes=tuple(_told(one, whole(one.path)) for one in plan.outcomes),
        overwrote_external=tuple(whole(path) for path in plan.overwrote_external),
        coverage=tuple({**gap, "path": to_wire(whole(RepoPath(text_from_wire(gap["path"]))))} for gap in plan.coverage),
    )


def _moved(move: Move, path: RepoPath) -> Move:
    return replace(move, path=path)


def _told(outcome: Outcome, path: RepoPath) -> Outcome:
    return replace(outcome, path=path)


def _prefix(desk: Desk, there: Desk) -> str | None:
    """None for a root that overlaps ours: its paths are told as they always were."""
    if desk is there:
        return None
    with desk.ledger.store.read() as tx:
        ours, theirs = tx.get(ROOTS, desk.root.id), tx.get(ROOTS, there.root.id)
        if ours is None or theirs is None or ours.workspace == theirs.workspace:
            return None
        aside = tx.select(ASIDES, {"root": there.root.id})
    return aside[0].path if aside else os.fsdecode(theirs.place)


def together(plans: Sequence[RestorePlan]) -> RestorePlan:
    """Plans of several sites as one, to be shown."""
    if len(plans) == 1:
        return plans[0]
    return RestorePlan(
        tuple(move for plan in plans for move in plan.moves),
        tuple(one for plan in plans for one in plan.outcomes),
        tuple(path for plan in plans for path in plan.overwrote_external),
        tuple(one for plan in plans for one in plan.left_alone),
        tuple(gap for plan in plans for gap in plan.coverage),
    )
