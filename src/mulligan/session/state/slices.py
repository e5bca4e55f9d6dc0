"""Slices: typed state as immutable sequences, the reducers that change them, and changes that are not published yet.

`Items` is one version of a slice. It shares memory with every earlier version that is a prefix of it: an append costs
one item, a snapshot costs nothing, and no version ever changes.

`PendingChanges` holds the changes of a call until they are published; only the call sees them. To publish, a slice that
nothing else changed takes the pending version. If another call published the slice in the meantime, the steps run again
on top of its version, so that two concurrent increments count twice. An abort drops the pending changes except logs, so
nothing has to be restored.

The last part defines the slices that every session has: an agent's work (STATE), what can be computed again (CACHE),
and what it did (LOG).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, overload

from mulligan.session.state.types import TYPES
from mulligan.store.fork_locks import fork_safe_lock, shared_lock
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.scoped_var import CallScope, ScopedBlock, scopes

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SlicePolicy(Enum):
    """What happens to a slice when a tool fails or a snapshot is restored."""

    # It is set back.
    STATE = "state"
    # It stays: a truthful log only grows.
    LOG = "log"
    # It is set back or emptied: it can be computed again, so it is never stored.
    CACHE = "cache"


_extend_lock = shared_lock()


class Items(Sequence[T_co]):
    """The first `length` items of a buffer that later versions may have extended. Immutable, and cheap to extend."""

    __slots__ = ("_buffer", "_length", "_tuple")

    def __init__(self, buffer: list[Any] | None = None, length: int | None = None) -> None:
        self._buffer: list[Any] = [] if buffer is None else buffer
        self._length = len(self._buffer) if length is None else length
        self._tuple: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, items: Iterable[Any]) -> Items[Any]:
        """From any items, in their order."""
        return Items(list(items))

    def all(self) -> tuple[T_co, ...]:
        """The items as a tuple, which is created once."""
        if self._tuple is None:
            self._tuple = tuple(self._buffer[: self._length])
        return self._tuple

    def latest(self) -> T_co | None:
        """The newest item; None if there is none."""
        return self._buffer[self._length - 1] if self._length else None

    def where(self, predicate: Callable[[T_co], bool]) -> tuple[T_co, ...]:
        """The items for which the predicate is true, oldest first."""
        return tuple(item for item in self if predicate(item))

    def extended(self, items: Iterable[Any]) -> Items[Any]:
        """With more items at the end. The first caller extends the shared buffer; a second one copies it."""
        more = list(items)
        if not more:
            return self
        with _extend_lock:
            # All empty slices share one list, so it must not grow.
            shared = len(self._buffer) == self._length and self._length > 0
            buffer = self._buffer if shared else self._buffer[: self._length]
            buffer.extend(more)
            return Items(buffer, self._length + len(more))

    def grown_from(self, earlier: Items[Any]) -> list[Any] | None:
        """The items added after `earlier`; None if this version does not start with it."""
        if self._buffer is not earlier._buffer or self._length < earlier._length:
            return None
        return self._buffer[earlier._length : self._length]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.all()[index]

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Items):
            return self is other or self.all() == other.all()
        return self.all() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.all())

    def __repr__(self) -> str:
        return f"Items({list(self)!r})"


NO_ITEMS: Items[Any] = Items()


@fast_dataclass(slots=True, frozen=True)
class Append(Generic[T]):
    """Add one item at the end of the slice."""

    item: T


@fast_dataclass(slots=True, frozen=True)
class Extend(Generic[T]):
    """Add several items at the end of the slice."""

    items: Sequence[T]


@fast_dataclass(slots=True, frozen=True)
class Replace(Generic[T]):
    """Replace all items of the slice."""

    items: Sequence[T]


@fast_dataclass(slots=True, frozen=True)
class Clear(Generic[T]):
    """Remove the items for which the predicate is true; without a predicate, all of them."""

    predicate: Callable[[T], bool] | None = None


SliceOp: TypeAlias = Append[T] | Extend[T] | Replace[T] | Clear[T]
# `(view, event)` or `(view, event, *, context)`, pure. Returns a SliceOp, or the slice's new items, or one item that
# replaces them all.
Reducer: TypeAlias = Callable[..., Any]


def applied(op: object, items: Items[Any], kind: type[object]) -> Items[Any]:
    """The slice after a reducer's result is applied. Raises TypeError for a result of another type."""
    if isinstance(op, Append):
        return items.extended(_of_kind((op.item,), kind))
    if isinstance(op, Extend):
        return items.extended(_of_kind(op.items, kind))
    if isinstance(op, Clear):
        return _cleared(items, op.predicate)
    if isinstance(op, kind):
        return _replaced(items, (op,))
    if isinstance(op, Replace):
        return _replaced(items, _of_kind(op.items, kind))
    if isinstance(op, tuple | list | Items):
        return _replaced(items, _of_kind(op, kind))
    raise TypeError(f"A reducer of {kind.__name__} returned {op!r}; it must return a SliceOp or the slice's new items.")


def _of_kind(items: Iterable[Any], kind: type[object]) -> list[Any]:
    found = list(items)
    wrong = [item for item in found if not isinstance(item, kind)]
    if wrong:
        raise TypeError(f"A slice of {kind.__name__} cannot hold {wrong[0]!r}.")
    return found


def _replaced(items: Items[Any], new: Sequence[Any]) -> Items[Any]:
    """The new items; if they only extend the old ones, as a version that shares the buffer."""
    old = len(items)
    if len(new) >= old and all(one is other for one, other in zip(items, new, strict=False)):
        return items.extended(new[old:])
    return Items.of(new)


def _cleared(items: Items[Any], predicate: Callable[[Any], bool] | None) -> Items[Any]:
    if predicate is None:
        return NO_ITEMS if items else items
    kept = [item for item in items if not predicate(item)]
    return items if len(kept) == len(items) else Items.of(kept)


# Ready-made reducers.


def append_all(view: Sequence[Any], event: Any, *, context: object = None) -> Append[Any]:
    """Keep every event."""
    return Append(event)


def replace_latest(view: Sequence[Any], event: Any, *, context: object = None) -> Replace[Any]:
    """Keep only the newest event."""
    return Replace((event,))


def upsert_by(key: Callable[[Any], object]) -> Reducer:
    """Keep one event for each key: the newest, at the end."""

    def upsert(view: Sequence[Any], event: Any, *, context: object = None) -> Replace[Any]:
        mine = key(event)
        return Replace((*(item for item in view if key(item) != mine), event))

    return upsert


def takes_context(reducer: Reducer) -> bool:
    """Whether a reducer has the parameter `context`."""
    try:
        parameters = signature(reducer).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.name == "context" or one.kind is Parameter.VAR_KEYWORD for one in parameters)


# Slices that define their own reducers.

_MARK = "__mulligan_reduces__"
F = TypeVar("F", bound=Callable[..., Any])


def reducer(*, on: type[object]) -> Callable[[F], F]:
    """Marks a method of a frozen dataclass that changes the slice's latest item for an event; see `Session.install`."""

    def mark(method: F) -> F:
        setattr(method, _MARK, on)
        return method

    return mark


def reducers_of(kind: type[object]) -> dict[type[object], str]:
    """The event types of a declarative slice and their methods. Raises TypeError or ValueError for a wrong class."""
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{kind.__name__} is installed as a slice, so it must be a frozen dataclass.")
    found: dict[type[object], str] = {}
    for name in dir(kind):
        event = getattr(getattr(kind, name), _MARK, None) if not name.startswith("__") else None
        if event is None:
            continue
        if event in found:
            raise ValueError(f"{kind.__name__} has two reducers for {event.__name__}.")
        found[event] = name
    if not found:
        raise ValueError(f"{kind.__name__} has no method marked with @reducer(on=…).")
    return found


def as_reducer(method: str, initial: Callable[[], Any] | None) -> Reducer:
    def reduce(view: Items[Any], event: Any, *, context: object = None) -> object:
        latest = view.latest()
        if latest is None and initial is not None:
            latest = initial()
        return Replace(()) if latest is None else getattr(latest, method)(event)

    return reduce


Kind: TypeAlias = type[Any]
Step: TypeAlias = Callable[[Items[Any]], Items[Any]]
Read: TypeAlias = Callable[[Kind], Items[Any]]
PolicyOf: TypeAlias = Callable[[Kind], SlicePolicy]
MergeInto: TypeAlias = Callable[[Read], Mapping[Kind, Items[Any]]]


class SliceStorage(Protocol):
    """Holds a session's published slices. Safe to use from many threads."""

    def read(self, kind: Kind) -> Items[Any]:
        """The current slice. Returns the same object until the slice changes."""
        ...

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        """Several slices at one moment."""
        ...

    def kinds(self) -> set[Kind]:
        """Slice types that have been published, as far as this process knows them."""
        ...

    def policy(self, kind: Kind) -> SlicePolicy | None:
        """The policy with which a slice was published, if it was."""
        ...

    def publish(self, pending: PendingChanges, *, only_logs: bool) -> None:
        """Publish the result of `pending.merged_into` at once, under a lock that keeps other publishers out."""
        ...

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        """Raises ExecutionStateError for an item that cannot be stored here."""
        ...


class MemorySlices:
    """Slices that live as long as the session object."""

    def __init__(self) -> None:
        self._slices: dict[Kind, Items[Any]] = {}
        self._lock = shared_lock()

    def read(self, kind: Kind) -> Items[Any]:
        return self._slices.get(kind, NO_ITEMS)

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        slices = self._slices
        return {kind: slices.get(kind, NO_ITEMS) for kind in kinds}

    def kinds(self) -> set[Kind]:
        return set(self._slices)

    def policy(self, kind: Kind) -> SlicePolicy | None:
        return None

    def publish(self, pending: PendingChanges, *, only_logs: bool) -> None:
        with self._lock:
            slices = {**self._slices, **pending.merged_into(self.read, only_logs=only_logs)}
            # One assignment: a reader never sees half of it, and an interrupt never comes between its parts.
            self._slices, pending.published = slices, "logs" if only_logs else "all"

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        """Memory can hold every item."""


@fast_dataclass(slots=True, eq=False)
class PendingChanges(CallScope):
    """Changes of a call that are not published. `base`: each changed slice before the first change; `now`: after it.

    `working` holds results of reducers that still run. `published` says which of the changes were published.
    """

    storage: SliceStorage = field(kw_only=True)
    policy_of: PolicyOf = field(kw_only=True)
    base: dict[Kind, Items[Any]] = field(default_factory=dict)
    now: dict[Kind, Items[Any]] = field(default_factory=dict)
    steps: Items[tuple[Kind, Step]] = NO_ITEMS
    events: Items[tuple[object, frozenset[Kind]]] = NO_ITEMS
    working: dict[Kind, Items[Any]] = field(default_factory=dict)
    published: Literal["no", "logs", "all"] = "no"
    lock: threading.RLock = field(default_factory=fork_safe_lock)

    @property
    def _outer_changes(self) -> PendingChanges | None:
        """The changes that these are a part of."""
        assert self.outer is None or isinstance(self.outer, PendingChanges), (
            "slices are changed in calls that change slices"
        )
        return self.outer

    def read(self, kind: Kind) -> Items[Any]:
        found = self.now.get(kind)
        if found is not None:
            return found
        return self.storage.read(kind) if self._outer_changes is None else self._outer_changes.read(kind)

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        rest = [kind for kind in kinds if kind not in self.now]
        below = self.storage.read_all(rest) if self._outer_changes is None else self._outer_changes.read_all(rest)
        return {**below, **{kind: self.now[kind] for kind in kinds if kind in self.now}}

    def look(self, kind: Kind) -> Items[Any]:
        """The slice as a reducer sees it, with the changes of the event's earlier reducers."""
        found = self.working.get(kind)
        return self.read(kind) if found is None else found

    def kinds(self) -> set[Kind]:
        return set(self.now) | (self.storage.kinds() if self._outer_changes is None else self._outer_changes.kinds())

    @property
    def has_changes(self) -> bool:
        return bool(self.now) or (self._outer_changes is not None and self._outer_changes.has_changes)

    def change(
        self,
        staged: Mapping[Kind, tuple[Items[Any], Items[Any]]],
        steps: Iterable[tuple[Kind, Step]],
        events: Iterable[tuple[object, frozenset[Kind]]] = (),
        *,
        part: PendingChanges | None = None,
    ) -> None:
        """Adopt new versions: (old, new) of each slice. `part`: the part of the call that made them."""
        with self.lock:
            base = {**{kind: was for kind, (was, _) in staged.items()}, **self.base}
            now = {**self.now, **{kind: new for kind, (_, new) in staged.items()}}
            new_steps, new_events, whose = (
                self.steps.extended(steps),
                self.events.extended(events),
                part or _NOT_PUBLISHED,
            )
            what = "logs" if whose.has_failed else "all"
            # One assignment, in which no interrupt can come: an event is in all slices or in none.
            self.base, self.now, self.steps, self.events, whose.published = base, now, new_steps, new_events, what

    def check_kept(self) -> None:
        """Raises ExecutionStateError if the storage cannot hold a new item."""
        for kind, new in self.now.items():
            if self.policy_of(kind) is SlicePolicy.CACHE:
                continue
            self.storage.check(kind, _new_in(new, self.base[kind]))

    def merged_into(self, read: Read, *, only_logs: bool = False) -> dict[Kind, Items[Any]]:
        """The changes applied to the published versions. The caller holds the lock that keeps other publishers out."""
        changes: dict[Kind, Items[Any]] = {}
        self.working = changes
        for kind, mine in self.now.items():
            if only_logs and self.policy_of(kind) is not SlicePolicy.LOG:
                continue
            theirs = read(kind)
            new = mine if theirs is self.base[kind] else self._reapply(kind, theirs)
            if only_logs:
                new = _as_undone(new, theirs)
            if new is not theirs:
                changes[kind] = new
        return changes

    def _reapply(self, kind: Kind, items: Items[Any]) -> Items[Any]:
        for one, step in self.steps:
            if one is kind:
                items = step(items)
        return items

    def close(self, *, failed: bool) -> None:
        """Refuse further changes."""
        with self.lock:
            self.is_open, self.has_failed = False, failed

    def publish(self, *, only_logs: bool = False) -> None:
        """Publish into the outer changes, or else into the storage. With `only_logs`, the other changes are dropped.

        Publishes once: a second call, after an interrupt hid the first one's result, does nothing.
        """
        if self.published != "no":
            return
        self.close(failed=only_logs)
        if only_logs and not any(self.policy_of(kind) is SlicePolicy.LOG for kind in self.now):
            self.published = "logs"
        elif self._outer_changes is not None:
            self._join(self._outer_changes, only_logs=only_logs)
        elif self.now:
            self.storage.publish(self, only_logs=only_logs)
        else:
            self.published = "all"

    def _join(self, outer: PendingChanges, *, only_logs: bool) -> None:
        with outer.lock:
            outer.check_open()
            was = {kind: outer.read(kind) for kind in self.now}
            changes = self.merged_into(was.__getitem__, only_logs=only_logs)
            staged = {kind: (was[kind], new) for kind, new in changes.items()}
            steps = [(kind, step) for kind, step in self.steps if kind in changes]
            if only_logs:
                steps = [(kind, _adding(_new_in(new, was[kind]))) for kind, new in changes.items()]
            outer.change(staged, steps, self.published_events(only_logs=only_logs), part=self)

    def published_events(self, *, only_logs: bool) -> list[tuple[object, frozenset[Kind]]]:
        """The published events: all of them, or with `only_logs` those that a log has."""
        if not only_logs:
            return list(self.events)
        logs = {kind for kind in self.now if self.policy_of(kind) is SlicePolicy.LOG}
        return [(log_form_of_undone(event), kinds) for event, kinds in self.events if kinds & logs]


def log_form_of_undone(item: object) -> object:
    """The log entry of an undone call. An entry that claims success would be false, so it changes its form."""
    as_undone = getattr(item, "as_undone", None)
    return item if as_undone is None else as_undone()


def _as_undone(items: Items[Any], theirs: Items[Any]) -> Items[Any]:
    """The items, with the new ones in the form that a log has for undone calls."""
    new = _new_in(items, theirs)
    kept = {id(item): log_form_of_undone(item) for item in new}
    if all(kept[id(item)] is item for item in new):
        return items
    return Items.of(kept.get(id(item), item) for item in items)


def _new_in(items: Items[Any], earlier: Items[Any]) -> list[Any]:
    grown = items.grown_from(earlier)
    if grown is not None:
        return grown
    known = {id(item) for item in earlier}
    return [item for item in items if id(item) not in known]


def _adding(new: list[Any]) -> Step:
    return lambda items: items.extended(new)


class _Unpublished:
    """Used in place of the part of a call when the changes belong to no part."""

    published: str
    has_failed = False


_NOT_PUBLISHED: Any = _Unpublished()


def pending_in(storage: SliceStorage, policy_of: PolicyOf) -> PendingChanges:
    """New pending changes inside the current ones. The caller publishes or drops them."""
    outer = None if scopes.around() is None else current_changes(storage)
    return PendingChanges(outer, storage=storage, policy_of=policy_of)


def current_changes(storage: SliceStorage) -> PendingChanges | None:
    """The innermost open changes of this thread or task; None outside a call and in a call that has ended."""
    for pending in scopes.all():
        if isinstance(pending, PendingChanges) and pending.storage is storage and pending.is_open:
            return pending
    return None


changes_block: Callable[[CallScope], ScopedBlock[CallScope]] = scopes.block
"""A block whose changes of slices become part of these changes. It may end in another context than it began in."""


V = TypeVar("V")

StepStatus = Literal["pending", "in_progress", "done", "blocked"]
PlanStatus = Literal["active", "completed", "abandoned"]
Visibility = Literal["full", "summary", "hidden"]

# The tool with which a model updates its plan.
UPDATE_PLAN = "update_plan"
_UNDONE = "(The call was undone: it was not committed.)"


@fast_dataclass(slots=True, frozen=True)
class PlanStep:
    title: str
    status: StepStatus = "pending"
    step_id: int = 0


@dataclass(slots=True, frozen=True)
class Plan:
    """The agent's plan, step by step."""

    objective: str
    status: PlanStatus = "active"
    steps: tuple[PlanStep, ...] = ()


@dataclass(slots=True, frozen=True)
class VisibilityOverrides:
    """Sections of the prompt whose visibility differs from the default."""

    overrides: Mapping[str, Visibility] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class WorkspaceDigest:
    """A summary of a part of the workspace. An undo of files makes it stale, so it is a CACHE slice."""

    section_key: str
    body: str
    summary: str = ""


@dataclass(slots=True, frozen=True)
class ToolResult(Generic[V]):
    """A tool's result. With `success` false the call is aborted, and only its log entry stays."""

    message: str
    value: V | None = None
    success: bool = True


@dataclass(slots=True, frozen=True)
class ToolInvoked:
    """A tool was called, with or without success. A failed call's `result.value` is left out, and long texts are cut;
    the transcript and the call's record have them in full."""

    name: str
    params: Mapping[str, Any]
    result: ToolResult[Any]
    created_at: datetime
    call_id: str = ""
    prompt_name: str = ""
    adapter: str = ""
    rendered_output: str = ""

    def as_undone(self) -> ToolInvoked:
        """The log entry if the call, or its outer call, is aborted after the tool had succeeded."""
        if not self.result.success:
            return self
        return replace(self, result=ToolResult(f"{self.result.message} {_UNDONE}".lstrip(), None, success=False))


@dataclass(slots=True, frozen=True)
class PromptRendered:
    """A prompt as the model received it. A log entry: it stays when a call is undone."""

    prompt_name: str
    rendered_prompt: str
    created_at: datetime
    adapter: str = ""


@dataclass(slots=True, frozen=True)
class PromptExecuted:
    """The model's result for a prompt. A log entry."""

    prompt_name: str
    result: Any
    created_at: datetime
    adapter: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)


DEFAULT_POLICIES: Mapping[type[Any], SlicePolicy] = MappingProxyType(
    {
        Plan: SlicePolicy.STATE,
        VisibilityOverrides: SlicePolicy.STATE,
        WorkspaceDigest: SlicePolicy.CACHE,
        ToolInvoked: SlicePolicy.LOG,
        PromptRendered: SlicePolicy.LOG,
        PromptExecuted: SlicePolicy.LOG,
    }
)

for _kind in (*DEFAULT_POLICIES, ToolResult, PlanStep):
    TYPES.register(_kind, f"mulligan:{_kind.__name__}")
