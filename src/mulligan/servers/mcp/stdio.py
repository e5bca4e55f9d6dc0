"""MCP on stdin and stdout, without the SDK: hosts wait for the list of tools, and importing the SDK takes a second.

One thread reads frames, one JSON text on each line, and answers at once what needs no files. A few workers run the tool
calls; they load the tools after the list is sent, or with the first call. When the input ends, the server finishes the
calls in progress and aborts those that take long. Only frames reach stdout. `parse_plain` and `serve_plain` start
`mulligan mcp` without click if it has only plain options.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from mulligan.servers.mcp.protocol import (
    INTERNAL,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    NEWEST_HANDSHAKE,
    PARSE_ERROR,
    TOOLSETS,
    Body,
    Peer,
    RequestCancelledError,
    RpcError,
    Running,
    cache_hints,
    discover_result,
    enveloped,
    finished,
    initialize_result,
    list_result,
    names_of,
    negotiated,
    parse_sets,
    prompt_result,
    prompts_in,
    read_table,
    tools_in,
    with_profile,
)
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import MulliganError

if TYPE_CHECKING:
    from mulligan.boundary.verdict import Boundary
    from mulligan.history.open_root import OpenRoot
    from mulligan.servers.mcp.dispatch import Toolbox

FRAME_MAX_BYTES = 64 * 1024 * 1024
WORKERS = 8
FINISH_LIMIT_S = 5.0

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_ENCODE_ASCII = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

OpenTools = Callable[[], "Toolbox"]
Request = tuple[object, Mapping[str, Any], Peer]


class StdioServer:
    """Serves one client. `serve` returns when the client has closed and all its requests are done."""

    def __init__(self, open_tools: OpenTools, sets: tuple[str, ...], streams: tuple[BinaryIO, BinaryIO]) -> None:
        table = read_table()
        self._open_tools = open_tools
        self._tools = tools_in(table, sets)
        self._sets = sets
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
        """Serves until the input ends. An interrupt aborts the calls in progress and is raised afterwards."""
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
        """Finishes the calls in progress, and aborts those that take longer than the limit."""
        for _ in range(WORKERS):
            self._work.put(None)
        if self._workers:
            self._tools_opened()  # the time for opening the tools does not count
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
            return  # an answer, but this server sends no requests
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
        """The result; None if a worker will send it."""
        if method == "initialize":
            self._peer = negotiated(params)
            return initialize_result(self._peer, self._server)
        if method == "server/discover" and peer.is_modern:
            return discover_result()
        if method == "tools/list":
            return list_result(peer, self._tools)
        if method == "prompts/list":
            return {"prompts": prompts_in(self._sets), **cache_hints(peer)}
        if method == "prompts/get":
            return prompt_result(params.get("name"), params.get("arguments"), self._sets)
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
            # An interrupt here leaves a worker out of the list; the worker ends with the process.
            self._workers.append(worker)

    def _worker(self) -> None:
        self._tools_opened()
        while (request := self._work.get()) is not None:
            identifier, params, peer = request
            try:
                outcome = self._outcome(identifier, params, peer)
            except _NoAnswerError:
                continue
            finally:
                # Before the answer: after it the client may reuse the id.
                self._running.pop(identifier, None)
            self._send({"jsonrpc": "2.0", "id": identifier, **outcome})

    def _outcome(self, identifier: object, params: Mapping[str, Any], peer: Peer) -> Body:
        """The result or error of a call. Catches every exception, because it is the top of the server."""
        try:
            result = self._called(self._names[params["name"]], identifier, params, peer)
            return {"result": finished(peer, result, self._server)}
        except RequestCancelledError:
            raise _NoAnswerError from None
        except RpcError as error:
            return {"error": error.to_json()}
        except Exception:  # noqa: BLE001  # the top of a server: a client gets an answer after any error
            traceback.print_exc(file=sys.stderr)
            return {"error": RpcError(INTERNAL, "Internal error").to_json()}

    def _called(self, name: str, identifier: object, params: Mapping[str, Any], peer: Peer) -> Body:
        toolbox = self._tools_opened()
        if toolbox is not None:
            running = self._running[identifier]
            return toolbox.call(name, params.get("arguments", {}), _meta_of(params), peer=peer, running=running)
        if self._why_closed is None:
            raise RpcError(INTERNAL, "The workspace could not be opened; see the server's error output.")
        from mulligan.servers.mcp.dispatch import failed_result  # imported late, because it is slow to load

        return failed_result(name, self._why_closed)

    def _tools_opened(self) -> Toolbox | None:
        """Opens the tools once. If that fails, prints the error and returns None; the next call tries again."""
        with self._opening:
            if self._toolbox is None:
                try:
                    self._toolbox = self._open_tools()
                except MulliganError as error:
                    if self._why_closed is None:
                        print(f"mulligan: {error.message}", file=sys.stderr)
                    self._why_closed = error
                except Exception:  # noqa: BLE001  # the top of a server: the loop goes on and answers that the tools did not open
                    traceback.print_exc(file=sys.stderr)
            return self._toolbox

    # Answers.

    def _send_progress(self, token: object, done: float, words: str) -> None:
        params = {"progressToken": token, "progress": done, "message": words}
        self._send({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})

    def _send_error(self, identifier: object, error: RpcError) -> None:
        self._send({"jsonrpc": "2.0", "id": identifier, "error": error.to_json()})

    def _send(self, frame: Body) -> None:
        """Writes a frame. If the client has closed, it gets no answer, but its requests still run."""
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


class _NoAnswerError(Exception):
    """A cancelled request is not answered."""


def _meta_of(params: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = params.get("_meta")
    return meta if isinstance(meta, dict) else {}


def serve_stdio(open_tools: OpenTools, sets: tuple[str, ...]) -> None:
    """Serves stdin and stdout. Other output to stdout goes to stderr from now on."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    StdioServer(open_tools, sets, (sys.stdin.buffer, output)).serve()


class McpWorkspace(Protocol):
    """An open workspace, as `mulligan.open` returns it."""

    open_root: OpenRoot
    boundary: Boundary

    def close(self) -> None: ...


class McpOptions(NamedTuple):
    """The options of `mulligan mcp`."""

    root: str | None = None
    store: str | None = None
    session: str | None = None
    sets: tuple[str, ...] = TOOLSETS


INTERRUPTED = 130
"""The exit code after an interrupt."""

OpenWorkspace = Callable[[McpOptions], McpWorkspace]

_PLAIN = {"--root": "root", "--store": "store", "--session": "session", "--tools": "sets", "--profile": "profile"}


def parse_plain(words: Sequence[str]) -> McpOptions | None:
    """Parses the plain options of stdio; None for other options, which the full command line parses or refuses."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in _PLAIN or (not equals and not rest):
            return None
        found[_PLAIN[name]] = value if equals else rest.pop(0)
    sets = choose_sets(found.get("sets"), found.get("profile"))
    return None if sets is None else McpOptions(found.get("root"), found.get("store"), found.get("session"), sets)


def choose_sets(tools: str | None, profile: str | None) -> tuple[str, ...] | None:
    """The sets for --tools and --profile; None if they do not fit together."""
    sets = TOOLSETS if tools is None else parse_sets(tools)
    return sets if sets is None or profile is None else with_profile(sets, profile)


def serve_plain(asked: McpOptions, open_workspace: OpenWorkspace) -> None:
    """Serves stdio. Opens the workspace when a tool needs it, and closes it at the end."""
    opened = ExitStack()

    def open_tools() -> Toolbox:
        return toolbox_of(opened.enter_context(closing(open_workspace(asked))), asked)

    try:
        with opened:
            serve_stdio(open_tools, asked.sets)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except MulliganError as error:
        raise SystemExit(f"mulligan: {error.message}") from None


def toolbox_of(workspace: McpWorkspace, asked: McpOptions) -> Toolbox:
    # Imported with the first tool call: importing the tools takes longer than a host waits for their list.
    from mulligan.servers.mcp.dispatch import Toolbox

    return Toolbox(workspace.open_root, workspace.boundary, asked.session)
