"""Which session is at work here, for code that has none in its hands.

A context variable, as with calls: tasks carry it along by themselves, a thread started by hand does not.
"""

from __future__ import annotations

from mulligan.values.here import Block, Here
from mulligan.values.ids import SessionId

_active: Here[SessionId] = Here("mulligan_session")


def current_id() -> SessionId | None:
    """The innermost session at work on this thread, or None outside any."""
    return _active.now()


def active(session: SessionId) -> Block[SessionId]:
    """The block is this session's work."""
    return _active.block(session)
