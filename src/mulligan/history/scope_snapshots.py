"""Captures by scope: the preimages of paths somebody names, or a call changes, kept under an id of theirs.

A capture is S0's snapshot: see `scopes`. A directory is captured with everything below it. What a call changes goes
into the scope that has its label for an id when the call ends. Restoring does not use a scope up. It overwrites, as S0
says, but what it replaces is kept and can be undone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mulligan.history.desk import Desk
from mulligan.history.intents import Intent
from mulligan.history.plans import Move, in_order
from mulligan.history.scopes import before_of, size_of
from mulligan.history.tables import CALLS, CAPTURES, OPEN, ROOTS, SCOPES, TOUCHES, CaptureRow, ScopeRow
from mulligan.store.protocol import Tx
from mulligan.values.content import Content
from mulligan.values.entries import ABSENT, Absent, DirEntry, Entry, FileEntry, is_withheld, same_state
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, ancestors_of, path_bytes, path_from_bytes
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import Wanted, creation_mode

_MOVES_PER_EFFECT = 500


@plain(slots=True, frozen=True)
class Captured:
    paths: tuple[RepoPath, ...]
    byte_count: int


@plain(slots=True, frozen=True)
class Restored:
    """`there` is the desk of the scope's root, below which all the paths are."""

    there: Desk
    restored: tuple[RepoPath, ...]
    skipped: tuple[tuple[RepoPath, str], ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    call_id: str | None = None


def register(desk: Desk, session: SessionId, scope: str, paths: Sequence[RepoPath] | None = None) -> Captured:
    """Open a scope, or add to it. Only what this call newly captured is counted. A scope belongs to one root."""
    desk.ledger.session(session, desk.root)
    with desk.ledger.store.read() as tx:
        known = {path_from_bytes(row.path) for row in tx.select(CAPTURES, {"session": session, "scope": scope})}
    befores = _stored(desk, paths or (), known)
    with desk.ledger.store.write() as tx:
        _check_root(tx, desk, session, scope)
        fresh = desk.ledger.scopes(tx, session).capture(scope, desk.root.id, befores)
    return Captured(tuple(fresh), size_of(fresh.values()))


def _stored(desk: Desk, paths: Iterable[RepoPath], known: set[RepoPath]) -> dict[RepoPath, Entry]:
    """What the paths and all below them hold, without the known ones. The bytes are in the store when this returns."""
    found: dict[RepoPath, Entry] = {}

    def contents() -> Iterator[Content]:
        for path, image in _trees(desk, paths):
            if image.special:
                raise fault("invalid_params", f"{path} is a device, FIFO or socket and cannot be captured.")
            if path not in known and path not in found:
                found[path] = image.entry
                yield from () if image.content is None else (image.content,)

    desk.ledger.blobs.store_all(contents())
    return found


def _trees(desk: Desk, tops: Iterable[RepoPath]) -> Iterator[tuple[RepoPath, Image]]:
    """Each path and everything below it, parents first."""
    ahead = [*tops][::-1]
    while ahead:
        path = ahead.pop()
        image = desk.image(path)
        yield path, image
        if isinstance(image.entry, DirEntry):
            ahead += reversed(desk.children(path))


def _check_root(tx: Tx, desk: Desk, session: SessionId, scope: str) -> None:
    row = tx.get(SCOPES, session, scope)
    if row is not None and row.root != desk.root.id:
        words = f"Snapshot {scope!r} of session {session!r} belongs to another root; give this one an id of its own."
        raise fault("invalid_params", words, field="scope_id")


def scopes_of(desk: Desk, session: SessionId) -> list[tuple[ScopeRow, list[CaptureRow]]]:
    """A session's scopes by capture time, then insertion, each with its captures in path order.

    A call that is still open has its preimages in the store already: they are listed too.
    """
    with desk.ledger.store.read() as tx:
        rows = sorted(tx.select(SCOPES, {"session": session}), key=lambda row: (row.taken_at_ms, row.seq))
        return [(row, _captures(tx, row)) for row in rows]


def _captures(tx: Tx, scope: ScopeRow) -> list[CaptureRow]:
    filed = tx.select(CAPTURES, {"session": scope.session, "scope": scope.scope})
    calls = [row for one in tx.select(OPEN) if one.root == scope.root and (row := tx.get(CALLS, one.call)) is not None]
    ours = [row.id for row in calls if (row.session, row.label) == (scope.session, scope.scope)]
    touches = [touch for call in ours for touch in tx.select(TOUCHES, {"call": call})]
    found = {one.path: CaptureRow(scope.session, scope.scope, one.path, one.before) for one in touches}
    return sorted((found | {row.path: row for row in filed}).values(), key=lambda row: row.path)


def restore_scope(desk: Desk, session: SessionId, scope: str, paths: Sequence[RepoPath] | None = None) -> Restored:
    """Put captured paths back, deleting the ones that were absent. One call, so it can be undone.

    A path that was asked for stands for all that was captured below it.
    """
    with desk.ledger.store.read() as tx:
        row = tx.get(SCOPES, session, scope)
        captures = tx.select(CAPTURES, {"session": session, "scope": scope})
    if row is None:
        raise fault("unknown_call", f"Session {session!r} has no snapshot {scope!r}.")
    there, asked = desk.at(row.root), set(paths or ())
    known = {path_from_bytes(one.path): before_of(one) for one in captures}
    chosen = {path: one for path, one in known.items() if not asked or asked & {path, *ancestors_of(path)}}
    holding = {above for path in chosen for above in (path, *ancestors_of(path))}
    plan = _Plan(there, chosen)
    theirs = _changed_by_others(there, plan.replacing())
    call = there.call(session, tool="restore", label=None, cause={"verb": "restore", "of": [], "scope": scope})
    try:
        with call:
            moves = in_order(plan.moves.values())
            for start in range(0, len(moves), _MOVES_PER_EFFECT):
                call.change(
                    [
                        Intent(one.path, _put(there, one), relinks=True)
                        for one in moves[start : start + _MOVES_PER_EFFECT]
                    ]
                )
    except Refused as refused:
        raise fault(refused.code, refused.message) from None
    done = tuple(sorted(chosen.keys() - plan.skipped.keys(), key=path_bytes))
    unknown = {path: "not_captured" for path in paths or () if path not in holding}
    return Restored(there, done, (*plan.skipped.items(), *unknown.items()), theirs, call.id)


@dataclass(slots=True)
class _Plan:
    """From what is there now to what was captured. What is left alone, with the reason, is claimed by nobody."""

    desk: Desk
    chosen: Mapping[RepoPath, Entry]
    moves: dict[RepoPath, Move] = field(default_factory=dict)
    skipped: dict[RepoPath, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.chosen, key=path_bytes):
            self._put(path, self.chosen[path])
        inhabited = {above for path in self.chosen for above in ancestors_of(path)}
        for path in sorted(self.moves, key=path_bytes, reverse=True):
            if isinstance(self.moves[path].now, DirEntry) and not isinstance(self.moves[path].target, DirEntry):
                self._clear(path, whole=path not in inhabited)

    def _put(self, path: RepoPath, target: Entry) -> None:
        now = _known(self.desk.image(path))
        missing = [] if isinstance(target, Absent) else self._missing_above(path)
        if now is None or missing is None:
            self.skipped[path] = "type_changed"
        elif is_withheld(now) or is_withheld(target):
            self.skipped[path] = "not_captured"
        elif not same_state(now, target):
            self.moves |= {above: Move(above, ABSENT, DirEntry(creation_mode(0o777))) for above in missing}
            self.moves[path] = Move(path, now, target)

    def _missing_above(self, path: RepoPath) -> list[RepoPath] | None:
        """The directories that have to be made first. None: something that is no directory is in the way."""
        missing: list[RepoPath] = []
        for above in ancestors_of(path):
            entry = self.moves[above].target if above in self.moves else _known(self.desk.image(above))
            if isinstance(entry, DirEntry):
                break
            if above in self.chosen or not isinstance(entry, Absent):
                return None
            missing.append(above)
        return missing

    def _clear(self, path: RepoPath, *, whole: bool) -> None:
        """A directory where there was none. It goes with all that is in it, as S0 says; but if it is known to be there
        only for the sake of captured paths, then no more than they go."""
        children = self.desk.children(path)
        below = {one: _known(image) for one, image in _trees(self.desk, children)} if whole else {}
        if any(one is None or is_withheld(one) for one in below.values()) or not (
            whole or all(map(self._goes, children))
        ):
            del self.moves[path]
            self.skipped[path] = "not_captured"
            return
        self.moves |= {one: Move(one, now, ABSENT) for one, now in below.items() if now is not None}

    def _goes(self, path: RepoPath) -> bool:
        return path in self.moves and isinstance(self.moves[path].target, Absent)

    def replacing(self) -> list[Move]:
        """The moves that something has to give way to: all but the directories to be made."""
        return [one for one in self.moves.values() if one.path in self.chosen or not isinstance(one.now, Absent)]


def _known(image: Image) -> Entry | None:
    """None for what is neither file, link nor directory, or behind a link by now."""
    return None if image.special else image.entry


def _changed_by_others(desk: Desk, moves: Iterable[Move]) -> tuple[RepoPath, ...]:
    """Paths that hold something no call of ours put there: replaced all the same, and told."""
    with desk.ledger.store.read() as tx:
        return tuple(
            move.path
            for move in sorted(moves, key=lambda move: path_bytes(move.path))
            if not same_state(desk.ledger.last_seen(tx, desk.disk.root.place_of(move.path)) or move.target, move.now)
        )


def _put(desk: Desk, move: Move) -> Callable[[Image], Wanted]:
    def plan(_: Image) -> Wanted:
        entry: Entry = move.target
        content = desk.ledger.blobs.content(entry.digest, entry.size) if isinstance(entry, FileEntry) else None
        return Wanted(entry, content)

    return plan


def drop_scope(desk: Desk, session: SessionId, scope: str) -> bool:
    with desk.ledger.store.write() as tx:
        if tx.get(SCOPES, session, scope) is None:
            return False
        desk.ledger.scopes(tx, session).drop(scope, why="dropped")
    return True


def drop_scopes(desk: Desk, session: SessionId) -> list[str]:
    """Forget every capture of a session."""
    with desk.ledger.store.write() as tx:
        scopes = [row.scope for row in tx.select(SCOPES, {"session": session})]
        for scope in scopes:
            desk.ledger.scopes(tx, session).drop(scope, why="dropped")
    return scopes


def apply_cap(desk: Desk, session: SessionId) -> None:
    """After the cap was changed: the oldest scopes go at once if they hold more."""
    with desk.ledger.store.write() as tx:
        desk.ledger.scopes(tx, session).evict_over_cap(keep=None)


def absolute(desk: Desk, path: RepoPath) -> str:
    return os.fsdecode(os.path.join(desk.disk.root.path, path_bytes(path)))


def whole(desk: Desk, scope: ScopeRow, capture: CaptureRow) -> str:
    """The absolute path of what a scope holds, even if its root is another one, or is gone."""
    with desk.ledger.store.read() as tx:
        row = tx.get(ROOTS, scope.root)
    place = desk.disk.root.path if row is None or row.id == desk.root.id else row.place
    return os.fsdecode(os.path.join(place or b"/", capture.path))
