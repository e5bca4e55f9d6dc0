"""Compares two checkouts, taking turns: the cost of one request of each kind.

    python benchmarks/compare.py OLD_CHECKOUT [NEW_CHECKOUT] [--runs 7] [--only NAME ...] [--json FILE]

NEW_CHECKOUT is this one unless given. Both run on the Python and the packages that run this script. Each run is a
process of its own that warms up and then measures one kind of request:

- statements and pages that SQLite runs and writes;
- system calls (where `strace` is installed), those of commands and of servers included;
- calls of functions below `src/mulligan` (`call_events`), and in how many files these are (`call_files`);
- processor time and wall time, with nothing counted meanwhile.

Where a server does the work (MCP, hooks), the counts and the processor time are the server's. Prints one table (medians
of the times, the lowest counts, because what other threads do meanwhile adds some) and writes the same as JSON. `more`
marks one statement, page or system call more, over 1.10 times the processor time, and over 1.20 times the wall time:
look twice at those. The exit code is 0 either way.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

WORKER = Path(__file__).with_name("compare_worker.py")
SCENARIOS = (
    *("write_file", "edit_file", "patch_ten_files", "exec_one_file", "undo", "read_file", "status", "cli_undo"),
    *("mcp_read_file", "mcp_workspace_write_file", "hook_pair", "message"),
)
LIMITS = {
    "statements": 1.0,
    "pages": 1.0,
    "system_calls": 1.0,
    "call_events": None,
    "call_files": None,
    "cpu_us": 1.10,
    "wall_us": 1.20,
}
TIMES = {"time": 40, "count": 11, "trace": 11}
"""How many requests one process measures after it has warmed up."""
BEGIN, END = "/mulligan-compare-begin", "/mulligan-compare-end"

Measured = dict[str, float]


def measure(checkout: Path, scenario: str) -> Measured:
    """One turn of one checkout. Counting and tracing make everything slower, so each has a process of its own."""
    found = _run(checkout, scenario, "time") | _run(checkout, scenario, "count")
    if shutil.which("strace"):
        found["system_calls"] = _system_calls(checkout, scenario)
    return found


def _run(checkout: Path, scenario: str, mode: str, *around: str) -> Measured:
    with tempfile.TemporaryDirectory(prefix="mulligan-compare-", ignore_cleanup_errors=True) as base:
        # A safe path: this folder has modules that are called like packages (`mcp`).
        places = {"PYTHONPATH": str(checkout / "src"), "MULLIGAN_HOME": f"{base}/home", "HOME": base}
        env = {**os.environ, **places, "PYTHONSAFEPATH": "1"}
        command = [*around, sys.executable, str(WORKER), scenario, mode, base, str(TIMES[mode])]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{scenario} in {checkout} ended with {done.returncode}:\n{done.stderr}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if not Path(found.pop("source")).is_relative_to(checkout):
        raise SystemExit(f"{checkout} has no src/mulligan that Python could import")
    return dict(found)


def _system_calls(checkout: Path, scenario: str) -> float:
    """The least that `strace` saw between the two marks around a request, in all processes."""
    with tempfile.NamedTemporaryFile("r", errors="replace") as trace:
        _run(checkout, scenario, "trace", "strace", "-f", "-qq", "-e", "signal=none", "-o", trace.name)
        return min(_counts_between_marks(trace))


def _counts_between_marks(lines: Iterable[str]) -> Iterable[int]:
    count: int | None = None
    for line in lines:
        if BEGIN in line:
            count = 0
        elif END in line and count is not None:
            yield count
            count = None
        elif count is not None and re.match(r"\d+ +\w+\(", line):
            count += 1


def compare(checkouts: dict[str, Path], scenario: str, runs: int) -> dict[str, Measured]:
    """The medians of the times of each checkout, and the lowest of its counts."""
    found: dict[str, list[Measured]] = {name: [] for name in checkouts}
    for run in range(runs):
        # Neither is always the one that the other has warmed the machine up for.
        for name in checkouts if run % 2 == 0 else reversed(checkouts):
            found[name].append(measure(checkouts[name], scenario))
    return {
        name: {
            key: (statistics.median if key.endswith("_us") else min)([one[key] for one in several])
            for key in LIMITS
            if key in several[0]
        }
        for name, several in found.items()
    }


def rows(scenario: str, sides: dict[str, Measured]) -> Iterable[str]:
    for key, limit in LIMITS.items():
        if key in sides["old"] and key in sides["new"]:
            old, new = sides["old"][key], sides["new"][key]
            ratio = f"{new / old:8.2f}" if old else f"{'-':>8}"
            verdict = "  more" if limit is not None and new > old * limit else ""
            yield f"{scenario:26}{key:14}{old:12.1f}{new:12.1f}{ratio}{verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parent.parent)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--json", type=Path, default=Path("compare.json"))
    given = parser.parse_args()
    checkouts = {"old": given.old.resolve(), "new": given.new.resolve()}
    results: dict[str, dict[str, Measured]] = {}
    print(f"{'request':26}{'measure':14}{'old':>12}{'new':>12}{'ratio':>8}", flush=True)
    for scenario in given.only:
        results[scenario] = compare(checkouts, scenario, given.runs)
        print("\n".join(rows(scenario, results[scenario])), flush=True)
        given.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
