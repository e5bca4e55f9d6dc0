"""What goes on here: a context variable that forgets what is over.

A task may carry its context beyond the block it was started in, and a generator that others close leaves its block in
another context than it entered it in. Either way, what is over is no longer seen.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Here(Generic[T]):
    """The innermost of several blocks around whatever runs on this thread or task."""

    def __init__(self, name: str) -> None:
        self._var: ContextVar[Block[T] | None] = ContextVar(name, default=None)

    def now(self) -> T | None:
        """What the innermost block is about that is not over; None outside any."""
        block = _going_on(self._var.get())
        return None if block is None else block.what

    def block(self, what: T) -> Block[T]:
        return Block(self._var, what)


class Block(Generic[T]):
    """Not a generator: one that nobody leaves would be left when it is collected."""

    __slots__ = ("_var", "is_over", "outer", "what")

    def __init__(self, var: ContextVar[Block[T] | None], what: T) -> None:
        self._var = var
        self.what = what
        self.outer: Block[T] | None = None
        self.is_over = False

    def __enter__(self) -> None:
        self.outer = _going_on(self._var.get())
        self._var.set(self)

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        if self._var.get() is self:
            self._var.set(self.outer)


def _going_on(block: Block[T] | None) -> Block[T] | None:
    while block is not None and block.is_over:
        block = block.outer
    return block
