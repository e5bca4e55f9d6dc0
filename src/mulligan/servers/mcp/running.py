"""A request in progress, and taking it back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

CALL_VARIABLE = "MULLIGAN_CALL"

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
    _call: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> bool:
        """Whether it was in time."""
        with self._lock:
            if self._settled:
                return False
            self.cancelled = True
            call = self._call
        if call is not None:
            kill_commands(call)
        return True

    def settle(self) -> bool:
        """Asked just before a commit: False if the request was cancelled; from True on it cannot be."""
        with self._lock:
            self._settled = not self.cancelled
            return self._settled

    def began(self, call: str) -> None:
        """Commands that run under this call are the request's. Raises Cancelled if it came too late."""
        with self._lock:
            self._call = call
            if self.cancelled:
                raise Cancelled


def kill_commands(call: str) -> None:
    """End the commands of a call: they and all they started carry its id in their environment."""
    mark = f"{CALL_VARIABLE}={call}\0".encode()
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                found = mark in file.read()
            if found:
                os.kill(int(name), signal.SIGKILL)
