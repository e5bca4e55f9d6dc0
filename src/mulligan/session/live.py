"""Sessions that are live in this process: the ones used last. What leaves memory is still in the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId

LIVE_SESSIONS = 128
S = TypeVar("S")


class LiveSessions(Generic[S]):
    """At most `cap` of them. Opening one more lets the one go that was used longest ago.

    That one is still the session of its id for as long as somebody has it in hand, or while it `keeps` what no store
    has, such as reducers.
    """

    def __init__(self, cap: int = LIVE_SESSIONS, *, keeps: Callable[[S], bool] = lambda _: False) -> None:
        if cap < 1:
            raise fault("invalid_params", "At least one session is live.", field="cap")
        self.cap = cap
        self._keeps = keeps
        self._live: OrderedDict[SessionId, S] = OrderedDict()
        self._kept: dict[SessionId, S] = {}
        self._held: WeakValueDictionary[SessionId, S] = WeakValueDictionary()
        self._lock = fork_safe_lock()

    def get(self, session: SessionId, make: Callable[[], S]) -> S:
        """The live one, else a newly made one, which is live from now on. Either way it is the one used last."""
        with self._lock:
            found = self._held.get(session)
            if found is None:
                found = self._held[session] = make()
            self._kept.pop(session, None)
            self._live[session] = found
            self._live.move_to_end(session)
            while len(self._live) > self.cap:
                self._let_go(*self._live.popitem(last=False))
            return found

    def _let_go(self, session: SessionId, old: S) -> None:
        if self._keeps(old):
            self._kept[session] = old

    def drop(self, session: SessionId) -> None:
        with self._lock:
            for known in (self._live, self._kept, self._held):
                known.pop(session, None)

    def ids(self) -> list[SessionId]:
        """Used longest ago first."""
        with self._lock:
            return list(self._live)
