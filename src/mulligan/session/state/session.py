"""A session's typed state: slices by type. Events change them; a snapshot captures and restores them as a whole.

Snapshots of slices: immutable, shared with the session they come from, and JSON both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType, TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar
from uuid import UUID

from mulligan.session.state.orphan_calls import WatchedBlock, abort_orphans, watch
from mulligan.session.state.slices import (
    DEFAULT_POLICIES,
    NO_ITEMS,
    Append,
    Clear,
    Items,
    Kind,
    MemorySlices,
    PendingChanges,
    Reducer,
    SlicePolicy,
    SliceStorage,
    Step,
    append_all,
    applied,
    as_reducer,
    changes_block,
    current_changes,
    pending_in,
    reducers_of,
    takes_context,
)
from mulligan.session.state.types import TYPES
from mulligan.session.subscribers import CollectErrors, DispatchResult, EventBus, publish_quietly
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, SystemClock, parse_timestamp
from mulligan.values.errors import ExecutionStateError, MulliganError, SnapshotMismatchError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import IdSource, SystemIds
from mulligan.values.scoped_var import Holder, block_exit, check_call_open, holder_of

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
    """Slice types and their items as tuples, created on access. Empty slices are left out."""

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

    `policies` has every slice type that the session knew; `held` names the policies that were captured, so that an
    empty slice differs from one that was not captured.
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
        """Whether the slice was captured, even if it was empty."""
        return kind in self.slices or self.policies.get(kind) in self.held

    def items_of(self, kind: type[Any]) -> Items[Any] | None:
        """One slice; None if it was not captured."""
        assert isinstance(self.slices, Slices)
        return self.slices.items_of(kind)

    def to_json(self) -> str:
        """The snapshot as JSON text. Raises SnapshotMismatchError for an item that has no JSON form."""
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
        """Raises SnapshotMismatchError for JSON that is not a snapshot or names a type unknown to this process."""
        return cls.from_body(parsed(raw))

    @classmethod
    def from_body(cls, body: Any) -> Snapshot:
        """The inverse of `to_body`. Raises SnapshotMismatchError."""
        with snapshot_json_errors("snapshot"):
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
        raise TypeError(f"a slice of {kind.__name__} has an item of another type")
    return Items.of(items)


class snapshot_json_errors:
    """Turns every error about malformed JSON in the block into SnapshotMismatchError."""

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
        raise SnapshotMismatchError("The JSON of a snapshot must be an object.")
    return body


def check_version(body: Mapping[str, Any]) -> None:
    if body["version"] != SNAPSHOT_VERSION:
        words = f"This snapshot has version {body['version']!r}; Mulligan reads version {SNAPSHOT_VERSION!r}."
        raise SnapshotMismatchError(words)


def _text(body: Mapping[str, Any]) -> str:
    return encode(body).decode("utf-8")


T = TypeVar("T")

ONLY_STATE = frozenset({SlicePolicy.STATE})


@fast_dataclass(slots=True, frozen=True)
class _Rule:
    """Which reducer an event runs on a slice."""

    slice: Kind
    reducer: Reducer
    with_context: bool


class ReducerError(ExecutionStateError):
    """A reducer raised `error`, so no reducer's change for that event was applied."""

    def __init__(self, rule: _Rule, error: Exception) -> None:
        super().__init__(f"A reducer of {rule.slice.__name__} raised {error!r}.")
        self.error = error
        self.__cause__ = error

    def __reduce__(self) -> tuple[object, ...]:
        return ExecutionStateError, (self.message,)


@fast_dataclass(slots=True, frozen=True)
class ReducerContext:
    """Lets a reducer read other slices: `context[Plan].latest()`."""

    _read: Callable[[Kind], Items[Any]]

    def __getitem__(self, kind: type[T]) -> Items[T]:
        return self._read(kind)

    @property
    def session(self) -> ReducerContext:
        return self


class Attempt(Protocol):
    """A transaction over a session. A normal exit commits it; an exception or `fail` aborts it."""

    @property
    def id(self) -> str: ...
    @property
    def pending(self) -> PendingChanges:
        """Its changes to slices."""
        ...

    @property
    def is_committed(self) -> bool: ...
    @property
    def is_over(self) -> bool:
        """Whether it is committed or aborted."""
        ...

    def resolve(self) -> None:
        """After an interrupt, find out whether it was committed."""
        ...

    def finish(self) -> str | None:
        """End it if an interrupt prevented that, and abort it unless it is committed. Returns its id if it aborted."""
        ...

    def fail(self, reason: str) -> None: ...
    def stop(self) -> None:
        """Stop its commands from another thread."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Session:
    """A session's slices, in memory or in a store. Safe to use from many threads: events run one after another.

    Within a transaction (`attempt`, a tool call) changes are seen by that call alone until it succeeds.
    """

    def __init__(
        self,
        bus: EventBus | None = None,
        *,
        parent: Session | None = None,
        session_id: UUID | None = None,
        tags: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        home: SliceStorage | None = None,
    ) -> None:
        self.bus = bus if bus is not None else EventBus()
        self.session_id = session_id or UUID((ids or SystemIds()).new())
        self.parent = parent
        self.children: tuple[Session, ...] = ()
        self.tags = dict(tags or {})
        self._clock = clock or SystemClock()
        self._storage: SliceStorage = home if home is not None else MemorySlices()
        self._rules: dict[Kind, tuple[_Rule, ...]] = {}
        self._policies: dict[Kind, SlicePolicy] = {}
        self._seen: set[Kind] = set(DEFAULT_POLICIES)
        if parent is not None:
            parent.children = (*parent.children, self)

    # Slices.

    @property
    def clock(self) -> Clock:
        """The clock of this session."""
        return self._clock

    def __getitem__(self, kind: type[T]) -> SliceAccessor[T]:
        """The slice of a type: `session[Plan].latest()`."""
        if kind not in self._seen:
            _check_class(kind, "A slice")
            TYPES.register(kind)
            self._seen = {*self._seen, kind}
        return SliceAccessor(self, kind)

    def policy_of(self, kind: Kind) -> SlicePolicy:
        """What happens to a slice when a call fails: STATE, unless it was registered with another policy."""
        known = self._policies.get(kind) or DEFAULT_POLICIES.get(kind)
        return known or self._storage.policy(kind) or SlicePolicy.STATE

    def install(self, kind: type[T], *, initial: Callable[[], T] | None = None) -> None:
        """Use a frozen dataclass whose methods are marked with `@reducer(on=Event)` as a slice."""
        for event, method in reducers_of(kind).items():
            self[kind].register(event, as_reducer(method, initial))

    def has_reducers(self) -> bool:
        """Whether reducers are registered. Only this object knows them; the store does not."""
        return bool(self._rules)

    def _register(self, kind: Kind, event: Kind, reducer: Reducer, policy: SlicePolicy | None) -> None:
        _check_class(event, "What a reducer is registered for")
        if not callable(reducer):
            raise fault("invalid_params", f"A reducer must be a function; {reducer!r} is not callable.")
        if policy is not None:
            self._policies[kind] = policy
        rule = _Rule(kind, reducer, takes_context(reducer))
        self._rules[event] = (*self._rules.get(event, ()), rule)

    # Events.

    def dispatch(self, event: object) -> DispatchResult:
        """Run every reducer of the event's type on its slice. If one raises, no slice changes.

        An event without a reducer is appended to the slice of its own type. Listeners receive the event when it is
        published; their errors change nothing.
        """
        return self.dispatch_in(None, event)

    def dispatch_in(self, pending: PendingChanges | None, event: object) -> DispatchResult:
        """Like `dispatch`, but the changes join `pending`, even outside its call; None: those of the current call."""
        if isinstance(event, type):
            raise fault("invalid_params", f"{event.__name__} is a class; an event is an instance of one.")
        kind = type(event)
        rules = self._rules.get(kind) or (_Rule(kind, append_all, with_context=False),)
        for rule in rules:
            self[rule.slice]
        try:
            self._change([(rule.slice, _step(rule, event)) for rule in rules], event, pending)
        except ReducerError as failed:
            return DispatchResult(event, (failed.error,))
        return DispatchResult(event)

    def broadcast(self, event: object) -> DispatchResult:
        """The same as `dispatch`."""
        return self.dispatch(event)

    def _change(
        self,
        steps: list[tuple[Kind, Callable[[PendingChanges], Step]]],
        event: object = None,
        within: PendingChanges | None = None,
    ) -> None:
        """Add changes to the current call; outside a call, publish them at once."""
        if within is None:
            check_call_open(self._storage)
        here = within or current_changes(self._storage)
        pending = here or PendingChanges(storage=self._storage, policy_of=self.policy_of)
        with pending.lock:
            if within is None:
                pending.check_open()
            staged, made = _staged(pending, steps)
            pending.change(staged, made, () if event is None else [(event, frozenset(staged))])
        if here is None:
            pending.publish()
            self.tell(pending, only_logs=False)

    def tell(self, pending: PendingChanges, *, only_logs: bool) -> None:
        """Pass the published events to the listeners. A listener's error does not stop the others."""
        if pending.outer is not None or pending.events is NO_ITEMS:
            return
        with ExitStack() as remaining:
            for event, _ in reversed(pending.published_events(only_logs=only_logs)):
                remaining.callback(publish_quietly, self.bus, event)

    def _read(self, kind: Kind) -> Items[Any]:
        here = current_changes(self._storage)
        return self._storage.read(kind) if here is None else here.read(kind)

    def clear_slices(self) -> None:
        """Empty every slice, logs included. Reducers stay."""
        self._change([(kind, _replaced_by(NO_ITEMS)) for kind in self._kinds()])

    # Transactions.

    def attempt(self, tool: str, call_id: str) -> Attempt:
        """A transaction for one tool call. Inside another transaction it is a part of that, and can fail alone."""
        abort_orphans()
        check_call_open(self._storage)
        return _Attempt(self, call_id or tool)

    def check_kept(self) -> None:
        """Raises ExecutionStateError if the current call changed a slice to a value that the store cannot hold."""
        here = current_changes(self._storage)
        if here is not None:
            here.check_kept()

    def pending(self) -> PendingChanges:
        """New pending changes inside the current ones. The caller publishes or drops them."""
        return pending_in(self._storage, self.policy_of)

    # Snapshots.

    def snapshot(
        self,
        *,
        tag: str | None = None,
        metadata: SnapshotMetadata | None = None,
        policies: frozenset[SlicePolicy] = ONLY_STATE,
        include_all: bool = False,
    ) -> Snapshot:
        """Capture the slices of these policies. The cost does not depend on their size."""
        held = frozenset(SlicePolicy) if include_all else frozenset(policies)
        known = {kind: self.policy_of(kind) for kind in self._kinds()}
        here = current_changes(self._storage) or self._storage
        return Snapshot(
            created_at=self._clock.now(),
            slices=Slices(here.read_all([kind for kind, policy in known.items() if policy in held])),
            policies=known,
            parent_id=None if self.parent is None else self.parent.session_id,
            children_ids=tuple(child.session_id for child in self.children),
            tags=self._snapshot_tags(tag, metadata),
            held=held,
        )

    def _snapshot_tags(self, tag: str | None, metadata: SnapshotMetadata | None) -> dict[str, str]:
        own = {} if metadata is None else {name: getattr(metadata, name) for name in metadata.__slots__}
        own |= {} if tag is None else {"tag": tag}
        return {**self.tags, **{name: value for name, value in own.items() if value is not None}}

    def rollback(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> None:
        """Set all slices back to a snapshot at once.

        STATE and CACHE slices that the snapshot does not hold become empty. LOG slices stay as they are; without
        `preserve_logs`, those that the snapshot holds are set back, and the others stay.
        Raises SnapshotMismatchError, and changes nothing, if a slice has become one of another policy.
        """
        wanted = self.planned_rollback(snapshot, preserve_logs=preserve_logs)
        self._change([(kind, _replaced_by(items)) for kind, items in wanted.items()])

    def planned_rollback(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> dict[Kind, Items[Any]]:
        """The items that a rollback would give to each slice."""
        self._check_fits(snapshot)
        wanted: dict[Kind, Items[Any]] = {}
        for kind in {*self._kinds(), *snapshot.slices}:
            policy = snapshot.policies.get(kind) or self.policy_of(kind)
            if _is_rolled_back(snapshot, kind, policy, preserve_logs=preserve_logs):
                wanted[kind] = snapshot.items_of(kind) or NO_ITEMS
        return wanted

    def _check_fits(self, snapshot: Snapshot) -> None:
        if not isinstance(snapshot, Snapshot):
            raise SnapshotMismatchError(f"A rollback needs a Snapshot, not a {type(snapshot).__name__}.")
        for kind, policy in snapshot.policies.items():
            if self._policies.get(kind, policy) is not policy:
                now = self._policies[kind].name
                raise SnapshotMismatchError(f"{kind.__name__} is {now} here, and {policy.name} in the snapshot.")
        for kind in snapshot.slices:
            self[kind]

    def _kinds(self) -> set[Kind]:
        here = current_changes(self._storage)
        return self._seen | (self._storage.kinds() if here is None else here.kinds())


def _is_rolled_back(snapshot: Snapshot, kind: Kind, policy: SlicePolicy, *, preserve_logs: bool) -> bool:
    if policy is SlicePolicy.LOG:
        return not preserve_logs and snapshot.holds(kind)
    return policy is SlicePolicy.CACHE or policy in snapshot.held or snapshot.holds(kind)


def _staged(
    pending: PendingChanges, steps: list[tuple[Kind, Callable[[PendingChanges], Step]]]
) -> tuple[dict[Kind, tuple[Items[Any], Items[Any]]], list[tuple[Kind, Step]]]:
    """Run the steps; each one sees the result of the step before it. Publishes nothing."""
    # Each slice is read once, so that `publish` can tell whether another call has changed it since.
    was = {kind: pending.read(kind) for kind, _ in steps}
    pending.working = dict(was)
    made: list[tuple[Kind, Step]] = []
    for kind, prepare in steps:
        step = prepare(pending)
        pending.working[kind] = step(pending.working[kind])
        made.append((kind, step))
    worked, pending.working = pending.working, {}
    return {kind: (was[kind], items) for kind, items in worked.items()}, made


def _step(rule: _Rule, event: object) -> Callable[[PendingChanges], Step]:
    def prepare(pending: PendingChanges) -> Step:
        context = {"context": ReducerContext(pending.look)} if rule.with_context else {}

        def step(items: Items[Any]) -> Items[Any]:
            errors: list[Exception] = []
            with CollectErrors(errors):
                return applied(rule.reducer(items, event, **context), items, rule.slice)
            raise ReducerError(rule, errors[0])

        return step

    return prepare


def _replaced_by(items: Items[Any]) -> Callable[[PendingChanges], Step]:
    return lambda _: lambda _: items


class _Attempt:
    """A transaction over a session in memory."""

    def __init__(self, session: Session, name: str) -> None:
        self.id = name
        self.exit_held: Holder | None = None
        self._failed = False
        self._ending = _AttemptEnding(session, name)

    def fail(self, reason: str) -> None:
        self._failed = True

    def stop(self) -> None:
        """A transaction in memory runs no commands."""

    def resolve(self) -> None:
        """A transaction in memory always knows."""

    def finish(self) -> str | None:
        return self._ending.abort_orphan()

    @property
    def pending(self) -> PendingChanges:
        return self._ending.pending

    @property
    def is_committed(self) -> bool:
        return self._ending.pending.published == "all"

    @property
    def is_over(self) -> bool:
        return self._ending.pending.published != "no"

    def __enter__(self) -> Self:
        self._ending.watched = watch(self, self._ending)
        self._ending.scope.enter(holder_of(self))
        return self

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._ending.end(only_logs=self._failed or error is not None)
        return None


class _AttemptEnding:
    """Ends an `_Attempt`. A separate object, so that it can be aborted when nothing refers to the attempt any more."""

    def __init__(self, session: Session, name: str) -> None:
        self.pending = session.pending()
        self.scope = changes_block(self.pending)
        self.watched: WatchedBlock | None = None
        self._session = session
        self._name = name

    def end(self, *, only_logs: bool) -> None:
        try:
            self._publish(only_logs=only_logs)
        finally:
            if self.pending.published != "no":
                self._forget()
                self._session.tell(self.pending, only_logs=self.pending.published == "logs")

    def _publish(self, *, only_logs: bool) -> None:
        try:
            self.pending.publish(only_logs=only_logs)
        except ReducerError:
            # Another thread published changes first, and ours do not apply on top of them, so we drop ours.
            self.pending.publish(only_logs=True)
            raise

    def _forget(self) -> None:
        self.scope.end()
        if self.watched is not None:
            self.watched.forget()

    def abort_orphan(self) -> str | None:
        was_open = self.pending.published == "no"
        self.pending.publish(only_logs=True)
        self._forget()
        return self._name if was_open else None


@fast_dataclass(slots=True, frozen=True)
class SliceAccessor(Generic[T]):
    """Reads and changes one slice of a session. Its items are immutable."""

    session: Session
    kind: type[T]

    def all(self) -> tuple[T, ...]:
        """Every item, oldest first."""
        return self.session._read(self.kind).all()

    def latest(self) -> T | None:
        """The newest item; None if the slice is empty."""
        return self.session._read(self.kind).latest()

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """The items for which the predicate is true, oldest first."""
        return self.session._read(self.kind).where(predicate)

    def __len__(self) -> int:
        return len(self.session._read(self.kind))

    def seed(self, value: T | Iterable[T]) -> None:
        """Replace all items by these, or by this one."""
        items = (value,) if isinstance(value, self.kind) else tuple(value)  # type: ignore[arg-type]  # not one: several
        self._change(lambda now: applied(items, now, self.kind))

    def append(self, value: T) -> None:
        """Append one item without running reducers."""
        self._change(lambda now: applied(Append(value), now, self.kind))

    def clear(self, predicate: Callable[[T], bool] | None = None) -> None:
        """Remove all items, or those for which the predicate is true."""
        self._change(lambda now: applied(Clear(predicate), now, self.kind))

    def register(self, event_type: type[Any], reducer: Reducer, *, policy: SlicePolicy | None = None) -> None:
        """Run a reducer on this slice for every event of the type. The policy that was given last applies."""
        self.session._register(self.kind, event_type, reducer, policy)

    def _change(self, step: Step) -> None:
        self.session._change([(self.kind, lambda _: step)])


def _check_class(kind: object, what: str) -> None:
    if not isinstance(kind, type):
        raise fault("invalid_params", f"{what} must be a class, such as Plan, not {kind!r}.")


class SessionSnapshotAdapter:
    """Lets a session be captured and restored like any resource."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def snapshot(self, *, tag: str | None = None) -> Snapshot:
        """Capture the STATE slices."""
        return self._session.snapshot(tag=tag)

    def restore(self, snapshot: Snapshot) -> None:
        """Set the slices back; logs stay."""
        Session.rollback(self._session, snapshot)
