"""What goes on here: a context variable that forgets what is over.

A task may carry its context beyond the block it was started in, and a generator that others close leaves its block in
another context than it entered it in. An interrupt may come when a block is about to be left, so that nothing resets
the variable. In each case, what is over is no longer seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from types import MethodType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from weakref import ref

T = TypeVar("T")
B = TypeVar("B")
P = ParamSpec("P")
R = TypeVar("R")

Holder = ref[Any]
"""What is alive as long as a block is."""


class block_exit(Generic[B, P, R]):
    """Decorates the `__exit__` of a block that has to know whether its `with` statement still runs.

    A `with` statement asks for the bound method before it enters the block, and nothing but the statement holds that
    method until the block is left: it is alive in a suspended generator or task, and dead as soon as the frame was
    left, even if a traceback keeps the frame.
    """

    def __init__(self, leave: Callable[Concatenate[B, P], R]) -> None:
        self._leave = leave
        self.__doc__ = leave.__doc__

    @overload
    def __get__(self, block: None, owner: type[B]) -> Callable[Concatenate[B, P], R]: ...
    @overload
    def __get__(self, block: B, owner: type[B] | None = None) -> Callable[P, R]: ...
    def __get__(self, block: B | None, owner: type[B] | None = None) -> Callable[..., R]:
        if block is None:
            return self._leave
        bound = MethodType(self._leave, block)
        block.exit_held = ref(bound)  # type: ignore[attr-defined]  # each decorated class has it
        return bound


def holder_of(block: Any) -> Holder | None:
    """The `with` statement that is entering this block; None if it is entered by hand or by an ExitStack."""
    held: Holder | None = block.exit_held
    return held if held is not None and held() is not None else None


_all: list[Here[Any]] = []


class Here(Generic[T]):
    """The innermost of several blocks around whatever runs on this thread or task."""

    def __init__(self, name: str) -> None:
        self._var: ContextVar[Block[T] | None] = ContextVar(name, default=None)
        _all.append(self)

    def now(self) -> T | None:
        """What the innermost block is about that is not over; None outside any."""
        block = _going_on(self._var.get())
        return None if block is None else block.what

    def all(self, *, ended: bool = False) -> Iterator[T]:
        """The same for every block around, innermost first. With `ended`, also those that a task has outlived."""
        block = self._var.get()
        while block is not None:
            if ended or not block.is_over:
                yield block.what
            block = block.outer

    def block(self, what: T) -> Block[T]:
        return Block(self._var, what)

    def forget_ended(self) -> None:
        """Reset the variable, if an interrupt kept a block that was entered in this very context from doing so."""
        block = self._var.get()
        while block is not None and block.is_over and block.reset():
            block = self._var.get()


def forget_ended_blocks() -> None:
    """Reset every such variable in this context."""
    for one in _all:
        if one._var.get() is not None:
            one.forget_ended()


class Block(Generic[T]):
    """Not a generator: one that nobody leaves would be left when it is collected."""

    __slots__ = ("_ended", "_holder", "_token", "_var", "exit_held", "outer", "what")

    def __init__(self, var: ContextVar[Block[T] | None], what: T) -> None:
        self._var = var
        self.what = what
        self.outer: Block[T] | None = None
        self.exit_held: Holder | None = None
        self._holder: Holder | None = None
        self._token: Token[Block[T] | None] | None = None
        self._ended = False

    def __enter__(self) -> None:
        self.enter(holder_of(self))

    def enter(self, holder: Holder | None = None) -> None:
        """By hand. With a holder, the block is over at the latest when that is gone."""
        self.outer = _going_on(self._var.get())
        self._holder = holder
        self._token = self._var.set(self)

    @block_exit
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Any number of times, in any context."""
        self._ended = True
        if self._var.get() is self:
            self._var.set(self.outer)

    @property
    def is_over(self) -> bool:
        return self._ended or (self._holder is not None and self._holder() is None)

    def reset(self) -> bool:
        """False in a copy of the context in which the block was entered: a task was started there that lives on."""
        try:
            if self._token is None:
                self._var.set(self.outer)
            else:
                self._var.reset(self._token)
        except ValueError:
            return False
        except RuntimeError:
            # The token was used: the block was entered again from a context that was copied back.
            self._var.set(self.outer)
        return True


def _going_on(block: Block[T] | None) -> Block[T] | None:
    while block is not None and block.is_over:
        block = block.outer
    return block
