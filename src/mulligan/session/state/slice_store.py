"""A session's slices, cached in its process and written to the store. `slice_rows` has the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from mulligan.session.lifecycle import check_open
from mulligan.session.state.slice_rows import SLICES, SliceChange, item_rows, record_changes
from mulligan.session.state.slices import NO_ITEMS, Items, Kind, MergeInto, PendingChanges, PolicyOf, SlicePolicy
from mulligan.session.state.types import TYPES, log_item
from mulligan.session.tables import session_journal
from mulligan.store.fork_locks import fork_safe_lock, shared_lock
from mulligan.store.journal import HEADS, Journal
from mulligan.store.protocol import Store, Tx
from mulligan.values.canonical import decode
from mulligan.values.errors import ExecutionStateError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId


@fast_dataclass(slots=True)
class _StoredSlice:
    """A slice as it was at a version, and the place of each item."""

    version: int
    items: Items[Any]
    places: list[int]
    next_place: int


@fast_dataclass(slots=True)
class WrittenSlices:
    """Changes that are written but not committed. `changes_state`: a STATE slice is among them."""

    changes_state: bool
    adopt: Callable[[], None]


class StoredSlices:
    """The slices of a durable session. Other processes may change them too, so each read checks for a newer version.

    CACHE slices are not stored; they live as long as this object.
    """

    def __init__(self, store: Store, journal: Journal, session: SessionId, now: Callable[[], str]) -> None:
        self._store = store
        self._journal = journal
        self._session = session
        self._now = now
        self._known: dict[Kind, _StoredSlice] = {}
        self._caches: dict[Kind, Items[Any]] = {}
        self._policies: dict[str, SlicePolicy] = {}
        self._lock = shared_lock()

    def read(self, kind: Kind) -> Items[Any]:
        if kind in self._caches:
            return self._caches[kind]
        with self._store.read() as tx:
            return self._fresh(tx, kind).items

    def read_all(self, kinds: Collection[Kind]) -> dict[Kind, Items[Any]]:
        with self._store.read() as tx:
            return {kind: self._items(tx, kind) for kind in kinds}

    def _items(self, tx: Tx, kind: Kind) -> Items[Any]:
        return self._caches[kind] if kind in self._caches else self._fresh(tx, kind).items

    def kinds(self) -> set[Kind]:
        with self._store.read() as tx:
            rows = tx.select(SLICES, {"session": self._session})
        self._policies = {row.slice: SlicePolicy(row.policy) for row in rows}
        return {TYPES.named(row.slice) for row in rows if TYPES.knows(row.slice)} | set(self._caches)

    def policy(self, kind: Kind) -> SlicePolicy | None:
        """The policy at the last read."""
        name = TYPES.name(kind)
        if name not in self._policies:
            self.kinds()
        return self._policies.get(name)

    def position(self) -> int:
        """The newest record of the session's journal."""
        with self._store.read() as tx:
            head = tx.get(HEADS, session_journal(self._session))
        return 0 if head is None else head.seq

    def _fresh(self, tx: Tx, kind: Kind) -> _StoredSlice:
        row = tx.get(SLICES, self._session, TYPES.name(kind))
        if row is None:
            return _StoredSlice(0, NO_ITEMS, [], 0)
        with self._lock:
            known = self._known.get(kind)
            if known is None or known.version != row.version:
                rows = item_rows(tx, self._session, row.slice)
                read = log_item if row.policy == SlicePolicy.LOG.value else TYPES.from_json
                items = Items.of(read(decode(one.body)) for one in rows)
                known = _StoredSlice(row.version, items, [one.place for one in rows], row.next_place)
                self._known[kind] = known
            return known

    def publish(self, pending: PendingChanges, *, only_logs: bool) -> None:
        """Publish changes outside a call. Raises `session_closed`. A call uses `write`, which does not raise it."""
        with self._store.write(about=(session_journal(self._session),)) as tx:
            check_open(tx, self._session, "slices")
            written = self.write(tx, lambda read: pending.merged_into(read, only_logs=only_logs), pending.policy_of)
        pending.published = "logs" if only_logs else "all"
        written.adopt()

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        for item in items:
            _as_json(kind, item)

    def write(self, tx: Tx, merge_into: MergeInto, policy_of: PolicyOf, *, call: str | None = None) -> WrittenSlices:
        """Write the changes in the caller's transaction. The caller calls `adopt` after the commit."""
        with self._lock:
            changes = merge_into(lambda kind: self._items(tx, kind))
            caches = {kind: new for kind, new in changes.items() if policy_of(kind) is SlicePolicy.CACHE}
            stored = [
                _diff(kind, self._fresh(tx, kind), new, policy_of(kind))
                for kind, new in changes.items()
                if kind not in caches
            ]
        if not stored:
            return WrittenSlices(changes_state=False, adopt=lambda: self._adopt((), 0, caches))
        changed = [diff.change for diff in stored]
        record = record_changes(tx, self._journal, self._session, changed, at=self._now(), call=call)
        changes_state = any(diff.change.policy == SlicePolicy.STATE.value for diff in stored)
        return WrittenSlices(changes_state, lambda: self._adopt(stored, record.seq, caches))

    def _adopt(self, stored: Iterable[_Diff], version: int, caches: Mapping[Kind, Items[Any]]) -> None:
        """Put what we have just committed into the cache, so that we need not read it again."""
        with self._lock:
            self._caches |= caches
            for diff in stored:
                known = self._known.get(diff.kind)
                if known is None or known.version == diff.was:
                    self._known[diff.kind] = _StoredSlice(version, diff.items, diff.places(), diff.next_place)


@fast_dataclass(slots=True, frozen=True)
class _Diff:
    """The change from a cached version to another one, and the places afterwards."""

    kind: Kind
    was: int
    items: Items[Any]
    change: SliceChange
    kept: list[int]
    next_place: int
    grows: bool

    def places(self) -> list[int]:
        """The places afterwards. A slice that only grew extends the same list, because only one version is cached.

        An interrupt can come right after that and then this is called again, so the list gets each new place once.
        """
        new = [place for place, _ in self.change.add]
        if self.grows:
            self.kept[len(self.items) - len(new) :] = new
            return self.kept
        return self.kept + new


def _diff(kind: Kind, known: _StoredSlice, new: Items[Any], policy: SlicePolicy) -> _Diff:
    grown = new.grown_from(known.items) if known.items else None
    if grown is not None:
        kept, drop, added = known.places, list[int](), tuple(grown)
    else:
        kept, drop, added = _matched(known, new)
    first = known.next_place
    add = [(first + i, _as_json(kind, item)) for i, item in enumerate(added)]
    change = SliceChange(TYPES.name(kind), policy.value, drop, add)
    return _Diff(kind, known.version, new, change, kept, first + len(add), grows=grown is not None)


def _matched(known: _StoredSlice, new: Items[Any]) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Places that stay, places that become empty, and new items, which are all at the end."""
    kept, drop, wanted = list[int](), list[int](), new.all()
    at = 0
    for place, item in zip(known.places, known.items, strict=True):
        if at < len(wanted) and wanted[at] is item:
            kept.append(place)
            at += 1
        else:
            drop.append(place)
    return kept, drop, wanted[at:]


def _as_json(kind: Kind, item: object) -> Any:
    try:
        return TYPES.to_json(item)
    except TypeError as error:
        raise ExecutionStateError(f"An item of the slice {kind.__name__} cannot be stored: {error}") from None


_by_store: WeakKeyDictionary[Any, WeakValueDictionary[str, StoredSlices]] = WeakKeyDictionary()
_lock = fork_safe_lock()


def stored_slices_of(store: Store, journal: Journal, session: SessionId, now: Callable[[], str]) -> StoredSlices:
    """The one `StoredSlices` of a session in this process, so that all its users share one cache."""
    with _lock:
        of_store = _by_store.setdefault(store, WeakValueDictionary())
        found = of_store.get(session)
        if found is None:
            found = of_store[session] = StoredSlices(store, journal, session, now)
        return found
