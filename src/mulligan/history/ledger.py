"""The writes that a call consists of: each is a handful of rows in one transaction."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

from mulligan.history.cause import WORK, Cause, UndoOperation, cause_to_json
from mulligan.history.retention import (
    PathEviction,
    cap_of,
    changes_over_cap,
    coverage_of,
    digests_of,
    drop_body,
    droppable,
    holder_of_scope,
)
from mulligan.history.tables import (
    CALLS,
    CAPTURES,
    CHANGES,
    OBSERVED,
    OBSERVED_WHILE_FULL,
    OPEN,
    ROOTS,
    SCOPES,
    TOUCHES,
    CallRow,
    OpenRow,
    OtherSpools,
    RootRow,
    SpooledPreimage,
    TouchRow,
    before_of,
    spool_path,
    spooled_calls,
    standing_in,
    workspace_journal,
)
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.store.blobs import Blobs, BlobVanishedError, Prepared
from mulligan.store.host import known_host
from mulligan.store.journal import HEADS, Journal, Record
from mulligan.store.protocol import CLAIMS, SPOOL, Claim, ClaimRow, Store, Tx, blockers, claim, may_wait, release
from mulligan.values.canonical import encode
from mulligan.values.clock import Clock, parse_timestamp, timestamp
from mulligan.values.digest import Digest
from mulligan.values.entries import (
    Change,
    Entry,
    FileEntry,
    change_to_json,
    entry_from_bytes,
    entry_to_json,
    is_change_withheld,
    is_never_recorded,
)
from mulligan.values.errors import InternalError, MulliganError, Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import CallId, IdSource, OwnerId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.limits import BLOB_BATCH_BYTES, KIB_BYTES
from mulligan.values.paths import RepoPath, is_inside, path_bytes, to_wire

# A record is read and verified as a whole, so its size has a limit.
CHANGES_PER_RECORD = 200
_CAPTURES_PER_RECORD = 200
_PREIMAGES_PER_BATCH = 250
GROWTH_TOLD_BYTES = 64 * KIB_BYTES
STORE_FULL = {"path": ".", "reason": "store_full"}
"""The gap in the coverage of a call during which the store was full."""


@fast_dataclass(slots=True, frozen=True)
class Facts:
    """The facts of a call that are fixed when it begins."""

    id: CallId
    session: SessionId
    turn: TurnId
    root: RootId
    workspace: WorkspaceId
    label: str | None = None
    tool: str | None = None
    cause: Cause = WORK
    observed: bool = False

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "call": self.id,
            "session": self.session,
            "turn": self.turn,
            "root": self.root,
            "workspace": self.workspace,
        }
        for name, value in (("label", self.label), ("tool", self.tool)):
            if value is not None:
                body[name] = value
        if self.cause is not WORK:
            body["cause"] = cause_to_json(self.cause)
        return body | {"observed": True} if self.observed else body


def facts_of(row: CallRow) -> Facts:
    """The facts of a call that another process has begun, for the record of its end."""
    session, turn, root = SessionId(row.session or ""), TurnId(row.turn), RootId(row.root)
    workspace, observed = WorkspaceId(row.workspace), bool(row.observed)
    return Facts(CallId(row.id), session, turn, root, workspace, label=row.label, observed=observed)


@fast_dataclass(slots=True, frozen=True)
class Ending:
    """The end of a call: what it changed, what it could not capture, its effects and its answers."""

    status: Literal["committed", "aborted"]
    changes: Sequence[Change] = ()
    reason: str | None = None
    coverage: Sequence[Mapping[str, str]] = ()
    effects: Sequence[Mapping[str, Any]] = ()
    handed_out: Iterable[Digest] = ()
    placed: bool = False
    """It gets a position in the workspace even if no file changed, because it changed the session's state."""
    strict: bool = False
    """Raise, instead of committing changes of which a part could not be undone."""

    def add_notes(self, body: dict[str, Any]) -> None:
        """The parts of the record that are not changes, without the empty ones."""
        if self.reason:
            body["reason"] = self.reason
        if self.coverage:
            body["coverage"] = list(self.coverage)
        if self.effects:
            body["effects"] = list(self.effects)


@fast_dataclass(slots=True, frozen=True)
class Held:
    """The rows of an open call besides its record: the paths it touched, the places it claimed."""

    paths: list[bytes]
    places: list[bytes]
    is_open: bool


@fast_dataclass(slots=True, frozen=True)
class Scopes:
    """The scopes of one session, inside a transaction."""

    tx: Tx
    journal: Journal
    session: SessionId
    at: str

    def capture(self, scope: str, root: str, befores: Mapping[RepoPath, Entry]) -> dict[RepoPath, Entry]:
        """Open the scope, or add to it. Returns what it took: the paths that it did not have yet.

        The store has the bodies already.
        """
        tx, session = self.tx, self.session
        fresh = {
            path: one
            for path, one in befores.items()
            if one.withheld is None and not tx.has(CAPTURES, session, scope, path_bytes(path))
        }
        # In several records, so that none grows without a limit.
        rest = iter(fresh.items())
        some = list(islice(rest, _CAPTURES_PER_RECORD))
        # An empty scope, too, needs a record that opens it.
        while some or not tx.has(SCOPES, session, scope):
            self._record(scope, root, some)
            some = list(islice(rest, _CAPTURES_PER_RECORD))
        self.evict_over_cap(keep=scope)
        return fresh

    def _record(self, scope: str, root: str, befores: Sequence[tuple[RepoPath, Entry]]) -> None:
        body = {
            "session": self.session,
            "scope": scope,
            "root": root,
            "captured": [{"path": to_wire(path), "before": entry_to_json(entry)} for path, entry in befores],
            "taken_at_ms": int(parse_timestamp(self.at).timestamp() * 1000),
        }
        refs = {entry.digest for _, entry in befores if isinstance(entry, FileEntry)}
        self.journal.append(self.tx, session_journal(self.session), "scope.captured", body, at=self.at, refs=refs)

    def drop(self, scope: str, *, why: str) -> None:
        """Drop a scope and the bodies that nothing else needs; the record names them."""
        captures = self.tx.select(CAPTURES, {"session": self.session, "scope": scope})
        named = {entry.digest for entry in map(before_of, captures) if isinstance(entry, FileEntry)}
        gone = droppable(self.tx, named, holder=holder_of_scope(self.session, scope))
        body = {"session": self.session, "scope": scope, "why": why} | ({"digests": gone} if gone else {})
        self.journal.append(self.tx, session_journal(self.session), "scope.dropped", body, at=self.at)
        for digest in gone:
            drop_body(self.tx, digest)

    def evict_over_cap(self, *, keep: str | None) -> None:
        """Evict scopes in order of insertion, but not `keep`, which is being written. Shared bytes count once."""
        cap = cap_of(self.tx, self.session)
        rows = sorted(self.tx.select(SCOPES, {"session": self.session}), key=lambda row: row.seq)
        bodies = {row.scope: self._bodies_of(row.scope) for row in rows}
        # A body that several scopes hold becomes free with the last of them.
        holders = Counter(digest for held in bodies.values() for digest in held)
        total = sum({digest: size for held in bodies.values() for digest, size in held.items()}.values())
        for row in rows:
            if total <= cap:
                return
            if row.scope != keep:
                self.drop(row.scope, why="evicted")
                holders.subtract(bodies[row.scope].keys())
                total -= sum(size for digest, size in bodies[row.scope].items() if not holders[digest])

    def _bodies_of(self, scope: str) -> dict[Digest, int]:
        """The size of each distinct body that a scope holds."""
        captures = self.tx.select(CAPTURES, {"session": self.session, "scope": scope})
        return {entry.digest: entry.size for entry in map(before_of, captures) if isinstance(entry, FileEntry)}


class Claimed(Exception):
    """Other open calls have claimed these places."""

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
        self.now: Callable[[], str] = partial(timestamp, clock)
        self.ids = ids
        self.keep_bounds: Callable[[SessionId, int], object] | None = None
        self._grown: dict[SessionId, int] = {}
        self.sessions: set[SessionId] = set()
        """the sessions that are known to be recorded"""
        self.acting: dict[CallId, int] = {}
        """open calls, each with the thread on which it was made and which will end it"""
        self.doubts: list[Callable[[], bool]] = []
        self._spools: OtherSpools | None = None
        self.inside: str | None = None
        """the call of another process that runs this process as a command, if the environment names one"""
        self.joins: tuple[str, Mapping[str, str]] | None = None
        """a call of another store that our calls are parts of, and the variables by which a child finds that store"""

    def note_growth(self, session: SessionId, size_bytes: int) -> None:
        """Count the bytes that a commit added; now and then retention gets the sum."""
        # In memory, because a count in the store would cost each commit one more row.
        self._grown[session] = self._grown.get(session, 0) + size_bytes
        if self._grown[session] >= GROWTH_TOLD_BYTES:
            self.tell_growth()

    def tell_growth(self) -> None:
        """Give retention the counted bytes; also at close. A failing store must not fail a call here."""
        while self._grown:
            session, grown = self._grown.popitem()
            if self.keep_bounds is not None and grown:
                with suppress(InternalError):
                    self.keep_bounds(session, grown)

    def settle_doubts(self) -> None:
        """Settle the calls whose commit had an unknown outcome: ask the store again, and forget those that it answers
        for.
        """
        if self.doubts:
            self.doubts = [settle for settle in self.doubts if not settle()]

    # Hosts and sessions.

    def host(self) -> str:
        """The host id of this machine; "" if the store has not seen this machine."""
        with self.store.read() as tx:
            return known_host(tx, os.environ)

    def session(self, session: SessionId, root: RootRow, *, anonymous: bool = False) -> None:
        """Record the session if it is not recorded. A recorded session is never deleted."""
        if session in self.sessions:
            return
        # Look outside a write transaction first: most sessions are recorded, and so writers do not wait.
        with self.store.read() as tx:
            if tx.has(SESSIONS, session):
                self.sessions.add(session)
                return
        journal = session_journal(session)
        with self.store.write(about=(journal,)) as tx:
            if not tx.has(SESSIONS, session):
                body = {"session": session, "root": root.id} | ({"anonymous": True} if anonymous else {})
                self.journal.append(tx, journal, "session.opened", body, at=self.now())

    # The steps of a call.

    def record_begin(self, tx: Tx, facts: Facts) -> None:
        """Write the begin record; nothing else is needed if the call ends in the same transaction."""
        self.journal.append(tx, session_journal(facts.session), "call.begun", facts.to_json(), at=self.now())

    def begin(self, tx: Tx, facts: Facts, owner: OwnerId) -> None:
        self.record_begin(tx, facts)
        tx.put(OPEN, OpenRow(facts.id, owner, facts.session, facts.root, OBSERVED if facts.observed else 0))

    def note_store_full(self, call: CallId) -> None:
        """Note that the store was full while an observed call ran: the process that ends the call lists `store_full`.

        One small row mostly fits where the content of a file does not. If it does not, recovery tries again.
        """
        with suppress(MulliganError), self.store.write() as tx:
            # Only observed calls can lose something to a full store; our own calls refuse the change instead.
            row = tx.get(OPEN, call)
            if row is not None and row.observed:
                tx.put(OPEN, replace(row, observed=OBSERVED_WHILE_FULL))

    def claim(self, tx: Tx, call: CallId, wanted: Sequence[Claim]) -> None:
        """Claim all places, or raise `Claimed`. The call has no equally deep claim on them yet."""
        self.check_free(tx, call, wanted)
        claim(tx, call, wanted)

    def check_free(self, tx: Tx, call: CallId, wanted: Sequence[Claim]) -> None:
        if self.inside is not None:
            self.check_not_inside(tx, [one.place for one in wanted])
        # No two calls may change one path, nor one call a folder and another call something below it.
        blocking = blockers(tx, call, wanted)
        if blocking:
            # A claim whose call is not open is void; it is left over from an error.
            blocking = [row for row in blocking if tx.has(OPEN, row.call) and self._is_claimed(row, wanted)]
        if blocking:
            by = sorted({CallId(row.call) for row in blocking})
            raise Claimed(by, worth_waiting=may_wait(call, blocking))

    def _is_claimed(self, row: ClaimRow, wanted: Sequence[Claim]) -> bool:
        """Whether the row claims one of these places. The call of a spool learns that others claim places now."""
        if not row.place.startswith(SPOOL):
            return True
        assert self.store.directory is not None, "only a store with a directory has spools"
        if self._spools is None:
            self._spools = OtherSpools(self.store.directory)
        places = self._spools.claims_of(row.call)
        deep = tuple(one.place + b"/" for one in wanted if one.deep)
        if deep and any(place.startswith(deep) for place in places):
            return True
        return any(one.place in places for one in wanted)

    def touches_of(self, tx: Tx, call: str) -> list[TouchRow]:
        """The paths that an open call has touched, those in its spool included."""
        rows = tx.select(TOUCHES, {"call": call})
        directory = self.store.directory
        if directory is None or not os.path.exists(spool_path(directory, call)):
            return rows
        known = {row.path for row in rows}
        return rows + [one.row for one in standing_in(spool_path(directory, call)) if one.row.path not in known]

    def store_preimages(self, preimages: Iterable[SpooledPreimage]) -> None:
        """Store preimages of a spool, with their rows, in transactions of at most 8 MB or 250 files."""
        batch, size = list[SpooledPreimage](), 0
        for one in preimages:
            batch.append(one)
            size += len(one.content or b"")
            if len(batch) == _PREIMAGES_PER_BATCH or size > BLOB_BATCH_BYTES:
                self._store_batch(batch)
                batch, size = [], 0
        if batch:
            self._store_batch(batch)

    def _store_batch(self, batch: Sequence[SpooledPreimage]) -> None:
        while True:
            bodies = [self.blobs.prepare(one.content) for one in batch if one.content is not None]
            with suppress(BlobVanishedError), self.store.write() as tx:
                for body in bodies:
                    self.blobs.put(tx, body)
                for one in batch:
                    # The row may be there: the call may have changed the path again, after the command.
                    if not tx.has(TOUCHES, one.row.call, one.row.path):
                        tx.put(TOUCHES, one.row)
                return

    def check_not_inside(self, tx: Tx, places: Iterable[bytes]) -> None:
        """Refuse to change files in the root of the outer call around this process: each would wait for the other."""
        # The outer call holds claims until this process ends, and this process would wait for those claims.
        around = None if self.inside is None else tx.get(OPEN, CallId(self.inside))
        root = None if around is None else tx.get(ROOTS, around.root)
        if root is not None and any(is_inside(place, root.place_of(b".")) for place in places):
            words = (
                f"This process runs in call {self.inside}; in it, only `mulligan call`, `exec` and `run` change files."
            )
            raise Refused("error", "path_claimed", words, claimed_by=[self.inside])

    def last_seen(self, tx: Tx, place: bytes) -> Entry | None:
        """What a place held after its newest recorded change; None if no change is recorded."""
        # By position, not by time: two calls may end in the same millisecond.
        rows = tx.select(CHANGES, {"place": place}, order=("wseq",), descending=True, limit=1)
        return entry_from_bytes(rows[0].after) if rows else None

    def external(
        self,
        tx: Tx,
        root: RootRow,
        changes: Sequence[Change],
        *,
        bodies: Iterable[Prepared] = (),
        cause: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Record changes that no call made. They get their position in the workspace before the call's own.

        `cause`: `reason` says what the changes were, `undoes` and `redoes` which calls they undid or restored.
        Of a path under `capture.never` nothing is recorded; "" if there is nothing else.
        """
        # Not even the name of such a path may enter the store.
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
            **{name: value for name, value in cause.items() if value},
        }
        refs = digests_of(changes)
        self.journal.append(tx, workspace_journal(workspace), "external", body, at=self.now(), refs=refs)
        return identifier

    def touch(self, tx: Tx, row: TouchRow, bodies: Iterable[Prepared]) -> None:
        for prepared in bodies:
            self.blobs.put(tx, prepared)
        tx.put(TOUCHES, row)

    def end(self, tx: Tx, facts: Facts, ending: Ending, *, held: Held | None = None) -> Record:
        """End a call: give its changes their position in the workspace, and release its claims.

        `held`: the rows that the call knows it has in the store; without it, they are looked up.
        """
        for change in ending.changes:
            if change.before.withheld is not None or change.after.withheld is not None:
                ending = _without_withheld(ending)
                break
        # Asked at the end, because only now it is known what the call has changed.
        given_up = changes_over_cap(tx, facts.session, ending.changes)
        if given_up:
            ending = self._without_some(facts, ending, given_up)
        body: dict[str, Any] = {"call": facts.id, "status": ending.status, "root": facts.root}
        at = self.now()
        if ending.changes or ending.placed:
            committed = {"call": facts.id, "session": facts.session}
            # Opening a root around this one may have moved it to another workspace since the call began.
            root = tx.get(ROOTS, facts.root)
            assert root is not None, "a root is recorded before anything in it changes"
            place = self.journal.append(tx, workspace_journal(root.workspace), "committed", committed, at=at)
            body["wseq"], at = place.seq, place.at
        ending.add_notes(body)
        if isinstance(facts.cause, UndoOperation):
            # The end record repeats the cause, so that a reader of the journal sees which calls were undone.
            body["cause"] = cause_to_json(facts.cause)
        journal = session_journal(facts.session)
        # A record is read as a whole, so the changes of a large command are split over several.
        last = ending.changes
        while len(last) > CHANGES_PER_RECORD:
            chunk, last = last[:CHANGES_PER_RECORD], last[CHANGES_PER_RECORD:]
            told = list(map(change_to_json, chunk))
            part = {"call": facts.id, "root": facts.root, "wseq": body["wseq"], "changes": told}
            self.journal.append(tx, journal, "call.changed", part, at=at, refs=digests_of(chunk))
        # The last part is in the end record itself, so most calls need only one record.
        body["changes"] = list(map(change_to_json, last))
        refs = digests_of(last) | set(ending.handed_out)
        record = self.journal.append(tx, journal, "call.ended", body, at=at, refs=refs)
        if ending.changes and facts.label is not None:
            # A call's label is the id of its scope: if there is one in this root, it takes what the call changed.
            scope, captured_at = tx.get(SCOPES, facts.session, facts.label), self.now()
            if scope is not None and scope.root == facts.root:
                befores = {change.path: change.before for change in ending.changes}
                Scopes(tx, self.journal, facts.session, captured_at).capture(facts.label, facts.root, befores)
        # In the transaction that ends the call: other calls see its changes and its free paths at once.
        self._let_go(tx, facts.id, held)
        if given_up:
            giving_up = PathEviction(facts.id, facts.session, ending.changes, given_up)
            giving_up.apply_in(tx, self.journal, at=at)
        return record

    def scopes(self, tx: Tx, session: SessionId) -> Scopes:
        return Scopes(tx, self.journal, session, self.now())

    def _without_some(self, facts: Facts, ending: Ending, given_up: Sequence[Change]) -> Ending:
        """Drop bytes over the cap from the end record and say so; raise if the call is `strict`."""
        if ending.strict:
            paths = [to_wire(change.path) for change in given_up]
            words = f"Call {facts.id} changes more bytes than its session may keep, and the caller wants a strict call."
            raise fault("not_undoable", words, call=facts.id, paths=paths)
        return replace(ending, coverage=[*ending.coverage, *coverage_of(given_up)])

    def _let_go(self, tx: Tx, call: CallId, held: Held | None = None) -> None:
        self.acting.pop(call, None)
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
        """Raise `call_lost` if another process has ended this call."""
        row = tx.get(OPEN, call)
        if row is None or row.owner != owner:
            raise fault("call_lost", f"Call {call} was ended by another process; nothing was committed.", call=call)

    def status_of(self, call: CallId, owner: OwnerId) -> str:
        """`ours` or `lost` while it is open, else its status; `unknown` before it is on record."""
        with self.store.read() as tx:
            # Both in one transaction, because the call may end at any moment.
            row, shown = tx.get(OPEN, call), tx.get(CALLS, call)
        if row is not None:
            return "ours" if row.owner == owner else "lost"
        return "unknown" if shown is None else shown.status

    def acts_here(self, calls: Iterable[CallId]) -> bool:
        """Whether this very thread has one of these calls open, so that waiting for it would never end."""
        return any(self.acting.get(call) == threading.get_ident() for call in calls)

    def any_spool(self) -> bool:
        return self.store.directory is not None and bool(spooled_calls(self.store.directory))

    def any_open(self) -> bool:
        with self.store.read() as tx:
            return bool(tx.select(OPEN, limit=1))

    def any_dead(self, calls: Iterable[CallId]) -> bool:
        """Whether a call is still open though its process is gone."""
        with self.store.read() as tx:
            # An owner is a process; its lock tells whether it lives.
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
    """The workspace of a root now: opening a root around it may have moved it since we read the row."""
    row = tx.get(ROOTS, root)
    assert row is not None, "a root is recorded before anything in it changes"
    return row.workspace


def withheld_notes(changes: Iterable[Change]) -> list[dict[str, str]]:
    """The gaps for changes whose bytes are not captured."""
    paths = [change.path for change in changes if is_change_withheld(change)]
    return [{"path": to_wire(path), "reason": "not_captured"} for path in paths]


def _without_withheld(ending: Ending) -> Ending:
    """Move uncaptured paths from the changes to the coverage; under `capture.never` nothing else of them is recorded.

    A call that changed nothing else still has its position in history: undo must name it, not undo an earlier call.
    """
    notes = [note for note in withheld_notes(ending.changes) if note not in ending.coverage]
    changes = [change for change in ending.changes if not is_never_recorded(change)]
    return replace(ending, changes=changes, coverage=[*ending.coverage, *notes], placed=True)


def newest_wseq(tx: Tx, workspace: str) -> int:
    """The last position that a change in a workspace got."""
    head = tx.get(HEADS, workspace_journal(workspace))
    return 0 if head is None else head.seq


def touch_row(call: CallId, path: bytes, root: RootRow, *, ordinal: int, before: Entry) -> TouchRow:
    return TouchRow(call, path, ordinal, root.place_of(path), entry_bytes(before), b"[]", b"[]", 0)


def entry_bytes(entry: Entry) -> bytes:
    return encode(entry_to_json(entry))


def intending(row: TouchRow, entry: Entry, draft: bytes, *, in_place: bool) -> TouchRow:
    """The row with one more intended entry. A row never loses an intended entry."""
    listed, quoted = entry_bytes(entry), b'"' + draft + b'"'
    # Built from bytes: parsing and writing JSON for each path would slow down every small write.
    if row.intended == b"[]":
        intended, drafts = b"[" + listed + b"]", b"[" + quoted + b"]"
    else:
        intended, drafts = _with(row.intended, listed), _with(row.drafts, quoted)
    stays = int(in_place or row.in_place)
    return TouchRow(row.call, row.path, row.ordinal, row.place, row.before, intended, drafts, stays)


def meant_to_stay(row: TouchRow, draft: bytes) -> TouchRow:
    """The first row of a path that a command is about to change: the only intended entry is the present one."""
    intended, drafts = b"[" + row.before + b"]", b'["' + draft + b'"]'
    return TouchRow(row.call, row.path, row.ordinal, row.place, row.before, intended, drafts, 1)


def _with(listed: bytes, item: bytes) -> bytes:
    """A JSON list with an item appended, unless it has it already. Both are canonical, so comparing bytes is enough."""
    if item in listed:
        return listed
    return listed[:-1] + (b"," if len(listed) > 2 else b"") + item + b"]"
