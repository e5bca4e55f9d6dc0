"""`mulligan exec -- CMD` and `mulligan run -- CMD…`: commands whose changes can be undone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mulligan.cli.doors import root_folder, work
from mulligan.cli.joining import Around, call_around, join
from mulligan.cli.options import DEFAULT_SESSION, Common, working_options
from mulligan.cli.output import paint, print_json
from mulligan.cli.words import changes_words, short
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import CallId

if TYPE_CHECKING:
    from mulligan.effects.receipt import Receipt
    from mulligan.opening import Mulligan
    from mulligan.workspace.exec.pump import Handle
    from mulligan.workspace.exec.run import Ran

OUR_FAILURE = 125
STDIN = 0
_SIGNALED = 128
_CHANGES_SHOWN = 20
_SECONDS = click.FloatRange(min=0, min_open=True)
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _Through:
    """Output goes straight on to our own streams."""

    def write(self, stream: str, data: bytes) -> None:
        target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        try:
            target.write(data)
            target.flush()
        except BrokenPipeError:
            # What is left in the buffer must go somewhere when we end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
            raise


@click.command(context_settings=_SETTINGS)
@click.option("--rollback-on", type=click.Choice(["nonzero"]), help="Put everything back if the command fails.")
@click.option("--timeout", "timeout_s", type=_SECONDS, metavar="SECONDS", help="After these, put everything back.")
@click.option("--isolate", is_flag=True, help="The files see nothing until the command has ended and stands.")
@click.option("--strategy", type=click.Choice(["notify", "watch", "scan", "overlay"]), help="How changes are caught.")
@click.option("--sandbox", type=click.Choice(["none", "workspace"]), default="none", show_default=True)
@click.option("--network", type=click.Choice(["none", "full"]), default="full", show_default=True)
@click.option("--cwd", metavar="DIR", help="Where to run, below the root. Default: this folder.")
@click.option("--turn", metavar="ID", help="Calls with the same turn are rolled back together.")
@click.option("--label", metavar="ID", help="A name for the call.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@working_options
def exec_verb(common: Common, command: tuple[str, ...], **asked: Any) -> int:
    """Run a command as a call and exit with its code (125 if Mulligan itself fails). The command reads our input.

    Inside another call's command it joins that call.
    """
    ended: list[int] = []
    try:
        with _told_to_end(ended):
            receipt, call_id = _joined(common, command, asked) or _alone(common, command, asked)
    except MulliganError as error:
        return _failed(common, error.code, error.message)
    except KeyboardInterrupt:
        if not ended:
            raise
        return _SIGNALED + ended[0]
    if common.as_json:
        print_json({**receipt.to_dict(), "call_id": call_id})
    return _exit_code(receipt)


def _alone(common: Common, command: tuple[str, ...], asked: dict[str, Any]) -> tuple[Receipt, str]:
    _get_ready()
    with work(common) as opened:
        return _execute(common, opened, command, asked)


def _joined(common: Common, command: tuple[str, ...], asked: dict[str, Any]) -> tuple[Receipt, str] | None:
    """Inside another call's command: a part of that call, which sees everything we do. None: there is no such call."""
    around = call_around(common)
    if around is None:
        return None
    around.check_names(session=common.session, turn=asked["turn"], label=asked["label"])
    if not common.as_json and _is_plain(asked):
        _become_command(command, around, cwd=asked["cwd"])
    _get_ready()
    with join(common, around) as opened:
        receipt, _ = _execute(common, opened, command, asked)
    return receipt, around.call


def _failed(common: Common, code: str, message: str) -> int:
    if common.as_json:
        print_json({"error": {"code": code, "message": message}})
    click.echo(f"mulligan: {message}", err=True)
    return OUR_FAILURE


@contextmanager
def _told_to_end(told: list[int]) -> Iterator[None]:
    """A signal to end is like Ctrl-C: what was begun is put back. `told` is given which one came."""

    def end(number: int, _: object) -> None:
        told.append(number)
        raise KeyboardInterrupt

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _get_ready() -> None:
    """The process that starts commands loads its modules while we open the store."""
    from mulligan.workspace.exec.spawn import LAUNCHER

    LAUNCHER.warm_up()


def _is_plain(asked: Mapping[str, Any]) -> bool:
    """Nothing is wanted of a command inside another call that the call around it does not give it anyway."""
    free = asked["sandbox"] == "none" and asked["network"] == "full"
    return free and not any(asked[name] for name in ("rollback_on", "timeout_s", "isolate", "strategy"))


def _become_command(command: tuple[str, ...], around: Around, *, cwd: str | None) -> NoReturn:
    """The command in our place, with what an exec gives: our input, and a part of our environment."""
    from mulligan.values.refusal import Refused
    from mulligan.workspace.exec.command import command as make_command

    try:
        made = make_command(command, around.root, cwd=_here(around.root) if cwd is None else cwd)
    except Refused as refused:
        raise fault(refused.code, refused.message) from None
    os.chdir(made.cwd)
    _become(command, {**made.env, **around.environment})


def _become(command: tuple[str, ...], environment: Mapping[bytes, bytes]) -> NoReturn:
    # We ignore it, and a program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        raise fault("spawn_failed", f"{command[0]}: {getattr(error, 'strerror', error)}") from None


def _execute(common: Common, opened: Mulligan, command: tuple[str, ...], asked: dict[str, Any]) -> tuple[Receipt, str]:
    params = {
        "argv": list(command),
        "cwd": asked["cwd"] or _here(opened.root),
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
    return session.perform("host.exec", given, sink=sink, stdin_fd=STDIN, label=asked["label"], turn=asked["turn"])


def _here(root: str) -> str | None:
    """This folder, if it is below the root."""
    here = os.path.realpath(os.getcwd())
    inside = here == root or here.startswith(root.rstrip("/") + "/")
    return os.path.relpath(here, root) if inside else None


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
@working_options
def run_verb(common: Common, command: tuple[str, ...], strategy: str | None, turn: str | None) -> int:
    """Run any program, on this terminal and with this environment; what it changes is one call that can be undone.

    Inside another call's command it joins that call. With --json the call is the last line on standard output.
    """
    try:
        around = call_around(common)
        if around is not None:
            around.check_names(session=common.session, turn=turn, label=None)
        if around is not None and strategy is None and not common.as_json:
            if _here(around.root) is None:
                os.chdir(around.root)
            _become(command, os.environb)
        _get_ready()
        door = work(replace(common, root=root_folder(common))) if around is None else join(common, around)
        with door as opened:
            return _run(common, opened, command, strategy=strategy, turn=turn)
    except MulliganError as error:
        return _failed(common, error.code, error.message)


def _run(common: Common, opened: Mulligan, command: tuple[str, ...], *, strategy: str | None, turn: str | None) -> int:
    from mulligan.effects.executing import call_environment
    from mulligan.history.running import How, run_in_call
    from mulligan.values.ids import SessionId, TurnId, parse_user_id
    from mulligan.values.refusal import Refused
    from mulligan.workspace.exec.command import command as make_command
    from mulligan.workspace.exec.pump import Handle

    desk = opened.desk
    call = desk.call(
        SessionId(common.session or DEFAULT_SESSION),
        turn=None if turn is None else TurnId(parse_user_id(turn, "turn")),
        label=os.path.basename(command[0]),
        tool="run",
        observed=True,
    )
    told = {os.fsencode(name): os.fsencode(value) for name, value in call_environment(desk, call).items()}
    made = make_command(command, desk.disk.root.path, cwd=_here(opened.root))
    made = replace(made, env={**os.environb, **told}, terminal=True)
    ended = False
    try:
        with Handle() as handle, _signals_are_the_programs(handle):
            how = How(strategy, handle=handle)  # type: ignore[arg-type]  # click checked
            ran = run_in_call(desk, call, made, sink=_Through(), how=how)
        ended = True
    except Refused as refused:
        call.abort(refused.code)
        return _failed(common, refused.code, refused.message)
    finally:
        # Whatever happened to us, it is the program's own work: it is recorded, never put back; if the store cannot
        # take it now, by whoever opens it next.
        if call.status == "open":
            with nullcontext() if ended else suppress(MulliganError):
                call.commit(reason=None if ended else "interrupted")
    _summary(common, opened, call.id, ran)
    return _SIGNALED + ran.signal if ran.signal else ran.exit_code


@contextmanager
def _signals_are_the_programs(handle: Handle) -> Iterator[None]:
    """Who asks us to end means the program; we go on to see what it makes of it.

    Its warden passes on what came to us alone: Ctrl-C reaches it without us.
    """
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    # A handler in any case, because the program would inherit that a signal is ignored.
    before = {
        number: signal.signal(number, lambda number, frame: handle.signal(number)) for number in (signal.SIGINT, *ours)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summary(common: Common, opened: Mulligan, call: str, ran: Ran) -> None:
    from mulligan.history.views import call_view

    desk = opened.desk
    with desk.ledger.store.read() as tx:
        view = call_view(desk, tx, desk.ledger.call_row(CallId(call)))
    if common.as_json:
        print_json(_as_receipt(view, ran, call_id=desk.ledger.joins[0] if desk.ledger.joins else call))
        return
    for words in changes_words(view["changes"])[:_CHANGES_SHOWN]:
        click.echo(f"  {words}", err=True)
    count = len(view["changes"])
    words = "nothing changed" if not count else f"{count} path{'' if count == 1 else 's'} changed"
    hint = f"; `mulligan undo {short(call)}` takes it back" if count else ""
    click.echo(paint(f"mulligan: {words}{hint}", "dim", sys.stderr), err=True)


def _as_receipt(view: Mapping[str, Any], ran: Ran, *, call_id: str) -> dict[str, Any]:
    """In the words of a command's receipt; what the program printed is not ours to tell."""
    told = {
        "status": "signaled" if ran.signal else "ok",
        "exit_code": ran.exit_code,
        "signal": ran.signal,
        "strategy": ran.strategy,
        "strategy_reason": ran.strategy_reason,
        "attribution": ran.attribution,
        "changes": view["changes"],
        "coverage": view["coverage"],
        "call_id": call_id,
    }
    return {name: value for name, value in told.items() if value is not None}
