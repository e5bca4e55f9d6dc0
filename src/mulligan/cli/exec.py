"""`mulligan exec` and `mulligan run` run commands as calls; `mulligan call TOOL` performs one tool as a call."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from mulligan.cli.format import paint, print_json
from mulligan.cli.open_root import OuterCall, open_for_changes, open_in_outer_call, outer_call, root_folder
from mulligan.cli.options import (
    DEFAULT_SESSION,
    WORKING_SESSION,
    Common,
    boundary_options,
    options_saying,
    turn_option,
    working_options,
)
from mulligan.exec.pump import CommandHandle
from mulligan.history.outcome_text import changes_words, counted, gap_lines, short
from mulligan.values.errors import MulliganError, fault
from mulligan.values.ids import CallId

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.effects.receipt import Receipt
    from mulligan.exec.run import CommandResult
    from mulligan.history.call import Call
    from mulligan.history.open_root import OpenRoot

OUR_FAILURE = 125
STDIN = 0
_SIGNALED = 128
_CHANGES_SHOWN = 20
_SECONDS = click.FloatRange(min=0, min_open=True)
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _OutputCopy:
    """Copies the command's output to our own streams."""

    def write(self, stream: str, data: bytes) -> None:
        target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        try:
            target.write(data)
            target.flush()
        except BrokenPipeError:
            # The interpreter flushes the buffer when it exits, and would fail on the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
            raise


@click.command(context_settings=_SETTINGS)
@click.option("--rollback-on", type=click.Choice(["nonzero"]), help="Undo all changes if the command fails.")
@click.option(
    "--timeout",
    "timeout_s",
    type=_SECONDS,
    metavar="SECONDS",
    help="Kill the command after this time, and undo its changes.",
)
@click.option("--isolate", is_flag=True, help="Apply the changes only if the command succeeds.")
@click.option("--strategy", type=click.Choice(["notify", "watch", "scan", "overlay"]), help="How to capture changes.")
@click.option(
    "--sandbox",
    type=click.Choice(["none", "workspace"]),
    default="none",
    show_default=True,
    help="workspace: let the command write only in the root and in temporary folders.",
)
@click.option(
    "--network",
    type=click.Choice(["none", "full"]),
    default="full",
    show_default=True,
    help="none: cut the network of the command.",
)
@click.option("--cwd", metavar="DIR", help="The folder to run in, below the root. Default: this folder.")
@turn_option
@click.option("--label", metavar="ID", help="A name for the call.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@working_options
def exec_verb(common: Common, command: tuple[str, ...], **asked: Any) -> int:
    """Run a command as a call and exit with its code (125 if Mulligan itself fails).

    The command reads standard input. If another call's command runs this, it joins that call.
    """
    ended: list[int] = []
    try:
        with _signals_interrupt(ended):
            joined = _joined(common, command, asked)
            if joined is None:
                _warm_up_launcher()
                with open_for_changes(common) as opened:
                    joined = _execute(common, opened, command, asked)
            receipt, call_id = joined
    except MulliganError as error:
        return _failed(common, error.code, error.message)
    except KeyboardInterrupt:
        if not ended:
            raise
        return _SIGNALED + ended[0]
    if common.as_json:
        print_json({**receipt.to_dict(), "call_id": call_id})
    return _exit_code(receipt)


def _joined(common: Common, command: tuple[str, ...], asked: dict[str, Any]) -> tuple[Receipt, str] | None:
    """Runs the command as a part of the call whose command started us. None: there is no such call."""
    outer = outer_call(common)
    if outer is None:
        return None
    outer.check_names(session=common.session, turn=asked["turn"], label=asked["label"])
    if not common.as_json and _is_plain(asked):
        _become_command(command, outer, cwd=asked["cwd"])
    _warm_up_launcher()
    with open_in_outer_call(common, outer) as opened:
        receipt, _ = _execute(common, opened, command, asked)
    return receipt, outer.call


def _failed(common: Common, code: str, message: str) -> int:
    if common.as_json:
        print_json({"error": {"code": code, "message": message}})
    click.echo(f"mulligan: {message}", err=True)
    return OUR_FAILURE


@contextmanager
def _signals_interrupt(received: list[int]) -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt like Ctrl-C, so that the call is rolled back. `received` gets the signal number."""

    def end(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _warm_up_launcher() -> None:
    """Lets the process that starts commands load its modules while this one opens the store."""
    from mulligan.exec.start import LAUNCHER

    LAUNCHER.warm_up()


def _is_plain(asked: Mapping[str, Any]) -> bool:
    """Whether the outer call already gives the command all that the options ask for."""
    free = asked["sandbox"] == "none" and asked["network"] == "full"
    return free and not any(asked[name] for name in ("rollback_on", "timeout_s", "isolate", "strategy"))


def _become_command(command: tuple[str, ...], outer: OuterCall, *, cwd: str | None) -> NoReturn:
    """Replaces this process by the command, with the input and the filtered environment of an exec."""
    from mulligan.exec.command import command as make_command
    from mulligan.values.errors import Refused

    try:
        made = make_command(command, outer.root, cwd=_folder_below_root(outer.root) if cwd is None else cwd)
    except Refused as refused:
        raise fault(refused.code, refused.message) from None
    os.chdir(made.cwd)
    _become(command, {**made.env, **outer.environment})


def _become(command: tuple[str, ...], environment: Mapping[bytes, bytes]) -> NoReturn:
    # Python ignores SIGPIPE, and the program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        raise fault("spawn_failed", f"{command[0]}: {getattr(error, 'strerror', error)}") from None


def _execute(common: Common, opened: Mulligan, command: tuple[str, ...], asked: dict[str, Any]) -> tuple[Receipt, str]:
    params = {
        "argv": list(command),
        "cwd": asked["cwd"] or _folder_below_root(opened.root),
        "timeout_ms": None if asked["timeout_s"] is None else max(1, int(asked["timeout_s"] * 1000)),
        "rollback_on": asked["rollback_on"],
        "isolate": asked["isolate"] or None,
        "strategy": asked["strategy"],
        "sandbox": asked["sandbox"],
        "network": asked["network"],
    }
    session = opened.session(common.session or DEFAULT_SESSION)
    given = {name: value for name, value in params.items() if value is not None}
    sink = None if common.as_json else _OutputCopy()
    return session.perform("host.exec", given, sink=sink, stdin_fd=STDIN, label=asked["label"], turn=asked["turn"])


def _folder_below_root(root: str) -> str | None:
    """The current folder relative to the root; None if it is outside."""
    here = os.path.realpath(os.getcwd())
    inside = here == root or here.startswith(root.rstrip("/") + "/")
    return os.path.relpath(here, root) if inside else None


def _exit_code(receipt: Receipt) -> int:
    code = receipt.exit_code
    if receipt.error_code is not None:
        # The call was aborted. Its coverage says which changes Mulligan could not put back.
        click.echo("\n".join((f"mulligan: {receipt.error_message}", *gap_lines(receipt.coverage or ()))), err=True)
    if receipt.status == "timeout":
        return 124
    if code is None:
        return OUR_FAILURE
    return _SIGNALED + int(receipt.signal or 0) if code < 0 else int(code)


@click.command(context_settings=_SETTINGS)
@click.option("--strategy", type=click.Choice(["notify", "watch", "scan"]), help="How to capture changes.")
@turn_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@working_options
def run_verb(common: Common, command: tuple[str, ...], strategy: str | None, turn: str | None) -> int:
    """Run any program on this terminal, with this environment; its changes are one call that can be undone.

    If another call's command runs this, it joins that call. With --json, the last line of the output is the call.
    """
    try:
        outer = outer_call(common)
        if outer is not None:
            outer.check_names(session=common.session, turn=turn, label=None)
        if outer is not None and strategy is None and not common.as_json:
            if _folder_below_root(outer.root) is None:
                os.chdir(outer.root)
            _become(command, os.environb)
        _warm_up_launcher()
        workspace = (
            open_for_changes(replace(common, root=root_folder(common)))
            if outer is None
            else open_in_outer_call(common, outer)
        )
        with workspace as opened:
            return _run(common, opened, command, strategy=strategy, turn=turn)
    except MulliganError as error:
        return _failed(common, error.code, error.message)


_STORE_VARIABLES = (b"MULLIGAN_STORE", b"MULLIGAN_BLOBS")


def _run(common: Common, opened: Mulligan, command: tuple[str, ...], *, strategy: str | None, turn: str | None) -> int:
    from mulligan.effects.exec import call_environment
    from mulligan.exec.command import command as make_command
    from mulligan.history.command import RunOptions, run_in_call
    from mulligan.values.errors import Refused
    from mulligan.values.ids import SessionId, TurnId, parse_user_id

    open_root = opened.open_root
    call = open_root.call(
        SessionId(common.session or DEFAULT_SESSION),
        turn=None if turn is None else TurnId(parse_user_id(turn, "turn")),
        label=os.path.basename(command[0]),
        tool="run",
        observed=True,
    )
    ours = {os.fsencode(name): os.fsencode(value) for name, value in call_environment(open_root, call).items()}
    made = make_command(command, open_root.disk.root.path, cwd=_folder_below_root(opened.root))
    # Another store of our own environment would win over the one that the call is in.
    others = {name: value for name, value in os.environb.items() if name not in _STORE_VARIABLES}
    made = replace(made, env={**others, **ours}, terminal=True)
    ended = False
    try:
        with CommandHandle() as handle, _signals_passed_on(handle):
            how = RunOptions(strategy, handle=handle)  # type: ignore[arg-type]  # click checked
            ran = run_in_call(open_root, call, made, sink=_OutputCopy(), how=how)
        ended = True
    except Refused as refused:
        call.abort(refused.code)
        return _failed(common, refused.code, refused.message)
    finally:
        # The user started the program, so Mulligan records its changes and never rolls them back. If the store cannot
        # record them now, recovery does so when a process opens the store next.
        if call.status == "open":
            _record(open_root, call, ended=ended)
    _summary(common, opened, call.id, ran)
    return _SIGNALED + ran.signal if ran.signal else ran.exit_code


def _record(open_root: OpenRoot, call: Call, *, ended: bool) -> None:
    """Commit what the program did. After an error, which the caller raises, a failing commit raises none of its own."""
    try:
        call.commit(reason=None if ended else "interrupted")
    except MulliganError as error:
        if error.code == "no_space":
            open_root.ledger.note_store_full(CallId(call.id))
        if ended:
            raise


@contextmanager
def _signals_passed_on(handle: CommandHandle) -> Iterator[None]:
    """Passes SIGINT, SIGTERM and SIGHUP to the program; this process goes on, to record how the program ended.

    The program's init process passes on only signals that were sent to this process alone: the terminal sends Ctrl-C
    to the program too.
    """
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    # A handler, not SIG_IGN: the program would inherit an ignored signal.
    before = {
        number: signal.signal(number, lambda number, frame: handle.signal(number)) for number in (signal.SIGINT, *ours)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summary(common: Common, opened: Mulligan, call: str, ran: CommandResult) -> None:
    from mulligan.history.log import call_view

    open_root = opened.open_root
    with open_root.ledger.store.read() as tx:
        view = call_view(open_root, tx, open_root.ledger.call_row(CallId(call)))
    if common.as_json:
        print_json(_as_receipt(view, ran, call_id=open_root.ledger.joins[0] if open_root.ledger.joins else call))
        return
    for words in changes_words(view["changes"])[:_CHANGES_SHOWN]:
        click.echo(f"  {words}", err=True)
    count = len(view["changes"])
    words = f"{counted(count, 'path')} changed"
    if not count:
        words = "no change was captured; `mulligan coverage` says why" if view["coverage"] else "nothing changed"
    hint = f"; `mulligan undo {short(call)}` undoes it" if count else ""
    click.echo(paint(f"mulligan: {words}{hint}", "dim", sys.stderr), err=True)


def _as_receipt(view: Mapping[str, Any], ran: CommandResult, *, call_id: str) -> dict[str, Any]:
    """The call in the shape of an exec receipt, without output: the program printed that itself."""
    names = ("exit_code", "signal", "strategy", "strategy_reason", "attribution")
    body = {
        "status": "signaled" if ran.signal else "ok",
        **{name: getattr(ran, name) for name in names},
        **{name: view[name] for name in ("changes", "coverage")},
        "call_id": call_id,
    }
    return {name: value for name, value in body.items() if value is not None}


_SUBSTRATE = ("snapshot", "workspace")
_HISTORY = "history"


class _ToolRequest(NamedTuple):
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
@click.option(
    "--args", "arguments", default="{}", metavar="JSON", help="The parameters; '-' reads them from standard input."
)
@turn_option
@click.option("--label", metavar="ID", help="A name for the call, such as the provider's tool call id.")
@boundary_options
@options_saying(WORKING_SESSION, as_json="Errors as JSON; the receipt always is.")
def call(
    common: Common, *, tool: str, arguments: str, turn: str | None, label: str | None, capability: Any, policy: Any
) -> None:
    """Perform a tool (edit_file) or effect (host.fs.edit_file) as a call, and print its receipt.

    If the receipt is not ok, nothing changed. Snapshot tools (snapshot_create, snapshot.create) and history tools
    (history_log, history.log) work too.
    """
    from mulligan.values.canonical import decode
    from mulligan.values.errors import fault

    params = decode(sys.stdin.buffer.read() if arguments == "-" else arguments)
    if not isinstance(params, dict):
        raise fault("invalid_params", "--args takes a JSON object.")
    wanted = _ToolRequest(tool, params, common.session or DEFAULT_SESSION, label, turn)
    _check_name(wanted)
    outer = outer_call(common) if _changes_files(wanted) else None
    if outer is None:
        with open_for_changes(common, capability=capability, policy=policy) as opened:
            body, ok = _performed(opened, wanted)
    else:
        outer.check_names(session=common.session, turn=turn, label=label)
        with open_in_outer_call(common, outer, capability=capability, policy=policy) as opened:
            body, ok = _performed(opened, wanted)
        body["call_id"] = outer.call
    print_json(body)
    if not ok:
        raise click.exceptions.Exit(1)


def _check_name(wanted: _ToolRequest) -> None:
    """Raises for an unknown tool, and for a command that would outlive this process. Opens nothing."""
    from mulligan.effects.perform import SESSION_EFFECTS
    from mulligan.effects.registry import BY_NAME as EFFECT_BY_NAME
    from mulligan.effects.registry import unknown_effect
    from mulligan.values.errors import fault

    if wanted.params.get("background"):
        raise fault("invalid_params", "background: the command would end with this verb; use `mulligan mcp` or Python.")
    if wanted.tool in SESSION_EFFECTS or wanted.tool in EFFECT_BY_NAME:
        return
    # Only now, because the other tools need pydantic.
    from mulligan.effects.snapshot_tools.tools import BY_NAME
    from mulligan.servers.mcp.dispatch import HISTORY

    known = {*SESSION_EFFECTS, *EFFECT_BY_NAME, *BY_NAME, *HISTORY}
    if wanted.tool not in known and wanted.tool.replace(".", "_") not in HISTORY:
        raise unknown_effect(wanted.tool, (name for name in known if "." not in name))


def _changes_files(wanted: _ToolRequest) -> bool:
    """Whether the tool must join the outer call. Tools that only read, and history tools, need not."""
    from mulligan.effects.registry import BY_NAME

    effect = BY_NAME.get(wanted.tool)
    return effect is not None and not effect.read_only


def _performed(opened: Mulligan, wanted: _ToolRequest) -> tuple[dict[str, Any], bool]:
    """The JSON to print, and whether the tool succeeded."""
    from mulligan.effects.perform import SESSION_EFFECTS, perform_session_effect

    if wanted.tool in SESSION_EFFECTS:
        receipt = perform_session_effect(opened.open_root, wanted.tool, wanted.params, boundary=opened.boundary)
        return receipt.to_dict(), receipt.ok
    if wanted.family in _SUBSTRATE:
        return _substrate(opened, wanted)
    if wanted.family == _HISTORY:
        return _history(opened, wanted)
    session = opened.session(wanted.session)
    receipt, call_id = session.perform(wanted.tool, wanted.params, label=wanted.label, turn=wanted.turn)
    return {**receipt.to_dict(), "call_id": call_id}, receipt.ok


def _substrate(opened: Mulligan, wanted: _ToolRequest) -> tuple[dict[str, Any], bool]:
    from mulligan.effects.snapshot_tools.context import RequestInfo, snapshot_context_of
    from mulligan.effects.snapshot_tools.tools import BY_NAME, run_tool
    from mulligan.values.ids import SessionId, TurnId, parse_user_id

    turn = None if wanted.turn is None else TurnId(parse_user_id(wanted.turn))
    named = RequestInfo(SessionId(parse_user_id(wanted.session)), label=wanted.label, turn=turn)
    outcome = run_tool(
        snapshot_context_of(opened.open_root, opened.boundary), BY_NAME[wanted.tool], wanted.params, named
    )
    return {**outcome.body, "call_id": outcome.call_id}, not outcome.is_error


def _history(opened: Mulligan, wanted: _ToolRequest) -> tuple[dict[str, Any], bool]:
    from mulligan.servers.mcp.dispatch import run_history
    from mulligan.values.ids import SessionId, parse_user_id

    session = SessionId(parse_user_id(wanted.session))
    name = wanted.tool.replace(".", "_")
    body, failed = run_history(opened.open_root, name, wanted.params, session, boundary=opened.boundary)
    return body, not failed
