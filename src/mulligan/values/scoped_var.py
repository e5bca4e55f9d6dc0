"""Context variables that forget a block once the block has ended, and the scope of a call.

A plain context variable is not enough. A task may carry its context beyond the block that started it. A generator that
other code closes leaves its block in another context than it entered. An interrupt may come just before a block resets
the variable. In each case `ScopedVar` no longer shows the ended block.

`CallScope` says whether the call that started some code is still open. A task or thread may outlive its call; its
changes would belong to no call, so they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from dataclasses import field
from functools import partial
from types import MethodType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from weakref import ref

from mulligan.values.errors import CallNotOpenError
from mulligan.values.fast_dataclass import fast_dataclass

T = TypeVar("T")
B = TypeVar("B")
P = ParamSpec("P")
R = TypeVar("R")

# An object that lives as long as a block does.
Holder = ref[Any]


class block_exit(Generic[B, P, R]):
    """Decorates the `__exit__` of a block that must know whether its `with` statement is still running.

    A `with` statement fetches the bound method before it enters the block and holds the only reference to it. The
    method is alive while a generator or task is suspended inside the block, and dead once the frame has left it, even
    if a traceback keeps the frame.
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
    """The `with` statement that is entering this block; None if a caller or an ExitStack enters it."""
    held: Holder | None = block.exit_held
    return held if held is not None and held() is not None else None


_all: list[ScopedVar[Any]] = []


class ScopedVar(Generic[T]):
    """The innermost block around the code that runs on this thread or task."""

    def __init__(self, name: str) -> None:
        self._var: ContextVar[ScopedBlock[T] | None] = ContextVar(name, default=None)
        self.block: Callable[[T], ScopedBlock[T]] = partial(ScopedBlock, self._var)
        _all.append(self)

    def now(self) -> T | None:
        """The value of the innermost block that has not ended; None outside all blocks."""
        block = self._var.get()
        while block is not None and (block._ended or (block._holder is not None and block._holder() is None)):
            block = block.outer
        return None if block is None else block.what

    def all(self, *, ended: bool = False) -> Iterator[T]:
        """The values of all blocks around, innermost first. With `ended`, also of blocks that a task has outlived."""
        block = self._var.get()
        while block is not None:
            if ended or not block.is_over:
                yield block.what
            block = block.outer

    def around(self) -> ScopedBlock[T] | None:
        """The innermost block, even one that a task has outlived.

        Resets the variable first if an interrupt kept a block that was entered in this context from resetting it.
        """
        block = self._var.get()
        while block is not None and block.is_over and block.reset():
            block = self._var.get()
        return block


def forget_ended_blocks() -> None:
    """Reset all these variables in this context."""
    for one in _all:
        if one._var.get() is not None:
            one.around()


@fast_dataclass(slots=True, eq=False)
class ScopedBlock(Generic[T]):
    """One block of a `ScopedVar`.

    It is not a generator, because Python would exit an abandoned generator when it collects it.
    """

    _var: ContextVar[ScopedBlock[T] | None]
    what: T
    outer: ScopedBlock[T] | None = None
    exit_held: Holder | None = None
    _holder: Holder | None = None
    _token: Token[ScopedBlock[T] | None] | None = None
    _ended: bool = False

    def __enter__(self) -> None:
        self.enter(holder_of(self))

    def enter(self, holder: Holder | None = None) -> None:
        """Enter the block without a `with` statement.

        With a holder, the block ends at the latest when the holder is collected.
        """
        outer = self._var.get()
        self.outer = None if outer is None else _going_on(outer)
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
        """End the block. May be called repeatedly and in any context."""
        self._ended = True
        if self._var.get() is self:
            self._var.set(self.outer)

    @property
    def is_over(self) -> bool:
        return self._ended or (self._holder is not None and self._holder() is None)

    def reset(self) -> bool:
        """Reset the variable.

        False in a copy of the context in which the block was entered: a task that started there still runs.
        """
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


def _going_on(block: ScopedBlock[T] | None) -> ScopedBlock[T] | None:
    while block is not None and block.is_over:
        block = block.outer
    return block


@fast_dataclass(slots=True, eq=False)
class CallScope:
    """One call, as the code inside it sees it: the call is open or has ended, and then it may have failed.

    `storage` is the state that the call works on. `outer` is the call on the same state that this call is a part of.
    """

    outer: CallScope | None = None
    is_open: bool = True
    has_failed: bool = False
    storage: object = field(default=None, kw_only=True)

    @property
    def is_undone(self) -> bool:
        """Whether this call or an outer one has failed."""
        scope: CallScope | None = self
        while scope is not None and not scope.has_failed:
            scope = scope.outer
        return scope is not None

    def check_open(self) -> None:
        if not self.is_open:
            raise CallNotOpenError("The call that this belongs to has ended; nothing was changed.")


scopes: ScopedVar[CallScope] = ScopedVar("mulligan_pending")


def check_call_open(storage: object = None) -> None:
    """Raises `call_not_open` in a task or thread whose call has failed. Every operation that a failed call restores
    uses it.

    With `storage`, only calls on that state count.
    """
    block = scopes.around()
    while block is not None and storage is not None and block.what.storage is not storage:
        block = block.outer
    if block is not None and block.what.is_undone:
        raise CallNotOpenError("The call that started this has failed; nothing was changed.")
