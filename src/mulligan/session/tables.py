"""What a session is in the store: a row folded from its journal, what it may do, and who is attached to it."""

from __future__ import annotations

from dataclasses import replace

from mulligan.store.journal import Record
from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.canonical import encode
from mulligan.values.ids import SessionId
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class SessionRow:
    """`anonymous`: the session exists only so that its calls can be undone. No list of sessions shows it."""

    id: str
    root: str
    created_at: str
    closed_at: str | None = None
    parent: str | None = None
    anonymous: int = 0


SESSIONS: Table[SessionRow] = Table(
    "sessions", SessionRow, key=("id",), indexes=(("root",), ("parent",)), projected=True
)


@plain(slots=True, frozen=True)
class BoundaryRow:
    """What a session may do, as it was opened: `body` is JSON with capability, policy, workdir and environment."""

    session: str
    body: str
    started_at_ns: int
    expires_at_ns: int | None
    ended_at_ns: int | None


BOUNDARIES: Table[BoundaryRow] = Table("boundaries", BoundaryRow, key=("session",), projected=True)


@plain(slots=True, frozen=True)
class ClientRow:
    """One attached client. `beat_told_at`: when a heartbeat of it was last told as an event."""

    session: str
    client: str
    mode: str
    attached_at: str
    last_seen_at: str
    prompt_injection: int
    permission_routing: int
    metadata: str
    beat_told_at: str | None = None


CLIENTS: Table[ClientRow] = Table("clients", ClientRow, key=("session", "client"))


def session_journal(session: SessionId) -> str:
    return f"s:{session}"


def project_session_opened(tx: Tx, record: Record) -> None:
    body = record.payload
    anonymous = int(body.get("anonymous", False))
    tx.put(SESSIONS, SessionRow(body["session"], body["root"], record.at, None, body.get("parent"), anonymous))


def project_boundary_attached(tx: Tx, record: Record) -> None:
    body = record.payload
    text = encode(body["boundary"]).decode("utf-8")
    tx.put(BOUNDARIES, BoundaryRow(body["session"], text, body["started_at_ns"], body.get("expires_at_ns"), None))


def project_boundary_ended(tx: Tx, record: Record) -> None:
    row = tx.get(BOUNDARIES, record.payload["session"])
    if row is not None:
        tx.put(BOUNDARIES, replace(row, ended_at_ns=record.payload["ended_at_ns"]))
