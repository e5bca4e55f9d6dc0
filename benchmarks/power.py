"""The cost of keeping originals until they are synced: a one-file call and a read-only call, in old and new code.

    python benchmarks/power.py OLD_CHECKOUT [--calls 300] [--rounds 6] [--folder FOLDER]

OLD_CHECKOUT is a directory with the older `src` (for example of `git archive`). Old and new code take turns, each round
in a process of its own, in the same folder, which should be on ext4. Prints medians in microseconds and the ratio, of
the time that passed and of the processor time of the thread, which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUND = """
import os, sys, time
import mulligan
base, calls = sys.argv[1], int(sys.argv[2])
os.makedirs(base + "/work")
product = mulligan.open(base + "/work", store=base + "/home")
session = product.session("bench")
def timed(act):
    began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
    with session.call() as call:
        receipt = act(call)
    took = time.perf_counter_ns() - began, time.thread_time_ns() - began_cpu
    assert receipt.status == "ok", receipt
    return took
timed(lambda call: call.write_file("a.txt", "first"))
for count in range(calls):
    write = timed(lambda call: call.write_file("a.txt", f"line {count}\\n" * 300))
    read = timed(lambda call: call.read_file("a.txt"))
    print(*write, *read)
product.close()
"""


KINDS = ("write, passed", "write, processor", "read, passed", "read, processor")


def run(source: Path, folder: str, calls: int) -> list[list[int]]:
    """Of each pair of calls the times in `KINDS`, in nanoseconds."""
    with tempfile.TemporaryDirectory(dir=folder) as base:
        env = {**os.environ, "PYTHONPATH": str(source)}
        command = [sys.executable, "-c", ROUND, base, str(calls)]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return [[int(time) for time in line.split()] for line in ran.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    sources = {"old": Path(given.old) / "src", "new": Path(__file__).parent.parent / "src"}
    times: dict[str, list[list[int]]] = {"old": [], "new": []}
    for _ in range(given.rounds):
        for name, source in sources.items():
            times[name] += run(source.resolve(), given.folder, given.calls)
    for index, kind in enumerate(KINDS):
        old, new = (statistics.median(one[index] for one in times[name]) / 1000 for name in ("old", "new"))
        print(f"{kind:16} old {old:8.0f} µs   new {new:8.0f} µs   ratio {new / old:.3f}")


if __name__ == "__main__":
    main()
