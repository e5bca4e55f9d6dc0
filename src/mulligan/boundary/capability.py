"""Capabilities: what a session may do, at most. An absent field does not limit; an empty list denies all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar

from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass

_T = TypeVar("_T")

FsOp = Literal["read", "write", "edit", "patch", "search", "list", "stat", "exec"]
FollowSymlinks = Literal["deny", "within_root_only", "allow"]

FS_OPS: tuple[FsOp, ...] = ("read", "write", "edit", "patch", "search", "list", "stat", "exec")
FOLLOW: tuple[FollowSymlinks, ...] = ("deny", "within_root_only", "allow")
PATCH_FORMATS = ("v4a", "unified")
# The largest number a record can hold.
COUNT_MAX = 2**63 - 1


@fast_dataclass(slots=True, frozen=True)
class Capability:
    allowed_fs_ops: tuple[FsOp, ...] | None = None
    fs_roots: tuple[str, ...] | None = None
    max_read_bytes: int | None = None
    max_write_bytes: int | None = None
    max_patch_bytes: int | None = None
    max_inline_bytes: int | None = None
    max_grep_results: int | None = None
    max_glob_results: int | None = None
    max_scan_files: int | None = None
    max_scan_bytes: int | None = None
    allowed_patch_formats: tuple[str, ...] | None = None
    max_changed_files: int | None = None
    max_edit_replacements: int | None = None
    follow_symlinks: FollowSymlinks = "within_root_only"

    def to_json(self) -> dict[str, Any]:
        """The fields that set a limit."""
        return fields_to_json(self)


def fields_to_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not None, tuples as lists."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: list(one) if isinstance(one, tuple) else one for name, one in found.items() if one is not None}


UNLIMITED = Capability()


def both(one: Capability, other: Capability) -> Capability:
    """What both capabilities allow. `fs_roots` are left out: only a boundary can compare these paths."""
    limits: dict[str, Any] = {
        field.name: clamped(getattr(one, field.name), getattr(other, field.name))
        for field in fields(Capability)
        if field.name.startswith("max_")
    }
    return Capability(
        allowed_fs_ops=_common(one.allowed_fs_ops, other.allowed_fs_ops),
        allowed_patch_formats=_common(one.allowed_patch_formats, other.allowed_patch_formats),
        follow_symlinks=min(one.follow_symlinks, other.follow_symlinks, key=FOLLOW.index),
        **limits,
    )


def clamped(asked: int | None, ceiling: int | None) -> int | None:
    """The smaller of two limits, or of a request and its limit: a request over it is reduced, not refused."""
    if asked is None or ceiling is None:
        return ceiling if asked is None else asked
    return min(asked, ceiling)


def _common(one: tuple[_T, ...] | None, other: tuple[_T, ...] | None) -> tuple[_T, ...] | None:
    if one is None or other is None:
        return other if one is None else one
    return tuple(item for item in one if item in other)


def parse_capability(body: object) -> Capability:
    """Parse a capability. An unknown field or a value of the wrong type raises `invalid_params`."""
    if not isinstance(body, Mapping):
        raise fault("invalid_params", "A capability is a JSON object.")
    unknown = sorted(set(body) - set(_READERS))
    if unknown:
        raise fault("invalid_params", f"A capability has no field {unknown[0]!r}.", field=unknown[0])
    return Capability(**{name: _READERS[name](name, value) for name, value in body.items() if value is not None})


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise fault("invalid_params", f"{name} is a whole number of at least 0.", field=name)
    return value


def _choices(name: str, value: object, allowed: tuple[str, ...] | None) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise fault("invalid_params", f"{name} is a list of strings.", field=name)
    wrong = [item for item in value if allowed is not None and item not in allowed]
    if wrong:
        raise fault("invalid_params", f"{name} cannot hold {wrong[0]!r}.", field=name)
    return tuple(value)


def _follow(name: str, value: object) -> FollowSymlinks:
    for known in FOLLOW:
        if value == known:
            return known
    raise fault("invalid_params", f"{name} is one of {', '.join(FOLLOW)}.", field=name)


_READERS: dict[str, Any] = {
    "allowed_fs_ops": lambda name, value: _choices(name, value, FS_OPS),
    "fs_roots": lambda name, value: _choices(name, value, None),
    "allowed_patch_formats": lambda name, value: _choices(name, value, PATCH_FORMATS),
    "follow_symlinks": _follow,
    **{field.name: _count for field in fields(Capability) if field.name.startswith("max_")},
}
