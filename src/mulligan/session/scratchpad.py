"""The scratchpad: a small object that an agent keeps for itself beside the talk. Each change makes a new version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.session.facts import SCRATCHPAD, SCRATCHPAD_VERSION, fact, set_facts_in
from mulligan.session.options import checked_options
from mulligan.session.transcript import Archive, event_body
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.plain import plain

SCRATCHPAD_MAX_BYTES = 16_384
_COUNTED = ("goals", "open_items", "facts", "refs")
_OPTIONS = {"source": str, "reason": str, "metadata": Mapping}


@plain(slots=True, frozen=True)
class Scratchpad:
    version: int
    content: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return {"ok": True, "version": self.version, "scratchpad": self.content}


def scratchpad_in(tx: Tx, session: SessionId) -> Scratchpad:
    return Scratchpad(fact(tx, session, SCRATCHPAD_VERSION) or 0, fact(tx, session, SCRATCHPAD))


def checked_scratchpad(content: object) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise fault("invalid_params", "A scratchpad is an object.", field="scratchpad")
    data = encode(dict(content))
    if len(data) > SCRATCHPAD_MAX_BYTES:
        words = f"A scratchpad has at most {SCRATCHPAD_MAX_BYTES} bytes of JSON, not {len(data)}."
        raise fault("invalid_params", words, field="scratchpad")
    found: dict[str, Any] = decode(data)
    return found


def set_scratchpad_in(
    tx: Tx, archive: Archive, session: SessionId, content: dict[str, Any] | None, *, opts: Mapping[str, Any] | None
) -> Scratchpad:
    """Set it, or with None clear it. The event tells how much there is of each kind, never what it says."""
    options = checked_options("the scratchpad", opts, _OPTIONS)
    version = scratchpad_in(tx, session).version + 1
    counts = {name: _count((content or {}).get(name)) for name in _COUNTED}
    told = {"version": version, "cleared": content is None, "counts": counts, **options}
    facts = {SCRATCHPAD: content, SCRATCHPAD_VERSION: version}
    set_facts_in(tx, archive, session, facts, event=event_body("agent_scratchpad", told))
    return Scratchpad(version, content)


def _count(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else int(value is not None)
