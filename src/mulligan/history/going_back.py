"""The ways back: undo, restore, rollback, redo, rewind. Each finds what to take back, plans, and applies as a call.

Applying is itself a call, so it can be undone; whatever it replaces is in the store first. Either every move of the
plan happens, or none: a disk that fails half-way is put back as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mulligan.history.call import Intent
from mulligan.history.desk import Desk
from mulligan.history.log import calls_of, can_be_undone, changes_of, find_call, is_open_turn
from mulligan.history.plans import Move, OnConflict, Outcome, Planner, RestorePlan, restricted
from mulligan.history.tables import CALLS, REDO, CallRow
from mulligan.store.journal import HEADS
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.digest import Digest
from mulligan.values.entries import Change, Entry, FileEntry, same_state
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, join, path_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import Wanted

_REPLAN_TRIES = 5
_MOVES_PER_EFFECT = 500


@dataclass(slots=True, frozen=True)
class WayBack:
    """What a way back came to. `call_id` is None for a dry run, or if nothing had to change."""

    ok: bool
    call_id: str | None
    outcomes: tuple[Outcome, ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    of: tuple[str, ...] = ()
    plan: RestorePlan | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "call_id": self.call_id,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "overwrote_external": [to_wire(path) for path in self.overwrote_external],
            "rescue": self.call_id,
        }


@dataclass(slots=True, frozen=True)
class How:
    """What all ways back can be asked."""

    on_conflict: OnConflict = "merge"
    dry_run: bool = False
    session: SessionId | None = None


@dataclass(slots=True, frozen=True)
class _Target:
    """What a way back takes back: calls newest first, each with the changes that count."""

    verb: str
    calls: tuple[CallRow, ...]
    paths: Sequence[RepoPath] | None = None
    session: str | None = None
    again: tuple[str, ...] = ()


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
    with desk.ledger.store.read() as tx:
        touched = {change.path for change in restricted(changes_of(tx, row.id), paths)}
        later = [one for one in calls_of(tx, desk, None) if one.id > row.id and _counts(tx, one, row.root, touched)]
    return _go(desk, _Target("restore", (*later, row), sorted(touched, key=path_bytes)), how)


def _counts(tx: Tx, row: CallRow, root: str, touched: set[RepoPath]) -> bool:
    """A later call of ours that still stands and changed one of the paths; what a person did is not ours to drop."""
    stands = row.status == "committed" and row.undone_by is None and not row.external and row.wseq is not None
    return stands and row.root == root and any(change.path in touched for change in changes_of(tx, row.id))


def rollback(desk: Desk, *, how: How, cancel_open: bool = False) -> WayBack:
    """Take the last completed turn back, call by call, newest first."""
    with desk.ledger.store.read() as tx:
        rows = list(calls_of(tx, desk, how.session))
        newest = next((row for row in rows if not row.external), None)
        if newest is not None and not cancel_open and is_open_turn(tx, newest.session or "", newest.turn):
            raise fault("turn_open", "The newest turn is still running; stop it first, or ask to cancel it.")
        last = next((row for row in rows if can_be_undone(row)), None)
        if last is None:
            raise fault("nothing_to_undo", "There is no completed turn to roll back.")
        turn = [r for r in rows if r.turn == last.turn and r.session == last.session and can_be_undone(r)]
    return _go(desk, _Target("rollback", tuple(turn)), how)


def rewind(desk: Desk, point: str, *, side: str = "before", how: How) -> WayBack:
    """Take back everything of a session after a call, and with `before` the call too."""
    row = find_call(desk, point, how.session)
    with desk.ledger.store.read() as tx:
        session = SessionId(row.session) if row.session is not None else None
        later = [one for one in calls_of(tx, desk, session) if one.id > row.id and can_be_undone(one)]
    own = (row,) if side == "before" and can_be_undone(row) else ()
    return _go(desk, _Target("rewind", (*later, *own), session=row.session), how)


def redo(desk: Desk, *, how: How) -> WayBack:
    """Take the newest way back of a session back again."""
    with desk.ledger.store.read() as tx:
        stack = tx.select(REDO, {"session": how.session} if how.session else None)
        rows = [row for one in stack if (row := tx.get(CALLS, one.call)) and row.workspace == desk.root.workspace]
        if not rows:
            raise fault("nothing_to_redo", "There is nothing to redo here.")
        newest = max(rows, key=lambda row: row.id)
        again = tuple(decode(newest.cause or "{}").get("of", ()))
    return _go(desk, _Target("redo", (newest,), session=newest.session, again=again), how)


def _go(desk: Desk, target: _Target, how: How) -> WayBack:
    """Plan and apply; if somebody changes a planned path in between, plan again."""
    there = desk.at(target.calls[0].root) if target.calls else desk
    for _ in range(_REPLAN_TRIES):
        plan = _plan(there, target, how)
        if how.dry_run:
            return WayBack(plan.ok, None, plan.outcomes, plan.overwrote_external, _ids(target), plan)
        if how.on_conflict == "refuse" and not plan.ok:
            return WayBack(False, None, plan.outcomes, of=_ids(target), plan=plan)
        try:
            return _apply(there, target, plan)
        except _WorldMoved:
            continue
    raise fault("path_busy", "The files keep changing while going back; try again when they are quiet.")


def _ids(target: _Target) -> tuple[str, ...]:
    return tuple(call.id for call in target.calls)


def _plan(desk: Desk, target: _Target, how: How) -> RestorePlan:
    contents: dict[Digest, bytes] = {}

    def now(path: RepoPath) -> Entry:
        image = desk.image(path)
        if image.content is not None and isinstance(image.entry, FileEntry):
            contents[image.entry.digest] = image.content
        return image.entry

    def read(digest: Digest) -> bytes:
        return contents[digest] if digest in contents else desk.ledger.blobs.read(digest)

    with desk.ledger.store.read() as tx:
        layers = [restricted(changes_of(tx, call.id), target.paths) for call in target.calls]
        quiet = bool(target.calls) and _is_newest(tx, desk, target.calls[0])
    children = _children(desk)
    return Planner(now, read, children, how.on_conflict, keep_mtimes=quiet).plan(_ordered(layers))


def _ordered(layers: list[list[Change]]) -> list[list[Change]]:
    return [sorted(layer, key=lambda change: path_bytes(change.path)) for layer in layers]


def _children(desk: Desk) -> Any:
    def children(path: RepoPath) -> list[RepoPath]:
        with desk.disk.resolve_exactly(path) as spot:
            return [join(path, name.decode("utf-8", "surrogateescape")) for name in desk.disk.children(spot)]

    return children


def _is_newest(tx: Tx, desk: Desk, call: CallRow) -> bool:
    head = tx.get(HEADS, f"w:{desk.root.workspace}")
    return head is not None and head.seq == call.wseq


def _apply(desk: Desk, target: _Target, plan: RestorePlan) -> WayBack:
    if not plan.moves and not plan.ok:
        return WayBack(False, None, plan.outcomes, of=_ids(target), plan=plan)
    session = SessionId(target.session or target.calls[0].session or "default")
    call = desk.call(session, tool=target.verb, cause=_cause(desk, target))
    try:
        for start in range(0, len(plan.moves), _MOVES_PER_EFFECT):
            call.change([_intent(desk, move) for move in plan.moves[start : start + _MOVES_PER_EFFECT]])
        call.commit()
    except OSError:
        call.abort("io_error")
        failed = tuple(replace(outcome, outcome="failed", reason="io_error") for outcome in plan.outcomes)
        return WayBack(False, None, failed, of=_ids(target), plan=plan)
    except Refused as refused:
        call.abort(refused.code)
        raise fault("path_claimed", refused.message) from None
    except BaseException as error:
        call.abort("world_moved" if isinstance(error, _WorldMoved) else "interrupted")
        raise
    return WayBack(plan.ok, call.id, plan.outcomes, plan.overwrote_external, _ids(target), plan)


def _cause(desk: Desk, target: _Target) -> dict[str, Any]:
    """On record: which calls are taken back wholly (`of`), and which only in some paths (`part`)."""
    with desk.ledger.store.read() as tx:
        whole = [c.id for c in target.calls if len(restricted(ch := changes_of(tx, c.id), target.paths)) == len(ch)]
    part = [call.id for call in target.calls if call.id not in whole]
    body: dict[str, Any] = {"verb": target.verb, "of": whole}
    body |= {"part": part} if part else {}
    return body | {"again": list(target.again)} if target.verb == "redo" else body


def _intent(desk: Desk, move: Move) -> Intent:
    def plan(image: Image) -> Wanted:
        if image.special or not same_state(image.entry, move.now):
            raise _WorldMoved
        content = move.content
        if content is None and isinstance(move.target, FileEntry):
            content = desk.ledger.blobs.read(move.target.digest)
        return Wanted(move.target, content)

    return Intent(move.path, plan)
