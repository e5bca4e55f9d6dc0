"""Interrupts at chosen lines of Mulligan: KeyboardInterrupt is raised where a line is about to run.

The trace function only raises. A profile function, which Python keeps when a trace function raises, arms the second
interrupt of two in a row.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from types import FrameType
from typing import Any

import mulligan

SOURCE = str(Path(mulligan.__file__).parent)
UNRAISABLE = "__del__"
"""Python drops what is raised there, so an interrupt is lost."""
LOST_STACK = "'traceback' object is not callable"
"""What Python 3.11 raises if a trace function raises while a `with` statement is left: it calls the wrong object."""


class Lines:
    """Counts the lines of Mulligan that run, and raises at those whose numbers are given, one after the other."""

    def __init__(self, *at: int) -> None:
        self.counted = 0
        self.where: list[str] = []
        self.raised: BaseException | None = None
        self._at = list(at)

    def run(self, act: Callable[[], object]) -> bool:
        """Whether `act` came to its end."""
        trace = self._trace
        sys.setprofile(self._profile)
        sys.settrace(trace)
        try:
            act()
            return True
        except (KeyboardInterrupt, TypeError) as error:
            if isinstance(error, TypeError) and str(error) != LOST_STACK:
                raise
            self.raised = error
            return False
        finally:
            self._at.clear()
            sys.setprofile(None)
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.counted += 1
            if self._at and self.counted >= self._at[0] and not is_unraisable(frame):
                self._at.pop(0)
                self.where.append(f"{code.co_filename.removeprefix(SOURCE)}:{frame.f_lineno} {code.co_name}")
                raise KeyboardInterrupt
        return self._trace

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self._at or sys.gettrace() is not None:
            return
        sys.settrace(self._trace)
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_filename.startswith(SOURCE):
                above.f_trace = self._trace
            above = above.f_back


def is_unraisable(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != UNRAISABLE:
        frame = frame.f_back
    return frame is not None


def lines_of(act: Callable[[], object]) -> int:
    """How many lines of Mulligan run."""
    lines = Lines()
    assert lines.run(act)
    return lines.counted


def sample(count: int, of: int, *, seed: int) -> Sequence[int]:
    """Numbers of lines, at most `count`, each time the same."""
    everything = range(1, of + 1)
    print(f"{count} of {of} lines, seed {seed}")
    return sorted(random.Random(seed).sample(everything, min(count, of)))


def pairs(count: int, of: int, *, seed: int) -> Sequence[tuple[int, int]]:
    """Two interrupts in a row: the second comes some lines after the first, often at once."""
    chosen = random.Random(seed)
    print(f"{count} pairs of {of} lines, seed {seed}")
    firsts = [chosen.randint(1, of) for _ in range(count)]
    return [(first, first + chosen.choice((1, 2, 3, 5, 8, 13, 30, 100))) for first in firsts]


def variables_set() -> dict[str, object]:
    """Context variables of Mulligan that are set here, but for the workspace that is open."""
    return {
        var.name: value
        for var, value in copy_context().items()
        if var.name.startswith("mulligan_") and var.name != "mulligan_workspace" and value
    }
