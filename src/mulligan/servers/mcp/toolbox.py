"""What a tool call comes to, whichever transport it came by. Loaded with the first call, not before."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from mulligan.boundary.verdict import Boundary
from mulligan.effects.board import board_of
from mulligan.effects.hosting import hosted
from mulligan.effects.perform import perform
from mulligan.effects.receipt import refusal_receipt
from mulligan.effects.registry import BY_NAME as EFFECTS
from mulligan.effects.registry import Effect
from mulligan.effects.substrate.bench import Bench, Named
from mulligan.effects.substrate.failure import failure_of
from mulligan.effects.substrate.tools import BY_NAME as SUBSTRATE
from mulligan.effects.substrate.tools import run_tool
from mulligan.history.desk import Desk
from mulligan.servers.mcp.history_tools import HISTORY, failed_body, run_history
from mulligan.servers.mcp.revisions import INVALID_PARAMS, Body, Peer, RpcError, label_of, turn_of
from mulligan.servers.mcp.running import Cancelled, Progress, Running
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId, TurnId, parse_user_id
from mulligan.values.refusal import Refused

PROGRESS_EVERY_S = 0.1


class Place(NamedTuple):
    """A folder the tools work in."""

    desk: Desk
    bench: Bench


class Toolbox:
    """The tools of one root. For any thread. Close it.

    `session` is that of calls that name none; without it, they have one for each root and client. With it, calls that
    name another may do no more there than in this one: a model does not choose its own authority.
    """

    def __init__(self, desk: Desk, boundary: Boundary, session: str | None = None) -> None:
        self._boundary = boundary
        self._session = session
        self._places = [Place(desk, Bench(desk, boundary))]
        self._moving = threading.Lock()

    def close(self) -> None:
        for place in self._places:
            place.bench.close()

    def call(self, name: str, arguments: object, meta: Mapping[str, Any], *, peer: Peer, running: Running) -> Body:
        """The result of `tools/call`. Raises RpcError for what is no tool call, Cancelled for one taken back."""
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments is an object.")
        given = dict(arguments)
        session = given.pop("session_id", None)
        if name == "history_log" and session is not None:
            given.setdefault("everyone", False)  # who names a session means that one
        try:
            place = self._place()
            named = self._named(place, session, meta, peer=peer, running=running)
            result = tool_result(*self._done(place, name, given, named=named, running=running))
        except (MulliganError, Refused) as error:
            result = failed_result(name, error)
        if running.cancelled:
            raise Cancelled
        return result

    def _place(self) -> Place:
        """The folder that has the root's name now. Whoever still works in one that had it before is not disturbed."""
        path = self._places[-1].desk.disk.root.path
        try:
            with self._moving:
                current = self._places[-1]
                if not os.path.samestat(os.stat(path), os.fstat(current.desk.disk.root.handle)):
                    desk = self._places[0].desk.elsewhere(path, record=True)
                    current = Place(desk, Bench(desk, self._boundary))
                    self._places.append(current)
                return current
        except OSError as error:
            shown = os.fsdecode(path)
            raise fault("unknown_root", f"{shown}, the root of this server, is gone: {error.strerror}.") from None

    def _named(self, place: Place, session: object, meta: Mapping[str, Any], *, peer: Peer, running: Running) -> Named:
        default = self._session or f"mcp:{peer.client[:100]}:{place.desk.root.id}"
        chosen = default if session is None else parse_user_id(session, "session_id")
        turn = turn_of(meta)
        within = self._boundary
        if self._session is not None and chosen != self._session:
            within = hosted(place.desk, SessionId(self._session), default=within).boundary
        return Named(
            SessionId(chosen),
            label=label_of(meta),
            turn=None if turn is None else TurnId(turn),
            began=lambda call: running.began(lambda: board_of(place.desk).stop(call.id)),
            may_commit=running.settle,
            within=within,
        )

    def _done(
        self, place: Place, name: str, given: Body, *, named: Named, running: Running
    ) -> tuple[Body, bool, str | None]:
        if name in SUBSTRATE:
            outcome = run_tool(place.bench, SUBSTRATE[name], given, named)
            return outcome.body, outcome.is_error, outcome.call_id
        if name in HISTORY:
            if not running.settle():  # a way back is one step: before it a cancel is in time, after it is not
                raise Cancelled
            within = named.within or self._boundary
            return (*run_history(place.desk, name, given, named.session, boundary=within), None)
        return self._performed(place.desk, EFFECTS[name], given, named=named, running=running)

    def _performed(
        self, desk: Desk, effect: Effect, given: Body, *, named: Named, running: Running
    ) -> tuple[Body, bool, str | None]:
        call = desk.call(named.session, turn=named.turn, label=named.label, tool=effect.tool)
        sink = None if running.progress is None else _Ticker(running.progress)
        with call:
            named.began(call)
            receipt = perform(desk, call, effect.name, given, boundary=named.within or self._boundary, sink=sink)
            if not receipt.ok or not named.may_commit():
                call.abort(receipt.error_code or "cancelled")
        return receipt.to_dict(), receipt.status != "ok", call.id


class _Ticker:
    """A command's output as progress: how many bytes so far, and the last line."""

    def __init__(self, tell: Progress) -> None:
        self._tell = tell
        self._size = 0
        self._next_s = 0.0

    def write(self, stream: str, data: bytes) -> None:
        self._size += len(data)
        if monotonic_s() >= self._next_s:
            self._next_s = monotonic_s() + PROGRESS_EVERY_S
            line = data.rstrip().rpartition(b"\n")[2][-200:]
            self._tell(float(self._size), line.decode("utf-8", "replace"))


def tool_result(body: Body, failed: bool, call_id: str | None) -> Body:
    """Complete twice: as structure, and as text for hosts that only show that."""
    result: Body = {
        "content": [{"type": "text", "text": encode(body).decode("utf-8")}],
        "structuredContent": body,
        "isError": failed,
    }
    return result if call_id is None else {**result, "_meta": {"mulligan/callId": call_id}}


def failed_result(name: str, error: MulliganError | Refused) -> Body:
    """A fault in the words of the tool that met it."""
    if name in SUBSTRATE:
        body = failure_of(error).envelope()
    elif name in HISTORY:
        body = failed_body(error)
    else:
        body = refusal_receipt(name, Refused("error", error.code, error.message)).to_dict()
    return tool_result(body, True, None)
