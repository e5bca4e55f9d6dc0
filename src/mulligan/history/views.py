"""History as it is shown: calls and changes as plain values, diffs as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from mulligan.history.desk import Desk
from mulligan.history.log import LOG_LIMIT, as_it_happened, calls_of, changes_of, coverage_of_call, status_shown
from mulligan.history.sites import main_of, shown_by, with_parts
from mulligan.history.tables import ROOTS, TURNS, CallRow, TurnRow
from mulligan.store.protocol import Tx
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
        return [_view(desk, tx, row, parts=(row,), may_tell=may_tell) for row in rows]


def call_view(desk: Desk, tx: Tx, row: CallRow, may_tell: MayTell = _anything) -> dict[str, Any]:
    """One call, with what it did in other roots."""
    return _view(desk, tx, row, parts=_all_of(tx, row), may_tell=may_tell)


def _all_of(tx: Tx, row: CallRow) -> Sequence[CallRow]:
    """The call and its parts, in the order they were made. A part is nothing but itself."""
    return sorted(with_parts(tx, [row]), key=lambda one: one.id) if main_of(row) == row.id else (row,)


def _view(desk: Desk, tx: Tx, row: CallRow, *, parts: Sequence[CallRow], may_tell: MayTell) -> dict[str, Any]:
    changes = [one for one in _changes_shown(desk, tx, parts) if _may_tell_of(one, may_tell)]
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
        "changes": [_change_view(desk, tx, change, moved=moved) for change in changes],
        "coverage": [gap for gap in _gaps_shown(desk, tx, parts) if may_tell(text_from_wire(gap["path"]))],
    }


def _changes_shown(desk: Desk, tx: Tx, parts: Iterable[CallRow]) -> Iterator[Change]:
    """What calls changed, at the paths the desk shows."""
    for row in parts:
        shown = shown_by(tx, desk, tx.get(ROOTS, row.root) or desk.root)
        for one in changes_of(tx, row.id):
            origin = None if one.renamed_from is None else shown(one.renamed_from)
            yield replace(one, path=shown(one.path), renamed_from=origin)


def _gaps_shown(desk: Desk, tx: Tx, parts: Iterable[CallRow]) -> Iterator[dict[str, str]]:
    for row in parts:
        shown = shown_by(tx, desk, tx.get(ROOTS, row.root) or desk.root)
        for gap in coverage_of_call(tx, row):
            yield {**gap, "path": to_wire(shown(RepoPath(text_from_wire(gap["path"]))))}


def _may_tell_of(change: Change, may_tell: MayTell) -> bool:
    return may_tell(change.path) and (change.renamed_from is None or may_tell(change.renamed_from))


def _moved(changes: Iterable[Change]) -> dict[RepoPath | None, Entry]:
    """What was at the paths that only went elsewhere in the same call."""
    gone = {one.path: one.before for one in changes if isinstance(one.after, Absent)}
    names = [one.renamed_from for one in changes if isinstance(one.before, Absent)]
    return {name: gone[name] for name in names if name in gone}


def _change_view(desk: Desk, tx: Tx, change: Change, *, moved: Mapping[RepoPath | None, Entry]) -> dict[str, Any]:
    """Lines that moved with their file count neither where they went nor where they came from."""
    before = moved.get(change.renamed_from, change.before)
    added, removed = (0, 0) if change.path in moved else _counts(desk, tx, before, change.after)
    body: dict[str, Any] = {
        "path": to_wire(change.path),
        "kind": kind_of_change(change),
        "added": added,
        "removed": removed,
    }
    if change.renamed_from is not None:
        body["from"] = to_wire(change.renamed_from)
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
    """What a call changed, as a diff that `git apply` takes as long as it is all text and in this root."""
    with desk.ledger.store.read() as tx:
        changes = [one for one in _changes_shown(desk, tx, _all_of(tx, row)) if may_tell(one.path)]
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
        path_before=None if had is None or path is None else _in_diff(path),
        path_after=None if has is None else _in_diff(change.path),
        mode_before=had or 0o644,
        mode_after=has or 0o644,
    )


def _in_diff(path: RepoPath) -> RepoPath:
    """Git writes the slash of a whole path once, with that of its prefix."""
    return RepoPath(path.removeprefix("/"))


def _git_mode(entry: Entry) -> int | None:
    """None for what a diff does not show: nothing, or a directory."""
    if isinstance(entry, FileEntry):
        return entry.mode
    return 0o120000 if isinstance(entry, SymlinkEntry) else None


def turn_of(tx: Tx, row: CallRow) -> TurnRow | None:
    return tx.get(TURNS, row.session, row.turn) if row.session is not None else None
