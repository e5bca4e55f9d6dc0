"""The folders that sessions of a client work in, the store they share, and the ends of those sessions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol

from mulligan.effects.session import Session
from mulligan.effects.sessions import Sessions
from mulligan.history.captures import drop_scopes
from mulligan.history.desk import Desk
from mulligan.history.tables import ROOTS
from mulligan.session.standing import session_in
from mulligan.store.protocol import Store


class Workspace(Protocol):
    """An open folder with its sessions, as `mulligan.open` gives it."""

    desk: Desk

    @property
    def sessions(self) -> Sessions: ...
    @property
    def root(self) -> str: ...
    @property
    def store(self) -> Store: ...


class Workspaces:
    """Folders, each opened once. What is on record is asked of the store alone: where this process happens to be need
    be no place for sessions."""

    def __init__(self, open_folder: Callable[[str], Workspace], open_store: Callable[[], Store]) -> None:
        self._open_folder, self._open_store = open_folder, open_store
        self._opened: dict[str, Workspace] = {}
        self._store: Store | None = None
        self._opening = threading.Lock()

    def at(self, folder: str) -> Workspace:
        with self._opening:
            found = self._opened.get(folder)
            if found is None:
                found = self._opened[folder] = self._open_folder(folder)
                self._store = self._store or found.store
            return found

    def store(self) -> Store:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            return self._store

    def home_of(self, session: str, *, closed: bool = False) -> str | None:
        """The folder that an open session of the store, or with `closed` any, works in; None if there is none."""
        with self.store().read() as tx:
            row = session_in(tx, session)
            root = tx.get(ROOTS, row.root) if row is not None and (closed or row.closed_at is None) else None
        return None if root is None else os.fsdecode(root.place) or "/"


def close_for_client(workspace: Workspace, session: Session) -> None:
    """Its snapshots go, as S0 has it. Its calls can still be undone, and are the first to go when room is needed."""
    drop_scopes(workspace.desk, session.id)
    workspace.sessions.close(session.id, "client_request")
