"""Reads history: lists the calls, what each changed, and finds the call that a person names.

It shows calls and changes as plain values, and diffs as text.

It also computes the files at a point of history (`entry_at`, `changes_between`), without changing any file. A point
lies between two changes of a workspace. A path then held what the first change after the point found; a path without
such a change still holds the same. So this costs as much time as there were changes since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

from mulligan.files.diff import DiffHunk, hunks_of, line_counts, looks_binary, split_lines, unified_diff
from mulligan.history.call_about import CallAbout, about_call, agent_of
from mulligan.history.ledger import STORE_FULL
from mulligan.history.multi_root import contains, main_of, path_in_root, shown_by, with_parts
from mulligan.history.open_root import OpenRoot, root_elsewhere
from mulligan.history.partial_undo import left_by_conflicts
from mulligan.history.plan import OnConflict
from mulligan.history.tables import (
    CALLS,
    CHANGES,
    OBSERVED_WHILE_FULL,
    OPEN,
    ROOTS,
    TURNS,
    WSEQ_END,
    CallRow,
    TurnRow,
    change_from_row,
    changes_of,
)
from mulligan.session.roots import ENDED_SANDBOXED_ROOTS
from mulligan.store.blobs import BLOBS, LOST
from mulligan.store.host import known_host
from mulligan.store.journal import HEADS, STORE_JOURNAL
from mulligan.store.protocol import Tx, Value
from mulligan.values.canonical import decode
from mulligan.values.digest import raw_digest
from mulligan.values.entries import (
    Absent,
    Change,
    Entry,
    FileEntry,
    SymlinkEntry,
    kind_of_change,
)
from mulligan.values.errors import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, path_bytes, text_from_wire, to_wire

LOG_LIMIT = 100
_FIRST_PAGE, _PAGE = 8, 200
_SHORT_ID_MIN = 4
_NO_GAPS = "[]"
"""The `coverage` of a call without gaps. Lists of gaps are larger as texts."""
_OVERLAP = 200
"""If this many successive calls ended before a point, all earlier ones did too."""
_NEXT_CHANGES = 8
"""The number of later changes that are read after an outside edit, because other such edits may come before the call's
change.
"""
_STANDS: Mapping[str, Value] = MappingProxyType({"status": "committed", "undone_by": None, "way_back": None})


def coverage_of_call(tx: Tx, call: CallRow) -> list[dict[str, str]]:
    """The gaps of the call, and its blobs that a power cut destroyed later."""
    gaps: list[dict[str, str]] = decode(call.coverage)
    if call.status == "open" and (row := tx.get(OPEN, call.id)) is not None and row.observed == OBSERVED_WHILE_FULL:
        gaps = [*gaps, STORE_FULL]
    return [*gaps, *_lost_of(tx, call)] if has_lost_bodies(tx) else gaps


def has_lost_bodies(tx: Tx) -> bool:
    """Whether a record says that a power cut destroyed bytes of this store."""
    return tx.get(HEADS, STORE_JOURNAL) is not None


def _lost_of(tx: Tx, call: CallRow) -> Iterator[dict[str, str]]:
    for change in changes_of(tx, call.id):
        files = [entry for entry in (change.before, change.after) if isinstance(entry, FileEntry)]
        rows = [tx.get(BLOBS, raw_digest(entry.digest)) for entry in files]
        if any(row is not None and row.place == LOST for row in rows):
            yield {"path": to_wire(change.path), "reason": "lost"}


def workspace_of(tx: Tx, open_root: OpenRoot) -> str:
    """The present workspace of a root: opening a root around it may have changed it."""
    row = tx.get(ROOTS, open_root.root.id)
    return open_root.root.workspace if row is None else row.workspace


def calls_of(
    tx: Tx,
    open_root: OpenRoot,
    session: SessionId | None,
    *,
    before: str | None = None,
    after: str = "",
    only: Mapping[str, Value] = MappingProxyType({}),
) -> Iterator[CallRow]:
    """Calls and external changes of a session, or of the whole workspace, newest first, read in pages.

    `only`: columns and the values they must have.
    """
    whose, hidden = _whose(tx, open_root, session)
    where = {**whose, **only}
    # Ids are UUIDv7, so their order is the order in which the calls began.
    upper, lower = before or "\U0010ffff", after + "\0" if after else ""
    limit = _FIRST_PAGE
    while True:
        page = tx.select(CALLS, where, between=("id", lower, upper), order=("id",), descending=True, limit=limit)
        yield from (row for row in page if row.root not in hidden) if hidden else page
        if len(page) < limit:
            return
        # The first page is small, because most callers want only the newest call.
        upper, limit = page[-1].id, _PAGE


def _whose(tx: Tx, open_root: OpenRoot, session: SessionId | None) -> tuple[dict[str, Value], frozenset[str]]:
    """What the rows of calls of a session, or of the whole workspace, have; and the roots whose calls are left out."""
    # Without a session, all sessions of the workspace count, because they share the files.
    if session is not None:
        return {"session": session}, frozenset()
    return {"workspace": workspace_of(tx, open_root)}, _hidden_roots(tx, open_root)


def count_of_calls(tx: Tx, open_root: OpenRoot, session: SessionId | None) -> int:
    """How many calls `calls_of` yields. Counting reads an index; a long history has more rows than a verb can read."""
    whose, hidden = _whose(tx, open_root, session)
    return tx.count(CALLS, whose) - sum(tx.count(CALLS, {**whose, "root": root}) for root in hidden)


def listed(tx: Tx, open_root: OpenRoot, session: SessionId | None, calls: Iterable[str]) -> list[CallRow]:
    """Those of the calls that `calls_of` yields."""
    whose, hidden = _whose(tx, open_root, session)
    rows = [row for call in calls if (row := tx.get(CALLS, call)) is not None and row.root not in hidden]
    return [row for row in rows if all(getattr(row, name) == value for name, value in whose.items())]


def calls_with_gaps(tx: Tx, open_root: OpenRoot, session: SessionId | None) -> list[CallRow]:
    """The calls that may have gaps, newest first: the record of a call lists them, or the call is still open."""
    if has_lost_bodies(tx):
        return list(calls_of(tx, open_root, session))
    whose, hidden = _whose(tx, open_root, session)
    noted = tx.select(CALLS, whose, between=("coverage", _NO_GAPS + "\0", "\U0010ffff"))
    rows = [*noted, *listed(tx, open_root, session, (one.call for one in tx.select(OPEN)))]
    found = {row.id: row for row in rows if row.root not in hidden}
    return sorted(found.values(), key=lambda row: row.id, reverse=True)


def _hidden_roots(tx: Tx, open_root: OpenRoot) -> frozenset[str]:
    """Roots of this workspace whose directory is not the one at their path any more."""
    # Read anew: another process may have opened a root around this one since.
    own = tx.get(ROOTS, open_root.root.id) or open_root.root
    return frozenset(row.id for row in tx.select(ROOTS, {"workspace": own.workspace}) if row.tree != own.tree)


def as_it_happened(tx: Tx, rows: Iterable[CallRow]) -> Iterator[CallRow]:
    """Calls in order of their begin, newest first, with outside edits moved below the calls that found them.

    Mulligan records an outside edit only when a call reads the file, so the edit's id is younger than the call's.
    """
    found: dict[str, list[CallRow]] = {}
    for row in rows:
        # People expect their edit before the call that ran into it.
        finder = found_by(tx, row) if row.external else None
        if finder is None:
            yield row
            yield from found.pop(row.id, ())
        else:
            found.setdefault(finder, []).append(row)
    # The call that found the edit is outside of the given rows, so nothing is there to wait for.
    for left in found.values():
        yield from left


def found_by(tx: Tx, edit: CallRow) -> str | None:
    """The call that ran when an outside edit was recorded, and then changed the same file."""
    # The edit is recorded just before the change of the call that found it.
    later = ("wseq", (edit.wseq or 0) + 1, WSEQ_END)
    for change in tx.select(CHANGES, {"call": edit.id}):
        upon = tx.select(CHANGES, {"place": change.place}, between=later, order=("wseq",), limit=_NEXT_CHANGES)
        for row in upon:
            if row.call < edit.id:
                return row.call
    return None


def newest_to_undo(
    tx: Tx, open_root: OpenRoot, session: SessionId | None, *, on_conflict: OnConflict = "merge"
) -> CallRow | None:
    """The call that `undo` undoes if the caller names none.

    It skips a call of which only a conflict is left, unless the caller overwrites: else each undo would end in the same
    conflict. A call whose bodies are all evicted is chosen only if there is no other.
    """
    dropped: CallRow | None = None
    for row in calls_of(tx, open_root, session, only=_STANDS):
        is_meant = can_be_undone(row) and (row.root == open_root.root.id or is_reachable(tx, open_root, row))
        if is_meant and (on_conflict == "overwrite" or not left_by_conflicts(tx, [row])):
            if not row.evicted or _is_left(tx, open_root, row):
                return row
            # Remembered, but an older call that can still be undone wins.
            dropped = dropped or row
    return dropped


def _is_left(tx: Tx, open_root: OpenRoot, evicted: CallRow) -> bool:
    """Whether something of an evicted call can still be restored: bytes that are still stored, or an absence."""
    changes = (change for one in with_parts(tx, [evicted]) for change in changes_of(tx, one.id))
    was = (change.before for change in changes)
    return any(not isinstance(entry, FileEntry) or open_root.ledger.blobs.has(tx, entry.digest) for entry in was)


def sessions_at_work(tx: Tx, open_root: OpenRoot, since: str) -> dict[str, CallRow]:
    """The sessions whose agents have committed a change in this workspace since then, each with its newest such call.

    Undo operations do not count: a person may have done those in the agent's session.
    """
    found: dict[str, CallRow] = {}
    before = 0
    for row in calls_of(tx, open_root, None, only={"status": "committed", "external": 0, "way_back": None}):
        if row.session is None or row.wseq is None:
            continue
        if (row.ended_at or "") >= since:
            found.setdefault(row.session, row)
        # Calls that ran side by side end in another order than they began.
        before = before + 1 if (row.ended_at or "") < since else 0
        if before >= _OVERLAP:
            break
    return found


def is_reachable(tx: Tx, open_root: OpenRoot, row: CallRow) -> bool:
    """Whether the files are still where the call changed them: a sandboxed root's copy goes once it is merged.

    What a session did in a root of another host, or in a directory that is not there, is not.
    """
    if row.root == open_root.root.id:
        return True
    root, own = tx.get(ROOTS, row.root), tx.get(ROOTS, open_root.root.id) or open_root.root
    if root is None or tx.has(ENDED_SANDBOXED_ROOTS, row.root):
        return False
    return (root.workspace, root.tree) == (own.workspace, own.tree) or open_root.sees(root)


def open_calls_of(tx: Tx, session: SessionId) -> list[CallRow]:
    rows = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.session == session]
    return [row for row in rows if row is not None]


def find_call(open_root: OpenRoot, name: str, session: SessionId | None = None, *, anyones: bool = False) -> CallRow:
    """The call that a name means: its id, the newest call with that label, or a unique beginning or end of an id.

    It is a call of that session; without a session, of this workspace. An external change belongs to no session, so
    only its whole id means it; with `anyones`, a whole id means any call of this workspace.
    """
    if not isinstance(name, str):
        raise fault("invalid_params", "A call is named by its id or its label.", field="call")
    name = name.encode("utf-8", "backslashreplace").decode("utf-8")  # no store holds, or looks for, lone surrogates
    with open_root.ledger.store.read() as tx:
        # First an exact id in the session, then one in the workspace (an external change, or with `anyones` any call),
        # then the newest call with the label.
        own: Mapping[str, Value] = {"id": name}
        others = own if anyones else {**own, "external": 1}
        for whose, only in ((session, own), (None, others), (session, {"label": name})):
            for row in calls_of(tx, open_root, whose, only=only):
                # A part has the label of its call. In another root than the call's, only the part is found.
                return row if session is None or row.id == name else tx.get(CALLS, main_of(row)) or row
        ends = len(name) >= _SHORT_ID_MIN
        short = [r for r in calls_of(tx, open_root, session) if ends and (r.id.endswith(name) or r.id.startswith(name))]
        # Rather than "unknown", say that the call belongs to a root that is elsewhere.
        if not short:
            _refuse_elsewhere(tx, open_root, name)
    if len(short) == 1:
        return short[0]
    here = "here" if session is None else f"of session {session!r}"
    words = f"is not a call {here}" if not short else f"could be any of {len(short)} calls; write more of it"
    raise fault("unknown_call", f"{name!r} {words}. `mulligan log` lists the calls.", call=name)


def _refuse_elsewhere(tx: Tx, open_root: OpenRoot, name: str) -> None:
    """Raise `root_elsewhere` for a call of another root that this process does not see.

    Every root knows a call by its whole id.
    """
    call = tx.get(CALLS, name)
    root = None if call is None else tx.get(ROOTS, call.root)
    if root is not None and not open_root.sees(root):
        raise root_elsewhere(root, known_host(tx, os.environ))


def can_be_undone(row: CallRow) -> bool:
    """Whether `undo` without a call id would undo the call: it is an agent's work, committed and not undone."""
    is_kept = row.status == "committed" and row.undone_by is None and row.wseq is not None
    return is_kept and not row.external and row.way_back is None


def is_open_turn(tx: Tx, session: str, turn: str) -> bool:
    """Whether a turn runs: a caller opened it and has not ended it, or it has an open call."""
    # Hooks and agents open turns; calls outside of them have a turn id without a row of that kind.
    row: TurnRow | None = tx.get(TURNS, session, turn)
    if row is not None and row.is_open:
        return True
    rows = tx.select(CALLS, {"session": session, "turn": turn}, order=("id",))
    return any(call.status == "open" for call in rows)


def status_shown(row: CallRow) -> str:
    if row.status != "committed":
        return row.status
    return "evicted" if row.evicted else "undone" if row.undone_by is not None else row.status


MayTell = Callable[[str], bool]
"""Whether an answer may name a path, given as the open root shows it."""


def _anything(_: str) -> bool:
    return True


def log_view(
    open_root: OpenRoot,
    session: SessionId | None = None,
    *,
    limit: int = LOG_LIMIT,
    may_tell: MayTell = _anything,
    tells_words: bool = True,
    only: Callable[[Tx, CallRow], bool] | None = None,
) -> list[dict[str, Any]]:
    """The newest calls and external changes, newest first.

    `only` chooses among them. Without `tells_words`, commands and prompts are left out, because they may quote files.
    """
    with open_root.ledger.store.read() as tx:
        known = as_it_happened(tx, calls_of(tx, open_root, session))
        rows = islice(known if only is None else (row for row in known if only(tx, row)), limit)
        return [_view(open_root, tx, row, parts=(row,), may_tell=may_tell, tells_words=tells_words) for row in rows]


def call_view(
    open_root: OpenRoot, tx: Tx, row: CallRow, may_tell: MayTell = _anything, *, tells_words: bool = True
) -> dict[str, Any]:
    """One call, with its changes in other roots. `may_tell`, `tells_words`: as in `log_view`."""
    return _view(open_root, tx, row, parts=_all_of(tx, row), may_tell=may_tell, tells_words=tells_words)


def _all_of(tx: Tx, row: CallRow) -> Sequence[CallRow]:
    """The call and its parts, in the order they began. A part has no other parts."""
    return sorted(with_parts(tx, [row]), key=lambda one: one.id) if main_of(row) == row.id else (row,)


def _view(
    open_root: OpenRoot, tx: Tx, row: CallRow, *, parts: Sequence[CallRow], may_tell: MayTell, tells_words: bool
) -> dict[str, Any]:
    gaps = list(_gaps_shown(open_root, tx, parts))
    about = about_call(tx, row, gaps) if tells_words else CallAbout(agent_of(row))
    changes = [one for one in _changes_shown(open_root, tx, parts) if _may_tell_of(one, may_tell)]
    moved = _moved(changes)
    return {
        "id": row.id,
        "label": row.label,
        "session_id": row.session,
        "turn_id": row.turn,
        "tool": row.tool,
        **about.to_json(),
        "status": status_shown(row),
        "external": bool(row.external),
        **({"reason": row.reason} if row.external and row.reason else {}),
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "changes": [_change_view(open_root, tx, change, moved=moved) for change in changes],
        "coverage": [gap for gap in gaps if may_tell(text_from_wire(gap["path"]))],
    }


def _changes_shown(open_root: OpenRoot, tx: Tx, parts: Iterable[CallRow]) -> Iterator[Change]:
    """The changes of calls, at the paths that the open root shows."""
    for row in parts:
        shown = shown_by(tx, open_root, tx.get(ROOTS, row.root) or open_root.root)
        for one in changes_of(tx, row.id):
            origin = None if one.renamed_from is None else shown(one.renamed_from)
            yield replace(one, path=shown(one.path), renamed_from=origin)


def _gaps_shown(open_root: OpenRoot, tx: Tx, parts: Iterable[CallRow]) -> Iterator[dict[str, str]]:
    for row in parts:
        shown = shown_by(tx, open_root, tx.get(ROOTS, row.root) or open_root.root)
        for gap in coverage_of_call(tx, row):
            yield {**gap, "path": to_wire(shown(RepoPath(text_from_wire(gap["path"]))))}


def _may_tell_of(change: Change, may_tell: MayTell) -> bool:
    return may_tell(change.path) and (change.renamed_from is None or may_tell(change.renamed_from))


def _moved(changes: Iterable[Change]) -> dict[RepoPath | None, Entry]:
    """The former entries of the paths that the call only moved."""
    # A move is recorded as one path that went and one that came.
    gone = {one.path: one.before for one in changes if isinstance(one.after, Absent)}
    names = [one.renamed_from for one in changes if isinstance(one.before, Absent)]
    return {name: gone[name] for name in names if name in gone}


def _change_view(
    open_root: OpenRoot, tx: Tx, change: Change, *, moved: Mapping[RepoPath | None, Entry]
) -> dict[str, Any]:
    """One change as a plain value. Lines that moved with their file count as neither added nor removed."""
    # Otherwise a moved file would count as all of its lines added.
    before = moved.get(change.renamed_from, change.before)
    added, removed = (0, 0) if change.path in moved else _counts(open_root, tx, before, change.after)
    body: dict[str, Any] = {
        "path": to_wire(change.path),
        "kind": kind_of_change(change),
        "added": added,
        "removed": removed,
    }
    if change.renamed_from is not None:
        body["from"] = to_wire(change.renamed_from)
    return body


def _counts(open_root: OpenRoot, tx: Tx, before: Entry, after: Entry) -> tuple[int, int]:
    try:
        return line_counts(_content(open_root, tx, before), _content(open_root, tx, after))
    except MulliganError:
        return (0, 0)


def _content(open_root: OpenRoot, tx: Tx, entry: Entry) -> bytes:
    """A file's bytes or a link's target; empty for anything else."""
    if isinstance(entry, FileEntry):
        return open_root.ledger.blobs.read_in(tx, entry.digest)
    return entry.target.encode("utf-8", "surrogateescape") if isinstance(entry, SymlinkEntry) else b""


def diff_view(open_root: OpenRoot, row: CallRow, may_tell: MayTell = _anything) -> str:
    """The changes of a call as a diff. `git apply` accepts it if it is all text and in this root."""
    with open_root.ledger.store.read() as tx:
        changes = [one for one in _changes_shown(open_root, tx, _all_of(tx, row)) if may_tell(one.path)]
        moved = _moved(changes)
        told = [one for one in changes if one.path not in moved]
        return "".join(_change_diff(open_root, tx, change, came_from=moved.get(change.renamed_from)) for change in told)


def file_diffs(open_root: OpenRoot, row: CallRow) -> list[tuple[RepoPath, str]]:
    """The paths that a call changed, each with its diff; a directory has an empty one."""
    with open_root.ledger.store.read() as tx:
        changes = list(_changes_shown(open_root, tx, _all_of(tx, row)))
        return [(change.path, _change_diff(open_root, tx, change, came_from=None)) for change in changes]


def hunks_view(open_root: OpenRoot, row: CallRow) -> list[dict[str, Any]]:
    """The hunks of each text file that a call changed. Undo and restore take their indexes as `hunks`."""
    found: list[dict[str, Any]] = []
    with open_root.ledger.store.read() as tx:
        for change in _changes_shown(open_root, tx, _all_of(tx, row)):
            try:
                before, after = _content(open_root, tx, change.before), _content(open_root, tx, change.after)
            except MulliganError:
                continue
            # A mode change or a binary file has no hunks to choose from.
            if looks_binary(before) or looks_binary(after) or before == after:
                continue
            hunks = hunks_of(split_lines(before), split_lines(after))
            places = [_hunk_view(index, hunk) for index, hunk in enumerate(hunks)]
            found.append({"path": to_wire(change.path), "hunks": places})
    return found


def _hunk_view(index: int, hunk: DiffHunk) -> dict[str, int]:
    return {
        "index": index,
        "old_start": hunk.a_lo + 1,
        "old_lines": hunk.a_hi - hunk.a_lo,
        "new_start": hunk.b_lo + 1,
        "new_lines": hunk.b_hi - hunk.b_lo,
    }


def _change_diff(open_root: OpenRoot, tx: Tx, change: Change, *, came_from: Entry | None) -> str:
    """The diff of one change. `came_from`: the entry of the path that the file was moved from."""
    path, was = (change.path, change.before) if came_from is None else (change.renamed_from, came_from)
    try:
        before, after = _content(open_root, tx, was), _content(open_root, tx, change.after)
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
    """An absolute path without its leading slash, because git's prefix `a/` ends with one."""
    return RepoPath(path.removeprefix("/"))


def _git_mode(entry: Entry) -> int | None:
    """Git's mode; None for an absence and a directory, which a diff does not show."""
    if isinstance(entry, FileEntry):
        return entry.mode
    return 0o120000 if isinstance(entry, SymlinkEntry) else None


def turn_of(tx: Tx, row: CallRow) -> TurnRow | None:
    return tx.get(TURNS, row.session, row.turn) if row.session is not None else None


# The files at a point of history.


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
        # Calls that ran side by side end in another order than they began.
        before = before + 1 if row.wseq < first else 0
        if before >= _OVERLAP:
            break
    return found
