"""Telling others what happened, after it did. A listener that fails is reported and harms nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from mulligan.store.fork_locks import shared_lock
from mulligan.values.plain import plain

Listener = Callable[[Any], object]

_log = logging.getLogger("mulligan.events")


class Isolated:
    """Collects what a block raises, but for what ends the process or the task."""

    def __init__(self, errors: list[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self._errors.append(error)
        return True


@plain(slots=True, frozen=True)
class DispatchResult:
    """What came of an event: every error of a reducer or listener. It is true exactly if there were none."""

    event: object
    errors: tuple[Exception, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everybody took the event."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_errors(self) -> None:
        """Raises an ExceptionGroup of what the reducers and listeners raised, if they did."""
        if self.errors:
            raise ExceptionGroup(f"{type(self.event).__name__} was not taken everywhere", self.errors)


class EventBus:
    """Listeners by type of event; those of a base class hear its subclasses too. Safe to use from many threads."""

    def __init__(self) -> None:
        self._listeners: list[tuple[type[object], Listener]] = []
        self._lock = shared_lock()

    def subscribe(self, event_type: type[Any], listener: Listener) -> Callable[[], None]:
        """Call the listener with every such event; the callable given back ends that."""
        with self._lock:
            self._listeners = [*self._listeners, (event_type, listener)]

        def end() -> None:
            self.unsubscribe(event_type, listener)

        return end

    def unsubscribe(self, event_type: type[Any], listener: Listener) -> bool:
        """False: it was not there."""
        with self._lock:
            kept = [one for one in self._listeners if one != (event_type, listener)]
            found = len(kept) != len(self._listeners)
            self._listeners = kept
        return found

    def publish(self, event: object) -> DispatchResult:
        """Tell every listener, in the order they came. What they raise is in the result."""
        errors: list[Exception] = []
        # The stack also tells the rest when one listener raises what ends the process.
        with ExitStack() as telling:
            for kind, listener in reversed(self._listeners):
                if isinstance(event, kind):
                    telling.callback(_hear, listener, event, errors)
        return DispatchResult(event, tuple(errors))


def _hear(listener: Listener, event: object, errors: list[Exception]) -> None:
    with Isolated(errors):
        listener(event)


def publish_quietly(bus: EventBus, event: object) -> None:
    """Best effort: whatever goes wrong, in a listener or in a bus of somebody's own, is logged and nothing else."""
    errors: list[Exception] = []
    with Isolated(errors):
        errors += bus.publish(event).errors
    for error in errors:
        _log.warning("A listener failed on %s", type(event).__name__, exc_info=error)
