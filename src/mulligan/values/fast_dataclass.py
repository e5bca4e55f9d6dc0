"""A decorator for dataclasses that are cheap to define and to create.

`dataclass` compiles up to six methods for each class, which took half of the start-up time of a command, and a command
uses few of its classes. So a class gets its methods when somebody first asks for one. Creating a frozen object takes
five times as long as creating another one, which took a tenth of the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as fast_dataclass
else:
    from dataclasses import dataclass, fields

    def fast_dataclass(
        *, slots: Literal[True], frozen: bool = False, order: bool = False, eq: bool = True
    ) -> Callable[[type[T]], type[T]]:
        """`@fast_dataclass(slots=True, frozen=True)` makes a dataclass that only the type checker keeps frozen.

        At run time it compares, hashes and prints like a frozen one.
        """
        if order:
            return dataclass(slots=slots, unsafe_hash=frozen, order=True)

        def decorate(cls: type[T]) -> type[T]:
            # Without a docstring, `dataclass` would compute one from the signature, which costs two methods.
            cls.__doc__ = cls.__doc__ or cls.__name__
            return _Methods(cls, eq, frozen).with_slots()

        return decorate

    class _Methods:
        """What `dataclass` makes for a class. When somebody reads one of them, the class gets all.

        Two threads may do that at the same time, and without a lock: a process may fork in the middle.
        """

        def __init__(self, cls: type, eq: bool, frozen: bool) -> None:
            self.cls = cls
            names = {"__init__", "__repr__", "__match_args__", "__dataclass_fields__", "__dataclass_params__"}
            self.names = names - vars(cls).keys() | ({"__eq__"} if eq else set()) | ({"__hash__"} if frozen else set())
            self.unhashable = eq and not frozen

        def with_slots(self) -> type:
            """The class again, with slots for its fields: a class cannot get slots later."""
            cls = self.cls
            hints = vars(cls).get("__annotations__", {})
            own = [name for name, hint in hints.items() if not hint.startswith("ClassVar")]
            taken = {name for base in cls.__mro__[1:] for name in vars(base).get("__slots__", ())}
            body = _body(cls)
            for name in own:
                body.pop(name, None)
            body |= {name: _Later(self, name) for name in self.names}
            body["__slots__"] = tuple(name for name in own if name not in taken)
            if self.unhashable:
                body["__hash__"] = None
            self.made = type(cls)(cls.__name__, cls.__bases__, body)
            self.made.__qualname__ = cls.__qualname__
            return self.made

        def make(self) -> None:
            cls = self.cls
            # Only for a class with slots does `__init__` set the defaults of fields that it does not take.
            full = dataclass(eq=False, repr=False, slots=True)(type(cls)(cls.__name__, cls.__bases__, _body(cls)))
            values = values_getter([field.name for field in fields(full) if field.compare])

            def __eq__(self: T, other: object) -> bool:
                return values(self) == values(other) if type(other) is type(self) else NotImplemented

            own = {"__eq__": __eq__, "__hash__": lambda self: hash(values(self)), "__repr__": _shown}
            for name in self.names:
                setattr(self.made, name, own.get(name) or vars(full)[name])

    def _body(cls: type) -> dict[str, Any]:
        return {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}

    class _Later:
        """Stands for an attribute of a dataclass that is not made yet."""

        def __init__(self, methods: _Methods, name: str) -> None:
            self.methods, self.name = methods, name

        def __get__(self, instance: object, owner: type) -> Any:
            self.methods.make()
            found = vars(self.methods.made)[self.name]
            return found.__get__(instance, owner) if hasattr(found, "__get__") else found

    def _shown(self: Any) -> str:
        values = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr]
        return f"{type(self).__qualname__}({', '.join(values)})"


def values_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of these attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


__all__ = ["fast_dataclass", "values_getter"]
