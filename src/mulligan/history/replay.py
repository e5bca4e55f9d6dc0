"""Replay: fold a session's state again from its first journal record, and compare it with the tables.

1. The state is what the projections of the journal say of one session, with all of its messages. It holds no file
   bodies, so a replay needs no workspace, and no paths of the machine that recorded it.
2. The fold gives the same state as the tables, byte for byte in canonical JSON, or the two disagree.
3. A blob that the state needs and that is missing is a fault, every time.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from mulligan.history.projection import SCHEMA
from mulligan.history.tables import CALLS, CallRow, changes_of
from mulligan.session.tables import SESSIONS, Window, session_journal
from mulligan.session.transcript_log import Archive, Message, entries_of, window_of
from mulligan.store.journal import records_of
from mulligan.store.protocol import Store, Table, Tx
from mulligan.store.verify import fold_into, verify_journal
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import entry_to_json
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import to_wire

_LOCAL_TABLES = frozenset({"roots", "branches", "asides", "ended_asides"})
"""They name folders of one machine, which are no part of what happened."""

_TABLES: tuple[Table[Any], ...] = tuple(
    table
    for table in SCHEMA.tables
    if table.projected and table.columns[0] == "session" and table.name not in _LOCAL_TABLES
)

_VARYING_FIELDS = frozenset({"mtime_ns", "new_mtime_ns", "duration_ms", "started_at", "ended_at", "pid", "exec_id"})
"""Fields of receipts in which two runs that do the same differ."""


@fast_dataclass(slots=True, frozen=True)
class Replayed:
    """`digest` is that of the folded state, `live` that of the tables."""

    session: str
    digest: Digest
    live: Digest
    records: int
    messages: int
    calls: int

    @property
    def same(self) -> bool:
        return self.digest == self.live


def replay(archive: Archive, session: SessionId, fresh: Store) -> Replayed:
    """Fold all journals into the empty store `fresh` and compare. Raises `session_not_found`."""
    with archive.store.read() as tx:
        _check_known(tx, session)
        # All journals are folded, because calls of a session may be recorded in other ones.
        refused = fold_into(fresh, tx, SCHEMA)
        if refused is not None:
            raise fault(
                "journal_broken",
                f"Mulligan cannot rebuild the tables from the journal: {refused.where}: {refused.message}",
            )
        live = state_of(tx, tx, archive, session)
        with fresh.read() as folded:
            state = state_of(folded, tx, archive, session)
        records = sum(1 for _ in records_of(tx, session_journal(session)))
    return Replayed(
        session, digest_of(encode(state)), digest_of(encode(live)), records, len(state["messages"]), len(state["calls"])
    )


def check_needs(store: Store, session: SessionId) -> None:
    """Check the chain of the session's journal, and every blob that its state needs. Raises an integrity fault."""
    with store.read() as tx:
        _check_known(tx, session)
    for problem in verify_journal(store, session_journal(session)):
        # Other problems, such as an evicted body, are recorded facts.
        if problem.severity == "broken":
            code = "missing_cas_dependency" if problem.kind in ("blob", "ref") else "journal_broken"
            raise fault(code, f"{problem.where}: {problem.message}")


def _check_known(tx: Tx, session: SessionId) -> None:
    if not tx.has(SESSIONS, session):
        raise fault("session_not_found", f"There is no session {session!r}; `mulligan sessions` lists them.")


def state_of(tx: Tx, records: Tx, archive: Archive, session: SessionId) -> dict[str, Any]:
    """A session as one JSON value: its rows, its calls with their changes, and its messages.

    Rows come from `tx`, which may be a fold; the bodies of messages come from `records`, which has the blobs.
    """
    row = tx.get(SESSIONS, session)
    assert row is not None, "a session that is folded was opened"
    return {
        "session": {"id": row.id, "created_at": row.created_at, "closed_at": row.closed_at, "parent": row.parent},
        "messages": _messages(records, archive, window_of(tx, session)),
        "calls": [_call(tx, call) for call in tx.select(CALLS, {"session": session}, order=("id",))],
        "tables": {
            table.name: [_plain(table, one) for one in tx.select(table, {"session": session}, order=table.key)]
            for table in _TABLES
        },
    }


def _messages(records: Tx, archive: Archive, window: Window) -> list[Message]:
    try:
        return [entry.message for entry in entries_of(records, archive, window)]
    except MulliganError as error:
        if error.code != "unknown_blob":
            raise
        # Elsewhere an unknown blob is the caller's mistake; here a record of ours names it.
        raise fault("missing_cas_dependency", error.message) from error


def _plain(table: Table[Any], row: object) -> dict[str, Any]:
    return {name: _value(getattr(row, name)) for name in table.columns}


def _value(value: object) -> object:
    return b64encode(value).decode("ascii") if isinstance(value, bytes) else value


def _call(tx: Tx, call: CallRow) -> dict[str, Any]:
    changes = [
        {"path": to_wire(one.path), "before": entry_to_json(one.before), "after": entry_to_json(one.after)}
        for one in changes_of(tx, call.id)
    ]
    return {**_plain(CALLS, call), "changes": changes}


# Two sessions compared step by step.


@fast_dataclass(slots=True, frozen=True)
class Divergence:
    """The first step at which two sessions differ: what each of them did there. None: it had ended."""

    step: int
    ours: Mapping[str, Any] | None
    theirs: Mapping[str, Any] | None


def steps_of(tx: Tx, session: SessionId, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    """The messages and effects of a session. Without `whole`, leaves out ids and times, which differ in each run."""
    for record in records_of(tx, session_journal(session)):
        if record.kind == "message.appended":
            yield {"said": record.payload.get("message") or record.payload["blob"]}
        elif record.kind == "call.ended":
            for effect in record.payload.get("effects", ()):
                receipt = {
                    name: value for name, value in effect["receipt"].items() if whole or name not in _VARYING_FIELDS
                }
                yield {"did": effect["effect"], "params": effect["params"], "receipt": receipt}


def first_difference(tx: Tx, ours: SessionId, theirs: SessionId) -> Divergence | None:
    for session in (ours, theirs):
        _check_known(tx, session)
    for number, (one, other) in enumerate(zip_longest(steps_of(tx, ours), steps_of(tx, theirs)), 1):
        if one != other:
            return Divergence(number, one, other)
    return None
