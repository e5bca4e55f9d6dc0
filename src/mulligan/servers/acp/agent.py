"""`mulligan acp`: our own loop as an agent of the Agent Client Protocol.

Sessions are durable: one that was begun here is listed, loaded and resumed by any later process. Every prompt is a
turn, so the client can roll it back with its files and its talk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from mulligan.effects.session import Session
from mulligan.effects.sessions import listed_in
from mulligan.history.log import changes_of, find_call, workspace_of
from mulligan.history.tables import TURNS
from mulligan.servers.acp import frames
from mulligan.servers.acp.returning import (
    METHODS,
    PREFIX,
    S0_CAPABILITIES,
    STRICT_CAPABILITIES,
    STRICT_METHODS,
    WaysBack,
    param,
)
from mulligan.servers.acp.wire import (
    BACKEND,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    NOT_FOUND,
    AcpError,
    Later,
    Params,
    Wire,
)
from mulligan.servers.acp.workspaces import Workspace, Workspaces, close_for_client
from mulligan.session.known import Plan
from mulligan.session.standing import is_deleted, session_in
from mulligan.store.protocol import Tx
from mulligan.values.entries import Absent, Entry, FileEntry
from mulligan.values.faults import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.plain import plain

Prompt = str | Sequence[Mapping[str, Any]]

PROTOCOL_VERSION = 1
MODES = (
    ("ask", "Ask first", "Asks before anything is changed."),
    ("auto", "Act", "Works without asking; everything can be undone."),
    ("read", "Only look", "Reads and searches; changes nothing."),
)
_OPTIONS = (("allow_once", "Allow"), ("allow_always", "Always allow"), ("reject_once", "Do not"))
_DIFF_BYTES = MIB_BYTES


class Shown(Protocol):
    """Who is told what an agent says and does, while it does."""

    def said(self, text: str) -> None: ...
    def planned(self) -> None:
        """The session has another plan."""
        ...

    def began(self, id: str, tool: str, arguments: Mapping[str, Any]) -> None: ...
    def ended(self, id: str, text: str, *, ok: bool) -> None: ...
    def may(self, id: str, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Asked before a tool that may change something."""
        ...


class Work(Protocol):
    """An agent: works on one prompt of a session to its end. The protocol's word for how it ended."""

    def __call__(
        self, session: Session, prompt: Prompt, shown: Shown, *, only_look: bool, cancelled: threading.Event
    ) -> str: ...


@dataclass(slots=True)
class Live:
    """A session that this client has at hand."""

    session: Session
    workspace: Workspace
    mode: str = "auto"
    cancelled: threading.Event | None = None
    always: set[str] = field(default_factory=set)
    at_work: threading.Lock = field(default_factory=threading.Lock)


@plain(slots=True, frozen=True)
class Means:
    """What the server is given: where its folders are, who works on prompts, and in which mode a session begins."""

    workspaces: Workspaces
    work: Work
    version: str
    mode: str = "auto"


class AcpAgent:
    def __init__(self, means: Means) -> None:
        self._means = means
        self._workspaces = means.workspaces
        self._lives: dict[str, Live] = {}
        self.wire: Wire | None = None

    def handle(self, method: str, params: Params) -> Any:
        own = _METHODS.get(method)
        if own is not None:
            return own(self, params)
        back, strict = (STRICT_METHODS.get(method), True) if method.startswith(PREFIX) else (METHODS.get(method), False)
        if back is None:
            raise AcpError(METHOD_NOT_FOUND, "Method not found", {"method": method})
        return self._go_back(back, params, strict=strict)

    # Sessions.

    def initialize(self, params: Params) -> Mapping[str, Any]:
        ours: dict[str, Any] = {name: {} for name in STRICT_CAPABILITIES}
        abilities = (*S0_CAPABILITIES, "fork", "delete")
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": "mulligan", "title": "Mulligan", "version": self._means.version},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "embeddedContext": True},
                "sessionCapabilities": {name: {} for name in abilities},
                "_meta": {"mulligan": ours},
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
        """The talk so far is shown again before the answer."""
        live = self._known(params)
        for update in frames.replayed(live.session.messages(), live.workspace.root):
            self.tell(live, update)
        self.tell_plan(live)
        return _modes(live)

    def resume(self, params: Params) -> Mapping[str, Any]:
        return _modes(self._known(params))

    def list_sessions(self, params: Params) -> Mapping[str, Any]:
        cwd = params.get("cwd")
        here = self._workspaces.at(cwd) if isinstance(cwd, str) and cwd else None
        with (self._workspaces.store() if here is None else here.store).read() as tx:
            rows = listed_in(tx, closed=True, workspace=None if here is None else workspace_of(tx, here.desk))
            kept = [row for row in reversed(rows) if row["root"] and not is_deleted(tx, SessionId(row["id"]))]
            return {"sessions": [_listed(tx, row) for row in kept]}

    def close(self, params: Params) -> Mapping[str, Any]:
        live = self._found(params, code=NOT_FOUND)
        self._stop(live)
        with live.at_work:
            close_for_client(live.workspace, live.session)
        self._lives.pop(live.session.id, None)
        return {}

    def delete(self, params: Params) -> Mapping[str, Any]:
        """An unknown session is as good as deleted; a closed one is deleted too."""
        name = param(params, "sessionId")
        live = self._lives.get(name)
        if live is not None:
            self._stop(live)
            with live.at_work:
                live.workspace.sessions.delete(name)
            self._lives.pop(name, None)
            return {}
        home = self._workspaces.home_of(name, closed=True)
        if home is not None:
            self._workspaces.at(home).sessions.delete(name)
        return {}

    def fork(self, params: Params) -> Mapping[str, Any]:
        live = self._found(params)
        at = params.get("keepFirst", params.get("keep_first"))
        child = live.session.fork(at=at, dst=params.get("id"))
        made = self._attach(live.workspace, child)
        return {"sessionId": child.id, "parent_id": live.session.id, "state": "forked", **_modes(made)}

    def set_mode(self, params: Params) -> Mapping[str, Any]:
        live = self._found(params)
        mode = param(params, "modeId")
        if mode not in {known for known, _, _ in MODES}:
            raise AcpError(INVALID_PARAMS, f"There is no mode {mode!r}.")
        live.mode = mode
        self.tell(live, {"sessionUpdate": "current_mode_update", "currentModeId": mode})
        return {}

    # A prompt.

    def prompt(self, params: Params) -> Mapping[str, Any]:
        live = self._found(params)
        if not live.at_work.acquire(blocking=False):
            raise AcpError(INVALID_PARAMS, "A prompt is being worked on.", {"status": "prompt_active"})
        try:
            live.cancelled = threading.Event()
            only_look = live.mode == "read"
            content = _content(params.get("prompt"))
            shown = _OnTheWire(self, live)
            stop = self._means.work(live.session, content, shown, only_look=only_look, cancelled=live.cancelled)
            return {"stopReason": stop}
        finally:
            live.cancelled = None
            live.at_work.release()

    def cancel(self, params: Params) -> None:
        with suppress(AcpError):
            self._stop(self._found(params))

    def _stop(self, live: Live) -> None:
        """The agent ends at its next step, and stops the command that runs now: its call is put back."""
        if live.cancelled is not None:
            live.cancelled.set()

    def may(self, live: Live, id: str, tool: str, arguments: Mapping[str, Any]) -> bool:
        if live.mode == "auto" or tool in live.always:
            return True
        assert self.wire is not None
        shown = frames.tool_call(id, tool, arguments, root=live.workspace.root, status="pending")
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

    def diffs(self, live: Live, call_id: str) -> list[frames.Update]:
        """The text files that the call changed, before and after; others are left to the tool's own words."""
        try:
            call = find_call(live.workspace.desk, call_id, live.session.id)
        except MulliganError:
            return []
        with live.workspace.store.read() as tx:
            changes = changes_of(tx, call.id)
        found = []
        for change in changes:
            before, after = self._text(live, change.before), self._text(live, change.after)
            if after is not None and (before is not None or isinstance(change.before, Absent)):
                found.append(frames.diff(os.path.join(live.workspace.root, change.path), before, after))
        return found

    def _text(self, live: Live, entry: Entry) -> str | None:
        if not isinstance(entry, FileEntry) or entry.size > _DIFF_BYTES:
            return None
        try:
            return live.workspace.desk.ledger.blobs.read(entry.digest).decode("utf-8")
        except (MulliganError, UnicodeDecodeError):
            return None

    # Going back.

    def _go_back(self, back: Callable[[WaysBack, Params], Any], params: Params, *, strict: bool) -> Any:
        live = self._found(params)
        if not live.at_work.acquire(blocking=False):
            raise AcpError(BACKEND, "prompt_active", {"status": "prompt_active"})
        try:
            result = back(WaysBack(live.session, lambda update: self.tell(live, update), strict), params)
            return result if isinstance(result, Later) else dict(result)
        finally:
            live.at_work.release()

    # Finding.

    def _attach(self, workspace: Workspace, session: Session) -> Live:
        live = Live(session, workspace, self._means.mode)
        return self._lives.setdefault(session.id, live)

    def _known(self, params: Params) -> Live:
        """A session of this or an earlier process, in the folder that is named with it."""
        name = param(params, "sessionId")
        workspace = self._workspaces.at(_folder(params))
        with workspace.store.read() as tx:
            is_there = session_in(tx, name) is not None and not is_deleted(tx, name)
        if not is_there:
            raise AcpError(NOT_FOUND, f"There is no session {name!r}.", {"status": "unknown_session"})
        return self._attach(workspace, workspace.sessions.open(name))

    def _found(self, params: Params, *, code: int = INVALID_PARAMS) -> Live:
        name = param(params, "sessionId")
        live = self._lives.get(name)
        if live is None:
            home = self._workspaces.home_of(name)
            if home is None:
                raise AcpError(code, f"There is no session {name!r}.", {"status": "unknown_session"})
            workspace = self._workspaces.at(home)
            return self._attach(workspace, workspace.sessions.get(name))
        return live

    def tell_plan(self, live: Live) -> None:
        plan = live.session[Plan].latest()
        if plan is not None:
            self.tell(live, frames.plan(plan))

    def tell(self, live: Live, update: Mapping[str, Any]) -> None:
        assert self.wire is not None
        self.wire.notify("session/update", {"sessionId": live.session.id, "update": dict(update)})


@plain(slots=True, frozen=True)
class _OnTheWire:
    """Shows one session's work to its client."""

    agent: AcpAgent
    live: Live

    def said(self, text: str) -> None:
        self.agent.tell(self.live, frames.said(text))

    def planned(self) -> None:
        self.agent.tell_plan(self.live)

    def began(self, id: str, tool: str, arguments: Mapping[str, Any]) -> None:
        self.agent.tell(self.live, frames.tool_call(id, tool, arguments, root=self.live.workspace.root))

    def ended(self, id: str, text: str, *, ok: bool) -> None:
        diffs = self.agent.diffs(self.live, id) if ok else ()
        self.agent.tell(self.live, frames.tool_ended(id, text, ok=ok, diffs=diffs))

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
        raise AcpError(INVALID_PARAMS, "cwd is an absolute path of a folder.", {"status": "invalid_params"})
    return folder


def _listed(tx: Tx, row: Mapping[str, Any]) -> Mapping[str, Any]:
    turns = tx.select(TURNS, {"session": row["id"]}, order=("session", "started_at"))
    first = next((turn.prompt for turn in turns if turn.prompt), None)
    title = {"title": first.splitlines()[0][:120]} if first and first.strip() else {}
    updated = max([turn.ended_at or turn.started_at for turn in turns], default=row["created_at"])
    return {"sessionId": row["id"], "cwd": row["root"], "updatedAt": updated, **title}


def _modes(live: Live) -> dict[str, Any]:
    available = [{"id": id, "name": name, "description": words} for id, name, words in MODES]
    return {"modes": {"currentModeId": live.mode, "availableModes": available}}


def _content(blocks: object) -> Prompt:
    """A prompt's blocks as a message: plain text if that is all, else parts that models know."""
    if not isinstance(blocks, list) or not blocks:
        raise AcpError(INVALID_PARAMS, "prompt is a list of content blocks.", {"status": "invalid_params"})
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
