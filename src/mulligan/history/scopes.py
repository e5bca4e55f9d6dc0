"""Scopes, which S0 calls snapshots: capture paths under an id that the caller chose, list, restore and drop them.

Mulligan captures a directory with everything below it. When a call ends, the preimages of what it changed go into the
scope that has the call's label for an id. A restore does not use a scope up. It overwrites, as S0 says, but it is a
call, so it can be undone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from mulligan.files.disk import Image
from mulligan.files.replace import TargetEntry, creation_mode
from mulligan.history.cause import UndoOperation
from mulligan.history.open_root import OpenRoot
from mulligan.history.plan import PlannedChange, in_batches, in_order
from mulligan.history.tables import CALLS, CAPTURES, OPEN, ROOTS, SCOPES, CaptureRow, ScopeRow, before_of
from mulligan.history.undo_log import Intent
from mulligan.store.protocol import Tx
from mulligan.values.entries import ABSENT, Absent, Content, DirEntry, Entry, FileEntry, same_state
from mulligan.values.errors import Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, ancestors_of, path_bytes, path_from_bytes


@fast_dataclass(slots=True, frozen=True)
class Captured:
    paths: tuple[RepoPath, ...]
    byte_count: int


@fast_dataclass(slots=True, frozen=True)
class Restored:
    """The result of a restore. `there` is the open root of the scope; all paths are below it."""

    there: OpenRoot
    restored: tuple[RepoPath, ...]
    skipped: tuple[tuple[RepoPath, str], ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    call_id: str | None = None


def register(open_root: OpenRoot, session: SessionId, scope: str, paths: Sequence[RepoPath] | None = None) -> Captured:
    """Open a scope, or add to it. Returns only what is newly captured. A scope belongs to one root."""
    open_root.ledger.session(session, open_root.root)
    # The first capture of a path wins, so known paths need not be read again.
    with open_root.ledger.store.read() as tx:
        known = {path_from_bytes(row.path) for row in tx.select(CAPTURES, {"session": session, "scope": scope})}
    befores = _capture_trees(open_root, paths or (), known)
    with open_root.ledger.store.write() as tx:
        _check_root(tx, open_root, session, scope)
        fresh = open_root.ledger.scopes(tx, session).capture(scope, open_root.root.id, befores)
    return Captured(tuple(fresh), size_of(fresh.values()))


def _capture_trees(open_root: OpenRoot, paths: Iterable[RepoPath], known: set[RepoPath]) -> dict[RepoPath, Entry]:
    """The entries of the paths and everything below them, without the known ones.

    The bytes are in the store when this returns.
    """
    found: dict[RepoPath, Entry] = {}

    def contents() -> Iterator[Content]:
        for path, image in _trees(open_root, paths):
            if image.special:
                raise fault("invalid_params", f"{path} is a device, FIFO or socket and cannot be captured.")
            if path not in known and path not in found:
                found[path] = image.entry
                if image.content is not None:
                    yield image.content

    open_root.ledger.blobs.store_all(contents())
    return found


def _trees(open_root: OpenRoot, tops: Iterable[RepoPath]) -> Iterator[tuple[RepoPath, Image]]:
    """Each path and everything below it, parents first."""
    waiting = [*tops][::-1]
    while waiting:
        path = waiting.pop()
        image = open_root.image(path)
        yield path, image
        if isinstance(image.entry, DirEntry):
            waiting += reversed(open_root.children(path))


def _check_root(tx: Tx, open_root: OpenRoot, session: SessionId, scope: str) -> None:
    row = tx.get(SCOPES, session, scope)
    if row is not None and row.root != open_root.root.id:
        words = f"Snapshot {scope!r} of session {session!r} belongs to another root; give this one an id of its own."
        raise fault("invalid_params", words, field="scope_id")


def scopes_of(open_root: OpenRoot, session: SessionId) -> list[tuple[ScopeRow, list[CaptureRow]]]:
    """A session's scopes by capture time, then insertion, each with its captures in path order."""
    with open_root.ledger.store.read() as tx:
        rows = sorted(tx.select(SCOPES, {"session": session}), key=lambda row: (row.taken_at_ms, row.seq))
        return [(row, _captures(open_root, tx, row)) for row in rows]


def _captures(open_root: OpenRoot, tx: Tx, scope: ScopeRow) -> list[CaptureRow]:
    captured = tx.select(CAPTURES, {"session": scope.session, "scope": scope.scope})
    # An open call with the scope's label has its preimages in the store already, so they count too.
    calls = [row for one in tx.select(OPEN) if one.root == scope.root and (row := tx.get(CALLS, one.call)) is not None]
    ours = [row.id for row in calls if (row.session, row.label) == (scope.session, scope.scope)]
    touches = [touch for call in ours for touch in open_root.ledger.touches_of(tx, call)]
    found = {one.path: CaptureRow(scope.session, scope.scope, one.path, one.before) for one in touches}
    return sorted((found | {row.path: row for row in captured}).values(), key=lambda row: row.path)


def restore_scope(
    open_root: OpenRoot, session: SessionId, scope: str, paths: Sequence[RepoPath] | None = None
) -> Restored:
    """Restore captured paths, and delete those that were absent. One call, so it can be undone.

    Each of `paths` includes all that was captured below it; None restores everything.
    """
    with open_root.ledger.store.read() as tx:
        row = tx.get(SCOPES, session, scope)
        captures = tx.select(CAPTURES, {"session": session, "scope": scope})
    if row is None:
        raise fault("unknown_call", f"Session {session!r} has no snapshot {scope!r}.")
    there, asked = open_root.at(row.root), set(paths or ())
    known = {path_from_bytes(one.path): before_of(one) for one in captures}
    chosen = {path: one for path, one in known.items() if not asked or asked & {path, *ancestors_of(path)}}
    chosen_or_above = {above for path in chosen for above in (path, *ancestors_of(path))}
    plan = _ScopePlan(there, chosen)
    # Before the call: afterwards the last record of each path would be the restore itself.
    external = _changed_by_others(there, plan.replacements())
    call = there.call(session, tool="restore", label=None, cause=UndoOperation("restore", scope=scope))
    try:
        with call:
            for some in in_batches(in_order(plan.moves.values())):
                call.change([Intent(one.path, _writer(there, one), relinks=True) for one in some])
    except Refused as refused:
        raise fault(refused.code, refused.message) from None
    done = tuple(sorted(chosen.keys() - plan.skipped.keys(), key=path_bytes))
    unknown = {path: "not_captured" for path in paths or () if path not in chosen_or_above}
    return Restored(there, done, (*plan.skipped.items(), *unknown.items()), external, call.id)


@fast_dataclass(slots=True)
class _ScopePlan:
    """The moves from what is there now to what was captured, and the paths that stay, each with the reason."""

    open_root: OpenRoot
    chosen: Mapping[RepoPath, Entry]
    moves: dict[RepoPath, PlannedChange] = field(default_factory=dict)
    skipped: dict[RepoPath, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.chosen, key=path_bytes):
            self._add(path, self.chosen[path])
        above_chosen = {above for path in self.chosen for above in ancestors_of(path)}
        # Children first, so that a directory sees which of them go.
        for path in sorted(self.moves, key=path_bytes, reverse=True):
            if isinstance(self.moves[path].now, DirEntry) and not isinstance(self.moves[path].target, DirEntry):
                # A directory that is there only because of captured paths loses no more than these.
                self._clear(path, whole=path not in above_chosen)

    def _add(self, path: RepoPath, target: Entry) -> None:
        now = _entry_of(self.open_root.image(path))
        missing = [] if isinstance(target, Absent) else self._missing_above(path)
        if now is None or missing is None:
            self.skipped[path] = "type_changed"
        elif now.withheld is not None or target.withheld is not None:
            self.skipped[path] = "not_captured"
        elif not same_state(now, target):
            self.moves |= {above: PlannedChange(above, ABSENT, DirEntry(creation_mode(0o777))) for above in missing}
            self.moves[path] = PlannedChange(path, now, target)

    def _missing_above(self, path: RepoPath) -> list[RepoPath] | None:
        """The directories to create first. None: something that is no directory is in the way."""
        missing: list[RepoPath] = []
        for above in ancestors_of(path):
            entry = self.moves[above].target if above in self.moves else _entry_of(self.open_root.image(above))
            if isinstance(entry, DirEntry):
                break
            # A chosen path above that is no directory wins over what was captured below it.
            if above in self.chosen or not isinstance(entry, Absent):
                return None
            missing.append(above)
        return missing

    def _clear(self, path: RepoPath, *, whole: bool) -> None:
        """Remove a directory that did not exist at the capture; `whole`: with everything in it, as S0 says."""
        children = self.open_root.children(path)
        below = {one: _entry_of(image) for one, image in _trees(self.open_root, children)} if whole else {}
        can_clear = (
            all(one is not None and one.withheld is None for one in below.values())
            if whole
            else all(one in self.moves and isinstance(self.moves[one].target, Absent) for one in children)
        )
        if not can_clear:
            del self.moves[path]
            self.skipped[path] = "not_captured"
            return
        self.moves |= {one: PlannedChange(one, now, ABSENT) for one, now in below.items() if now is not None}

    def replacements(self) -> list[PlannedChange]:
        """The moves that replace something: all but the directories to create."""
        return [one for one in self.moves.values() if one.path in self.chosen or not isinstance(one.now, Absent)]


def _entry_of(image: Image) -> Entry | None:
    """The entry; None for a device, FIFO or socket, and behind a link."""
    return None if image.special else image.entry


def _changed_by_others(open_root: OpenRoot, moves: Iterable[PlannedChange]) -> tuple[RepoPath, ...]:
    """Paths with content that no call wrote. The restore replaces it all the same, and reports them."""
    found = []
    with open_root.ledger.store.read() as tx:
        for move in sorted(moves, key=lambda move: path_bytes(move.path)):
            seen = open_root.ledger.last_seen(tx, open_root.disk.root.place_of(move.path))
            if not same_state(seen or move.target, move.now):
                found.append(move.path)
    return tuple(found)


def _writer(open_root: OpenRoot, move: PlannedChange) -> Callable[[Image], TargetEntry]:
    def plan(_: Image) -> TargetEntry:
        entry: Entry = move.target
        content = open_root.ledger.blobs.content(entry.digest, entry.size) if isinstance(entry, FileEntry) else None
        return TargetEntry(entry, content)

    return plan


def size_of(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries if isinstance(entry, FileEntry))


def drop_scope(open_root: OpenRoot, session: SessionId, scope: str) -> bool:
    with open_root.ledger.store.write() as tx:
        if tx.get(SCOPES, session, scope) is None:
            return False
        open_root.ledger.scopes(tx, session).drop(scope, why="dropped")
    return True


def drop_scopes(open_root: OpenRoot, session: SessionId) -> list[str]:
    """Drop every scope of a session. Returns their ids."""
    with open_root.ledger.store.write() as tx:
        scopes = [row.scope for row in tx.select(SCOPES, {"session": session})]
        for scope in scopes:
            open_root.ledger.scopes(tx, session).drop(scope, why="dropped")
    return scopes


def apply_cap(open_root: OpenRoot, session: SessionId) -> None:
    """After a change of the cap: evict the oldest scopes at once if they hold more."""
    with open_root.ledger.store.write() as tx:
        open_root.ledger.scopes(tx, session).evict_over_cap(keep=None)


def absolute(open_root: OpenRoot, path: RepoPath) -> str:
    return os.fsdecode(os.path.join(open_root.disk.root.path, path_bytes(path)))


def whole(open_root: OpenRoot, scope: ScopeRow, capture: CaptureRow) -> str:
    """The absolute path of a capture, even if its root is another one, or is gone."""
    with open_root.ledger.store.read() as tx:
        row = tx.get(ROOTS, scope.root)
    place = open_root.disk.root.path if row is None or row.id == open_root.root.id else row.place
    return os.fsdecode(os.path.join(place or b"/", capture.path))
