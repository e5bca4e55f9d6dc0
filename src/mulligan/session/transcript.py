"""The transcript of one session: its messages and events, the context window, and the notes kept beside them.

Each method of `Transcript` is one transaction: it happens wholly or not at all. Each raises `session_not_found` for a
session that was never opened and `session_closed` for one that is closed.

The context window is the list of messages that a model is sent. Methods that change it (`reset`, `trim`, `truncate`,
`compact`) only write another list of spans (see `session.tables`); no message leaves the journal. A transcript budget
bounds how many messages the window may hold. Events beside the messages, such as clients that attach, never count.

The scratchpad is a small object that an agent keeps beside the transcript. Each change makes a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import Any, Literal, get_args

from mulligan.session.compaction import Compacted, Options, Summarizer, compacted, parse_options
from mulligan.session.lifecycle import (
    BRANCHED_AT,
    BUDGET,
    BUDGET_ACTION,
    PINNED_MODEL,
    PINNED_REASONING,
    RESET_FACTS,
    SCRATCHPAD,
    SCRATCHPAD_VERSION,
    SUMMARY,
    SYSTEM_PROMPT,
    TOOL_FORMAT,
    Ancestry,
    SessionAccess,
    ancestry_in,
    checked_count,
    checked_object,
    checked_options,
    children_in,
    fact,
    facts_of,
    fork_in,
    fresh_id,
    set_facts_in,
)
from mulligan.session.messages import Prompt, Shape, for_model
from mulligan.session.state.slice_rows import copy_slices_in
from mulligan.session.subscribers import CLOSED_EVENT, Callback, Subscription, active, hub_of
from mulligan.session.tables import (
    CLIENTS,
    SESSIONS,
    MessageSpan,
    SessionRow,
    Window,
    length,
    normal,
    part,
    session_journal,
    spans_to_json,
    window_row,
)
from mulligan.session.transcript_log import (
    Event,
    Message,
    PackedMessage,
    append_event_in,
    append_message_in,
    count_events,
    entries_in,
    event_body,
    event_in,
    events_in,
    head_of,
    length_of,
    number_at,
    pack_message,
    text_of,
    window_of,
)
from mulligan.store.blobs import BlobVanishedError
from mulligan.store.protocol import Tx
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId

SCRATCHPAD_MAX_BYTES = 16_384
_SCRATCHPAD_OPTIONS = {"source": str, "reason": str, "metadata": Mapping}
_COMPACT_TRIES = 5

Recovery = Literal["reject", "trim", "compact"]


@fast_dataclass(slots=True, frozen=True)
class Budget:
    """How many messages the context window may hold.

    When it is full, `reject` refuses a message; `trim` and `compact` shorten the window to the last `keep_last`.
    """

    max_messages: int
    recovery: Recovery = "reject"
    keep_last: int = 12

    def to_json(self) -> dict[str, Any]:
        return {"max_messages": self.max_messages, "recovery": self.recovery, "keep_last": self.keep_last}

    def action(self, kind: str, *, source: str, before: int, after: int) -> dict[str, Any]:
        """How Mulligan enforced the budget, as the event and the fact say it."""
        return {
            "action": kind,
            "source": source,
            "reason": "message_count",
            "policy": self.to_json(),
            "usage_before": before,
            "usage_attempted": before + 1,
            "usage_after": after,
            "removed_messages": max(0, before + 1 - after),
        }


def parse_budget(given: object) -> Budget:
    options = checked_options("a transcript budget", given, {"max_messages": int, "recovery": str, "keep_last": int})
    if "max_messages" not in options:
        raise fault("invalid_params", "A transcript budget needs max_messages.", field="max_messages")
    for name in ("max_messages", "keep_last"):
        checked_count(name, options.get(name, 0))
    if options.get("recovery", "reject") not in get_args(Recovery):
        raise fault("invalid_params", f"recovery must be one of {', '.join(get_args(Recovery))}.", field="recovery")
    budget = Budget(**options)
    if budget.recovery != "reject" and budget.keep_last >= budget.max_messages:
        raise fault("invalid_params", "keep_last must leave room for the next message.", field="keep_last")
    return budget


class Transcript:
    """The messages and events of one session. Safe to use from many threads and processes at once."""

    def __init__(self, access: SessionAccess) -> None:
        self.id = access.id
        self._access = access
        self._archive = access.archive

    # Reading.

    def length(self) -> int:
        """How many messages are in the context window."""
        with self._access.read("length") as tx:
            return length_of(tx, self.id)

    def messages(self, start: int = 0, stop: int | None = None) -> list[Message]:
        """The messages of the context window, or a part of them. Each is the caller's own copy."""
        with self._access.read("messages") as tx:
            found = entries_in(tx, self._archive, self.id, start=checked_count("start", start), stop=stop)
            return [entry.message for entry in found]

    def message_ids(self) -> list[str]:
        """The ids of the messages in the context window, which `fork` and `rewind` take."""
        with self._access.read("message_ids") as tx:
            return [entry.id for entry in entries_in(tx, self._archive, self.id)]

    def events(self, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """All that happened, oldest first. `after`: only this session's own events after that record."""
        with self._access.read("events") as tx:
            found = events_in(tx, self._archive, self.id, after=after)
            return list(found if limit is None else islice(found, max(0, limit)))

    def for_model(self, shape: Shape = "openai", *, system: str | None = None) -> Prompt:
        """The messages in the form that a model accepts: every tool call has its result, wherever the window was cut.

        `system` replaces the system prompt of the session; see `session.messages`.
        """
        with self._access.read("for_model") as tx:
            own = fact(tx, self.id, SYSTEM_PROMPT)
        return for_model(self.messages(), shape, system=system or own)

    def view_in(self, tx: Tx, row: SessionRow) -> dict[str, Any]:
        """The transcript's part of a session's view, as plain JSON values that the caller owns."""
        facts = facts_of(tx, self.id)
        entries = [entry.message for entry in entries_in(tx, self._archive, self.id)]
        metadata: dict[str, Any] = {"parent_session_id": row.parent} if row.parent else {}
        if BUDGET_ACTION in facts:
            metadata["transcript_budget"] = {"last_action": facts[BUDGET_ACTION]}
        return {
            "_type": "transcript",
            "version": 1,
            "id": self.id,
            "messages": entries,
            "events": list(events_in(tx, self._archive, self.id)),
            "assets": [],
            "summary": facts.get(SUMMARY),
            "metadata": metadata,
            "state": "open",
            "length": len(entries),
            "created_at": row.created_at,
            "system_prompt": facts.get(SYSTEM_PROMPT),
            "tool_format": facts.get(TOOL_FORMAT),
            "scratchpad": facts.get(SCRATCHPAD),
            "scratchpad_version": facts.get(SCRATCHPAD_VERSION, 0),
            "parent_id": row.parent,
            "child_ids": list(children_in(tx, self.id)),
            "branched_at_event_index": facts.get(BRANCHED_AT),
            "pinned_model": facts.get(PINNED_MODEL),
            "pinned_reasoning_policy": facts.get(PINNED_REASONING),
        }

    def ancestry(self) -> Ancestry:
        """The session that this one was forked from, its own forks, and the first session of the line."""
        with self._access.read("ancestry") as tx:
            found = ancestry_in(tx, self.id)
        assert found is not None, "a session that is open was opened"
        return found

    # Appending.

    def inject(self, message: Mapping[str, Any], *, id: str | None = None) -> Event:
        """Append a message. It needs a role; Mulligan stores the rest unchanged. A message empties the redo stack."""
        return self.append(message, "inject", id=id)

    def append(
        self,
        message: Mapping[str, Any],
        verb: str,
        *,
        check: Callable[[Tx], object] = lambda _: None,
        then: Callable[[Tx], object] = lambda _: None,
        id: str | None = None,
    ) -> Event:
        """Append a message within the budget. `check` and `then` run before and after it in the same transaction."""
        while True:
            ready = pack_message(self._archive, message, id=id)
            # The collector may delete a large body between its packing and our transaction; then we pack it again.
            with suppress(BlobVanishedError):
                with self._access.write(verb) as tx:
                    check(tx)
                    refused = self._make_room(tx, verb)
                    if refused is None:
                        event = event_in(tx, self._archive, append_message_in(tx, self._archive, self.id, ready))
                        then(tx)
                # Raised only here, because the transaction records that the budget refused the message.
                if refused is not None:
                    raise refused
                assert event is not None, "a message is an event"
                return event

    def emit(self, kind: str, metadata: Mapping[str, Any] | None = None, *, text: str = "") -> None:
        """Append an event that is not a message: not counted, not sent to a model, and the redo stack stays."""
        with self._access.write("emit") as tx:
            append_event_in(tx, self._archive, self.id, kind, metadata=metadata, text=text)

    def active(self) -> AbstractContextManager[None]:
        """A block in which this is the current session."""
        return active(self.id)

    # The context window.

    def reset(self) -> None:
        """Empty the context window. The id, subscribers, clients, lineage, pins and workspace stay, and the journal."""
        with self._access.write("reset") as tx:
            head = head_of(tx, self.id)
            facts = dict.fromkeys(name for name in facts_of(tx, self.id) if name in RESET_FACTS)
            body = {"verb": "reset", "spans": [], "log": [], "log_after": head + 1, "was": head, "facts": facts}
            self._access.append(tx, "window.changed", body)

    def trim(self, keep_last: int) -> int:
        """Keep only the last `keep_last` messages in the window. Returns how many messages it has now."""
        checked_count("keep_last", keep_last)
        with self._access.write("trim") as tx:
            window = window_of(tx, self.id)
            kept = part(window, max(0, length(window) - keep_last), length(window))
            if kept != window:
                self._set_window(tx, "trim", kept)
        return length(kept)

    def truncate(self, keep_first: int) -> dict[str, Any]:
        """Keep only the first `keep_first` messages in the window, and remove the summary."""
        checked_count("keep_first", keep_first)
        with self._access.write("truncate") as tx:
            window = window_of(tx, self.id)
            kept = part(window, 0, keep_first)
            if kept != window:
                self._set_window(tx, "truncate", kept, facts={SUMMARY: None})
            last = list(entries_in(tx, self._archive, self.id, start=max(0, length(kept) - 1)))
        return {
            "kept_turn_count": length(kept),
            "removed_turn_count": length(window) - length(kept),
            "new_tip_turn_id": last[-1].id if last else None,
        }

    def _set_window(
        self,
        tx: Tx,
        verb: str,
        window: Window,
        *,
        was: int | None = None,
        facts: Mapping[str, Any] | None = None,
        event: Mapping[str, Any] | None = None,
    ) -> None:
        replaced = head_of(tx, self.id) if was is None else was
        body: dict[str, Any] = {"verb": verb, "spans": spans_to_json(window), "was": replaced}
        body |= {name: value for name, value in {"facts": facts, "event": event}.items() if value}
        self._access.append(tx, "window.changed", body)

    def compact(self, opts: Mapping[str, Any] | None, given: Mapping[str, Any], provider: Summarizer | None) -> int:
        """Replace the older part of the window by a summary. Returns how many messages the window has afterwards."""
        if opts is not None and not isinstance(opts, Mapping):
            raise fault("invalid_params", "The options of compact must be an object.", field="opts")
        options = parse_options({**(opts or {}), **given})
        for _ in range(_COMPACT_TRIES):
            with self._access.read("compact") as tx:
                window_seq = window_row(tx, self.id).seq
                messages = [entry.message for entry in entries_in(tx, self._archive, self.id)]
            # A model may take minutes to summarise, so no transaction is open here.
            done = compacted(messages, options, provider)
            if done is None:
                return len(messages)
            with suppress(BlobVanishedError):
                kept = self._put_compacted(done, window_seq, len(messages))
                if kept is not None:
                    return kept
        raise fault("conflict", "Another process keeps changing the context window while we compact it; try again.")

    def _put_compacted(self, done: Compacted, window_seq: int, count: int) -> int | None:
        """None if another process has set another window since we read it. Messages appended since then stay."""
        summaries = [pack_message(self._archive, one) for one in done.summaries]
        shortened = {place: pack_message(self._archive, one) for place, one in done.shortened.items()}
        with self._access.write("compact") as tx:
            if window_row(tx, self.id).seq != window_seq:
                return None
            now, was = window_of(tx, self.id), head_of(tx, self.id)
            spans = [self._insert(tx, one) for one in summaries]
            start = done.archived
            for place in sorted(shortened):
                spans += [*part(now, start, place), self._insert(tx, shortened[place])]
                start = place + 1
            kept = normal((*spans, *part(now, start, length(now))))
            metadata = {
                "strategy": done.strategy,
                "archived_messages": done.archived,
                "kept_messages": count - done.archived,
                "shortened_messages": len(shortened),
            }
            facts = {SUMMARY: "\n\n".join(text_of(one) for one in done.summaries) or None}
            self._set_window(tx, "compact", kept, was=was, facts=facts, event=event_body("compaction", metadata))
        return length(kept)

    def _insert(self, tx: Tx, message: PackedMessage) -> MessageSpan:
        record = append_message_in(tx, self._archive, self.id, message, inserted=True)
        number = number_at(tx, self.id, record.seq) - 1
        return MessageSpan(self.id, number, number + 1)

    def set_budget(self, budget: Mapping[str, Any] | None) -> None:
        """Bound how many messages the window may hold; None removes the bound. Refused if there are more already."""
        parsed = None if budget is None else parse_budget(budget)
        with self._access.write("set_budget") as tx:
            if parsed is not None and length_of(tx, self.id) > parsed.max_messages:
                raise fault("transcript_budget_exceeded", "The context window has more messages than that already.")
            set_facts_in(tx, self._archive, self.id, {BUDGET: None if parsed is None else parsed.to_json()})

    def _make_room(self, tx: Tx, source: str) -> MulliganError | None:
        """Shorten the window if one more message exceeds the budget. Returns the error if the budget rejects it."""
        limits = fact(tx, self.id, BUDGET)
        if limits is None or length_of(tx, self.id) < limits["max_messages"]:
            return None
        budget, count = Budget(**limits), length_of(tx, self.id)
        if budget.recovery == "reject":
            action = budget.action("rejected", source=source, before=count, after=count)
            if fact(tx, self.id, BUDGET_ACTION) != action:
                set_facts_in(tx, self._archive, self.id, {BUDGET_ACTION: action})
            words = f"The context window already has the {budget.max_messages} messages that its budget allows."
            return fault("transcript_budget_exceeded", words, **action)
        was, window = head_of(tx, self.id), self._smaller_window(tx, budget)
        kind = {"trim": "trimmed", "compact": "compacted"}[budget.recovery]
        action = budget.action(kind, source=source, before=count, after=length(window) + 1)
        event = event_body("transcript_budget", action)
        self._set_window(tx, budget.recovery, window, was=was, facts={BUDGET_ACTION: action}, event=event)
        return None

    def _smaller_window(self, tx: Tx, budget: Budget) -> Window:
        """Uses no model and no callbacks, because it runs inside a transaction."""
        window = window_of(tx, self.id)
        trimmed = part(window, max(0, length(window) - budget.keep_last), length(window))
        if budget.recovery == "trim":
            return trimmed
        messages = [entry.message for entry in entries_in(tx, self._archive, self.id)]
        done = compacted(messages, Options(keep_last=budget.keep_last, compact_strategy="truncate"))
        if done is None or len(messages) - done.archived + len(done.summaries) >= budget.max_messages:
            return trimmed
        spans = [self._insert(tx, pack_message(self._archive, one)) for one in done.summaries]
        return normal((*spans, *part(window, done.archived, length(window))))

    # Notes beside the transcript.

    def scratchpad(self) -> dict[str, Any] | None:
        """The agent's own notes; None if there are none."""
        with self._access.read("scratchpad") as tx:
            found: dict[str, Any] | None = fact(tx, self.id, SCRATCHPAD)
            return found

    def set_scratchpad(self, scratchpad: Mapping[str, Any], opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Replace the scratchpad by this object. Raises `invalid_params` for one too large."""
        content = checked_object(scratchpad, "A scratchpad", "scratchpad", max_bytes=SCRATCHPAD_MAX_BYTES)
        return self._set_scratchpad(content, opts)

    def clear_scratchpad(self, opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Remove the scratchpad."""
        return self._set_scratchpad(None, opts)

    def _set_scratchpad(self, content: dict[str, Any] | None, opts: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._access.write("scratchpad") as tx:
            options = checked_options("the scratchpad", opts, _SCRATCHPAD_OPTIONS)
            version = (fact(tx, self.id, SCRATCHPAD_VERSION) or 0) + 1
            # The event gives sizes and no content, because subscribers may be other programs.
            values = {name: (content or {}).get(name) for name in ("goals", "open_items", "facts", "refs")}
            counts = {
                name: len(value) if isinstance(value, list | dict) else int(value is not None)
                for name, value in values.items()
            }
            event = {"version": version, "cleared": content is None, "counts": counts, **options}
            facts = {SCRATCHPAD: content, SCRATCHPAD_VERSION: version}
            set_facts_in(tx, self._archive, self.id, facts, event=event_body("agent_scratchpad", event))
        return {"ok": True, "version": version, "scratchpad": content}

    def set_system_prompt(self, text: str | None) -> None:
        """Set the text that a model receives before the messages; None removes it."""
        with self._access.write("set_system_prompt") as tx:
            if fact(tx, self.id, SYSTEM_PROMPT) != text:
                event = event_body("system_prompt", {"chars": len(text or "")})
                set_facts_in(tx, self._archive, self.id, {SYSTEM_PROMPT: text}, event=event)

    def claim_tool_format(self, tool_format: str) -> None:
        """Fix the format of tool calls in this session. The first caller decides; another format is refused later."""
        with self._access.write("claim_tool_format") as tx:
            locked = fact(tx, self.id, TOOL_FORMAT)
            if locked is not None and locked != tool_format:
                words = f"This session uses the tool format {locked!r}, not {tool_format!r}."
                raise fault("tool_format_locked", words, tool_format=locked)
            if locked is None:
                set_facts_in(tx, self._archive, self.id, {TOOL_FORMAT: tool_format})

    def pin(self, *, model: str | None = None, reasoning_policy: Mapping[str, Any] | str | None = None) -> None:
        """Fix the model and how it reasons. Forks inherit pins, a reset keeps them, None removes one."""
        with self._access.write("pin") as tx:
            facts = {PINNED_MODEL: model, PINNED_REASONING: reasoning_policy}
            set_facts_in(tx, self._archive, self.id, facts)

    # Forks, the end of the session, subscribers.

    def fork_at(self, keep_first: int, dst: str | None = None) -> SessionId:
        """Fork with only the first `keep_first` messages. Returns the id of the child."""
        checked_count("keep_first", keep_first)
        with self._access.write("fork_at", about_others=True) as tx:
            window = window_of(tx, self.id)
            child = fresh_id(tx, self._archive, dst)
            if keep_first > length(window):
                fork_in(tx, self._archive, self.id, child, root=self._access.root)
                set_facts_in(tx, self._archive, child, {BRANCHED_AT: count_events(tx, self.id)})
            else:
                kept = part(window, 0, keep_first)
                fork_in(tx, self._archive, self.id, child, root=self._access.root, kept=kept)
            copy_slices_in(tx, self._archive.journal, self.id, child, at=self._archive.now())
        return child

    def fork_talk(self, dst: str | None = None) -> SessionId:
        """Fork with the whole transcript. Returns the id of the child."""
        with self._access.write("fork", about_others=True) as tx:
            child = fresh_id(tx, self._archive, dst)
            fork_in(tx, self._archive, self.id, child, root=self._access.root)
            copy_slices_in(tx, self._archive.journal, self.id, child, at=self._archive.now())
        return child

    def close(self, status: str | Mapping[str, Any] | None = None) -> None:
        """End the session and record why. Its history stays and can be undone; opening it again continues it."""
        event = event_body(CLOSED_EVENT, _close_metadata(status), visibility="public")
        with self._access.write("close") as tx:
            self._access.append(tx, "session.closed", {"event": event})
            for row in tx.select(CLIENTS, {"session": self.id}):
                tx.delete(CLIENTS, self.id, row.client)

    def reopen(self) -> None:
        """Continue a closed session; one that is open stays as it is."""
        with self._archive.store.read() as tx:
            row = tx.get(SESSIONS, self.id)
        if row is None or row.closed_at is None:
            return
        with self._archive.store.write(about=(session_journal(self.id),)) as tx:
            row = tx.get(SESSIONS, self.id)
            if row is not None and row.closed_at is not None:
                self._access.append(tx, "session.reopened", {"session": self.id})

    def subscribe(self, callback: Callback, *, after: int | None = None) -> Subscription:
        """Call a function with every event from now on, or after a record of the journal; see `session.subscribers`."""
        if not callable(callback):
            raise fault("invalid_params", "A subscriber must be a function.", field="cb")
        with self._access.read("subscribe"):
            pass
        return hub_of(self._archive.store).subscribe(self._archive, self.id, callback, after=after)

    def subscriptions(self) -> Sequence[Subscription]:
        """The subscriptions of this process."""
        return hub_of(self._archive.store).of(self.id)


def _close_metadata(status: object) -> dict[str, Any]:
    """Why a session closes: a reason, or an object that has one."""
    if status is None:
        return {"reason": "closed", "status": "closed"}
    if isinstance(status, str):
        return {"reason": _checked_reason(status), "status": status}
    if not isinstance(status, Mapping):
        raise fault("invalid_params", "A close status must be a text, or an object with a reason.", field="status")
    named = next(
        (status[name] for name in ("reason", "stop_reason", "status") if status.get(name) is not None), "closed"
    )
    reason = _checked_reason(named)
    return {"reason": reason, "status": _checked_reason(status.get("status") or reason), "metadata": dict(status)}


def _checked_reason(text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise fault("invalid_params", "The reason for closing must not be empty.", field="status")
    return text
