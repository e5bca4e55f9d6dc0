"""Permission requests of an agent that a live client may answer.

The ACP proxy between an agent and its editor records a request as an event. The session's controller answers with
`route_permission`, which is also an event. The proxy waits for that event and for the editor's answer, and passes on
whichever comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.session.clients import ROUTE_EVENT, Clients
from mulligan.session.subscribers import wake_subscribers
from mulligan.session.tables import session_journal
from mulligan.session.transcript_log import Archive, append_event_in, head_of
from mulligan.store.journal import records_of
from mulligan.store.protocol import Tx
from mulligan.values.errors import fault
from mulligan.values.ids import SessionId

REQUEST_EVENT, SETTLED_EVENT = "permission_request", "permission_settled"
REQUEST_SEARCH_RECORDS = 2_000
"""A request that is more records back than this counts as settled."""


def ask_permission(archive: Archive, session: SessionId, request: str, body: Mapping[str, Any]) -> int:
    """Record a request. Returns the number of its record; an answer has a higher one."""
    with archive.store.write(about=(session_journal(session),)) as tx:
        record = append_event_in(tx, archive, session, REQUEST_EVENT, metadata={"request_id": request, **body})
    wake_subscribers(archive.store)
    return record.seq


def settle_permission(archive: Archive, session: SessionId, request: str) -> None:
    """Record that the request has its answer, or that the agent no longer waits for one."""
    with archive.store.write(about=(session_journal(session),)) as tx:
        append_event_in(tx, archive, session, SETTLED_EVENT, metadata={"request_id": request})
    wake_subscribers(archive.store)


def answer_permission(archive: Archive, session: Clients, client: str, request: str, *, option: str) -> None:
    """Record a controller's answer. Raises `invalid_params` if no such request is open or it lacks that option."""
    with archive.store.read() as tx:
        requests = {one["request_id"]: one for one in open_requests(tx, session.id)}
    known = requests.get(request)
    options = [] if known is None else [one.get("optionId") for one in known.get("options", [])]
    if option not in options:
        raise fault("invalid_params", "There is no open permission request with this option.", field="request")
    session.route_permission(client, {"id": request, "option_id": option})


def open_requests(tx: Tx, session: SessionId) -> list[dict[str, Any]]:
    """The open requests, oldest first."""
    requests: dict[str, dict[str, Any]] = {}
    for event in _events(tx, session, max(0, head_of(tx, session) - REQUEST_SEARCH_RECORDS)):
        metadata = event.get("metadata", {})
        if event.get("kind") == REQUEST_EVENT:
            requests[metadata["request_id"]] = metadata
        elif event.get("kind") in (SETTLED_EVENT, ROUTE_EVENT):
            requests.pop(metadata.get("request_id"), None)
    return list(requests.values())


def _events(tx: Tx, session: SessionId, after: int) -> list[dict[str, Any]]:
    records = records_of(tx, session_journal(session), after=after)
    return [record.payload["event"] for record in records if record.kind == "event.appended"]
