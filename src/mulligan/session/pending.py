"""Changes to slices that are not published yet.

Every change to a session is pending first. Whoever makes it sees it over what is published; nobody else does. To
publish, a slice that nobody else has changed takes the pending version; one that somebody has is changed again, step by
step, on top of theirs, so that two increments made side by side count twice. To give up, what is pending is dropped,
but for its logs: so nothing ever has to be put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from mulligan.session.slices import NO_ITEMS, Items, SlicePolicy
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.state_faults import ExecutionStateError

Kind: TypeAlias = type[Any]
Step: TypeAlias = Callable[[Items[Any]], Items[Any]]
Read: TypeAlias = Callable[[Kind], Items[Any]]
PolicyOf: TypeAlias = Callable[[Kind], SlicePolicy]
Settle: TypeAlias = Callable[[Read], Mapping[Kind, Items[Any]]]


class Home(Protocol):
    """Where a session's published slices are. Safe to use from many threads."""

    def read(self, kind: Kind) -> Items[Any]:
        """The slice as it is now. The very same object while nobody changes it."""
        ...

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        """Several slices as they are at one moment."""
        ...

    def kinds(self) -> set[Kind]:
        """Slice types that have been published, as far as this process knows them."""
        ...

    def policy(self, kind: Kind) -> SlicePolicy | None:
        """What a slice was published as, if it was."""
        ...

    def publish(self, settle: Settle, policy_of: PolicyOf) -> None:
        """Make the changes that `settle` works out, all of them at once, with nobody else changing anything."""
        ...

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        """Raises ExecutionStateError for an item that cannot be kept here."""
        ...


class MemoryHome:
    """Slices that live as long as the session object."""

    def __init__(self) -> None:
        self._slices: dict[Kind, Items[Any]] = {}
        self._lock = fork_safe_lock()

    def read(self, kind: Kind) -> Items[Any]:
        return self._slices.get(kind, NO_ITEMS)

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        slices = self._slices
        return {kind: slices.get(kind, NO_ITEMS) for kind in kinds}

    def kinds(self) -> set[Kind]:
        return set(self._slices)

    def policy(self, kind: Kind) -> SlicePolicy | None:
        return None

    def publish(self, settle: Settle, policy_of: PolicyOf) -> None:
        with self._lock:
            # One assignment, so that a reader never sees half of it.
            self._slices = {**self._slices, **settle(self.read)}

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        """Memory keeps everything."""


@dataclass(slots=True, eq=False)
class Pending:
    """`base` is what each changed slice was when it was first changed, `now` what it is here.

    `working` is what is being worked out and may come to nothing.
    """

    home: Home
    policy_of: PolicyOf
    outer: Pending | None = None
    base: dict[Kind, Items[Any]] = field(default_factory=dict)
    now: dict[Kind, Items[Any]] = field(default_factory=dict)
    steps: list[tuple[Kind, Step]] = field(default_factory=list)
    events: list[tuple[object, frozenset[Kind]]] = field(default_factory=list)
    working: dict[Kind, Items[Any]] = field(default_factory=dict)
    is_open: bool = True
    has_failed: bool = False
    lock: threading.RLock = field(default_factory=fork_safe_lock)

    def read(self, kind: Kind) -> Items[Any]:
        found = self.now.get(kind)
        if found is not None:
            return found
        return self.home.read(kind) if self.outer is None else self.outer.read(kind)

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        rest = [kind for kind in kinds if kind not in self.now]
        below = self.home.read_all(rest) if self.outer is None else self.outer.read_all(rest)
        return {**below, **{kind: self.now[kind] for kind in kinds if kind in self.now}}

    def look(self, kind: Kind) -> Items[Any]:
        """What a reducer sees: also what others have made of the event it is about."""
        found = self.working.get(kind)
        return self.read(kind) if found is None else found

    def kinds(self) -> set[Kind]:
        return set(self.now) | (self.home.kinds() if self.outer is None else self.outer.kinds())

    @property
    def has_changes(self) -> bool:
        return bool(self.now) or (self.outer is not None and self.outer.has_changes)

    def change(self, staged: Mapping[Kind, tuple[Items[Any], Items[Any]]], steps: list[tuple[Kind, Step]]) -> None:
        """Take what was worked out from the versions given: (was, is) of each slice."""
        with self.lock:
            self.check_open()
            for kind, (was, new) in staged.items():
                self.base.setdefault(kind, was)
                self.now[kind] = new
            self.steps += steps

    def check_kept(self) -> None:
        """Raises ExecutionStateError if something new cannot be kept where the slices live."""
        for kind, new in self.now.items():
            if self.policy_of(kind) is SlicePolicy.CACHE:
                continue
            grown = new.grown_from(self.base[kind])
            known = {id(item) for item in self.base[kind]} if grown is None else set[int]()
            self.home.check(kind, grown if grown is not None else [item for item in new if id(item) not in known])

    def check_open(self) -> None:
        if not self.is_open:
            raise ExecutionStateError("The call this belongs to is over; what it does now changes nothing.")

    def settle(self, read: Read, *, only_logs: bool = False) -> dict[Kind, Items[Any]]:
        """The changes on top of what is published now. Called by whoever keeps others from publishing meanwhile."""
        changes: dict[Kind, Items[Any]] = {}
        self.working = changes
        for kind, mine in self.now.items():
            if only_logs and self.policy_of(kind) is not SlicePolicy.LOG:
                continue
            theirs = read(kind)
            new = mine if theirs is self.base[kind] else self._again(kind, theirs)
            if new is not theirs:
                changes[kind] = new
        return changes

    def _again(self, kind: Kind, items: Items[Any]) -> Items[Any]:
        for one, step in self.steps:
            if one is kind:
                items = step(items)
        return items

    def close(self, *, failed: bool) -> None:
        """Nothing more can be done here."""
        with self.lock:
            self.is_open, self.has_failed = False, failed

    def publish(self, *, only_logs: bool = False) -> None:
        """Into the changes that these are a part of, or home. With `only_logs`, the rest is dropped."""
        self.close(failed=only_logs)
        if only_logs and not any(self.policy_of(kind) is SlicePolicy.LOG for kind in self.now):
            return
        if self.outer is not None:
            self._join(self.outer, only_logs=only_logs)
        elif self.now:
            self.home.publish(lambda read: self.settle(read, only_logs=only_logs), self.policy_of)

    def _join(self, outer: Pending, *, only_logs: bool) -> None:
        with outer.lock:
            was = {kind: outer.read(kind) for kind in self.now}
            changes = self.settle(was.__getitem__, only_logs=only_logs)
            staged = {kind: (was[kind], new) for kind, new in changes.items()}
            outer.change(staged, [(kind, step) for kind, step in self.steps if kind in changes])
            outer.events += self.told(only_logs=only_logs)

    def told(self, *, only_logs: bool) -> list[tuple[object, frozenset[Kind]]]:
        """The events that count: all of them, or those that a log has kept."""
        if not only_logs:
            return self.events
        logs = {kind for kind in self.now if self.policy_of(kind) is SlicePolicy.LOG}
        return [(event, kinds) for event, kinds in self.events if kinds & logs]


_all_pending: ContextVar[tuple[Pending, ...]] = ContextVar("mulligan_pending", default=())


def pending_here(home: Home) -> Pending | None:
    """The innermost changes of a session that this thread or task is making. Those of a call that is over are none."""
    for pending in reversed(_all_pending.get()):
        if pending.home is home and pending.is_open:
            return pending
    return None


def check_not_astray(home: Home) -> None:
    """Raises ExecutionStateError for whoever was started in a call that has failed meanwhile."""
    innermost = next((one for one in reversed(_all_pending.get()) if one.home is home), None)
    if innermost is not None and innermost.has_failed:
        raise ExecutionStateError("The call that this was started in has failed; what it does now changes nothing.")


class doing:
    """Whatever the block does to slices is part of these changes. It may be left in another context than this."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def __enter__(self) -> Pending:
        _all_pending.set((*(one for one in _all_pending.get() if one.is_open), self._pending))
        return self._pending

    def __exit__(self, *_: object) -> None:
        _all_pending.set(tuple(one for one in _all_pending.get() if one is not self._pending))
