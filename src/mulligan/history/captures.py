"""Captures by scope: the preimages of paths somebody names, or is about to write, kept under an id of theirs.

A capture is S0's snapshot. The first capture of a path in a scope wins; restoring does not use it up; dropping or
evicting it leaves a record. Restoring overwrites, as S0 says, but what it replaces is kept and can be undone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mulligan.history.call import Intent
from mulligan.history.desk import Desk
from mulligan.history.dropping import drop_body, droppable, holder_of_scope
from mulligan.history.over_cap import cap_of
from mulligan.history.plans import Move, in_order
from mulligan.history.tables import CAPTURES, ROOTS, SCOPES, CaptureRow, ScopeRow
from mulligan.session.tables import session_journal
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, entry_from_json, entry_to_json, same_state
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, path_bytes, path_from_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import Wanted


@dataclass(slots=True, frozen=True)
class Captured:
    paths: tuple[RepoPath, ...]
    byte_count: int


@dataclass(slots=True, frozen=True)
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
    images = {path: _image(desk, path) for path in paths or ()}
    with desk.ledger.store.read() as tx:
        if tx.get(SCOPES, session, scope) is None:
            known: set[bytes] = set()
        else:
            known = {row.path for row in tx.select(CAPTURES, {"session": session, "scope": scope})}
    fresh = {path: image for path, image in images.items() if path_bytes(path) not in known}
    desk.ledger.blobs.store_all(image.content for image in fresh.values() if image.content is not None)
    entries = [{"path": to_wire(path), "before": entry_to_json(image.entry)} for path, image in fresh.items()]
    body = {"session": session, "scope": scope, "root": desk.root.id, "captured": entries, "taken_at_ms": _now_ms(desk)}
    refs = {image.entry.digest for image in fresh.values() if isinstance(image.entry, FileEntry)}
    with desk.ledger.store.write() as tx:
        _check_root(tx, desk, session, scope)
        journal = session_journal(session)
        desk.ledger.journal.append(tx, journal, "scope.captured", body, at=desk.ledger.now(), refs=refs)
        _evict_over_cap(desk, tx, session, keep=scope)
    size = sum(image.entry.size for image in fresh.values() if isinstance(image.entry, FileEntry))
    return Captured(tuple(fresh), size)


def _check_root(tx: Tx, desk: Desk, session: SessionId, scope: str) -> None:
    row = tx.get(SCOPES, session, scope)
    if row is not None and row.root != desk.root.id:
        words = f"Snapshot {scope!r} of session {session!r} belongs to another root; give this one an id of its own."
        raise fault("invalid_params", words, field="scope_id")


def _image(desk: Desk, path: RepoPath) -> Image:
    image = desk.image(path)
    if image.special:
        raise fault("invalid_params", f"{path} is a device, FIFO or socket and cannot be captured.")
    return image


def _now_ms(desk: Desk) -> int:
    return int(desk.ledger.clock.now().timestamp() * 1000)


def is_registered(desk: Desk, session: SessionId, scope: str) -> bool:
    """Whether there is such a scope in this root."""
    with desk.ledger.store.read() as tx:
        row = tx.get(SCOPES, session, scope)
    return row is not None and row.root == desk.root.id


def scopes_of(desk: Desk, session: SessionId) -> list[tuple[ScopeRow, list[CaptureRow]]]:
    """A session's scopes by capture time, then insertion, each with its captures in path order."""
    with desk.ledger.store.read() as tx:
        rows = sorted(tx.select(SCOPES, {"session": session}), key=lambda row: (row.taken_at_ms, row.seq))
        return [(row, tx.select(CAPTURES, {"session": session, "scope": row.scope})) for row in rows]


def size_of(captures: Iterable[CaptureRow]) -> int:
    entries = [entry_from_json(decode(row.before)) for row in captures]
    return sum(entry.size for entry in entries if isinstance(entry, FileEntry))


def restore_scope(desk: Desk, session: SessionId, scope: str, paths: Sequence[RepoPath] | None = None) -> Restored:
    """Put captured paths back, deleting the ones that were absent. One call, so it can be undone."""
    with desk.ledger.store.read() as tx:
        row = tx.get(SCOPES, session, scope)
        captures = tx.select(CAPTURES, {"session": session, "scope": scope})
    if row is None:
        raise fault("unknown_call", f"Session {session!r} has no snapshot {scope!r}.")
    there = desk.at(row.root)
    wanted = {path_from_bytes(one.path): entry_from_json(decode(one.before)) for one in captures}
    unknown = [(path, "not_captured") for path in paths or () if path not in wanted]
    chosen = {path: entry for path, entry in wanted.items() if not paths or path in paths}
    moves = [Move(path, there.entry(path), entry) for path, entry in chosen.items()]
    theirs = _changed_by_others(there, moves)
    call = there.call(session, tool="restore", label=None, cause={"verb": "restore", "of": [], "scope": scope})
    try:
        with call:
            call.change([Intent(move.path, _put(there, move)) for move in in_order(_with_contents(there, moves))])
    except Refused as refused:
        raise fault("path_claimed", refused.message) from None
    done = tuple(sorted(chosen, key=path_bytes))
    return Restored(there, done, tuple(unknown), theirs, call.id)


def _with_contents(desk: Desk, moves: Sequence[Move]) -> list[Move]:
    """What stands in the way below a directory that was absent goes with it, as S0 says."""
    found = list(moves)
    for move in moves:
        if isinstance(move.now, DirEntry) and not isinstance(move.target, DirEntry):
            found += [Move(path, desk.entry(path), ABSENT) for path in _below(desk, move.path)]
    return found


def _below(desk: Desk, path: RepoPath) -> list[RepoPath]:
    with desk.disk.resolve_exactly(path) as spot:
        names = [path_from_bytes(path_bytes(path) + b"/" + name) for name in desk.disk.children(spot)]
    return [one for name in names for one in (name, *(_below(desk, name) if _is_dir(desk, name) else ()))]


def _is_dir(desk: Desk, path: RepoPath) -> bool:
    return isinstance(desk.entry(path), DirEntry)


def _changed_by_others(desk: Desk, moves: Iterable[Move]) -> tuple[RepoPath, ...]:
    """Paths that hold something no call of ours put there: replaced all the same, and told."""
    with desk.ledger.store.read() as tx:
        return tuple(
            move.path
            for move in moves
            if not same_state(move.now, move.target)
            and not same_state(desk.ledger.last_seen(tx, desk.disk.root.place_of(move.path)) or move.target, move.now)
        )


def _put(desk: Desk, move: Move) -> Any:
    def plan(_: Image) -> Wanted:
        entry: Entry = move.target
        content = desk.ledger.blobs.content(entry.digest, entry.size) if isinstance(entry, FileEntry) else None
        return Wanted(entry, content)

    return plan


def drop_scope(desk: Desk, session: SessionId, scope: str) -> bool:
    with desk.ledger.store.write() as tx:
        if tx.get(SCOPES, session, scope) is None:
            return False
        _drop(desk, tx, session, scope, why="dropped")
    return True


def drop_scopes(desk: Desk, session: SessionId) -> list[str]:
    """Forget every capture of a session."""
    with desk.ledger.store.write() as tx:
        scopes = [row.scope for row in tx.select(SCOPES, {"session": session})]
        for scope in scopes:
            _drop(desk, tx, session, scope, why="dropped")
    return scopes


def _drop(desk: Desk, tx: Tx, session: SessionId, scope: str, *, why: str) -> None:
    """The bodies that nothing else needs go with it, and the record names them."""
    captures = tx.select(CAPTURES, {"session": session, "scope": scope})
    entries = [entry_from_json(decode(row.before)) for row in captures]
    named = {entry.digest for entry in entries if isinstance(entry, FileEntry)}
    gone = droppable(tx, named, but_for=holder_of_scope(session, scope))
    body = {"session": session, "scope": scope, "why": why} | ({"digests": gone} if gone else {})
    desk.ledger.journal.append(tx, session_journal(session), "scope.dropped", body, at=desk.ledger.now())
    for digest in gone:
        drop_body(tx, desk.ledger.store.bodies, digest)


def apply_cap(desk: Desk, session: SessionId) -> None:
    """After the cap was changed: the oldest scopes go at once if they hold more."""
    with desk.ledger.store.write() as tx:
        _evict_over_cap(desk, tx, session, keep=None)


def _evict_over_cap(desk: Desk, tx: Tx, session: SessionId, *, keep: str | None) -> None:
    """Oldest first, in order of insertion, never the one being written."""
    cap = cap_of(tx, session)
    rows = sorted(tx.select(SCOPES, {"session": session}), key=lambda row: row.seq)
    sizes = {row.scope: size_of(tx.select(CAPTURES, {"session": session, "scope": row.scope})) for row in rows}
    total = sum(sizes.values())
    for row in rows:
        if total <= cap:
            return
        if row.scope != keep:
            _drop(desk, tx, session, row.scope, why="evicted")
            total -= sizes[row.scope]


def absolute(desk: Desk, path: RepoPath) -> str:
    return os.fsdecode(os.path.join(desk.disk.root.path, path_bytes(path)))


def whole(desk: Desk, scope: ScopeRow, capture: CaptureRow) -> str:
    """The absolute path of what a scope holds, even if its root is another one, or is gone."""
    with desk.ledger.store.read() as tx:
        row = tx.get(ROOTS, scope.root)
    place = desk.disk.root.path if row is None or row.id == desk.root.id else row.place
    return os.fsdecode(os.path.join(place or b"/", capture.path))
