"""history_*: the past of a root as tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mulligan.effects.substrate.shapes import misfit
from mulligan.history import branches, going_back
from mulligan.history.desk import Desk
from mulligan.history.going_back import How
from mulligan.history.log import find_call
from mulligan.history.views import call_view, diff_view, log_view
from mulligan.servers.mcp.listing import read_table
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, from_wire
from mulligan.values.refusal import Refused

Body = dict[str, Any]
Verb = Callable[[Desk, Mapping[str, Any], SessionId], Body]


def _log(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    return {"calls": log_view(desk, None if args.get("everyone", True) else session, limit=args["limit"])}


def _show(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    row = find_call(desk, args["call"])
    with desk.ledger.store.read() as tx:
        return call_view(desk, tx, row)


def _diff(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    text = diff_view(desk, find_call(desk, args["call"]))
    return {"diff": text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")}


def _how(args: Mapping[str, Any], session: SessionId) -> How:
    return How(args["on_conflict"], args["dry_run"], session)


def _paths(args: Mapping[str, Any]) -> list[RepoPath] | None:
    return [from_wire(text) for text in args["paths"]] if "paths" in args else None


def _undo(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    return going_back.undo(desk, args.get("call"), paths=_paths(args), how=_how(args, session)).to_json()


def _redo(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    return going_back.redo(desk, how=_how(args, session)).to_json()


def _restore(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    return going_back.restore(desk, args["call"], paths=_paths(args), how=_how(args, session)).to_json()


def _rollback(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    return going_back.rollback(desk, how=_how(args, session), cancel_open=args["cancel_open"]).to_json()


def _rewind(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    return going_back.rewind(desk, args["to"], side=args["side"], how=_how(args, session)).to_json()


def _fork(desk: Desk, args: Mapping[str, Any], session: SessionId) -> Body:
    if args["files"] == "share":
        made = branches.fork(desk, session)
    elif "to" not in args:
        raise fault("invalid_params", "With files 'copy', `to` says where the copy goes.")
    else:
        made = branches.fork_files(desk, session, args["to"], at=args.get("at"))
    return {
        "session_id": made.session,
        "parent_id": made.parent,
        "directory": made.directory,
        "coverage": list(made.coverage),
    }


HISTORY: Mapping[str, Verb] = {
    "history_log": _log,
    "history_show": _show,
    "history_diff": _diff,
    "history_undo": _undo,
    "history_redo": _redo,
    "history_restore": _restore,
    "history_rollback": _rollback,
    "history_rewind": _rewind,
    "history_fork": _fork,
}

_INPUTS = {tool["name"]: tool["inputSchema"] for tool in read_table().tools["history"]}


def failed_body(error: MulliganError | Refused) -> Body:
    return {"error": {"code": error.code, "message": error.message}}


def run_history(desk: Desk, name: str, given: Mapping[str, Any], session: SessionId) -> tuple[Body, bool]:
    """The answer, without what is null, and whether it is a failure: a fault, or a way back that met conflicts."""
    schema = _INPUTS[name]
    try:
        wrong = misfit(dict(given), schema)
        if wrong is not None:
            raise fault("invalid_params", f"{wrong}.")
        defaults = {key: one["default"] for key, one in schema["properties"].items() if "default" in one}
        body = HISTORY[name](desk, {**defaults, **given}, session)
    except (MulliganError, Refused) as error:
        return failed_body(error), True
    return {key: value for key, value in body.items() if value is not None}, body.get("ok") is False
