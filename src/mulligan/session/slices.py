"""Slices: typed state as immutable sequences, and what reducers do to them.

A slice's items share their memory with every earlier version that is a prefix of them: appending costs the item, a
snapshot costs nothing, and no version ever changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from inspect import Parameter, signature
from typing import Any, Generic, TypeAlias, TypeVar, overload

from mulligan.store.fork_locks import shared_lock
from mulligan.values.plain import plain

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SlicePolicy(Enum):
    """What becomes of a slice when a tool fails, or a snapshot is restored."""

    STATE = "state"
    """Goes back."""
    LOG = "log"
    """Stays: a truthful record only grows."""
    CACHE = "cache"
    """Goes back or is emptied: it can be computed again, and is never stored."""


_growing = shared_lock()


class Items(Sequence[T_co]):
    """The first `length` items of a buffer that others may have grown beyond them. Immutable, and cheap to extend."""

    __slots__ = ("_buffer", "_length", "_tuple")

    def __init__(self, buffer: list[Any] | None = None, length: int | None = None) -> None:
        self._buffer: list[Any] = [] if buffer is None else buffer
        self._length = len(self._buffer) if length is None else length
        self._tuple: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, items: Iterable[Any]) -> Items[Any]:
        """From any items, in their order."""
        return Items(list(items))

    def all(self) -> tuple[T_co, ...]:
        """As a frozen tuple, made once."""
        if self._tuple is None:
            self._tuple = tuple(self._buffer[: self._length])
        return self._tuple

    def latest(self) -> T_co | None:
        """The newest item; None if there is none."""
        return self._buffer[self._length - 1] if self._length else None

    def where(self, predicate: Callable[[T_co], bool]) -> tuple[T_co, ...]:
        """The items that the predicate is true of, oldest first."""
        return tuple(item for item in self if predicate(item))

    def extended(self, items: Iterable[Any]) -> Items[Any]:
        """With more at the end. Whoever is first to grow a buffer may; the next one copies."""
        more = list(items)
        if not more:
            return self
        with _growing:
            # Nobody's empty list is grown: everybody starts from the same one.
            shared = len(self._buffer) == self._length and self._length > 0
            buffer = self._buffer if shared else self._buffer[: self._length]
            buffer.extend(more)
            return Items(buffer, self._length + len(more))

    def grown_from(self, earlier: Items[Any]) -> list[Any] | None:
        """What was added since, if this is an earlier version and something at its end; else None."""
        if self._buffer is not earlier._buffer or self._length < earlier._length:
            return None
        return self._buffer[earlier._length : self._length]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.all()[index]

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Items):
            return self is other or self.all() == other.all()
        return self.all() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.all())

    def __repr__(self) -> str:
        return f"Items({list(self)!r})"


NO_ITEMS: Items[Any] = Items()


@plain(slots=True, frozen=True)
class Append(Generic[T]):
    """Add one item at the end of the slice."""

    item: T


@plain(slots=True, frozen=True)
class Extend(Generic[T]):
    """Add several items at the end of the slice."""

    items: Sequence[T]


@plain(slots=True, frozen=True)
class Replace(Generic[T]):
    """These items instead of whatever is in the slice."""

    items: Sequence[T]


@plain(slots=True, frozen=True)
class Clear(Generic[T]):
    """Without a predicate, everything goes."""

    predicate: Callable[[T], bool] | None = None


SliceOp: TypeAlias = Append[T] | Extend[T] | Replace[T] | Clear[T]
Reducer: TypeAlias = Callable[..., Any]
"""`(view, event)` or `(view, event, *, context)`, pure. Gives a SliceOp, or simply the slice's new items, or the one
item that shall be all of it."""


def applied(op: object, items: Items[Any], kind: type[object]) -> Items[Any]:
    """The slice after what a reducer gave. Raises TypeError for what means nothing."""
    if isinstance(op, Append):
        return items.extended(_of_kind((op.item,), kind))
    if isinstance(op, Extend):
        return items.extended(_of_kind(op.items, kind))
    if isinstance(op, Clear):
        return _cleared(items, op.predicate)
    if isinstance(op, kind):
        return _replaced(items, (op,))
    if isinstance(op, Replace):
        return _replaced(items, _of_kind(op.items, kind))
    if isinstance(op, tuple | list | Items):
        return _replaced(items, _of_kind(op, kind))
    raise TypeError(f"A reducer of {kind.__name__} gave {op!r}; it gives a SliceOp or the slice's new items.")


def _of_kind(items: Iterable[Any], kind: type[object]) -> list[Any]:
    found = list(items)
    strangers = [item for item in found if not isinstance(item, kind)]
    if strangers:
        raise TypeError(f"A slice of {kind.__name__} cannot hold {strangers[0]!r}.")
    return found


def _replaced(items: Items[Any], new: Sequence[Any]) -> Items[Any]:
    """The same version, or a longer one, if that is what the new items are."""
    old = len(items)
    if len(new) >= old and all(one is other for one, other in zip(items, new, strict=False)):
        return items.extended(new[old:])
    return Items.of(new)


def _cleared(items: Items[Any], predicate: Callable[[Any], bool] | None) -> Items[Any]:
    if predicate is None:
        return NO_ITEMS if items else items
    kept = [item for item in items if not predicate(item)]
    return items if len(kept) == len(items) else Items.of(kept)


# Ready-made reducers.


def append_all(view: Sequence[Any], event: Any, *, context: object = None) -> Append[Any]:
    """Keep every event."""
    return Append(event)


def replace_latest(view: Sequence[Any], event: Any, *, context: object = None) -> Replace[Any]:
    """Keep only the newest event."""
    return Replace((event,))


def upsert_by(key: Callable[[Any], object]) -> Reducer:
    """Keep one event for each key: the newest, at the end."""

    def upsert(view: Sequence[Any], event: Any, *, context: object = None) -> Replace[Any]:
        mine = key(event)
        return Replace((*(item for item in view if key(item) != mine), event))

    return upsert


def takes_context(reducer: Reducer) -> bool:
    """Whether a reducer wants to be told where it is run."""
    try:
        parameters = signature(reducer).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.name == "context" or one.kind is Parameter.VAR_KEYWORD for one in parameters)


# Slices that bring their reducers along.

_MARK = "__mulligan_reduces__"
F = TypeVar("F", bound=Callable[..., Any])


def reducer(*, on: type[object]) -> Callable[[F], F]:
    """Marks a method of a frozen dataclass as what an event does to the slice's latest item; see `Session.install`."""

    def mark(method: F) -> F:
        setattr(method, _MARK, on)
        return method

    return mark


def reducers_of(kind: type[object]) -> dict[type[object], str]:
    """Event types of a declarative slice and the methods for them. Raises TypeError or ValueError for a bad one."""
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{kind.__name__} is installed as a slice, so it must be a frozen dataclass.")
    found: dict[type[object], str] = {}
    for name in dir(kind):
        event = getattr(getattr(kind, name), _MARK, None) if not name.startswith("__") else None
        if event is None:
            continue
        if event in found:
            raise ValueError(f"{kind.__name__} has two reducers for {event.__name__}.")
        found[event] = name
    if not found:
        raise ValueError(f"{kind.__name__} has no method marked with @reducer(on=…).")
    return found


def as_reducer(method: str, initial: Callable[[], Any] | None) -> Reducer:
    def reduce(view: Items[Any], event: Any, *, context: object = None) -> object:
        latest = view.latest()
        if latest is None and initial is not None:
            latest = initial()
        return Replace(()) if latest is None else getattr(latest, method)(event)

    return reduce
