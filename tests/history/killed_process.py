"""Processes that really die: forked, killed at a chosen point, and looked at from outside afterwards.

A death in a thread or by an exception would leave the process's lock on its owner byte, and recovery would rightly see
a living owner. So the work happens in a child that ends by `os._exit` or SIGKILL, with nothing tidied up.
"""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from mulligan.values.paths import RepoPath
from tests.temp_workspace import TempWorkspace, open_temp_workspace

KILLED = 9
Act = Callable[[TempWorkspace], object]


class Countdown:
    """Ends the process at the n-th point: before each step on disk, and after each transaction of the store."""

    def __init__(self, at: int | None) -> None:
        self.passed = 0
        self._at = at

    def reach(self, step: str, path: RepoPath) -> None:
        self.tick()

    def tick(self) -> None:
        self.passed += 1
        if self.passed == self._at:
            os._exit(KILLED)


def in_child(act: Callable[[], int]) -> int:
    """Run in a fork; its exit code, or minus the signal that ended it. An exception there is an error here."""
    child = os.fork()
    if child == 0:
        code = 125
        try:
            code = act()
        except BaseException:  # noqa: BLE001  # a child must never return into the test runner
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code != 125, "the child failed; its traceback is on stderr"
    return code


def die_in(base: Path, act: Act, *, at: int | None) -> bool:
    """Open the workspace in a child, act, and die at the n-th point of it. Whether it died there."""

    def run() -> int:
        countdown = Countdown(None)
        workspace = open_temp_workspace(base, steps=countdown)
        workspace.open_root.ledger.store.owner()
        countdown.passed, countdown._at = 0, at
        workspace.open_root.ledger.store.after_write = countdown.tick  # type: ignore[attr-defined]  # the SQLite store's hook
        act(workspace)
        return 0

    return in_child(run) == KILLED


def die_opening(base: Path, *, at: int) -> bool:
    """Open the workspace in a child, which recovers, and die at the n-th step on disk of that."""

    def run() -> int:
        open_temp_workspace(base, steps=Countdown(at))
        return 0

    return in_child(run) == KILLED


def killed_after(act: Callable[[], None], seconds: float) -> bool:
    """Run in a fork and kill it with SIGKILL after so long, wherever it is. False: it had ended by then."""
    child = os.fork()
    if child == 0:
        code = 125
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001  # a child must never return into the test runner
            traceback.print_exc()
        finally:
            os._exit(code)
    # Not a sleep of the test: the alarm clock of the child's life.
    handle = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(seconds * 1000)
    finally:
        os.close(handle)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code != 125, "the child failed; its traceback is on stderr"
    return code == -signal.SIGKILL
