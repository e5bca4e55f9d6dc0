"""Verbs that change which messages are in force. Each only puts another list of spans there; see `session.windows`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mulligan.session.budget import Budget, action, parse_budget
from mulligan.session.compaction import Compacted, Options, Summarizer, compacted, parse_options
from mulligan.session.facts import BUDGET, BUDGET_ACTION, OF_THE_TALK, SUMMARY, fact, facts_of, set_facts_in
from mulligan.session.options import checked_count
from mulligan.session.projection import window_row
from mulligan.session.standing import Standing
from mulligan.session.subscribers import poke
from mulligan.session.transcript import (
    Written,
    append_message_in,
    entries_in,
    event_body,
    head_of,
    length_of,
    number_at,
    text_of,
    window_of,
    written,
)
from mulligan.session.windows import Span, Window, length, normal, part, to_json
from mulligan.store.blobs import Vanished
from mulligan.store.protocol import Tx
from mulligan.values.faults import MulliganError, fault

_COMPACT_TRIES = 5


class InForce(Standing):
    summarizer: Summarizer | None = None
    """The model that the compaction strategy `llm` summarises with, unless a call names another."""

    def reset(self) -> None:
        """Forget the talk. The id, subscribers, clients, lineage, pins and workspace stay; so does the journal."""
        with self._archive.store.write() as tx:
            self._check_open(tx, "reset")
            head = head_of(tx, self.id)
            facts = dict.fromkeys(name for name in facts_of(tx, self.id) if name in OF_THE_TALK)
            body = {"verb": "reset", "spans": [], "log": [], "log_after": head + 1, "was": head, "facts": facts}
            self._write(tx, "window.changed", body)
            self._reset_in(tx)
        poke(self._archive.store)

    def _reset_in(self, tx: Tx) -> None:
        """What other parts of a session forget with the talk."""

    def trim(self, keep_last: int) -> int:
        """Keep only the last messages in force, exactly as many as asked for. How many that are."""
        checked_count("keep_last", keep_last)
        with self._archive.store.write() as tx:
            self._check_open(tx, "trim")
            window = window_of(tx, self.id)
            kept = part(window, max(0, length(window) - keep_last), length(window))
            if kept != window:
                self._set_window(tx, "trim", kept)
        return length(kept)

    def truncate(self, keep_first: int) -> dict[str, Any]:
        """Keep only the first messages in force, exactly as many as asked for, and no summary."""
        checked_count("keep_first", keep_first)
        with self._archive.store.write() as tx:
            self._check_open(tx, "truncate")
            window = window_of(tx, self.id)
            kept = part(window, 0, keep_first)
            if kept != window:
                self._set_window(tx, "truncate", kept, facts={SUMMARY: None})
            last = list(entries_in(tx, self._archive, self.id, start=max(0, length(kept) - 1)))
        removed = length(window) - length(kept)
        return {
            "kept_turn_count": length(kept),
            "removed_turn_count": removed,
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
        body: dict[str, Any] = {
            "verb": verb,
            "spans": to_json(window),
            "was": head_of(tx, self.id) if was is None else was,
        }
        body |= {name: value for name, value in {"facts": facts, "event": event}.items() if value}
        self._write(tx, "window.changed", body)

    # Compaction.

    def compact(
        self, opts: Mapping[str, Any] | None = None, *, provider: Summarizer | None = None, **given: Any
    ) -> int:
        """Replace the older part of what is in force by a summary. How many messages are in force afterwards."""
        if opts is not None and not isinstance(opts, Mapping):
            raise fault("invalid_params", "The options of compact are an object.", field="opts")
        options = parse_options({**(opts or {}), **given})
        for _ in range(_COMPACT_TRIES):
            with self._archive.store.read() as tx:
                self._check_open(tx, "compact")
                window, at = window_of(tx, self.id), window_row(tx, self.id).seq
                messages = [entry.message for entry in entries_in(tx, self._archive, self.id)]
            done = compacted(messages, options, provider or self.summarizer)
            if done is None:
                return len(messages)
            with suppress(Vanished):
                kept = self._put_in_force(done, window, at, len(messages))
                if kept is not None:
                    return kept
        raise fault("conflict", "Somebody keeps changing what is in force while it is being compacted; try again.")

    def _put_in_force(self, done: Compacted, window: Window, at: int, count: int) -> int | None:
        """None if somebody has put another window in force since we looked. What was said meanwhile stays."""
        summaries = [written(self._archive, one) for one in done.summaries]
        shortened = {place: written(self._archive, one) for place, one in done.shortened.items()}
        with self._archive.store.write() as tx:
            self._check_open(tx, "compact")
            if window_row(tx, self.id).seq != at:
                return None
            now, was = window_of(tx, self.id), head_of(tx, self.id)
            spans = [self._insert(tx, one) for one in summaries]
            start = done.archived
            for place in sorted(shortened):
                spans += [*part(now, start, place), self._insert(tx, shortened[place])]
                start = place + 1
            kept = normal((*spans, *part(now, start, length(now))))
            told = {
                "strategy": done.strategy,
                "archived_messages": done.archived,
                "kept_messages": count - done.archived,
                "shortened_messages": len(shortened),
            }
            text = "\n\n".join(text_of(one) for one in done.summaries)
            facts = {SUMMARY: text or None}
            self._set_window(tx, "compact", kept, was=was, facts=facts, event=event_body("compaction", told))
        poke(self._archive.store)
        return length(kept)

    def _insert(self, tx: Tx, message: Written) -> Span:
        record = append_message_in(tx, self._archive, self.id, message, inserted=True)
        number = number_at(tx, self.id, record.seq) - 1
        return Span(self.id, number, number + 1)

    # Budget.

    def set_budget(self, budget: Mapping[str, Any] | None) -> None:
        """Bound how many messages may be in force, or with None no longer. Refused if there are more already."""
        parsed = None if budget is None else parse_budget(budget)
        with self._archive.store.write() as tx:
            self._check_open(tx, "set_budget")
            if parsed is not None and length_of(tx, self.id) > parsed.max_messages:
                raise fault("transcript_budget_exceeded", "There are more messages than that already.")
            facts = {BUDGET: None if parsed is None else parsed.to_json()}
            set_facts_in(tx, self._archive, self.id, facts)

    def _make_room(self, tx: Tx, source: str) -> MulliganError | None:
        """Keep to the budget before one more message. What to raise, if there is no room; the record says so too."""
        limits = fact(tx, self.id, BUDGET)
        if limits is None or length_of(tx, self.id) < limits["max_messages"]:
            return None
        budget, count = Budget(**limits), length_of(tx, self.id)
        if budget.recovery == "reject":
            told = action("rejected", budget, source=source, before=count, after=count)
            if fact(tx, self.id, BUDGET_ACTION) != told:
                set_facts_in(tx, self._archive, self.id, {BUDGET_ACTION: told})
            words = f"The transcript budget of {budget.max_messages} messages is used up."
            return fault("transcript_budget_exceeded", words, **told)
        was, window = head_of(tx, self.id), self._smaller(tx, budget)
        kind = {"trim": "trimmed", "compact": "compacted"}[budget.recovery]
        told = action(kind, budget, source=source, before=count, after=length(window) + 1)
        event = event_body("transcript_budget", told)
        self._set_window(tx, budget.recovery, window, was=was, facts={BUDGET_ACTION: told}, event=event)
        return None

    def _smaller(self, tx: Tx, budget: Budget) -> Window:
        """Without a model and without callbacks: this happens inside a transaction."""
        window = window_of(tx, self.id)
        trimmed = part(window, max(0, length(window) - budget.keep_last), length(window))
        if budget.recovery == "trim":
            return trimmed
        messages = [entry.message for entry in entries_in(tx, self._archive, self.id)]
        done = compacted(messages, Options(keep_last=budget.keep_last, compact_strategy="truncate"))
        if done is None or len(messages) - done.archived + len(done.summaries) >= budget.max_messages:
            return trimmed
        spans = [self._insert(tx, written(self._archive, one)) for one in done.summaries]
        return normal((*spans, *part(window, done.archived, length(window))))
