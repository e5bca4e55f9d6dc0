"""A clock that a test sets by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from mulligan.values.clock import timestamp

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class HandClock:
    def __init__(self, time: datetime = NOON) -> None:
        self.time = time

    def now(self) -> datetime:
        return self.time

    def pass_by(self, **how_long: float) -> None:
        self.time += timedelta(**how_long)

    @property
    def text(self) -> str:
        """Now, as records say it."""
        return timestamp(self)
