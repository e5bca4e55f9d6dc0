"""Live clients: who looks at a session, and who of them is in control.

What must hold:
1. A session has any number of observers and at most one controller, whichever process they are in.
2. Control changes hands only when somebody says so: attaching as a second controller is refused, taking over is not.
3. Only the controller, with the right for it, supplies prompts and routes permissions; that is judged in the same
   transaction that puts the prompt or the route on record.
4. Presence is beside the talk. A heartbeat updates a row in place; it is told as an event when it changes something,
   else at most every ten minutes.

Who is attached is coordination between living programs and not folded from the journal; what they did is events.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from mulligan.session.in_force import InForce
from mulligan.session.options import checked_options
from mulligan.session.subscribers import poke
from mulligan.session.tables import CLIENTS, ClientRow
from mulligan.session.transcript import Archive, Written, append_event_in, append_message_in, written
from mulligan.store.blobs import Vanished
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.faults import MulliganError, fault
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


class Clients(InForce):
    """The verbs of a session about its live clients. Options are given as an object, as keywords, or both."""

    # Changing who is there.

    def attach(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """Attach a client, or change how it is attached: `mode` observer (default) or controller, `takeover`,
        `prompt_injection`, `permission_routing`, `metadata`. A second controller must ask for takeover.
        """
        options = _options("attach", opts, given, _ATTACH)
        takes_over = options.get("takeover", False)
        mode = options.get("mode", CONTROLLER if takes_over else OBSERVER)
        if mode not in (OBSERVER, CONTROLLER):
            raise fault("invalid_params", f"mode is {OBSERVER!r} or {CONTROLLER!r}.", field="mode")
        if takes_over and mode == OBSERVER:
            raise fault("invalid_params", "takeover makes a controller, not an observer.", field="takeover")
        return self._attach("attach", _parse_client(client_id), mode, options)

    def takeover(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """Attach a client as the controller; whoever was it becomes an observer without rights."""
        options = {**_options("takeover", opts, given, _RIGHTS), "takeover": True}
        return self._attach("takeover", _parse_client(client_id), CONTROLLER, options)

    def _attach(self, verb: str, client: str, mode: str, options: Json) -> Json:
        prompts, permissions = _rights(mode, options)
        metadata = _checked_metadata(options)
        with self._archive.store.write() as tx:
            self._check_open(tx, verb)
            before, now = controller_in(tx, self.id), self._archive.now()
            if mode == CONTROLLER and before not in (None, client):
                self._demote(tx, before, asked=bool(options.get("takeover")))
            known = tx.get(CLIENTS, self.id, client)
            if known is None and tx.count(CLIENTS, {"session": self.id}) >= CLIENTS_MAX:
                raise fault("too_many_clients", f"Session {self.id!r} has {CLIENTS_MAX} clients; detach stale ones.")
            row = ClientRow(
                session=self.id,
                client=client,
                mode=mode,
                attached_at=now if known is None else known.attached_at,
                last_seen_at=now,
                prompt_injection=prompts,
                permission_routing=permissions,
                metadata=_kept(metadata, known),
                beat_told_at=None if known is None else known.beat_told_at,
            )
            tx.put(CLIENTS, row)
            action = "takeover" if options.get("takeover") else "attached"
            answer = self._told(tx, row.client, before=before, event={"action": action, "client": _plain(row)})
        poke(self._archive.store)
        return answer

    def _demote(self, tx: Tx, controller: str | None, *, asked: bool) -> None:
        if not asked:
            words = f"{controller!r} is in control of session {self.id!r}; ask for takeover to become its controller."
            raise fault("controller_present", words, controller_id=controller)
        tx.update(CLIENTS, self.id, controller, mode=OBSERVER, prompt_injection=0, permission_routing=0)

    def detach(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """Take a client off the list; `reason` says why. A controller that goes leaves nobody in control."""
        options = _options("detach", opts, given, _DETACH)
        with self._archive.store.write() as tx:
            row = self._attached(tx, client_id, "detach")
            before = controller_in(tx, self.id)
            tx.delete(CLIENTS, self.id, row.client)
            event = {"action": "detached", "client_id": row.client, "mode": row.mode, "reason": DEFAULT_DETACH_REASON}
            answer = self._told(tx, None, before=before, event={**event, **options})
        poke(self._archive.store)
        return answer

    def heartbeat(self, client_id: str, opts: Options = None, /, **given: Any) -> Json:
        """The client is still there. `metadata` replaces what it said of itself."""
        metadata = _checked_metadata(_options("heartbeat", opts, given, _METADATA))
        with self._archive.store.write() as tx:
            row, now = self._attached(tx, client_id, "heartbeat"), self._archive.now()
            seen = replace(row, last_seen_at=max(now, row.last_seen_at), metadata=_kept(metadata, row))
            before, changes = controller_in(tx, self.id), seen.metadata != row.metadata
            if not changes and not _is_due(row, now):
                tx.update(CLIENTS, self.id, row.client, last_seen_at=seen.last_seen_at)
                return self._state(tx, row.client, before=before)
            tx.put(CLIENTS, replace(seen, beat_told_at=now))
            event: Json = {"action": "heartbeat", "client_id": row.client, "last_seen_at": now}
            answer = self._told(
                tx, row.client, before=before, event=event | ({"metadata": metadata} if changes else {})
            )
        poke(self._archive.store)
        return answer

    # Looking.

    def live_clients(self) -> list[Json]:
        """Who is attached, by id. One silent for a minute is shown as stale; what becomes of it others decide."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "live_clients")
            return clients_in(tx, self._archive, self.id)

    # What only the controller may do.

    def client_inject_prompt(self, client_id: str, content: object, opts: Options = None, /, **given: Any) -> None:
        """Append a user message for the controller. Nobody else's prompt is ever on record as one."""
        metadata = _checked_metadata(_options("client_inject_prompt", opts, given, _METADATA))
        client = _parse_client(client_id)
        if not isinstance(content, str | list) or not content or (isinstance(content, str) and not content.strip()):
            raise fault("invalid_params", "A prompt is text that says something, or a list of blocks.", field="content")
        source = {"client_id": client, "mode": CONTROLLER, "source": "live_session_attach", "metadata": metadata or {}}
        message = {"role": "user", "content": content, "metadata": {"live_session": source}}
        refused = self._prompted(client, message)
        poke(self._archive.store)
        if refused is not None:
            raise refused

    def _prompted(self, client: str, message: Json) -> MulliganError | None:
        while True:
            ready = written(self._archive, message)
            # A large body may be collected between its packing and our transaction; then it is packed again.
            with suppress(Vanished), self._archive.store.write() as tx:
                return self._prompt_in(tx, client, ready)

    def _prompt_in(self, tx: Tx, client: str, message: Written) -> MulliganError | None:
        self._check_right(tx, client, "client_inject_prompt", "prompt_injection")
        refused = self._make_room(tx, "client_inject_prompt")
        if refused is None:
            append_message_in(tx, self._archive, self.id, message)
            tx.update(CLIENTS, self.id, client, last_seen_at=self._archive.now())
        return refused

    def route_permission(self, client_id: str, request: object, opts: Options = None, /, **given: Any) -> Json:
        """Put on record that the controller decides about a permission somebody asks for."""
        metadata = _checked_metadata(_options("route_permission", opts, given, _METADATA))
        client, asked = _parse_client(client_id), _checked_request(request)
        told = {"request_id": _request_id(asked), "request": asked, "metadata": metadata or {}}
        with self._archive.store.write() as tx:
            self._check_right(tx, client, "route_permission", "permission_routing")
            tx.update(CLIENTS, self.id, client, last_seen_at=self._archive.now())
            event = {"action": "permission_routed", "client_id": client, **told}
            append_event_in(tx, self._archive, self.id, ROUTE_EVENT, metadata=event)
            shown = self._state(tx, client, before=client)["client"]
        poke(self._archive.store)
        return {"action": "permission_routed", "client": shown, **told}

    def _check_right(self, tx: Tx, client: str, verb: str, right: str) -> None:
        """In this order: the session is there, the client is in control of it, and has the right."""
        self._check_open(tx, verb)
        row = tx.get(CLIENTS, self.id, client)
        if row is None or row.mode != CONTROLLER:
            active = controller_in(tx, self.id)
            words = f"{verb}: {client!r} is not in control of session {self.id!r}; {active or 'nobody'} is."
            raise fault("not_controller", words, controller_id=active)
        if not getattr(row, right):
            raise fault("client_may_not", f"{verb}: {client!r} is in control without the right to it.", right=right)

    # Inside.

    def _attached(self, tx: Tx, client_id: str, verb: str) -> ClientRow:
        client = _parse_client(client_id)
        self._check_open(tx, verb)
        row = tx.get(CLIENTS, self.id, client)
        if row is None:
            words = f"{verb}: {client!r} is not attached to session {self.id!r}."
            raise fault("client_not_attached", words, client_id=client)
        return row

    def _told(self, tx: Tx, client: str | None, *, before: str | None, event: Json) -> Json:
        """The change as an event, and as its answer."""
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
    """The client in control, if there is one."""
    rows = tx.select(CLIENTS, {"session": session})
    return next((row.client for row in rows if row.mode == CONTROLLER), None)


def release_all_in(tx: Tx, session: SessionId) -> None:
    """The session is over: nobody is attached to it any more."""
    for row in tx.select(CLIENTS, {"session": session}):
        tx.delete(CLIENTS, session, row.client)


def _is_due(row: ClientRow, now: str) -> bool:
    """Whether it is time to tell a heartbeat that changes nothing. The first one after coming is told too."""
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
    """Prompts and permissions: a controller's unless it declines them, never an observer's."""
    asked = [options.get(name) for name in ("prompt_injection", "permission_routing")]
    if mode == OBSERVER and any(asked):
        raise fault("invalid_params", "Only a controller injects prompts and routes permissions.", field="mode")
    prompts, permissions = (int(mode == CONTROLLER if one is None else one) for one in asked)
    return prompts, permissions


def _parse_client(client_id: object) -> str:
    return parse_user_id(client_id.strip() if isinstance(client_id, str) else client_id, "client_id")


def _checked_metadata(options: Json) -> Json | None:
    metadata: Json | None = options.get("metadata")
    if metadata is not None and len(encode(metadata)) > METADATA_MAX_BYTES:
        raise fault("invalid_params", f"metadata has at most {METADATA_MAX_BYTES} bytes.", field="metadata")
    return metadata


def _kept(metadata: Json | None, known: ClientRow | None) -> str:
    """What is given replaces what was there; without anything given, that stays."""
    if metadata is None:
        return "{}" if known is None else known.metadata
    return encode(metadata).decode("utf-8")


def _checked_request(request: object) -> Json:
    if not isinstance(request, Mapping):
        raise fault("invalid_params", "A permission request is an object.", field="request")
    data = encode(dict(request))
    if len(data) > REQUEST_MAX_BYTES:
        raise fault("invalid_params", f"A request has at most {REQUEST_MAX_BYTES} bytes.", field="request")
    found: Json = decode(data)
    return found
