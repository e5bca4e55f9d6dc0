"""Options given as an object: every key is known, and every value is of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.values.canonical import decode, encode
from mulligan.values.faults import fault


def checked_options(what: str, given: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The options that are not None. Raises `unknown_option` or `invalid_params`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise fault("invalid_params", f"The options of {what} are an object.", field="opts")
    unknown = sorted(str(key) for key in given if key not in kinds)
    if unknown:
        raise fault("unknown_option", f"{what} has no option {unknown[0]!r}.", field=unknown[0])
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is int):
            raise fault("invalid_params", f"{name} is not of the right kind.", field=name)
    copied: dict[str, Any] = decode(encode(found))
    return copied


def checked_count(name: str, value: object) -> int:
    """A whole number, zero or more. Raises `invalid_params`."""
    if type(value) is not int or value < 0:
        raise fault("invalid_params", f"{name} is a whole number, zero or more.", field=name)
    return value
