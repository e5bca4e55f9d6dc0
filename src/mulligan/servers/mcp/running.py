"""A request in progress, and taking it back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

Progress = Callable[[float, str], None]
"""Told how far long work is, and a word about it."""


class Cancelled(Exception):
    """The request was taken back before it had done anything: there is nothing to answer."""


@dataclass(slots=True)
class Running:
    """A request in progress. Cancelling it after its call has committed does nothing."""

    progress: Progress | None = None
    cancelled: bool = False
    _settled: bool = False
    _stop: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> bool:
        """Whether it was in time."""
        with self._lock:
            if self._settled:
                return False
            self.cancelled = True
            stop = self._stop
        if stop is not None:
            stop()
        return True

    def settle(self) -> bool:
        """Asked just before a commit: False if the request was cancelled; from True on it cannot be."""
        with self._lock:
            self._settled = not self.cancelled
            return self._settled

    def began(self, stop: Callable[[], None]) -> None:
        """There is a call now, and this is how to stop what runs in it. Raises Cancelled if it came too late."""
        with self._lock:
            self._stop = stop
            if self.cancelled:
                raise Cancelled
