"""Changes to slices that are not published yet.

Every change to a session is pending first. Whoever makes it sees it over what is published; nobody else does. To
publish, a slice that nobody else has changed takes the pending version; one that somebody has is changed again, step by
step, on top of theirs, so that two increments made side by side count twice. To give up, what is pending is dropped,
but for its logs: so nothing ever has to be put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from mulligan.session.slices import NO_ITEMS, Items, SlicePolicy
from mulligan.store.fork_locks import fork_safe_lock, shared_lock
from mulligan.values.call_scope import CallScope, scopes
from mulligan.values.here import Block

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

    def publish(self, pending: Pending, *, only_logs: bool) -> None:
        """Make the changes that `pending.settle` works out, all of them at once, with nobody else changing anything."""
        ...

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        """Raises ExecutionStateError for an item that cannot be kept here."""
        ...


class MemoryHome:
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

    def publish(self, pending: Pending, *, only_logs: bool) -> None:
        with self._lock:
            slices = {**self._slices, **pending.settle(self.read, only_logs=only_logs)}
            # One assignment: a reader never sees half of it, and an interrupt never comes between its parts.
            self._slices, pending.published = slices, "logs" if only_logs else "all"

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        """Memory keeps everything."""


@dataclass(slots=True, eq=False)
class Pending(CallScope):
    """`base` is what each changed slice was when it was first changed, `now` what it is here.

    `working` is what is being worked out and may come to nothing. `published` says what became of the changes.
    """

    home: Home = field(kw_only=True)
    policy_of: PolicyOf = field(kw_only=True)
    base: dict[Kind, Items[Any]] = field(default_factory=dict)
    now: dict[Kind, Items[Any]] = field(default_factory=dict)
    steps: Items[tuple[Kind, Step]] = NO_ITEMS
    events: Items[tuple[object, frozenset[Kind]]] = NO_ITEMS
    working: dict[Kind, Items[Any]] = field(default_factory=dict)
    published: Literal["no", "logs", "all"] = "no"
    lock: threading.RLock = field(default_factory=fork_safe_lock)

    @property
    def _around(self) -> Pending | None:
        """The changes that these are a part of."""
        assert self.outer is None or isinstance(self.outer, Pending), "slices are changed in calls that change slices"
        return self.outer

    def read(self, kind: Kind) -> Items[Any]:
        found = self.now.get(kind)
        if found is not None:
            return found
        return self.home.read(kind) if self._around is None else self._around.read(kind)

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        rest = [kind for kind in kinds if kind not in self.now]
        below = self.home.read_all(rest) if self._around is None else self._around.read_all(rest)
        return {**below, **{kind: self.now[kind] for kind in kinds if kind in self.now}}

    def look(self, kind: Kind) -> Items[Any]:
        """What a reducer sees: also what others have made of the event it is about."""
        found = self.working.get(kind)
        return self.read(kind) if found is None else found

    def kinds(self) -> set[Kind]:
        return set(self.now) | (self.home.kinds() if self._around is None else self._around.kinds())

    @property
    def has_changes(self) -> bool:
        return bool(self.now) or (self._around is not None and self._around.has_changes)

    def change(
        self,
        staged: Mapping[Kind, tuple[Items[Any], Items[Any]]],
        steps: Iterable[tuple[Kind, Step]],
        events: Iterable[tuple[object, frozenset[Kind]]] = (),
        *,
        part: Pending | None = None,
    ) -> None:
        """Take what was worked out from the versions given: (was, is) of each slice. `part`: whose changes they are."""
        with self.lock:
            base = {**{kind: was for kind, (was, _) in staged.items()}, **self.base}
            now = {**self.now, **{kind: new for kind, (_, new) in staged.items()}}
            new_steps, new_events, whose = self.steps.extended(steps), self.events.extended(events), part or _NOBODY
            what = "logs" if whose.has_failed else "all"
            # One assignment, in which no interrupt can come: an event is in all slices or in none.
            self.base, self.now, self.steps, self.events, whose.published = base, now, new_steps, new_events, what

    def check_kept(self) -> None:
        """Raises ExecutionStateError if something new cannot be kept where the slices live."""
        for kind, new in self.now.items():
            if self.policy_of(kind) is SlicePolicy.CACHE:
                continue
            self.home.check(kind, _new_in(new, self.base[kind]))

    def settle(self, read: Read, *, only_logs: bool = False) -> dict[Kind, Items[Any]]:
        """The changes on top of what is published now. Called by whoever keeps others from publishing meanwhile."""
        changes: dict[Kind, Items[Any]] = {}
        self.working = changes
        for kind, mine in self.now.items():
            if only_logs and self.policy_of(kind) is not SlicePolicy.LOG:
                continue
            theirs = read(kind)
            new = mine if theirs is self.base[kind] else self._again(kind, theirs)
            if only_logs:
                new = _as_undone(new, theirs)
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
        """Into the changes that these are a part of, or home. With `only_logs`, the rest is dropped.

        Once: asked again, because an interrupt came before the answer, it does nothing more.
        """
        if self.published != "no":
            return
        self.close(failed=only_logs)
        if only_logs and not any(self.policy_of(kind) is SlicePolicy.LOG for kind in self.now):
            self.published = "logs"
        elif self._around is not None:
            self._join(self._around, only_logs=only_logs)
        elif self.now:
            self.home.publish(self, only_logs=only_logs)
        else:
            self.published = "all"

    def _join(self, outer: Pending, *, only_logs: bool) -> None:
        with outer.lock:
            outer.check_open()
            was = {kind: outer.read(kind) for kind in self.now}
            changes = self.settle(was.__getitem__, only_logs=only_logs)
            staged = {kind: (was[kind], new) for kind, new in changes.items()}
            steps = [(kind, step) for kind, step in self.steps if kind in changes]
            if only_logs:
                steps = [(kind, _adding(_new_in(new, was[kind]))) for kind, new in changes.items()]
            outer.change(staged, steps, self.told(only_logs=only_logs), part=self)

    def told(self, *, only_logs: bool) -> list[tuple[object, frozenset[Kind]]]:
        """The events that count: all of them, or those that a log has kept."""
        if not only_logs:
            return list(self.events)
        logs = {kind for kind in self.now if self.policy_of(kind) is SlicePolicy.LOG}
        return [(undone_form(event), kinds) for event, kinds in self.events if kinds & logs]


def undone_form(item: object) -> object:
    """What the log says of something that has not come to anything: an entry that claims success must not stay so."""
    as_undone = getattr(item, "as_undone", None)
    return item if as_undone is None else as_undone()


def _as_undone(items: Items[Any], theirs: Items[Any]) -> Items[Any]:
    """The items with those that are new here in the form in which the log keeps them."""
    new = _new_in(items, theirs)
    kept = {id(item): undone_form(item) for item in new}
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
    """Stands for the part of a call whose changes these are, where there is none."""

    published: str
    has_failed = False


_NOBODY: Any = _Unpublished()


def pending_here(home: Home) -> Pending | None:
    """The innermost changes of a session that this thread or task is making. Those of a call that is over are none."""
    for pending in scopes.all():
        if isinstance(pending, Pending) and pending.home is home and pending.is_open:
            return pending
    return None


def doing(pending: Pending) -> Block[CallScope]:
    """Whatever the block does to slices is part of these changes. It may be left in another context than this."""
    return scopes.block(pending)
