"""A seeded world: time, ids, randomness and the order of events all follow from one number.

A failing run names its seed; the same seed gives the same run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from datetime import UTC, datetime, timedelta
from random import Random
from types import TracebackType
from typing import TypeAlias

from mulligan.values.fast_dataclass import fast_dataclass

SEED_VARIABLE = "MULLIGAN_SEED"

_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)

Ready: TypeAlias = Callable[[], bool]
Actor: TypeAlias = Iterator[Ready | None]
"""At each `yield` other actors may run; yielding a condition waits until it is true."""


@fast_dataclass(slots=True, frozen=True)
class Seed:
    """One number that repeats a run. As a `with` block, it adds itself to an exception that leaves the block."""

    number: int

    @classmethod
    def chosen(cls, otherwise: int) -> Seed:
        """The seed in `MULLIGAN_SEED`, to repeat a failure, else the given one."""
        return cls(int(os.environ.get(SEED_VARIABLE, otherwise)))

    def random(self) -> Random:
        return Random(self.number)

    def __enter__(self) -> Seed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"Repeat with {SEED_VARIABLE}={self.number}")


class SteppingClock:
    """A clock that moves by the same step at each reading."""

    def __init__(self, start: datetime = _BEGINNING, *, step: timedelta = _MS) -> None:
        self._next = start
        self._step = step

    def now(self) -> datetime:
        now = self._next
        self._next = now + self._step
        return now

    def advance(self, by: timedelta) -> None:
        """Move the clock, also backwards."""
        self._next += by


class SeededIds:
    """Ids in the form of UUIDv7, in sort order of birth, the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._born_ms = int(_BEGINNING.timestamp() * 1000)

    def new(self) -> str:
        self._born_ms += 1
        high, low = self._random.getrandbits(12), self._random.getrandbits(62)
        digits = f"{self._born_ms:012x}{0x7000 | high:04x}{1 << 63 | low:016x}"
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


class Stuck(Exception):
    """Every remaining actor waits for a condition that cannot become true."""


@fast_dataclass(slots=True)
class Scheduler:
    """Runs actors one step at a time, in a random order. `trace` lists the actors in the order of their steps."""

    random: Random
    trace: list[str] = field(default_factory=list)

    def run(self, actors: Mapping[str, Actor], *, after_each: Callable[[], None] | None = None) -> None:
        """Run until all actors have ended. Calls `after_each` after every step."""
        waiting: dict[str, Ready | None] = dict.fromkeys(actors)
        while waiting:
            ready = [name for name, condition in waiting.items() if condition is None or condition()]
            if not ready:
                raise Stuck(f"{sorted(waiting)} wait for each other after {len(self.trace)} steps")
            name = self.random.choice(ready)
            self.trace.append(name)
            try:
                waiting[name] = next(actors[name])
            except StopIteration:
                del waiting[name]
            if after_each is not None:
                after_each()


@fast_dataclass(slots=True)
class World:
    """Time, ids, randomness and scheduling for a test, all from one seed."""

    seed: Seed
    clock: SteppingClock = field(default_factory=SteppingClock)
    ids: SeededIds = field(init=False)
    random: Random = field(init=False)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.ids = SeededIds(self.seed.number)
        self.random = self.seed.random()
        self.scheduler = Scheduler(self.random)
