"""`mulligan call TOOL`: perform any tool or effect as one transaction."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mulligan.cli.doors import work
from mulligan.cli.joining import call_around, join
from mulligan.cli.options import DEFAULT_SESSION, WORKING_SESSION, Common, boundary_options, options_saying
from mulligan.cli.output import print_json

if TYPE_CHECKING:
    from mulligan.opening import Mulligan

_SUBSTRATE = ("snapshot", "workspace")
_HISTORY = "history"


class _Wanted(NamedTuple):
    tool: str
    params: dict[str, Any]
    session: str
    label: str | None
    turn: str | None

    @property
    def family(self) -> str:
        """What a name begins with: `snapshot` of `snapshot_create`, and of `snapshot.create`."""
        return self.tool.replace(".", "_").partition("_")[0]


@click.command()
@click.argument("tool")
@click.option("--args", "arguments", default="{}", metavar="JSON", help="The parameters; '-' reads them from input.")
@click.option("--turn", metavar="ID", help="Calls with the same turn are rolled back together.")
@click.option("--label", metavar="ID", help="A name for the call, such as the provider's tool call id.")
@boundary_options
@options_saying(WORKING_SESSION, as_json="Errors as JSON; the receipt always is.")
def call(
    common: Common, *, tool: str, arguments: str, turn: str | None, label: str | None, capability: Any, policy: Any
) -> None:
    """Perform a tool (edit_file) or effect (host.fs.edit_file) and print its receipt. Not ok: nothing happened.

    The tools of the substrate (snapshot_create) and of history (history_log) are performed too, by either spelling.
    """
    from mulligan.values.canonical import decode
    from mulligan.values.faults import fault

    params = decode(sys.stdin.buffer.read() if arguments == "-" else arguments)
    if not isinstance(params, dict):
        raise fault("invalid_params", "--args takes a JSON object.")
    wanted = _Wanted(tool, params, common.session or DEFAULT_SESSION, label, turn)
    _check_name(wanted)
    around = call_around(common) if _changes_files(wanted) else None
    if around is None:
        with work(common, capability=capability, policy=policy) as opened:
            body, ok = _performed(opened, wanted)
    else:
        around.check_names(session=common.session, turn=turn, label=label)
        with join(common, around, capability=capability, policy=policy) as opened:
            body, ok = _performed(opened, wanted)
        body["call_id"] = around.call
    print_json(body)
    if not ok:
        raise click.exceptions.Exit(1)


def _check_name(wanted: _Wanted) -> None:
    """Before anything is opened. Raises for a tool nobody knows, and for what outlives this process."""
    from mulligan.effects.perform import SESSION_EFFECTS, unknown_effect
    from mulligan.effects.registry import BY_NAME as EFFECT_BY_NAME
    from mulligan.effects.substrate.tools import BY_NAME
    from mulligan.servers.mcp.history_tools import HISTORY
    from mulligan.values.faults import fault

    if wanted.params.get("background"):
        raise fault("invalid_params", "background: the command would end with this one. Use `mulligan mcp` or Python.")
    known = {*SESSION_EFFECTS, *EFFECT_BY_NAME, *BY_NAME, *HISTORY}
    if wanted.tool not in known and wanted.tool.replace(".", "_") not in HISTORY:
        raise unknown_effect(wanted.tool, (name for name in known if "." not in name))


def _changes_files(wanted: _Wanted) -> bool:
    """What only looks, and what is about history, does not have to be part of a call around us."""
    from mulligan.effects.registry import BY_NAME

    effect = BY_NAME.get(wanted.tool)
    return effect is not None and not effect.read_only


def _performed(opened: Mulligan, wanted: _Wanted) -> tuple[dict[str, Any], bool]:
    """What is printed, and whether all went well."""
    from mulligan.effects.perform import SESSION_EFFECTS, perform_session_effect

    if wanted.tool in SESSION_EFFECTS:
        receipt = perform_session_effect(opened.desk, wanted.tool, wanted.params, boundary=opened.boundary)
        return receipt.to_dict(), receipt.ok
    if wanted.family in _SUBSTRATE:
        return _substrate(opened, wanted)
    if wanted.family == _HISTORY:
        return _history(opened, wanted)
    session = opened.session(wanted.session)
    receipt, call_id = session.perform(wanted.tool, wanted.params, label=wanted.label, turn=wanted.turn)
    return {**receipt.to_dict(), "call_id": call_id}, receipt.ok


def _substrate(opened: Mulligan, wanted: _Wanted) -> tuple[dict[str, Any], bool]:
    from mulligan.effects.substrate.bench import Named, bench_of
    from mulligan.effects.substrate.tools import BY_NAME, run_tool
    from mulligan.values.ids import SessionId, TurnId, parse_user_id

    turn = None if wanted.turn is None else TurnId(parse_user_id(wanted.turn))
    named = Named(SessionId(parse_user_id(wanted.session)), label=wanted.label, turn=turn)
    outcome = run_tool(bench_of(opened.desk, opened.boundary), BY_NAME[wanted.tool], wanted.params, named)
    return {**outcome.body, "call_id": outcome.call_id}, not outcome.is_error


def _history(opened: Mulligan, wanted: _Wanted) -> tuple[dict[str, Any], bool]:
    from mulligan.servers.mcp.history_tools import run_history
    from mulligan.values.ids import SessionId, parse_user_id

    session = SessionId(parse_user_id(wanted.session))
    name = wanted.tool.replace(".", "_")
    body, failed = run_history(opened.desk, name, wanted.params, session, boundary=opened.boundary)
    return body, not failed
