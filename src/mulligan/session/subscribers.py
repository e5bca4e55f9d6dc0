"""Subscribers: functions that receive every event of a session, in order and without a gap.

Each subscription reads the journal from its own position on its own thread. So any thread or process may write, a slow
subscriber delays only itself, and a writer never waits for a subscriber. When a function raises, Mulligan logs the
error, keeps the newest one in `error`, and goes on with the next event.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from mulligan.session.active import active
from mulligan.session.bus import Isolated
from mulligan.session.live_events import live_events_in
from mulligan.session.tables import session_journal
from mulligan.session.transcript import Archive, Event, head_of
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.journal import records_of
from mulligan.store.protocol import Store
from mulligan.values.clock import monotonic_s
from mulligan.values.ids import SessionId

Callback = Callable[[Event], object]

CLOSED_EVENT = "agent_session_closed"
_POLL_S = 0.02
_PAGE_RECORDS = 200
_GOODBYE_S = 5.0

_log = logging.getLogger("mulligan.events")


class Subscription:
    """One function's place in one session's events. `close` ends it; so does the end of the session."""

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
        """Everything there is, page by page; a page is read whole before the function receives any of it."""
        while page := self._page():
            for seq, events in page:
                for event in events:
                    if self.ended:
                        return
                    self._call(event)
                    self.ended |= event["kind"] == CLOSED_EVENT
                self._reach(seq)

    def _call(self, event: Event) -> None:
        errors: list[Exception] = []
        with Isolated(errors):
            self.callback(event)
        for error in errors:
            self.error = error
            _log.warning("A subscriber of session %s failed on %s", self.session, event["kind"], exc_info=error)

    def _page(self) -> list[tuple[int, list[Event]]]:
        """The next records after the position, each with its events; some records have none."""
        with self._archive.store.read() as tx:
            records = records_of(tx, session_journal(self.session), after=self.cursor, limit=_PAGE_RECORDS)
            return [(record.seq, live_events_in(tx, self._archive, record)) for record in records]

    def _reach(self, seq: int) -> None:
        with self._hub.moved:
            self.cursor = max(self.cursor, seq)
            self._hub.moved.notify_all()

    def wait(self, *, timeout_s: float = 10.0) -> bool:
        """Until this function has been told everything that is on record now. False: the time was up, or it ended."""
        with self._archive.store.read() as tx:
            head = head_of(tx, self.session)
        self._hub.poke()
        with self._hub.moved:
            self._hub.moved.wait_for(lambda: self.cursor >= head or self.ended, timeout_s)
            return self.cursor >= head

    def close(self) -> None:
        """No more events; one that is being told is told to its end."""
        with self._hub.moved:
            self.ended = True
            self._hub.moved.notify_all()

    def join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class Hub:
    """All subscriptions on one store in this process, and the one thread that looks whether a journal has grown."""

    def __init__(self, store: Store) -> None:
        self.moved = threading.Condition(fork_safe_lock())
        self._store = store
        self._subscriptions: list[Subscription] = []
        self._heads: dict[SessionId, int] = {}
        self._awake = threading.Event()
        self._looking: threading.Thread | None = None
        store.on_close(self.close)

    def subscribe(
        self, archive: Archive, session: SessionId, callback: Callback, *, after: int | None = None
    ) -> Subscription:
        """Tell `callback` every event after record `after`; without it, every one from now on."""
        if after is None:
            with self._store.read() as tx:
                after = head_of(tx, session)
        made = Subscription(self, archive, session, callback, after=after)
        with self.moved:
            self._subscriptions.append(made)
            self._heads.setdefault(session, 0)
            if self._looking is None:
                self._looking = threading.Thread(target=self._look, name="mulligan-subscribers", daemon=True)
                self._looking.start()
        made.start()
        return made

    def of(self, session: SessionId) -> list[Subscription]:
        with self.moved:
            return [one for one in self._subscriptions if one.session == session]

    def poke(self) -> None:
        """Something was written here: look at once."""
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

    def _look(self) -> None:
        while True:
            with self.moved:
                watched = list(self._heads)
                if not watched:
                    self._looking = None
                    return
            heads = self._look_at(watched)
            with self.moved:
                if any(self._heads.get(one, seq) < seq for one, seq in heads.items()):
                    self._heads.update({one: seq for one, seq in heads.items() if one in self._heads})
                    self.moved.notify_all()
            self._awake.wait(_POLL_S)
            self._awake.clear()

    def _look_at(self, sessions: Iterable[SessionId]) -> dict[SessionId, int]:
        with self._store.read() as tx:
            return {session: head_of(tx, session) for session in sessions}

    def close(self) -> None:
        """The store is about to close: everybody ends, before its engine does."""
        for one in list(self._subscriptions):
            one.close()
        deadline = monotonic_s() + _GOODBYE_S
        for one in list(self._subscriptions):
            one.join(max(0.0, deadline - monotonic_s()))
        with _lock:
            _hubs.pop(self._store, None)
        looking = self._looking
        self._awake.set()
        if looking is not None:
            looking.join(max(0.0, deadline - monotonic_s()))


_hubs: WeakKeyDictionary[Store, Hub] = WeakKeyDictionary()
_lock = fork_safe_lock()


def hub_of(store: Store) -> Hub:
    with _lock:
        found = _hubs.get(store)
        if found is None:
            found = _hubs[store] = Hub(store)
        return found


def poke(store: Store) -> None:
    """Something was written here: whoever subscribed is told at once instead of at the next look."""
    found = _hubs.get(store)
    if found is not None:
        found.poke()
