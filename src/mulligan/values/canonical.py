"""Canonical JSON: the one byte form of every document that is stored, hashed or compared.

UTF-8; keys in byte order; no white space; the shortest standard escapes; signed 64-bit integers; finite floats in
shortest round-trip form. Anything else is refused, never silently rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

import orjson

from mulligan.values.faults import fault

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_INT_MAX = 2**63 - 1
_INT_MIN = -(2**63)


def encode(value: object) -> bytes:
    """The canonical bytes of a JSON value. Raises `invalid_json` for what has no canonical form."""
    try:
        _check(value)
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, TypeError, RecursionError) as error:
        raise fault("invalid_json", f"This value has no canonical JSON form: {error}") from None


def decode(data: bytes | str) -> Any:
    """Parse JSON text, canonical or not. Raises `invalid_json`."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise fault("invalid_json", f"Not valid JSON: {error}") from None


def _check(value: object) -> None:
    """Refuse what orjson would rewrite or accept beyond our range. Exact types only: no subclass surprises.

    Keys are orjson's to check: it takes exact strings and nothing else.
    """
    kind = type(value)
    if kind is dict:
        _check_all(value.values())  # type: ignore[attr-defined]  # kind is dict
    elif kind is list or kind is tuple:
        _check_all(value)  # type: ignore[arg-type]  # kind is list or tuple
    elif kind is int:
        if not _INT_MIN <= value <= _INT_MAX:  # type: ignore[operator]  # kind is int
            raise fault("invalid_json", "Integers in canonical JSON are signed 64-bit.")
    elif kind is float:
        if not isfinite(value):  # type: ignore[arg-type]  # kind is float
            raise fault("invalid_json", "NaN and infinities have no JSON form.")
    elif kind is not bool and value is not None and not isinstance(value, str):
        raise fault("invalid_json", f"A {kind.__name__} has no JSON form.")


def _check_all(values: Iterable[object]) -> None:
    for value in values:
        if type(value) is not str:
            _check(value)
