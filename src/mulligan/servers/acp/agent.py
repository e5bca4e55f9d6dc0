"""`mulligan acp`: Mulligan's own agent loop as an agent of the Agent Client Protocol.

Sessions are durable: any later process can list, load and resume them. Every prompt is a turn, so the client can undo
it, files and transcript together. The functions at the top make the updates that a client sees.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any, Protocol

from mulligan.effects.session import DurableSession
from mulligan.effects.sessions import listed_in
from mulligan.history.log import find_call, workspace_of
from mulligan.history.tables import TURNS, changes_of
from mulligan.servers.acp.undo import (
    S0_CAPABILITIES,
    STRICT_CAPABILITIES,
    UNDO_METHODS,
    AcpWorkspace,
    Workspaces,
    close_for_client,
    param,
    run_undo_method,
)
from mulligan.servers.acp.wire import (
    BACKEND,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    NOT_FOUND,
    AcpError,
    Params,
    Wire,
    invalid_params,
)
from mulligan.session.lifecycle import is_deleted, session_in
from mulligan.session.messages import as_text, calls_in, results_in
from mulligan.session.state.slices import UPDATE_PLAN, Plan
from mulligan.session.transcript_log import text_of
from mulligan.store.protocol import Tx
from mulligan.values.canonical import object_in
from mulligan.values.entries import Absent, Entry, FileEntry
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES

Update = dict[str, Any]

_KINDS = {
    "read": ("read_file", "read_blob", "list_dir"),
    "search": ("grep", "glob"),
    "edit": ("write_file", "edit_file", "apply_patch", "mkdir"),
    "execute": ("shell", "exec"),
    **{tool: (tool,) for tool in ("delete", "move")},
}


_STATUSES = {"pending": "pending", "blocked": "pending", "in_progress": "in_progress", "done": "completed"}


def kind_of(tool: str) -> str:
    return next((kind for kind, tools in _KINDS.items() if tool in tools), "other")


def title_of(tool: str, arguments: Mapping[str, Any]) -> str:
    """The tool and its subject: `write_file a.py`, `shell make test`."""
    about = arguments.get("path") or arguments.get("pattern") or arguments.get("command") or arguments.get("argv") or ""
    text = " ".join(map(str, about)) if isinstance(about, list) else str(about)
    return f"{tool} {text.splitlines()[0] if text else ''}".strip()[:200]


def said(text: str, role: str = "agent") -> Update:
    return {"sessionUpdate": f"{role}_message_chunk", "content": {"type": "text", "text": text}}


def plan_frame(plan: Plan) -> Update:
    entries = [{"content": one.title, "priority": "medium", "status": _STATUSES[one.status]} for one in plan.steps]
    return {"sessionUpdate": "plan", "entries": entries}


def tool_call(id: str, tool: str, arguments: Mapping[str, Any], *, root: str, status: str = "in_progress") -> Update:
    update: Update = {
        "sessionUpdate": "tool_call",
        "toolCallId": id,
        "title": title_of(tool, arguments),
        "kind": kind_of(tool),
        "status": status,
        "rawInput": dict(arguments),
    }
    path = arguments.get("path")
    return update | ({"locations": [{"path": os.path.join(root, path)}]} if isinstance(path, str) and path else {})


def tool_ended(id: str, text: str, *, ok: bool, diffs: Sequence[Update] = ()) -> Update:
    return {
        "sessionUpdate": "tool_call_update",
        "toolCallId": id,
        "status": "completed" if ok else "failed",
        "content": [*diffs, {"type": "content", "content": {"type": "text", "text": text}}],
    }


def diff(path: str, before: str | None, after: str) -> Update:
    """A whole file before and after; `before` is None for a new file."""
    return {"type": "diff", "path": path, "oldText": before, "newText": after}


def transcript_updates(messages: Sequence[Mapping[str, Any]], root: str) -> Iterator[Update]:
    """A transcript as the updates that a client has seen, except for the plan, which has its own update."""
    planning = {call.id for message in messages for call in calls_in(message) if call.name == UPDATE_PLAN}
    for message in messages:
        text = text_of(message)
        results = results_in(message)
        if message["role"] in ("user", "assistant") and text and not results:
            yield said(text, "user" if message["role"] == "user" else "agent")
        for call in (one for one in calls_in(message) if one.id not in planning):
            arguments = call.arguments if isinstance(call.arguments, Mapping) else object_in(str(call.arguments))
            yield tool_call(call.id, call.name, arguments, root=root)
        for result in (one for one in results if one.id not in planning):
            yield tool_ended(result.id, as_text(result.content), ok=not result.failed)


Prompt = str | Sequence[Mapping[str, Any]]

PROTOCOL_VERSION = 1
MODES = (
    ("ask", "Ask first", "Asks before it changes anything."),
    ("auto", "Act", "Works without asking; everything can be undone."),
    ("read", "Read only", "Reads and searches; changes nothing."),
)
_OPTIONS = (("allow_once", "Allow"), ("allow_always", "Always allow"), ("reject_once", "Reject"))
_DIFF_BYTES = MIB_BYTES


class ProgressView(Protocol):
    """Shows an agent's messages and tool calls while it works."""

    def said(self, text: str) -> None: ...
    def planned(self) -> None:
        """The session has a new plan."""
        ...

    def began(self, id: str, tool: str, arguments: Mapping[str, Any]) -> None: ...
    def ended(self, id: str, text: str, *, ok: bool) -> None: ...
    def may(self, id: str, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Asks the user before a tool that may change something."""
        ...


class RunPrompt(Protocol):
    """Runs an agent on one prompt of a session. Returns the protocol's stop reason."""

    def __call__(
        self,
        session: DurableSession,
        prompt: Prompt,
        shown: ProgressView,
        *,
        read_only: bool,
        cancelled: threading.Event,
    ) -> str: ...


@fast_dataclass(slots=True)
class AgentSession:
    """A session that this client has open."""

    session: DurableSession
    workspace: AcpWorkspace
    mode: str = "auto"
    cancelled: threading.Event | None = None
    always: set[str] = field(default_factory=set)
    at_work: threading.Lock = field(default_factory=threading.Lock)


@fast_dataclass(slots=True, frozen=True)
class AgentConfig:
    """The folders, the function that runs prompts, and the mode in which a session begins."""

    workspaces: Workspaces
    work: RunPrompt
    version: str
    mode: str = "auto"


class AcpAgent:
    """The agent: `handle` answers the requests of one client."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._workspaces = config.workspaces
        self._open_sessions: dict[str, AgentSession] = {}
        self.wire: Wire | None = None

    def handle(self, method: str, params: Params) -> Any:
        own = _METHODS.get(method)
        if own is not None:
            return own(self, params)
        if method not in UNDO_METHODS:
            raise AcpError(METHOD_NOT_FOUND, "Method not found", {"method": method})
        return self._undo(method, params)

    # Sessions.

    def initialize(self, params: Params) -> Mapping[str, Any]:
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": "mulligan", "title": "Mulligan", "version": self._config.version},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "embeddedContext": True},
                "sessionCapabilities": {name: {} for name in (*S0_CAPABILITIES, "fork", "delete")},
                "_meta": {"mulligan": {name: {} for name in STRICT_CAPABILITIES}},
            },
            "authMethods": [],
        }

    def authenticate(self, params: Params) -> Mapping[str, Any]:
        return {}

    def new(self, params: Params) -> Mapping[str, Any]:
        workspace = self._workspaces.at(_folder(params))
        live = self._attach(workspace, workspace.sessions.open())
        return {"sessionId": live.session.id, **_modes(live)}

    def load(self, params: Params) -> Mapping[str, Any]:
        """Sends the transcript as updates before the answer."""
        live = self._session_in_folder(params)
        for update in transcript_updates(live.session.messages(), live.workspace.root):
            self.send_update(live, update)
        self.send_plan(live)
        return _modes(live)

    def resume(self, params: Params) -> Mapping[str, Any]:
        return _modes(self._session_in_folder(params))

    def list_sessions(self, params: Params) -> Mapping[str, Any]:
        cwd = params.get("cwd")
        here = self._workspaces.at(cwd) if isinstance(cwd, str) and cwd else None
        with (self._workspaces.store() if here is None else here.store).read() as tx:
            rows = listed_in(tx, closed=True, workspace=None if here is None else workspace_of(tx, here.open_root))
            kept = [row for row in reversed(rows) if row["root"] and not is_deleted(tx, SessionId(row["id"]))]
            return {"sessions": [_session_info(tx, row) for row in kept]}

    def close(self, params: Params) -> Mapping[str, Any]:
        live = self._session_named(params, code=NOT_FOUND)
        self._stop(live)
        with live.at_work:
            close_for_client(live.workspace, live.session)
        self._open_sessions.pop(live.session.id, None)
        return {}

    def delete(self, params: Params) -> Mapping[str, Any]:
        """Deletes an open or closed session; does nothing for an unknown one."""
        name = param(params, "sessionId")
        live = self._open_sessions.get(name)
        home = self._workspaces.home_of(name, closed=True)
        if live is not None:
            self._stop(live)
            with live.at_work:
                live.workspace.sessions.delete(name)
            self._open_sessions.pop(name, None)
        elif home is not None:
            self._workspaces.at(home).sessions.delete(name)
        return {}

    def fork(self, params: Params) -> Mapping[str, Any]:
        live = self._session_named(params)
        at = params.get("keepFirst", params.get("keep_first"))
        child = live.session.fork(at=at, dst=params.get("id"))
        made = self._attach(live.workspace, child)
        return {"sessionId": child.id, "parent_id": live.session.id, "state": "forked", **_modes(made)}

    def set_mode(self, params: Params) -> Mapping[str, Any]:
        live = self._session_named(params)
        mode = param(params, "modeId")
        if mode not in {known for known, _, _ in MODES}:
            raise AcpError(INVALID_PARAMS, f"There is no mode {mode!r}.")
        live.mode = mode
        self.send_update(live, {"sessionUpdate": "current_mode_update", "currentModeId": mode})
        return {}

    # A prompt.

    def prompt(self, params: Params) -> Mapping[str, Any]:
        live = self._session_named(params)
        if not live.at_work.acquire(blocking=False):
            raise AcpError(INVALID_PARAMS, "Another prompt of this session is running.", {"status": "prompt_active"})
        try:
            live.cancelled = threading.Event()
            read_only = live.mode == "read"
            content = _content(params.get("prompt"))
            shown = _ClientView(self, live)
            stop = self._config.work(live.session, content, shown, read_only=read_only, cancelled=live.cancelled)
            return {"stopReason": stop}
        finally:
            live.cancelled = None
            live.at_work.release()

    def cancel(self, params: Params) -> None:
        with suppress(AcpError):
            self._stop(self._session_named(params))

    def _stop(self, live: AgentSession) -> None:
        """Stops the agent at its next step and kills its running command, whose call is rolled back."""
        if live.cancelled is not None:
            live.cancelled.set()

    def may(self, live: AgentSession, id: str, tool: str, arguments: Mapping[str, Any]) -> bool:
        if live.mode == "auto" or tool in live.always:
            return True
        assert self.wire is not None
        shown = tool_call(id, tool, arguments, root=live.workspace.root, status="pending")
        shown.pop("sessionUpdate")
        options = [{"optionId": kind, "name": name, "kind": kind} for kind, name in _OPTIONS]
        asked = {"sessionId": live.session.id, "toolCall": shown, "options": options}
        try:
            answer = self.wire.ask("session/request_permission", asked)
        except AcpError:
            return False
        chosen = answer.get("outcome", {}).get("optionId") if isinstance(answer, dict) else None
        if chosen == "allow_always":
            live.always.add(tool)
        return chosen in ("allow_once", "allow_always")

    def diffs(self, live: AgentSession, call_id: str) -> list[Update]:
        """The text files that the call changed, before and after. Other files appear only in the tool's message."""
        try:
            call = find_call(live.workspace.open_root, call_id, live.session.id)
        except MulliganError:
            return []
        with live.workspace.store.read() as tx:
            changes = changes_of(tx, call.id)
        found = []
        for change in changes:
            before, after = self._text(live, change.before), self._text(live, change.after)
            if after is not None and (before is not None or isinstance(change.before, Absent)):
                found.append(diff(os.path.join(live.workspace.root, change.path), before, after))
        return found

    def _text(self, live: AgentSession, entry: Entry) -> str | None:
        if not isinstance(entry, FileEntry) or entry.size > _DIFF_BYTES:
            return None
        try:
            return live.workspace.open_root.ledger.blobs.read(entry.digest).decode("utf-8")
        except (MulliganError, UnicodeDecodeError):
            return None

    # Undo operations.

    def _undo(self, method: str, params: Params) -> Any:
        live = self._session_named(params)
        if not live.at_work.acquire(blocking=False):
            raise AcpError(BACKEND, "prompt_active", {"status": "prompt_active"})
        try:
            return run_undo_method(method, live.session, params, lambda update: self.send_update(live, update))
        finally:
            live.at_work.release()

    # Sessions by id.

    def _attach(self, workspace: AcpWorkspace, session: DurableSession) -> AgentSession:
        live = AgentSession(session, workspace, self._config.mode)
        return self._open_sessions.setdefault(session.id, live)

    def _session_in_folder(self, params: Params) -> AgentSession:
        """A session of this or an earlier process, in the folder that the request names."""
        name = param(params, "sessionId")
        workspace = self._workspaces.at(_folder(params))
        with workspace.store.read() as tx:
            is_there = session_in(tx, name) is not None and not is_deleted(tx, name)
        if not is_there:
            raise AcpError(NOT_FOUND, f"There is no session {name!r}.", {"status": "unknown_session"})
        return self._attach(workspace, workspace.sessions.open(name))

    def _session_named(self, params: Params, *, code: int = INVALID_PARAMS) -> AgentSession:
        name = param(params, "sessionId")
        live = self._open_sessions.get(name)
        if live is None:
            home = self._workspaces.home_of(name)
            if home is None:
                raise AcpError(code, f"There is no session {name!r}.", {"status": "unknown_session"})
            workspace = self._workspaces.at(home)
            return self._attach(workspace, workspace.sessions.get(name))
        return live

    def send_plan(self, live: AgentSession) -> None:
        plan = live.session[Plan].latest()
        if plan is not None:
            self.send_update(live, plan_frame(plan))

    def send_update(self, live: AgentSession, update: Mapping[str, Any]) -> None:
        assert self.wire is not None
        self.wire.notify("session/update", {"sessionId": live.session.id, "update": dict(update)})


@fast_dataclass(slots=True, frozen=True)
class _ClientView:
    """Shows one session's work to its client."""

    agent: AcpAgent
    live: AgentSession

    def said(self, text: str) -> None:
        self.agent.send_update(self.live, said(text))

    def planned(self) -> None:
        self.agent.send_plan(self.live)

    def began(self, id: str, tool: str, arguments: Mapping[str, Any]) -> None:
        self.agent.send_update(self.live, tool_call(id, tool, arguments, root=self.live.workspace.root))

    def ended(self, id: str, text: str, *, ok: bool) -> None:
        diffs = self.agent.diffs(self.live, id) if ok else ()
        self.agent.send_update(self.live, tool_ended(id, text, ok=ok, diffs=diffs))

    def may(self, id: str, tool: str, arguments: Mapping[str, Any]) -> bool:
        return self.agent.may(self.live, id, tool, arguments)


_METHODS: Mapping[str, Callable[[AcpAgent, Params], Any]] = {
    "initialize": AcpAgent.initialize,
    "authenticate": AcpAgent.authenticate,
    "session/new": AcpAgent.new,
    "session/load": AcpAgent.load,
    "session/resume": AcpAgent.resume,
    "session/list": AcpAgent.list_sessions,
    "session/close": AcpAgent.close,
    "session/delete": AcpAgent.delete,
    "session/fork": AcpAgent.fork,
    "session/set_mode": AcpAgent.set_mode,
    "session/prompt": AcpAgent.prompt,
    "session/cancel": AcpAgent.cancel,
}


def _folder(params: Params) -> str:
    folder = params.get("cwd")
    if not isinstance(folder, str) or not os.path.isabs(folder) or not os.path.isdir(folder):
        raise invalid_params("cwd is an absolute path of a folder.")
    return folder


def _session_info(tx: Tx, row: Mapping[str, Any]) -> Mapping[str, Any]:
    turns = tx.select(TURNS, {"session": row["id"]}, order=("session", "started_at"))
    first = next((turn.prompt for turn in turns if turn.prompt), None)
    title = {"title": first.splitlines()[0][:120]} if first and first.strip() else {}
    updated = max([turn.ended_at or turn.started_at for turn in turns], default=row["created_at"])
    return {"sessionId": row["id"], "cwd": row["root"], "updatedAt": updated, **title}


def _modes(live: AgentSession) -> dict[str, Any]:
    available = [{"id": id, "name": name, "description": words} for id, name, words in MODES]
    return {"modes": {"currentModeId": live.mode, "availableModes": available}}


def _content(blocks: object) -> Prompt:
    """A prompt's blocks as a message: plain text if there is only text, else message parts."""
    if not isinstance(blocks, list) or not blocks:
        raise invalid_params("prompt is a list of content blocks.")
    parts = [_part(block) for block in blocks if isinstance(block, dict)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "image":
        url = f"data:{block.get('mimeType', 'image/png')};base64,{block.get('data', '')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "resource":
        resource = block.get("resource") or {}
        return {"type": "text", "text": f"{resource.get('uri', '')}\n{resource.get('text', '(not text)')}"}
    if kind == "resource_link":
        return {"type": "text", "text": str(block.get("uri", ""))}
    return {"type": "text", "text": str(block.get("text", ""))}
