"""Small values that a session has by name: its system prompt, its scratchpad, what it is pinned to.

A fork begins with its parent's. A reset takes away those that belong to the talk and leaves the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.session.projection import FACTS
from mulligan.session.tables import session_journal
from mulligan.session.transcript import Archive
from mulligan.store.journal import Record
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES

FACT_MAX_BYTES = MIB_BYTES

SYSTEM_PROMPT, TOOL_FORMAT, SUMMARY = "system_prompt", "tool_format", "summary"
SCRATCHPAD, SCRATCHPAD_VERSION = "scratchpad", "scratchpad_version"
PINNED_MODEL, PINNED_REASONING = "pinned_model", "pinned_reasoning_policy"
BUDGET, BUDGET_ACTION = "transcript_budget", "transcript_budget_action"
BRANCHED_AT = "branched_at_event_index"

OF_THE_TALK = (SYSTEM_PROMPT, TOOL_FORMAT, SUMMARY, SCRATCHPAD, SCRATCHPAD_VERSION, BUDGET_ACTION)
"""What a reset takes away."""

OF_THE_FORK = (BRANCHED_AT,)
"""What tells where a session came from, and so is not passed on."""


def facts_of(tx: Tx, session: SessionId) -> dict[str, Any]:
    return {row.name: decode(row.value) for row in tx.select(FACTS, {"session": session})}


def fact(tx: Tx, session: SessionId, name: str) -> Any:
    """None if the session has no such fact."""
    row = tx.get(FACTS, session, name)
    return None if row is None else decode(row.value)


def set_facts_in(
    tx: Tx,
    archive: Archive,
    session: SessionId,
    facts: Mapping[str, Any],
    *,
    event: Mapping[str, Any] | None = None,
) -> Record:
    """Set some facts, taking away those that are None, together with an event if there is one to tell."""
    for name, value in facts.items():
        if len(encode(value)) > FACT_MAX_BYTES:
            raise fault("invalid_params", f"{name} has at most {FACT_MAX_BYTES} bytes.", field=name)
    body: dict[str, Any] = {"facts": dict(facts)}
    if event is not None:
        body["event"] = dict(event)
    return archive.journal.append(tx, session_journal(session), "facts.set", body, at=archive.now())
