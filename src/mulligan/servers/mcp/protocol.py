"""The table of tools, the differences between protocol revisions, and requests in progress. Imports nothing heavy.

`tools.json` beside this module holds the table, so that listing the tools loads nothing else. `make mcp-table` writes
it from the tools themselves, and a test compares the two.

Up to 2025-11-25 a connection begins with `initialize`, which fixes the revision. From 2026-07-28 on every request has
its own revision and client in `_meta`, and `server/discover` replaces the handshake.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from mulligan.values.fast_dataclass import fast_dataclass

TOOLSETS = ("substrate", "coding", "history")
PROFILES = ("openai", "anthropic", "gemini")
"""Each replaces `coding` by the subset for one provider's models, in the form that they know."""
FILE = os.path.join(os.path.dirname(__file__), "tools.json")

Tools = list[dict[str, Any]]

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class ToolTable(NamedTuple):
    """The server's name and version, and the tools by set, each as `tools/list` shows it."""

    server: dict[str, str]
    tools: dict[str, Tools]


def read_table(path: str = FILE) -> ToolTable:
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    return ToolTable(found["server"], found["tools"])


def tools_in(table: ToolTable, sets: tuple[str, ...]) -> Tools:
    order = ("substrate", "coding", *PROFILES, "history")
    return [tool for name in order if name in sets for tool in table.tools[name]]


def names_of(tools: Tools) -> dict[str, str]:
    """Maps each tool's listed name and dotted name to the listed one."""
    return {spelling: tool["name"] for tool in tools for spelling in (tool["name"], tool["title"])}


def parse_sets(text: str) -> tuple[str, ...] | None:
    """Parses a list with commas; None if one of the names is not a set."""
    sets = tuple(part.strip() for part in text.split(",") if part.strip())
    return sets if sets and all(one in TOOLSETS for one in sets) else None


def with_profile(sets: tuple[str, ...], profile: str) -> tuple[str, ...] | None:
    """The sets with a provider's tools instead of `coding`; None for an unknown provider or without `coding`."""
    if profile not in PROFILES or "coding" not in sets:
        return None
    return tuple(profile if one == "coding" else one for one in sets)


HANDSHAKE = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = ("2026-07-28",)
NEWEST_HANDSHAKE = HANDSHAKE[-1]
_STRUCTURED_SINCE = "2025-06-18"

VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CLIENT_KEY = "io.modelcontextprotocol/clientInfo"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
UNSUPPORTED_VERSION = -32022

TOOLS_TTL_MS = 3_600_000
"""The table of tools changes only with the version of Mulligan."""

INSTRUCTIONS = (
    "Mulligan records every change made through these tools, and every change can be undone: history_log lists calls, "
    "history_undo undoes one call, history_rollback a whole turn. snapshot_* and workspace_* tools answer with a "
    "lease_id; pass it on, and Mulligan refuses a call with STALE_LEASE if what you read has changed since."
)

Body = dict[str, Any]


class RpcError(Exception):
    """A protocol error, as opposed to a failed tool."""

    def __init__(self, code: int, message: str, data: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def to_json(self) -> Body:
        body: Body = {"code": self.code, "message": self.message}
        return body if self.data is None else {**body, "data": self.data}


@fast_dataclass(slots=True, frozen=True)
class Peer:
    """The client, and the protocol revision that it uses."""

    revision: str
    client: str = "unknown"

    @property
    def is_modern(self) -> bool:
        return self.revision in MODERN

    @property
    def takes_structure(self) -> bool:
        return self.revision >= _STRUCTURED_SINCE


def negotiated(params: Mapping[str, Any]) -> Peer:
    """The peer of an `initialize`: with its revision if Mulligan knows it, else the newest one with a handshake."""
    asked = params.get("protocolVersion")
    if not isinstance(asked, str):
        raise RpcError(INVALID_PARAMS, "initialize needs a protocolVersion.")
    return Peer(asked if asked in HANDSHAKE else NEWEST_HANDSHAKE, client_name(params.get("clientInfo")))


def enveloped(params: Mapping[str, Any]) -> Peer | None:
    """The peer that a modern request names in `_meta`; None for an older request."""
    meta = params.get("_meta")
    if not isinstance(meta, Mapping) or VERSION_KEY not in meta:
        return None
    if CAPABILITIES_KEY not in meta:
        raise RpcError(INVALID_PARAMS, f"params._meta is missing {CAPABILITIES_KEY}.")
    version = meta[VERSION_KEY]
    if not isinstance(version, str):
        raise RpcError(INVALID_PARAMS, f"{VERSION_KEY} is a string.")
    if version not in MODERN:
        data = {"supported": list(MODERN), "requested": version}
        raise RpcError(UNSUPPORTED_VERSION, "This protocol version is not supported.", data)
    return Peer(version, client_name(meta.get(CLIENT_KEY)))


def client_name(info: object) -> str:
    name = info.get("name") if isinstance(info, Mapping) else None
    return name if isinstance(name, str) and name.isprintable() and name.strip() else "unknown"


def initialize_result(peer: Peer, server: Mapping[str, Any]) -> Body:
    return {
        "protocolVersion": peer.revision,
        "capabilities": {"tools": {}, "prompts": {}},
        "serverInfo": dict(server),
        "instructions": INSTRUCTIONS,
    }


def discover_result() -> Body:
    return {
        "supportedVersions": list(MODERN),
        "capabilities": {"tools": {}, "prompts": {}},
        "instructions": INSTRUCTIONS,
        "ttlMs": TOOLS_TTL_MS,
        "cacheScope": "public",
    }


def list_result(peer: Peer, tools: list[Body]) -> Body:
    if peer.takes_structure:
        body: Body = {"tools": tools}
    else:
        body = {"tools": [{k: v for k, v in tool.items() if k in _OLD_TOOL_KEYS} for tool in tools]}
    return {**body, **cache_hints(peer)}


def cache_hints(peer: Peer) -> Body:
    """How long a client may keep a list; older revisions do not know this."""
    return {"ttlMs": TOOLS_TTL_MS, "cacheScope": "public"} if peer.is_modern else {}


_OLD_TOOL_KEYS = frozenset({"name", "description", "inputSchema", "annotations"})


def finished(peer: Peer, result: Body, server: Mapping[str, Any]) -> Body:
    """A result in the form of the peer's revision."""
    if peer.is_modern:
        meta = {**result.get("_meta", {}), SERVER_KEY: dict(server)}
        return {**result, "resultType": "complete", "_meta": meta}
    if not peer.takes_structure:
        return {name: value for name, value in result.items() if name != "structuredContent"}
    return result


class _Verb(NamedTuple):
    """A prompt: what a person chooses in the host's menu, and the tool that the model then calls.

    `arguments` are the parameters of the tool that the person may give, each with its description; a name with `!` must
    be given. `fixed` are parameters that the person does not choose.
    """

    description: str
    tool: str
    arguments: Mapping[str, str] = {}
    fixed: Mapping[str, object] = {}


_CALL = {"call": "The call: its id, its label, or a unique part of its id. Default: the newest."}
_VERBS: Mapping[str, _Verb] = {
    "undo": _Verb("Undo the newest call, or the one that you name.", "history_undo", _CALL),
    "redo": _Verb("Reverse the last undo.", "history_redo"),
    "rollback": _Verb("Undo the whole last turn.", "history_rollback"),
    "rewind": _Verb("Undo everything since a call.", "history_rewind", {"to!": "The call, as the log shows it."}),
    "restore": _Verb(
        "Put a path back to what it was before a call.",
        "history_restore",
        {"call!": "The call, as the log shows it.", "path!": "The file or folder."},
    ),
    "log": _Verb("List the calls of this session.", "history_log", fixed={"everyone": False}),
    "status": _Verb("Show what undo would undo.", "history_undo", fixed={"dry_run": True}),
    "diff": _Verb("Show what a call changed.", "history_diff", {"call!": "The call, as the log shows it."}),
}


def prompts_in(sets: tuple[str, ...]) -> list[Body]:
    """The prompts as `prompts/list` shows them: the verbs of the history tools."""
    return [_prompt_view(name, verb) for name, verb in _VERBS.items()] if "history" in sets else []


def _prompt_view(name: str, verb: _Verb) -> Body:
    arguments = [
        {"name": argument.rstrip("!"), "description": words, "required": argument.endswith("!")}
        for argument, words in verb.arguments.items()
    ]
    return {"name": name, "description": verb.description, **({"arguments": arguments} if arguments else {})}


def prompt_result(name: object, given: object, sets: tuple[str, ...]) -> Body:
    """The answer to `prompts/get`: it tells the model which tool to call, and to do nothing else."""
    verb = _VERBS.get(name) if isinstance(name, str) and "history" in sets else None
    if verb is None:
        raise RpcError(INVALID_PARAMS, f"Unknown prompt: {str(name)[:200]}")
    values = {} if given is None else given
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise RpcError(INVALID_PARAMS, "arguments is an object of texts.")
    known = {argument.rstrip("!"): argument.endswith("!") for argument in verb.arguments}
    wrong = [*(values.keys() - known.keys()), *(one for one, needed in known.items() if needed and not values.get(one))]
    if wrong:
        raise RpcError(INVALID_PARAMS, f"The prompt {name} takes {', '.join(known) or 'no arguments'}.")
    chosen: Body = {argument: value for argument, value in values.items() if value} | dict(verb.fixed)
    if "path" in chosen:
        chosen["paths"] = [chosen.pop("path")]
    words = f"Call the tool {verb.tool} once, with these arguments: {_ENCODE(chosen)}. "
    words += "Show me what it answers: which files changed, which it left alone and why. Do nothing else."
    message = {"role": "user", "content": {"type": "text", "text": words}}
    return {"description": verb.description, "messages": [message]}


_LABELS = ("claudecode/toolUseId", "callId", "toolCallId", "mulligan/label")
_TURNS = ("mulligan/turn", "turnId")
_NAME_MAX = 256


def label_of(meta: Mapping[str, Any]) -> str | None:
    """The host's id of the call, from the keys that known hosts use."""
    return next((name for key in _LABELS if (name := _name(meta.get(key))) is not None), None)


def turn_of(meta: Mapping[str, Any]) -> str | None:
    nested = meta.get("x-codex-turn-metadata")
    if isinstance(nested, Mapping) and (name := _name(nested.get("turn_id"))) is not None:
        return name
    return next((name for key in _TURNS if (name := _name(meta.get(key))) is not None), None)


def _name(value: object) -> str | None:
    if not isinstance(value, str) or not value.strip() or len(value) > _NAME_MAX or not value.isprintable():
        return None
    return value


Progress = Callable[[float, str], None]
"""Reports the progress of long work, with a short text."""


class RequestCancelledError(Exception):
    """The client cancelled the request before it had changed anything; it gets no answer."""


@fast_dataclass(slots=True)
class Running:
    """A request in progress. Cancelling it after its call has committed does nothing."""

    progress: Progress | None = None
    cancelled: bool = False
    _settled: bool = False
    _stop: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> bool:
        """Cancels the request. Whether that was in time."""
        with self._lock:
            if self._settled:
                return False
            self.cancelled = True
            stop = self._stop
        if stop is not None:
            stop()
        return True

    def settle(self) -> bool:
        """Call this just before a commit: False if the request was cancelled; after True it cannot be cancelled."""
        with self._lock:
            self._settled = not self.cancelled
            return self._settled

    def began(self, stop: Callable[[], None]) -> None:
        """The call has begun; `stop` stops it. Raises RequestCancelledError if the request is already cancelled."""
        with self._lock:
            self._stop = stop
            if self.cancelled:
                raise RequestCancelledError
