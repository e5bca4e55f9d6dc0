"""Replay: a session's state folded again from the journal, from its first record, with no access to any workspace.

1. The state is what the journal's projections say of one session, with everything said in it. It holds no file bodies,
   so a replay needs none, and no paths of the machine it was recorded on.
2. Folding gives the same state, byte for byte in canonical JSON, or the journal and the tables disagree.
3. A blob that the state needs and that is missing is a fault, every time.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from mulligan.history.log import changes_of
from mulligan.history.schema import SCHEMA
from mulligan.history.tables import CALLS, CallRow
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.session.transcript import Archive, Message, entries_of, window_of
from mulligan.session.windows import Window
from mulligan.store.journal import records_of
from mulligan.store.protocol import Store, Tx
from mulligan.store.tables import Table
from mulligan.store.verify import fold_into, verify_journal
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import entry_to_json
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import to_wire
from mulligan.values.plain import plain

_LOCAL_TABLES = frozenset({"roots", "branches", "asides", "ended_asides"})
"""They name places of one machine, which are no part of what happened."""


@plain(slots=True, frozen=True)
class Replayed:
    """`digest` is that of the folded state; `live` that of the tables as they stand."""

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
    """Fold everything into the empty store `fresh` and compare. Raises `session_not_found`."""
    with archive.store.read() as tx:
        _check_known(tx, session)
        refused = fold_into(fresh, tx, SCHEMA)
        if refused is not None:
            raise fault("journal_broken", f"The journal does not fold: {refused.where}: {refused.message}")
        live = state_of(tx, tx, archive, session)
        with fresh.read() as folded:
            state = state_of(folded, tx, archive, session)
        records = sum(1 for _ in records_of(tx, session_journal(session)))
    return Replayed(
        session, digest_of(encode(state)), digest_of(encode(live)), records, len(state["messages"]), len(state["calls"])
    )


def check_needs(store: Store, session: SessionId) -> None:
    """The chain of the session's journal, and every blob that its state needs. Raises an integrity fault."""
    with store.read() as tx:
        _check_known(tx, session)
    for problem in verify_journal(store, session_journal(session)):
        if problem.severity == "broken":
            code = "missing_cas_dependency" if problem.kind in ("blob", "ref") else "journal_broken"
            raise fault(code, f"{problem.where}: {problem.message}")


def _check_known(tx: Tx, session: SessionId) -> None:
    if not tx.has(SESSIONS, session):
        raise fault("session_not_found", f"There is no session {session!r}; `mulligan sessions` lists them.")


def state_of(tx: Tx, records: Tx, archive: Archive, session: SessionId) -> dict[str, Any]:
    """A session as one plain value: its rows, its calls with their changes, and its messages.

    Rows come from `tx`, which may be a fold; bodies of messages from `records`, where they were written.
    """
    row = tx.get(SESSIONS, session)
    assert row is not None, "a session that is folded was opened"
    return {
        "session": {"id": row.id, "created_at": row.created_at, "closed_at": row.closed_at, "parent": row.parent},
        "messages": _messages(records, archive, window_of(tx, session)),
        "calls": [_call(tx, call) for call in tx.select(CALLS, {"session": session}, order=("id",))],
        "tables": {table.name: [_plain(table, one) for one in _rows(tx, table, session)] for table in _TABLES},
    }


def _messages(records: Tx, archive: Archive, window: Window) -> list[Message]:
    try:
        return [entry.message for entry in entries_of(records, archive, window)]
    except MulliganError as error:
        if error.code != "unknown_blob":
            raise
        # Elsewhere that is somebody's mistake; here a record of ours names the blob.
        raise fault("missing_cas_dependency", error.message) from error


_TABLES: tuple[Table[Any], ...] = tuple(
    table
    for table in SCHEMA.tables
    if table.projected and table.columns[0] == "session" and table.name not in _LOCAL_TABLES
)


def _rows(tx: Tx, table: Table[Any], session: SessionId) -> list[Any]:
    return tx.select(table, {"session": session}, order=table.key)


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


# Two sessions beside each other.


@plain(slots=True, frozen=True)
class Divergence:
    """The first step at which two sessions part: what the one did there, and what the other did. None: nothing."""

    step: int
    ours: Mapping[str, Any] | None
    theirs: Mapping[str, Any] | None


def steps_of(tx: Tx, session: SessionId, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    """What was said and done, without what differs from run to run: ids and times; `whole`: with them."""
    for record in records_of(tx, session_journal(session)):
        if record.kind == "message.appended":
            yield {"said": record.payload.get("message") or record.payload["blob"]}
        elif record.kind == "call.ended":
            for effect in record.payload.get("effects", ()):
                receipt = effect["receipt"] if whole else _lasting(effect["receipt"])
                yield {"did": effect["effect"], "params": effect["params"], "receipt": receipt}


def _lasting(receipt: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in receipt.items() if name not in PASSING_FIELDS}


PASSING_FIELDS = frozenset({"mtime_ns", "new_mtime_ns", "duration_ms", "started_at", "ended_at", "pid", "exec_id"})
"""What a receipt says of its moment; two runs that do the same differ in these."""


def first_difference(tx: Tx, ours: SessionId, theirs: SessionId) -> Divergence | None:
    for session in (ours, theirs):
        _check_known(tx, session)
    for number, (one, other) in enumerate(zip_longest(steps_of(tx, ours), steps_of(tx, theirs)), 1):
        if one != other:
            return Divergence(number, one, other)
    return None
