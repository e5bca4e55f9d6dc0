"""Going back in slices: what calls did to them, and what was done between calls, newest first.

A place of a slice is given once, so which places are taken says what is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from mulligan.session.kept import (
    CHANGED,
    SLICE_CHANGES,
    SLICES,
    SliceChange,
    item_rows,
    record_changes,
)
from mulligan.session.slices import SlicePolicy
from mulligan.session.tables import session_journal
from mulligan.store.journal import HEADS, PAGE_RECORDS, RECORDS, Journal, Record, parse_record, records_of
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.ids import SessionId
from mulligan.values.plain import plain

_STATE = SlicePolicy.STATE.value


@plain(slots=True, frozen=True)
class Stretch:
    """A part of a session's journal. What was done in it to slices outside any call goes back with the calls.

    So does what was done after it, outside any call, to a slice that goes back: it was made on top of that.
    """

    session: SessionId
    after: int
    upto: int


@plain(slots=True, frozen=True)
class SlicesBack:
    """What it takes to go back, by session, and what goes back: calls, and records outside any.

    `left`: slices that others have changed since, so that they are not as they were.
    """

    changes: Mapping[SessionId, Sequence[SliceChange]]
    of: Mapping[SessionId, Sequence[str | int]]
    left: tuple[str, ...]


@plain(slots=True, frozen=True)
class _Done:
    """One change of a slice: by a call, or by a record outside any. `known` are items at their places."""

    session: str
    by: str | int
    slice: str
    came: Set[int]
    went: Set[int]
    known: Mapping[int, Any]


@dataclass(slots=True)
class _Pile:
    """The places of one slice while changes are taken back. `gone` and `back`: what should be, once all are."""

    items: dict[int, Any]
    policy: str
    places: set[int] = field(init=False)
    known: dict[int, Any] = field(init=False)
    gone: set[int] = field(default_factory=set)
    back: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places, self.known = set(self.items), dict(self.items)

    def take_back(self, done: _Done) -> None:
        """Unless somebody has changed since what this change brought: then theirs stays as it is."""
        self.known |= done.known
        self.gone = (self.gone - done.went) | done.came
        self.back = (self.back - done.came) | done.went
        if done.came <= self.places:
            self.places = (self.places - done.came) | done.went

    def is_left(self) -> bool:
        return bool(self.gone & self.places or self.back - self.places)

    def missing(self) -> set[int]:
        return self.places - self.known.keys()

    def change(self, name: str) -> SliceChange | None:
        drop = sorted(self.items.keys() - self.places)
        add = [(place, self.known[place]) for place in sorted(self.places - self.items.keys())]
        return SliceChange(name, self.policy, drop, add) if drop or add else None


def slices_back(
    tx: Tx, calls: Sequence[str], stretch: Stretch | None = None, *, into: SessionId | None = None
) -> SlicesBack:
    """What it takes to undo these calls' changes, newest first, in their own sessions or in a copy of one."""
    piles: dict[tuple[str, str], _Pile] = {}
    of: dict[SessionId, dict[str | int, None]] = {}
    for done in _done(tx, calls, stretch):
        key = (into or done.session, done.slice)
        of.setdefault(SessionId(key[0]), {})[done.by] = None
        if key not in piles:
            piles[key] = _pile(tx, *key)
        piles[key].take_back(done)
    if stretch is not None:
        here = into or stretch.session
        _find_items(tx, stretch, {name: pile for (session, name), pile in piles.items() if session == here})
    found: dict[SessionId, list[SliceChange]] = {}
    for (session, name), pile in sorted(piles.items()):
        change = pile.change(name)
        if change is not None:
            found.setdefault(SessionId(session), []).append(change)
    left = sorted({name for (_, name), pile in piles.items() if pile.is_left()})
    return SlicesBack(found, {session: tuple(ids) for session, ids in of.items()}, tuple(left))


def _pile(tx: Tx, session: str, name: str) -> _Pile:
    row = tx.get(SLICES, session, name)
    items = {one.place: decode(one.body) for one in item_rows(tx, session, name)}
    return _Pile(items, _STATE if row is None else row.policy)


def _done(tx: Tx, calls: Sequence[str], stretch: Stretch | None) -> Iterator[_Done]:
    if stretch is not None:
        yield from _done_in(tx, stretch, frozenset(calls))
    for call in calls:
        for row in tx.select(SLICE_CHANGES, {"call": call}):
            if stretch is None or row.session != stretch.session:
                went = dict(decode(row.went))
                yield _Done(row.session, call, row.slice, frozenset(decode(row.came)), went.keys(), went)


def _done_in(tx: Tx, stretch: Stretch, calls: Set[str]) -> Iterator[_Done]:
    if not has_state(tx, stretch.session, since=stretch.after):
        return
    since = records_of(tx, session_journal(stretch.session), after=stretch.after)
    records = _standing([one for one in since if one.kind == CHANGED], calls)
    own = {name for one in records if "call" in one.payload or one.seq <= stretch.upto for name, _ in _changes(one)}
    for record in records:
        for name, change in _changes(record):
            if name in own:
                known = dict(change["add"])
                yield _Done(stretch.session, _by(record), name, known.keys(), frozenset(change["drop"]), known)


def _standing(records: Sequence[Record], calls: Set[str]) -> list[Record]:
    """Newest first: what the calls did, and what was done outside any, but for what is back already."""
    found, back = list[Record](), set[str | int]()
    for record in reversed(records):
        if _by(record) in calls or (_is_loose(record) and record.seq not in back):
            found.append(record)
        elif _by(record) not in back:
            back |= set(record.payload.get("back", ()))
    return found


def _by(record: Record) -> str | int:
    return record.payload.get("call", record.seq)  # type: ignore[no-any-return]  # a record's payload is JSON


def _is_loose(record: Record) -> bool:
    """Outside any call. What a fork begins with was not done to it."""
    return "call" not in record.payload and "source" not in record.payload


def _changes(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((one["slice"], one) for one in record.payload["changes"] if one["policy"] == _STATE)


def _find_items(tx: Tx, stretch: Stretch, piles: Mapping[str, _Pile]) -> None:
    """What went was once written down when it came, in the stretch or before it."""
    for record in (
        _backwards(tx, session_journal(stretch.session)) if any(pile.missing() for pile in piles.values()) else ()
    ):
        for name, change in _changes(record) if record.kind == CHANGED else ():
            if name in piles:
                piles[name].known |= {place: item for place, item in change["add"] if place in piles[name].missing()}
        if not any(pile.missing() for pile in piles.values()):
            return


def _backwards(tx: Tx, journal: str) -> Iterator[Record]:
    head = tx.get(HEADS, journal)
    for upto in range(0 if head is None else head.seq, 0, -PAGE_RECORDS):
        rows = tx.select(RECORDS, {"journal": journal}, between=("seq", upto - PAGE_RECORDS + 1, upto + 1))
        yield from (parse_record(row) for row in reversed(rows))


def has_state(tx: Tx, session: SessionId, *, since: int = 0) -> bool:
    """Whether there are slices that can go back, and that were changed since then."""
    return any(row.version > since and row.policy == _STATE for row in tx.select(SLICES, {"session": session}))


def has_standing(tx: Tx, stretch: Stretch) -> bool:
    """Whether anything was done in it outside any call that could go back."""
    length = stretch.upto - stretch.after
    inside = records_of(tx, session_journal(stretch.session), after=stretch.after, limit=length)
    loose = any(one.kind == CHANGED and _is_loose(one) and any(_changes(one)) for one in inside)
    return loose and any(
        isinstance(one.by, int) and one.by <= stretch.upto for one in _done_in(tx, stretch, frozenset())
    )


def changes_slices(tx: Tx, calls: Iterable[str]) -> bool:
    return any(tx.select(SLICE_CHANGES, {"call": call}, limit=1) for call in calls)


def take_back_in(
    tx: Tx, journal: Journal, calls: Sequence[str], stretch: Stretch | None = None, *, at: str, by: str
) -> bool:
    """Undo these changes of slices, as a part of the call `by`. Whether there was anything to undo."""
    back = slices_back(tx, calls, stretch)
    for session, of in back.of.items():
        record_changes(tx, journal, session, back.changes.get(session, ()), at=at, call=by, back=of)
    return bool(back.changes)


def copy_slices_in(
    tx: Tx,
    journal: Journal,
    source: SessionId,
    target: SessionId,
    *,
    at: str,
    without: Sequence[str] = (),
    stretch: Stretch | None = None,
) -> None:
    """Give a fork its parent's slices, but for what these calls, newest first, and the stretch did to them."""
    changes = [
        SliceChange(
            row.slice, row.policy, add=[(one.place, decode(one.body)) for one in item_rows(tx, source, row.slice)]
        )
        for row in tx.select(SLICES, {"session": source})
    ]
    if changes:
        record_changes(tx, journal, target, changes, at=at, source=source)
    back = slices_back(tx, without, stretch, into=target).changes.get(target)
    if back:
        record_changes(tx, journal, target, back, at=at, source=source)
