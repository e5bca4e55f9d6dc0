"""`mulligan acp -- COMMAND…`: a proxy between a client and another agent, which records what the agent does.

`Relay` passes every line on unchanged, with three exceptions: it adds Mulligan's capabilities to the answer to
`initialize` and Mulligan's commands to those of the agent, and it adds a text block to a prompt if the model must learn
that files were undone. It answers requests for undo operations itself, and prompts that are commands, such as `/undo`.
It holds a line back only until the record is written, and never longer than `HOLD_MAX_S`.
`run_proxy` passes signals to the agent and returns its exit code.
"""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BufferedReader
from typing import Any, Generic, TypeVar, cast

from mulligan.history.baseline import kernel_time_ns
from mulligan.hosts.typed import DESCRIPTIONS, TypedCommand, answer, parse_typed
from mulligan.servers.acp.permissions import PermissionRequests
from mulligan.servers.acp.recorder import (
    ADDED_CAPABILITIES,
    OVER,
    READ_ONLY_KINDS,
    Frame,
    ProxiedSession,
    ProxyRecorder,
    capabilities_of,
    folder_of,
    text_of_prompt,
    with_our_capabilities,
    with_preface,
)
from mulligan.servers.acp.undo import STRICT_METHODS, Workspaces, param, run_undo_method
from mulligan.servers.acp.wire import (
    BACKEND,
    INVALID_PARAMS,
    LINE_MAX_BYTES,
    METHOD_NOT_FOUND,
    AcpError,
    LongLine,
    Params,
    Wire,
    lines_of,
)
from mulligan.values.canonical import encode, object_in
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MIB_BYTES

T = TypeVar("T")


class WorkerTask(Generic[T]):
    """A task for the worker thread; `result` is None until it is done, and if it failed."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act = act
        self._done = threading.Event()
        self.result: T | None = None

    def run(self) -> None:
        try:
            self.result = self._act()
        finally:
            self._done.set()

    def wait(self, at_most_s: float) -> T | None:
        self._done.wait(at_most_s)
        return self.result


class Worker:
    """One thread that runs jobs in order, so that the streams need not wait for them.

    Between jobs it calls `idle`, which returns how long to wait before the next call; None waits for a job. The
    argument of `idle` is whether such a wait has passed without a job.
    """

    def __init__(self, idle: Callable[[bool], float | None], failed: Callable[[Exception], None]) -> None:
        self._idle, self._failed = idle, failed
        self._waiting: queue.SimpleQueue[WorkerTask[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mulligan-proxy")
        self._printed: set[str] = set()
        self._thread.start()

    def do(self, act: Callable[[], T]) -> WorkerTask[T]:
        job = WorkerTask(act)
        self._waiting.put(job)  # type: ignore[arg-type]  # what it results in is for its owner
        return job

    def wait(self, at_most_s: float) -> None:
        """Waits until all jobs so far are done."""
        self.do(lambda: None).wait(at_most_s)

    def end(self, at_most_s: float) -> bool:
        """Ends the thread after its jobs. Whether it ended in time."""
        self._waiting.put(None)
        self._thread.join(at_most_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s: float | None = None
        while True:
            try:
                job = self._waiting.get(timeout=pause_s)
            except queue.Empty:
                pause_s = self._run_guarded(partial(self._idle, bool(pause_s)))
                continue
            if job is None:
                return
            self._run_guarded(job.run)
            pause_s = 0.0 if self._waiting.empty() else None

    def _run_guarded(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except Exception as error:  # noqa: BLE001  # the top of a server: the agent goes on after any error of ours
            self._print_once(error)
            self._failed(error)
            return None

    def _print_once(self, error: Exception) -> None:
        """Prints each kind of error once: stderr belongs to the agent."""
        words = "".join(traceback.format_exception_only(error)).strip()
        if words not in self._printed:
            self._printed.add(words)
            print(f"mulligan: not recorded: {words}", file=sys.stderr, flush=True)


HOLD_MAX_S = 2.0
QUIET_S = 1.0
_READ_S = 0.05
_MATTERS = re.compile(rb'tool_call|"id"|available_commands')
_PERMISSION = "session/request_permission"
_WAITS = (_PERMISSION, "fs/write_text_file", "terminal/create")
_SESSION_METHODS = ("session/new", "session/load", "session/resume", "session/fork")
_OUR_ID = "mulligan:fork:"
_HINTS = {"undo": "[CALL]", "mulligan": "VERB"}
_COMMANDS: list[Frame] = [
    {"name": name, "description": words, **({"input": {"hint": _HINTS[name]}} if name in _HINTS else {})}
    for name, words in DESCRIPTIONS.items()
]


@fast_dataclass(slots=True, frozen=True)
class PendingRequest:
    """A client's request that the agent has not answered yet."""

    method: str
    params: Params


class Relay:
    """Passes lines between a client and an agent, and gives what they mean to the recorder."""

    def __init__(self, client: Wire, agent: Wire, recorder: ProxyRecorder) -> None:
        self._client, self._agent, self._recorder = client, agent, recorder
        self._worker = Worker(self._idle, recorder.note_failure)
        self._pending_requests: dict[object, PendingRequest] = {}
        self._prompting: dict[str, int] = {}
        self._counting = threading.Lock()
        self._forks: dict[str, tuple[object, Params]] = {}
        self._fork_numbers = itertools.count(1)
        self._agent_capabilities: dict[str, Any] = {}
        self._announced: set[tuple[object, str]] = set()
        self._agent_line_begun = False
        self._commands: dict[str, list[Any]] = {}
        self._unannounced: list[str] = []
        self._permissions = PermissionRequests(agent)
        recorder.is_more_announced = lambda: bool(self._announced)

    def end(self, reason: str, at_most_s: float) -> bool:
        """Ends the recording after the agent has ended. Whether everything was recorded in time."""
        self._worker.do(self._permissions.end)
        self._worker.do(lambda: self._recorder.end(reason))
        return self._worker.end(at_most_s)

    def _idle(self, rested: bool) -> float | None:
        """Reads files in small pieces; scans the tree after a while without news of a tool call."""
        if self._recorder.read_more_files(_READ_S):
            return 0.0
        if rested and self._prompting and not self._agent_line_begun:
            # A newer change may belong to a tool call whose announcement the proxy has not read yet.
            self._recorder.scan_idle_folders(until_ns=kernel_time_ns() - int(QUIET_S * 1e9))
        return QUIET_S if self._prompting else None

    # From the client.

    def from_client(self, line: bytes) -> None:
        passed = _guarded(self._read_client_line, line)
        if passed is not None:
            self._agent.pass_on(passed)

    def long_from_client(self, line: LongLine) -> None:
        _report_long_line("client")
        self._agent.pass_on(line)

    def _read_client_line(self, line: bytes) -> bytes | None:
        """The line for the agent; None if the proxy answers the request itself."""
        frame = object_in(line)
        method = frame.get("method")
        if method is None and "id" in frame and self._permissions.has_answer(frame):
            return None
        if not isinstance(method, str) or "id" not in frame:
            return line
        if self._is_ours(method):
            self._answer(frame)
            return None
        typed = parse_typed("acp", text_of_prompt(_params(frame))) if method == "session/prompt" else None
        if typed is not None and self._recorder.is_recorded(str(_params(frame).get("sessionId"))):
            busy = str(_params(frame)["sessionId"]) in self._prompting
            run = partial(self._run_typed, typed, busy=busy)
            self._worker.do(lambda: self._client.answer(frame, lambda _, params: run(params)))
            return None
        self._pending_requests[_key(frame)] = PendingRequest(method, _params(frame))
        return self._with_preface(frame, line) if method == "session/prompt" else line

    def _is_ours(self, method: str) -> bool:
        added = ADDED_CAPABILITIES.get(method)
        return method in STRICT_METHODS or (added is not None and added not in self._agent_capabilities)

    def _with_preface(self, frame: Frame, line: bytes) -> bytes:
        """The prompt's line, once the files are scanned and the turn is recorded."""
        params = _params(frame)
        session = str(params.get("sessionId"))
        self._count(session, +1)
        text = text_of_prompt(params)
        told = self._worker.do(lambda: self._recorder.prompt(session, text)).wait(2 * HOLD_MAX_S)
        if told is None or not isinstance(params.get("prompt"), list):
            return line
        try:
            return encode(with_preface(frame, told)) + b"\n"
        except MulliganError:
            return line

    def _count(self, session: str, by: int) -> None:
        with self._counting:
            left = self._prompting.get(session, 0) + by
            self._prompting = {**self._prompting, session: left}
            if left <= 0:
                self._prompting.pop(session)

    # Undo operations.

    def _answer(self, frame: Frame) -> None:
        """Answers in the worker thread, after everything that the agent reported before."""
        method, params = frame["method"], _params(frame)
        busy = str(param(params, "sessionId", required=False)) in self._prompting
        if method == "session/fork":
            self._worker.do(lambda: self._fork(frame))
        else:
            undo = partial(self._undo, method, busy=busy)
            self._worker.do(lambda: self._client.answer(frame, lambda _, params: undo(params)))

    def _undo(self, method: str, params: Params, *, busy: bool) -> Any:
        live = self._recorded_session(params)
        if busy:
            raise AcpError(BACKEND, "prompt_active", {"status": "prompt_active"})
        session = param(params, "sessionId")
        try:
            # The agent owns its transcript, so it does not change.
            wanted = {**params, "transcript": False}
            return run_undo_method(method, live.session, wanted, lambda update: self._send_update(session, update))
        finally:
            live.files.scan()

    def _run_typed(self, typed: TypedCommand, params: Params, *, busy: bool) -> Any:
        """Runs a command that the person typed as a prompt. The agent learns nothing of the prompt."""
        live, words = self._recorded_session(params), "The agent still works; type this again when it is done."
        if not busy:
            live.files.scan()
            words = answer(live.files.open_root, live.session.id, typed, live.session.root)
            live.files.scan()
        chunk = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": words}}
        self._client.notify("session/update", {"sessionId": params["sessionId"], "update": chunk})
        return {"stopReason": "end_turn"}

    def _recorded_session(self, params: Params) -> ProxiedSession:
        live = self._recorder.find(param(params, "sessionId"))
        if live is None:
            raise AcpError(INVALID_PARAMS, "Unknown session.", {"status": "unknown_session"})
        return live

    def _send_update(self, session: str, update: Mapping[str, Any]) -> None:
        meta = {name: {**about, "talk": "kept"} for name, about in update["_meta"].items()}
        self._client.notify("session/update", {"sessionId": session, "update": {**update, "_meta": meta}})

    # Forks for agents that cannot fork: a new session, whose first prompt says what the parent was about.

    def _fork(self, frame: Frame) -> None:
        params = _params(frame)
        try:
            parent = self._recorded_session(params)
        except (AcpError, MulliganError) as error:
            self._client.refuse(frame, error)
            return
        name = f"{_OUR_ID}{next(self._fork_numbers)}"
        self._forks[name] = (frame["id"], params)
        wanted = {"cwd": params.get("cwd") or parent.session.root, "mcpServers": params.get("mcpServers", [])}
        self._agent.pass_on(encode({"jsonrpc": "2.0", "id": name, "method": "session/new", "params": wanted}) + b"\n")

    def _answer_fork(self, frame: Frame) -> bytes:
        id, params = self._forks.pop(frame["id"])
        result = frame.get("result")
        if not isinstance(result, dict):
            return encode({**frame, "id": id}) + b"\n"
        parent, child = param(params, "sessionId", required=False), str(result.get("sessionId"))
        follow = partial(self._recorder.fork, str(parent), child, folder_of(params), transcript_is_known=False)
        self._worker.do(follow).wait(HOLD_MAX_S)
        answer = {**result, "parent_id": parent, "state": "forked"}
        return encode({"jsonrpc": "2.0", "id": id, "result": answer}) + b"\n"

    # From the agent.

    def agent_line_begins(self) -> None:
        """The agent has sent the first byte of a line, which may announce a tool call."""
        self._agent_line_begun = True

    def from_agent(self, line: bytes) -> None:
        passed = _guarded(self._read_agent_line, line)
        self._agent_line_begun = False
        self._client.pass_on(passed if passed is not None else line)
        while self._unannounced:
            # After the answer that names the session. An agent without commands announces none.
            session = self._unannounced.pop()
            if self._recorder.is_recorded(session):
                told = {"sessionId": session, "update": self._with_commands(session, {})}
                self._client.notify("session/update", told)

    def _with_commands(self, session: str, update: Frame) -> Frame:
        """The update with the agent's commands and Mulligan's."""
        names = {one["name"] for one in _COMMANDS}
        theirs = [one for one in self._commands.get(session, []) if _object_name(one) not in names]
        return {**update, "sessionUpdate": "available_commands_update", "availableCommands": [*theirs, *_COMMANDS]}

    def long_from_agent(self, line: LongLine) -> None:
        _report_long_line("agent")
        self._client.pass_on(line)
        self._agent_line_begun = False

    def _read_agent_line(self, line: bytes) -> bytes:
        """The line for the client."""
        frame = object_in(line) if _MATTERS.search(line) else {}
        method = frame.get("method")
        if method == "session/update":
            params, update = _params(frame), _params(frame).get("update")
            if isinstance(update, dict) and isinstance(update.get("availableCommands"), list):
                session = str(params.get("sessionId"))
                self._commands[session] = update["availableCommands"]
                if not self._recorder.is_recorded(session):
                    return line
                told = {**params, "update": self._with_commands(session, update)}
                return encode({**frame, "params": told}) + b"\n"
            self._record_update(params, "update")
        elif method in _WAITS:
            self._record_update(_params(frame), "toolCall")
            if method == _PERMISSION and "id" in frame:
                self._worker.do(lambda: self._ask_permission(frame))
            self._worker.wait(HOLD_MAX_S)
        elif method is None and isinstance(frame.get("id"), str) and frame["id"] in self._forks:
            return self._answer_fork(frame)
        elif method is None and "id" in frame and (asked := self._pending_requests.pop(_key(frame), None)) is not None:
            return self._record_answer(asked, frame, line)
        return line

    def _ask_permission(self, frame: Frame) -> None:
        live = self._recorder.find(str(_params(frame).get("sessionId")))
        if live is not None:
            self._permissions.ask(live.session, frame, _params(frame))

    def _record_update(self, params: Params, where: str) -> None:
        update, session = params.get(where), params.get("sessionId")
        if isinstance(update, dict) and isinstance(session, str) and "toolCallId" in update:
            self._note_announced(session, update)
            heard_ns = kernel_time_ns()
            self._worker.do(lambda: self._recorder.tool(session, update, heard_ns))

    def _note_announced(self, session: str, update: Frame) -> None:
        """Counts announced calls at once, not in the worker thread: a scan must know which calls may change files."""
        key = (session, str(update["toolCallId"]))
        if update.get("status") in OVER:
            self._announced.discard(key)
        elif update.get("kind") in READ_ONLY_KINDS:
            return
        elif update.get("sessionUpdate") != "tool_call_update" and session in self._prompting:
            self._announced.add(key)

    def _record_answer(self, asked: PendingRequest, frame: Frame, line: bytes) -> bytes:
        """The line to pass on, after its meaning is recorded."""
        session = asked.params.get("sessionId")
        if asked.method == "session/prompt":
            self._count(str(session), -1)
            self._announced = {one for one in self._announced if one[0] != session}
            self._worker.do(lambda: self._recorder.end_prompt(str(session))).wait(HOLD_MAX_S)
        elif asked.method == "initialize" and isinstance(frame.get("result"), dict):
            return self._with_our_capabilities(frame, line)
        elif asked.method in _SESSION_METHODS and "error" not in frame:
            self._record_session(asked, frame)
        elif asked.method in ("session/close", "session/delete") and "error" not in frame:
            self._worker.do(lambda: self._recorder.close(str(session))).wait(HOLD_MAX_S)
        return line

    def _with_our_capabilities(self, frame: Frame, line: bytes) -> bytes:
        self._agent_capabilities = capabilities_of(frame)
        try:
            return encode(with_our_capabilities(frame)) + b"\n"
        except MulliganError:
            return line

    def _record_session(self, asked: PendingRequest, frame: Frame) -> None:
        result = frame.get("result")
        given = result.get("sessionId") if isinstance(result, dict) else None
        folder, known = folder_of(asked.params), asked.params.get("sessionId")
        if asked.method == "session/fork" and isinstance(given, str):
            self._worker.do(lambda: self._recorder.fork(str(known), given, folder)).wait(HOLD_MAX_S)
            self._unannounced.append(given)
            return
        session = given if isinstance(given, str) else known
        if folder is not None and isinstance(session, str):
            self._worker.do(lambda: self._recorder.attach(session, folder)).wait(HOLD_MAX_S)
            self._unannounced.append(session)


def _object_name(command: object) -> object:
    return command.get("name") if isinstance(command, dict) else None


def _report_long_line(sender: str) -> None:
    limit = f"{LINE_MAX_BYTES // MIB_BYTES} MiB"
    words = f"mulligan: a line of the {sender} has more than {limit}; Mulligan passed it on and did not record it."
    print(words, file=sys.stderr, flush=True)


def _guarded(said: Callable[[bytes], bytes | None], line: bytes) -> bytes | None:
    """Reads a line; if that fails, the proxy passes it on unchanged."""
    try:
        return said(line)
    except Exception:  # noqa: BLE001  # the top of a server: an agent must not stop because of our errors
        traceback.print_exc()
        return line


def _params(frame: Frame) -> Params:
    found = frame.get("params")
    return found if isinstance(found, dict) else {}


def _key(frame: Frame) -> object:
    id = frame.get("id")
    return (type(id).__name__, id) if isinstance(id, str | int | float) else None


NOT_FOUND_CODE, NOT_RUNNABLE_CODE = 127, 126
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GRACE_S = 5.0
_LAST_LINES_S = 2.0


def run_proxy(command: Sequence[str], *, workspaces: Workspaces, root: str | None = None) -> int:
    """Runs until the agent ends; returns its exit code. With a `root`, all sessions are recorded there."""
    try:
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        print(f"mulligan: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND_CODE if isinstance(error, FileNotFoundError) else NOT_RUNNABLE_CODE
    for number in _SIGNALS:
        signal.signal(number, lambda received, _: agent.send_signal(received))
    assert agent.stdin is not None and agent.stdout is not None
    # Copies of the descriptors: a thread that still reads at the end must not hold the interpreter's own streams.
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    client = Wire(incoming, outgoing, _no_method)
    recorder = ProxyRecorder(workspaces, pid=agent.pid, root=root)
    relay = Relay(client, Wire(agent.stdout, agent.stdin, _no_method), recorder)
    _pump(incoming, relay.from_client, relay.long_from_client, at_end=lambda: _end(agent))
    stdout = cast(BufferedReader, agent.stdout)
    reader = _pump(stdout, relay.from_agent, relay.long_from_agent, line_begins=relay.agent_line_begins)
    code = agent.wait()
    # The agent's children may keep its pipe open.
    reader.join(_LAST_LINES_S)
    relay.end("agent_died" if code else "session_ended", _GRACE_S)
    return code if code >= 0 else 128 - code


def _no_method(method: str, params: Params) -> Any:
    raise AcpError(METHOD_NOT_FOUND, "Method not found", {"method": method})


def _pump(
    source: BufferedReader,
    take: Callable[[bytes], None],
    take_long: Callable[[LongLine], None],
    *,
    at_end: Callable[[], None] = lambda: None,
    line_begins: Callable[[], None] = lambda: None,
) -> threading.Thread:
    def run() -> None:
        lines = lines_of(source)
        # `peek` returns when the first byte of a line is there; the rest may arrive later.
        while source.peek(1):
            line_begins()
            line = next(lines, None)
            if isinstance(line, LongLine):
                take_long(line)
            elif line is not None:
                take(line)
        at_end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Ends the agent after the client has closed: first its input is closed, then SIGTERM, then SIGKILL."""
    assert agent.stdin is not None
    for act in (agent.stdin.close, agent.terminate, agent.kill):
        try:
            act()
            agent.wait(_GRACE_S)
            return
        except (subprocess.TimeoutExpired, BrokenPipeError):
            continue
