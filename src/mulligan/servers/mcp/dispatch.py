"""Runs a tool call, for both transports. The servers import this module with the first call: it is slow to load.

The `history_*` tools are defined here: their parameters as pydantic models, from which `table` makes the schemas.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from mulligan.boundary.capability import clamped
from mulligan.boundary.verdict import Boundary
from mulligan.effects.context import session_boundary
from mulligan.effects.params import Params, parsed_exactly
from mulligan.effects.perform import perform
from mulligan.effects.receipt import refusal_receipt
from mulligan.effects.registry import BY_NAME as EFFECTS
from mulligan.effects.registry import Effect
from mulligan.effects.running_commands import running_commands_of
from mulligan.effects.session_boundary import HistoryAccess
from mulligan.effects.snapshot_tools.context import RequestInfo, SnapshotContext
from mulligan.effects.snapshot_tools.store import failure_of
from mulligan.effects.snapshot_tools.tools import BY_NAME as SUBSTRATE
from mulligan.effects.snapshot_tools.tools import run_tool
from mulligan.history import branches, undo
from mulligan.history.log import call_view, diff_view, find_call, log_view
from mulligan.history.open_root import OpenRoot
from mulligan.history.plan import OnConflict
from mulligan.history.undo import UndoOptions
from mulligan.servers.mcp.protocol import (
    INVALID_PARAMS,
    Body,
    Peer,
    Progress,
    RequestCancelledError,
    RpcError,
    Running,
    label_of,
    turn_of,
)
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import MulliganError, Refused, fault
from mulligan.values.ids import SessionId, TurnId, parse_user_id
from mulligan.values.paths import hunks_from_wire, paths_from_wire

Schema = dict[str, Any]

_OBJECT: Schema = {"type": "object"}
_UNDO_ANSWER: Schema = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "call_id": {"type": "string", "description": "The call that made the changes; missing for a dry run."},
        "outcomes": {"type": "array", "items": {"type": "object"}},
        "overwrote_external": {"type": "array", "items": {"type": "string"}},
        "digest": {"type": "string", "description": "Of the plan of a dry run; see if_match."},
        "rescue": {"type": "string", "description": "The call to undo if you want the earlier state again."},
        "error": {"type": "object"},
    },
}
_FORK_ANSWER: Schema = {
    "type": "object",
    "properties": {
        "session_id": {"type": "string"},
        "parent_id": {"type": "string"},
        "directory": {"type": "string", "description": "Where its files are, if not shared."},
        "coverage": {"type": "array", "items": _OBJECT},
        "error": {"type": "object"},
    },
}

HunkIndex = Annotated[int, Field(ge=0, le=1_000_000)]
CallName = Annotated[str, Field(description="A call: its id, its label, or a unique part of its id.")]


class Log(Params):
    limit: int = Field(20, ge=1, le=1000)
    everyone: bool | None = Field(
        None, description="List all sessions of the root. This is the default if no session_id is given."
    )


class OfCall(Params):
    call: CallName


class Undo(Params):
    """What undo, redo, restore, rollback and rewind have in common."""

    on_conflict: OnConflict = Field("merge", description="What to do if somebody changed the same file since.")
    dry_run: bool = Field(False, description="Only say what would happen.")
    if_match: str | None = Field(
        None, description="The digest that a dry run answered: do it only if the plan is still the same."
    )


class UndoPart(Undo):
    """What undo and restore can be limited to."""

    paths: list[str] | None = Field(None, description="Only these paths.")
    hunks: dict[str, list[HunkIndex]] | None = Field(
        None, description="By path: only these hunks of the call's change, counted from 0."
    )


class UndoCall(UndoPart):
    call: CallName | None = None


class Restore(UndoPart):
    call: CallName


class Rollback(Undo):
    cancel_open: bool = Field(False, description="Cancel a turn that still runs.")


class Rewind(Undo):
    to: CallName
    side: Literal["before", "after"] = "before"


class Fork(Params):
    at: CallName | None = None
    files: Literal["share", "copy"] = "share"


class HistoryView(NamedTuple):
    """The history of a root, as far as a session may see and change it."""

    open_root: OpenRoot
    session: SessionId
    judge: HistoryAccess

    @property
    def tells(self) -> dict[str, Any]:
        """What an answer may tell. Commands and prompts may quote any file, so a limited session gets none."""
        return {"may_tell": self.judge.may_tell, "tells_words": self.judge.home.allows_everywhere("read")}

    def how(self, asked: Undo) -> UndoOptions:
        may_write = self.judge.may_write
        return UndoOptions(asked.on_conflict, asked.dry_run, self.session, may_write=may_write, if_match=asked.if_match)


def _log(view: HistoryView, asked: Log) -> Body:
    session = view.session if asked.everyone is False else None
    return {"calls": log_view(view.open_root, session, limit=asked.limit, **view.tells)}


def _show(view: HistoryView, asked: OfCall) -> Body:
    row = find_call(view.open_root, asked.call)
    with view.open_root.ledger.store.read() as tx:
        return call_view(view.open_root, tx, row, **view.tells)


def _diff(view: HistoryView, asked: OfCall) -> Body:
    view.judge.boundary.check_op("read")
    found = diff_view(view.open_root, find_call(view.open_root, asked.call), partial(view.judge.may_tell, content=True))
    text = found.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    capability = view.judge.boundary.capability
    limit = clamped(capability.max_read_bytes, capability.max_inline_bytes)
    if limit is not None and len(text.encode("utf-8")) > limit:
        raise fault("inline_required_too_large", f"The diff is longer than the {limit} bytes that fit in an answer.")
    return {"diff": text}


def _undo(view: HistoryView, asked: UndoCall) -> Body:
    paths, hunks = paths_from_wire(asked.paths), hunks_from_wire(asked.hunks)
    return undo.undo(view.open_root, asked.call, paths=paths, hunks=hunks, how=view.how(asked)).to_json()


def _redo(view: HistoryView, asked: Undo) -> Body:
    return undo.redo(view.open_root, how=view.how(asked)).to_json()


def _restore(view: HistoryView, asked: Restore) -> Body:
    paths, hunks = paths_from_wire(asked.paths), hunks_from_wire(asked.hunks)
    return undo.restore(view.open_root, asked.call, paths=paths, hunks=hunks, how=view.how(asked)).to_json()


def _rollback(view: HistoryView, asked: Rollback) -> Body:
    return undo.rollback(view.open_root, how=view.how(asked), cancel_open=asked.cancel_open).to_json()


def _rewind(view: HistoryView, asked: Rewind) -> Body:
    return undo.rewind(view.open_root, asked.to, side=asked.side, how=view.how(asked)).to_json()


def _fork(view: HistoryView, asked: Fork) -> Body:
    """A copy holds every file, so only a session that may read every file gets one. Mulligan chooses the folder."""
    if asked.files == "share":
        made = branches.fork(view.open_root, view.session, at=asked.at)
    elif view.judge.home.allows_everywhere("read"):
        made = branches.fork_files(view.open_root, view.session, at=asked.at)
    else:
        raise fault("forbidden", "This session may not read every file, so it cannot have a copy of all of them.")
    return {
        "session_id": made.session,
        "parent_id": made.parent,
        "directory": made.directory,
        "coverage": list(made.coverage),
    }


class HistoryTool(NamedTuple):
    """One `history_*` tool: what it does, in a sentence for the model; its parameters; its code; its answer."""

    about: str
    params: type[Params]
    run: Callable[[HistoryView, Any], Body]
    answer: Schema = _UNDO_ANSWER
    read_only: bool = False
    destructive: bool = True


def _properties(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


HISTORY: Mapping[str, HistoryTool] = {
    "history_log": HistoryTool(
        "List recorded calls and outside edits of this root, newest first.",
        Log,
        _log,
        _properties(calls={"type": "array", "items": _OBJECT}),
        read_only=True,
    ),
    "history_show": HistoryTool("Show one call and what it changed.", OfCall, _show, _OBJECT, read_only=True),
    "history_diff": HistoryTool(
        "Show what a call changed, as a unified diff.",
        OfCall,
        _diff,
        _properties(diff={"type": "string"}),
        read_only=True,
    ),
    "history_undo": HistoryTool(
        "Undo one call and keep later work; without a call, this session's newest call that is not undone.",
        UndoCall,
        _undo,
    ),
    "history_redo": HistoryTool("Redo the last undo, restore, rollback or rewind of this session.", Undo, _redo),
    "history_restore": HistoryTool("Put the paths of a call back to what they were before it.", Restore, _restore),
    "history_rollback": HistoryTool("Undo the last completed turn of this session.", Rollback, _rollback),
    "history_rewind": HistoryTool("Undo everything that a session did from a call on.", Rewind, _rewind),
    "history_fork": HistoryTool(
        "Start a child session that shares the files, or has a copy of all of them beside the store.",
        Fork,
        _fork,
        _FORK_ANSWER,
        destructive=False,
    ),
}


def failed_body(error: MulliganError | Refused) -> Body:
    return {"error": {"code": error.code, "message": error.message}}


def run_history(
    open_root: OpenRoot, name: str, given: Mapping[str, Any], session: SessionId, *, boundary: Boundary
) -> tuple[Body, bool]:
    """The answer, without what is null, and whether it is a failure: a fault, or an undo operation with conflicts."""
    tool = HISTORY[name]
    try:
        asked = parsed_exactly(tool.params, given)
        judge = HistoryAccess.of(open_root, session, session_boundary(open_root, session, default=boundary))
        body = tool.run(HistoryView(open_root, session, judge), asked)
    except (MulliganError, Refused) as error:
        return failed_body(error), True
    return {key: value for key, value in body.items() if value is not None}, body.get("ok") is False


PROGRESS_EVERY_S = 0.1


class Place(NamedTuple):
    """The folder in which the tools work."""

    open_root: OpenRoot
    snapshots: SnapshotContext


class Toolbox:
    """The tools of one root. Thread-safe. Close it.

    `session` is the default session; without it, each root and client has its own. With it, a call that names another
    session may do no more there than in the default one: a model must not choose its own permissions.
    """

    def __init__(self, open_root: OpenRoot, boundary: Boundary, session: str | None = None) -> None:
        self._boundary = boundary
        self._session = session
        self._places = [Place(open_root, SnapshotContext(open_root, boundary))]
        self._moving = threading.Lock()

    def close(self) -> None:
        for place in self._places:
            place.snapshots.close()

    def call(self, name: str, arguments: object, meta: Mapping[str, Any], *, peer: Peer, running: Running) -> Body:
        """The result of `tools/call`. Raises RpcError, and RequestCancelledError for a cancelled call."""
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments is an object.")
        given = dict(arguments)
        session = given.pop("session_id", None)
        if name == "history_log" and session is not None:
            given.setdefault("everyone", False)  # a client that names a session wants only its calls
        try:
            place = self._place()
            named = self._named(place, session, meta, peer=peer, running=running)
            result = tool_result(*self._done(place, name, given, named=named, running=running))
        except (MulliganError, Refused) as error:
            result = failed_result(name, error)
        if running.cancelled:
            raise RequestCancelledError
        return result

    def _place(self) -> Place:
        """The folder that has the root's path now. Calls in a folder that had this path before can finish."""
        path = self._places[-1].open_root.disk.root.path
        try:
            with self._moving:
                current = self._places[-1]
                if not os.path.samestat(os.stat(path), os.fstat(current.open_root.disk.root.handle)):
                    open_root = self._places[0].open_root.elsewhere(path, record=True)
                    current = Place(open_root, SnapshotContext(open_root, self._boundary))
                    self._places.append(current)
                return current
        except OSError as error:
            shown = os.fsdecode(path)
            raise fault("unknown_root", f"{shown}, the root of this server, is gone: {error.strerror}.") from None

    def _named(
        self, place: Place, session: object, meta: Mapping[str, Any], *, peer: Peer, running: Running
    ) -> RequestInfo:
        default = self._session or f"mcp:{peer.client[:100]}:{place.open_root.root.id}"
        chosen = default if session is None else parse_user_id(session, "session_id")
        turn = turn_of(meta)
        within = self._boundary
        if self._session is not None and chosen != self._session:
            within = session_boundary(place.open_root, SessionId(self._session), default=within).boundary
        return RequestInfo(
            SessionId(chosen),
            label=label_of(meta),
            turn=None if turn is None else TurnId(turn),
            began=lambda call: running.began(lambda: running_commands_of(place.open_root).stop(call.id)),
            may_commit=running.settle,
            within=within,
        )

    def _done(
        self, place: Place, name: str, given: Body, *, named: RequestInfo, running: Running
    ) -> tuple[Body, bool, str | None]:
        if name in SUBSTRATE:
            outcome = run_tool(place.snapshots, SUBSTRATE[name], given, named)
            return outcome.body, outcome.is_error, outcome.call_id
        if name in HISTORY:
            if not running.settle():  # an undo operation is one step: a cancel is in time only before it
                raise RequestCancelledError
            within = named.within or self._boundary
            return (*run_history(place.open_root, name, given, named.session, boundary=within), None)
        return self._performed(place.open_root, EFFECTS[name], given, named=named, running=running)

    def _performed(
        self, open_root: OpenRoot, effect: Effect, given: Body, *, named: RequestInfo, running: Running
    ) -> tuple[Body, bool, str | None]:
        call = open_root.call(named.session, turn=named.turn, label=named.label, tool=effect.tool)
        sink = None if running.progress is None else _Ticker(running.progress)
        with call:
            named.began(call)
            receipt = perform(open_root, call, effect.name, given, boundary=named.within or self._boundary, sink=sink)
            if not receipt.ok or not named.may_commit():
                call.abort(receipt.error_code or "cancelled")
        return receipt.to_dict(), receipt.status != "ok", call.id


class _Ticker:
    """Reports a command's output as progress: the number of bytes and the last line."""

    def __init__(self, tell: Progress) -> None:
        self._tell = tell
        self._size = 0
        self._next_s = 0.0

    def write(self, stream: str, data: bytes) -> None:
        self._size += len(data)
        if monotonic_s() >= self._next_s:
            self._next_s = monotonic_s() + PROGRESS_EVERY_S
            line = data.rstrip().rpartition(b"\n")[2][-200:]
            self._tell(float(self._size), line.decode("utf-8", "replace"))


def tool_result(body: Body, failed: bool, call_id: str | None) -> Body:
    """The result twice: as structure, and as text for hosts that show only text."""
    result: Body = {
        "content": [{"type": "text", "text": encode(body).decode("utf-8")}],
        "structuredContent": body,
        "isError": failed,
    }
    return result if call_id is None else {**result, "_meta": {"mulligan/callId": call_id}}


def failed_result(name: str, error: MulliganError | Refused) -> Body:
    """An error in the form of the tool that failed."""
    if name in SUBSTRATE:
        body = failure_of(error).envelope()
    elif name in HISTORY:
        body = failed_body(error)
    else:
        body = refusal_receipt(name, Refused("error", error.code, error.message)).to_dict()
    return tool_result(body, True, None)
