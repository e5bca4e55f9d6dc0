"""One thread that does one thing after another, beside streams that must not be held up longer than need be."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """Something to be done; `result` is None until it is, and if it failed."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act = act
        self._done = threading.Event()
        self.result: T | None = None

    def run(self) -> None:
        try:
            self.result = self._act()
        finally:
            self._done.set()

    def wait(self, at_most_s: float) -> T | None:
        self._done.wait(at_most_s)
        return self.result


class Errands:
    """`idle` is called between errands, and says how long to wait until it is called again; None: for an errand.

    It is told whether that wait has passed since, with no errand in it.
    """

    def __init__(self, idle: Callable[[bool], float | None], failed: Callable[[], None]) -> None:
        self._idle, self._failed = idle, failed
        self._waiting: queue.SimpleQueue[Errand[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="errands")
        self._said: set[str] = set()
        self._thread.start()

    def do(self, act: Callable[[], T]) -> Errand[T]:
        errand = Errand(act)
        self._waiting.put(errand)  # type: ignore[arg-type]  # what it results in is for its owner
        return errand

    def wait(self, at_most_s: float) -> None:
        """Until everything asked for so far is done."""
        self.do(lambda: None).wait(at_most_s)

    def end(self, at_most_s: float) -> bool:
        """Whether everything was done in time."""
        self._waiting.put(None)
        self._thread.join(at_most_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s: float | None = None
        while True:
            try:
                errand = self._waiting.get(timeout=pause_s)
            except queue.Empty:
                pause_s = self._tried(partial(self._idle, bool(pause_s)))
                continue
            if errand is None:
                return
            self._tried(errand.run)
            pause_s = 0.0 if self._waiting.empty() else None

    def _tried(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except Exception as error:  # noqa: BLE001  # the top of a server: the agent goes on, whatever is broken with us
            self._say(error)
            self._failed()
            return None

    def _say(self, error: Exception) -> None:
        """Once for each kind: an agent's error output is not ours to fill."""
        words = "".join(traceback.format_exception_only(error)).strip()
        if words not in self._said:
            self._said.add(words)
            print(f"mulligan: not recorded: {words}", file=sys.stderr, flush=True)
