"""What every way of catching changes promises, and what they catch."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from mulligan.values.entries import Entry
from mulligan.values.plain import plain
from mulligan.workspace.exec import bpf, kernel
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.ledger import Witness
from mulligan.workspace.exec.notify import Supervisor
from mulligan.workspace.exec.spawn import Extras

StrategyName: TypeAlias = Literal["notify", "watch", "scan", "overlay", "bare"]
Attribution: TypeAlias = Literal["call", "window"]
Coverage: TypeAlias = tuple[tuple[bytes, str], ...]


@plain(slots=True, frozen=True)
class Caught:
    """Absolute real paths that may have changed. With `window`, others may have changed them too."""

    touched: frozenset[bytes]
    coverage: Coverage = ()
    stops: int = 0
    attribution: Attribution = "call"
    shared: frozenset[bytes] = frozenset()
    """of `touched`, what somebody else has changed as well while the command ran"""
    moved_away: frozenset[bytes] = frozenset()
    """folders that the watcher saw leave: whatever the baseline knows below them is touched too"""


class Capture(Protocol):
    """One way of catching the changes of one command. Used once: `begin`, `received` as it starts, then `end`."""

    @property
    def name(self) -> StrategyName: ...

    def begin(self, command: Command) -> Extras:
        """Make ready; what to add to the command's start."""

    def received(self, word: str, fds: list[int]) -> None:
        """A descriptor from the command's side, owned by the capture from now on."""

    def end(self) -> Caught:
        """After the last descendant. Raises what broke on the way."""


class Baseline(Protocol):
    """What paths were before, for the ways that see a change only afterwards."""

    def before_of(self, path: bytes) -> Entry | None:
        """The entry before the command, with its bytes in the store; None if it was never captured."""


def without_baseline(touched: frozenset[bytes], baseline: Baseline | None) -> Coverage:
    """What was touched and cannot be put back, because nobody kept how it was."""
    if baseline is None:
        return ()
    return tuple((path, "no_baseline") for path in sorted(touched) if baseline.before_of(path) is None)


class Notify:
    """Told before each change: see `notify`. `witness` is asked from another thread."""

    name: StrategyName = "notify"

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._supervisor: Supervisor | None = None

    def begin(self, command: Command) -> Extras:
        self._supervisor = Supervisor(command.root, self._witness)
        return Extras(program=bpf.program(kernel.MACHINE, notify=True), listens=True)

    def received(self, word: str, fds: list[int]) -> None:
        assert self._supervisor is not None
        self._supervisor.start(fds[0])

    def end(self) -> Caught:
        assert self._supervisor is not None
        try:
            self._supervisor.join()
            touched, shared = self._supervisor.touched, self._supervisor.shared()
            return Caught(touched, self._supervisor.coverage(), self._supervisor.stops, shared=shared)
        finally:
            self._supervisor.close()


class Bare:
    """Catches nothing: for commands whose changes are somebody else's business, and to measure the others against."""

    name: StrategyName = "bare"

    def begin(self, command: Command) -> Extras:
        return Extras()

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> Caught:
        return Caught(frozenset())
