"""Slices in the store: what they are as rows, and how records change them.

`slices.changed`       items that went and items that came, each at its place. `call`: the call they are a part of.
                       `source`: the session they are copied from. `back`: the calls, and the records outside any
                       call, that they take back
`checkpoint.recorded`  the state around a tool call, under a name that may be used again

Items of a slice are kept in the order of their places. A place is given once and for all: an item that comes back after
it went takes its old one. So the inverse of a change needs nothing but the change, whatever was added elsewhere since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from mulligan.session.pending import Kind, Pending, PolicyOf, Settle
from mulligan.session.slices import NO_ITEMS, Items, SlicePolicy
from mulligan.session.standing import check_open
from mulligan.session.tables import session_journal
from mulligan.session.types import TYPES, log_item
from mulligan.store.fork_locks import fork_safe_lock, shared_lock
from mulligan.store.journal import HEADS, Journal, Record
from mulligan.store.protocol import Store, Tx
from mulligan.store.tables import Table
from mulligan.values.canonical import decode, encode
from mulligan.values.ids import SessionId
from mulligan.values.plain import plain
from mulligan.values.state_faults import ExecutionStateError

CHANGED, RECORDED = "slices.changed", "checkpoint.recorded"


@plain(slots=True, frozen=True)
class SliceRow:
    """One slice. `version` is the place of its newest change in the session's journal, `next_place` is free."""

    session: str
    slice: str
    policy: str
    version: int
    next_place: int


@plain(slots=True, frozen=True)
class SliceItemRow:
    session: str
    slice: str
    place: int
    body: bytes


@plain(slots=True, frozen=True)
class SliceChangeRow:
    """What a call did to a STATE slice: `came` lists places, `went` places and what was there."""

    call: str
    session: str
    slice: str
    came: bytes
    went: bytes


SLICES: Table[SliceRow] = Table("slices", SliceRow, key=("session", "slice"), projected=True)
SLICE_ITEMS: Table[SliceItemRow] = Table("slice_items", SliceItemRow, key=("session", "slice", "place"), projected=True)
SLICE_CHANGES: Table[SliceChangeRow] = Table(
    "slice_changes", SliceChangeRow, key=("call", "session", "slice"), projected=True
)


@plain(slots=True, frozen=True)
class CheckpointRow:
    """The newest checkpoint with a name. `body` is its JSON, or the digest of the blob that holds it."""

    session: str
    name: str
    seq: int
    body: str


CHECKPOINTS: Table[CheckpointRow] = Table(
    "checkpoints", CheckpointRow, key=("session", "name"), indexes=(("session", "seq"),), projected=True
)


def project_checkpoint_recorded(tx: Tx, record: Record) -> None:
    body = record.payload
    tx.put(CHECKPOINTS, CheckpointRow(body["session"], body["name"], record.seq, body["body"]))


SLICE_TABLES: tuple[Table[Any], ...] = (SLICES, SLICE_ITEMS, SLICE_CHANGES, CHECKPOINTS)

Placed: TypeAlias = tuple[int, Any]


@plain(slots=True, frozen=True)
class SliceChange:
    """Places that fall empty, and items as JSON at theirs."""

    slice: str
    policy: str
    drop: Sequence[int] = ()
    add: Sequence[Placed] = ()

    def to_json(self) -> dict[str, Any]:
        return {"slice": self.slice, "policy": self.policy, "drop": list(self.drop), "add": [list(a) for a in self.add]}


def record_changes(
    tx: Tx,
    journal: Journal,
    session: SessionId,
    changes: Iterable[SliceChange],
    *,
    at: str,
    call: str | None = None,
    source: SessionId | None = None,
    back: Sequence[str | int] = (),
) -> Record:
    body: dict[str, Any] = {"session": session, "changes": [change.to_json() for change in changes]}
    more = {"call": call, "source": source, "back": list(back)}
    body |= {name: value for name, value in more.items() if value}
    return journal.append(tx, session_journal(session), CHANGED, body, at=at)


def project_slices_changed(tx: Tx, record: Record) -> None:
    body = record.payload
    for change in body["changes"]:
        _project_change(tx, record, body["session"], change)


def _project_change(tx: Tx, record: Record, session: str, change: Mapping[str, Any]) -> None:
    name, call = change["slice"], record.payload.get("call")
    went: list[tuple[int, Any]] = []
    for place in change["drop"]:
        row = tx.get(SLICE_ITEMS, session, name, place)
        if row is not None:
            went.append((place, decode(row.body)))
            tx.delete(SLICE_ITEMS, session, name, place)
    for place, item in change["add"]:
        tx.put(SLICE_ITEMS, SliceItemRow(session, name, place, encode(item)))
    known = tx.get(SLICES, session, name)
    came = [place for place, _ in change["add"]]
    following = max([known.next_place if known is not None else 0, *(place + 1 for place in came)])
    tx.put(SLICES, SliceRow(session, name, change["policy"], record.seq, following))
    if call is not None and change["policy"] == SlicePolicy.STATE.value:
        tx.put(SLICE_CHANGES, SliceChangeRow(call, session, name, encode(came), encode(went)))


def item_rows(tx: Tx, session: str, name: str) -> list[SliceItemRow]:
    return tx.select(SLICE_ITEMS, {"session": session, "slice": name}, order=("place",))


# A session's slices, for its process.


@dataclass(slots=True)
class _Kept:
    """A slice as it was at a version, and the place of each item."""

    version: int
    items: Items[Any]
    places: list[int]
    next_place: int


def _nothing() -> _Kept:
    return _Kept(0, NO_ITEMS, [], 0)


@dataclass(slots=True)
class Written:
    """What a transaction is going to have done. `moved`: STATE is among it."""

    moved: bool
    adopt: Callable[[], None]


class StoreHome:
    """The slices of a durable session. Others may change them too: each look makes sure of the newest version.

    CACHE slices are not stored; they live as long as this object.
    """

    def __init__(self, store: Store, journal: Journal, session: SessionId, now: Callable[[], str]) -> None:
        self._store = store
        self._journal = journal
        self._session = session
        self._now = now
        self._known: dict[Kind, _Kept] = {}
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
            return {kind: self._caches[kind] if kind in self._caches else self._fresh(tx, kind).items for kind in kinds}

    def kinds(self) -> set[Kind]:
        with self._store.read() as tx:
            rows = tx.select(SLICES, {"session": self._session})
        self._policies = {row.slice: SlicePolicy(row.policy) for row in rows}
        return {TYPES.named(row.slice) for row in rows if TYPES.knows(row.slice)} | set(self._caches)

    def policy(self, kind: Kind) -> SlicePolicy | None:
        """As it was when it was last looked at; who changes it says so on registering."""
        name = TYPES.name(kind)
        if name not in self._policies:
            self.kinds()
        return self._policies.get(name)

    def position(self) -> int:
        """How far the session's journal goes now."""
        with self._store.read() as tx:
            head = tx.get(HEADS, session_journal(self._session))
        return 0 if head is None else head.seq

    def _fresh(self, tx: Tx, kind: Kind) -> _Kept:
        row = tx.get(SLICES, self._session, TYPES.name(kind))
        if row is None:
            return _nothing()
        with self._lock:
            known = self._known.get(kind)
            if known is None or known.version != row.version:
                rows = item_rows(tx, self._session, row.slice)
                read = log_item if row.policy == SlicePolicy.LOG.value else TYPES.from_json
                items = Items.of(read(decode(one.body)) for one in rows)
                known = _Kept(row.version, items, [one.place for one in rows], row.next_place)
                self._known[kind] = known
            return known

    def publish(self, pending: Pending, *, only_logs: bool) -> None:
        """Raises `session_closed`: what is under way when a session closes ends as it would, but nothing new begins."""
        with self._store.write() as tx:
            check_open(tx, self._session, "slices")
            written = self.write(tx, lambda read: pending.settle(read, only_logs=only_logs), pending.policy_of)
        pending.published = "logs" if only_logs else "all"
        written.adopt()

    def check(self, kind: Kind, items: Iterable[Any]) -> None:
        for item in items:
            _as_json(kind, item)

    def write(self, tx: Tx, settle: Settle, policy_of: PolicyOf, *, call: str | None = None) -> Written:
        """The changes, in somebody's transaction. `adopt` is to be called once that has been published."""
        with self._lock:
            changes = settle(lambda kind: self._caches[kind] if kind in self._caches else self._fresh(tx, kind).items)
            caches = {kind: new for kind, new in changes.items() if policy_of(kind) is SlicePolicy.CACHE}
            stored = [
                _diff(kind, self._fresh(tx, kind), new, policy_of(kind))
                for kind, new in changes.items()
                if kind not in caches
            ]
        if not stored:
            return Written(moved=False, adopt=lambda: self._adopt((), 0, caches))
        changed = [diff.change for diff in stored]
        record = record_changes(tx, self._journal, self._session, changed, at=self._now(), call=call)
        moved = any(diff.change.policy == SlicePolicy.STATE.value for diff in stored)
        return Written(moved, lambda: self._adopt(stored, record.seq, caches))

    def _adopt(self, stored: Iterable[_Diff], version: int, caches: Mapping[Kind, Items[Any]]) -> None:
        """Remember what we have just written instead of reading it again."""
        with self._lock:
            self._caches |= caches
            for diff in stored:
                known = self._known.get(diff.kind)
                if known is None or known.version == diff.was:
                    self._known[diff.kind] = _Kept(version, diff.items, diff.places(), diff.next_place)


@plain(slots=True, frozen=True)
class _Diff:
    """From a kept version to another: the change, and the places afterwards."""

    kind: Kind
    was: int
    items: Items[Any]
    change: SliceChange
    kept: list[int]
    next_place: int
    grows: bool

    def places(self) -> list[int]:
        """Of a slice that only grew, the same list, grown: there is only one newest version."""
        new = [place for place, _ in self.change.add]
        if self.grows:
            self.kept.extend(new)
            return self.kept
        return self.kept + new


def _diff(kind: Kind, known: _Kept, new: Items[Any], policy: SlicePolicy) -> _Diff:
    grown = new.grown_from(known.items) if known.items else None
    if grown is not None:
        kept, drop, added = known.places, list[int](), tuple(grown)
    else:
        kept, drop, added = _matched(known, new)
    first = known.next_place
    add = [(first + i, _as_json(kind, item)) for i, item in enumerate(added)]
    change = SliceChange(TYPES.name(kind), policy.value, drop, add)
    return _Diff(kind, known.version, new, change, kept, first + len(add), grows=grown is not None)


def _matched(known: _Kept, new: Items[Any]) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Places that stay, places that fall empty, and items that come, all at the end."""
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


_homes: WeakKeyDictionary[Any, WeakValueDictionary[str, StoreHome]] = WeakKeyDictionary()
_making = fork_safe_lock()


def home_of(store: Store, journal: Journal, session: SessionId, now: Callable[[], str]) -> StoreHome:
    """One for each session of an open store, so that everybody who works on it here knows what is pending."""
    with _making:
        homes = _homes.setdefault(store, WeakValueDictionary())
        found = homes.get(session)
        if found is None:
            found = homes[session] = StoreHome(store, journal, session, now)
        return found
