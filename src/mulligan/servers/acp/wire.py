"""JSON-RPC on lines, in both directions: answers come in any order, and a handler may send requests too.

Mulligan has its own dispatcher, because the protocol's SDK refuses unknown methods without an underscore, as S0's are,
and because importing it takes a second.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from mulligan.values.canonical import decode, encode
from mulligan.values.errors import Family, MulliganError
from mulligan.values.limits import MIB_BYTES

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
NOT_FOUND, CANCELLED = -32004, -32800
BACKEND = -32000
"""Only S0's methods use this code: elsewhere in ACP it means that the client must authenticate."""

LINE_MAX_BYTES = 32 * MIB_BYTES
"""Mulligan does not parse a longer line: the agent refuses it, the proxy passes it on."""
_PIECE_BYTES = MIB_BYTES
_MEMBER = re.compile(rb'\s*[{,]\s*"(jsonrpc|id|method)"\s*:\s*("(?:[^"\\]|\\.){0,999}"|-?\d{1,18})')

Params = dict[str, Any]


class LongLine:
    """A line over the limit, in pieces. Iterating reads one piece at a time and keeps none."""

    def __init__(self, source: IO[bytes], begun: list[bytes]) -> None:
        self._source, self._begun = source, begun
        self._last = begun[-1]
        self.start = begun[0]

    def __iter__(self) -> Iterator[bytes]:
        while self._begun:
            yield self._begun.pop(0)
        while not self._last.endswith(b"\n"):
            self._last = self._source.readline(_PIECE_BYTES)
            if not self._last:
                return
            yield self._last

    def skip(self) -> None:
        """Reads and drops the rest of the line."""
        self._begun.clear()
        for _ in self:
            pass

    def members(self) -> dict[str, Any]:
        """`id` and `method`, if they come first in the line: they allow an answer to the sender."""
        found: dict[str, Any] = {}
        at = 0
        while (member := _MEMBER.match(self.start, at)) is not None:
            found[member[1].decode("ascii")] = decode(member[2])
            at = member.end()
        return found


def lines_of(source: IO[bytes]) -> Iterator[bytes | LongLine]:
    """Yields each line. After a long line, it skips what the caller has not read."""
    while piece := source.readline(_PIECE_BYTES):
        pieces, size_bytes = [piece], len(piece)
        while size_bytes <= LINE_MAX_BYTES and not piece.endswith(b"\n"):
            piece = source.readline(_PIECE_BYTES)
            if not piece:
                break
            pieces.append(piece)
            size_bytes += len(piece)
        if size_bytes - piece.endswith(b"\n") <= LINE_MAX_BYTES:
            whole = b"".join(pieces)
            # While the caller parses the line, there is one copy of it.
            del pieces, piece
            yield whole
        else:
            long = LongLine(source, pieces)
            del pieces
            yield long
            long.skip()


class AcpError(Exception):
    """A JSON-RPC error as the answer to a request."""

    def __init__(self, code: int, message: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        return body if self.data is None else {**body, "data": dict(self.data)}


def invalid_params(words: str) -> AcpError:
    return AcpError(INVALID_PARAMS, words, {"status": "invalid_params"})


class Later:
    """A result, and what to do after the answer is sent."""

    def __init__(self, result: Mapping[str, Any], then: Callable[[], None]) -> None:
        self.result, self.then = result, then


Handler = Callable[[str, Params], Any]


class Wire:
    """One connection. Each request has its own thread; frames are written as a whole, one after another."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes], handler: Handler) -> None:
        self._incoming, self._outgoing, self._handler = incoming, outgoing, handler
        self._writing = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._next = 0
        self._working: set[threading.Thread] = set()

    def serve(self) -> None:
        """Serves until the other end closes; then waits for the requests in progress."""
        for line in lines_of(self._incoming):
            if isinstance(line, LongLine):
                self._refuse_long(line)
            elif line.strip():
                self._handle_line(line)
        for asked in list(self._pending.values()):
            asked.cancel()
        for thread in list(self._working):
            thread.join()

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": dict(params)})

    def ask(self, method: str, params: Mapping[str, Any]) -> Any:
        """Sends a request and waits for its result. Raises AcpError, also if the other end has closed."""
        asked: Future[Any] = Future()
        with self._writing:
            self._next += 1
            number = self._next
            self._pending[number] = asked
        self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})
        try:
            return asked.result()
        finally:
            self._pending.pop(number, None)

    def _send(self, frame: Mapping[str, Any]) -> None:
        self.pass_on(encode(frame) + b"\n")

    def pass_on(self, line: bytes | LongLine) -> None:
        """Writes a line unchanged. No other frame comes between the pieces of a long one."""
        # If the other end has closed, `serve` will see that too.
        with self._writing, suppress(BrokenPipeError, ValueError):
            for piece in (line,) if isinstance(line, bytes) else line:
                self._outgoing.write(piece)
            self._outgoing.flush()

    def _refuse_long(self, line: LongLine) -> None:
        members = line.members()
        line.skip()
        words, details = f"A line has at most {LINE_MAX_BYTES // MIB_BYTES} MiB.", {"limit_bytes": LINE_MAX_BYTES}
        refusal = AcpError(INVALID_REQUEST, words, {"status": "line_too_long", **details})
        asked = None if "method" in members else self._pending.get(members.get("id", -1))
        if asked is not None:
            asked.set_exception(refusal)
        else:
            id = members.get("id") if "method" in members else None
            self._send({"jsonrpc": "2.0", "id": id, "error": refusal.to_json()})

    def _handle_line(self, line: bytes) -> None:
        try:
            frame = decode(line)
        except MulliganError as error:
            self._send({"jsonrpc": "2.0", "id": None, "error": AcpError(PARSE_ERROR, error.message).to_json()})
            return
        if not isinstance(frame, dict):
            self._send({"jsonrpc": "2.0", "id": None, "error": AcpError(INVALID_REQUEST, "Not an object.").to_json()})
        elif "method" not in frame:
            self._handle_answer(frame)
        elif "id" not in frame:
            # Notifications are handled at once, in order: a later prompt must not run before an earlier cancel.
            self.answer(frame)
        else:
            thread = threading.Thread(target=self.answer, args=(frame,), daemon=True)
            self._working = {one for one in self._working if one.is_alive()} | {thread}
            thread.start()

    def _handle_answer(self, frame: Mapping[str, Any]) -> None:
        asked = self._pending.get(frame.get("id", -1))
        if asked is None:
            return
        if "error" in frame:
            error = frame["error"] if isinstance(frame["error"], dict) else {}
            asked.set_exception(AcpError(error.get("code", INTERNAL), str(error.get("message", "refused"))))
        else:
            asked.set_result(frame.get("result"))

    def answer(self, frame: Mapping[str, Any], by: Handler | None = None) -> None:
        """Handles a frame of the other end and sends the answer."""
        params = frame.get("params")
        answer, after = self._outcome(
            by or self._handler, str(frame["method"]), params if isinstance(params, dict) else {}
        )
        if "id" in frame:
            self._send({"jsonrpc": "2.0", "id": frame["id"], **answer})
        if after is not None:
            after()

    def refuse(self, frame: Mapping[str, Any], error: AcpError | MulliganError) -> None:
        """Answers a request with an error."""
        self._send({"jsonrpc": "2.0", "id": frame["id"], "error": _error_body(error)})

    def _outcome(
        self, handler: Handler, method: str, params: Params
    ) -> tuple[dict[str, Any], Callable[[], None] | None]:
        try:
            result = handler(method, params)
        except (AcpError, MulliganError) as error:
            return {"error": _error_body(error)}, None
        except Exception:  # noqa: BLE001  # the top of a server: a client gets an answer, whatever is broken
            traceback.print_exc()
            return {"error": AcpError(INTERNAL, "Something broke; see the agent's error output.").to_json()}, None
        return ({"result": result.result}, result.then) if isinstance(result, Later) else ({"result": result}, None)


def _error_body(error: AcpError | MulliganError) -> dict[str, Any]:
    if isinstance(error, AcpError):
        return error.to_json()
    code = INVALID_PARAMS if error.family is Family.REQUEST else INTERNAL
    return AcpError(code, error.message, {"status": error.code}).to_json()
