"""Permission requests that a live client of the session may answer instead of the editor.

The proxy passes each request on to the editor as before, and also puts it on record. A controller of the session, for
example the web page, can answer it there. The first answer goes to the agent; a later one of the editor is dropped,
because the agent waits for one answer only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from mulligan.effects.session import DurableSession
from mulligan.servers.acp.recorder import Frame
from mulligan.servers.acp.wire import Wire
from mulligan.session.clients import ROUTE_EVENT
from mulligan.session.permissions import ask_permission, settle_permission
from mulligan.session.subscribers import Subscription, hub_of
from mulligan.values.canonical import encode
from mulligan.values.errors import MulliganError

_DETAIL_MAX = 4_000


class _Waiting(NamedTuple):
    session: DurableSession
    frame_id: Any


class PermissionRequests:
    """The requests of one agent. For any thread."""

    def __init__(self, agent: Wire) -> None:
        self._agent = agent
        self._waiting: dict[str, _Waiting] = {}
        self._answered: set[str] = set()
        self._subscribed: dict[str, Subscription] = {}
        self._lock = threading.Lock()

    def ask(self, session: DurableSession, frame: Frame, params: Mapping[str, Any]) -> None:
        """Put a request of the agent on record, and listen for the answer of a controller."""
        request = _name(frame)
        archive = session.archive
        with self._lock:
            self._waiting[request] = _Waiting(session, frame["id"])
            if session.id not in self._subscribed:
                subscription = hub_of(archive.store).subscribe(archive, session.id, self._handle_event)
                self._subscribed[session.id] = subscription
        ask_permission(archive, session.id, request, _body(params))

    def _handle_event(self, event: Mapping[str, Any]) -> None:
        """On the thread of the subscription: an event of a session."""
        if event.get("kind") != ROUTE_EVENT:
            return
        about = event.get("metadata", {})
        option = about.get("request", {}).get("option_id")
        with self._lock:
            waiting = self._waiting.pop(about.get("request_id", ""), None) if isinstance(option, str) else None
            if waiting is None:
                return
            self._answered.add(about["request_id"])
        outcome = {"outcome": {"outcome": "selected", "optionId": option}}
        self._agent.pass_on(encode({"jsonrpc": "2.0", "id": waiting.frame_id, "result": outcome}) + b"\n")

    def has_answer(self, frame: Frame) -> bool:
        """Whether the editor's answer comes too late. If not, the request is settled by it."""
        request = _name(frame)
        with self._lock:
            if request in self._answered:
                self._answered.discard(request)
                return True
            waiting = self._waiting.pop(request, None)
        if waiting is not None:
            settle_permission(waiting.session.archive, waiting.session.id, request)
        return False

    def end(self) -> None:
        """The agent is gone: nobody waits for an answer any more."""
        with self._lock:
            left, self._waiting = self._waiting, {}
            subscribed, self._subscribed = self._subscribed, {}
        for subscription in subscribed.values():
            subscription.close()
        for request, waiting in left.items():
            settle_permission(waiting.session.archive, waiting.session.id, request)


def _name(frame: Frame) -> str:
    """A number and a text may look the same; the kind is part of the name."""
    return f"acp-{type(frame['id']).__name__}-{frame['id']}"


def _body(params: Mapping[str, Any]) -> dict[str, Any]:
    call = params.get("toolCall")
    about = call if isinstance(call, dict) else {}
    options = params.get("options")
    given = [one for one in options if isinstance(one, dict)] if isinstance(options, list) else []
    return {
        "title": str(about.get("title") or "The agent asks for permission")[:_DETAIL_MAX],
        "detail": _detail(about.get("rawInput")),
        "options": [{name: one.get(name) for name in ("optionId", "name", "kind")} for one in given],
    }


def _detail(given: object) -> str | None:
    if isinstance(given, dict) and isinstance(given.get("command"), str):
        return str(given["command"])[:_DETAIL_MAX]
    try:
        return None if given is None else encode(given).decode("utf-8")[:_DETAIL_MAX]
    except MulliganError:
        return None
