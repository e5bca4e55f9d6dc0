"""MCP on stdin and stdout, in a loop of our own: hosts wait for the list of tools, and loading an SDK takes a second.

One thread reads frames, one JSON text a line, and answers at once what needs no files. Tool calls go to a few workers;
the tools themselves are loaded once the list has been answered, or when the first call comes. When input ends, calls in
progress are finished, and those that take long are taken back. Nothing but frames ever reaches stdout.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from mulligan.servers.mcp.listing import names_of, read_table, tools_in
from mulligan.servers.mcp.revisions import (
    INTERNAL,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    NEWEST_HANDSHAKE,
    PARSE_ERROR,
    Body,
    Peer,
    RpcError,
    discover_result,
    enveloped,
    finished,
    initialize_result,
    list_result,
    negotiated,
)
from mulligan.servers.mcp.running import Cancelled, Running
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError

if TYPE_CHECKING:
    from mulligan.servers.mcp.toolbox import Toolbox

FRAME_MAX_BYTES = 64 * 1024 * 1024
WORKERS = 8
FINISH_LIMIT_S = 5.0

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_ENCODE_ASCII = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

OpenTools = Callable[[], "Toolbox"]
Request = tuple[object, Mapping[str, Any], Peer]


class StdioServer:
    """One client. `serve` returns when it has gone and everything it asked for is done."""

    def __init__(self, open_tools: OpenTools, sets: tuple[str, ...], streams: tuple[BinaryIO, BinaryIO]) -> None:
        table = read_table()
        self._open_tools = open_tools
        self._tools = tools_in(table, sets)
        self._names = names_of(self._tools)
        self._server = table.server
        self._input, self._output = streams
        self._peer = Peer(NEWEST_HANDSHAKE)
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._running: dict[object, Running] = {}
        self._toolbox: Toolbox | None = None
        self._why_closed: MulliganError | None = None
        self._opening = threading.Lock()
        self._writing = threading.Lock()

    def serve(self) -> None:
        """An interrupt ends it at once: calls in progress are taken back. Raises KeyboardInterrupt when they are."""
        try:
            self._read_frames()
        except KeyboardInterrupt:
            self._finish(0.0)
            raise
        self._finish(FINISH_LIMIT_S)

    def _read_frames(self) -> None:
        while line := self._input.readline(FRAME_MAX_BYTES + 1):
            if len(line) > FRAME_MAX_BYTES:
                self._skip_line(line)
                self._send_error(None, RpcError(INVALID_REQUEST, f"A frame has at most {FRAME_MAX_BYTES} bytes."))
            elif line.strip():
                self._take(line)

    def _finish(self, limit_s: float) -> None:
        """The client has gone: what it asked for is done, but what takes longer than the limit is taken back."""
        for _ in range(WORKERS):
            self._work.put(None)
        if self._workers:
            self._tools_opened()  # starting up is not what takes long
        deadline = monotonic_s() + limit_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - monotonic_s()))
        for running in list(self._running.values()):
            running.cancel()
        for worker in self._workers:
            worker.join()
        if self._toolbox is not None:
            self._toolbox.close()

    def _skip_line(self, line: bytes) -> None:
        while line and not line.endswith(b"\n"):
            line = self._input.readline(FRAME_MAX_BYTES)

    # Frames.

    def _take(self, line: bytes) -> None:
        try:
            frame = json.loads(line)
        except (ValueError, RecursionError):
            self._send_error(None, RpcError(PARSE_ERROR, "This line is not JSON."))
            return
        if not isinstance(frame, dict) or frame.get("jsonrpc") != "2.0":
            self._send_error(None, RpcError(INVALID_REQUEST, "A frame is a JSON-RPC 2.0 object."))
            return
        if "method" not in frame and ("result" in frame or "error" in frame):
            return  # an answer to a question we never ask
        identifier, method, params = frame.get("id"), frame.get("method"), frame.get("params", {})
        is_named = isinstance(identifier, str | int) and not isinstance(identifier, bool)
        if not isinstance(method, str) or ("id" in frame and not is_named):
            self._send_error(None, RpcError(INVALID_REQUEST, "A request has a text or number as id, and a method."))
        elif "id" not in frame:
            self._notified(method, params)
        else:
            self._requested(identifier, method, params)

    def _requested(self, identifier: object, method: str, params: object) -> None:
        try:
            if not isinstance(params, dict):
                raise RpcError(INVALID_PARAMS, "params is an object.")
            peer = enveloped(params) if method != "initialize" else None
            answer = self._answered(identifier, method, params, peer or self._peer)
        except RpcError as error:
            self._send_error(identifier, error)
            return
        if answer is not None:
            self._send(
                {"jsonrpc": "2.0", "id": identifier, "result": finished(peer or self._peer, answer, self._server)}
            )
        if method == "tools/list":
            self._start_workers()

    def _answered(self, identifier: object, method: str, params: Mapping[str, Any], peer: Peer) -> Body | None:
        """The result, or None if a worker will have it."""
        if method == "initialize":
            self._peer = negotiated(params)
            return initialize_result(self._peer, self._server)
        if method == "server/discover" and peer.is_modern:
            return discover_result()
        if method == "tools/list":
            return list_result(peer, self._tools)
        if method == "ping" and not peer.is_modern:
            return {}
        if method != "tools/call":
            raise RpcError(METHOD_NOT_FOUND, "Method not found", method)
        name = params.get("name")
        if not isinstance(name, str) or name not in self._names:
            raise RpcError(INVALID_PARAMS, f"Unknown tool: {str(name)[:200]}")
        self._start_workers()
        self._accept(identifier, params, peer)
        return None

    def _notified(self, method: str, params: object) -> None:
        if method == "notifications/cancelled" and isinstance(params, dict):
            identifier = params.get("requestId")
            running = self._running.get(identifier) if isinstance(identifier, str | int) else None
            if running is not None:
                running.cancel()

    # Calls.

    def _accept(self, identifier: object, params: Mapping[str, Any], peer: Peer) -> None:
        if identifier in self._running:
            raise RpcError(INVALID_REQUEST, "A request with this id is still running.")
        token = _meta_of(params).get("progressToken")
        tell = None if token is None else lambda done, words: self._send_progress(token, done, words)
        self._running[identifier] = Running(tell)
        self._work.put((identifier, params, peer))

    def _start_workers(self) -> None:
        while len(self._workers) < WORKERS:
            worker = threading.Thread(target=self._worker, daemon=True)
            worker.start()
            # An interrupt in the middle leaves a worker out of the list; it ends with the process.
            self._workers.append(worker)

    def _worker(self) -> None:
        self._tools_opened()
        while (request := self._work.get()) is not None:
            identifier, params, peer = request
            try:
                outcome = self._outcome(identifier, params, peer)
            except _NoAnswer:
                continue
            finally:
                # Before it is answered: whoever has the answer may use the id again.
                self._running.pop(identifier, None)
            self._send({"jsonrpc": "2.0", "id": identifier, **outcome})

    def _outcome(self, identifier: object, params: Mapping[str, Any], peer: Peer) -> Body:
        """What a call came to, as the rest of its answer. The one place where everything is caught."""
        try:
            result = self._called(self._names[params["name"]], identifier, params, peer)
            return {"result": finished(peer, result, self._server)}
        except Cancelled:
            raise _NoAnswer from None
        except RpcError as error:
            return {"error": error.to_json()}
        except Exception:  # noqa: BLE001  # the top of a server: a client gets an answer, whatever is broken
            traceback.print_exc(file=sys.stderr)
            return {"error": RpcError(INTERNAL, "Internal error").to_json()}

    def _called(self, name: str, identifier: object, params: Mapping[str, Any], peer: Peer) -> Body:
        toolbox = self._tools_opened()
        if toolbox is not None:
            running = self._running[identifier]
            return toolbox.call(name, params.get("arguments", {}), _meta_of(params), peer=peer, running=running)
        if self._why_closed is None:
            raise RpcError(INTERNAL, "The workspace could not be opened; see the server's error output.")
        from mulligan.servers.mcp.toolbox import failed_result  # late, as the tools are

        return failed_result(name, self._why_closed)

    def _tools_opened(self) -> Toolbox | None:
        """Loaded once; None if that failed, which is told on stderr, and tried again by the next who needs them."""
        with self._opening:
            if self._toolbox is None:
                try:
                    self._toolbox = self._open_tools()
                except MulliganError as error:
                    if self._why_closed is None:
                        print(f"mulligan: {error.message}", file=sys.stderr)
                    self._why_closed = error
                except Exception:  # noqa: BLE001  # as above: the loop goes on and says so
                    traceback.print_exc(file=sys.stderr)
            return self._toolbox

    # Answers.

    def _send_progress(self, token: object, done: float, words: str) -> None:
        params = {"progressToken": token, "progress": done, "message": words}
        self._send({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})

    def _send_error(self, identifier: object, error: RpcError) -> None:
        self._send({"jsonrpc": "2.0", "id": identifier, "error": error.to_json()})

    def _send(self, frame: Body) -> None:
        """A client that has gone needs no answer; what it asked for still happens."""
        try:
            data = _ENCODE(frame).encode("utf-8")
        except UnicodeEncodeError:
            data = _ENCODE_ASCII(frame).encode("ascii")
        with self._writing:
            try:
                self._output.write(data + b"\n")
                self._output.flush()
            except (BrokenPipeError, ValueError):
                return


class _NoAnswer(Exception):
    """A cancelled request is not answered."""


def _meta_of(params: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = params.get("_meta")
    return meta if isinstance(meta, dict) else {}


def serve_stdio(open_tools: OpenTools, sets: tuple[str, ...]) -> None:
    """Serve this process's stdin and stdout. Whatever else writes to stdout from now on goes to stderr."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    StdioServer(open_tools, sets, (sys.stdin.buffer, output)).serve()
