"""history_*: the past of a root as tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from mulligan.boundary.verdict import Boundary, clamped
from mulligan.effects.hosting import hosted
from mulligan.effects.judging import Judge
from mulligan.effects.substrate.shapes import misfit, with_whole_numbers
from mulligan.history import branches, going_back
from mulligan.history.desk import Desk
from mulligan.history.going_back import How
from mulligan.history.log import find_call
from mulligan.history.views import call_view, diff_view, log_view
from mulligan.servers.mcp.listing import read_table
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, paths_from_wire
from mulligan.values.refusal import Refused

Body = dict[str, Any]
Args = Mapping[str, Any]


class Past(NamedTuple):
    """The past of a root, as far as a session may see and change it."""

    desk: Desk
    session: SessionId
    judge: Judge

    def how(self, args: Args) -> How:
        return How(args["on_conflict"], args["dry_run"], self.session, may_write=self.judge.may_write)


Verb = Callable[[Past, Args], Body]


def _log(past: Past, args: Args) -> Body:
    session = None if args.get("everyone", True) else past.session
    return {"calls": log_view(past.desk, session, limit=args["limit"], may_tell=past.judge.may_tell)}


def _show(past: Past, args: Args) -> Body:
    row = find_call(past.desk, args["call"])
    with past.desk.ledger.store.read() as tx:
        return call_view(past.desk, tx, row, past.judge.may_tell)


def _diff(past: Past, args: Args) -> Body:
    past.judge.boundary.check_op("read")
    found = diff_view(past.desk, find_call(past.desk, args["call"]), partial(past.judge.may_tell, content=True))
    text = found.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    capability = past.judge.boundary.capability
    limit = clamped(capability.max_read_bytes, capability.max_inline_bytes)
    if limit is not None and len(text.encode("utf-8")) > limit:
        raise fault("inline_required_too_large", f"The diff is longer than the {limit} bytes that fit in an answer.")
    return {"diff": text}


def _paths(args: Args) -> list[RepoPath] | None:
    return paths_from_wire(args.get("paths"))


def _undo(past: Past, args: Args) -> Body:
    return going_back.undo(past.desk, args.get("call"), paths=_paths(args), how=past.how(args)).to_json()


def _redo(past: Past, args: Args) -> Body:
    return going_back.redo(past.desk, how=past.how(args)).to_json()


def _restore(past: Past, args: Args) -> Body:
    return going_back.restore(past.desk, args["call"], paths=_paths(args), how=past.how(args)).to_json()


def _rollback(past: Past, args: Args) -> Body:
    return going_back.rollback(past.desk, how=past.how(args), cancel_open=args["cancel_open"]).to_json()


def _rewind(past: Past, args: Args) -> Body:
    return going_back.rewind(past.desk, args["to"], side=args["side"], how=past.how(args)).to_json()


def _fork(past: Past, args: Args) -> Body:
    """A copy is of everything, so it is for those who may read everything; where it goes is not theirs to say."""
    if args["files"] == "share":
        made = branches.fork(past.desk, past.session, at=args.get("at"))
    elif past.judge.home.admits_everywhere("read"):
        made = branches.fork_files(past.desk, past.session, at=args.get("at"))
    else:
        raise fault("forbidden", "This session may not read every file, so it cannot have a copy of all of them.")
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


def run_history(desk: Desk, name: str, given: Args, session: SessionId, *, boundary: Boundary) -> tuple[Body, bool]:
    """The answer, without what is null, and whether it is a failure: a fault, or a way back that met conflicts."""
    schema = _INPUTS[name]
    given = with_whole_numbers(given)
    try:
        wrong = misfit(given, schema)
        if wrong is not None:
            raise fault("invalid_params", f"{wrong}.")
        defaults = {key: one["default"] for key, one in schema["properties"].items() if "default" in one}
        judge = Judge.of(desk, session, hosted(desk, session, default=boundary))
        body = HISTORY[name](Past(desk, session, judge), {**defaults, **given})
    except (MulliganError, Refused) as error:
        return failed_body(error), True
    return {key: value for key, value in body.items() if value is not None}, body.get("ok") is False
