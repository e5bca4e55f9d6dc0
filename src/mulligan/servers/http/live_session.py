"""A live session: its clients, takeover, prompts of the controller, permission requests and their answers."""

from __future__ import annotations

from typing import Any

from mulligan.servers.http.operations import live_session
from mulligan.servers.http.service import Answer, Asked, Service
from mulligan.session.permissions import answer_permission, open_requests
from mulligan.values.ids import SessionId


def clients(service: Service, asked: Asked) -> Answer:
    """Who is attached, and which permission requests wait for an answer."""
    session = live_session(service, asked["session"])
    with service.ledger.store.read() as tx:
        waiting = open_requests(tx, session.id)
    return Answer({"clients": session.live_clients(), "permissions": waiting})


def attach(service: Service, asked: Asked) -> Answer:
    session = live_session(service, asked["session"])
    options: dict[str, Any] = {"mode": asked["mode"], "metadata": {"name": asked.visitor.principal}}
    if asked["mode"] == "controller" and asked["takeover"]:
        options["takeover"] = True
    return Answer(session.attach(asked["client_id"], options))


def heartbeat(service: Service, asked: Asked) -> Answer:
    return Answer(live_session(service, asked["session"]).heartbeat(asked["client_id"]))


def detach(service: Service, asked: Asked) -> Answer:
    return Answer(live_session(service, asked["session"]).detach(asked["client_id"]))


def prompt(service: Service, asked: Asked) -> Answer:
    """A user message of the client that is in control."""
    live_session(service, asked["session"]).client_inject_prompt(asked["client_id"], asked["text"])
    return Answer({"ok": True}, status=201)


def permission(service: Service, asked: Asked) -> Answer:
    """The controller's answer to a permission request. The agent that asked gets it."""
    session = live_session(service, asked["session"])
    answer_permission(service.archive, session.clients, asked["client_id"], asked["request"], option=asked["option"])
    return Answer({"request_id": asked["request"], "option": asked["option"], "session_id": SessionId(session.id)})
