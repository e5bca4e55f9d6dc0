"""The verbs of a session's talk. Each is one transaction: it happens wholly or not at all, and survives from then on.

Only `exists`-like questions of `Sessions` tolerate an unknown id; every verb here raises `session_not_found` for a
session that was never opened and `session_closed` for one that is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from mulligan.session.active import active
from mulligan.session.facts import (
    BRANCHED_AT,
    BUDGET_ACTION,
    PINNED_MODEL,
    PINNED_REASONING,
    SUMMARY,
    SYSTEM_PROMPT,
    TOOL_FORMAT,
    fact,
    facts_of,
    set_facts_in,
)
from mulligan.session.in_force import InForce
from mulligan.session.lineage import Ancestry, ancestry_in, children_in, fork_in, fresh_id
from mulligan.session.notes import Notes
from mulligan.session.options import checked_count
from mulligan.session.prompts import Prompt, Shape, for_model
from mulligan.session.subscribers import CLOSED_EVENT, Callback, Subscription, hub_of, poke
from mulligan.session.tables import SESSIONS, SessionRow
from mulligan.session.transcript import (
    Event,
    Message,
    Written,
    append_event_in,
    append_message_in,
    count_events,
    entries_in,
    event_body,
    event_in,
    events_in,
    events_of,
    length_of,
    messages_of,
    window_of,
    written,
)
from mulligan.session.windows import length, part
from mulligan.store.blobs import Vanished
from mulligan.store.protocol import Tx
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId


class Talk(Notes, InForce):
    """What is said in one session. Safe to use from many threads and processes at once."""

    when_closed: Callable[[], None] | None = None
    """Told when this object closes the session."""

    # Looking.

    def length(self) -> int:
        """How many messages are in force."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "length")
            return length_of(tx, self.id)

    def messages(self, start: int = 0, stop: int | None = None) -> list[Message]:
        """The messages in force, or those at some places. Changing them changes nothing here."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "messages")
        return messages_of(self._archive, self.id, checked_count("start", start), stop)

    def message_ids(self) -> list[str]:
        """The names of the messages in force, which `fork` and `rewind` take."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "message_ids")
            return [entry.id for entry in entries_in(tx, self._archive, self.id)]

    def events(self, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """All that happened, oldest first. `after`: only this session's own events after that record."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "events")
        return events_of(self._archive, self.id, after=after, limit=limit)

    def for_model(self, shape: Shape = "openai", *, system: str | None = None) -> Prompt:
        """What a model is sent: whole, whatever was cut; see `session.prompts`. `system`: not the session's own."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "for_model")
            own = fact(tx, self.id, SYSTEM_PROMPT)
        return for_model(self.messages(), shape, system=system or own)

    def view(self) -> dict[str, Any]:
        """The transcript and all that is known of the session, as one plain value of the caller's own."""
        with self._archive.store.read() as tx:
            row = self._check_open(tx, "snapshot")
            facts = facts_of(tx, self.id)
            entries = [entry.message for entry in entries_in(tx, self._archive, self.id)]
            return {
                "_type": "transcript",
                "version": 1,
                "id": self.id,
                "messages": entries,
                "events": list(events_in(tx, self._archive, self.id)),
                "assets": [],
                "summary": facts.get(SUMMARY),
                "metadata": _metadata(row, facts),
                "state": "open",
                "length": len(entries),
                "created_at": row.created_at,
                "system_prompt": facts.get(SYSTEM_PROMPT),
                "tool_format": facts.get(TOOL_FORMAT),
                "scratchpad": facts.get("scratchpad"),
                "scratchpad_version": facts.get("scratchpad_version", 0),
                "parent_id": row.parent,
                "child_ids": list(children_in(tx, self.id)),
                "branched_at_event_index": facts.get(BRANCHED_AT),
                "pinned_model": facts.get(PINNED_MODEL),
                "pinned_reasoning_policy": facts.get(PINNED_REASONING),
                **self._more_view(tx, facts),
            }

    def _more_view(self, tx: Tx, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What other parts of a session add to the view of it."""
        return {
            "workspace_anchor": facts.get("workspace_anchor"),
            "workspace_policy": facts.get("workspace_policy"),
            "live_clients": [],
            "live_controller_id": None,
            "completed_turn_checkpoint_count": 0,
            "redo_checkpoint_count": 0,
        }

    def ancestry(self) -> Ancestry:
        """Where this session was forked from, its own forks, and the first of the line."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "ancestry")
            found = ancestry_in(tx, self.id)
        assert found is not None, "a session that is open was opened"
        return found

    # Saying.

    def inject(self, message: Mapping[str, Any], *, id: str | None = None) -> Event:
        """Append a message. It needs a role; the rest is kept as it is. The next message ends the redo stack."""
        while True:
            ready = written(self._archive, message, id=id)
            # A large body may be collected between its packing and our transaction; then it is packed again.
            with suppress(Vanished):
                with self._archive.store.write() as tx:
                    self._check_open(tx, "inject")
                    refused = self._make_room(tx, "inject")
                    if refused is None:
                        event = self._append(tx, ready)
                poke(self._archive.store)
                if refused is not None:
                    raise refused
                return event

    def _append(self, tx: Tx, message: Written) -> Event:
        record = append_message_in(tx, self._archive, self.id, message)
        event = event_in(tx, self._archive, record)
        assert event is not None, "a message is an event"
        return event

    def emit(self, kind: str, metadata: Mapping[str, Any] | None = None, *, text: str = "") -> None:
        """Append an event that is no message: never counted, never sent to a model, never ending the redo stack."""
        with self._archive.store.write() as tx:
            self._check_open(tx, "emit")
            append_event_in(tx, self._archive, self.id, kind, metadata=metadata, text=text)
        poke(self._archive.store)

    def active(self) -> AbstractContextManager[None]:
        """A block in which this is the current session."""
        return active(self.id)

    # Lifecycle.

    def fork_at(self, keep_first: int, dst: str | None = None) -> SessionId:
        """A child with the first messages only, exactly as many as asked for. Its id."""
        checked_count("keep_first", keep_first)
        with self._archive.store.write() as tx:
            self._check_open(tx, "fork_at")
            window = window_of(tx, self.id)
            child = fresh_id(tx, self._archive, dst)
            if keep_first > length(window):
                fork_in(tx, self._archive, self.id, child, root=self._root)
                facts = {BRANCHED_AT: count_events(tx, self.id)}
                set_facts_in(tx, self._archive, child, facts)
            else:
                fork_in(tx, self._archive, self.id, child, root=self._root, kept=part(window, 0, keep_first))
            self._forked_in(tx, child)
        return child

    def fork_talk(self, dst: str | None = None) -> SessionId:
        """A child with all of this talk. Its id."""
        with self._archive.store.write() as tx:
            self._check_open(tx, "fork")
            child = fresh_id(tx, self._archive, dst)
            fork_in(tx, self._archive, self.id, child, root=self._root)
            self._forked_in(tx, child)
        return child

    def _forked_in(self, tx: Tx, child: SessionId) -> None:
        """What other parts of a session pass on to a child."""

    def close(self, status: str | Mapping[str, Any] | None = None) -> None:
        """End the live session and say why. Its history stays, can be undone, and opening it again goes on with it."""
        told = _closing(status)
        with self._archive.store.write() as tx:
            self._check_open(tx, "close")
            self._write(tx, "session.closed", {"event": event_body(CLOSED_EVENT, told, visibility="public")})
            self._closed_in(tx)
        poke(self._archive.store)
        if self.when_closed is not None:
            self.when_closed()

    def _closed_in(self, tx: Tx) -> None:
        """What other parts of a session let go when it ends."""

    def reopen(self) -> None:
        """Go on with a closed session; one that is open stays as it is."""
        with self._archive.store.read() as tx:
            row = tx.get(SESSIONS, self.id)
        if row is None or row.closed_at is None:
            return
        with self._archive.store.write() as tx:
            row = tx.get(SESSIONS, self.id)
            if row is not None and row.closed_at is not None:
                self._write(tx, "session.reopened", {"session": self.id})

    # Subscribers.

    def subscribe(self, callback: Callback, *, after: int | None = None) -> Subscription:
        """Tell a function every event from now on, or after a record of the journal; see `session.subscribers`."""
        if not callable(callback):
            raise fault("invalid_params", "A subscriber is a function.", field="cb")
        with self._archive.store.read() as tx:
            self._check_open(tx, "subscribe")
        return hub_of(self._archive.store).subscribe(self._archive, self.id, callback, after=after)

    def subscriptions(self) -> Sequence[Subscription]:
        """Those of this process."""
        return hub_of(self._archive.store).of(self.id)


def _metadata(row: SessionRow, facts: Mapping[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"parent_session_id": row.parent} if row.parent else {}
    if BUDGET_ACTION in facts:
        body["transcript_budget"] = {"last_action": facts[BUDGET_ACTION]}
    return body


def _closing(status: object) -> dict[str, Any]:
    """Why a session closes: a reason, or an object that has one."""
    if status is None:
        return {"reason": "closed", "status": "closed"}
    if isinstance(status, str):
        return {"reason": _said(status), "status": _said(status)}
    if not isinstance(status, Mapping):
        raise fault("invalid_params", "A close status is a text, or an object with a reason.", field="status")
    named = next(
        (status[name] for name in ("reason", "stop_reason", "status") if status.get(name) is not None), "closed"
    )
    reason = _said(named)
    return {"reason": reason, "status": _said(status.get("status") or reason), "metadata": dict(status)}


def _said(text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise fault("invalid_params", "A reason for closing is not empty.", field="status")
    return text
