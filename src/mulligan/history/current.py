"""Which call is being made right now, for code that has no call in its hands.

A context variable: asyncio tasks and `asyncio.to_thread` carry it along by themselves, and two calls that interleave on
one thread each see their own. A thread started by hand carries it with `contextvars.copy_context().run`.
"""

from __future__ import annotations

from mulligan.history.call import Call
from mulligan.values.here import Block, Here
from mulligan.values.ids import TurnId

_call: Here[Call] = Here("mulligan_call")
_turn: Here[TurnId] = Here("mulligan_turn")


def current_call() -> Call | None:
    """The innermost open call here, or None."""
    call = _call.now()
    return call if call is not None and call.is_open_here else None


def current_turn() -> TurnId | None:
    return _turn.now()


def making(call: Call) -> Block[Call]:
    """The block is part of the call."""
    return _call.block(call)


def during(turn: TurnId) -> Block[TurnId]:
    return _turn.block(turn)
