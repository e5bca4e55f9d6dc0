"""Canonical JSON: the one byte form of every document that is stored, hashed or compared.

UTF-8; keys in byte order; no white space; the shortest standard escapes; signed 64-bit integers; finite floats in
shortest round-trip form. Anything else is refused, never silently rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

import orjson

from mulligan.values.errors import fault

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_PLAIN = frozenset({str, bool, type(None)})


def encode(value: object) -> bytes:
    """The canonical bytes of a JSON value. Raises `invalid_json` if it has no canonical form."""
    try:
        # orjson goes first, because it refuses a value that contains itself; the loop below would never end.
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, TypeError, RecursionError) as error:
        raise fault("invalid_json", f"This value has no canonical JSON form: {error}") from None
    # orjson accepts and rewrites some values that we refuse: integers beyond 64 bits and subclasses. Keys need no check
    # here, because orjson accepts exact strings only.
    values: list[Any] = [value]
    for one in values:
        kind = type(one)
        if kind in _PLAIN:
            continue
        if kind is dict:
            values += one.values()
        elif kind is list or kind is tuple:
            values += one
        elif kind is int:
            if not _INT_MIN <= one <= _INT_MAX:
                raise fault("invalid_json", "Integers in canonical JSON are signed 64-bit.")
        elif kind is float:
            if not isfinite(one):
                raise fault("invalid_json", "NaN and infinities have no JSON form.")
        elif not isinstance(one, str):
            raise fault("invalid_json", f"A {kind.__name__} has no JSON form.")
    return data


def decode(data: bytes | str) -> Any:
    """Parse JSON text, canonical or not. Raises `invalid_json`."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise fault("invalid_json", f"Not valid JSON: {error}") from None


def object_in(data: bytes | str) -> dict[str, Any]:
    """The object in JSON text of another program; empty if it is not an object or not JSON."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
