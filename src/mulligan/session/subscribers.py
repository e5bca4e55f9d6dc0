"""Delivers events to listeners and subscribers, after they happened.

`EventBus` calls listeners by the type of an event. An error of a listener is reported and changes nothing else.

A `Subscription` passes every event of a session to a function, in order and without a gap. Each subscription reads the
journal from its own position on its own thread. So any thread or process may write, a slow subscriber delays only
itself, and a writer never waits for a subscriber. When a function raises, Mulligan logs the error, keeps the newest one
in `error`, and continues with the next event. Inside the function, `current_id` is the session.

Subscribers and attached clients receive the transcript's own events (`transcript_log.event_in`) unchanged.
`live_events_in` also describes records that change the session in another way (the window was cut, a call began, ended
or was undone), so that a client can follow the whole session. It describes them when they are read; the journal stores
nothing for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from mulligan.session.tables import session_journal
from mulligan.session.transcript_log import Archive, Event, event_body, event_in, event_of, head_of, id_of
from mulligan.store.fork_locks import fork_safe_lock, shared_lock
from mulligan.store.journal import Record, records_of
from mulligan.store.protocol import Store, Tx
from mulligan.values.clock import monotonic_s
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.scoped_var import ScopedVar

_active: ScopedVar[SessionId] = ScopedVar("mulligan_session")


def current_id() -> SessionId | None:
    """The innermost current session of this thread or task; None outside all sessions."""
    return _active.now()


active = _active.block
"""A block in which this is the current session. Tasks inherit it; a thread does not."""

Listener = Callable[[Any], object]


def _warn(text: str, *subjects: object, error: BaseException) -> None:
    import logging  # Only for a warning, because every start of the program would pay for it.

    logging.getLogger("mulligan.events").warning(text, *subjects, exc_info=error)


class CollectErrors:
    """Collects the exceptions of a block, except those that end the process or the task."""

    def __init__(self, errors: list[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self._errors.append(error)
        return True


@fast_dataclass(slots=True, frozen=True)
class DispatchResult:
    """The errors that reducers and listeners raised for an event. True if there are none."""

    event: object
    errors: tuple[Exception, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no reducer or listener raised."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_errors(self) -> None:
        """Raise the errors of reducers and listeners as an ExceptionGroup, if there are any."""
        if self.errors:
            raise ExceptionGroup(f"reducers or listeners of {type(self.event).__name__} failed", self.errors)


class EventBus:
    """Listeners by type of event; those of a base class hear its subclasses too. Safe to use from many threads."""

    def __init__(self) -> None:
        self._listeners: list[tuple[type[object], Listener]] = []
        self._lock = shared_lock()

    def subscribe(self, event_type: type[Any], listener: Listener) -> Callable[[], object]:
        """Call the listener with every such event. Returns a function that unsubscribes it."""
        with self._lock:
            self._listeners = [*self._listeners, (event_type, listener)]
        return partial(self.unsubscribe, event_type, listener)

    def unsubscribe(self, event_type: type[Any], listener: Listener) -> bool:
        """Returns False if the listener was not subscribed."""
        with self._lock:
            kept = [one for one in self._listeners if one != (event_type, listener)]
            found = len(kept) != len(self._listeners)
            self._listeners = kept
        return found

    def publish(self, event: object) -> DispatchResult:
        """Call every listener, in the order in which they subscribed. The result has the errors that they raised."""
        errors: list[Exception] = []
        # The stack calls the remaining listeners even if one raises an exception that ends the process.
        with ExitStack() as remaining:
            for kind, listener in reversed(self._listeners):
                if isinstance(event, kind):
                    remaining.callback(_call_listener, listener, event, errors)
        return DispatchResult(event, tuple(errors))


def _call_listener(listener: Listener, event: object, errors: list[Exception]) -> None:
    with CollectErrors(errors):
        listener(event)


def publish_quietly(bus: EventBus, event: object) -> None:
    """Publish an event and log every error, of a listener or of a user's own bus, instead of raising it."""
    errors: list[Exception] = []
    with CollectErrors(errors):
        errors += bus.publish(event).errors
    for error in errors:
        _warn("A listener failed on %s", type(event).__name__, error=error)


_CUTS = frozenset({"reset", "trim", "truncate"})
_PATHS_SHOWN = 50


def live_events_in(tx: Tx, archive: Archive, record: Record) -> list[Event]:
    """The events of one record, in the order in which they happened. Most records have one, some have none."""
    written = event_in(tx, archive, record)
    if written is not None:
        return [written]
    # Several events of one record need ids of their own.
    return [
        {**event_of(record, event_body(kind, metadata)), "id": f"{id_of(record)}/{kind}"}
        for kind, metadata in _descriptions(record)
    ]


def _descriptions(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    body = record.payload
    if record.kind == "window.changed" and body["verb"] in _CUTS:
        yield body["verb"], {"messages": sum(stop - start for _, start, stop in body["spans"])}
    elif record.kind == "session.forked":
        yield "fork", {"child_id": body["child"]}
    elif record.kind == "call.begun":
        named = {name: body[name] for name in ("label", "tool") if body.get(name) is not None}
        yield "call_begun", {"call_id": body["call"], "turn_id": body["turn"], **named}
    elif record.kind == "call.ended":
        yield "call_ended", {"call_id": body["call"], "status": body["status"], **_paths(body["changes"])}
        yield from _undo_operation(body)


def _undo_operation(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Undo, restore, rollback, redo and rewind are calls; the record of their end names the calls they acted on."""
    cause = body.get("cause")
    if cause is None or body["status"] != "committed":
        return
    yield cause["verb"], {"call_id": body["call"], "of": cause["of"]}
    if cause["of"] and cause["verb"] != "redo":
        yield "call_undone", {"call_ids": cause["of"], "by": body["call"]}


def _paths(changes: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {"changes": len(changes), "paths": [change["path"] for change in changes[:_PATHS_SHOWN]]}


Callback = Callable[[Event], object]

CLOSED_EVENT = "agent_session_closed"
_POLL_S = 0.02
_PAGE_RECORDS = 200
_CLOSE_TIMEOUT_S = 5.0


class Subscription:
    """One function's position in one session's events. `close` and the end of the session end it."""

    def __init__(self, hub: Hub, archive: Archive, session: SessionId, callback: Callback, *, after: int) -> None:
        self.session = session
        self.callback = callback
        self.cursor = after
        self.error: Exception | None = None
        self.ended = False
        self._hub = hub
        self._archive = archive
        self._thread = threading.Thread(target=self._run, name=f"mulligan-subscriber-{session}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            with active(self.session):
                while not self.ended:
                    self._deliver()
                    self._hub.wait_past(self)
        finally:
            self._hub.leave(self)

    def _deliver(self) -> None:
        """Deliver all new events, page by page. Each page is read before the function receives its first event."""
        while page := self._page():
            for seq, events in page:
                for event in events:
                    if self.ended:
                        return
                    self._call(event)
                    self.ended |= event["kind"] == CLOSED_EVENT
                self._advance_to(seq)

    def _call(self, event: Event) -> None:
        errors: list[Exception] = []
        with CollectErrors(errors):
            self.callback(event)
        for error in errors:
            self.error = error
            _warn("A subscriber of session %s failed on %s", self.session, event["kind"], error=error)

    def _page(self) -> list[tuple[int, list[Event]]]:
        """The next records after the position, each with its events; some records have none."""
        with self._archive.store.read() as tx:
            records = records_of(tx, session_journal(self.session), after=self.cursor, limit=_PAGE_RECORDS)
            return [(record.seq, live_events_in(tx, self._archive, record)) for record in records]

    def _advance_to(self, seq: int) -> None:
        with self._hub.moved:
            self.cursor = max(self.cursor, seq)
            self._hub.moved.notify_all()

    def wait(self, *, timeout_s: float = 10.0) -> bool:
        """Wait until the function has received every event recorded so far. False after the timeout or the end."""
        with self._archive.store.read() as tx:
            head = head_of(tx, self.session)
        self._hub.wake()
        with self._hub.moved:
            self._hub.moved.wait_for(lambda: self.cursor >= head or self.ended, timeout_s)
            return self.cursor >= head

    def close(self) -> None:
        """Deliver no more events. A function that is running finishes its event."""
        with self._hub.moved:
            self.ended = True
            self._hub.moved.notify_all()

    def join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class Hub:
    """All subscriptions of this process on one store, and the thread that polls the journals for new records."""

    def __init__(self, store: Store) -> None:
        self.moved = threading.Condition(fork_safe_lock())
        self._store = store
        self._subscriptions: list[Subscription] = []
        self._heads: dict[SessionId, int] = {}
        self._awake = threading.Event()
        self._poller: threading.Thread | None = None
        store.on_close(self.close)

    def subscribe(
        self, archive: Archive, session: SessionId, callback: Callback, *, after: int | None = None
    ) -> Subscription:
        """Pass every event after record `after` to `callback`; without `after`, every new one."""
        if after is None:
            with self._store.read() as tx:
                after = head_of(tx, session)
        made = Subscription(self, archive, session, callback, after=after)
        with self.moved:
            self._subscriptions.append(made)
            self._heads.setdefault(session, 0)
            if self._poller is None:
                self._poller = threading.Thread(target=self._poll, name="mulligan-subscribers", daemon=True)
                self._poller.start()
        made.start()
        return made

    def of(self, session: SessionId) -> list[Subscription]:
        with self.moved:
            return [one for one in self._subscriptions if one.session == session]

    def wake(self) -> None:
        """Poll at once, because this process wrote a record."""
        if self._subscriptions:
            self._awake.set()

    def wait_past(self, subscription: Subscription) -> None:
        with self.moved:
            self.moved.wait_for(
                lambda: subscription.ended or self._heads.get(subscription.session, 0) > subscription.cursor
            )

    def leave(self, subscription: Subscription) -> None:
        with self.moved:
            subscription.ended = True
            self._subscriptions = [one for one in self._subscriptions if one is not subscription]
            if not any(one.session == subscription.session for one in self._subscriptions):
                self._heads.pop(subscription.session, None)
            self.moved.notify_all()

    def _poll(self) -> None:
        while True:
            with self.moved:
                watched = list(self._heads)
                if not watched:
                    self._poller = None
                    return
            with self._store.read() as tx:
                heads = {session: head_of(tx, session) for session in watched}
            with self.moved:
                if any(self._heads.get(one, seq) < seq for one, seq in heads.items()):
                    self._heads.update({one: seq for one, seq in heads.items() if one in self._heads})
                    self.moved.notify_all()
            self._awake.wait(_POLL_S)
            self._awake.clear()

    def close(self) -> None:
        """End all subscriptions, because the store is about to close."""
        for one in list(self._subscriptions):
            one.close()
        deadline = monotonic_s() + _CLOSE_TIMEOUT_S
        for one in list(self._subscriptions):
            one.join(max(0.0, deadline - monotonic_s()))
        with _lock:
            _hubs.pop(self._store, None)
        poller = self._poller
        self._awake.set()
        if poller is not None:
            poller.join(max(0.0, deadline - monotonic_s()))


_hubs: WeakKeyDictionary[Store, Hub] = WeakKeyDictionary()
_lock = fork_safe_lock()


def hub_of(store: Store) -> Hub:
    with _lock:
        found = _hubs.get(store)
        if found is None:
            found = _hubs[store] = Hub(store)
        return found


def wake_subscribers(store: Store) -> None:
    """Let subscribers receive a record of this process at once, without waiting for the next poll."""
    found = _hubs.get(store)
    if found is not None:
        found.wake()
