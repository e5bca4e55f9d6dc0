"""Which call is being made right now, for code that has no call in its hands.

A context variable: asyncio tasks and `asyncio.to_thread` carry it along by themselves, and two calls that interleave on
one thread each see their own. A thread started by hand carries it with `contextvars.copy_context().run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

from mulligan.history.call import Call
from mulligan.values.ids import TurnId

_call: ContextVar[Call | None] = ContextVar("mulligan_call", default=None)
_turn: ContextVar[TurnId | None] = ContextVar("mulligan_turn", default=None)


def current_call() -> Call | None:
    """The innermost open call here, or None."""
    call = _call.get()
    return call if call is not None and call.status == "open" else None


def current_turn() -> TurnId | None:
    return _turn.get()


class making:
    """The block is part of the call."""

    __slots__ = ("_call", "_token")

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._token: Token[Call | None] = _call.set(self._call)

    def __exit__(self, *_: object) -> None:
        _call.reset(self._token)


@contextmanager
def during(turn: TurnId) -> Iterator[None]:
    token = _turn.set(turn)
    try:
        yield
    finally:
        _turn.reset(token)
