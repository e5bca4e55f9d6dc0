"""What every way of catching changes promises, and what they catch."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

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


class Notify:
    """Told before each change: see `notify`. `witness` is asked from another thread.

    `caught` is there once `end` was called, however that went. One that `lingers` goes on listening for others until
    it is asked who came `late`, which is to be done.
    """

    name: StrategyName = "notify"

    def __init__(self, witness: Witness, *, lingers: bool = False) -> None:
        self.caught = Caught(frozenset())
        self._lingers = lingers
        self._witness = witness
        self._supervisor: Supervisor | None = None

    def begin(self, command: Command) -> Extras:
        self._supervisor = Supervisor(command.root, self._witness)
        return Extras(program=bpf.program(kernel.MACHINE, notify=True), listens=True)

    def received(self, word: str, fds: list[int]) -> None:
        assert self._supervisor is not None
        self._supervisor.start(fds[0])

    def end(self) -> Caught:
        supervisor = self._supervisor
        assert supervisor is not None
        try:
            supervisor.join()
        finally:
            touched, shared = supervisor.touched, supervisor.shared()
            self.caught = Caught(touched, supervisor.coverage(), supervisor.stops, shared=shared)
            if not touched or not self._lingers:
                supervisor.close()
        return self.caught

    def late(self) -> frozenset[bytes]:
        """Of what the command touched, what somebody else has changed since `end`."""
        if self._supervisor is None:
            return frozenset()
        try:
            return self._supervisor.shared() - self.caught.shared
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
