"""Python values as JSON and back, with types named through an explicit registry.

A type can be read back only if this process has registered it, explicitly or by putting a value of it into its state.
Mulligan never imports a module that JSON names, and creates only values of registered types.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite
from pathlib import PurePath, PurePosixPath
from typing import Any, TypeVar, get_args, get_type_hints
from uuid import UUID

from mulligan.store.fork_locks import shared_lock
from mulligan.values.errors import MulliganError, SnapshotMismatchError
from mulligan.values.fast_dataclass import fast_dataclass

C = TypeVar("C", bound=type[Any])

_TAG, _VALUE = "$", "v"
_INT_LIMIT = 2**63


class Types:
    """The registered types. Safe to use from many threads."""

    def __init__(self) -> None:
        self._made: dict[str, type[Any]] = {}
        self._named: dict[str, type[Any]] = {}
        self._names: dict[type[Any], str] = {}
        self._lock = shared_lock()

    def register(self, kind: C, name: str | None = None) -> C:
        """Values of this dataclass, enum or pydantic model, and of those its fields name, may be read back."""
        self._enter(self._made, kind, name)
        for part in _parts_of(kind):
            if part not in self._names or self._names[part] not in self._made:
                self.register(part)
        return kind

    def name(self, kind: type[Any], name: str | None = None) -> str:
        """The name of a type in JSON. A named type is not registered by that: JSON cannot create values of it."""
        known = self._names.get(kind)
        return known if known is not None and name is None else self._enter(self._named, kind, name)

    def _enter(self, table: dict[str, type[Any]], kind: type[Any], name: str | None) -> str:
        with self._lock:
            chosen = name or self._names.get(kind) or f"{kind.__module__}:{kind.__qualname__}"
            table[chosen] = self._named[chosen] = kind
            self._names[kind] = chosen
        return chosen

    def named(self, name: object) -> type[Any]:
        """Raises SnapshotMismatchError for a type unknown to this process."""
        found = self._named.get(name) if isinstance(name, str) else None
        if found is None:
            raise SnapshotMismatchError(f"No type {name!r} is registered here; see mulligan.register_type.", type=name)
        return found

    def knows(self, name: str) -> bool:
        return name in self._named

    # To JSON.

    def to_json(self, value: object) -> Any:
        """Raises TypeError for a value without a JSON form."""
        if value is None or isinstance(value, bool) or type(value) is str:
            return value
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(self, value)
        if isinstance(value, Enum):
            return self._tagged(type(value), value.name)
        if is_dataclass(value) and not isinstance(value, type):
            return self._tagged(type(value), {f.name: self.to_json(getattr(value, f.name)) for f in fields(value)})
        return self._other_to_json(value)

    def _other_to_json(self, value: object) -> Any:
        if isinstance(value, type):
            return {_TAG: "type", _VALUE: self.name(value)}
        if isinstance(value, Mapping):
            return _mapping(self, value)
        if isinstance(value, PurePath):
            return {_TAG: "path", _VALUE: str(value)}
        dump = getattr(value, "model_dump", None)
        if callable(dump):
            return self._tagged(type(value), self.to_json(dump(mode="json")))
        raise TypeError(f"A {type(value).__name__} cannot be part of a snapshot's JSON.")

    def _tagged(self, kind: type[Any], body: Any) -> dict[str, Any]:
        if self._names.get(kind) not in self._made:
            self.register(kind)
        return {_TAG: self._names[kind], _VALUE: body}

    # From JSON.

    def from_json(self, body: Any) -> Any:
        """Raises SnapshotMismatchError for JSON that `to_json` cannot have written."""
        if isinstance(body, list):
            return [self.from_json(item) for item in body]
        if not isinstance(body, dict):
            return body
        if _TAG not in body:
            return {key: self.from_json(item) for key, item in body.items()}
        tag, value = body[_TAG], body.get(_VALUE)
        reader = _READERS.get(tag) if isinstance(tag, str) else None
        try:
            return reader(self, value) if reader is not None else self._make(tag, value)
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SnapshotMismatchError(f"This is not a {tag}: {error!r}", type=tag) from None

    def _make(self, tag: object, value: Any) -> Any:
        kind = self._made.get(tag) if isinstance(tag, str) else None
        if kind is None:
            raise SnapshotMismatchError(f"No type {tag!r} is registered here; see mulligan.register_type.", type=tag)
        if issubclass(kind, Enum):
            return kind[value]
        validate = getattr(kind, "model_validate", None)
        if validate is not None:
            return validate(self.from_json(value))
        return _dataclass(kind, {name: self.from_json(item) for name, item in value.items()})


def _dataclass(kind: type[Any], given: Mapping[str, Any]) -> Any:
    known = {field.name: field for field in fields(kind)}
    if given.keys() - known.keys():
        raise ValueError(f"it has no {sorted(given.keys() - known.keys())}")
    made = kind(**{name: value for name, value in given.items() if known[name].init})
    for name, value in given.items():
        if not known[name].init:
            object.__setattr__(made, name, value)
    return made


def _parts_of(kind: type[Any]) -> list[type[Any]]:
    """The dataclasses and enums that a type's fields name."""
    if not is_dataclass(kind):
        return []
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError, AttributeError):
        # A forward reference that cannot be resolved here is registered when a value of its type is first written.
        return []
    return [one for hint in hints.values() for one in _classes_in(hint)]


def _classes_in(hint: object) -> list[type[Any]]:
    if isinstance(hint, type) and not get_args(hint):
        return [hint] if is_dataclass(hint) or (issubclass(hint, Enum)) else []
    return [found for part in get_args(hint) for found in _classes_in(part)]


def _int(_: Types, value: int) -> Any:
    return value if -_INT_LIMIT <= value < _INT_LIMIT else {_TAG: "int", _VALUE: str(value)}


def _float(_: Types, value: float) -> Any:
    return value if isfinite(value) else {_TAG: "float", _VALUE: repr(value)}


def _mapping(types: Types, value: Mapping[Any, Any]) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: types.to_json(item) for key, item in value.items()}
    return {_TAG: "dict", _VALUE: [[types.to_json(key), types.to_json(item)] for key, item in value.items()]}


def _array(tag: str) -> Callable[[Types, Sequence[Any]], Any]:
    return lambda types, value: {_TAG: tag, _VALUE: [types.to_json(item) for item in value]}


def _set(tag: str) -> Callable[[Types, Any], Any]:
    return lambda types, value: {_TAG: tag, _VALUE: sorted((types.to_json(item) for item in value), key=repr)}


def _as_text(tag: str, say: Callable[[Any], str]) -> Callable[[Types, Any], Any]:
    return lambda _, value: {_TAG: tag, _VALUE: say(value)}


_WRITERS: dict[type[Any], Callable[[Types, Any], Any]] = {
    int: _int,
    float: _float,
    list: lambda types, value: [types.to_json(item) for item in value],
    dict: _mapping,
    tuple: _array("tuple"),
    set: _set("set"),
    frozenset: _set("frozenset"),
    bytes: _as_text("bytes", lambda value: b64encode(value).decode("ascii")),
    datetime: _as_text("datetime", datetime.isoformat),
    date: _as_text("date", date.isoformat),
    timedelta: lambda _, value: {_TAG: "timedelta", _VALUE: [value.days, value.seconds, value.microseconds]},
    UUID: _as_text("uuid", str),
    Decimal: _as_text("decimal", str),
}

_READERS: dict[str, Callable[[Types, Any], Any]] = {
    "int": lambda _, value: int(value),
    "float": lambda _, value: float(value),
    "dict": lambda types, value: {types.from_json(key): types.from_json(item) for key, item in value},
    "tuple": lambda types, value: tuple(types.from_json(item) for item in value),
    "set": lambda types, value: {types.from_json(item) for item in value},
    "frozenset": lambda types, value: frozenset(types.from_json(item) for item in value),
    "bytes": lambda _, value: b64decode(value, validate=True),
    "datetime": lambda _, value: datetime.fromisoformat(value),
    "date": lambda _, value: date.fromisoformat(value),
    "timedelta": lambda _, value: timedelta(*value),
    "uuid": lambda _, value: UUID(value),
    "decimal": lambda _, value: Decimal(value),
    "path": lambda _, value: PurePosixPath(value),
    "type": lambda types, value: types.named(value),
}

# The registry of this process.
TYPES = Types()


@fast_dataclass(slots=True, frozen=True)
class Unknown:
    """A stored value of a type unknown to this process. Mulligan keeps it and stores it again unchanged."""

    type_name: str
    body: Any


_WRITERS[Unknown] = lambda _, value: {_TAG: value.type_name, _VALUE: value.body}


class _Tolerant(Types):
    """The same registry for reading a log. Another program may have written values of types unknown to this one.

    Values inside an item may be of unknown types, but not the item itself.
    """

    def __init__(self, types: Types) -> None:
        self._made, self._named, self._names, self._lock = types._made, types._named, types._names, types._lock

    def _make(self, tag: object, value: Any) -> Any:
        return super()._make(tag, value) if tag in self._made or not isinstance(tag, str) else Unknown(tag, value)


_TOLERANT = _Tolerant(TYPES)


def log_item(body: Any) -> Any:
    """An item of a LOG slice. Raises SnapshotMismatchError if its own type is unknown here."""
    found = _TOLERANT.from_json(body)
    return TYPES.from_json(body) if isinstance(found, Unknown) else found


def register_type(kind: C, name: str | None = None) -> C:
    """Register a dataclass, enum or pydantic model under a name, so that snapshots and stored sessions can hold it.

    A type that is used as a slice is registered as `module:qualname`. Pass a name, so that stored values can still be
    read after the class moves to another module. Also works as a class decorator.
    """
    return TYPES.register(kind, name)


def has_json_form(value: object) -> bool:
    """Whether snapshots and stored sessions can hold the value."""
    if value is None or isinstance(value, str | int | float | bool):
        return True
    try:
        TYPES.to_json(value)
    except (TypeError, RecursionError, MulliganError):
        return False
    return True
