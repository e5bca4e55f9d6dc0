"""A session's typed state: slices by type, changed by events, captured and put back as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import UUID

from mulligan.session.bus import DispatchResult, EventBus, Isolated, publish_quietly
from mulligan.session.known import DEFAULT_POLICIES
from mulligan.session.orphans import Watched, abort_orphans, watch
from mulligan.session.pending import Home, Kind, MemoryHome, Pending, Step, doing, pending_here
from mulligan.session.slices import (
    NO_ITEMS,
    Append,
    Clear,
    Items,
    Reducer,
    SlicePolicy,
    append_all,
    applied,
    as_reducer,
    reducers_of,
    takes_context,
)
from mulligan.session.snapshot import Slices, Snapshot, SnapshotMetadata
from mulligan.session.types import TYPES
from mulligan.values.call_scope import check_call_open
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.faults import fault
from mulligan.values.here import Holder, block_exit, holder_of
from mulligan.values.ids import IdSource, SystemIds
from mulligan.values.plain import plain
from mulligan.values.state_faults import ExecutionStateError, SnapshotMismatchError

T = TypeVar("T")

ONLY_STATE = frozenset({SlicePolicy.STATE})


@plain(slots=True, frozen=True)
class _Rule:
    """What an event does to a slice."""

    slice: Kind
    reducer: Reducer
    with_context: bool


class ReducerError(ExecutionStateError):
    """A reducer raised, so nothing of its event was applied. `error` is what it raised."""

    def __init__(self, rule: _Rule, error: Exception) -> None:
        super().__init__(f"A reducer of {rule.slice.__name__} raised {error!r}.")
        self.error = error
        self.__cause__ = error

    def __reduce__(self) -> tuple[object, ...]:
        return ExecutionStateError, (self.message,)


@plain(slots=True, frozen=True)
class ReducerContext:
    """What a reducer may look at besides its slice: `context[Plan].latest()`."""

    _read: Callable[[Kind], Items[Any]]

    def __getitem__(self, kind: type[T]) -> Items[T]:
        return self._read(kind)

    @property
    def session(self) -> ReducerContext:
        return self


class Attempt(Protocol):
    """A transaction over a session: left normally it stands, left by an exception or after `fail` it never was."""

    @property
    def id(self) -> str: ...
    @property
    def pending(self) -> Pending:
        """The changes to slices that are a part of it."""
        ...

    @property
    def is_committed(self) -> bool: ...
    @property
    def is_over(self) -> bool:
        """Committed, or nothing of it is left."""
        ...

    def resolve(self) -> None:
        """After an interrupt: find out whether it was committed."""
        ...

    def finish(self) -> str | None:
        """End it now, if an interrupt kept it from ending; without a commit, nothing of it stays. Its id if it did."""
        ...

    def fail(self, reason: str) -> None: ...
    def stop(self) -> None:
        """Whatever runs in it that can be stopped from another thread shall end now."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Session:
    """Slices in memory, or wherever their home is. Safe to use from many threads: each event happens after the other.

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
        home: Home | None = None,
    ) -> None:
        self.bus = bus if bus is not None else EventBus()
        self.session_id = session_id or UUID((ids or SystemIds()).new())
        self.parent = parent
        self.children: tuple[Session, ...] = ()
        self.tags = dict(tags or {})
        self._clock = clock or SystemClock()
        self._home: Home = home if home is not None else MemoryHome()
        self._rules: dict[Kind, tuple[_Rule, ...]] = {}
        self._policies: dict[Kind, SlicePolicy] = {}
        self._seen: set[Kind] = set(DEFAULT_POLICIES)
        if parent is not None:
            parent.children = (*parent.children, self)

    # Slices.

    @property
    def clock(self) -> Clock:
        """What tells the time to everything in this session."""
        return self._clock

    def __getitem__(self, kind: type[T]) -> SliceAccessor[T]:
        """The slice of a type: `session[Plan].latest()`."""
        if kind not in self._seen:
            _check_class(kind, "A slice")
            TYPES.register(kind)
            self._seen = {*self._seen, kind}
        return SliceAccessor(self, kind)

    def policy_of(self, kind: Kind) -> SlicePolicy:
        """What becomes of a slice when a call fails: STATE, unless somebody said otherwise."""
        known = self._policies.get(kind) or DEFAULT_POLICIES.get(kind)
        return known or self._home.policy(kind) or SlicePolicy.STATE

    def install(self, kind: type[T], *, initial: Callable[[], T] | None = None) -> None:
        """Use a frozen dataclass whose methods are marked with `@reducer(on=Event)` as a slice."""
        for event, method in reducers_of(kind).items():
            self[kind].register(event, as_reducer(method, initial))

    def has_reducers(self) -> bool:
        """Whether anything was registered here, which is known to this object alone."""
        return bool(self._rules)

    def _register(self, kind: Kind, event: Kind, reducer: Reducer, policy: SlicePolicy | None) -> None:
        _check_class(event, "What a reducer is registered for")
        if not callable(reducer):
            raise fault("invalid_params", f"A reducer is a function; {reducer!r} cannot be called.")
        if policy is not None:
            self._policies[kind] = policy
        rule = _Rule(kind, reducer, takes_context(reducer))
        self._rules[event] = (*self._rules.get(event, ()), rule)

    # Events.

    def dispatch(self, event: object) -> DispatchResult:
        """Let every reducer of the event's type change its slice: all of them, or, if one raises, none.

        An event that no reducer was registered for is appended to the slice of its own type. Listeners hear of it once
        it is published, and what they raise changes nothing.
        """
        return self.dispatch_in(None, event)

    def dispatch_in(self, pending: Pending | None, event: object) -> DispatchResult:
        """The same as a part of these changes, even from outside their call; with None, of those being made here."""
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
        steps: list[tuple[Kind, Callable[[Pending], Step]]],
        event: object = None,
        within: Pending | None = None,
    ) -> None:
        """As a part of the changes being made here; without any, published at once."""
        if within is None:
            check_call_open(self._home)
        here = within or pending_here(self._home)
        pending = here or Pending(home=self._home, policy_of=self.policy_of)
        with pending.lock:
            if within is None:
                pending.check_open()
            staged, made = _staged(pending, steps)
            pending.change(staged, made, () if event is None else [(event, frozenset(staged))])
        if here is None:
            pending.publish()
            self.tell(pending, only_logs=False)

    def tell(self, pending: Pending, *, only_logs: bool) -> None:
        """Let listeners hear of what was published. What they raise changes nothing, and each hears of each event."""
        if pending.outer is not None:
            return
        with ExitStack() as telling:
            for event, _ in reversed(pending.told(only_logs=only_logs)):
                telling.callback(publish_quietly, self.bus, event)

    def _read(self, kind: Kind) -> Items[Any]:
        here = pending_here(self._home)
        return self._home.read(kind) if here is None else here.read(kind)

    def clear_slices(self) -> None:
        """Empty every slice, logs included. Reducers stay."""
        self._change([(kind, lambda _: _emptied) for kind in self._kinds()])

    # Transactions.

    def attempt(self, tool: str, call_id: str) -> Attempt:
        """A transaction for one tool call. One inside another is a part of it: it can fail alone."""
        abort_orphans()
        check_call_open(self._home)
        return _Attempt(self, call_id or tool)

    def check_kept(self) -> None:
        """Raises ExecutionStateError if a change made here could not be published: it has no stored form."""
        here = pending_here(self._home)
        if here is not None:
            here.check_kept()

    def pending(self) -> Pending:
        """Room for changes, inside those being made here, for whoever publishes or drops them."""
        return Pending(pending_here(self._home), home=self._home, policy_of=self.policy_of)

    # Snapshots.

    def snapshot(
        self,
        *,
        tag: str | None = None,
        metadata: SnapshotMetadata | None = None,
        policies: frozenset[SlicePolicy] = ONLY_STATE,
        include_all: bool = False,
    ) -> Snapshot:
        """The slices of these policies as they are now. Costs the same however much is in them."""
        held = frozenset(SlicePolicy) if include_all else frozenset(policies)
        known = {kind: self.policy_of(kind) for kind in self._kinds()}
        here = pending_here(self._home) or self._home
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
        told = {} if metadata is None else {name: getattr(metadata, name) for name in metadata.__slots__}
        told |= {} if tag is None else {"tag": tag}
        return {**self.tags, **{name: value for name, value in told.items() if value is not None}}

    def rollback(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> None:
        """Put the slices back to a snapshot, all at once.

        STATE slices it does not hold are emptied: they came later. So are CACHE slices. LOG slices stay; with
        `preserve_logs` off, those it holds go back, and those it does not hold stay all the same.
        Raises SnapshotMismatchError, and changes nothing, if a slice has become one of another policy.
        """
        wanted = self.planned_rollback(snapshot, preserve_logs=preserve_logs)
        self._change([(kind, _becomes(items)) for kind, items in wanted.items()])

    def planned_rollback(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> dict[Kind, Items[Any]]:
        """What a rollback would put where."""
        self._check_fits(snapshot)
        wanted: dict[Kind, Items[Any]] = {}
        for kind in {*self._kinds(), *snapshot.slices}:
            policy = snapshot.policies.get(kind) or self.policy_of(kind)
            if _goes_back(snapshot, kind, policy, preserve_logs=preserve_logs):
                wanted[kind] = snapshot.items_of(kind) or NO_ITEMS
        return wanted

    def _check_fits(self, snapshot: Snapshot) -> None:
        if not isinstance(snapshot, Snapshot):
            raise SnapshotMismatchError(f"A session is put back to a Snapshot, not to a {type(snapshot).__name__}.")
        for kind, policy in snapshot.policies.items():
            if self._policies.get(kind, policy) is not policy:
                now = self._policies[kind].name
                raise SnapshotMismatchError(f"{kind.__name__} is {now} here, and {policy.name} in the snapshot.")
        for kind in snapshot.slices:
            self[kind]

    def _kinds(self) -> set[Kind]:
        here = pending_here(self._home)
        return self._seen | (self._home.kinds() if here is None else here.kinds())


def _goes_back(snapshot: Snapshot, kind: Kind, policy: SlicePolicy, *, preserve_logs: bool) -> bool:
    if policy is SlicePolicy.LOG:
        return not preserve_logs and snapshot.holds(kind)
    return policy is SlicePolicy.CACHE or policy in snapshot.held or snapshot.holds(kind)


def _staged(
    pending: Pending, steps: list[tuple[Kind, Callable[[Pending], Step]]]
) -> tuple[dict[Kind, tuple[Items[Any], Items[Any]]], list[tuple[Kind, Step]]]:
    """Each step sees what the one before it has done. Nothing counts yet."""
    # Looked at once: what comes out must be known to be made of just that.
    was = {kind: pending.read(kind) for kind, _ in steps}
    pending.working = dict(was)
    made: list[tuple[Kind, Step]] = []
    for kind, prepare in steps:
        step = prepare(pending)
        pending.working[kind] = step(pending.working[kind])
        made.append((kind, step))
    worked, pending.working = pending.working, {}
    return {kind: (was[kind], items) for kind, items in worked.items()}, made


def _step(rule: _Rule, event: object) -> Callable[[Pending], Step]:
    def prepare(pending: Pending) -> Step:
        context = {"context": ReducerContext(pending.look)} if rule.with_context else {}

        def step(items: Items[Any]) -> Items[Any]:
            errors: list[Exception] = []
            with Isolated(errors):
                return applied(rule.reducer(items, event, **context), items, rule.slice)
            raise ReducerError(rule, errors[0])

        return step

    return prepare


def _emptied(_: Items[Any]) -> Items[Any]:
    return NO_ITEMS


def _becomes(items: Items[Any]) -> Callable[[Pending], Step]:
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
        """Memory runs nothing."""

    def resolve(self) -> None:
        """Memory always knows."""

    def finish(self) -> str | None:
        return self._ending.abort_orphan()

    @property
    def pending(self) -> Pending:
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
    """How such a transaction ends. Apart from it, so that it can be aborted when nothing refers to it any more."""

    def __init__(self, session: Session, name: str) -> None:
        self.pending = session.pending()
        self.scope = doing(self.pending)
        self.watched: Watched | None = None
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
            # Somebody's changes came in between, and ours cannot be made on top of them: then they were never made.
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


@plain(slots=True, frozen=True)
class SliceAccessor(Generic[T]):
    """One slice of a session. What it gives is immutable; it changes only through the session."""

    session: Session
    kind: type[T]

    def all(self) -> tuple[T, ...]:
        """Every item, oldest first."""
        return self.session._read(self.kind).all()

    def latest(self) -> T | None:
        """The newest item; None if the slice is empty."""
        return self.session._read(self.kind).latest()

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """The items that the predicate is true of, oldest first."""
        return self.session._read(self.kind).where(predicate)

    def __len__(self) -> int:
        return len(self.session._read(self.kind))

    def seed(self, value: T | Iterable[T]) -> None:
        """These items, or this one, instead of whatever is there."""
        items = (value,) if isinstance(value, self.kind) else tuple(value)  # type: ignore[arg-type]  # not one: several
        self._change(lambda now: applied(items, now, self.kind))

    def append(self, value: T) -> None:
        """One more item. Reducers are not asked."""
        self._change(lambda now: applied(Append(value), now, self.kind))

    def clear(self, predicate: Callable[[T], bool] | None = None) -> None:
        """Take away everything, or what the predicate is true of."""
        self._change(lambda now: applied(Clear(predicate), now, self.kind))

    def register(self, event_type: type[Any], reducer: Reducer, *, policy: SlicePolicy | None = None) -> None:
        """Let a reducer change this slice whenever such an event is dispatched. A policy given last holds."""
        self.session._register(self.kind, event_type, reducer, policy)

    def _change(self, step: Step) -> None:
        self.session._change([(self.kind, lambda _: step)])


def _check_class(kind: object, what: str) -> None:
    if not isinstance(kind, type):
        raise fault("invalid_params", f"{what} is named by a class, such as Plan, not by {kind!r}.")


class SessionSnapshotAdapter:
    """A session as something that can be captured and put back like any resource."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def snapshot(self, *, tag: str | None = None) -> Snapshot:
        """The STATE slices as they are now."""
        return self._session.snapshot(tag=tag)

    def restore(self, snapshot: Snapshot) -> None:
        """Put the slices back; logs stay."""
        Session.rollback(self._session, snapshot)
