"""Two checkouts, taking turns: what one request of each kind costs in each of them.

    python benchmarks/compare.py OLD_CHECKOUT [NEW_CHECKOUT] [--runs 7] [--only NAME ...] [--json FILE]

NEW_CHECKOUT is this one unless given. Each run is a process of its own that warms up and then measures one kind of
request: statements and changed pages of the database, system calls (where `strace` is installed), call events of
functions below `src/mulligan`, CPU time and wall time. Prints one table of medians and ratios, and writes JSON.
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
from pathlib import Path

WORKER = Path(__file__).with_name("compare_worker.py")
SCENARIOS = (
    "write_file",
    "edit_file",
    "patch_ten_files",
    "exec_one_file",
    "undo",
    "read_file",
    "status",
    "mcp_read_file",
    "mcp_workspace_write_file",
    "hook_pair",
    "message",
)
MEASURES = ("statements", "pages", "system_calls", "call_events", "cpu_us", "wall_us")
_STRACE_LINE = re.compile(r"^\s*100\.00\s.*?\s(\d+)(?:\s+\d+)?\s+total$", re.MULTILINE)

Measured = dict[str, float]


def measure(checkout: Path, scenario: str) -> Measured:
    """One run. System calls are counted in a run of their own: tracing makes everything slower."""
    found = _run(checkout, scenario, "measure")
    if shutil.which("strace"):
        few, many = (_system_calls(checkout, scenario, times) for times in (5, 15))
        found["system_calls"] = (many - few) / 10
    return found


def _run(checkout: Path, scenario: str, mode: str, *around: str, times: int = 20) -> Measured:
    with tempfile.TemporaryDirectory(prefix="mulligan-compare-") as base:
        env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "MULLIGAN_HOME": f"{base}/home", "HOME": base}
        command = [*around, sys.executable, str(WORKER), scenario, mode, base, str(times)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{scenario} in {checkout} ended with {done.returncode}:\n{done.stderr}")
    found: Measured = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _system_calls(checkout: Path, scenario: str, times: int) -> int:
    with tempfile.NamedTemporaryFile("r") as summary:
        _run(checkout, scenario, "only", "strace", "-f", "-c", "-o", summary.name, times=times)
        match = _STRACE_LINE.search(summary.read())
    if match is None:
        raise SystemExit("strace printed no total")
    return int(match[1])


def compare(checkouts: dict[str, Path], scenario: str, runs: int) -> dict[str, Measured]:
    """The medians of each checkout."""
    found: dict[str, list[Measured]] = {name: [] for name in checkouts}
    for _ in range(runs):
        for name, checkout in checkouts.items():
            found[name].append(measure(checkout, scenario))
    return {
        name: {key: statistics.median(one[key] for one in several) for key in MEASURES if key in several[0]}
        for name, several in found.items()
    }


def table(results: dict[str, dict[str, Measured]]) -> str:
    lines = [f"{'request':26}{'measure':14}{'old':>12}{'new':>12}{'ratio':>8}"]
    for scenario, sides in results.items():
        for key in MEASURES:
            if key in sides["old"] and key in sides["new"]:
                old, new = sides["old"][key], sides["new"][key]
                ratio = f"{new / old:8.2f}" if old else f"{'-':>8}"
                lines.append(f"{scenario:26}{key:14}{old:12.1f}{new:12.1f}{ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parent.parent)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--json", type=Path, default=Path("compare.json"))
    given = parser.parse_args()
    checkouts = {"old": given.old.resolve(), "new": given.new.resolve()}
    results = {scenario: compare(checkouts, scenario, given.runs) for scenario in given.only}
    given.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
