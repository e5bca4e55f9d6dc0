"""What a controller does: undo operations with their plans, forks, storage, the demo.

An undo operation with `dry_run` answers with its plan and the plan's digest. A request with `If-Match` is carried out
only if the plan still has that digest; otherwise the answer is 412 with the new plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mulligan.boundary.verdict import Boundary
from mulligan.effects.session import DurableSession
from mulligan.history import branches
from mulligan.history import undo as undoing
from mulligan.history.open_root import OpenRoot
from mulligan.history.plan import PlannedChange
from mulligan.history.retention import (
    cap_of,
    collect_garbage,
    pin_call,
    session_usage,
    set_store_cap,
    store_cap_of,
    would_evict,
)
from mulligan.history.undo import UndoOptions, UndoResult
from mulligan.servers.http.diffs import Colouring, FileDiff, diff_view
from mulligan.servers.http.service import Answer, Asked, Service
from mulligan.servers.http.timeline import page_before, session_view
from mulligan.session.tables import SESSIONS
from mulligan.values.entries import Entry, FileEntry, SymlinkEntry, whole
from mulligan.values.errors import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import hunks_from_wire, paths_from_wire, to_wire

DIFFS_SHOWN = 50
EVICTED_SHOWN = 100

Operation = Callable[[UndoOptions], UndoResult]


def undo(service: Service, asked: Asked) -> Answer:
    open_root, row = service.roots.of_call(asked["call"])
    paths, hunks = paths_from_wire(asked.get("paths")), hunks_from_wire(asked.get("hunks"))
    return _carry_out(
        service, asked, open_root, lambda how: undoing.undo(open_root, row.id, paths=paths, hunks=hunks, how=how)
    )


def restore(service: Service, asked: Asked) -> Answer:
    open_root, row = service.roots.of_call(asked["call"])
    paths, hunks = paths_from_wire(asked.get("paths")), hunks_from_wire(asked.get("hunks"))
    return _carry_out(
        service, asked, open_root, lambda how: undoing.restore(open_root, row.id, paths=paths, hunks=hunks, how=how)
    )


def rollback(service: Service, asked: Asked) -> Answer:
    open_root, session = _session(service, asked)
    cancel = asked["cancel_open"]
    return _carry_out(
        service,
        asked,
        open_root,
        lambda how: undoing.rollback(open_root, how=replace(how, session=session), cancel_open=cancel),
    )


def redo(service: Service, asked: Asked) -> Answer:
    open_root, session = _session(service, asked)
    return _carry_out(service, asked, open_root, lambda how: undoing.redo(open_root, how=replace(how, session=session)))


def rewind(service: Service, asked: Asked) -> Answer:
    open_root, session = _session(service, asked)

    def go(how: UndoOptions) -> UndoResult:
        return undoing.rewind(
            open_root,
            asked["to"],
            side=asked["side"],
            files=asked["files"],
            transcript=asked["transcript"],
            how=replace(how, session=session),
        )

    return _carry_out(service, asked, open_root, go)


def _session(service: Service, asked: Asked) -> tuple[OpenRoot, SessionId]:
    open_root, row = service.roots.of_session(asked["session"])
    return open_root, SessionId(row.id)


def _carry_out(service: Service, asked: Asked, open_root: OpenRoot, operation: Operation) -> Answer:
    how = UndoOptions(asked["on_conflict"], git=asked["git"])
    if asked["dry_run"]:
        return Answer(_plan_view(service, open_root, operation, how))
    try:
        return Answer(_result_view(operation(replace(how, if_match=asked.if_match))))
    except MulliganError as error:
        if asked.if_match is None or "digest" not in error.details:
            raise
        plan = _plan_view(service, open_root, operation, how)
        words = "The files have changed since this plan was made; here is the new plan."
        return Answer({"error": {"code": "conflict", "message": words}, "plan": plan}, status=412)


def _result_view(result: UndoResult, *, dry_run: bool = False) -> dict[str, Any]:
    return {**result.to_json(), "dry_run": dry_run, "of": list(result.of), "digest": result.digest, "diffs": []}


def _plan_view(service: Service, open_root: OpenRoot, operation: Operation, how: UndoOptions) -> dict[str, Any]:
    """A plan with the diff of each path. The diff of a path that stays as it is shows what `overwrite` would do."""
    result = operation(replace(how, dry_run=True))
    body = _result_view(result, dry_run=True)
    if result.plan is None:
        return body
    moves = {move.path: move for move in result.plan.moves}
    left = {one.path for one in result.plan.outcomes if one.outcome in ("conflicted", "skipped")} - moves.keys()
    if left and how.on_conflict != "overwrite":
        forced = operation(replace(how, dry_run=True, on_conflict="overwrite")).plan
        moves = {move.path: move for move in (() if forced is None else forced.moves) if move.path in left} | moves
    colouring = Colouring(service.colours)
    body["diffs"] = [_move_diff(service, open_root, move, colouring) for move in list(moves.values())[:DIFFS_SHOWN]]
    return body


def _move_diff(service: Service, open_root: OpenRoot, move: PlannedChange, colouring: Colouring) -> dict[str, Any]:
    """What would become of one path."""
    image = None if move.path.startswith("/") else open_root.image(move.path)

    def read(entry: Entry) -> bytes:
        if isinstance(entry, SymlinkEntry):
            return entry.target.encode("utf-8", "surrogateescape")
        if not isinstance(entry, FileEntry):
            return b""
        if entry is move.target and move.content is not None:
            return whole(move.content)
        if image is not None and isinstance(image.entry, FileEntry) and image.entry.digest == entry.digest:
            return image.data
        return service.ledger.blobs.read(entry.digest)

    return diff_view(FileDiff(to_wire(move.path), move.now, move.target), read, colouring)


# Forks.


def fork(service: Service, asked: Asked) -> Answer:
    """A child session, at a point if one is given.

    With `dry_run`, the answer says what would be made: how many messages it begins with, and the paths that its copy of
    the files would have as they were at the point.
    """
    open_root, session = _session(service, asked)
    if asked["dry_run"]:
        plan = branches.plan_fork(open_root, session, at=asked.get("at"))
        outcomes = [one.to_json() for one in plan.files.outcomes] if asked["files"] == "copy" else []
        body = {"dry_run": True, "parent_id": session, "at": asked.get("at"), "files": asked["files"]}
        return Answer({**body, "messages": plan.messages, "outcomes": outcomes})
    make = branches.fork if asked["files"] == "share" else branches.fork_files
    made = make(open_root, session, at=asked.get("at"))
    body = {"dry_run": False, "session_id": made.session, "parent_id": made.parent, "directory": made.directory}
    with service.ledger.store.read() as tx:
        row = tx.get(SESSIONS, made.session)
        body["session"] = None if row is None else session_view(tx, row)
    return Answer({**body, "files": asked["files"], "coverage": [dict(gap) for gap in made.coverage]}, status=201)


def merge(service: Service, asked: Asked) -> Answer:
    """Bring a fork's files back, as one call of its parent."""
    open_root, session = _session(service, asked)

    def go(how: UndoOptions) -> UndoResult:
        return branches.merge_branch(
            open_root, session, on_conflict=how.on_conflict, dry_run=how.dry_run, if_match=how.if_match
        )

    return _carry_out(service, asked, _source_of(service, open_root, session), go)


def _source_of(service: Service, open_root: OpenRoot, session: str) -> OpenRoot:
    return service.roots.get(branches.branch_of(open_root, session).source)


def drop(service: Service, asked: Asked) -> Answer:
    """Delete a fork's files. With `dry_run`, the answer names the folder that would go."""
    open_root, session = _session(service, asked)
    directory = branches.branch_of(open_root, session).directory.decode("utf-8", "replace")
    if not asked["dry_run"]:
        branches.drop_branch(open_root, session)
    return Answer({"dry_run": asked["dry_run"], "session_id": session, "directory": directory})


def pin(service: Service, asked: Asked) -> Answer:
    _, row = service.roots.of_call(asked["call"])
    pin_call(service.ledger, row, off=not asked["pinned"])
    return Answer({"call_id": row.id, "pinned": asked["pinned"]})


# Storage.


def storage(service: Service, asked: Asked) -> Answer:
    """Sizes and caps, sessions, newest first, and the calls that eviction would empty next."""
    store = service.ledger.store
    with store.read() as tx:
        newest = sorted(tx.select(SESSIONS), key=lambda row: (row.created_at, row.id), reverse=True)
        page, cursor = page_before(newest, asked)
        sessions: list[dict[str, Any]] = [
            {
                "session_id": one.session,
                "calls": one.calls,
                "bytes": one.bytes,
                "cap": cap_of(tx, SessionId(one.session)),
            }
            for one in (session_usage(tx, SessionId(row.id)) for row in page)
        ]
        body: dict[str, Any] = {"size": store.size_bytes(), "cap": store_cap_of(tx)}
        evicted = would_evict(tx, asked["cap"] or body["cap"], size=body["size"], limit=EVICTED_SHOWN + 1)
    body |= {"would_evict": evicted[:EVICTED_SHOWN], "would_evict_more": len(evicted) > EVICTED_SHOWN}
    return Answer({**body, "sessions": sessions, "next": cursor, "gc": dict(service.gc)})


def set_cap(service: Service, asked: Asked) -> Answer:
    evicted = set_store_cap(service.ledger, asked["cap"])
    return Answer({"cap": asked["cap"], "evicted": evicted})


def collect(service: Service, asked: Asked) -> Answer:
    """Begin to delete what nothing names. `GET /storage` tells how far it is."""
    with service.gc_lock:
        if service.gc["state"] == "running":
            return Answer(dict(service.gc), status=202)
        service.gc.update(state="running", stage="blobs checked", done=0, total=0, blobs=0, bytes=0, message=None)
    threading.Thread(target=_collect, args=(service,), name="mulligan-gc", daemon=True).start()
    return Answer(dict(service.gc), status=202)


def _collect(service: Service) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        service.gc.update(stage=stage, done=done, total=total)

    try:
        blobs, size = collect_garbage(service.ledger, progress)
        service.ledger.store.reclaim_space()
    except MulliganError as error:
        service.gc.update(state="failed", message=error.message)
    else:
        service.gc.update(state="done", blobs=blobs, bytes=size)


def demo(service: Service, asked: Asked) -> Answer:
    if service.try_demo is None:
        raise fault("bad_usage", "This server has no demo.")
    return Answer({"root_id": service.try_demo()}, status=201)


def live_session(service: Service, session: str) -> DurableSession:
    """A session with its clients. Raises `session_not_found` and `session_closed`."""
    open_root, row = service.roots.of_session(session)
    return DurableSession(
        open_root, SessionId(row.id), Boundary(open_root.disk.root.path.decode("utf-8", "surrogateescape"))
    )
