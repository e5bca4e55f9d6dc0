"""Snapshots of slices: immutable, shared with the session they come from, and JSON both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, TypeAlias
from uuid import UUID

from mulligan.session.slices import Items, SlicePolicy
from mulligan.session.types import TYPES
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.faults import MulliganError
from mulligan.values.state_faults import SnapshotMismatchError

SNAPSHOT_VERSION = "1"
Phase = Literal["pre_tool", "post_tool", "checkpoint", "manual"]
PHASES: tuple[Phase, ...] = ("pre_tool", "post_tool", "checkpoint", "manual")


@dataclass(slots=True, frozen=True)
class SnapshotMetadata:
    """When and why a snapshot was taken."""

    tag: str | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    phase: Phase = "manual"


class Slices(Mapping[type[Any], tuple[Any, ...]]):
    """Slice types and their items as tuples, made when they are looked at. Empty slices are not in it."""

    __slots__ = ("_held",)

    def __init__(self, held: Mapping[type[Any], Items[Any]]) -> None:
        self._held = {kind: items for kind, items in held.items() if items}

    def __getitem__(self, kind: type[Any]) -> tuple[Any, ...]:
        return self._held[kind].all()

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def items_of(self, kind: type[Any]) -> Items[Any] | None:
        """The shared items themselves."""
        return self._held.get(kind)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Slices):
            return self._held == other._held
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((kind, items.all()) for kind, items in self._held.items()))

    def __repr__(self) -> str:
        return f"Slices({dict(self)!r})"


SnapshotState: TypeAlias = Mapping[type[Any], tuple[Any, ...]]
_NO_TAGS: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True, frozen=True)
class Snapshot:
    """Slices at one moment.

    `policies` are those of every slice type the session knew; `held` says which policies were captured, so that an
    empty slice can be told from one that was not asked for.
    """

    created_at: datetime
    slices: SnapshotState
    policies: Mapping[type[Any], SlicePolicy]
    parent_id: UUID | None = None
    children_ids: tuple[UUID, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    held: frozenset[SlicePolicy] = frozenset({SlicePolicy.STATE})

    def __post_init__(self) -> None:
        if not isinstance(self.slices, Slices):
            shared = Slices({kind: Items.of(items) for kind, items in self.slices.items()})
            object.__setattr__(self, "slices", shared)
        object.__setattr__(self, "policies", MappingProxyType(dict(self.policies)))
        object.__setattr__(self, "tags", MappingProxyType(dict(self.tags)) if self.tags else _NO_TAGS)

    def holds(self, kind: type[Any]) -> bool:
        """Whether the slice was captured, be it as an empty one."""
        return kind in self.slices or self.policies.get(kind) in self.held

    def items_of(self, kind: type[Any]) -> Items[Any] | None:
        """One slice; None if it was not captured."""
        assert isinstance(self.slices, Slices)
        return self.slices.items_of(kind)

    def to_json(self) -> str:
        """As JSON text, types by their names. Raises SnapshotMismatchError for an item that has no JSON form."""
        return _text(self.to_body())

    def to_body(self) -> dict[str, Any]:
        """Raises SnapshotMismatchError for an item that has no JSON form."""
        slices = {_slice_name(kind): _items_to_json(items) for kind, items in self.slices.items()}
        return {
            "version": SNAPSHOT_VERSION,
            "created_at": self.created_at.isoformat(),
            "parent_id": None if self.parent_id is None else str(self.parent_id),
            "children_ids": [str(child) for child in self.children_ids],
            "slices": [{"slice_type": name, "items": slices[name]} for name in sorted(slices)],
            "policies": {_slice_name(kind): policy.value for kind, policy in self.policies.items()},
            "held": sorted(policy.value for policy in self.held),
            "tags": dict(self.tags),
        }

    @classmethod
    def from_json(cls, raw: str) -> Snapshot:
        """Raises SnapshotMismatchError for JSON that is no snapshot, or names a type this process does not know."""
        return cls.from_body(parsed(raw))

    @classmethod
    def from_body(cls, body: Any) -> Snapshot:
        """The inverse of `to_body`. Raises SnapshotMismatchError."""
        with reading("snapshot"):
            check_version(body)
            parent = body.get("parent_id")
            return cls(
                created_at=parse_timestamp(body["created_at"]),
                slices=Slices({TYPES.named(one["slice_type"]): _items_from_json(one) for one in body["slices"]}),
                policies={TYPES.named(name): SlicePolicy(policy) for name, policy in body["policies"].items()},
                parent_id=None if parent is None else UUID(parent),
                children_ids=tuple(UUID(child) for child in body["children_ids"]),
                tags={str(name): str(value) for name, value in body["tags"].items()},
                held=frozenset(SlicePolicy(policy) for policy in body["held"]),
            )


def _slice_name(kind: type[Any]) -> str:
    TYPES.register(kind)
    return TYPES.name(kind)


def _items_to_json(items: tuple[Any, ...]) -> list[Any]:
    try:
        return [TYPES.to_json(item) for item in items]
    except TypeError as error:
        raise SnapshotMismatchError(str(error)) from None


def _items_from_json(body: Mapping[str, Any]) -> Items[Any]:
    kind = TYPES.named(body["slice_type"])
    items = [TYPES.from_json(item) for item in body["items"]]
    if not all(isinstance(item, kind) for item in items):
        raise TypeError(f"a slice of {kind.__name__} holds something else")
    return Items.of(items)


class reading:
    """Whatever is wrong with somebody's JSON is one kind of error."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        mistakes = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
        if isinstance(error, mistakes) and not isinstance(error, MulliganError):
            raise SnapshotMismatchError(f"This is not the JSON of a {self._what}: {error!r}") from error


def parsed(raw: str) -> Any:
    try:
        body = decode(raw)
    except MulliganError as error:
        raise SnapshotMismatchError(error.message) from None
    if not isinstance(body, dict):
        raise SnapshotMismatchError("The JSON of a snapshot is an object.")
    return body


def check_version(body: Mapping[str, Any]) -> None:
    if body["version"] != SNAPSHOT_VERSION:
        raise SnapshotMismatchError(f"This snapshot has version {body['version']!r}; we read {SNAPSHOT_VERSION!r}.")


def _text(body: Mapping[str, Any]) -> str:
    return encode(body).decode("utf-8")
