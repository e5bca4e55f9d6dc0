"""A decorator for values: frozen dataclasses that are cheap to define and to create.

`dataclass` compiles six methods for each frozen class, which took half of the start-up time of a command. Creating a
frozen object takes five times as long as creating another one, which took a tenth of the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as fast_dataclass
else:
    from dataclasses import dataclass, fields

    def fast_dataclass(*, slots: bool, frozen: bool, order: bool = False) -> Callable[[type[T]], type[T]]:
        """`@fast_dataclass(slots=True, frozen=True)` makes a dataclass that only the type checker keeps frozen.

        At run time it compares, hashes and prints like a frozen one.
        """
        if order:
            return dataclass(slots=slots, unsafe_hash=frozen, order=True)

        def decorate(cls: type[T]) -> type[T]:
            # Without a docstring, `dataclass` would compute one from the signature, which costs two methods.
            cls.__doc__ = cls.__doc__ or cls.__name__
            made = dataclass(slots=slots, eq=False, repr=False)(cls)
            values = values_getter([field.name for field in fields(made) if field.compare])

            def __eq__(self: T, other: object) -> bool:
                return values(self) == values(other) if type(other) is type(self) else NotImplemented

            made.__eq__ = __eq__
            made.__hash__ = (lambda self: hash(values(self))) if frozen else None
            made.__repr__ = _shown
            return made

        return decorate

    def _shown(self: Any) -> str:
        values = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr]
        return f"{type(self).__qualname__}({', '.join(values)})"


def values_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of these attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


__all__ = ["fast_dataclass", "values_getter"]
