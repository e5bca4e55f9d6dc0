"""A session as its verbs find it: open, or they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.session.tables import SESSIONS, SessionRow, session_journal
from mulligan.session.transcript import Archive
from mulligan.store.protocol import Tx
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId


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


def check_open(tx: Tx, session: SessionId, verb: str) -> SessionRow:
    """Raise `session_not_found` or `session_closed`, naming the verb and the id."""
    row = session_in(tx, session)
    if row is None:
        raise fault("session_not_found", f"{verb}: there is no session {session!r}.", session=session, verb=verb)
    if row.closed_at is not None:
        words = f"{verb}: session {session!r} is closed; open it to go on with it."
        raise fault("session_closed", words, session=session, verb=verb)
    return row
