"""Which way of catching changes, and why. The reason goes into the receipt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.exec.capture import Capture, Notify, StrategyName
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.ledger import Witness
from mulligan.workspace.exec.output import Sink
from mulligan.workspace.exec.overlay import Overlay
from mulligan.workspace.exec.pump import Handle
from mulligan.workspace.exec.run import Ran, run

WindowName: TypeAlias = Literal["watch", "scan"]


@plain(slots=True, frozen=True)
class Means:
    """What there is to catch changes with."""

    witness: Witness
    window: Callable[[WindowName], Capture]
    """the ways that see a window of time, as whoever keeps what was there before has them"""
    is_watching: bool = False
    """a watcher is running already, so that `watch` costs less than a scan"""
    begun: Callable[[Capture], object] = bool
    """told of each way that is tried: an interrupt leaves nobody else who knows what it caught"""


def run_caught(
    command: Command,
    means: Means,
    *,
    strategy: StrategyName | None = None,
    isolate: bool = False,
    sink: Sink,
    handle: Handle | None = None,
    deadline: float | None = None,
) -> tuple[Ran, Capture]:
    """Run by the way asked for, else the best this machine has: `notify`, `watch`, `scan`; to isolate, `overlay`.

    A way that was asked for and cannot be had is `unsupported_strategy`; otherwise the next is tried, with the reason.
    One that cannot isolate where that is asked for is `invalid_params`. The capture holds what is particular to it
    (`Overlay.changes`, `Notify.late`).
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
    raise Refused("error", "unsupported_strategy", "No way of catching changes works here.")


def _candidates(means: Means, strategy: StrategyName | None, *, isolate: bool) -> list[tuple[StrategyName, str]]:
    if isolate and strategy not in (None, "overlay"):
        words = f"Changes caught by {strategy} reach the files at once; to isolate, leave the strategy out."
        raise Refused("error", "invalid_params", words, field="strategy")
    if strategy is not None:
        return [(strategy, "asked for")]
    if isolate:
        return [("overlay", "isolation asked for")]
    found: list[tuple[StrategyName, str]] = [("notify", "default on Linux")]
    if means.is_watching:
        found.append(("watch", "a watcher is running"))
    return [*found, ("scan", "works everywhere")]


def _capture(name: StrategyName, means: Means) -> Capture:
    if name == "notify":
        return Notify(means.witness, lingers=True)
    if name == "overlay":
        return Overlay()
    if name == "watch" or name == "scan":
        return means.window(name)
    raise Refused("error", "unsupported_strategy", f"There is nothing to catch changes by {name} with.", strategy=name)
