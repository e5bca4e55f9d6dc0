"""A small, strict checker for the part of JSON Schema that our tools are described in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

Schema = Mapping[str, Any]

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def misfit(value: object, schema: Schema, where: str = "") -> str | None:
    """The first thing about a value that its schema does not allow, in words; None when it fits."""
    if "oneOf" in schema:
        found = _one_of(value, schema["oneOf"], where)
        if found is not None:
            return found
    if "const" in schema and value != schema["const"]:
        return f"{where or 'value'} is {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where or 'value'} is one of {', '.join(map(repr, schema['enum']))}"
    kind = schema.get("type")
    if kind is None:
        return None
    if not _is_a(value, kind):
        return f"{where or 'value'} is not of type {kind}"
    if isinstance(value, dict):
        return _object(value, schema, where)
    if isinstance(value, list | tuple):
        return _array(value, schema, where)
    return _bounds(value, schema, where)


def with_whole_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with 1.0 as 1: JSON Schema counts it as an integer, and no argument of a tool is a fraction."""
    return {name: _whole(value) for name, value in given.items()}


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _one_of(value: object, branches: Sequence[Schema], where: str) -> str | None:
    misfits = [misfit(value, branch, where) for branch in branches]
    fitting = misfits.count(None)
    if fitting == 1:
        return None
    return f"{where or 'value'} fits {fitting} of its shapes: {'; '.join(filter(None, misfits))}"


def _object(value: Mapping[str, object], schema: Schema, where: str) -> str | None:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{_inside(where, missing[0])} is missing"
    unknown = [name for name in value if name not in properties]
    if unknown and schema.get("additionalProperties") is False:
        return f"{_inside(where, unknown[0])} is not known here"
    for name, item in value.items():
        found = misfit(item, properties[name], _inside(where, name)) if name in properties else None
        if found is not None:
            return found
    return None


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _array(value: Sequence[object], schema: Schema, where: str) -> str | None:
    items = schema.get("items")
    if items is None:
        return None
    found = (misfit(item, items, f"{where}[{at}]") for at, item in enumerate(value))
    return next((one for one in found if one is not None), None)


def _bounds(value: object, schema: Schema, where: str) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            return f"{where} is at least {schema['minimum']}"
        if value > schema.get("maximum", value):
            return f"{where} is at most {schema['maximum']}"
    if isinstance(value, str) and "pattern" in schema and not _pattern(schema["pattern"]).search(value):
        return f"{where} does not have the form {schema['pattern']}"
    return None


@lru_cache(maxsize=64)
def _pattern(source: str) -> re.Pattern[str]:
    return re.compile(source)
