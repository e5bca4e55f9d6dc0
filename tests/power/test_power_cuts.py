"""Power cuts at any moment of a history with every kind of call: what Mulligan promises holds in each state left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from power.check import sites_of
from power.disk_states import Mode, Recording, read_tree
from power.history import KINDS, record
from power.recorder import read_log

CHECK = Path(__file__).with_name("check.py")
MODES: tuple[Mode, ...] = ("power",)
STATES_A_KIND_FAST = 5
STATES_A_KIND_SLOW = 105
HISTORIES_SLOW = 3
SYNCS_OF_PROCESS_MODE = ("store/housekeeping.py:", "store/sqlite.py:SqliteStore.sync:")
"""A sync mark and a reboot in `process` mode need these; `tests/store/test_housekeeping.py` has their tests."""


@dataclass(frozen=True)
class Recorded:
    """A recorded history: its folder, which the checks fill anew for every state, and the log of its operations."""

    mode: Mode
    seed: int
    base: Path
    log: Path

    def results(self, *arguments: str) -> Iterator[dict[str, Any]]:
        argv = [sys.executable, str(CHECK), str(self.base), str(self.log), self.mode, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return map(json.loads, done.stdout.splitlines())

    def broken_promises(self, states: int) -> list[str]:
        """What broke a promise, with how to repeat it. As many states of each kind of call."""
        results = list(self.results("states", "0", str(states)))
        counted = Counter(result["kind"] for result in results)
        assert counted == dict.fromkeys(KINDS, states // len(KINDS))
        again = f"{sys.executable} {CHECK} {self.base} {self.log} {self.mode} states"
        return [f"{one['violations']}\n    {again} {one['seed']} 1" for one in results if one["violations"]]


def recorded(folder: Path, mode: Mode, seed: int = 1) -> Recorded:
    """The log is kept beside the folder, so that a failing state can be opened again."""
    base, log = folder / f"{mode}-{seed}", folder / f"{mode}-{seed}.log"
    base.mkdir()
    record(str(base), str(log), mode=mode, seed=seed)
    return Recorded(mode, seed, base, log)


@pytest.mark.req("D5.power_cut_tester")
@pytest.mark.parametrize("mode", MODES)
def test_a_power_cut_in_any_kind_of_call_breaks_no_promise(tmp_path: Path, mode: Mode) -> None:
    made = recorded(tmp_path, mode)
    assert made.broken_promises(STATES_A_KIND_FAST * len(KINDS)) == []


@pytest.mark.slow
@pytest.mark.req("D5.power_cut_tester")
@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_power_cuts_break_no_promise(tmp_path: Path, mode: Mode) -> None:
    found = []
    for seed in range(1, HISTORIES_SLOW + 1):
        made = recorded(tmp_path, mode, seed)
        found += made.broken_promises(STATES_A_KIND_SLOW // HISTORIES_SLOW * len(KINDS))
        shutil.rmtree(made.base)
    assert found == []


@pytest.mark.slow
@pytest.mark.req("D5.each_sync_is_needed")
def test_without_any_single_sync_a_power_cut_breaks_a_promise(tmp_path: Path) -> None:
    histories = [recorded(tmp_path, mode) for mode in MODES]
    needed: dict[str, bool] = {}
    for made in histories:
        for site in sites_of(Recording(read_log(str(made.log)))):
            if not needed.get(site) and not site.startswith(SYNCS_OF_PROCESS_MODE):
                needed[site] = any(one["violations"] for one in made.results("without", site))
    assert [site for site, is_needed in needed.items() if not is_needed] == []


@pytest.mark.req("D5.power_cut_tester")
def test_the_recorder_misses_no_operation(tmp_path: Path) -> None:
    made = recorded(tmp_path, "power", seed=4)
    known = Recording(read_log(str(made.log))).tree(".")
    assert {place: node[:3] for place, node in known.items()} == {
        f"./{place}": node[:3] for place, node in read_tree(str(made.base), ".").items()
    }
