"""Resources of an agent run besides its session, by type. Some of them can be captured and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, overload, runtime_checkable

from mulligan.session.state.session import Session
from mulligan.session.state.types import TYPES
from mulligan.store.fork_locks import fork_safe_lock, shared_lock
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.scoped_var import ScopedBlock, ScopedVar, check_call_open

T = TypeVar("T")
D = TypeVar("D")
SnapshotT = TypeVar("SnapshotT")
_MISSING: Any = object()


@runtime_checkable
class Snapshotable(Protocol[SnapshotT]):
    """State that can be captured as an immutable value and restored from it.

    A resource may also have `check_restore(snapshot)`, which raises if a restore could not work and changes nothing.
    Mulligan checks all resources before it restores the first one.
    """

    def snapshot(self, *, tag: str | None = None) -> SnapshotT:
        """The current state, as a value that later changes do not affect."""
        ...

    def restore(self, snapshot: SnapshotT) -> None:
        """Set the state back to the snapshot. If that is impossible, raise and change nothing."""
        ...


class Lazy(Generic[T]):
    """A resource that is created on its first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: Any = _MISSING
        self._lock = fork_safe_lock()

    @property
    def is_made(self) -> bool:
        """Whether it has been created."""
        return self._made is not _MISSING

    def get(self) -> T:
        """The resource. The first call creates it."""
        with self._lock:
            if self._made is _MISSING:
                made = self._make()
                for created_resources in _recording.all():
                    created_resources.note(self, made)
                self._made = made
            found: T = self._made
            return found

    def forget(self) -> None:
        """Drop the resource, so that the next `get` creates a new one."""
        self._made = _MISSING


@fast_dataclass(slots=True)
class CreatedResources:
    """Resources that a call created, each with its first state, so that a failed call can remove them."""

    created: list[tuple[Lazy[Any], Any, Any]] = field(default_factory=list)

    def note(self, lazy: Lazy[Any], made: Any) -> None:
        self.created.append((lazy, made, made.snapshot() if isinstance(made, Snapshotable) else None))


_recording: ScopedVar[CreatedResources] = ScopedVar("mulligan_births")


def record_created_resources(created_resources: CreatedResources) -> ScopedBlock[CreatedResources]:
    """A block in which `created_resources` records every resource that is created."""
    return _recording.block(created_resources)


@dataclass(slots=True, frozen=True)
class ResourceRegistry:
    """Resources by type. Cannot be changed once it is built."""

    _entries: Mapping[type[Any], object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in self._entries:
            TYPES.name(kind)
        object.__setattr__(self, "_entries", MappingProxyType(dict(self._entries)))

    @classmethod
    def build(cls, mapping: Mapping[type[Any], object]) -> ResourceRegistry:
        """A value may be `Lazy(make)`; then its first use creates it."""
        return cls(mapping)

    # `Callable[..., T]` is any class. Type checkers accept only concrete classes for `type[T]`, and the type of a
    # resource may be a protocol such as `Filesystem`.
    @overload
    def get(self, resource_type: Callable[..., T]) -> T | None: ...
    @overload
    def get(self, resource_type: Callable[..., T], default: D) -> T | D: ...
    def get(self, resource_type: Callable[..., T], default: D | None = None) -> T | D | None:
        """The resource of that type, created now if it is lazy; else the default.

        Raises `call_not_open` in a task that outlived its call.
        """
        check_call_open()
        return self._found(resource_type, default)

    def _found(self, resource_type: Callable[..., T], default: D | None = None) -> T | D | None:
        found: Any = self._entries.get(resource_type, _MISSING)  # type: ignore[call-overload]  # a class
        if found is _MISSING:
            return default
        made: T = found.get() if isinstance(found, Lazy) else found
        return made

    def snapshotable_resources(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """The created resources that can be captured, without sessions, which a checkpoint captures itself."""
        made = [kind for kind, one in self._entries.items() if not isinstance(one, Lazy) or one.is_made]
        present = {kind: self._found(kind) for kind in made}
        found = {kind: one for kind, one in present.items() if isinstance(one, Snapshotable)}
        return {kind: one for kind, one in found.items() if not isinstance(one, Session | type)}

    def __contains__(self, kind: object) -> bool:
        return kind in self._entries

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@fast_dataclass(slots=True, frozen=True)
class RandomSnapshot:
    state: tuple[Any, ...]


class RandomResource:
    """A random number generator that can be restored: then it gives the same numbers again."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def snapshot(self, *, tag: str | None = None) -> RandomSnapshot:
        return RandomSnapshot(self._rng.getstate())

    def restore(self, snapshot: RandomSnapshot) -> None:
        self._rng.setstate(snapshot.state)


# Tokens spent.


@fast_dataclass(slots=True, frozen=True)
class TokenUsage:
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(slots=True, frozen=True)
class BudgetSnapshot:
    """Tokens for each evaluation."""

    usage: Mapping[str, TokenUsage]

    def __post_init__(self) -> None:
        object.__setattr__(self, "usage", MappingProxyType(dict(self.usage)))


class BudgetTracker:
    """Counts the tokens of each evaluation against a limit. Safe to use from many threads."""

    def __init__(self, limit_tokens: int | None = None) -> None:
        self.limit_tokens = limit_tokens
        self._usage: dict[str, TokenUsage] = {}
        self._lock = shared_lock()

    def record(self, evaluation_id: str, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Add tokens to an evaluation."""
        check_call_open()
        with self._lock:
            was = self._usage.get(evaluation_id, TokenUsage())
            spent = TokenUsage(was.input_tokens + input_tokens, was.output_tokens + output_tokens)
            self._usage = {**self._usage, evaluation_id: spent}

    def record_cumulative(self, evaluation_id: str, usage: TokenUsage) -> None:
        """Set the tokens that an evaluation has used in total, for providers that report totals."""
        check_call_open()
        with self._lock:
            self._usage = {**self._usage, evaluation_id: usage}

    def usage_of(self, evaluation_id: str) -> TokenUsage:
        """The tokens that one evaluation has used."""
        return self._usage.get(evaluation_id, TokenUsage())

    @property
    def consumed(self) -> TokenUsage:
        """The tokens that all evaluations have used."""
        spent = self._usage.values()
        return TokenUsage(sum(one.input_tokens for one in spent), sum(one.output_tokens for one in spent))

    @property
    def is_exhausted(self) -> bool:
        """Whether the limit is reached. Always False without a limit."""
        return self.limit_tokens is not None and self.consumed.total_tokens >= self.limit_tokens

    def snapshot(self, *, tag: str | None = None) -> BudgetSnapshot:
        """The tokens of every evaluation so far."""
        return BudgetSnapshot(self._usage)

    def restore(self, snapshot: BudgetSnapshot) -> None:
        """Continue counting from the snapshot."""
        with self._lock:
            self._usage = dict(snapshot.usage)


for _kind in (RandomSnapshot, BudgetSnapshot, TokenUsage):
    TYPES.register(_kind, f"mulligan:{_kind.__name__}")
TYPES.name(Random, "mulligan:Random")
TYPES.name(BudgetTracker, "mulligan:BudgetTracker")
