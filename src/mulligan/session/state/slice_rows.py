"""The rows of slices in the store, the records that change them, and the undo of such records.

`slices.changed`       removed and added items, each with its place. `call`: the call that changed them.
                       `source`: the session they are copied from. `back`: the calls, and the records outside any
                       call, that this record undoes
`checkpoint.recorded`  the state around a tool call, under a name that may be used again

The items of a slice are ordered by their places. A place is never given to another item, and an item that an undo
restores gets its old place. So the change alone is enough to invert it, whatever was added elsewhere since, and the set
of occupied places says which items the slice has.

Nothing here knows the Python types of slices, so a program that only undoes does not load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field
from typing import Any, TypeAlias

from mulligan.session.tables import session_journal
from mulligan.store.journal import HEADS, PAGE_RECORDS, RECORDS, Journal, Record, parse_record, records_of
from mulligan.store.protocol import Table, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId

CHANGED, RECORDED = "slices.changed", "checkpoint.recorded"
_STATE = "state"  # `SlicePolicy.STATE`


@fast_dataclass(slots=True, frozen=True)
class SliceRow:
    """One slice. `version` is the record of its newest change; `next_place` is the next free place."""

    session: str
    slice: str
    policy: str
    version: int
    next_place: int


@fast_dataclass(slots=True, frozen=True)
class SliceItemRow:
    session: str
    slice: str
    place: int
    body: bytes


@fast_dataclass(slots=True, frozen=True)
class SliceChangeRow:
    """What a call did to a STATE slice: `came` lists new places, `went` lists removed places with their items."""

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


@fast_dataclass(slots=True, frozen=True)
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


@fast_dataclass(slots=True, frozen=True)
class SliceChange:
    """Places that become empty, and new items as JSON with their places."""

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
    if call is not None and change["policy"] == _STATE:
        tx.put(SLICE_CHANGES, SliceChangeRow(call, session, name, encode(came), encode(went)))


def item_rows(tx: Tx, session: str, name: str) -> list[SliceItemRow]:
    return tx.select(SLICE_ITEMS, {"session": session, "slice": name}, order=("place",))


# Undo.


@fast_dataclass(slots=True, frozen=True)
class JournalRange:
    """A part of a session's journal. An undo of its calls also undoes the changes in it that belong to no call.

    It also undoes later changes outside calls to the same slices, because they build on the undone ones.
    """

    session: SessionId
    after: int
    upto: int


@fast_dataclass(slots=True, frozen=True)
class SliceUndo:
    """The plan of an undo. `changes`: per session. `of`: the undone calls, and undone records outside calls.

    `left`: slices that stay as they are, because something else changed them later.
    """

    changes: Mapping[SessionId, Sequence[SliceChange]]
    of: Mapping[SessionId, Sequence[str | int]]
    left: tuple[str, ...]


@fast_dataclass(slots=True, frozen=True)
class _AppliedChange:
    """One change of a slice, by a call or by a record outside calls. `known` are items by place."""

    session: str
    by: str | int
    slice: str
    came: Set[int]
    went: Set[int]
    known: Mapping[int, Any]


@fast_dataclass(slots=True)
class _SlicePlaces:
    """The places of one slice while changes are undone. `gone` and `back`: places to empty and to fill again."""

    items: dict[int, Any]
    policy: str
    places: set[int] = field(init=False)
    known: dict[int, Any] = field(init=False)
    gone: set[int] = field(default_factory=set)
    back: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places, self.known = set(self.items), dict(self.items)

    def undo_change(self, done: _AppliedChange) -> None:
        """Undo one change, except for items that something else changed later."""
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


def plan_slice_undo(
    tx: Tx, calls: Sequence[str], journal_range: JournalRange | None = None, *, into: SessionId | None = None
) -> SliceUndo:
    """Plan the undo of these calls' changes, newest first, in their own sessions or in a copy of one."""
    slices: dict[tuple[str, str], _SlicePlaces] = {}
    of: dict[SessionId, dict[str | int, None]] = {}
    for done in _changes_to_undo(tx, calls, journal_range):
        key = (into or done.session, done.slice)
        of.setdefault(SessionId(key[0]), {})[done.by] = None
        if key not in slices:
            slices[key] = _places_of(tx, *key)
        slices[key].undo_change(done)
    if journal_range is not None:
        here = into or journal_range.session
        _find_items(tx, journal_range, {name: one for (session, name), one in slices.items() if session == here})
    found: dict[SessionId, list[SliceChange]] = {}
    for (session, name), one in sorted(slices.items()):
        change = one.change(name)
        if change is not None:
            found.setdefault(SessionId(session), []).append(change)
    left = sorted({name for (_, name), one in slices.items() if one.is_left()})
    return SliceUndo(found, {session: tuple(ids) for session, ids in of.items()}, tuple(left))


def _places_of(tx: Tx, session: str, name: str) -> _SlicePlaces:
    row = tx.get(SLICES, session, name)
    items = {one.place: decode(one.body) for one in item_rows(tx, session, name)}
    return _SlicePlaces(items, _STATE if row is None else row.policy)


def _changes_to_undo(tx: Tx, calls: Sequence[str], journal_range: JournalRange | None) -> Iterator[_AppliedChange]:
    if journal_range is not None:
        yield from _changes_in_range(tx, journal_range, frozenset(calls))
    for call in calls:
        for row in tx.select(SLICE_CHANGES, {"call": call}):
            if journal_range is None or row.session != journal_range.session:
                went = dict(decode(row.went))
                yield _AppliedChange(row.session, call, row.slice, frozenset(decode(row.came)), went.keys(), went)


def _changes_in_range(tx: Tx, journal_range: JournalRange, calls: Set[str]) -> Iterator[_AppliedChange]:
    if not has_state(tx, journal_range.session, since=journal_range.after):
        return
    since = records_of(tx, session_journal(journal_range.session), after=journal_range.after)
    records = _not_undone([one for one in since if one.kind == CHANGED], calls)
    own = {
        name for one in records if "call" in one.payload or one.seq <= journal_range.upto for name, _ in _changes(one)
    }
    for record in records:
        for name, change in _changes(record):
            if name in own:
                known = dict(change["add"])
                yield _AppliedChange(
                    journal_range.session, _changed_by(record), name, known.keys(), frozenset(change["drop"]), known
                )


def _not_undone(records: Sequence[Record], calls: Set[str]) -> list[Record]:
    """Changes of the calls and changes outside calls, newest first, without those that are undone already."""
    found, back = list[Record](), set[str | int]()
    for record in reversed(records):
        if _changed_by(record) in calls or (_is_outside_calls(record) and record.seq not in back):
            found.append(record)
        elif _changed_by(record) not in back:
            back |= set(record.payload.get("back", ()))
    return found


def _changed_by(record: Record) -> str | int:
    return record.payload.get("call", record.seq)  # type: ignore[no-any-return]  # a record's payload is JSON


def _is_outside_calls(record: Record) -> bool:
    """Whether the change belongs to no call. The slices that a fork starts with are no change."""
    return "call" not in record.payload and "source" not in record.payload


def _changes(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((one["slice"], one) for one in record.payload["changes"] if one["policy"] == _STATE)


def _find_items(tx: Tx, journal_range: JournalRange, slices: Mapping[str, _SlicePlaces]) -> None:
    """Find the bodies of removed items in the record that once added them, in the range or before it."""
    for record in (
        _backwards(tx, session_journal(journal_range.session)) if any(one.missing() for one in slices.values()) else ()
    ):
        for name, change in _changes(record) if record.kind == CHANGED else ():
            if name in slices:
                slices[name].known |= {place: item for place, item in change["add"] if place in slices[name].missing()}
        if not any(one.missing() for one in slices.values()):
            return


def _backwards(tx: Tx, journal: str) -> Iterator[Record]:
    head = tx.get(HEADS, journal)
    for upto in range(0 if head is None else head.seq, 0, -PAGE_RECORDS):
        rows = tx.select(RECORDS, {"journal": journal}, between=("seq", upto - PAGE_RECORDS + 1, upto + 1))
        yield from (parse_record(row) for row in reversed(rows))


def has_state(tx: Tx, session: SessionId, *, since: int = 0) -> bool:
    """Whether STATE slices were changed after record `since`."""
    return any(row.version > since and row.policy == _STATE for row in tx.select(SLICES, {"session": session}))


def has_changes_outside_calls(tx: Tx, journal_range: JournalRange) -> bool:
    """Whether the range has a change outside calls that could be undone."""
    length = journal_range.upto - journal_range.after
    inside = records_of(tx, session_journal(journal_range.session), after=journal_range.after, limit=length)
    loose = any(one.kind == CHANGED and _is_outside_calls(one) and any(_changes(one)) for one in inside)
    return loose and any(
        isinstance(one.by, int) and one.by <= journal_range.upto
        for one in _changes_in_range(tx, journal_range, frozenset())
    )


def changes_slices(tx: Tx, calls: Iterable[str]) -> bool:
    """Whether one of the calls has changed a slice."""
    return bool([call for call in calls if tx.select(SLICE_CHANGES, {"call": call}, limit=1)])


def undo_slices_in(
    tx: Tx, journal: Journal, calls: Sequence[str], journal_range: JournalRange | None = None, *, at: str, by: str
) -> bool:
    """Undo these changes of slices, as a part of the call `by`. Returns whether there was anything to undo."""
    back = plan_slice_undo(tx, calls, journal_range)
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
    journal_range: JournalRange | None = None,
) -> None:
    """Copy the parent's slices into a fork, without the changes of these calls (newest first) and of the range."""
    changes = [
        SliceChange(
            row.slice, row.policy, add=[(one.place, decode(one.body)) for one in item_rows(tx, source, row.slice)]
        )
        for row in tx.select(SLICES, {"session": source})
    ]
    if changes:
        record_changes(tx, journal, target, changes, at=at, source=source)
    back = plan_slice_undo(tx, without, journal_range, into=target).changes.get(target)
    if back:
        record_changes(tx, journal, target, back, at=at, source=source)
