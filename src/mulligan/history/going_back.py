"""The ways back: undo, restore, rollback, redo, rewind. Each finds what to take back, plans, and applies as a call.

Applying is itself a call, so it can be undone; whatever it replaces is in the store first. Either every move of the
plan happens, or none: a disk that fails half-way is put back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mulligan.history.call import Intent
from mulligan.history.desk import Desk
from mulligan.history.log import (
    calls_of,
    can_be_undone,
    change_from_row,
    changes_of,
    find_call,
    is_open_turn,
    open_calls_of,
    workspace_of,
)
from mulligan.history.plans import Move, OnConflict, Outcome, Planner, RestorePlan, restricted
from mulligan.history.repositories import left_alone, split_off, without_objects
from mulligan.history.tables import CALLS, CHANGES, REDO, ROOTS, TURNS, CallRow, ChangeRow, RootRow
from mulligan.session.tables import session_journal
from mulligan.store.journal import HEADS
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.digest import Digest
from mulligan.values.entries import Change, Entry, FileEntry, same_state
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, from_wire, is_below, join, path_bytes, path_from_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import Wanted

_REPLAN_TRIES = 5
_MOVES_PER_EFFECT = 500
_WSEQ_END = 2**62


Git = Literal["leave", "restore"]
"""Whether a repository that was there before a call and after it goes back too."""


@dataclass(slots=True, frozen=True)
class WayBack:
    """What a way back came to. `call_id` is None for a dry run, and if there was nothing it could do."""

    ok: bool
    call_id: str | None
    outcomes: tuple[Outcome, ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    of: tuple[str, ...] = ()
    plan: RestorePlan | None = None

    def to_json(self) -> dict[str, Any]:
        left = [one.to_json() for one in self.plan.left_alone] if self.plan is not None else []
        return {
            "ok": self.ok,
            "call_id": self.call_id,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "overwrote_external": [to_wire(path) for path in self.overwrote_external],
            "rescue": self.call_id,
        } | ({"git": left} if left else {})


@dataclass(slots=True, frozen=True)
class How:
    """What all ways back can be asked."""

    on_conflict: OnConflict = "merge"
    dry_run: bool = False
    session: SessionId | None = None
    git: Git = "leave"


@dataclass(slots=True, frozen=True)
class _Target:
    """What a way back takes back: calls, newest first, and which of their paths count."""

    verb: str
    calls: tuple[CallRow, ...]
    paths: Sequence[RepoPath] | None = None
    session: str | None = None


class _WorldMoved(Exception):
    """Somebody changed a planned path between plan and act."""


def undo(desk: Desk, call: str | None = None, *, paths: Sequence[RepoPath] | None = None, how: How) -> WayBack:
    """Take back one call; later ones stay. Without a name: the newest that still stands."""
    with desk.ledger.store.read() as tx:
        if call is None:
            row = next((row for row in calls_of(tx, desk, how.session) if can_be_undone(row)), None)
            if row is None:
                raise fault("nothing_to_undo", "There is nothing to undo here.")
    if call is not None:
        row = _standing(find_call(desk, call, how.session))
    assert row is not None
    return _go(desk, _Target("undo", (row,), paths), how)


def _standing(row: CallRow) -> CallRow:
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    if row.undone_by is not None:
        raise fault("nothing_to_undo", f"Call {row.id} is undone already; `mulligan redo` brings it back.")
    if row.status != "committed" or row.wseq is None:
        raise fault("nothing_to_undo", f"Call {row.id} changed nothing that stands.")
    return row


def restore(desk: Desk, call: str, *, paths: Sequence[RepoPath] | None = None, how: How) -> WayBack:
    """Put the call's paths back to what they were before it, later calls' changes of those paths included."""
    row = find_call(desk, call, how.session)
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    with desk.ledger.store.read() as tx:
        touched = [change.path for change in restricted(changes_of(tx, row.id), paths)]
        later = _later_changers(tx, row, touched)
    named = sorted({*touched, *_unknown(touched, paths)}, key=path_bytes)
    return _go(desk, _Target("restore", (*later, row), None if paths is None else named), how)


def _later_changers(tx: Tx, row: CallRow, paths: Iterable[RepoPath]) -> list[CallRow]:
    """Everybody's later calls at these places, through whichever root. What a person did is not ours to drop.

    Those that are undone are among them, as their undoing is: taken back in order, they cancel each other out.
    """
    places = [change.place for path in paths if (change := tx.get(CHANGES, row.id, path_bytes(path))) is not None]
    after = ("wseq", (row.wseq or 0) + 1, _WSEQ_END)
    found = {change.call for place in places for change in tx.select(CHANGES, {"place": place}, between=after)}
    rows = [one for call in found if (one := tx.get(CALLS, call)) is not None and not one.external]
    return _newest_first(rows)


def _newest_first(rows: Iterable[CallRow]) -> list[CallRow]:
    return sorted(rows, key=lambda row: row.wseq or 0, reverse=True)


def rollback(desk: Desk, *, how: How, cancel_open: bool = False) -> WayBack:
    """Take the last completed turn back, call by call, newest first."""
    with desk.ledger.store.read() as tx:
        newest = next((row for row in calls_of(tx, desk, how.session) if not row.external), None)
    session = how.session or (SessionId(newest.session) if newest is not None and newest.session else None)
    if session is not None:
        _close_open_turns(desk, session, cancel=cancel_open)
    with desk.ledger.store.read() as tx:
        last = next((row for row in calls_of(tx, desk, how.session) if can_be_undone(row)), None)
        if last is None:
            raise fault("nothing_to_undo", "There is no completed turn to roll back.")
        rows = tx.select(CALLS, {"session": last.session, "turn": last.turn})
    return _go(desk, _Target("rollback", tuple(_newest_first(row for row in rows if can_be_undone(row)))), how)


def _close_open_turns(desk: Desk, session: SessionId, *, cancel: bool) -> None:
    """A turn that is still running is cancelled first, or nothing is rolled back."""
    with desk.ledger.store.read() as tx:
        running = open_calls_of(tx, session)
        turns = {row.id for row in tx.select(TURNS, {"session": session}) if is_open_turn(tx, session, row.id)}
        turns |= {row.turn for row in running}
    if not turns:
        return
    if not cancel or not all(desk.cancel(row.id) for row in running):
        raise fault("turn_open", "The newest turn is still running; stop it first, or ask to cancel it.")
    ledger = desk.ledger
    with ledger.store.write() as tx:
        for turn in sorted(turns):
            if is_open_turn(tx, session, turn):
                body = {"session": session, "turn": turn, "reason": "cancelled"}
                ledger.journal.append(tx, session_journal(session), "turn.ended", body, at=ledger.now())


def rewind(desk: Desk, point: str, *, side: str = "before", how: How) -> WayBack:
    """Take back everything of a session after a call, ways back included, and with `before` the call too."""
    row = find_call(desk, point, how.session)
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    session = SessionId(row.session) if row.session is not None else None
    with desk.ledger.store.read() as tx:
        later = [one for one in calls_of(tx, desk, session, after=row.id) if one.wseq is not None and not one.external]
    own = [row] if side == "before" and row.wseq is not None else []
    return _go(desk, _Target("rewind", tuple(_newest_first([*later, *own])), session=row.session), how)


def redo(desk: Desk, *, how: How) -> WayBack:
    """Take the newest way back of a session back again."""
    with desk.ledger.store.read() as tx:
        workspace = workspace_of(tx, desk)
        stack = tx.select(REDO, {"session": how.session} if how.session else None)
        rows = [row for one in stack if (row := tx.get(CALLS, one.call)) and row.workspace == workspace]
        if not rows:
            raise fault("nothing_to_redo", "There is nothing to redo here.")
        newest = max(rows, key=lambda row: row.id)
    return _go(desk, _Target("redo", (newest,), session=newest.session), how)


def _go(desk: Desk, target: _Target, how: How) -> WayBack:
    """Plan and apply; if somebody changes a planned path in between, plan again."""
    there = _home(desk, target.calls)
    for _ in range(_REPLAN_TRIES):
        plan = _plan(there, target, how)
        if how.dry_run:
            return WayBack(plan.ok, None, plan.outcomes, plan.overwrote_external, _ids(target), plan)
        if not plan.moves and (not plan.ok or not plan.outcomes):
            return WayBack(plan.ok, None, plan.outcomes, of=_ids(target), plan=plan)
        try:
            return _apply(there, target, plan, how)
        except _WorldMoved:
            continue
    raise fault("path_busy", "The files keep changing while going back; try again when they are quiet.")


def _home(desk: Desk, calls: Sequence[CallRow]) -> Desk:
    """The desk from which every path of the calls can be reached: theirs, or a root around all of theirs."""
    roots = {call.root for call in calls}
    if len(roots) <= 1:
        return desk.at(roots.pop()) if roots else desk
    with desk.ledger.store.read() as tx:
        inner = [row for root in roots if (row := tx.get(ROOTS, root)) is not None]
        around = [row for row in tx.select(ROOTS) if all(_holds(row, one.place) for one in inner)]
    if not around:
        raise fault("unknown_root", "These calls worked in roots that no known root contains.")
    return desk.at(max(around, key=lambda row: len(row.place)).id)


def _holds(root: RootRow, place: bytes) -> bool:
    return place == root.place or place.startswith(root.place + b"/")


def _ids(target: _Target) -> tuple[str, ...]:
    return tuple(call.id for call in target.calls)


def _plan(desk: Desk, target: _Target, how: How) -> RestorePlan:
    contents: dict[Digest, bytes] = {}

    def now(path: RepoPath) -> Entry | None:
        image = desk.image(path)
        if image.content is not None and isinstance(image.entry, FileEntry):
            contents[image.entry.digest] = image.content
        return None if image.special else image.entry

    def read(digest: Digest) -> bytes:
        return contents[digest] if digest in contents else desk.ledger.blobs.read(digest)

    with desk.ledger.store.read() as tx:
        split = [_split(_layer(tx, desk, call, target.paths), target, how) for call in target.calls]
        layers = [ordinary for ordinary, _ in split]
        quiet = _is_quiet_since(tx, desk, target.calls)
        planner = Planner(
            now,
            read,
            _children(desk),
            how.on_conflict,
            keep_mtimes=quiet,
            has=lambda digest: digest in contents or desk.ledger.blobs.has(tx, digest),
        )
        named = _unknown([change.path for both in split for part in both for change in part], target.paths)
        kept = [change for _, part in split for change in part]
        unclear = [] if how.on_conflict == "overwrite" else _ambiguous(target.calls, layers)
        return planner.plan(layers, not_captured=named, ambiguous=unclear).leaving(left_alone(kept, read))


def _ambiguous(calls: Sequence[CallRow], layers: Sequence[Sequence[Change]]) -> list[RepoPath]:
    """Paths that somebody else may have changed in the same window as a call."""
    unclear = {
        from_wire(note["path"]) for call in calls for note in decode(call.coverage) if note["reason"] == "ambiguous"
    }
    return sorted({change.path for layer in layers for change in layer} & unclear, key=path_bytes)


def _split(layer: list[Change], target: _Target, how: How) -> tuple[list[Change], list[Change]]:
    """What to go back on, and what in repositories stays. A redo takes back whatever its way back did."""
    if how.git == "restore" or target.verb == "redo":
        return without_objects(layer), []
    return split_off(layer)


def _layer(tx: Tx, desk: Desk, call: CallRow, paths: Sequence[RepoPath] | None) -> list[Change]:
    """A call's changes as this desk sees their places."""
    rows = tx.select(CHANGES, {"call": call.id})
    changes = [replace(change_from_row(row), path=_path_here(desk.root, row)) for row in rows]
    return sorted(restricted(changes, paths), key=lambda change: path_bytes(change.path))


def _path_here(root: RootRow, row: ChangeRow) -> RepoPath:
    return path_from_bytes(row.place[len(root.place) + 1 :]) if _holds(root, row.place) else path_from_bytes(row.path)


def _unknown(touched: Iterable[RepoPath], paths: Sequence[RepoPath] | None) -> list[RepoPath]:
    """Paths somebody asked for that no change is at or below."""
    known = list(touched)
    return [path for path in paths or () if not any(one == path or is_below(one, path) for one in known)]


def _children(desk: Desk) -> Callable[[RepoPath], list[RepoPath]]:
    def children(path: RepoPath) -> list[RepoPath]:
        with desk.disk.resolve_exactly(path) as spot:
            return [join(path, name.decode("utf-8", "surrogateescape")) for name in desk.disk.children(spot)]

    return children


def _is_quiet_since(tx: Tx, desk: Desk, calls: Sequence[CallRow]) -> bool:
    """Whether nothing in the workspace was recorded after the oldest of the calls but the calls themselves."""
    head = tx.get(HEADS, f"w:{workspace_of(tx, desk)}")
    places = [call.wseq for call in calls if call.wseq is not None]
    return head is not None and bool(places) and head.seq - min(places) + 1 == len(places)


def _apply(desk: Desk, target: _Target, plan: RestorePlan, how: How) -> WayBack:
    session = SessionId(how.session or target.session or target.calls[0].session or "default")
    call = desk.call(session, tool=target.verb, cause=_cause(desk, target))
    try:
        with call:
            for start in range(0, len(plan.moves), _MOVES_PER_EFFECT):
                call.change([_intent(desk, move) for move in plan.moves[start : start + _MOVES_PER_EFFECT]])
    except OSError:
        return WayBack(False, None, _failed(plan), of=_ids(target), plan=plan)
    except Refused as refused:
        if refused.code == "path_claimed":
            raise fault("path_claimed", refused.message) from None
        raise _WorldMoved from None
    return WayBack(plan.ok, call.id, plan.outcomes, plan.overwrote_external, _ids(target), plan)


def _failed(plan: RestorePlan) -> tuple[Outcome, ...]:
    moved = {move.path for move in plan.moves}
    return tuple(Outcome(one.path, "failed", "io_error") if one.path in moved else one for one in plan.outcomes)


def _cause(desk: Desk, target: _Target) -> dict[str, Any]:
    """On record: which calls are taken back wholly (`of`), and which only in some paths (`part`)."""
    if target.paths is None:
        return {"verb": target.verb, "of": list(_ids(target))}
    with desk.ledger.store.read() as tx:
        layers = {
            call.id: (_layer(tx, desk, call, None), _layer(tx, desk, call, target.paths)) for call in target.calls
        }
    whole = [call for call, (every, taken) in layers.items() if len(every) == len(taken)]
    part = [call for call, (every, taken) in layers.items() if taken and len(every) != len(taken)]
    body: dict[str, Any] = {"verb": target.verb, "of": whole}
    return body | {"part": part} if part else body


def _intent(desk: Desk, move: Move) -> Intent:
    def plan(image: Image) -> Wanted:
        if image.special or not (same_state(image.entry, move.now) or same_state(image.entry, move.target)):
            raise _WorldMoved
        content = move.content
        if content is None and isinstance(move.target, FileEntry):
            content = desk.ledger.blobs.read(move.target.digest)
        return Wanted(move.target, content)

    return Intent(move.path, plan)
