"""Runs one command under a capture strategy, and reports the paths that it touched.

The sandbox of a command (`init` sets it up): `sandbox="workspace"`: the command writes only inside the root and in
temporary folders of its own; `.git/hooks` and `.git/config` are read-only, and it cannot move `.git` away. This takes a
mount namespace and Landlock together, because each covers what the other does not: if one is missing, the command fails
with `sandbox_unavailable`.

`network="none"`: the command gets a network namespace with only a loopback, or, if the machine has none, no sockets at
all. Both refuse Unix sockets, since a path reaches through any network namespace. Pairs of connected sockets always
work.

`run_captured` chooses the strategy; the receipt has the reason for the choice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Literal, TypeAlias

from mulligan.boundary.verdict import path_denied
from mulligan.exec.capture import seccomp
from mulligan.exec.capture.notify import Attribution, Capture, Coverage, Notify, StrategyName
from mulligan.exec.capture.overlay import Overlay
from mulligan.exec.capture.touched_paths import PreimageKeeper
from mulligan.exec.command import Command, Sink
from mulligan.exec.pump import CommandEnding, CommandHandle, Pump
from mulligan.exec.start import LAUNCHER, StartOptions, spawn
from mulligan.files import kernel
from mulligan.values.digest import Digest
from mulligan.values.errors import Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import is_inside

_TEMPORARY = (b"/tmp", b"/var/tmp", b"/dev/shm")


def confined(command: Command, extras: StartOptions) -> StartOptions:
    """The start options of a strategy, with the sandbox that the command asked for added."""
    if command.sandbox == "workspace":
        extras.confinement["sandbox"] = _sandbox_mounts(command)
    if command.network == "none":
        extras.confinement["no_network"] = True
        extras.program = seccomp.program(kernel.MACHINE, notify=extras.listens, sockets="inet")
        extras.program_without_sockets = seccomp.program(kernel.MACHINE, notify=extras.listens, sockets="none")
    return extras


def describe(command: Command) -> str:
    """The name of the sandbox in the receipt."""
    network = "" if command.network == "full" else ", network none"
    return command.sandbox + network


def _sandbox_mounts(command: Command) -> dict[str, list[bytes]]:
    own = os.path.realpath(command.env.get(b"TMPDIR", b"/tmp"))
    temporary = {path for path in (*_TEMPORARY, own) if os.path.isdir(path) and not os.path.islink(path)}
    outside = sorted(path for path in temporary if not is_inside(path, command.root))
    git = command.root + b"/.git"
    return {
        "writable": [command.root],
        "temporary": [path for path in outside if [other for other in outside if is_inside(path, other)] == [path]],
        "guarded_folders": [git] if not os.path.islink(git) else [],
        # Git runs hooks and reads its configuration later, outside of any sandbox.
        "guarded": [git + b"/hooks", git + b"/config"],
    }


@fast_dataclass(slots=True, frozen=True)
class CommandResult:
    """The result of a command. `exit_code` is -1 when a signal ended it (S1); `touched` are absolute real paths.

    `attribution` is `call` if the command itself changed them, `window` if another process may have. `shared` are
    touched paths that another process changed as well.
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
    # Changes of an isolated command that Mulligan did not apply, because another program had changed the path. Their
    # bytes are in the store.
    given_way: tuple[tuple[bytes, Digest], ...] = ()


def run(
    command: Command,
    *,
    capture: Capture,
    sink: Sink,
    reason: str = "asked for",
    handle: CommandHandle | None = None,
    deadline: float | None = None,
) -> CommandResult:
    """Run the command until its last descendant has ended. `deadline` is on the monotonic clock and covers input and
    output.

    Raises Refused if the command cannot start in this way (`spawn_failed`, `unsupported_strategy`,
    `sandbox_unavailable`). A command that fails, is killed or runs out of time is an ordinary result.
    """
    # `begin` raises for what this machine cannot do, before any process starts.
    extras = confined(command, capture.begin(command))
    own = CommandHandle() if handle is None else handle
    try:
        ending = _pump(command, extras, capture, sink=sink, handle=own, deadline=deadline)
    finally:
        # Also after an error, because the strategy holds descriptors and a thread, and knows the changes so far.
        caught = capture.end()
        if handle is None:
            own.close()
        # The launcher forks the next process now, so that the next command does not wait for a fork.
        LAUNCHER.replenish()
    if ending.failed is not None:
        raise _refusal(command, capture.name, *ending.failed)
    return CommandResult(
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
        sandbox=describe(command),
        coverage=caught.coverage,
        stops=caught.stops,
    )


def _pump(
    command: Command,
    extras: StartOptions,
    capture: Capture,
    *,
    sink: Sink,
    handle: CommandHandle,
    deadline: float | None,
) -> CommandEnding:
    stdin = command.stdin or b""
    pump = Pump(spawn(command, extras), sink, stdin=stdin, deadline=deadline, handle=handle, received=capture.received)
    if extras.tended is not None:
        pump.watch_descriptor(*extras.tended)
    return pump.run()


_SANDBOX_STEPS = frozenset({"sandbox", "network"})
_STRATEGY_STEPS = frozenset({"seccomp", "overlay", "namespace"})


def _refusal(command: Command, strategy: str, step: str, number: int) -> Exception:
    why = os.strerror(number)
    if step == "exec":
        return Refused("error", "spawn_failed", f"{os.fsdecode(command.argv[0])}: {why}", errno=number)
    if step == "cwd" and number == errno.EXDEV:
        return path_denied(f"{os.fsdecode(command.cwd)} leads out of the root.")
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


WindowName: TypeAlias = Literal["watch", "scan"]


@fast_dataclass(slots=True, frozen=True)
class CaptureMeans:
    """The parts that capture strategies need from their caller."""

    keeper: PreimageKeeper
    # Creates the strategies `watch` and `scan`, which compare with a baseline that only the caller has.
    window: Callable[[WindowName], Capture]
    # A watcher is running already, so that `watch` costs less than a scan.
    is_watching: bool = False
    # Called with each strategy that is tried, so that the caller has its result even after an interrupt.
    begun: Callable[[Capture], object] = bool


def run_captured(
    command: Command,
    means: CaptureMeans,
    *,
    strategy: StrategyName | None = None,
    isolate: bool = False,
    sink: Sink,
    handle: CommandHandle | None = None,
    deadline: float | None = None,
) -> tuple[CommandResult, Capture]:
    """Run under the given strategy, else under the best of this machine: `notify`, `watch`, `scan`; to isolate,
    `overlay`.

    If a given strategy does not work here, raises `unsupported_strategy`; without one, the next is tried and the
    receipt says why. `isolate` with a strategy that cannot isolate is `invalid_params`. The answered capture has more
    results: `Overlay.changes`, `Notify.late`.
    """
    refused = ""
    for name, why in _candidates(means, strategy, isolate=isolate):
        capture = _capture(name, means)
        means.begun(capture)
        try:
            return run(
                command, capture=capture, sink=sink, reason=why + refused, handle=handle, deadline=deadline
            ), capture
        except Refused as refusal:
            if refusal.code != "unsupported_strategy" or strategy is not None or isolate:
                raise
            refused = f"; {refusal.message}"
    raise Refused("error", "unsupported_strategy", "No strategy can capture changes on this machine.")


def _candidates(means: CaptureMeans, strategy: StrategyName | None, *, isolate: bool) -> list[tuple[StrategyName, str]]:
    if isolate and strategy not in (None, "overlay"):
        words = f"With the strategy {strategy}, changes reach the files at once; to isolate, give no strategy."
        raise Refused("error", "invalid_params", words, field="strategy")
    if strategy is not None:
        return [(strategy, "asked for")]
    if isolate:
        return [("overlay", "isolation asked for")]
    found: list[tuple[StrategyName, str]] = [("notify", "default on Linux")]
    if means.is_watching:
        found.append(("watch", "a watcher is running"))
    return [*found, ("scan", "works everywhere")]


def _capture(name: StrategyName, means: CaptureMeans) -> Capture:
    if name == "notify":
        return Notify(means.keeper, lingers=True)
    if name == "overlay":
        return Overlay()
    if name == "watch" or name == "scan":
        return means.window(name)
    raise Refused("error", "unsupported_strategy", f"There is no capture strategy {name}.", strategy=name)
