"""What the revisions of the protocol have in common and where they differ, for a server that only has tools. Pure.

Up to 2025-11-25 a connection begins with `initialize` and keeps what was agreed there. From 2026-07-28 on every request
carries its own revision and client in `_meta`, and `server/discover` takes the place of the handshake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.values.plain import plain

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
"""The table of tools only changes with the program."""

INSTRUCTIONS = (
    "Every change made through these tools is recorded and can be taken back: history_log lists calls, history_undo "
    "undoes one, history_rollback a whole turn. snapshot_* and workspace_* tools answer with a lease_id; pass it on, "
    "and a call is refused with STALE_LEASE when what was seen has changed."
)

Body = dict[str, Any]


class RpcError(Exception):
    """An answer that is an error of the protocol, not of a tool."""

    def __init__(self, code: int, message: str, data: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def to_json(self) -> Body:
        body: Body = {"code": self.code, "message": self.message}
        return body if self.data is None else {**body, "data": self.data}


@plain(slots=True, frozen=True)
class Peer:
    """Who asks, in which revision."""

    revision: str
    client: str = "unknown"

    @property
    def is_modern(self) -> bool:
        return self.revision in MODERN

    @property
    def takes_structure(self) -> bool:
        return self.revision >= _STRUCTURED_SINCE


def negotiated(params: Mapping[str, Any]) -> Peer:
    """What an `initialize` comes to: the revision asked for if we know it, else the newest that has a handshake."""
    asked = params.get("protocolVersion")
    if not isinstance(asked, str):
        raise RpcError(INVALID_PARAMS, "initialize needs a protocolVersion.")
    return Peer(asked if asked in HANDSHAKE else NEWEST_HANDSHAKE, client_name(params.get("clientInfo")))


def enveloped(params: Mapping[str, Any]) -> Peer | None:
    """The peer a modern request says it is from; None for a request without the envelope."""
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
        "capabilities": {"tools": {}},
        "serverInfo": dict(server),
        "instructions": INSTRUCTIONS,
    }


def discover_result() -> Body:
    return {
        "supportedVersions": list(MODERN),
        "capabilities": {"tools": {}},
        "instructions": INSTRUCTIONS,
        "ttlMs": TOOLS_TTL_MS,
        "cacheScope": "public",
    }


def list_result(peer: Peer, tools: list[Body]) -> Body:
    if peer.takes_structure:
        body: Body = {"tools": tools}
    else:
        body = {"tools": [{k: v for k, v in tool.items() if k in _OLD_TOOL_KEYS} for tool in tools]}
    return {**body, "ttlMs": TOOLS_TTL_MS, "cacheScope": "public"} if peer.is_modern else body


_OLD_TOOL_KEYS = frozenset({"name", "description", "inputSchema", "annotations"})


def finished(peer: Peer, result: Body, server: Mapping[str, Any]) -> Body:
    """A result as the revision wants it."""
    if peer.is_modern:
        meta = {**result.get("_meta", {}), SERVER_KEY: dict(server)}
        return {**result, "resultType": "complete", "_meta": meta}
    if not peer.takes_structure:
        return {name: value for name, value in result.items() if name != "structuredContent"}
    return result


_LABELS = ("claudecode/toolUseId", "callId", "toolCallId", "mulligan/label")
_TURNS = ("mulligan/turn", "turnId")
_NAME_MAX = 256


def label_of(meta: Mapping[str, Any]) -> str | None:
    """The name the host gives the call, where hosts are known to put one."""
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
