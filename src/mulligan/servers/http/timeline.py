"""What the page reads: roots, sessions, calls, diffs, files, blame, transcripts, search."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from mulligan.files.diff import looks_binary, split_lines
from mulligan.history import call_about
from mulligan.history.blame import BEFORE_HISTORY, blame
from mulligan.history.cause import UndoOperation
from mulligan.history.log import (
    PointInHistory,
    as_it_happened,
    call_view,
    calls_of,
    changes_between,
    coverage_of_call,
    entry_at,
    found_by,
    point_named,
    status_shown,
)
from mulligan.history.multi_root import main_of, shown_by, with_parts
from mulligan.history.open_root import OpenRoot
from mulligan.history.outcome_text import gap_reason
from mulligan.history.tables import (
    BRANCHES,
    CALL_PARTS,
    CALLS,
    CHANGES,
    PINS,
    REDO,
    ROOTS,
    TURNS,
    CallRow,
    RootRow,
    change_from_row,
)
from mulligan.servers.http.diffs import Colouring, FileDiff, content_reader, diff_view, entry_view, shown_text
from mulligan.servers.http.roots import branch_at, root_view
from mulligan.servers.http.service import Answer, Asked, Service, root_asked
from mulligan.session.lifecycle import call_begin_seq
from mulligan.session.tables import SESSIONS, SessionRow
from mulligan.session.transcript_log import entries_in, length_of, number_at, text_of
from mulligan.store.protocol import Tx
from mulligan.values.entries import Absent, Change, DirEntry, Entry, FileEntry, SymlinkEntry, kind_of_change
from mulligan.values.errors import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, from_wire, join, path_bytes, path_from_bytes, to_wire

CHANGES_SHOWN = 8
CHANGES_COUNTED = 200
GAPS_SHOWN = 20
FILES_PER_PAGE = 50
COMMAND_MAX = 400
TITLE_MAX = 200
TEXT_MAX = 8_000
SEARCHED_CALLS = 5_000
SEARCHED_MESSAGES = 500
SEARCHED_SESSIONS = 50
FILE_MAX_BYTES = 32 * 1024 * 1024
_FORK_OF = "Fork of "
_LAST = "\U0010ffff"

Row = TypeVar("Row", RootRow, SessionRow)


def list_roots(service: Service, asked: Asked) -> Answer:
    """In order of path. The cursor is the id of the last one of the page before."""
    page, cursor = page_before(service.roots.rows(), asked)
    with service.ledger.store.read() as tx:
        roots = [{**root_view(tx, row), "title": _title_of_root(tx, row)} for row in page]
    return Answer({"roots": roots, "next": cursor})


def page_before(rows: Sequence[Row], asked: Asked) -> tuple[Sequence[Row], str | None]:
    """The rows that follow the cursor, and the cursor of the next page. A cursor that is gone is at the end."""
    if asked.get("before") is not None:
        at = next((number for number, row in enumerate(rows) if row.id == asked["before"]), len(rows) - 1)
        rows = rows[at + 1 :]
    page = rows[: asked["limit"]]
    return page, page[-1].id if len(rows) > len(page) else None


def _title_of_root(tx: Tx, row: RootRow) -> str | None:
    """The title of the fork that works in it; None for a folder of the user."""
    branch = branch_at(tx, row)
    session = None if branch is None else tx.get(SESSIONS, branch.session)
    return None if session is None else _title_of(tx, session)


# Sessions.


def list_sessions(service: Service, asked: Asked) -> Answer:
    """Newest first. The cursor is the id of the last one of the page before."""
    with service.ledger.store.read() as tx:
        page, cursor = page_before(_sessions_asked(service, tx, asked), asked)
        views = [session_view(tx, row) for row in page]
    return Answer({"sessions": views, "next": cursor})


def _sessions_asked(service: Service, tx: Tx, asked: Asked) -> list[SessionRow]:
    """One session, those of a root's workspace and of its forks, or all that are served; newest first."""
    served = {row.id: row for row in service.roots.known()}
    rows = [row for row in tx.select(SESSIONS, {"anonymous": 0}) if row.root in served]
    if asked.get("session") is not None:
        rows = [row for row in rows if row.id == asked["session"]]
    if asked.get("root") is not None:
        workspace = served[asked["root"]].workspace if asked["root"] in served else None
        near = {row.id for row in served.values() if row.workspace == workspace}
        near |= {one.root for one in tx.select(BRANCHES) if one.source in near}
        rows = [row for row in rows if row.root in near]
    return sorted(rows, key=lambda row: (row.created_at, row.id), reverse=True)


def show_session(service: Service, asked: Asked) -> Answer:
    _, row = service.roots.of_session(asked["session"])
    with service.ledger.store.read() as tx:
        return Answer(session_view(tx, row))


def session_view(tx: Tx, row: SessionRow) -> dict[str, Any]:
    """A session with a name that a person knows it by: what it was first asked."""
    branch = tx.get(BRANCHES, row.id)
    newest = tx.select(CALLS, {"session": row.id}, order=("id",), descending=True, limit=1)
    return {
        "id": row.id,
        "title": _title_of(tx, row),
        "root_id": row.root,
        "parent_id": row.parent,
        "created_at": row.created_at,
        "closed_at": row.closed_at,
        "last_at": newest[0].started_at if newest else row.created_at,
        "messages": length_of(tx, SessionId(row.id)),
        "files": None if branch is None else branch.status,
        "directory": None if branch is None else branch.directory.decode("utf-8", "replace"),
        "redo": tx.count(REDO, {"session": row.id}),
    }


def _title_of(tx: Tx, row: SessionRow) -> str | None:
    """Its first prompt; a fork that got none yet has the title of the session it was made from."""
    turns = tx.select(TURNS, {"session": row.id}, limit=50)
    prompts = sorted((turn.started_at, turn.prompt) for turn in turns if turn.prompt)
    if prompts:
        return prompts[0][1][:TITLE_MAX]
    parent = None if row.parent is None else tx.get(SESSIONS, row.parent)
    title = None if parent is None else _title_of(tx, parent)
    return None if title is None else _FORK_OF + title.removeprefix(_FORK_OF)


def transcript(service: Service, asked: Asked) -> Answer:
    """The messages in force, or those before a call. Newest last; `before` is a number of messages."""
    _, row = service.roots.of_session(asked["session"])
    session, archive = SessionId(row.id), service.archive
    with service.ledger.store.read() as tx:
        stop = length_of(tx, session)
        if asked.get("at") is not None:
            call = tx.get(CALLS, asked["at"])
            seq = None if call is None else call_begin_seq(tx, session, call.id, call.started_at)
            stop = stop if seq is None else min(stop, number_at(tx, session, seq))
        if asked.get("before") is not None:
            stop = min(stop, asked["before"])
        start = max(0, stop - asked["limit"])
        found = [
            {"id": one.id, "at": one.at, "role": one.message["role"], "text": text_of(one.message)[:TEXT_MAX]}
            for one in entries_in(tx, archive, session, start=start, stop=stop)
        ]
    return Answer({"messages": found, "next": start or None})


# Calls.


def list_calls(service: Service, asked: Asked) -> Answer:
    """Newest first; of a session, of a root's workspace, or of every root that is served."""
    newest = service.events.newest
    with service.ledger.store.read() as tx:
        if asked.get("ids") is not None:
            rows = [row for one in asked["ids"].split(",")[:500] if (row := tx.get(CALLS, one)) is not None]
            rows = [row for row in rows if _is_served(service, tx, row)]
            return Answer({"calls": call_rows(service, tx, rows), "next": None, "event": newest})
        found = list(islice(_rows_asked(service, tx, asked), asked["limit"] + 1))
        page = found[: asked["limit"]]
        views = call_rows(service, tx, list(as_it_happened(tx, page)))
        following = min(row.id for row in page) if len(found) > len(page) else None
    return Answer({"calls": views, "next": following, "event": newest})


def _rows_asked(service: Service, tx: Tx, asked: Asked) -> Iterator[CallRow]:
    before = asked.get("before")
    if asked.get("session") is not None:
        open_root, row = service.roots.of_session(asked["session"])
        return calls_of(tx, open_root, SessionId(row.id), before=before)
    if asked.get("root") is not None:
        return calls_of(tx, service.roots.get(asked["root"]), None, before=before)
    return _of_all_roots(service, tx, before or _LAST)


def _of_all_roots(service: Service, tx: Tx, before: str) -> Iterator[CallRow]:
    while page := tx.select(CALLS, between=("id", "", before), order=("id",), descending=True, limit=200):
        yield from (row for row in page if main_of(row) == row.id and _is_served(service, tx, row))
        before = page[-1].id


def _is_served(service: Service, tx: Tx, row: CallRow) -> bool:
    root = tx.get(ROOTS, row.root)
    return root is not None and service.roots.admits(root)


def call_rows(service: Service, tx: Tx, rows: Sequence[CallRow]) -> list[dict[str, Any]]:
    """Lines of the timeline. Their prompts and pins are read together, because a page has many calls of one turn."""
    ids = [row.id for row in rows] or [""]
    pinned = {one.call for one in tx.select(PINS, between=("call", min(ids), max(ids) + "\0"))}
    turns = {(row.session, row.turn) for row in rows}
    found = {key: None if key[0] is None else tx.get(TURNS, *key) for key in turns}
    prompts = {key: turn.prompt for key, turn in found.items() if turn is not None}
    return [
        _call_row(service, tx, row, prompt=prompts.get((row.session, row.turn)), is_pinned=row.id in pinned)
        for row in rows
    ]


def _call_row(service: Service, tx: Tx, row: CallRow, *, prompt: str | None, is_pinned: bool) -> dict[str, Any]:
    why = row.why
    gaps = coverage_of_call(tx, row) if row.coverage != "[]" else []
    finder = found_by(tx, row) if row.external else None
    return {
        "id": row.id,
        # An outside edit is on record only since a call found it, and stands below that call.
        "sort": f"{row.id}~" if finder is None else f"{finder}!{row.id}",
        "root_id": row.root,
        "session_id": row.session,
        "turn_id": row.turn,
        "prompt": None if prompt is None else prompt[:TEXT_MAX],
        "tool": row.tool,
        "label": row.label,
        "command": command_of(service, tx, row),
        "agent": call_about.agent_of(row),
        "status": status_shown(row),
        "external": bool(row.external),
        "verb": why.verb,
        "of": [*why.of, *why.part] if isinstance(why, UndoOperation) else [],
        "undone_by": row.undone_by,
        "reason": row.reason,
        "pinned": is_pinned,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "coverage": gaps[:GAPS_SHOWN],
        "coverage_total": len(gaps),
        **_changes(service, tx, row),
    }


def _changes(service: Service, tx: Tx, row: CallRow) -> dict[str, Any]:
    """The first changes and how many there are. Changes of an ended call never change, so they are kept."""
    known = service.changes.get(row.id)
    if known is not None:
        return known
    try:
        open_root = service.roots.get(row.root)
    except MulliganError:
        return {"changes": [], "files": 0, "added": None, "removed": None}
    parts = tx.select(CALL_PARTS, {"call": row.id})
    total = sum(tx.count(CHANGES, {"call": one}) for one in (row.id, *(part.part for part in parts)))
    if total <= CHANGES_COUNTED:
        changes = call_view(open_root, tx, row)["changes"]
        found = {
            "changes": changes[:CHANGES_SHOWN],
            "files": len(changes),
            "added": sum(one["added"] for one in changes),
            "removed": sum(one["removed"] for one in changes),
        }
    else:
        some = [change_from_row(one) for one in tx.select(CHANGES, {"call": row.id}, limit=CHANGES_SHOWN)]
        found = {"changes": [_plain_change(one) for one in some], "files": total, "added": None, "removed": None}
    if row.status != "open" and not row.evicted:
        service.changes.put(row.id, found)
    return found


def _plain_change(change: Change) -> dict[str, Any]:
    return {"path": to_wire(change.path), "kind": kind_of_change(change), "added": 0, "removed": 0}


def command_of(service: Service, tx: Tx, row: CallRow) -> str | None:
    """The command line of a call that ran one, without secrets."""
    known = service.commands.get(row.id)
    if known is None:
        command = call_about.command_of(tx, row)
        known = "" if command is None else call_about.redacted(command)[:COMMAND_MAX]
        if row.status != "open":
            service.commands.put(row.id, known)
    return known or None


def show_call(service: Service, asked: Asked) -> Answer:
    """One call with a page of its changes; `after` is the last path of the page before."""
    open_root, row = service.roots.of_call(asked["call"])
    with service.ledger.store.read() as tx:
        (view,) = call_rows(service, tx, [row])
        changes = _changes_shown(tx, open_root, row)
        paths = [to_wire(one.path) for one in changes]
        start = paths.index(asked["after"]) + 1 if asked.get("after") in paths else 0
        page = changes[start : start + asked["limit"]]
        counted = {one["path"]: one for one in view["changes"]}
        view["changes"] = [
            {**_plain_change(one), **counted.get(to_wire(one.path), {}), "after": entry_view(one.after)} for one in page
        ]
        more = start + len(page) < len(changes)
        view["next"] = to_wire(page[-1].path) if more and page else None
        gaps = coverage_of_call(tx, row)[:500]
        view["coverage"] = [{**gap, "why": gap_reason(gap["reason"])} for gap in gaps]
    return Answer(view)


def _changes_shown(tx: Tx, open_root: OpenRoot, row: CallRow) -> list[Change]:
    """What a call changed, with its parts in other roots, by the paths that its root shows."""
    found: list[Change] = []
    for part in with_parts(tx, [row]) if main_of(row) == row.id else (row,):
        shown = shown_by(tx, open_root, tx.get(ROOTS, part.root) or open_root.root)
        for one in tx.select(CHANGES, {"call": part.id}):
            change = change_from_row(one)
            found.append(Change(shown(change.path), change.before, change.after, change.renamed_from))
    return found


def show_diff(service: Service, asked: Asked) -> Answer:
    """What a call changed, file by file: the paths that are asked for, else the first ones."""
    open_root, row = service.roots.of_call(asked["call"])
    with service.ledger.store.read() as tx:
        changes = _changes_shown(tx, open_root, row)
    wanted = None if asked.get("paths") is None else [from_wire(one) for one in asked["paths"]]
    chosen = [one for one in changes if wanted is None or one.path in wanted]
    read = content_reader(lambda entry: service.ledger.blobs.read(entry.digest))
    moved = {one.renamed_from: one for one in changes if one.renamed_from is not None}
    was = {one.path: one.before for one in changes if isinstance(one.after, Absent)}
    told = [one for one in chosen if one.path not in moved or not isinstance(one.after, Absent)]
    colouring, files = Colouring(service.colours), []
    for one in told[:FILES_PER_PAGE]:
        before = was.get(one.renamed_from, one.before) if one.renamed_from is not None else one.before
        origin = None if one.renamed_from is None else to_wire(one.renamed_from)
        diff = diff_view(
            FileDiff(to_wire(one.path), before, one.after, origin), read, colouring, lines_max=asked["lines"]
        )
        files.append({**diff, "kind": kind_of_change(one)})
    return Answer({"call_id": row.id, "files": files, "total": len(told)})


def bytes_of_call(service: Service, asked: Asked) -> Answer:
    """A file as a call found it or left it, as bytes to save."""
    open_root, row = service.roots.of_call(asked["call"])
    path = asked.path()
    with service.ledger.store.read() as tx:
        change = next((one for one in _changes_shown(tx, open_root, row) if one.path == path), None)
    entry = None if change is None else (change.before if asked["side"] == "before" else change.after)
    if not isinstance(entry, FileEntry):
        raise fault("path_not_found", f"{path} was not a file there.")
    return _download(path, service.ledger.blobs.read(entry.digest))


def _download(path: str, data: bytes) -> Answer:
    name = path.rpartition("/")[2].encode("ascii", "replace").decode().replace('"', "_").replace("\\", "_")
    shown = "".join(letter if " " <= letter < "\x7f" else "_" for letter in name)
    headers = {"content-type": "application/octet-stream", "content-disposition": f'attachment; filename="{shown}"'}
    return Answer(raw=data, headers=headers)


# Files at a point.


def _entry_and_reader(
    service: Service, open_root: OpenRoot, path: RepoPath, point: PointInHistory | None
) -> tuple[Entry, Callable[[], bytes]]:
    """What a path held at a point, and how to read it: from the store, or from the disk if it has not changed since."""
    if point is not None:
        with service.ledger.store.read() as tx:
            found = entry_at(tx, open_root, path, point)
        if found is not None:
            return found, lambda: content_reader(lambda entry: service.ledger.blobs.read(entry.digest))(found)
    image = open_root.image(path)
    return image.entry, lambda: image.data


def _point(service: Service, open_root: OpenRoot, asked: Asked) -> PointInHistory | None:
    if asked.get("at") is None:
        return None
    with service.ledger.store.read() as tx:
        return point_named(tx, open_root, asked["at"], side=asked["side"])


def show_file(service: Service, asked: Asked) -> Answer:
    """Lines of a file, now or at a point, with token classes."""
    open_root, path = root_asked(service, asked), asked.path()
    entry, read = _entry_and_reader(service, open_root, path, _point(service, open_root, asked))
    body: dict[str, Any] = {"path": to_wire(path), "entry": entry_view(entry), "state": "text", "lines": [], "total": 0}
    if not isinstance(entry, FileEntry | SymlinkEntry):
        return Answer(body | {"state": "dir" if isinstance(entry, DirEntry) else "absent"})
    if isinstance(entry, FileEntry) and entry.size > FILE_MAX_BYTES:
        return Answer(body | {"state": "large"})
    try:
        data = read()
    except MulliganError:
        return Answer(body | {"state": "evicted"})
    if isinstance(entry, SymlinkEntry):
        data = entry.target.encode("utf-8", "surrogateescape")
    if looks_binary(data):
        return Answer(body | {"state": "binary"})
    lines = split_lines(data)
    texts = [shown_text(line) for line in lines[asked["line"] - 1 : asked["line"] - 1 + asked["limit"]]]
    spans = Colouring(service.colours).of(to_wire(path), texts)
    shown = [{"text": text, "spans": some} for text, some in zip(texts, spans, strict=True)]
    return Answer(body | {"lines": shown, "total": len(lines)})


def raw_file(service: Service, asked: Asked) -> Answer:
    open_root, path = root_asked(service, asked), asked.path()
    entry, read = _entry_and_reader(service, open_root, path, _point(service, open_root, asked))
    if not isinstance(entry, FileEntry):
        raise fault("path_not_found", f"{path} is not a file there.")
    return _download(path, read())


def show_tree(service: Service, asked: Asked) -> Answer:
    """The names in one folder, now or at a point."""
    open_root, folder = root_asked(service, asked), asked.path()
    point = _point(service, open_root, asked)
    found: dict[RepoPath, Entry] = {path: open_root.entry(path) for path in open_root.children(folder)}
    if point is not None:
        with service.ledger.store.read() as tx:
            since = changes_between(tx, open_root, point, None)
        for path, change in since.items():
            parent, name = _in_folder(folder, path)
            if name is None:
                continue
            whole = join(folder, name)
            if parent:
                found.setdefault(whole, DirEntry(0o755)) if not isinstance(change.before, Absent) else None
            elif isinstance(change.before, Absent):
                found.pop(whole, None)
            else:
                found[whole] = change.before
    names = sorted(_place_in_tree(path, entry) for path, entry in found.items() if not isinstance(entry, Absent))
    rest = names if asked.get("after") is None else names[bisect_right(names, _place_of_cursor(asked["after"])) :]
    page = rest[: asked["limit"]]
    entries = [
        {"name": name.rpartition(b"/")[2].decode("utf-8", "replace"), "path": to_wire(path), **entry_view(found[path])}
        for (_, name), path in ((place, path_from_bytes(place[1])) for place in page)
    ]
    following = f"{page[-1][0]}{entries[-1]['path']}" if len(rest) > len(page) else None
    return Answer({"path": to_wire(folder), "entries": entries, "total": len(names), "next": following})


def _place_in_tree(path: RepoPath, entry: Entry) -> tuple[int, bytes]:
    """Folders come first; the names of each kind are in the order of their bytes."""
    return int(not isinstance(entry, DirEntry)), path_bytes(path)


def _place_of_cursor(cursor: str) -> tuple[int, bytes]:
    if cursor[:1] not in ("0", "1"):
        raise fault("invalid_params", "after is the `next` of the page before.", field="after")
    return int(cursor[0]), path_bytes(from_wire(cursor[1:]))


def _in_folder(folder: RepoPath, path: RepoPath) -> tuple[bool, str | None]:
    """The name in the folder that leads to a path, and whether the path is deeper than that name."""
    below = path if folder == "." else path[len(folder) + 1 :] if path.startswith(f"{folder}/") else ""
    name, slash, _ = below.partition("/")
    return bool(slash), name or None


def show_blame(service: Service, asked: Asked) -> Answer:
    """Which call, prompt and moment wrote each line of a file as it is now."""
    open_root, path = root_asked(service, asked), asked.path()
    image = open_root.image(path)
    if image.any_content is None or looks_binary(image.data) or len(image.data) > FILE_MAX_BYTES // 8:
        raise fault("path_not_found", f"{path} is not a text file that can be blamed.")
    every = blame(open_root, path)
    lines = every[asked["line"] - 1 : asked["line"] - 1 + asked["limit"]]
    texts = [shown_text(line.line) for line in lines]
    spans = Colouring(service.colours).of(to_wire(path), texts)
    found = [
        {
            "text": text,
            "spans": some,
            "origin": "before" if line.origin == BEFORE_HISTORY else "external" if line.call is None else "call",
            "call_id": None if line.call is None else line.call.id,
            "external": line.call is None or bool(line.call.external),
            "tool": None if line.call is None else line.call.tool or line.call.label,
            "prompt": None if line.turn is None or line.turn.prompt is None else line.turn.prompt[:500],
            "at": None if line.call is None else line.call.started_at,
        }
        for line, text, some in zip(lines, texts, spans, strict=True)
    ]
    return Answer({"path": to_wire(path), "lines": found, "total": len(every)})


# Comparing.


def compare(service: Service, asked: Asked) -> Answer:
    """The files that differ between two points of a root, or between two roots as they are now.

    `after` is the `next` of the page before.
    """
    open_root = root_asked(service, asked)
    other = None if asked.get("other") is None else service.roots.get(asked["other"])
    pairs = _forks(service, open_root, other) if other is not None else _points(service, open_root, asked)
    read = content_reader(lambda entry: service.ledger.blobs.read(entry.digest))
    wanted = None if asked.get("paths") is None else {from_wire(one) for one in asked["paths"]}
    differing = [pair for pair in pairs if pair.change.before != pair.change.after]
    chosen = [pair for pair in differing if wanted is None or pair.change.path in wanted]
    names = [to_wire(pair.change.path) for pair in chosen]
    start = names.index(asked["after"]) + 1 if asked.get("after") in names else 0
    stop = start + FILES_PER_PAGE
    colouring, files = Colouring(service.colours), []
    for pair in chosen[start:stop]:
        diff = FileDiff(to_wire(pair.change.path), pair.change.before, pair.change.after)
        reader = pair.reader or read
        files.append(
            {**diff_view(diff, reader, colouring, lines_max=asked["lines"]), "kind": kind_of_change(pair.change)}
        )
    shown = [one for one in files if one["state"] != "same"]
    return Answer({"files": shown, "total": len(chosen), "next": names[stop - 1] if stop < len(names) else None})


class _Pair:
    """A path on both sides of a comparison, and how its bytes are read, if not from the store."""

    __slots__ = ("change", "reader")

    def __init__(self, change: Change, reader: Callable[[Entry], bytes] | None = None) -> None:
        self.change = change
        self.reader = reader


def _points(service: Service, open_root: OpenRoot, asked: Asked) -> list[_Pair]:
    if asked.get("from") is None:
        raise fault("invalid_params", "Name the point to compare from, or another root.", field="from")
    with service.ledger.store.read() as tx:
        first = point_named(tx, open_root, asked["from"], side=asked["from_side"])
        last = None if asked["to"] == "now" else point_named(tx, open_root, asked["to"], side=asked["to_side"])
        if last is not None and last < first:
            first, last = last, first
        found = changes_between(tx, open_root, first, last)
    if last is not None:
        return [_Pair(change) for change in found.values()]
    return [_now(service, open_root, change) for change in found.values()]


def _now(service: Service, open_root: OpenRoot, change: Change) -> _Pair:
    image = open_root.image(change.path)
    stored = content_reader(lambda entry: service.ledger.blobs.read(entry.digest))

    def read(entry: Entry) -> bytes:
        return image.data if entry is image.entry and isinstance(entry, FileEntry) else stored(entry)

    return _Pair(Change(change.path, change.before, image.entry), read)


def _forks(service: Service, one: OpenRoot, other: OpenRoot) -> list[_Pair]:
    """Both roots as they are now, at the paths that calls have changed in one of them since the fork."""
    with service.ledger.store.read() as tx:
        branch = next(
            (row for row in tx.select(BRANCHES) if {row.root, row.source} & {one.root.id, other.root.id}), None
        )
        since = PointInHistory(0) if branch is None else None
        paths: set[RepoPath] = set()
        for root in (one, other):
            own = next((row for row in tx.select(BRANCHES) if row.root == root.root.id), branch)
            start = since or _point_at(tx, root, "" if own is None else own.created_at)
            paths |= changes_between(tx, root, start, None).keys()
    return [_side_by_side(one, other, path) for path in sorted(paths, key=path_bytes)]


def _point_at(tx: Tx, open_root: OpenRoot, moment: str) -> PointInHistory:
    """The first change in a root after a moment."""
    newer = [row for row in calls_of(tx, open_root, None) if row.wseq is not None and row.started_at >= moment]
    return PointInHistory(min((row.wseq for row in newer if row.wseq is not None), default=2**61))


def _side_by_side(one: OpenRoot, other: OpenRoot, path: RepoPath) -> _Pair:
    mine, theirs = one.image(path), other.image(path)

    def read(entry: Entry) -> bytes:
        return (mine if entry is mine.entry else theirs).data

    return _Pair(Change(path, mine.entry, theirs.entry), read)


# Searching.


def search(service: Service, asked: Asked) -> Answer:
    """Calls whose prompt, command, tool, label or path holds the words, newest first.

    The first page also has the messages of the newest sessions that hold them.
    """
    words = asked["q"].casefold().split()
    if not words:
        raise fault("invalid_params", "Say what to search for.", field="q")
    found: list[dict[str, Any]] = []
    following = None
    with service.ledger.store.read() as tx:
        if asked.get("before") is None:
            for session in _sessions_asked(service, tx, asked)[:SEARCHED_SESSIONS]:
                # Calls get at least half of the page.
                found += _said(service, tx, session, words, limit=asked["limit"] // 2 - len(found))
        for number, row in enumerate(_rows_asked(service, tx, asked), 1):
            hit = _hit(service, tx, row, words)
            if hit is not None:
                found.append(hit)
            if number == SEARCHED_CALLS or len(found) >= asked["limit"]:
                following = row.id
                break
    return Answer({"results": found, "next": following})


def _hit(service: Service, tx: Tx, row: CallRow, words: Sequence[str]) -> dict[str, Any] | None:
    turn = tx.get(TURNS, row.session, row.turn) if row.session is not None else None
    paths = [one.path.decode("utf-8", "replace") for one in tx.select(CHANGES, {"call": row.id}, limit=CHANGES_COUNTED)]
    texts = {
        "prompt": turn.prompt if turn is not None else None,
        "command": command_of(service, tx, row),
        "tool": row.tool,
        "label": row.label,
        "path": next((path for path in paths if all(word in path.casefold() for word in words)), None),
    }
    for where, text in texts.items():
        if text and all(word in text.casefold() for word in words):
            body = {"where": where, "text": text[:300], "call_id": row.id, "session_id": row.session}
            return body | {"root_id": row.root, "at": row.started_at}
    return None


def _said(service: Service, tx: Tx, row: SessionRow, words: Sequence[str], *, limit: int) -> list[dict[str, Any]]:
    session, found = SessionId(row.id), list[dict[str, Any]]()
    stop = length_of(tx, session) if limit > 0 else 0
    for one in entries_in(tx, service.archive, session, start=max(0, stop - SEARCHED_MESSAGES), stop=stop):
        text = text_of(one.message)
        if len(found) < limit and all(word in text.casefold() for word in words):
            body = {"where": "transcript", "text": text[:300], "call_id": None, "session_id": row.id}
            found.append(body | {"root_id": row.root, "at": one.at})
    return found
