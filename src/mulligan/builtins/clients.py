"""S3's functions about live clients, by their own names."""

from __future__ import annotations

from typing import Any

from mulligan.builtins.sessions import Options, session_named

Json = dict[str, Any]


def agent_session_attach(id: str, client_id: str, opts: Options = None) -> Json:
    """Attach a live client as observer or controller; a second controller needs `takeover`."""
    return session_named(id, "agent_session_attach").attach(client_id, opts)


def agent_session_takeover(id: str, client_id: str, opts: Options = None) -> Json:
    """Make a client the controller and whoever was it an observer."""
    return session_named(id, "agent_session_takeover").takeover(client_id, opts)


def agent_session_detach(id: str, client_id: str, opts: Options = None) -> Json:
    """Take a client off the list; a controller that goes leaves nobody in control."""
    return session_named(id, "agent_session_detach").detach(client_id, opts)


def agent_session_heartbeat(id: str, client_id: str, opts: Options = None) -> Json:
    """Say that a client is still there."""
    return session_named(id, "agent_session_heartbeat").heartbeat(client_id, opts)


def agent_session_live_clients(id: str) -> list[Json]:
    """Who is attached, by id, with whether they have been silent for long."""
    return session_named(id, "agent_session_live_clients").live_clients()


def agent_session_client_inject_prompt(id: str, client_id: str, content: object, opts: Options = None) -> None:
    """Append a user prompt, if the client is in control and has the right to."""
    session_named(id, "agent_session_client_inject_prompt").client_inject_prompt(client_id, content, opts)


def agent_session_route_permission(id: str, client_id: str, request: object, opts: Options = None) -> Json:
    """Record that the controller owns the routing of a permission request."""
    return session_named(id, "agent_session_route_permission").route_permission(client_id, request, opts)
