"""The base of the other modules of a session: access to it, its facts, its forks, and positions in its journal.

- `SessionAccess` checks that a session is open and appends to its journal. `LiveSessions` keeps the session objects
  that this process used last; a session that leaves memory is still in the store.
- Facts are small named values: the system prompt, the scratchpad, the pins. A fork inherits its parent's facts. A reset
  removes `RESET_FACTS` and keeps the others.
- Forks share the messages from before the fork; `ancestry_in` follows the parents up to the first session.
- Calls, turns and messages are records of one journal, so each of them is a position in the transcript. The functions
  find it without an index: times never run backwards in a journal, so a binary search finds the record of a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from mulligan.session.messages import is_continuable
from mulligan.session.subscribers import wake_subscribers
from mulligan.session.tables import (
    APPENDED,
    BOUNDARIES,
    FACTS,
    INSERTED,
    SESSIONS,
    InheritedEvents,
    MessageSpan,
    SessionRow,
    Window,
    inherited_from_json,
    length,
    normal,
    part,
    place_of,
    session_journal,
    spans_to_json,
    transcript_row,
    window_row,
    without,
)
from mulligan.session.transcript_log import (
    Archive,
    Message,
    entries_of,
    head_of,
    id_of,
    number_at,
    run_holding,
    seq_of,
    window_at,
    window_of,
)
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.journal import RECORDS, Record, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, parse_user_id
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import is_inside

# The close status of a deleted session.
DELETED = "deleted"

_PAGE, _END = 200, 2**62


class SessionAccess:
    """One session in the store. Its transcript, its clients and its roots read and write it through this object."""

    def __init__(
        self, archive: Archive, session: SessionId, root: str, *, check_usable: Callable[[], None] = lambda: None
    ) -> None:
        self.id = session
        self.archive = archive
        self.root = root
        self._check_usable = check_usable

    def check_open(self, tx: Tx, verb: str) -> SessionRow:
        """Raises `session_not_found` or `session_closed`, or what `check_usable` raises for a closed workspace."""
        self._check_usable()
        return check_open(tx, self.id, verb)

    @contextmanager
    def read(self, verb: str) -> Iterator[Tx]:
        """A transaction that reads. Raises like `check_open`."""
        with self.archive.store.read() as tx:
            self.check_open(tx, verb)
            yield tx

    @contextmanager
    def write(self, verb: str, *, about_others: bool = False) -> Iterator[Tx]:
        """A transaction that writes. Raises like `check_open`. Subscribers receive the new records after the commit.

        `about_others`: it writes about other sessions too.
        """
        with self.archive.store.write(about=None if about_others else (session_journal(self.id),)) as tx:
            self.check_open(tx, verb)
            yield tx
        wake_subscribers(self.archive.store)

    def append(self, tx: Tx, kind: str, body: Mapping[str, Any]) -> None:
        self.archive.journal.append(tx, session_journal(self.id), kind, body, at=self.archive.now())


def session_in(tx: Tx, session: object) -> SessionRow | None:
    """A session, open or closed; None if there is none with this id, or if no store could hold the id."""
    try:
        return tx.get(SESSIONS, session) if isinstance(session, str) else None
    except UnicodeEncodeError:
        return None


def is_deleted(tx: Tx, session: SessionId) -> bool:
    """Whether a session was deleted: its newest `session.closed` record has that status."""
    row, upper = session_in(tx, session), _END
    while row is not None and row.closed_at is not None:
        between = ("seq", 0, upper)
        page = tx.select(RECORDS, {"journal": session_journal(session)}, between=between, descending=True, limit=_PAGE)
        for record in map(parse_record, page):
            if record.kind == "session.closed":
                return bool(record.payload["event"].get("metadata", {}).get("status") == DELETED)
        if len(page) < _PAGE:
            break
        upper = page[-1].seq
    return False


def check_open(tx: Tx, session: SessionId, verb: str) -> SessionRow:
    """Raise `session_not_found` or `session_closed`, naming the verb and the id."""
    return check_row_open(session_in(tx, session), session, verb)


def check_row_open(row: SessionRow | None, session: SessionId, verb: str) -> SessionRow:
    if row is None:
        raise fault("session_not_found", f"{verb}: there is no session {session!r}.", session=session, verb=verb)
    if row.closed_at is not None:
        words = f"{verb}: session {session!r} is closed; open it again to continue it."
        raise fault("session_closed", words, session=session, verb=verb)
    return row


LIVE_SESSIONS = 128
S = TypeVar("S")


class LiveSessions(Generic[S]):
    """At most `cap` session objects. Opening one more drops the one that was used longest ago.

    A dropped object is returned again for its id while other code refers to it, or if `must_keep` says that it holds
    something that no store has, such as reducers.
    """

    def __init__(self, cap: int = LIVE_SESSIONS, *, must_keep: Callable[[S], bool] = lambda _: False) -> None:
        if cap < 1:
            raise fault("invalid_params", "The cap of live sessions must be at least 1.", field="cap")
        self.cap = cap
        self._must_keep = must_keep
        self._live: OrderedDict[SessionId, S] = OrderedDict()
        self._kept: dict[SessionId, S] = {}
        self._held: WeakValueDictionary[SessionId, S] = WeakValueDictionary()
        self._lock = fork_safe_lock()

    def get(self, session: SessionId, make: Callable[[], S]) -> S:
        """The live session of this id, or a new one from `make`. It becomes the most recently used one."""
        with self._lock:
            found = self._held.get(session)
            if found is None:
                found = self._held[session] = make()
            self._kept.pop(session, None)
            self._live[session] = found
            self._live.move_to_end(session)
            while len(self._live) > self.cap:
                dropped, old = self._live.popitem(last=False)
                if self._must_keep(old):
                    self._kept[dropped] = old
            return found

    def drop(self, session: SessionId) -> None:
        with self._lock:
            for known in (self._live, self._kept, self._held):
                known.pop(session, None)

    def ids(self) -> list[SessionId]:
        """The live sessions; the one that was used longest ago comes first."""
        with self._lock:
            return list(self._live)


FACT_MAX_BYTES = MIB_BYTES

SYSTEM_PROMPT, TOOL_FORMAT, SUMMARY = "system_prompt", "tool_format", "summary"
SCRATCHPAD, SCRATCHPAD_VERSION = "scratchpad", "scratchpad_version"
PINNED_MODEL, PINNED_REASONING = "pinned_model", "pinned_reasoning_policy"
BUDGET, BUDGET_ACTION = "transcript_budget", "transcript_budget_action"
BRANCHED_AT = "branched_at_event_index"

# The facts that a reset removes.
RESET_FACTS = (SYSTEM_PROMPT, TOOL_FORMAT, SUMMARY, SCRATCHPAD, SCRATCHPAD_VERSION, BUDGET_ACTION)

# Facts about the fork itself, which a fork of the fork does not inherit.
FORK_ONLY_FACTS = (BRANCHED_AT,)


def facts_of(tx: Tx, session: SessionId) -> dict[str, Any]:
    return {row.name: decode(row.value) for row in tx.select(FACTS, {"session": session})}


def fact(tx: Tx, session: SessionId, name: str) -> Any:
    """None if the session has no such fact."""
    row = tx.get(FACTS, session, name)
    return None if row is None else decode(row.value)


def set_facts_in(
    tx: Tx,
    archive: Archive,
    session: SessionId,
    facts: Mapping[str, Any],
    *,
    event: Mapping[str, Any] | None = None,
) -> Record:
    """Set facts, and remove those that are None, in one record that may also carry an event."""
    for name, value in facts.items():
        if len(encode(value)) > FACT_MAX_BYTES:
            raise fault("invalid_params", f"{name} may have at most {FACT_MAX_BYTES} bytes.", field=name)
    body: dict[str, Any] = {"facts": dict(facts)}
    if event is not None:
        body["event"] = dict(event)
    return archive.journal.append(tx, session_journal(session), "facts.set", body, at=archive.now())


def checked_options(what: str, given: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The options that are not None. Raises `unknown_option` or `invalid_params`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise fault("invalid_params", f"The options of {what} must be an object.", field="opts")
    unknown = sorted(str(key) for key in given if key not in kinds)
    if unknown:
        raise fault("unknown_option", f"{what} has no option {unknown[0]!r}.", field=unknown[0])
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is int):
            raise fault("invalid_params", f"{name} has the wrong type.", field=name)
    copied: dict[str, Any] = decode(encode(found))
    return copied


def checked_object(given: object, what: str, field: str, *, max_bytes: int) -> dict[str, Any]:
    """A copy of a caller's object in canonical JSON values. Raises `invalid_params` for one too large."""
    if not isinstance(given, Mapping):
        raise fault("invalid_params", f"{what} must be an object.", field=field)
    data = encode(dict(given))
    if len(data) > max_bytes:
        raise fault("invalid_params", f"{what} may have at most {max_bytes} bytes.", field=field)
    found: dict[str, Any] = decode(data)
    return found


def checked_count(name: str, value: object) -> int:
    """A whole number, zero or more. Raises `invalid_params`."""
    if type(value) is not int or value < 0:
        raise fault("invalid_params", f"{name} must be a whole number, zero or more.", field=name)
    return value


@fast_dataclass(slots=True, frozen=True)
class Ancestry:
    parent_id: str | None
    child_ids: tuple[str, ...]
    root_id: str

    def to_json(self) -> dict[str, Any]:
        return {"parent_id": self.parent_id, "child_ids": list(self.child_ids), "root_id": self.root_id}


def ancestry_in(tx: Tx, session: SessionId) -> Ancestry | None:
    """None for a session that was never opened."""
    row = tx.get(SESSIONS, session)
    if row is None:
        return None
    root, seen = row, {row.id}
    while root.parent is not None and root.parent not in seen:
        above = tx.get(SESSIONS, root.parent)
        if above is None:
            return Ancestry(row.parent, children_in(tx, session), root.parent)
        root = above
        seen.add(root.id)
    return Ancestry(row.parent, children_in(tx, session), root.id)


def children_in(tx: Tx, session: SessionId) -> tuple[str, ...]:
    """Forks of a session that were not deleted, oldest first."""
    rows = [row for row in tx.select(SESSIONS, {"parent": session}) if not is_deleted(tx, SessionId(row.id))]
    return tuple(row.id for row in sorted(rows, key=lambda row: (row.created_at, row.id)))


def fresh_id(tx: Tx, archive: Archive, wanted: str | None) -> SessionId:
    """An id for a new session. Raises `session_exists` if a session has it, open or closed."""
    session = SessionId(archive.ids.new() if wanted is None else parse_user_id(wanted, "session"))
    if tx.has(SESSIONS, session):
        raise fault("session_exists", f"Session {session!r} exists already; choose another id.", session=session)
    return session


def fork_in(
    tx: Tx,
    archive: Archive,
    parent: SessionId,
    child: SessionId,
    *,
    root: str,
    kept: Window | None = None,
    copied: tuple[str, str] | None = None,
) -> None:
    """Open a child with its parent's context window, or with the window `kept`. No message is copied.

    The child has its parent's permissions, and they expire at the same time. `copied`: the folder that the child's
    files were copied from, and the folder of the copy.
    """
    log = inherited_log(tx, parent)
    facts = {name: value for name, value in facts_of(tx, parent).items() if name not in FORK_ONLY_FACTS}
    if kept is not None:
        log = _upto_last(tx, log, kept)
        facts[BRANCHED_AT] = sum(entry.events for entry in log)
    window = window_of(tx, parent) if kept is None else kept
    journal, at = session_journal(child), archive.now()
    opened = {"session": child, "root": root, "parent": parent}
    archive.journal.append(tx, journal, "session.opened", opened, at=at)
    body: dict[str, Any] = {"verb": "fork", "spans": spans_to_json(window), "log": [list(one) for one in log]}
    body |= {"log_after": 0, "was": 0, "facts": facts}
    archive.journal.append(tx, journal, "window.changed", body, at=at)
    archive.journal.append(tx, session_journal(parent), "session.forked", {"session": parent, "child": child}, at=at)
    bounds = tx.get(BOUNDARIES, parent)
    if bounds is not None:
        inherited = decode(bounds.body) if copied is None else _as_in_copy(decode(bounds.body), *copied)
        times = {"started_at_ns": bounds.started_at_ns, "expires_at_ns": bounds.expires_at_ns}
        attached = {"session": child, "boundary": inherited, **times}
        archive.journal.append(tx, journal, "boundary.attached", attached, at=at)


def _as_in_copy(boundary: dict[str, Any], source: str, copy: str) -> dict[str, Any]:
    """The boundary with each absolute path below `source` listed a second time, as its path below `copy`."""

    def with_copies(body: dict[str, Any], field: str) -> dict[str, Any]:
        names = body.get(field) or []
        there = [copy + name[len(source) :] for name in names if is_inside(name, source)]
        return {**body, field: [*names, *there]} if there else body

    capability = with_copies(boundary["capability"], "fs_roots")
    return {**boundary, "capability": capability, "policy": [with_copies(one, "paths") for one in boundary["policy"]]}


def inherited_log(tx: Tx, session: SessionId) -> list[InheritedEvents]:
    """All events of a session so far, as a child inherits them."""
    row, newest = transcript_row(tx, session), window_row(tx, session)
    count = row.events - row.log_from
    own = InheritedEvents(session, newest.log_after, head_of(tx, session), count, row.log_from)
    return [*inherited_from_json(decode(newest.log)), *([own] if count else [])]


def _upto_last(tx: Tx, log: list[InheritedEvents], kept: Window) -> list[InheritedEvents]:
    """The log up to the last message of the kept window."""
    if not kept:
        return []
    session, number = kept[-1].session, kept[-1].stop - 1
    seq, events = _event_number(tx, session, number)
    found: list[InheritedEvents] = []
    for entry in log:
        if entry.session == session and entry.after < seq <= entry.upto:
            return [*found, entry._replace(upto=seq, events=events - entry.before)]
        found.append(entry)
    return found


def _event_number(tx: Tx, session: str, number: int) -> tuple[int, int]:
    """The record of a message, and the number of events in its journal up to it."""
    run = run_holding(tx, transcript_row(tx, session), number)
    into = number - run.first
    return run.seq + into, run.events + (0 if run.inserted else into + 1)


_NEAR = 32


def record_at(tx: Tx, session: SessionId, at: str, matches: Callable[[Record], bool]) -> int | None:
    """The first record with exactly this time for which `matches` is true; None if there is none."""
    for seq in count(_first_at(tx, session, at)):
        row = tx.get(RECORDS, session_journal(session), seq)
        record = None if row is None else parse_record(row)
        if record is None or record.at != at:
            break
        if matches(record):
            return seq
    return None


def _first_at(tx: Tx, session: SessionId, at: str) -> int:
    """The first record that is not earlier than `at`, by binary search."""
    low, high = 1, head_of(tx, session) + 1
    while low < high:
        middle = (low + high) // 2
        row = tx.get(RECORDS, session_journal(session), middle)
        if row is None or parse_record(row).at >= at:
            high = middle
        else:
            low = middle + 1
    return low


def call_begin_seq(tx: Tx, session: SessionId, call: str, at: str) -> int | None:
    return record_at(tx, session, at, lambda one: one.kind == "call.begun" and one.payload["call"] == call)


def call_end_seq(tx: Tx, session: SessionId, call: str, at: str) -> int | None:
    return record_at(tx, session, at, lambda one: one.kind == "call.ended" and one.payload["call"] == call)


def turn_begin_seq(tx: Tx, session: SessionId, turn: str, at: str) -> int | None:
    return record_at(tx, session, at, lambda one: one.kind == "turn.opened" and one.payload["turn"] == turn)


def turn_bounds(tx: Tx, session: SessionId, turn: str, *, started_at: str, ended_at: str) -> tuple[int, int] | None:
    """The first and last record of a turn that the caller opened explicitly."""
    begin = turn_begin_seq(tx, session, turn, started_at)
    end = record_at(tx, session, ended_at, lambda one: one.kind == "turn.ended" and one.payload["turn"] == turn)
    return None if begin is None or end is None else (begin, end)


def find_message(tx: Tx, archive: Archive, session: SessionId, name: str) -> tuple[str, int, int] | None:
    """A message of the context window, by its id: the session it was written in, its record, its place in the window.

    None if the window has no such message.
    """
    window = window_of(tx, session)
    source, mark, digits = name.rpartition("#")
    if mark and digits.isdecimal():
        row = tx.get(RECORDS, session_journal(SessionId(source)), int(digits))
        record = None if row is None else parse_record(row)
        if record is not None and record.kind in (APPENDED, INSERTED) and id_of(record) == name:
            place = place_of(window, source, number_at(tx, SessionId(source), record.seq) - 1)
            return None if place is None else (source, record.seq, place)
    for place, entry in enumerate(entries_of(tx, archive, window)):
        if entry.id == name:
            return entry.session, entry.seq, place
    return None


def check_continuable(tx: Tx, archive: Archive, before: Window, after: Window = ()) -> None:
    """Raise `not_continuable` if a cut between two windows is inside a tool exchange.

    Reads only the messages near the cut, because a window may be long.
    """
    last: list[Message] = []
    for message in _backwards(tx, archive, before):
        last.insert(0, message)
        if message.get("role") == "assistant":
            break
    if is_continuable(last, _upto_assistant(tx, archive, after)):
        return
    words = "A model cannot continue from inside a tool exchange. Choose a message before or after it"
    raise fault("not_continuable", f"{words}, or leave the transcript as it is.", messages=length(before))


def _backwards(tx: Tx, archive: Archive, window: Window) -> Iterator[Message]:
    place = length(window)
    while place > 0:
        start = max(0, place - _NEAR)
        yield from reversed([entry.message for entry in entries_of(tx, archive, part(window, start, place))])
        place = start


def _upto_assistant(tx: Tx, archive: Archive, window: Window) -> Sequence[Message]:
    found: list[Message] = []
    for entry in entries_of(tx, archive, window):
        if entry.message.get("role") == "assistant":
            break
        found.append(entry.message)
    return found


def without_turn(tx: Tx, session: SessionId, begin: int, end: int) -> Window:
    """The context window without the messages of a turn.

    If a verb such as trim or compact changed the window after the turn began, the result is the window from before the
    turn and the messages that came after the turn.
    """
    now, first, last = window_of(tx, session), number_at(tx, session, begin), number_at(tx, session, end)
    taken = without(now, MessageSpan(session, first, last))
    if window_row(tx, session).seq == window_row(tx, session, upto=begin).seq:
        return taken
    then = window_at(tx, session, begin)
    later = [span for span in taken if span.session == session and span.stop > last]
    said = [MessageSpan(session, max(span.start, last), span.stop) for span in later]
    return normal((*then, *_appended(tx, session, said)))


def _appended(tx: Tx, session: SessionId, spans: Sequence[MessageSpan]) -> Iterator[MessageSpan]:
    """Only appended messages. A summary is left out: the messages that it replaced are in the window again."""
    for span in spans:
        for number in range(span.start, span.stop):
            row = tx.get(RECORDS, session_journal(session), seq_of(tx, session, number))
            if row is not None and parse_record(row).kind == APPENDED:
                yield MessageSpan(session, number, number + 1)


def has_turn_messages(tx: Tx, session: SessionId, begin: int, end: int) -> bool:
    """Whether the context window has messages of a turn."""
    window = window_of(tx, session)
    own = MessageSpan(session, number_at(tx, session, begin), number_at(tx, session, end))
    return len(own) > 0 and length(without(window, own)) < length(window)
