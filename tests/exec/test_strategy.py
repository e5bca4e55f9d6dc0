"""Which way is taken, and how the receipt says why."""

from __future__ import annotations

import os
import pty
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mulligan.exec.capture.notify import Notify, StrategyName
from mulligan.exec.capture.overlay import Overlay
from mulligan.exec.command import Spools, command
from mulligan.exec.run import CaptureMeans, CommandResult, run, run_captured
from mulligan.values.errors import Refused
from tests.exec.trees import Recorder
from tests.exec.window_captures import Scanned

MEANS = CaptureMeans(Recorder(), window=lambda _: Scanned())


def taken(
    root: Path, means: CaptureMeans = MEANS, *, strategy: StrategyName | None = None, isolate: bool = False
) -> CommandResult:
    asked = command(["sh", "-c", "echo x > a"], str(root))
    ran, capture = run_captured(asked, means, strategy=strategy, isolate=isolate, sink=Spools())
    if isinstance(capture, Overlay):
        capture.close()
    if isinstance(capture, Notify):
        assert capture.late() == frozenset()
    return ran


def test_notify_is_the_default(tmp_path: Path) -> None:
    ran = taken(tmp_path)
    assert (ran.strategy, ran.strategy_reason, ran.attribution) == ("notify", "default on Linux", "call")


def test_isolation_is_an_overlay(tmp_path: Path) -> None:
    ran = taken(tmp_path, isolate=True)
    assert (ran.strategy, ran.strategy_reason) == ("overlay", "isolation asked for")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", ["notify", "scan", "watch"])
def test_a_strategy_that_cannot_isolate_is_refused_with_isolate(tmp_path: Path, strategy: StrategyName) -> None:
    with pytest.raises(Refused) as refused:
        taken(tmp_path, strategy=strategy, isolate=True)
    assert (refused.value.code, list(tmp_path.iterdir())) == ("invalid_params", [])


@pytest.mark.parametrize("strategy", ["notify", "scan", "overlay"])
def test_the_requested_strategy_is_used(tmp_path: Path, strategy: StrategyName) -> None:
    ran = taken(tmp_path, strategy=strategy)
    assert (ran.strategy, ran.strategy_reason) == (strategy, "asked for")
    assert ran.touched >= {os.fsencode(os.path.realpath(tmp_path)) + b"/a"}


def test_a_strategy_that_captures_nothing_cannot_be_requested(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        taken(tmp_path, strategy="bare")
    assert refused.value.code == "unsupported_strategy"


def test_where_notify_cannot_be_had_the_next_is_taken_and_the_reason_kept(tmp_path: Path) -> None:
    """Inside a command that is itself caught by notify, the kernel allows no second listener."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from tests.exec.test_strategy import *\n"
        "ran = taken(Path('.'))\n"
        "print(ran.strategy, ran.attribution, ran.strategy_reason, sep='|')\n"
    )
    spools = Spools()
    asked = command([sys.executable, "-c", code, *sys.path], str(tmp_path))
    outer = run(asked, capture=Notify(Recorder()), sink=spools)
    strategy, attribution, reason = (spools.stdout.inline() or b"").decode().split("|")
    assert (strategy, attribution) == ("scan", "window")
    assert reason.startswith("works everywhere; ")
    assert os.fsencode(os.path.realpath(tmp_path)) + b"/a" in outer.touched


def test_a_command_with_our_terminal_has_it_and_is_caught(tmp_path: Path) -> None:
    """In a child with a terminal of its own, so that the test's own streams stay out of it."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            asked = command([sys.executable, "-S", "-c", "open('a','w'); print(input('? ') * 2)"], str(tmp_path))
            ran = run(replace(asked, terminal=True), capture=Notify(Recorder()), sink=Spools())
            os._exit(0 if ran.exit_code == 0 and len(ran.touched) == 1 else 1)
        finally:
            os._exit(2)
    seen = b""
    while b"? " not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"ab\n")
    while b"abab" not in seen:
        seen += os.read(terminal, 4096)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)
