"""The folders that sessions of a client work in, and the ends of those sessions."""

from __future__ import annotations

from typing import Protocol

from mulligan.effects.session import Session
from mulligan.effects.sessions import Sessions
from mulligan.history.captures import drop_scopes
from mulligan.history.desk import Desk
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


def close_for_client(workspace: Workspace, session: Session) -> None:
    """Its snapshots go, as S0 has it. Its calls can still be undone, and are the first to go when room is needed."""
    drop_scopes(workspace.desk, session.id)
    workspace.sessions.close(session.id, "client_request")


def home_of(workspace: Workspace, session: str) -> str | None:
    """The folder that an open session of the store works in, whichever that is; None if there is no such session."""
    if not workspace.sessions.exists(session):
        return None
    return next((row["root"] for row in workspace.sessions.list() if row["id"] == session), None)
