"""`mulligan call TOOL`: perform any tool or effect as one transaction."""

from __future__ import annotations

import sys
from typing import Any

import click

from mulligan.cli.doors import DEFAULT_SESSION, work
from mulligan.cli.options import Common, common_options
from mulligan.cli.output import print_json


@click.command()
@click.argument("tool")
@click.option("--args", "arguments", default="{}", metavar="JSON", help="The parameters; '-' reads them from input.")
@click.option("--turn", metavar="ID", help="Calls with the same turn are rolled back together.")
@click.option("--label", metavar="ID", help="A name for the call, such as the provider's tool call id.")
@click.option("--capability", type=click.File("rb"), help="A JSON file with what this call may do.")
@click.option("--policy", type=click.File("rb"), help="A JSON file with rules that narrow it further.")
@common_options
def call(
    common: Common, *, tool: str, arguments: str, turn: str | None, label: str | None, capability: Any, policy: Any
) -> None:
    """Perform a tool (edit_file) or effect (host.fs.edit_file) and print its receipt. Not ok: nothing happened."""
    from mulligan.effects.perform import SESSION_EFFECTS, effect_named, perform_session_effect
    from mulligan.values.canonical import decode
    from mulligan.values.faults import fault

    params = decode(sys.stdin.buffer.read() if arguments == "-" else arguments)
    if not isinstance(params, dict):
        raise fault("invalid_params", "--args takes a JSON object.")
    if tool not in SESSION_EFFECTS:
        effect_named(tool)
    limits = None if capability is None else decode(capability.read())
    rules = None if policy is None else decode(policy.read())
    with work(common, capability=limits, policy=rules) as opened:
        if tool in SESSION_EFFECTS:
            receipt = perform_session_effect(opened.desk, tool, params, boundary=opened.boundary)
            body = receipt.to_dict()
        else:
            session = opened.session(common.session or DEFAULT_SESSION)
            receipt, call_id = session.perform(tool, params, label=label, turn=turn)
            body = {**receipt.to_dict(), "call_id": call_id}
    print_json(body)
    if not receipt.ok:
        raise click.exceptions.Exit(1)
