"""Where a way back takes place: in one root, or in several at once if the calls it takes back were at work in several.

What a call did in other roots are its parts. They are published with it, and they go back with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mulligan.history.desk import Desk
from mulligan.history.plans import Move, Outcome, RestorePlan
from mulligan.history.rescues import rescued_in
from mulligan.history.tables import CALL_PARTS, CALLS, CHANGES, ROOTS, CallRow, RootRow
from mulligan.session.roots import ASIDES
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.digest import Digest
from mulligan.values.entries import FileEntry, entry_from_json
from mulligan.values.faults import fault
from mulligan.values.paths import RepoPath, is_inside, path_bytes, path_from_bytes, text_from_wire, to_wire
from mulligan.values.plain import plain

Places = Mapping[RepoPath, frozenset[bytes]]
"""Paths as somebody names them, each with where it may be."""


@plain(slots=True, frozen=True)
class Site:
    """A root, and the calls to be taken back there, newest first."""

    desk: Desk
    calls: tuple[CallRow, ...]


def main_of(row: CallRow) -> str:
    """The call that a part belongs to; any other call's own id."""
    found = row.why.get("part_of")
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
    return [Site(_home(desk, group), tuple(_in_order(group))) for group in groups]


def _in_order(calls: Iterable[CallRow]) -> list[CallRow]:
    """Newest first by their places in the one workspace: one that began earlier may have changed a file later."""
    return sorted(calls, key=lambda row: row.wseq or 0, reverse=True)


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
    return is_inside(place, root.place_of(b"."))


def places_named(tx: Tx, desk: Desk, calls: Iterable[CallRow], paths: Iterable[RepoPath]) -> Places:
    """Where each path is that somebody names as this desk shows it: relative, or absolute in another root.

    What is aside goes by its root's name, so that is two places. Raises `invalid_path` for what is in no root in which
    the calls were at work.
    """
    own = tx.get(ROOTS, desk.root.id) or desk.root
    rows = {call.root: tx.get(ROOTS, call.root) for call in calls}
    roots = [(row.place, row) for row in (own, *rows.values()) if row is not None]
    roots += [(os.fsencode(one.path), row) for one in tx.select(ASIDES) if (row := rows.get(one.root)) is not None]
    found = {path: _places(os.path.join(own.place + b"/", path_bytes(path)), roots) for path in paths}
    for path in (path for path, places in found.items() if not places):
        raise fault("invalid_path", f"{path!r} is not in a root in which that happened.", path=path)
    return found


def _places(whole: bytes, roots: Iterable[tuple[bytes, RootRow]]) -> frozenset[bytes]:
    inside = ((root, whole[len(name) + 1 :] or b".") for name, root in roots if is_inside(whole, name))
    return frozenset(root.place_of(below) for root, below in inside)


def body_at(tx: Tx, desk: Desk, call: CallRow, path: RepoPath, *, after: bool) -> Digest | None:
    """The bytes of a file before a call, or after it, in whichever root the call worked; None: it was not a file."""
    parts = with_parts(tx, [call])
    places = places_named(tx, desk, parts, [path])[path]
    for part in parts:
        for row in tx.select(CHANGES, {"call": part.id}):
            entry = entry_from_json(decode(row.after if after else row.before))
            if row.place in places and isinstance(entry, FileEntry):
                return entry.digest
        root = tx.get(ROOTS, part.root)
        rescued = rescued_in(part) if after and root is not None else []
        for name, digest in reversed(rescued):
            if root is not None and root.place_of(path_bytes(name)) in places:
                return digest
    return None


def desk_and_path(desk: Desk, path: RepoPath) -> tuple[Desk, RepoPath]:
    """A path as this desk shows it, and the desk of the root it is in. Raises `invalid_path` if it is in no root."""
    if not path.startswith("/"):
        return desk, path
    whole = os.fsencode(path)
    with desk.ledger.store.read() as tx:
        around = [row.place for row in tx.select(ROOTS) if is_inside(whole, row.place or b"/")]
    if not around:
        raise fault("invalid_path", f"{path!r} is in no root that Mulligan knows.", path=path)
    root = max(around, key=len)
    return desk.elsewhere(root or b"/", record=False), path_from_bytes(whole[len(root) + 1 :])


def counts_at(place: bytes, places: frozenset[bytes] | None) -> bool:
    """Whether it is one of the places, or below one; None: anywhere."""
    return places is None or not places.isdisjoint(upwards(place))


def upwards(place: bytes) -> Iterator[bytes]:
    """The place itself, and every directory above it."""
    return (place[:end] for end in (*(at for at, byte in enumerate(place) if byte == ord("/")), len(place)))


def path_here(root: RootRow, place: bytes, path: RepoPath) -> RepoPath:
    """A place as a path of this root; one that is not in it stays what it was."""
    return path_from_bytes(place[len(root.place_of(b".")) + 1 :] or b".") if holds(root, place) else path


def shown_by(tx: Tx, desk: Desk, root: RootRow) -> Callable[[RepoPath], RepoPath]:
    """How this desk shows paths of any root: relative below its own, else absolute; what is aside by its own name."""
    if root.id == desk.root.id:
        return lambda path: path
    aside = tx.select(ASIDES, {"root": root.id}, limit=1)
    if aside:
        return lambda path: RepoPath(os.path.normpath(os.path.join(aside[0].path, path)))
    return lambda path: RepoPath(desk.shown(root, path))


def as_seen_from(desk: Desk, site: Site, plan: RestorePlan) -> RestorePlan:
    """The plan with paths as this desk shows them."""
    if desk is site.desk:
        return plan
    with desk.ledger.store.read() as tx:
        whole = shown_by(tx, desk, site.desk.root)
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


def together(plans: Sequence[RestorePlan], unknown: Sequence[Outcome] = ()) -> RestorePlan:
    """Plans of several sites as one, to be shown, with what none of them knows of."""
    if len(plans) == 1 and not unknown:
        return plans[0]
    outcomes = (*(one for plan in plans for one in plan.outcomes), *unknown)
    return RestorePlan(
        tuple(move for plan in plans for move in plan.moves),
        tuple(sorted(outcomes, key=lambda one: path_bytes(one.path))),
        tuple(path for plan in plans for path in plan.overwrote_external),
        tuple(one for plan in plans for one in plan.left_alone),
        tuple(gap for plan in plans for gap in plan.coverage),
    )
