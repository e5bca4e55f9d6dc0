"""A transcript budget: how many messages may be in force, and what happens to one that would be too many.

Only messages count. Events beside them, such as clients coming and going, never use up a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from mulligan.session.options import checked_count, checked_options
from mulligan.values.faults import fault
from mulligan.values.plain import plain

Recovery = Literal["reject", "trim", "compact"]


@plain(slots=True, frozen=True)
class Budget:
    """`reject` refuses the message; `trim` and `compact` make room and keep the last ones."""

    max_messages: int
    recovery: Recovery = "reject"
    keep_last: int = 12

    def to_json(self) -> dict[str, Any]:
        return {"max_messages": self.max_messages, "recovery": self.recovery, "keep_last": self.keep_last}


def parse_budget(given: object) -> Budget:
    options = checked_options("a transcript budget", given, {"max_messages": int, "recovery": str, "keep_last": int})
    if "max_messages" not in options:
        raise fault("invalid_params", "A transcript budget needs max_messages.", field="max_messages")
    for name in ("max_messages", "keep_last"):
        checked_count(name, options.get(name, 0))
    if options.get("recovery", "reject") not in get_args(Recovery):
        raise fault("invalid_params", f"recovery is one of {', '.join(get_args(Recovery))}.", field="recovery")
    budget = Budget(**options)
    if budget.recovery != "reject" and budget.keep_last >= budget.max_messages:
        raise fault("invalid_params", "keep_last must leave room for the next message.", field="keep_last")
    return budget


def action(kind: str, budget: Budget, *, source: str, before: int, after: int) -> Mapping[str, Any]:
    """What was done about a message too many, as it is told and remembered."""
    return {
        "action": kind,
        "source": source,
        "reason": "message_count",
        "policy": budget.to_json(),
        "usage_before": before,
        "usage_attempted": before + 1,
        "usage_after": after,
        "removed_messages": max(0, before + 1 - after),
    }
