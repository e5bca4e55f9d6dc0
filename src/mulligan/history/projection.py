"""How each kind of record folds into the tables. Pure rules: the same records always give the same rows.

`root.opened`     a root and the workspace it belongs to
`turn.opened`, `turn.ended`
`call.begun`      exactly one per call
`call.changed`    a part of its changes, at most a few hundred a record, before its end
`call.ended`      exactly one per call: how it ended, and what of the past it took back
`call.evicted`    its bodies were dropped
`paths.evicted`   only those of its largest paths were, because it alone was over the cap; its coverage says so
`call.pinned`, `call.unpinned`
`scope.captured`, `scope.dropped`   preimages under an id that the caller chose
`branch.opened`   a fork with files of its own
`branch.ended`    it was merged or dropped
`external`        a change that no call of ours made
`snapshot.created`, `snapshot.derived`  an immutable state of files, and what it was made from
`snapshot.evicted`  bodies of a snapshot were dropped, and at last itself
`message.…`, `event.appended`, `facts.set`, `window.changed`, `session.…`   the transcript; see `session.tables`
`committed`       in the workspace's journal: a call's position among the calls of all sessions
`root.set_aside`, `root.aside_ended`  a sandboxed root is written in a copy; the copy was merged or dropped
`slices.changed`  items of typed state that came and went
`checkpoint.recorded`  the state around a tool call
`token.created`, `token.touched`, `token.expired`   in the store's journal: bearer tokens by their handles

`SCHEMA` is everything that a Mulligan store holds, in one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mulligan.files.snapshot.manifest import (
    LEASE_PATHS,
    LEASES,
    LINEAGE,
    SNAPSHOTS,
    project_snapshot_created,
    project_snapshot_derived,
    project_snapshot_evicted,
)
from mulligan.history.cause import WORK, PartOfCall, UndoOperation, cause_from_json
from mulligan.history.tables import (
    BRANCHES,
    CALL_PARTS,
    CALLS,
    CAPTURES,
    CHANGES,
    KEPT,
    KEPT_ROOTS,
    OPEN,
    PINS,
    REDO,
    ROOTS,
    SCOPES,
    TAKEN_IN_PART,
    TOUCHES,
    TURNS,
    WATCH_WINDOWS,
    BranchRow,
    CallPartRow,
    CallRow,
    CaptureRow,
    ChangeRow,
    PinRow,
    RedoRow,
    RootRow,
    ScopeRow,
    TakenInPartRow,
    TurnRow,
)
from mulligan.session.roots import (
    ENDED_SANDBOXED_ROOTS,
    SANDBOXED_ROOTS,
    project_sandboxed_root,
    project_sandboxed_root_ended,
)
from mulligan.session.state.slice_rows import (
    CHANGED,
    RECORDED,
    SLICE_TABLES,
    project_checkpoint_recorded,
    project_slices_changed,
)
from mulligan.session.tables import (
    BOUNDARIES,
    CLIENTS,
    GRAPH_TABLES,
    INSERTED,
    SESSIONS,
    TRANSCRIPT_TABLES,
    project_boundary_attached,
    project_boundary_ended,
    project_event,
    project_facts,
    project_message,
    project_session_closed,
    project_session_opened,
    project_session_reopened,
    project_window,
    session_of,
)
from mulligan.session.tokens import (
    LAST_SEEN,
    TOKENS,
    project_token_created,
    project_token_expired,
    project_token_touched,
)
from mulligan.store.blobs import BLOBS, BODIES
from mulligan.store.journal import FORGOTTEN, HEADS, RECORDS, REFS, SEALED, Projector, Record, Schema
from mulligan.store.protocol import CLAIMS, OWNERS, Tx
from mulligan.values.canonical import encode
from mulligan.values.paths import bytes_from_wire, path_from_bytes, to_wire

REDOABLE_VERBS = frozenset({"undo", "restore", "rollback", "rewind"})
"""Verbs whose calls `redo` can undo."""

UNDO_VERBS = REDOABLE_VERBS | {"redo"}
"""Verbs whose calls `undo` without a call id never chooses."""


def _root_opened(tx: Tx, record: Record) -> None:
    body = record.payload
    # Rows of the joined workspaces move; their records stay in the journals in which they were written.
    for joined in body.get("joins", ()):
        for root in tx.select(ROOTS, {"workspace": joined}):
            tx.update(ROOTS, root.id, workspace=body["workspace"])
        for call in tx.select(CALLS, {"workspace": joined}):
            tx.update(CALLS, call.id, workspace=body["workspace"])
    place, key = key_from_wire(body["place"]), key_from_wire(body.get("key", body["place"]))
    _put_root(tx, RootRow(body["root"], body["workspace"], place, body["identity"], body.get("host", ""), key))
    for other, text in body.get("keys", {}).items():
        row = tx.get(ROOTS, other)
        assert row is not None, "a root has a key since it is on record"
        _put_root(tx, replace(row, key=key_from_wire(text)))


def _put_root(tx: Tx, root: RootRow) -> None:
    before = tx.get(ROOTS, root.id)
    # Any name shows whether the keys of the files change.
    if before is not None and before.place_of(_ANY_NAME) != root.place_of(_ANY_NAME):
        _move_changes(tx, root)
    tx.put(ROOTS, root)


def key_to_wire(key: bytes) -> str:
    """A path, or the key of a root, as text."""
    tree, slash, path = key.partition(b"/")
    return tree.decode("ascii") + "/" + (to_wire(path_from_bytes(path)) if slash and path else "")


def key_from_wire(text: str) -> bytes:
    tree, _, path = text.partition("/")
    return tree.encode("ascii") + (b"/" + bytes_from_wire(path) if path.strip("/") else b"")


_ANY_NAME = b"A"


def _move_changes(tx: Tx, root: RootRow) -> None:
    """Move the recorded changes of a root to its new key, because its files kept their paths in it."""
    for call in tx.select(CALLS, {"workspace": root.workspace}):
        for change in tx.select(CHANGES, {"call": call.id}) if call.root == root.id else ():
            tx.update(CHANGES, call.id, change.path, place=root.place_of(change.path))


def _turn_opened(tx: Tx, record: Record) -> None:
    body = record.payload
    tx.put(TURNS, TurnRow(body["session"], body["turn"], body["prompt"], 1, record.at, None))


def _turn_ended(tx: Tx, record: Record) -> None:
    tx.update(TURNS, record.payload["session"], record.payload["turn"], ended_at=record.at)


def _call_begun(tx: Tx, record: Record) -> None:
    body = record.payload
    body_of_cause, root = body.get("cause"), tx.get(ROOTS, body["root"])
    cause = WORK if body_of_cause is None else cause_from_json(body_of_cause)
    tx.put(
        CALLS,
        CallRow(
            id=body["call"],
            session=body["session"],
            turn=body["turn"],
            label=body.get("label"),
            tool=body.get("tool"),
            status="open",
            cause=_text(body_of_cause) if body_of_cause else None,
            way_back=cause.verb if cause.verb in UNDO_VERBS else None,
            observed=int(body.get("observed", False)),
            external=0,
            root=body["root"],
            # The writer may not have known that another process opened a root around this one.
            workspace=body["workspace"] if root is None else root.workspace,
            started_at=record.at,
        ),
    )
    if isinstance(cause, PartOfCall):
        tx.put(CALL_PARTS, CallPartRow(cause.part_of, body["call"]))
    # A call outside any turn has its own id as its turn, and then there is no row.
    if body["turn"] != body["call"] and tx.get(TURNS, body["session"], body["turn"]) is None:
        tx.put(TURNS, TurnRow(body["session"], body["turn"], None, 0, record.at, None))


def _call_changed(tx: Tx, record: Record) -> None:
    _put_changes(tx, record.payload["call"], record.payload)


def _put_changes(tx: Tx, call: str, body: Mapping[str, Any]) -> None:
    root = tx.get(ROOTS, body["root"])
    assert root is not None, "a root is recorded before anything in it changes"
    for change in body["changes"]:
        path = bytes_from_wire(change["path"])
        origin = change.get("from")
        before, after = encode(change["before"]), encode(change["after"])
        from_path = None if origin is None else bytes_from_wire(origin)
        tx.put(CHANGES, ChangeRow(call, path, root.place_of(path), body["wseq"], before, after, from_path))


def _call_ended(tx: Tx, record: Record) -> None:
    body = record.payload
    call = tx.get(CALLS, body["call"])
    assert call is not None, "a call begins before it ends"
    if body["changes"]:
        _put_changes(tx, call.id, body)
    tx.update(
        CALLS,
        call.id,
        status=body["status"],
        ended_at=record.at,
        wseq=body.get("wseq"),
        reason=body.get("reason"),
        coverage=_text(body["coverage"]) if "coverage" in body else "[]",
    )
    if body["status"] == "committed" and call.session is not None:
        if call.cause is not None:
            _follow_cause(tx, call, changed=body.get("wseq") is not None)
        # New work ends redo: redo would restore states that no longer fit.
        elif body.get("wseq") is not None:
            _end_redo(tx, call.session)


def _follow_cause(tx: Tx, call: CallRow, *, changed: bool) -> None:
    """Apply the cause of a committed call: mark the calls that it undid, and change the redo stack of its session."""
    cause, session = call.why, call.session
    assert session is not None, "only what no call made has none"
    if isinstance(cause, PartOfCall) and (cause.verb is not None or cause.late):
        # The undo operation of this part marks the undone calls. A process that writes on is no new work.
        return
    if not isinstance(cause, UndoOperation):
        if changed:
            _end_redo(tx, session)
        return
    if cause.verb == "redo":
        for target in cause.of:
            tx.delete(REDO, session, target)
    else:
        tx.put(REDO, RedoRow(session, call.id))
        for target in cause.part:
            tx.put(TAKEN_IN_PART, TakenInPartRow(target, call.id))
    _mark_undone(tx, cause.of, by=call.id)


def _end_redo(tx: Tx, session: str) -> None:
    for row in tx.select(REDO, {"session": session}):
        tx.delete(REDO, row.session, row.call)


def _message_appended(tx: Tx, record: Record) -> None:
    """A new message ends redo, because the transcript continues from here."""
    project_message(tx, record)
    _end_redo(tx, session_of(record.journal))


def _window_changed(tx: Tx, record: Record) -> None:
    """A reset of the context window ends undo and redo of messages."""
    project_window(tx, record)
    if record.payload["verb"] == "reset":
        _end_redo(tx, session_of(record.journal))


def _mark_undone(tx: Tx, targets: Sequence[str], *, by: str) -> None:
    """Mark calls as undone by an undo operation, for as long as the operation itself is not undone."""
    for target in targets:
        row = tx.get(CALLS, target)
        # The first undo of a call counts; a later one finds it undone already.
        if row is not None and row.undone_by is None:
            tx.update(CALLS, row.id, undone_by=by)
            _unmark_undone(tx, row)


def _unmark_undone(tx: Tx, operation: CallRow) -> None:
    """Mark the calls of an undone undo operation as not undone, except those that an earlier operation had undone."""
    # Oldest first: the reverse of the order in which the operation undid them.
    for target in reversed(operation.undoes.of):
        row = tx.get(CALLS, target)
        if row is not None and row.undone_by == operation.id:
            tx.update(CALLS, row.id, undone_by=None)
            _mark_undone(tx, row.undoes.of, by=row.id)


def _call_evicted(tx: Tx, record: Record) -> None:
    tx.update(CALLS, record.payload["call"], evicted=1)


def _call_pinned(tx: Tx, record: Record) -> None:
    tx.put(PINS, PinRow(record.payload["call"]))


def _call_unpinned(tx: Tx, record: Record) -> None:
    tx.delete(PINS, record.payload["call"])


def _branch_opened(tx: Tx, record: Record) -> None:
    body = record.payload
    directory = bytes_from_wire(body["directory"].lstrip("/"))
    row = BranchRow(
        session=body["session"],
        parent=body["parent"],
        source=body["source"],
        root=body["root"],
        directory=b"/" + directory,
        manifest=body["manifest"],
        created_at=record.at,
        status="open",
    )
    tx.put(BRANCHES, row)


def _branch_ended(tx: Tx, record: Record) -> None:
    tx.update(BRANCHES, record.payload["session"], status=record.payload["status"])


def _scope_captured(tx: Tx, record: Record) -> None:
    body = record.payload
    session, scope = body["session"], body["scope"]
    # A scope is a fold of several records; the first one opens it.
    if tx.get(SCOPES, session, scope) is None:
        tx.put(SCOPES, ScopeRow(session, scope, body["taken_at_ms"], record.seq, body["root"]))
    for one in body["captured"]:
        path = bytes_from_wire(one["path"])
        # The first capture of a path in a scope wins.
        if not tx.has(CAPTURES, session, scope, path):
            tx.put(CAPTURES, CaptureRow(session, scope, path, encode(one["before"])))


def _scope_dropped(tx: Tx, record: Record) -> None:
    session, scope = record.payload["session"], record.payload["scope"]
    tx.delete(SCOPES, session, scope)
    for row in tx.select(CAPTURES, {"session": session, "scope": scope}):
        tx.delete(CAPTURES, session, scope, row.path)


def _external(tx: Tx, record: Record) -> None:
    body = record.payload
    tx.put(
        CALLS,
        CallRow(
            id=body["id"],
            session=None,
            turn=body["id"],
            label=None,
            tool=None,
            status="committed",
            cause=None,
            observed=0,
            external=1,
            root=body["root"],
            workspace=body["workspace"],
            started_at=record.at,
            ended_at=record.at,
            wseq=record.seq,
            reason=body.get("reason"),
        ),
    )
    _mark_undone(tx, body.get("undoes", ()), by=body["id"])
    for call in body.get("redoes", ()):
        tx.update(CALLS, call, undone_by=None)
    # An external change has its position by its own record: no `committed` record gives it one.
    _put_changes(tx, body["id"], {**body, "wseq": record.seq})


def _text(value: object) -> str:
    return encode(value).decode("utf-8")


PROJECTORS: Mapping[str, Projector] = MappingProxyType(
    {
        "session.opened": project_session_opened,
        "boundary.attached": project_boundary_attached,
        "boundary.ended": project_boundary_ended,
        "snapshot.created": project_snapshot_created,
        "snapshot.derived": project_snapshot_derived,
        "snapshot.evicted": project_snapshot_evicted,
        "root.opened": _root_opened,
        "turn.opened": _turn_opened,
        "turn.ended": _turn_ended,
        "call.begun": _call_begun,
        "call.changed": _call_changed,
        "call.ended": _call_ended,
        "call.evicted": _call_evicted,
        "call.pinned": _call_pinned,
        "call.unpinned": _call_unpinned,
        "scope.captured": _scope_captured,
        "scope.dropped": _scope_dropped,
        "branch.opened": _branch_opened,
        "branch.ended": _branch_ended,
        "external": _external,
        "message.appended": _message_appended,
        INSERTED: project_message,
        "event.appended": project_event,
        "facts.set": project_facts,
        "window.changed": _window_changed,
        "session.closed": project_session_closed,
        "session.reopened": project_session_reopened,
        "root.set_aside": project_sandboxed_root,
        "root.aside_ended": project_sandboxed_root_ended,
        CHANGED: project_slices_changed,
        RECORDED: project_checkpoint_recorded,
        "token.created": project_token_created,
        "token.touched": project_token_touched,
        "token.expired": project_token_expired,
    }
)


SCHEMA = Schema(
    tables=(
        *(RECORDS, HEADS, REFS, BLOBS, BODIES, OWNERS, CLAIMS),
        *(SESSIONS, BOUNDARIES, ROOTS, TURNS, CALLS, CALL_PARTS, TAKEN_IN_PART, CHANGES, REDO),
        *(PINS, BRANCHES, SCOPES, CAPTURES),
        *(OPEN, TOUCHES, KEPT, KEPT_ROOTS, WATCH_WINDOWS),
        *TRANSCRIPT_TABLES,
        *SLICE_TABLES,
        *GRAPH_TABLES,
        *(TOKENS, LAST_SEEN, CLIENTS, SANDBOXED_ROOTS, ENDED_SANDBOXED_ROOTS),
        *(SNAPSHOTS, LINEAGE, LEASES, LEASE_PATHS),
    ),
    projectors=PROJECTORS,
    unfolded=frozenset(
        {
            *("committed", "paths.evicted", "session.forked", "session.imported"),
            *("snapshot.bodies", "store.lost", "store.power_cut", SEALED, FORGOTTEN),
        }
    ),
)
