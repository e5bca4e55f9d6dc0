"""S3's functions about where a session works, by their own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mulligan.builtins.sessions import Options, session_named
from mulligan.effects.session import Session
from mulligan.values.faults import MulliganError

Json = dict[str, Any]

_NO_SESSION = ("session_not_found", "session_closed", "invalid_id")


def agent_session_workspace_anchor(id: str) -> Json:
    """Where the session works: its primary root and those mounted beside it."""
    return session_named(id, "agent_session_workspace_anchor").workspace_anchor()


def agent_session_set_workspace_anchor(id: str, anchor: str | Mapping[str, Any] | None) -> bool:
    """Work somewhere else; None means where the session was opened."""
    return session_named(id, "agent_session_set_workspace_anchor").set_workspace_anchor(anchor)


def agent_session_workspace_policy(id: str) -> Json:
    """The defaults for roots mounted from now on."""
    return session_named(id, "agent_session_workspace_policy").workspace_policy()


def agent_session_set_workspace_policy(id: str, policy: Mapping[str, Any]) -> bool:
    """Change those defaults; unknown keys raise."""
    return session_named(id, "agent_session_set_workspace_policy").set_workspace_policy(policy)


def agent_session_add_root(id: str, root: str, opts: Options = None) -> Json:
    """`{ok, mounted_at?, error?}`. A session that is not there is told, not raised."""
    return _told(id, "agent_session_add_root", lambda session: session.add_root(root, opts))


def agent_session_remove_root(id: str, root: str) -> Json:
    """Unmount a root: `{ok, error?}`. One that is not mounted is fine."""
    return _told(id, "agent_session_remove_root", lambda session: session.remove_root(root))


def agent_session_list_roots(id: str) -> Json:
    """The primary root and the additional ones."""
    return session_named(id, "agent_session_list_roots").list_roots()


def _told(id: str, verb: str, act: Callable[[Session], Json]) -> Json:
    try:
        session = session_named(id, verb)
    except MulliganError as error:
        if error.code not in _NO_SESSION:
            raise
        return {"ok": False, "error": error.message}
    return act(session)
