"""Run one command and know what it touched. The door of this room."""

from __future__ import annotations

import errno
import os

from mulligan.values.digest import Digest
from mulligan.values.faults import fault
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.exec import sandbox
from mulligan.workspace.exec.capture import Attribution, Capture, Coverage, StrategyName
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.output import Sink
from mulligan.workspace.exec.pump import Ending, Handle, Pump
from mulligan.workspace.exec.spawn import LAUNCHER, Extras, spawn


@plain(slots=True, frozen=True)
class Ran:
    """What a command did. `exit_code` is -1 when a signal ended it (S1); `touched` are absolute real paths.

    `attribution` is `call` when the command has touched them, `window` when anybody may have. `shared` are those that
    somebody else has changed as well.
    """

    exit_code: int
    signal: int | None
    timed_out: bool
    cancelled: bool
    survivors_killed: int
    touched: frozenset[bytes]
    shared: frozenset[bytes]
    attribution: Attribution
    strategy: StrategyName
    strategy_reason: str
    sandbox: str
    coverage: Coverage
    stops: int
    given_way: tuple[tuple[bytes, Digest], ...] = ()
    """what of an isolated command was not applied, because somebody else was at work there; its bytes are kept"""


def run(
    command: Command,
    *,
    capture: Capture,
    sink: Sink,
    reason: str = "asked for",
    handle: Handle | None = None,
    deadline: float | None = None,
) -> Ran:
    """Run to the end of the last descendant. `deadline` is on the monotonic clock and covers input and output too.

    Raises Refused when it cannot be run so (`spawn_failed`, `unsupported_strategy`, `sandbox_unavailable`): nothing was
    run then. A command that fails, is killed or runs out of time is an ordinary answer.
    """
    extras = sandbox.confined(command, capture.begin(command))
    own = Handle() if handle is None else handle
    try:
        ending = _pump(command, extras, capture, sink=sink, handle=own, deadline=deadline)
    finally:
        caught = capture.end()
        if handle is None:
            own.close()
        LAUNCHER.replenish()
    if ending.failed is not None:
        raise _refusal(command, capture.name, *ending.failed)
    return Ran(
        exit_code=-1 if os.WIFSIGNALED(ending.status) else os.WEXITSTATUS(ending.status),
        signal=os.WTERMSIG(ending.status) if os.WIFSIGNALED(ending.status) else None,
        timed_out=ending.timed_out,
        cancelled=ending.cancelled,
        survivors_killed=ending.survivors,
        touched=caught.touched,
        shared=caught.shared,
        attribution=caught.attribution,
        strategy=capture.name,
        strategy_reason=reason,
        sandbox=sandbox.describe(command),
        coverage=caught.coverage,
        stops=caught.stops,
    )


def _pump(
    command: Command, extras: Extras, capture: Capture, *, sink: Sink, handle: Handle, deadline: float | None
) -> Ending:
    spawned = spawn(command, extras)
    fed = command.stdin or b""
    pump = Pump(spawned, sink, stdin=fed, deadline=deadline, handle=handle, received=capture.received)
    if extras.tended is not None:
        pump.tend(*extras.tended)
    return pump.run()


_SANDBOX_STEPS = frozenset({"sandbox", "network"})
_STRATEGY_STEPS = frozenset({"seccomp", "overlay", "namespace"})


def _refusal(command: Command, strategy: str, step: str, number: int) -> Exception:
    why = os.strerror(number)
    if step == "exec":
        return Refused("error", "spawn_failed", f"{os.fsdecode(command.argv[0])}: {why}", errno=number)
    if step == "cwd" and number == errno.EXDEV:
        return Refused("forbidden", "path_not_allowed", f"{os.fsdecode(command.cwd)} leads out of the root.")
    if step == "cwd":
        return Refused("error", "not_a_directory", f"{os.fsdecode(command.cwd)}: {why}", errno=number)
    if step in _SANDBOX_STEPS:
        return Refused(
            "error", "sandbox_unavailable", f"This machine refuses the {step}: {why}", step=step, errno=number
        )
    if step in _STRATEGY_STEPS:
        message = f"This machine refuses {strategy} ({step}): {why}"
        return Refused("error", "unsupported_strategy", message, strategy=strategy, step=step, errno=number)
    return fault("internal", f"The command could not be started ({step}): {why}", errno=number)
