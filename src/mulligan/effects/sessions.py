"""All sessions of a workspace: opened, asked about, and live in this process as long as they are used."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping
from typing import Any

from mulligan.boundary.verdict import Boundary
from mulligan.effects.portable import Arrivals
from mulligan.effects.session import Session
from mulligan.history.bounds import drop_session
from mulligan.history.captures import drop_scopes
from mulligan.history.desk import Desk
from mulligan.history.log import workspace_of
from mulligan.history.points import archive_of
from mulligan.history.tables import ROOTS, RootRow
from mulligan.session.active import current_id
from mulligan.session.lineage import ancestry_in
from mulligan.session.live import LIVE_SESSIONS, LiveSessions
from mulligan.session.options import checked_options
from mulligan.session.standing import DELETED, check_open, is_deleted, session_in
from mulligan.session.tables import SESSIONS, SessionRow
from mulligan.session.transcript import length_of
from mulligan.store.protocol import Tx
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId, parse_user_id

_OPEN_OPTIONS = {"workspace_anchor": Mapping, "workspace_policy": Mapping}


class Sessions(Arrivals):
    """`open`, `exists`, `snapshot` and `ancestry` tolerate ids that nobody knows; everything else raises."""

    def __init__(self, desk: Desk, boundary: Boundary, *, cap: int = LIVE_SESSIONS) -> None:
        self._desk = desk
        self._boundary = boundary
        self._archive = archive_of(desk.ledger)
        self.live: LiveSessions[Session] = LiveSessions(cap, keeps=Session.has_reducers)

    def open(self, id: str | None = None, opts: Mapping[str, Any] | None = None) -> Session:
        """A new session, or the one with this id, which goes on if it was closed. Opening it twice changes nothing."""
        options = checked_options("opening a session", opts, _OPEN_OPTIONS)
        session = SessionId(self._desk.ledger.ids.new() if id is None else parse_user_id(id, "session"))
        existed = self.exists(session)
        self._desk.ledger.session(session, self._desk.root)
        found = self._live(session)
        found.reopen()
        try:
            self._apply(found, options)
        except MulliganError:
            if not existed:
                found.close("open_refused")
            raise
        return found

    def anonymous(self) -> Session:
        """A new session that no list shows: its calls can be undone, and it is not meant to be opened again."""
        session = SessionId(self._desk.ledger.ids.new())
        self._desk.ledger.session(session, self._desk.root, anonymous=True)
        return self._live(session)

    def _apply(self, session: Session, options: Mapping[str, Any]) -> None:
        if "workspace_policy" in options:
            session.set_workspace_policy(options["workspace_policy"])
        if "workspace_anchor" in options:
            session.set_workspace_anchor(options["workspace_anchor"])

    def get(self, id: str, verb: str = "get") -> Session:
        """A session that is open. Raises `session_not_found` or `session_closed`."""
        session = SessionId(id)
        with self._archive.store.read() as tx:
            check_open(tx, session, verb)
        return self._live(session)

    def _live(self, session: SessionId) -> Session:
        def made() -> Session:
            found = Session(self._desk, session, self._boundary)
            found.when_closed = lambda: self.live.drop(session)
            return found

        return self.live.get(session, made)

    def exists(self, id: str) -> bool:
        """Whether a session is open."""
        with self._archive.store.read() as tx:
            row = session_in(tx, id)
        return row is not None and row.closed_at is None

    @staticmethod
    def current_id() -> SessionId | None:
        """The innermost session at work on this thread, or None."""
        return current_id()

    def snapshot(self, id: str) -> dict[str, Any] | None:
        """The view of a session; None if it is not open."""
        if not self.exists(id):
            return None
        return Session(self._desk, SessionId(id), self._boundary).view()

    def ancestry(self, id: str) -> dict[str, Any] | None:
        """Parent, children and root of a session; None if it is not open."""
        if not self.exists(id):
            return None
        with self._archive.store.read() as tx:
            found = ancestry_in(tx, SessionId(id))
        return None if found is None else found.to_json()

    def close(self, id: str, status: str | Mapping[str, Any] | None = None) -> None:
        """End a live session, whatever the cap, and say why."""
        self.get(id, "close").close(status)

    def delete(self, id: str) -> builtins.list[str]:
        """Close a session and drop what is kept to undo it; the record says so. The calls that can no longer be undone.

        Its talk and the record of what it did stay in the journal.
        """
        session = SessionId(id)
        with self._archive.store.read() as tx:
            row = session_in(tx, session)
            if row is None:
                raise fault("session_not_found", f"delete: there is no session {id!r}.", session=id, verb="delete")
            is_only_closed = row.closed_at is not None and not is_deleted(tx, session)
        if is_only_closed:
            # Only the record of a close says that a session was deleted.
            self.open(id)
        if self.exists(id):
            self.close(id, DELETED)
        drop_scopes(self._desk, session)
        return drop_session(self._desk.ledger, session)

    def list(self, *, closed: bool = False, everywhere: bool = True) -> list[dict[str, Any]]:
        """Sessions that are open, or all, oldest first: of the whole store, or only of this workspace."""
        with self._archive.store.read() as tx:
            return listed_in(tx, closed=closed, workspace=None if everywhere else workspace_of(tx, self._desk))


def listed_in(tx: Tx, *, closed: bool = False, workspace: str | None = None) -> list[dict[str, Any]]:
    """Sessions that are open, or all, oldest first: of the whole store, or only of one workspace."""
    places = {row.id: row for row in tx.select(ROOTS)}
    rows = [
        row
        for row in tx.select(SESSIONS, {"anonymous": 0})
        if row.closed_at is None or (closed and not is_deleted(tx, SessionId(row.id)))
    ]
    if workspace is not None:
        rows = [row for row in rows if row.root in places and places[row.root].workspace == workspace]
    rows.sort(key=lambda row: (row.created_at, row.id))
    return [_listed(row, places.get(row.root), length_of(tx, SessionId(row.id))) for row in rows]


def _listed(row: SessionRow, root: RootRow | None, length: int) -> dict[str, Any]:
    return {
        "id": row.id,
        "created_at": row.created_at,
        "closed_at": row.closed_at,
        "parent_id": row.parent,
        "root": None if root is None else os.fsdecode(root.place) or "/",
        "length": length,
    }
