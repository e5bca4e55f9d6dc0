"""Small slices and events for tests of typed state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mulligan import Session, SlicePolicy, ToolInvoked, ToolResult, register_type

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@register_type
@dataclass(slots=True, frozen=True)
class Count:
    number: int


@dataclass(slots=True, frozen=True)
class Added:
    by: int = 1


@register_type
@dataclass(slots=True, frozen=True)
class Note:
    text: str


@register_type
@dataclass(slots=True, frozen=True)
class Seen:
    text: str


def add(view: Sequence[Count], event: Added) -> Count:
    return Count((view[-1].number if view else 0) + event.by)


def counting(session: Session) -> Session:
    """A session that counts what is added; `Seen` is a log."""
    session[Count].register(Added, add)
    session[Seen].register(Seen, lambda view, event: (*view, event), policy=SlicePolicy.LOG)
    return session


def invoked(name: str = "tool", *, success: bool = True) -> ToolInvoked:
    return ToolInvoked(name, {}, ToolResult("", success=success), NOON)


def number(session: Session) -> int:
    latest = session[Count].latest()
    return 0 if latest is None else latest.number
