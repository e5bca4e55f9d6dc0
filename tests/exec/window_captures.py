"""Captures without a store: what a scan or a watcher finds around a command, and one that finds nothing."""

from __future__ import annotations

from mulligan.exec.capture.notify import CaughtPaths, StrategyName
from mulligan.exec.capture.scan import StatIndex
from mulligan.exec.command import Command
from mulligan.exec.start import StartOptions
from mulligan.files.tree.watcher import Dirty, Watcher


class Scanned:
    """Two looks around the command."""

    name: StrategyName = "scan"

    def begin(self, command: Command) -> StartOptions:
        self._before = StatIndex.take(command.root)
        return StartOptions()

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> CaughtPaths:
        return CaughtPaths(self._before.again().touched_since(self._before), attribution="window")


class Watched:
    """What a watcher that is kept saw between start and end."""

    name: StrategyName = "watch"

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.before = Dirty()
        self.dirty = Dirty()

    def begin(self, command: Command) -> StartOptions:
        self.before = self._watcher.take()
        return StartOptions(tended=(self._watcher.fileno(), self._watcher.drain))

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> CaughtPaths:
        self.dirty = self._watcher.take()
        return CaughtPaths(self.dirty.paths, attribution="window")


class NoCapture:
    """Captures nothing: for tests of the run itself, and for measuring what the strategies cost."""

    name: StrategyName = "bare"

    def begin(self, command: Command) -> StartOptions:
        return StartOptions()

    def received(self, word: str, fds: list[int]) -> None:
        raise AssertionError(word)

    def end(self) -> CaughtPaths:
        return CaughtPaths(frozenset())
