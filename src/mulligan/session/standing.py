"""A session as its verbs find it: open, or they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.session.tables import SESSIONS, SessionRow, session_journal
from mulligan.session.transcript import Archive
from mulligan.store.journal import RECORDS, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId

DELETED = "deleted"
"""How a session is closed that is to be forgotten."""

_PAGE, _END = 200, 2**62


class Standing:
    """What all verbs of a session share."""

    def __init__(self, archive: Archive, session: SessionId, root: str) -> None:
        self.id = session
        self._archive = archive
        self._root = root

    def _check_open(self, tx: Tx, verb: str) -> SessionRow:
        return check_open(tx, self.id, verb)

    def _write(self, tx: Tx, kind: str, body: Mapping[str, Any]) -> None:
        self._archive.journal.append(tx, session_journal(self.id), kind, body, at=self._archive.now())


def session_in(tx: Tx, session: object) -> SessionRow | None:
    """A session, open or closed; None for whatever was never one, such as text no store could hold."""
    try:
        return tx.get(SESSIONS, session) if isinstance(session, str) else None
    except UnicodeEncodeError:
        return None


def is_deleted(tx: Tx, session: SessionId) -> bool:
    """Whether a session was closed to be forgotten: what its journal says of its newest close."""
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
    row = session_in(tx, session)
    if row is None:
        raise fault("session_not_found", f"{verb}: there is no session {session!r}.", session=session, verb=verb)
    if row.closed_at is not None:
        words = f"{verb}: session {session!r} is closed; open it to go on with it."
        raise fault("session_closed", words, session=session, verb=verb)
    return row
