"""How long single file effects take, and how much memory a read out of a huge file needs.

    python benchmarks/files.py [--rounds N]

Goals: `read_file` of 16 KiB in at most 0.3 ms (median), and 16 KiB out of a sparse file of 1 GiB with less than 1 MiB
allocated. Each effect is measured inside one open call (what an agent pays per effect) and as a call of its own (with
its begin and end on record).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import cycle
from typing import Any

from timing import quantile, timed_us

import mulligan
from mulligan import Session

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
READ_GOAL_MS = 0.3
MEMORY_GOAL_BYTES = MIB


def median_ms(act: Callable[[int], object], rounds: int) -> float:
    timed_us(act, range(rounds // 10 + 1))
    return quantile(timed_us(act, range(rounds)), 0.5) / 1000


def effects(root: str) -> dict[str, Callable[[int], tuple[str, dict[str, Any]]]]:
    """A request for each round of each measurement."""
    with open(os.path.join(root, "read"), "wb") as file:
        file.write(b"a line of text, as files have them\n" * 500)
    with open(os.path.join(root, "edited"), "wb") as file:
        file.write(b"on\n" + b"x" * 4 * KIB)
    ways = [("on", "off"), ("off", "on")]
    switch = cycle({"old_string": old, "new_string": new} for old, new in ways)
    sixteen = "y" * 16 * KIB
    return {
        "read_file 16 KiB": lambda _: ("read_file", {"path": "read", "max_bytes": 16 * KIB}),
        "stat": lambda _: ("stat", {"path": "read"}),
        "write_file 16 KiB": lambda number: ("write_file", {"path": "written", "content": f"{number}{sixteen}"}),
        "edit_file 4 KiB": lambda _: ("edit_file", {"path": "edited", **next(switch)}),
    }


def measure(session: Session, root: str, rounds: int) -> dict[str, tuple[float, float]]:
    found = {}
    for name, ask in effects(root).items():

        def alone(number: int, ask: Callable[[int], tuple[str, dict[str, Any]]] = ask) -> None:
            receipt, _ = session.perform(*ask(number))
            assert receipt.ok, receipt

        with session.call() as call:

            def inside(number: int, ask: Callable[[int], tuple[str, dict[str, Any]]] = ask) -> None:
                effect, params = ask(number)
                receipt = call.perform(effect, **params)
                assert receipt.ok, receipt

            within = median_ms(inside, rounds)
        found[name] = (within, median_ms(alone, rounds))
    return found


def peak_of_a_read(session: Session, root: str) -> int:
    """Bytes allocated at most while 16 KiB are read from the middle of a sparse file of 1 GiB."""
    with open(os.path.join(root, "huge"), "wb") as file:
        file.truncate(GIB)
    with session.call() as call:
        request = {"path": "huge", "offset_bytes": GIB // 2, "max_bytes": 16 * KIB}
        call.perform("read_file", **request)
        tracemalloc.start()
        assert call.perform("read_file", **request).ok
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description="Time single file effects.")
    parser.add_argument("--rounds", type=int, default=300)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        root = os.path.join(base, "work")
        os.mkdir(root)
        with mulligan.open(root, store=os.path.join(base, "home")) as workspace:
            session = workspace.session("bench")
            found = measure(session, root, asked.rounds)
            peak = peak_of_a_read(session, root)
    print(f"{'median of ' + str(asked.rounds):24}{'in a call':>14}{'as a call':>14}")
    for name, (within, alone) in found.items():
        print(f"{name:24}{within:>11.3f} ms{alone:>11.3f} ms")
    print(f"16 KiB of 1 GiB: {peak / KIB:.0f} KiB allocated at most")
    good = found["read_file 16 KiB"][0] <= READ_GOAL_MS and peak < MEMORY_GOAL_BYTES
    print("goals met" if good else "goals missed")


if __name__ == "__main__":
    main()
