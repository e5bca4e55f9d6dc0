"""`mulligan exec -- CMD` and `mulligan run -- CMD…`: commands whose changes can be undone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.doors import DEFAULT_SESSION, root_folder, work
from mulligan.cli.options import Common, common_options
from mulligan.cli.output import paint, print_json
from mulligan.cli.words import change_words, short
from mulligan.values.faults import MulliganError

if TYPE_CHECKING:
    from mulligan.effects.receipt import Receipt
    from mulligan.opening import Mulligan

OUR_FAILURE = 125
_SIGNALED = 128
_CALL_VARIABLE = "MULLIGAN_CALL"
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _Through:
    """Output goes straight on to our own streams."""

    def write(self, stream: str, data: bytes) -> None:
        target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        target.write(data)
        target.flush()


@click.command(context_settings=_SETTINGS)
@click.option("--rollback-on", type=click.Choice(["nonzero"]), help="Put everything back if the command fails.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), help="Seconds; then put back.")
@click.option("--isolate", is_flag=True, help="The files see nothing until the command has succeeded.")
@click.option("--strategy", type=click.Choice(["notify", "watch", "scan", "overlay"]), help="How changes are caught.")
@click.option("--sandbox", type=click.Choice(["none", "workspace"]), default="none", show_default=True)
@click.option("--network", type=click.Choice(["none", "full"]), default="full", show_default=True)
@click.option("--cwd", metavar="DIR", help="Where to run, below the root. Default: this folder.")
@click.option("--turn", metavar="ID", help="Calls with the same turn are rolled back together.")
@click.option("--label", metavar="ID", help="A name for the call.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@common_options
def exec_verb(common: Common, command: tuple[str, ...], **asked: Any) -> int:
    """Run a command as a call and exit with its code (our own failure: 125)."""
    if os.environ.get(_CALL_VARIABLE):
        return _join(command)
    _get_ready()
    try:
        with work(common) as opened:
            receipt, call_id = _execute(common, opened, command, asked)
    except MulliganError as error:
        click.echo(f"mulligan: {error.message}", err=True)
        return OUR_FAILURE
    if common.as_json:
        print_json({**receipt.to_dict(), "call_id": call_id})
    return _exit_code(receipt)


def _get_ready() -> None:
    """The process that starts commands loads its modules while we open the store."""
    from mulligan.workspace.exec.spawn import LAUNCHER

    LAUNCHER.warm_up()


def _join(command: tuple[str, ...]) -> int:
    """Inside another call's command: its capture already sees everything we do."""
    os.execvp(command[0], list(command))


def _execute(common: Common, opened: Mulligan, command: tuple[str, ...], asked: dict[str, Any]) -> tuple[Receipt, str]:
    params = {
        "argv": list(command),
        "cwd": asked["cwd"] or _here(opened),
        "timeout_ms": None if asked["timeout_s"] is None else max(1, int(asked["timeout_s"] * 1000)),
        "rollback_on": asked["rollback_on"],
        "isolate": asked["isolate"] or None,
        "strategy": asked["strategy"],
        "sandbox": asked["sandbox"],
        "network": asked["network"],
    }
    session = opened.session(common.session or DEFAULT_SESSION)
    given = {name: value for name, value in params.items() if value is not None}
    sink = None if common.as_json else _Through()
    return session.perform("host.exec", given, sink=sink, label=asked["label"], turn=asked["turn"])


def _here(opened: Mulligan) -> str | None:
    """This folder, if it is below the root."""
    here = os.path.realpath(os.getcwd())
    inside = here == opened.root or here.startswith(opened.root.rstrip("/") + "/")
    return os.path.relpath(here, opened.root) if inside else None


def _exit_code(receipt: Receipt) -> int:
    code = receipt.exit_code
    if receipt.status == "timeout":
        click.echo(f"mulligan: {receipt.error_message}", err=True)
        return 124
    if code is None:
        click.echo(f"mulligan: {receipt.error_message}", err=True)
        return OUR_FAILURE
    if receipt.error_code == "nonzero_exit":
        click.echo("mulligan: the command failed; what it changed was put back.", err=True)
    return _SIGNALED + int(receipt.signal or 0) if code < 0 else int(code)


@click.command(context_settings=_SETTINGS)
@click.option("--strategy", type=click.Choice(["notify", "watch", "scan"]), help="How changes are caught.")
@click.option("--turn", metavar="ID", help="Calls with the same turn are rolled back together.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@common_options
def run_verb(common: Common, command: tuple[str, ...], strategy: str | None, turn: str | None) -> int:
    """Run any program, on this terminal and with this environment; what it changes is one call that can be undone."""
    from mulligan.history.running import How, run_in_call
    from mulligan.values.ids import SessionId, TurnId
    from mulligan.values.refusal import Refused
    from mulligan.workspace.exec.command import command as make_command

    _get_ready()
    with work(replace(common, root=root_folder(common))) as opened:
        desk = opened.desk
        call = desk.call(
            SessionId(common.session or DEFAULT_SESSION),
            turn=None if turn is None else TurnId(turn),
            label=os.path.basename(command[0]),
            tool="run",
            observed=True,
        )
        made = replace(
            make_command(command, desk.disk.root.path, cwd=_here(opened)),
            env={**os.environb, _CALL_VARIABLE.encode(): call.id.encode()},
            terminal=True,
        )
        ended = False
        try:
            with _interrupts_are_the_programs():
                ran = run_in_call(desk, call, made, sink=_Through(), how=How(strategy))  # type: ignore[arg-type]  # click checked
            ended = True
        except Refused as refused:
            call.abort(refused.code)
            click.echo(f"mulligan: {refused.message}", err=True)
            return OUR_FAILURE
        finally:
            # Whatever happened to us, it is the program's own work: it is recorded, never put back.
            if call.status == "open":
                call.commit(reason=None if ended else "interrupted")
        _summary(common, opened, call.id)
    return _SIGNALED + (ran.signal or 0) if ran.signal else ran.exit_code


@contextmanager
def _interrupts_are_the_programs() -> Iterator[None]:
    """Ctrl-C reaches the program as it would without us; we go on to see what it makes of it."""
    # A handler, because the program would inherit that a signal is ignored.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _summary(common: Common, opened: Mulligan, call: str) -> None:
    from mulligan.history.views import call_view

    with opened.desk.ledger.store.read() as tx:
        view = call_view(opened.desk, tx, opened.desk.ledger.call_row(call))  # type: ignore[arg-type]
    if common.as_json:
        click.echo(f"{view['id']} {len(view['changes'])}", err=True)
        return
    for change in view["changes"][:20]:
        click.echo("  " + change_words(change), err=True)
    count = len(view["changes"])
    words = "nothing changed" if not count else f"{count} path{'' if count == 1 else 's'} changed"
    hint = f"; `mulligan undo {short(call)}` takes it back" if count else ""
    click.echo(paint(f"mulligan: {words}{hint}", "dim", sys.stderr), err=True)
