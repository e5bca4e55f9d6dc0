"""The store as history sees it: the few writes a call is made of, each a handful of rows in one transaction."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from mulligan.history.over_cap import GivingUp, changes_over_cap, coverage_of
from mulligan.history.projection import key_to_wire
from mulligan.history.roots import Found, Opening, plan_opening
from mulligan.history.scopes import Scopes
from mulligan.history.tables import CALLS, CHANGES, OPEN, ROOTS, TOUCHES, CallRow, OpenRow, RootRow, TouchRow
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.store.blobs import Blobs, Prepared
from mulligan.store.claims import CLAIMS, Wanted, blockers, claim, may_wait, release
from mulligan.store.journal import HEADS, Journal, Record
from mulligan.store.machine import host_here, known_host
from mulligan.store.protocol import Store, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, timestamp
from mulligan.values.digest import Digest
from mulligan.values.entries import (
    Change,
    Entry,
    FileEntry,
    change_to_json,
    entry_from_json,
    entry_to_json,
    is_change_withheld,
    is_never_recorded,
)
from mulligan.values.faults import Broken, fault
from mulligan.values.ids import CallId, IdSource, OwnerId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.limits import KIB_BYTES
from mulligan.values.paths import is_inside, to_wire
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused

CHANGES_PER_RECORD = 200
GROWTH_TOLD_BYTES = 64 * KIB_BYTES


@plain(slots=True, frozen=True)
class Facts:
    """What is known of a call when it begins."""

    id: CallId
    session: SessionId
    turn: TurnId
    root: RootId
    workspace: WorkspaceId
    label: str | None = None
    tool: str | None = None
    cause: Mapping[str, Any] | None = None
    observed: bool = False

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "call": self.id,
            "session": self.session,
            "turn": self.turn,
            "root": self.root,
            "workspace": self.workspace,
        }
        optional = {"label": self.label, "tool": self.tool, "cause": self.cause, "observed": self.observed or None}
        return body | {name: value for name, value in optional.items() if value is not None}


@plain(slots=True, frozen=True)
class Ending:
    """How a call ended: what it changed, what it could not capture, and what it did and answered on the way."""

    status: Literal["committed", "aborted"]
    changes: Sequence[Change] = ()
    reason: str | None = None
    coverage: Sequence[Mapping[str, str]] = ()
    effects: Sequence[Mapping[str, Any]] = ()
    handed_out: Iterable[Digest] = ()
    placed: bool = False
    """It has its place among everybody's even if no file changed: it has moved state."""
    strict: bool = False
    """Rather not at all than so that a part of it could not be undone."""

    def notes(self) -> dict[str, Any]:
        """The parts of the record that are not changes, without the empty ones."""
        body = {"reason": self.reason, "coverage": list(self.coverage), "effects": list(self.effects)}
        return {name: value for name, value in body.items() if value}


@plain(slots=True, frozen=True)
class Held:
    """What an open call has in the store besides its record: paths it touched, places it claimed."""

    paths: Sequence[bytes]
    places: Sequence[bytes]
    is_open: bool = True


class Claimed(Exception):
    """Somebody else's open calls are in the way."""

    def __init__(self, by: list[CallId], *, worth_waiting: bool) -> None:
        super().__init__(by)
        self.by = by
        self.worth_waiting = worth_waiting


class Ledger:
    """Thread-safe, like the store. Methods that take a `tx` are parts of a larger transaction."""

    def __init__(self, store: Store, journal: Journal, *, clock: Clock, ids: IdSource) -> None:
        self.store = store
        self.blobs = Blobs(store, clock)
        self.journal = journal
        self.clock = clock
        self.ids = ids
        self.keep_bounds: Callable[[SessionId, int], object] | None = None
        self._grown: dict[SessionId, int] = {}
        self._sessions: set[SessionId] = set()
        self._acting: dict[CallId, int] = {}
        self.doubts: list[Callable[[], bool]] = []
        self.inside: str | None = None
        """the call of another process whose command we are, as far as we are told"""
        self.joins: tuple[str, str | None] | None = None
        """a call of another store that ours are parts of, and where that store is"""

    def note_growth(self, session: SessionId, size_bytes: int) -> None:
        """Counted after commits, outside transactions; every so often whoever keeps the bounds is told."""
        self._grown[session] = self._grown.get(session, 0) + size_bytes
        if self._grown[session] >= GROWTH_TOLD_BYTES:
            self.tell_growth()

    def tell_growth(self) -> None:
        """What has not been told yet; at the latest when we close. A store that fails now has failed nobody's call."""
        while self._grown:
            session, grown = self._grown.popitem()
            if self.keep_bounds is not None and grown:
                with suppress(Broken):
                    self.keep_bounds(session, grown)

    def settle_doubts(self) -> None:
        """Calls whose commit had an unknown outcome: each asks the store again, and is forgotten once it knows."""
        if self.doubts:
            self.doubts = [settle for settle in self.doubts if not settle()]

    def now(self) -> str:
        return timestamp(self.clock)

    # Roots and sessions.

    def host(self) -> str:
        """The host id of this machine; "" if the store has not seen this machine."""
        with self.store.read() as tx:
            return known_host(tx, os.environ)

    def known_root(self, found: Found) -> RootRow | None:
        with self.store.read() as tx:
            return found.known_in(tx.select(ROOTS))

    def record_root(self, found: Found) -> RootRow:
        """The row of a root in which a process is about to work, recorded if the store does not have it like this."""
        with self.store.write() as tx:
            found, rows = replace(found, host=host_here(tx, os.environ)), tx.select(ROOTS)
            plan = plan_opening(found, rows, self.ids.new)
            row = self._put_root(tx, plan)
        if all(one.id != row.id for one in rows):
            self._tell_replaced(row, found.replaced_in(rows))
        return row

    def adopt_root(self, row: RootRow, earlier: RootRow) -> None:
        """Join the history of a root whose directory is gone with that of the directory that has its path now."""
        with self.store.write() as tx:
            current = tx.get(ROOTS, row.id) or row
            self._put_root(tx, Opening(replace(current, id=earlier.id), [current.workspace, earlier.workspace], {}))

    def _put_root(self, tx: Tx, opening: Opening) -> RootRow:
        # The one with the most history goes on: places in its order come after all that any of them gave before.
        joined = set(opening.joined) or {opening.row.workspace}
        first, *joining = sorted(joined, key=lambda one: (-newest_wseq(tx, one), one))
        row = replace(opening.row, workspace=first)
        body: dict[str, Any] = {
            "root": row.id,
            "workspace": first,
            "place": key_to_wire(row.place),
            "key": key_to_wire(row.key),
            "identity": row.identity,
            "host": row.host,
            "joins": joining,
        }
        if opening.keys:
            body["keys"] = {one: key_to_wire(key) for one, key in opening.keys.items()}
        self.journal.append(tx, workspace_journal(first), "root.opened", body, at=self.now())
        return row

    def _tell_replaced(self, row: RootRow, replaced: Sequence[RootRow]) -> None:
        for earlier in replaced[-1:]:
            import logging  # Hardly ever needed, and every process that opens a store would wait for it.

            words = "mulligan: %s is another directory than the one that had this path before, so it begins a history "
            words += "of its own. If it continues the earlier one, `mulligan store adopt %s` joins the two."
            path = row.place.decode("utf-8", "backslashreplace") or "/"
            logging.getLogger("mulligan.history").warning(words, path, earlier.id)

    def session(self, session: SessionId, root: RootRow, *, anonymous: bool = False) -> None:
        """Make sure the session is on record. Once it is, it stays: nothing takes a session off the record."""
        if session in self._sessions:
            return
        with self.store.read() as tx:
            if tx.has(SESSIONS, session):
                self._sessions.add(session)
                return
        with self.store.write() as tx:
            if not tx.has(SESSIONS, session):
                body = {"session": session, "root": root.id} | ({"anonymous": True} if anonymous else {})
                self.journal.append(tx, session_journal(session), "session.opened", body, at=self.now())

    # The steps of a call.

    def record_begin(self, tx: Tx, facts: Facts) -> None:
        """All there is to do for a call that ends in the same transaction."""
        self.journal.append(tx, session_journal(facts.session), "call.begun", facts.to_json(), at=self.now())

    def begin(self, tx: Tx, facts: Facts, owner: OwnerId) -> None:
        self.record_begin(tx, facts)
        tx.put(OPEN, OpenRow(facts.id, owner, facts.session, facts.root, int(facts.observed)))

    def claim(self, tx: Tx, call: CallId, wanted: Sequence[Wanted]) -> None:
        """All of them, or raise `Claimed`. The call has none of them as deep yet."""
        self.check_free(tx, call, wanted)
        claim(tx, call, wanted)

    def check_free(self, tx: Tx, call: CallId, wanted: Sequence[Wanted]) -> None:
        self.check_not_inside(tx, [one.place for one in wanted])
        # A claim of a call that is not open is void, whatever went wrong with it.
        blocking = [row for row in blockers(tx, call, wanted) if tx.has(OPEN, row.call)]
        if blocking:
            by = sorted({CallId(row.call) for row in blocking})
            raise Claimed(by, worth_waiting=may_wait(call, blocking))

    def check_not_inside(self, tx: Tx, places: Iterable[bytes]) -> None:
        """What we change in the root of the call around us is that call's doing; each would wait for the other."""
        around = None if self.inside is None else tx.get(OPEN, CallId(self.inside))
        root = None if around is None else tx.get(ROOTS, around.root)
        if root is not None and any(is_inside(place, root.place_of(b".")) for place in places):
            words = f"This process is part of call {self.inside}; only `mulligan call`, `exec` and `run` join it."
            raise Refused("error", "path_claimed", words, claimed_by=[self.inside])

    def last_seen(self, tx: Tx, place: bytes) -> Entry | None:
        """What a place held after the newest change anybody recorded there; None if nobody ever did."""
        rows = tx.select(CHANGES, {"place": place}, order=("wseq",), descending=True, limit=1)
        return entry_from_json(decode(rows[0].after)) if rows else None

    def external(self, tx: Tx, root: RootRow, changes: Sequence[Change], *, bodies: Iterable[Prepared] = ()) -> str:
        """Record changes that no call of ours made. They get their place among everybody's, before ours.

        Of a path under `capture.never` nothing is recorded; "" if there is nothing else.
        """
        changes = [change for change in changes if not is_never_recorded(change)]
        if not changes:
            return ""
        for prepared in bodies:
            self.blobs.put(tx, prepared)
        identifier, workspace = self.ids.new(), _workspace_now(tx, root.id)
        body = {
            "id": identifier,
            "root": root.id,
            "workspace": workspace,
            "changes": [change_to_json(change) for change in changes],
        }
        refs = digests_of(changes)
        self.journal.append(tx, workspace_journal(workspace), "external", body, at=self.now(), refs=refs)
        return identifier

    def touch(self, tx: Tx, row: TouchRow, bodies: Iterable[Prepared]) -> None:
        for prepared in bodies:
            self.blobs.put(tx, prepared)
        tx.put(TOUCHES, row)

    def end(self, tx: Tx, facts: Facts, ending: Ending, *, held: Held | None = None) -> Record:
        """The one end of a call: its changes get their place in the workspace, its claims are free.

        `held`: what the call knows it has in the store; without it, that is looked up.
        """
        ending = _without_withheld(ending)
        given_up = changes_over_cap(tx, facts.session, ending.changes)
        if given_up:
            ending = self._without_some(facts, ending, given_up)
        body: dict[str, Any] = {"call": facts.id, "status": ending.status, "root": facts.root}
        at = self.now()
        if ending.changes or ending.placed:
            committed = {"call": facts.id, "session": facts.session}
            place = self.journal.append(
                tx, workspace_journal(_workspace_now(tx, facts.root)), "committed", committed, at=at
            )
            body["wseq"], at = place.seq, place.at
        body |= ending.notes()
        if facts.cause is not None and "of" in facts.cause:
            # A reader who follows the journal learns here which calls were undone, without looking up the begin.
            body["cause"] = facts.cause
        journal = session_journal(facts.session)
        *early, last = _chunks(ending.changes)
        for chunk in early:
            part = {"call": facts.id, "root": facts.root, "wseq": body["wseq"], "changes": _as_json(chunk)}
            self.journal.append(tx, journal, "call.changed", part, at=at, refs=digests_of(chunk))
        body["changes"] = _as_json(last)
        refs = digests_of(last) | set(ending.handed_out)
        record = self.journal.append(tx, journal, "call.ended", body, at=at, refs=refs)
        if ending.changes and facts.label is not None:
            self.scopes(tx, facts.session).capture_of_call(facts.label, facts.root, ending.changes)
        self._let_go(tx, facts.id, held)
        if given_up:
            giving_up = GivingUp(facts.id, facts.session, ending.changes, given_up)
            giving_up.apply_in(tx, self.journal, at=at)
        return record

    def scopes(self, tx: Tx, session: SessionId) -> Scopes:
        return Scopes(tx, self.journal, session, self.now())

    def _without_some(self, facts: Facts, ending: Ending, given_up: Sequence[Change]) -> Ending:
        """Said on record, unless the call is only wanted if all of it can be undone."""
        if ending.strict:
            paths = [to_wire(change.path) for change in given_up]
            words = f"Call {facts.id} changes more bytes than its session may keep; it was asked to be strict."
            raise fault("not_undoable", words, call=facts.id, paths=paths)
        return replace(ending, coverage=[*ending.coverage, *coverage_of(given_up)])

    def _let_go(self, tx: Tx, call: CallId, held: Held | None = None) -> None:
        self.has_acted(call)
        if held is None or held.is_open:
            tx.delete(OPEN, call)
        if held is None:
            release(tx, call)
        paths = [touch.path for touch in tx.select(TOUCHES, {"call": call})] if held is None else held.paths
        for path in paths:
            tx.delete(TOUCHES, call, path)
        for place in () if held is None else held.places:
            tx.delete(CLAIMS, place)

    def check_ours(self, tx: Tx, call: CallId, owner: OwnerId) -> None:
        """Refuse to end a call that somebody else has ended for us."""
        row = tx.get(OPEN, call)
        if row is None or row.owner != owner:
            raise fault("call_lost", f"Call {call} was ended by another process; nothing was committed.", call=call)

    def how_it_stands(self, call: CallId, owner: OwnerId) -> str:
        """`ours` or `lost` while it is open, else its status; `unknown` before it is on record."""
        with self.store.read() as tx:
            row, shown = tx.get(OPEN, call), tx.get(CALLS, call)
        if row is not None:
            return "ours" if row.owner == owner else "lost"
        return "unknown" if shown is None else shown.status

    def note_acting(self, call: CallId, thread: int) -> None:
        """Until it ends: it was made on that thread, which will end it."""
        self._acting[call] = thread

    def has_acted(self, call: CallId) -> None:
        self._acting.pop(call, None)

    def acts_here(self, calls: Iterable[CallId]) -> bool:
        """Whether one of them is to be ended by this very thread, so that nobody would while it waits."""
        return any(self._acting.get(call) == threading.get_ident() for call in calls)

    def any_open(self) -> bool:
        with self.store.read() as tx:
            return bool(tx.select(OPEN, limit=1))

    def any_dead(self, calls: Iterable[CallId]) -> bool:
        """Whether a call is still open though its process is gone."""
        with self.store.read() as tx:
            owners = {row.owner for call in calls if (row := tx.get(OPEN, call)) is not None}
        return any(self.store.is_alive(OwnerId(owner)) is False for owner in owners)

    def has_ended(self, call: CallId) -> bool:
        with self.store.read() as tx:
            row = tx.get(CALLS, call)
        return row is not None and row.status != "open"

    def call_row(self, call: CallId) -> CallRow:
        with self.store.read() as tx:
            row = tx.get(CALLS, call)
        if row is None:
            raise fault("unknown_call", f"There is no call {call}. `mulligan log` lists them.", call=call)
        return row


def _workspace_now(tx: Tx, root: str) -> str:
    """Where a root belongs: opening a root around it may have moved it since we looked."""
    row = tx.get(ROOTS, root)
    assert row is not None, "a root is recorded before anything in it changes"
    return row.workspace


def workspace_journal(workspace: str) -> str:
    return f"w:{workspace}"


def digests_of(changes: Iterable[Change]) -> set[Digest]:
    """Every body the changes need. Of a path that is not captured the store has none."""
    entries = (entry for change in changes for entry in (change.before, change.after))
    return {entry.digest for entry in entries if isinstance(entry, FileEntry) and entry.withheld is None}


def withheld_notes(changes: Iterable[Change]) -> list[dict[str, str]]:
    """What coverage says of changes whose bytes are not captured."""
    paths = [change.path for change in changes if is_change_withheld(change)]
    return [{"path": to_wire(path), "reason": "not_captured"} for path in paths]


def _without_withheld(ending: Ending) -> Ending:
    """Paths that are not captured are named in coverage; under `capture.never` that is all there is of them."""
    notes = [note for note in withheld_notes(ending.changes) if note not in ending.coverage]
    if not notes:
        return ending
    changes = [change for change in ending.changes if not is_never_recorded(change)]
    return replace(ending, changes=changes, coverage=[*ending.coverage, *notes])


def _as_json(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [change_to_json(change) for change in changes]


def _chunks(changes: Sequence[Change]) -> list[Sequence[Change]]:
    return [changes[i : i + CHANGES_PER_RECORD] for i in range(0, len(changes), CHANGES_PER_RECORD)] or [()]


def newest_wseq(tx: Tx, workspace: str) -> int:
    """The last place that was given to a change in a workspace."""
    head = tx.get(HEADS, workspace_journal(workspace))
    return 0 if head is None else head.seq


def touch_row(call: CallId, path: bytes, root: RootRow, *, ordinal: int, before: Entry) -> TouchRow:
    return TouchRow(call, path, ordinal, root.place_of(path), entry_bytes(before), b"[]", b"[]", 0)


def entry_bytes(entry: Entry) -> bytes:
    return encode(entry_to_json(entry))


def intending(row: TouchRow, entry: Entry, draft: bytes, *, in_place: bool) -> TouchRow:
    """The row with one more thing the call means to put there. Nothing it ever meant is forgotten."""
    intended, drafts = _with(row.intended, entry_bytes(entry)), _with(row.drafts, b'"' + draft + b'"')
    stays = int(in_place or row.in_place)
    return TouchRow(row.call, row.path, row.ordinal, row.place, row.before, intended, drafts, stays)


def meant_to_stay(row: TouchRow, draft: bytes) -> TouchRow:
    """The first row of a path that somebody else is about to change: all we mean is what is there."""
    intended, drafts = b"[" + row.before + b"]", b'["' + draft + b'"]'
    return TouchRow(row.call, row.path, row.ordinal, row.place, row.before, intended, drafts, 1)


def _with(listed: bytes, item: bytes) -> bytes:
    """A JSON list with an item added to its end, unless it is in it already. Both are canonical, so bytes will do."""
    if item in listed:
        return listed
    return listed[:-1] + (b"," if len(listed) > 2 else b"") + item + b"]"
