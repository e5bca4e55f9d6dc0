"""Sessions that are live in this process: the ones used last. What leaves memory is still in the store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from mulligan.values.faults import fault
from mulligan.values.ids import SessionId

LIVE_SESSIONS = 128
S = TypeVar("S")


class LiveSessions(Generic[S]):
    """At most `cap` of them. Opening one more lets the one go that was used longest ago."""

    def __init__(self, cap: int = LIVE_SESSIONS) -> None:
        if cap < 1:
            raise fault("invalid_params", "At least one session is live.", field="cap")
        self.cap = cap
        self._live: OrderedDict[SessionId, S] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, session: SessionId, make: Callable[[], S]) -> S:
        """The live one, else a newly made one, which is live from now on. Either way it is the one used last."""
        with self._lock:
            found = self._live.get(session)
            if found is None:
                found = self._live[session] = make()
            self._live.move_to_end(session)
            while len(self._live) > self.cap:
                self._live.popitem(last=False)
            return found

    def drop(self, session: SessionId) -> None:
        with self._lock:
            self._live.pop(session, None)

    def ids(self) -> list[SessionId]:
        """Used longest ago first."""
        with self._lock:
            return list(self._live)
