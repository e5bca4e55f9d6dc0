"""What a tool call comes to, whichever transport it came by. Loaded with the first call, not before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mulligan.boundary.verdict import Boundary
from mulligan.effects.perform import perform
from mulligan.effects.registry import BY_NAME as EFFECTS
from mulligan.effects.registry import Effect
from mulligan.effects.substrate.bench import Bench, Named
from mulligan.effects.substrate.tools import BY_NAME as SUBSTRATE
from mulligan.effects.substrate.tools import run_tool
from mulligan.history.desk import Desk
from mulligan.servers.mcp.history_tools import HISTORY, run_history
from mulligan.servers.mcp.revisions import INVALID_PARAMS, Body, Peer, RpcError, label_of, turn_of
from mulligan.servers.mcp.running import Cancelled, Progress, Running
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError
from mulligan.values.ids import SessionId, TurnId, parse_user_id

PROGRESS_EVERY_S = 0.1


@dataclass(slots=True)
class Toolbox:
    """The tools of one root. For any thread. Close it."""

    desk: Desk
    boundary: Boundary
    session: str | None = None
    """the session of calls that name none; without it, one for each root and client"""
    bench: Bench = field(init=False)

    def __post_init__(self) -> None:
        self.bench = Bench(self.desk, self.boundary)

    def close(self) -> None:
        self.bench.close()

    def call(self, name: str, arguments: object, meta: Mapping[str, Any], *, peer: Peer, running: Running) -> Body:
        """The result of `tools/call`. Raises RpcError for what is no tool call, Cancelled for one taken back."""
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments is an object.")
        given = {key: value for key, value in arguments.items() if key != "session_id"}
        named = self._named(arguments.get("session_id"), meta, peer, running)
        body, failed, call_id = self._done(name, given, named, running)
        if running.cancelled:
            raise Cancelled
        return tool_result(body, failed, call_id)

    def _named(self, session: object, meta: Mapping[str, Any], peer: Peer, running: Running) -> Named:
        try:
            default = self.session or f"mcp:{peer.client[:100]}:{self.desk.root.id}"
            chosen = default if session is None else parse_user_id(session)
        except MulliganError as error:
            raise RpcError(INVALID_PARAMS, f"session_id: {error.message}") from None
        turn = turn_of(meta)
        return Named(
            SessionId(chosen),
            label=label_of(meta),
            turn=None if turn is None else TurnId(turn),
            began=lambda call: running.began(call.id),
            may_commit=running.settle,
        )

    def _done(self, name: str, given: Body, named: Named, running: Running) -> tuple[Body, bool, str | None]:
        if name in SUBSTRATE:
            outcome = run_tool(self.bench, SUBSTRATE[name], given, named)
            return outcome.body, outcome.is_error, outcome.call_id
        if name in HISTORY:
            if not running.settle():  # a way back is one step: before it a cancel is in time, after it is not
                raise Cancelled
            return (*run_history(self.desk, name, given, named.session), None)
        return self._performed(EFFECTS[name], given, named, running)

    def _performed(self, effect: Effect, given: Body, named: Named, running: Running) -> tuple[Body, bool, str | None]:
        call = self.desk.call(named.session, turn=named.turn, label=named.label, tool=effect.tool)
        sink = None if running.progress is None else _Ticker(running.progress)
        with call:
            named.began(call)
            receipt = perform(self.desk, call, effect.name, given, boundary=self.boundary, sink=sink)
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
