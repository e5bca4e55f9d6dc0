"""What a session is in the store: one row, folded from its journal."""

from __future__ import annotations

from dataclasses import dataclass

from mulligan.store.journal import Record
from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.ids import SessionId


@dataclass(slots=True, frozen=True)
class SessionRow:
    id: str
    root: str
    created_at: str
    closed_at: str | None = None
    parent: str | None = None


SESSIONS: Table[SessionRow] = Table(
    "sessions", SessionRow, key=("id",), indexes=(("root",), ("parent",)), projected=True
)


def session_journal(session: SessionId) -> str:
    return f"s:{session}"


def project_session_opened(tx: Tx, record: Record) -> None:
    body = record.payload
    tx.put(SESSIONS, SessionRow(body["session"], body["root"], record.at, None, body.get("parent")))
