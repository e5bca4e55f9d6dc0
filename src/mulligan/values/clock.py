"""Time is an argument. The only home of `datetime.now`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """A source of wall-clock time, always aware and in UTC."""

    def now(self) -> datetime:
        """The present moment, with its time zone."""
        ...


@dataclass(slots=True, frozen=True)
class SystemClock:
    """The time of the machine, in UTC."""

    def now(self) -> datetime:
        """The present moment in UTC."""
        return datetime.now(UTC)


@dataclass(slots=True, frozen=True)
class FixedClock:
    """A clock that stands still, for tests and replay."""

    time: datetime

    def now(self) -> datetime:
        """The moment it was given."""
        return self.time


def monotonic_s() -> float:
    """For deadlines and waits, never for records."""
    return time.monotonic()


def timestamp(clock: Clock) -> str:
    """RFC 3339 with microseconds and `Z`: sorts as text, parses everywhere."""
    return clock.now().astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def parse_timestamp(text: str) -> datetime:
    return datetime.fromisoformat(text)


def since_boot_s() -> float:
    """Seconds since the machine started, on the clock by which the kernel says when a process began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def booted_at_ns() -> int:
    """When the machine was started, by the clock that stamps files; 0 where the system does not say."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
