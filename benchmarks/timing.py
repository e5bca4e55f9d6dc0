"""How we measure: many runs, the median and the 99th percentile, in microseconds or milliseconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable


def timed_us(act: Callable[[int], object], numbers: Iterable[int]) -> list[float]:
    """The time of each run, sorted."""
    found = []
    for number in numbers:
        start = time.perf_counter()
        act(number)
        found.append((time.perf_counter() - start) * 1e6)
    return sorted(found)


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def show(name: str, ordered: list[float], unit: str = "us") -> None:
    print(f"{name:52} p50 {quantile(ordered, 0.5):9.1f} {unit}   p99 {quantile(ordered, 0.99):9.1f} {unit}")


def directory_bytes(path: str) -> int:
    """The sizes of all files below a folder; of a store, once it is closed."""
    return sum(os.stat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)
