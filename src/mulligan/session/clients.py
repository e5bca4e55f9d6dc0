"""Live clients: the programs that observe a session, and the one that controls it.

Invariants:
1. A session has any number of observers and at most one controller, in any processes.
2. A second controller is refused unless it asks for takeover; then the first one becomes an observer.
3. Only the controller, if it has the right, supplies prompts and routes permissions. The check runs in the transaction
   that records the prompt or the route.
4. Presence is not part of the transcript. A heartbeat updates a row in place. It becomes an event when it changes
   something, and otherwise at most every ten minutes.

The list of attached clients coordinates running programs, so it is not folded from the journal; their actions are
events in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from mulligan.session.lifecycle import SessionAccess, checked_object, checked_options
from mulligan.session.tables import CLIENTS, ClientRow
from mulligan.session.transcript import Transcript
from mulligan.session.transcript_log import Archive, append_event_in
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.errors import fault
from mulligan.values.ids import SessionId, parse_user_id

CLIENT_EVENT, ROUTE_EVENT = "live_session_client", "live_session_permission_route"
STALE_AFTER = timedelta(seconds=60)
HEARTBEAT_EVENT_EVERY = timedelta(minutes=10)
CLIENTS_MAX = 256
METADATA_MAX_BYTES = 16_384
REQUEST_MAX_BYTES = 262_144
DEFAULT_DETACH_REASON = "client_detached"

OBSERVER, CONTROLLER = "observer", "controller"

Options = Mapping[str, Any] | None
Json = dict[str, Any]

_RIGHTS = {"prompt_injection": bool, "permission_routing": bool, "metadata": Mapping}
_ATTACH = {"mode": str, "takeover": bool, **_RIGHTS}
_DETACH = {"reason": str, "metadata": Mapping}
_METADATA = {"metadata": Mapping}


class Clients:
    """The clients attached to one session. Options are given as an object, as keywords, or both."""

    def __init__(self, access: SessionAccess, transcript: Transcript) -> None:
        self.id = access.id
        self._access = access
        self._archive = access.archive
        self._transcript = transcript

    # Attach and detach.

    def attach(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """Attach a client, or change how it is attached: `mode` observer (default) or controller, `takeover`,
        `prompt_injection`, `permission_routing`, `metadata`. A second controller must ask for takeover.
        """
        options = _options("attach", opts, given, _ATTACH)
        takes_over = options.get("takeover", False)
        mode = options.get("mode", CONTROLLER if takes_over else OBSERVER)
        if mode not in (OBSERVER, CONTROLLER):
            raise fault("invalid_params", f"mode must be {OBSERVER!r} or {CONTROLLER!r}.", field="mode")
        if takes_over and mode == OBSERVER:
            raise fault("invalid_params", "A client that takes over cannot be an observer.", field="takeover")
        return self._attach("attach", _parse_client(client_id), mode, options)

    def takeover(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """Attach a client as the controller. The controller before it becomes an observer without rights."""
        options = {**_options("takeover", opts, given, _RIGHTS), "takeover": True}
        return self._attach("takeover", _parse_client(client_id), CONTROLLER, options)

    def _attach(self, verb: str, client: str, mode: str, options: Json) -> Json:
        prompts, permissions = _rights(mode, options)
        metadata = _checked_metadata(options)
        with self._access.write(verb) as tx:
            before, now = controller_in(tx, self.id), self._archive.now()
            if mode == CONTROLLER and before not in (None, client):
                self._demote(tx, before, asked=bool(options.get("takeover")))
            known = tx.get(CLIENTS, self.id, client)
            if known is None and tx.count(CLIENTS, {"session": self.id}) >= CLIENTS_MAX:
                raise fault("too_many_clients", f"Session {self.id!r} has {CLIENTS_MAX} clients; detach stale ones.")
            since, reported = (now, None) if known is None else (known.attached_at, known.beat_told_at)
            kept = _kept(metadata, known)
            row = ClientRow(self.id, client, mode, since, now, prompts, permissions, kept, beat_told_at=reported)
            tx.put(CLIENTS, row)
            action = "takeover" if options.get("takeover") else "attached"
            return self._recorded(tx, row.client, before=before, event={"action": action, "client": _plain(row)})

    def _demote(self, tx: Tx, controller: str | None, *, asked: bool) -> None:
        if not asked:
            words = f"{controller!r} controls session {self.id!r}; use takeover to become its controller."
            raise fault("controller_present", words, controller_id=controller)
        tx.update(CLIENTS, self.id, controller, mode=OBSERVER, prompt_injection=0, permission_routing=0)

    def detach(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """Remove a client; `reason` says why. If it was the controller, the session has no controller afterwards."""
        options = _options("detach", opts, given, _DETACH)
        client = _parse_client(client_id)
        with self._access.write("detach") as tx:
            row = self._attached(tx, client, "detach")
            before = controller_in(tx, self.id)
            tx.delete(CLIENTS, self.id, row.client)
            event = {"action": "detached", "client_id": row.client, "mode": row.mode, "reason": DEFAULT_DETACH_REASON}
            return self._recorded(tx, None, before=before, event={**event, **options})

    def heartbeat(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """Record that the client is still attached. `metadata` replaces the client's metadata."""
        metadata = _checked_metadata(_options("heartbeat", opts, given, _METADATA))
        client = _parse_client(client_id)
        with self._access.write("heartbeat") as tx:
            row, now = self._attached(tx, client, "heartbeat"), self._archive.now()
            seen = replace(row, last_seen_at=max(now, row.last_seen_at), metadata=_kept(metadata, row))
            before, changes = controller_in(tx, self.id), seen.metadata != row.metadata
            if not changes and not _is_due(row, now):
                tx.update(CLIENTS, self.id, row.client, last_seen_at=seen.last_seen_at)
                return self._state(tx, row.client, before=before)
            tx.put(CLIENTS, replace(seen, beat_told_at=now))
            event: Json = {"action": "heartbeat", "client_id": row.client, "last_seen_at": now}
            event |= {"metadata": metadata} if changes else {}
            return self._recorded(tx, row.client, before=before, event=event)

    # Read.

    def live_clients(self) -> list[Json]:
        """The attached clients, by id. A client without a heartbeat for a minute is stale, and stays attached."""
        with self._access.read("live_clients") as tx:
            return clients_in(tx, self._archive, self.id)

    def view_in(self, tx: Tx) -> Json:
        """The clients' part of a session's view."""
        return {
            "live_clients": clients_in(tx, self._archive, self.id),
            "live_controller_id": controller_in(tx, self.id),
        }

    # Only for the controller.

    def client_inject_prompt(self, client_id: str, content: object, opts: Options = None, /, **given: Any) -> None:
        """Append a user message for the controller. Other clients are refused."""
        metadata = _checked_metadata(_options("client_inject_prompt", opts, given, _METADATA))
        client = _parse_client(client_id)
        if not isinstance(content, str | list) or not content or (isinstance(content, str) and not content.strip()):
            raise fault("invalid_params", "A prompt must be text, not empty, or a list of blocks.", field="content")
        source = {"client_id": client, "mode": CONTROLLER, "source": "live_session_attach", "metadata": metadata or {}}
        message = {"role": "user", "content": content, "metadata": {"live_session": source}}
        verb = "client_inject_prompt"
        self._transcript.append(
            message,
            verb,
            check=lambda tx: self._check_right(tx, client, verb, "prompt_injection"),
            then=lambda tx: tx.update(CLIENTS, self.id, client, last_seen_at=self._archive.now()),
        )

    def route_permission(self, client_id: str, request: object, opts: Options = None, /, **given: Any) -> Json:
        """Record the controller's answer to a permission request."""
        metadata = _checked_metadata(_options("route_permission", opts, given, _METADATA))
        client = _parse_client(client_id)
        asked = checked_object(request, "A permission request", "request", max_bytes=REQUEST_MAX_BYTES)
        answer = {"request_id": _request_id(asked), "request": asked, "metadata": metadata or {}}
        with self._access.write("route_permission") as tx:
            self._check_right(tx, client, "route_permission", "permission_routing")
            tx.update(CLIENTS, self.id, client, last_seen_at=self._archive.now())
            event = {"action": "permission_routed", "client_id": client, **answer}
            append_event_in(tx, self._archive, self.id, ROUTE_EVENT, metadata=event)
            shown = self._state(tx, client, before=client)["client"]
        return {"action": "permission_routed", "client": shown, **answer}

    def _check_right(self, tx: Tx, client: str, verb: str, right: str) -> None:
        """Checks in this order: the client controls the session, the client has the right."""
        row = tx.get(CLIENTS, self.id, client)
        if row is None or row.mode != CONTROLLER:
            active = controller_in(tx, self.id)
            owner = f"{active!r} does" if active else "no client does"
            words = f"{verb}: {client!r} does not control session {self.id!r}; {owner}."
            raise fault("not_controller", words, controller_id=active)
        if not getattr(row, right):
            words = f"{verb}: {client!r} controls the session but does not have the right {right}."
            raise fault("client_may_not", words, right=right)

    # Internal.

    def _attached(self, tx: Tx, client: str, verb: str) -> ClientRow:
        row = tx.get(CLIENTS, self.id, client)
        if row is None:
            words = f"{verb}: {client!r} is not attached to session {self.id!r}."
            raise fault("client_not_attached", words, client_id=client)
        return row

    def _recorded(self, tx: Tx, client: str | None, *, before: str | None, event: Json) -> Json:
        """Record the change as an event, and return it with the state of the clients."""
        answer = self._state(tx, client, before=before)
        control = {name: answer[name] for name in ("previous_controller_id", "active_controller_id")}
        append_event_in(tx, self._archive, self.id, CLIENT_EVENT, metadata={**event, **control})
        return answer

    def _state(self, tx: Tx, client: str | None, *, before: str | None) -> Json:
        clients = clients_in(tx, self._archive, self.id)
        return {
            "client": next((one for one in clients if one["client_id"] == client), None),
            "previous_controller_id": before,
            "active_controller_id": next((one["client_id"] for one in clients if one["mode"] == CONTROLLER), None),
            "clients": clients,
        }


def _options(verb: str, opts: object, given: Json, kinds: Mapping[str, type]) -> Json:
    return {**checked_options(verb, opts, kinds), **checked_options(verb, given, kinds)}


def clients_in(tx: Tx, archive: Archive, session: SessionId) -> list[Json]:
    return [_shown(archive, row) for row in tx.select(CLIENTS, {"session": session}, order=("client",))]


def controller_in(tx: Tx, session: SessionId) -> str | None:
    """The controller's id; None if there is no controller."""
    rows = tx.select(CLIENTS, {"session": session})
    return next((row.client for row in rows if row.mode == CONTROLLER), None)


def _is_due(row: ClientRow, now: str) -> bool:
    """Whether a heartbeat that changes nothing becomes an event: the first one, and then one every ten minutes."""
    if row.beat_told_at is None:
        return True
    return parse_timestamp(now) - parse_timestamp(row.beat_told_at) >= HEARTBEAT_EVENT_EVERY


def _request_id(request: Json) -> str:
    named = [request[key] for key in ("id", "request_id") if request.get(key) not in (None, "")]
    return str(named[0]) if named else "permission_request"


def _plain(row: ClientRow) -> Json:
    return {
        "client_id": row.client,
        "mode": row.mode,
        "attached_at": row.attached_at,
        "last_seen_at": row.last_seen_at,
        "prompt_injection": bool(row.prompt_injection),
        "permission_routing": bool(row.permission_routing),
        "metadata": decode(row.metadata),
    }


def _shown(archive: Archive, row: ClientRow) -> Json:
    silent = archive.clock.now() - parse_timestamp(row.last_seen_at)
    return {**_plain(row), "stale": silent >= STALE_AFTER}


def _rights(mode: str, options: Json) -> tuple[int, int]:
    """The rights to prompts and permissions: a controller has both unless it declines; an observer has none."""
    asked = [options.get(name) for name in ("prompt_injection", "permission_routing")]
    if mode == OBSERVER and any(asked):
        raise fault("invalid_params", "Only a controller may inject prompts and route permissions.", field="mode")
    prompts, permissions = (int(mode == CONTROLLER if one is None else one) for one in asked)
    return prompts, permissions


def _parse_client(client_id: object) -> str:
    return parse_user_id(client_id.strip() if isinstance(client_id, str) else client_id, "client_id")


def _checked_metadata(options: Json) -> Json | None:
    metadata: Json | None = options.get("metadata")
    if metadata is not None and len(encode(metadata)) > METADATA_MAX_BYTES:
        raise fault("invalid_params", f"metadata may have at most {METADATA_MAX_BYTES} bytes.", field="metadata")
    return metadata


def _kept(metadata: Json | None, known: ClientRow | None) -> str:
    """The given metadata; without it, the metadata that the client has already."""
    if metadata is None:
        return "{}" if known is None else known.metadata
    return encode(metadata).decode("utf-8")
