"""What a session keeps beside its talk: the scratchpad, the system prompt, how tools are called, what is pinned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.session.facts import PINNED_MODEL, PINNED_REASONING, SYSTEM_PROMPT, TOOL_FORMAT, fact, set_facts_in
from mulligan.session.scratchpad import checked_scratchpad, scratchpad_in, set_scratchpad_in
from mulligan.session.standing import Standing
from mulligan.session.subscribers import poke
from mulligan.session.transcript import event_body
from mulligan.values.faults import fault


class Notes(Standing):
    def scratchpad(self) -> dict[str, Any] | None:
        """What the agent keeps for itself; None if nothing."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "scratchpad")
            return scratchpad_in(tx, self.id).content

    def set_scratchpad(self, scratchpad: Mapping[str, Any], opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Keep this object beside the talk, instead of the one before. Raises `invalid_params` for one too large."""
        return self._set_scratchpad(checked_scratchpad(scratchpad), opts)

    def clear_scratchpad(self, opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Keep nothing beside the talk any more."""
        return self._set_scratchpad(None, opts)

    def _set_scratchpad(self, content: dict[str, Any] | None, opts: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._archive.store.write() as tx:
            self._check_open(tx, "scratchpad")
            found = set_scratchpad_in(tx, self._archive, self.id, content, opts=opts)
        poke(self._archive.store)
        return found.to_json()

    def set_system_prompt(self, text: str | None) -> None:
        """What a model is told before everything else; None for nothing."""
        with self._archive.store.write() as tx:
            self._check_open(tx, "set_system_prompt")
            if fact(tx, self.id, SYSTEM_PROMPT) != text:
                event = event_body("system_prompt", {"chars": len(text or "")})
                set_facts_in(tx, self._archive, self.id, {SYSTEM_PROMPT: text}, event=event)
        poke(self._archive.store)

    def claim_tool_format(self, tool_format: str) -> None:
        """The first to ask fixes how tools are called in this session; another format is refused from then on."""
        with self._archive.store.write() as tx:
            self._check_open(tx, "claim_tool_format")
            locked = fact(tx, self.id, TOOL_FORMAT)
            if locked is not None and locked != tool_format:
                words = f"This session calls tools in the format {locked!r}, not {tool_format!r}."
                raise fault("tool_format_locked", words, tool_format=locked)
            if locked is None:
                set_facts_in(tx, self._archive, self.id, {TOOL_FORMAT: tool_format})

    def pin(self, *, model: str | None = None, reasoning_policy: Mapping[str, Any] | str | None = None) -> None:
        """Fix the model and the way it reasons; forks inherit it and resets leave it. None takes a pin away."""
        with self._archive.store.write() as tx:
            self._check_open(tx, "pin")
            facts = {PINNED_MODEL: model, PINNED_REASONING: reasoning_policy}
            set_facts_in(tx, self._archive, self.id, facts)
