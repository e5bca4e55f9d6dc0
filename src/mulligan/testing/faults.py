"""Fault plans for the disk: what happens when a certain step is reached.

A plan is handed to a disk as its `steps`. It hears the name of every step just before it happens, remembers it, and at
the chosen ones fails it, ends the process, or lets somebody else act first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mulligan.values.paths import RepoPath

Act: TypeAlias = Callable[[str, RepoPath], None]


class Crash(BaseException):
    """The process ended here. No handler of the product catches it, so nothing tidies up on the way out."""


@dataclass(slots=True)
class _Rule:
    """Fires at the `at`-th step that has the name, or any name; with `lasting`, at every one from there on."""

    act: Act
    at: int
    step: str | None
    lasting: bool
    met: int = 0

    def hears(self, step: str) -> bool:
        if self.step is not None and step != self.step:
            return False
        self.met += 1
        return self.met >= self.at if self.lasting else self.met == self.at


class FaultPlan:
    """Implements `workspace.disk.Steps`. Positions count from 1; without a step's name they count all steps.

    The methods return the plan, so that a plan reads as one expression.
    """

    def __init__(self) -> None:
        self.reached: list[tuple[str, RepoPath]] = []
        self.crashed = False
        self._rules: list[_Rule] = []

    def act(self, what: Act, *, at: int = 1, step: str | None = None, lasting: bool = False) -> FaultPlan:
        """Call `what` with the step and its path just before it happens: a slow disk, or a person at work."""
        self._rules.append(_Rule(what, at, step, lasting))
        return self

    def fail(self, number: int, *, at: int = 1, step: str | None = None, lasting: bool = False) -> FaultPlan:
        """The step fails with this errno instead of happening."""

        def refuse(_: str, path: RepoPath) -> None:
            raise OSError(number, os.strerror(number), path)

        return self.act(refuse, at=at, step=step, lasting=lasting)

    def crash_before(self, *, at: int = 1, step: str | None = None) -> FaultPlan:
        """The process ends just before the step. A dead process takes no further one."""
        return self.act(self._end, at=at, step=step)

    def crash_after(self, *, at: int = 1, step: str | None = None) -> FaultPlan:
        """The process ends when the step has happened: as the next one, whatever it is, is about to."""

        def arm(_: str, __: RepoPath) -> None:
            self._rules.append(_Rule(self._end, 1, None, lasting=True))

        return self.act(arm, at=at, step=step)

    def _end(self, step: str, path: RepoPath) -> None:
        self.crashed = True
        raise Crash(f"at {step} of {path}")

    def reach(self, step: str, path: RepoPath) -> None:
        if self.crashed:
            raise Crash(f"already, before {step} of {path}")
        self.reached.append((step, path))
        for rule in [rule for rule in self._rules if rule.hears(step)]:
            rule.act(step, path)


def steps_of(run: Callable[[FaultPlan], object]) -> list[str]:
    """The steps of an undisturbed run: what to sweep a fault over."""
    plan = FaultPlan()
    run(plan)
    return [step for step, _ in plan.reached]
