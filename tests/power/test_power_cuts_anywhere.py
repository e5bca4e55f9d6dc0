"""Power cuts at any moment of a history with every kind of call: what Mulligan promises holds in each state left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.power.disk_states import Mode, Recording, read_tree
from tests.power.history import KINDS, record
from tests.power.recorder import read_log

CHECK = Path(__file__).with_name("check.py")
MODES: tuple[Mode, ...] = ("process", "power")
STATES_A_KIND_FAST = 5
"""In each mode, so 200 states together."""
STATES_A_KIND_SLOW = 26
HISTORIES_SLOW = 4
"""Of each mode, so 2 080 states and 104 of each kind in each mode."""
SECOND_CUTS_FAST = 10
SECOND_CUTS_SLOW = 100


@dataclass(frozen=True)
class Recorded:
    """A recorded history: its folder, which the checks fill anew for every state, and the log of its operations."""

    mode: Mode
    base: Path
    log: Path

    def results(self, *arguments: str) -> list[dict[str, Any]]:
        argv = [sys.executable, str(CHECK), str(self.base), str(self.log), self.mode, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def broken_promises(self, states_a_kind: int) -> list[str]:
        """What broke a promise, with how to repeat it. As many states of each kind of call."""
        results = self.results("states", "0", str(states_a_kind * len(KINDS)))
        assert Counter(result["kind"] for result in results) == dict.fromkeys(KINDS, states_a_kind)
        return self._repeatable(results, "states")

    def broken_promises_of_second_cuts(self, states: int) -> list[str]:
        results = self.results("twice", "0", str(states))
        assert len(results) == states
        return self._repeatable(results, "twice")

    def _repeatable(self, results: list[dict[str, Any]], verb: str) -> list[str]:
        again = f"{sys.executable} {CHECK} {self.base} {self.log} {self.mode} {verb}"
        return [f"{one['violations']}\n    {again} {one['seed']} 1" for one in results if one["violations"]]


def recorded(folder: Path, mode: Mode, seed: int = 1) -> Recorded:
    """The log stays beside the folder, so that a failing state can be opened again."""
    base, log = folder / f"{mode}-{seed}", folder / f"{mode}-{seed}.log"
    base.mkdir()
    record(str(base), str(log), mode=mode, seed=seed)
    known = Recording(read_log(str(log))).tree(".")
    there = {f"./{place}": node[:3] for place, node in read_tree(str(base), ".").items()}
    assert {place: node[:3] for place, node in known.items()} == there, "the recorder missed an operation"
    return Recorded(mode, base, log)


@pytest.mark.req("D5.power_cut_tester")
@pytest.mark.parametrize("mode", MODES)
def test_a_power_cut_in_any_kind_of_call_breaks_no_promise(tmp_path: Path, mode: Mode) -> None:
    made = recorded(tmp_path, mode)
    assert made.broken_promises(STATES_A_KIND_FAST) == []
    assert made.broken_promises_of_second_cuts(SECOND_CUTS_FAST) == []


@pytest.mark.slow
@pytest.mark.req("D5.power_cut_tester")
@pytest.mark.parametrize("seed", range(1, HISTORIES_SLOW + 1))
@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_power_cuts_break_no_promise(tmp_path: Path, mode: Mode, seed: int) -> None:
    made = recorded(tmp_path, mode, seed)
    assert made.broken_promises(STATES_A_KIND_SLOW) == []
    assert made.broken_promises_of_second_cuts(SECOND_CUTS_SLOW) == []
