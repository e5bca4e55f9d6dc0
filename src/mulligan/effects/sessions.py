"""All sessions of a workspace: opens, lists and closes them, and keeps the ones in use in memory."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mulligan.boundary.verdict import Boundary
from mulligan.effects.session import DurableSession, export_bundle, import_bundle_in, seed_session
from mulligan.history.log import workspace_of
from mulligan.history.open_root import OpenRoot
from mulligan.history.retention import drop_session
from mulligan.history.rewind import archive_of
from mulligan.history.scopes import drop_scopes
from mulligan.history.tables import ROOTS, RootRow
from mulligan.session.lifecycle import (
    DELETED,
    LIVE_SESSIONS,
    LiveSessions,
    ancestry_in,
    check_open,
    checked_options,
    is_deleted,
    session_in,
)
from mulligan.session.subscribers import current_id
from mulligan.session.tables import SESSIONS, SessionRow
from mulligan.session.transcript_log import length_of
from mulligan.store.protocol import Tx
from mulligan.values.errors import MulliganError, fault
from mulligan.values.ids import SessionId, parse_user_id

if TYPE_CHECKING:
    from mulligan.session.bundle.format import Document

_OPEN_OPTIONS = {"workspace_anchor": Mapping, "workspace_policy": Mapping}


class Sessions:
    """The sessions of a workspace. `open`, `exists`, `snapshot` and `ancestry` accept unknown ids; the others raise."""

    def __init__(self, open_root: OpenRoot, boundary: Boundary, *, cap: int = LIVE_SESSIONS) -> None:
        self._open_root = open_root
        self._boundary = boundary
        self._archive = archive_of(open_root.ledger)
        self.live: LiveSessions[DurableSession] = LiveSessions(cap, must_keep=DurableSession.has_reducers)

    def open(self, id: str | None = None, opts: Mapping[str, Any] | None = None) -> DurableSession:
        """A new session, or the one with this id; a closed one is reopened. Opening it twice changes nothing."""
        options = checked_options("opening a session", opts, _OPEN_OPTIONS)
        session = SessionId(self._open_root.ledger.ids.new() if id is None else parse_user_id(id, "session"))
        existed = self.exists(session)
        self._open_root.ledger.session(session, self._open_root.root)
        found = self._live(session)
        found.reopen()
        try:
            self._apply(found, options)
        except MulliganError:
            if not existed:
                found.close("open_refused")
            raise
        return found

    def anonymous(self) -> DurableSession:
        """A new session that no list shows. Its calls can be undone; it is not meant to be opened again."""
        session = SessionId(self._open_root.ledger.ids.new())
        self._open_root.ledger.session(session, self._open_root.root, anonymous=True)
        return self._live(session)

    def _apply(self, session: DurableSession, options: Mapping[str, Any]) -> None:
        if "workspace_policy" in options:
            session.set_workspace_policy(options["workspace_policy"])
        if "workspace_anchor" in options:
            session.set_workspace_anchor(options["workspace_anchor"])

    def get(self, id: str, verb: str = "get") -> DurableSession:
        """A session that is open. Raises `session_not_found` or `session_closed`."""
        session = SessionId(id)
        with self._archive.store.read() as tx:
            check_open(tx, session, verb)
        return self._live(session)

    def _live(self, session: SessionId) -> DurableSession:
        def made() -> DurableSession:
            found = DurableSession(self._open_root, session, self._boundary)
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
        """The innermost current session of this thread, or None."""
        return current_id()

    def snapshot(self, id: str) -> dict[str, Any] | None:
        """The view of a session; None if it is not open."""
        if not self.exists(id):
            return None
        return DurableSession(self._open_root, SessionId(id), self._boundary).view()

    def ancestry(self, id: str) -> dict[str, Any] | None:
        """Parent, children and root of a session; None if it is not open."""
        if not self.exists(id):
            return None
        with self._archive.store.read() as tx:
            found = ancestry_in(tx, SessionId(id))
        return None if found is None else found.to_json()

    def close(self, id: str, status: str | Mapping[str, Any] | None = None) -> None:
        """Close a session and record why."""
        self.get(id, "close").close(status)

    def delete(self, id: str) -> builtins.list[str]:
        """Close a session and drop what its undo needs. Returns the calls that can no longer be undone.

        The journal keeps its transcript and the record of its calls.
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
        drop_scopes(self._open_root, session)
        return drop_session(self._open_root.ledger, session)

    def import_bundle(self, bundle: bytes | str | Mapping[str, Any], *, name: str | None = None) -> SessionId:
        """Create a session from a bundle, with its id or as `name`. Returns the id."""
        return import_bundle_in(self._open_root, bundle, name=name)

    def export(self, id: str, mode: str = "sanitized", *, content: bool | None = None) -> Document:
        """A session as a bundle, open or closed."""
        return export_bundle(self._open_root, SessionId(id), mode, content=content)

    def seed_from_jsonl(self, path: str, opts: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Any]:
        """Create a session from a transcript file; see `session.importers` for options and answer."""
        return seed_session(self._open_root, path, opts, given)

    def list(self, *, closed: bool = False, everywhere: bool = True) -> list[dict[str, Any]]:
        """Sessions that are open, or all, oldest first: of the whole store, or only of this workspace."""
        with self._archive.store.read() as tx:
            return listed_in(tx, closed=closed, workspace=None if everywhere else workspace_of(tx, self._open_root))


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
