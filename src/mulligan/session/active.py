"""Which session is at work here, for code that has none in its hands.

A context variable, as with calls: tasks carry it along by themselves, a thread started by hand does not.
"""

from __future__ import annotations

from contextvars import ContextVar, Token

from mulligan.values.ids import SessionId

_active: ContextVar[SessionId | None] = ContextVar("mulligan_session", default=None)


def current_id() -> SessionId | None:
    """The innermost session at work on this thread, or None outside any."""
    return _active.get()


class active:
    """The block is this session's work. Not a generator: one that nobody leaves would be left when it is collected."""

    __slots__ = ("_session", "_token")

    def __init__(self, session: SessionId) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._token: Token[SessionId | None] = _active.set(self._session)

    def __exit__(self, *_: object) -> None:
        _active.reset(self._token)
