"""Time as an argument. Only this module calls `datetime.now`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """A source of wall-clock time, always aware and in UTC."""

    def now(self) -> datetime:
        """The current time, with its time zone."""
        ...


@dataclass(slots=True, frozen=True)
class SystemClock:
    """The time of the machine, in UTC."""

    def now(self) -> datetime:
        """The current time in UTC."""
        return datetime.now(UTC)


@dataclass(slots=True, frozen=True)
class FixedClock:
    """A clock that always returns the same time, for tests and replay."""

    time: datetime

    def now(self) -> datetime:
        """The time that it was created with."""
        return self.time


def monotonic_s() -> float:
    """Seconds for deadlines and waits. Records use `timestamp`, because this value means nothing to another process."""
    return time.monotonic()


def timestamp(clock: Clock) -> str:
    """The time in RFC 3339 form with microseconds and `Z`, so that text order is time order."""
    return clock.now().astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def now_ns(clock: Clock) -> int:
    """The time in nanoseconds since 1970, exact to a microsecond."""
    return int(clock.now().timestamp() * 1_000_000) * 1_000


def parse_timestamp(text: str) -> datetime:
    return datetime.fromisoformat(text)


def since_boot_s() -> float:
    """Seconds since the machine started, on the clock that the kernel uses for the start times of processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def booted_at_ns() -> int:
    """When the machine started, on the clock that stamps files; 0 if the system does not say."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
