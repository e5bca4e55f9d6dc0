"""What a scan or a watcher finds around a command, as captures without a store."""

from __future__ import annotations

from mulligan.workspace.exec.capture import Caught, StrategyName
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.scan import StatIndex
from mulligan.workspace.exec.spawn import Extras
from mulligan.workspace.exec.watch import Dirty, Watcher


class Scanned:
    """Two looks around the command."""

    name: StrategyName = "scan"

    def begin(self, command: Command) -> Extras:
        self._before = StatIndex.take(command.root)
        return Extras()

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> Caught:
        return Caught(self._before.again().touched_since(self._before), attribution="window")


class Watched:
    """What a watcher that is kept saw between start and end."""

    name: StrategyName = "watch"

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.before = Dirty()
        self.dirty = Dirty()

    def begin(self, command: Command) -> Extras:
        self.before = self._watcher.take()
        return Extras(tended=(self._watcher.fileno(), self._watcher.drain))

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> Caught:
        self.dirty = self._watcher.take()
        return Caught(self.dirty.paths, attribution="window")
