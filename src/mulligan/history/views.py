"""History as it is shown: calls and changes as plain values, diffs as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from mulligan.history.desk import Desk
from mulligan.history.log import LOG_LIMIT, as_it_happened, calls_of, changes_of, status_shown
from mulligan.history.tables import ROOTS, TURNS, CallRow, RootRow, TurnRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.entries import Absent, Change, Entry, FileEntry, SymlinkEntry, kind_of_change
from mulligan.values.faults import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, text_from_wire, to_wire
from mulligan.workspace.diffing import line_counts, unified_diff

MayTell = Callable[[str], bool]
"""Whether there may be talk of a path, which is as the desk shows it."""


def _anything(_: str) -> bool:
    return True


def log_view(
    desk: Desk, session: SessionId | None = None, *, limit: int = LOG_LIMIT, may_tell: MayTell = _anything
) -> list[dict[str, Any]]:
    """The newest calls and external changes, newest first."""
    with desk.ledger.store.read() as tx:
        rows = islice(as_it_happened(tx, calls_of(tx, desk, session)), limit)
        return [call_view(desk, tx, row, may_tell) for row in rows]


def call_view(desk: Desk, tx: Tx, row: CallRow, may_tell: MayTell = _anything) -> dict[str, Any]:
    root = tx.get(ROOTS, row.root) or desk.root
    changes = [one for one in changes_of(tx, row.id) if _may_tell_of(desk, root, one, may_tell)]
    moved = _moved(changes)
    return {
        "id": row.id,
        "label": row.label,
        "session_id": row.session,
        "turn_id": row.turn,
        "tool": row.tool,
        "status": status_shown(row),
        "external": bool(row.external),
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "changes": [_change_view(desk, tx, root, change, moved=moved) for change in changes],
        "coverage": [gap for gap in decode(row.coverage) if may_tell(desk.shown(root, _path_of(gap)))],
    }


def _may_tell_of(desk: Desk, root: RootRow, change: Change, may_tell: MayTell) -> bool:
    names = [change.path] if change.renamed_from is None else [change.path, change.renamed_from]
    return all(may_tell(desk.shown(root, name)) for name in names)


def _path_of(gap: Mapping[str, str]) -> RepoPath:
    return RepoPath(text_from_wire(gap["path"]))


def _moved(changes: Iterable[Change]) -> dict[RepoPath | None, Entry]:
    """What was at the paths that only went elsewhere in the same call."""
    gone = {one.path: one.before for one in changes if isinstance(one.after, Absent)}
    names = [one.renamed_from for one in changes if isinstance(one.before, Absent)]
    return {name: gone[name] for name in names if name in gone}


def _change_view(
    desk: Desk, tx: Tx, root: RootRow, change: Change, *, moved: Mapping[RepoPath | None, Entry]
) -> dict[str, Any]:
    """Lines that moved with their file count neither where they went nor where they came from."""
    before = moved.get(change.renamed_from, change.before)
    added, removed = (0, 0) if change.path in moved else _counts(desk, tx, before, change.after)
    body: dict[str, Any] = {
        "path": to_wire(RepoPath(desk.shown(root, change.path))),
        "kind": kind_of_change(change),
        "added": added,
        "removed": removed,
    }
    if change.renamed_from is not None:
        body["from"] = to_wire(RepoPath(desk.shown(root, change.renamed_from)))
    return body


def _counts(desk: Desk, tx: Tx, before: Entry, after: Entry) -> tuple[int, int]:
    try:
        return line_counts(_content(desk, tx, before), _content(desk, tx, after))
    except MulliganError:
        return (0, 0)


def _content(desk: Desk, tx: Tx, entry: Entry) -> bytes:
    """A file's bytes, a link's target; nothing for the rest."""
    if isinstance(entry, FileEntry):
        return desk.ledger.blobs.read_in(tx, entry.digest)
    return entry.target.encode("utf-8", "surrogateescape") if isinstance(entry, SymlinkEntry) else b""


def diff_view(desk: Desk, row: CallRow, may_tell: MayTell = _anything) -> str:
    """What a call changed, as a diff that `git apply` takes."""
    with desk.ledger.store.read() as tx:
        root = tx.get(ROOTS, row.root) or desk.root
        changes = [one for one in changes_of(tx, row.id) if may_tell(desk.shown(root, one.path))]
        moved = _moved(changes)
        told = [one for one in changes if one.path not in moved]
        return "".join(_change_diff(desk, tx, change, came_from=moved.get(change.renamed_from)) for change in told)


def _change_diff(desk: Desk, tx: Tx, change: Change, *, came_from: Entry | None) -> str:
    """`came_from`: what was at the path it was moved from, and is nowhere else now."""
    path, was = (change.path, change.before) if came_from is None else (change.renamed_from, came_from)
    try:
        before, after = _content(desk, tx, was), _content(desk, tx, change.after)
    except MulliganError as error:
        return f"# {change.path}: {error.message}\n"
    had, has = _git_mode(was), _git_mode(change.after)
    return unified_diff(
        before,
        after,
        path_before=None if had is None else path,
        path_after=None if has is None else change.path,
        mode_before=had or 0o644,
        mode_after=has or 0o644,
    )


def _git_mode(entry: Entry) -> int | None:
    """None for what a diff does not show: nothing, or a directory."""
    if isinstance(entry, FileEntry):
        return entry.mode
    return 0o120000 if isinstance(entry, SymlinkEntry) else None


def turn_of(tx: Tx, row: CallRow) -> TurnRow | None:
    return tx.get(TURNS, row.session, row.turn) if row.session is not None else None
