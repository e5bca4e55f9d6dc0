"""MCP over streamable HTTP: the official SDK around the same table and the same toolbox as stdio.

On a loopback address Host and Origin must be loopback too, so that no web page can reach the tools by rebinding a name.
Any other address is served only to clients that bear a token.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import anyio
import anyio.from_thread
import anyio.to_thread
import mcp_types as types
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from starlette.applications import Starlette

from mulligan.servers.auth import Asgi, BearerAuth, StaticKeys
from mulligan.servers.mcp.door import Asked, Workspace, toolbox_of
from mulligan.servers.mcp.listing import Table, names_of, read_table, tools_in
from mulligan.servers.mcp.revisions import (
    CLIENT_KEY,
    INSTRUCTIONS,
    INTERNAL,
    INVALID_PARAMS,
    TOOLS_TTL_MS,
    Peer,
    RpcError,
    client_name,
)
from mulligan.servers.mcp.running import Cancelled, Running
from mulligan.session.tokens import Tokens
from mulligan.values.faults import fault

BODY_MAX_BYTES = 64 * 1024 * 1024
WORKERS = 32
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Context = ServerRequestContext[Any, Any]


class Asking(NamedTuple):
    """What a client may bear: a static key, or a durable token."""

    keys: StaticKeys
    tokens: Tokens


def parse_address(text: str) -> tuple[str, int] | None:
    """HOST:PORT, the host of IPv6 in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


class Caller(Protocol):
    """Whoever carries a tool call out: a Toolbox."""

    def call(
        self, name: str, arguments: object, meta: Mapping[str, Any], *, peer: Peer, running: Running
    ) -> dict[str, Any]: ...


class HttpTools:
    """The SDK's server over our table."""

    def __init__(self, toolbox: Caller, sets: tuple[str, ...], table: Table) -> None:
        self._toolbox = toolbox
        self._tools = tools_in(table, sets)
        self._names = names_of(self._tools)
        schemas = {tool["name"]: tool["inputSchema"] for tool in self._tools}
        self._limiter: anyio.CapacityLimiter | None = None
        self.server: Server[Any] = Server(
            table.server["name"],
            title=table.server["title"],
            version=table.server["version"],
            instructions=INSTRUCTIONS,
            get_tool_input_schema=lambda name: schemas.get(self._names.get(name, "")),
            cache_hints={"tools/list": CacheHint(TOOLS_TTL_MS, "public")},
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    async def _list(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult.model_validate({"tools": self._tools})

    async def _call(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in self._names:
            raise MCPError(INVALID_PARAMS, f"Unknown tool: {params.name[:200]}")
        meta = _meta_of(context)
        running = Running(_progress(context) if "progressToken" in meta else None)
        work = partial(
            self._done,
            self._names[params.name],
            params.arguments or {},
            meta,
            peer=_peer(context, meta),
            running=running,
        )
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(WORKERS)
        try:
            body = await anyio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            running.cancel()
            raise
        return types.CallToolResult.model_validate(body)

    def _done(
        self, name: str, given: Mapping[str, Any], meta: Mapping[str, Any], *, peer: Peer, running: Running
    ) -> dict[str, Any]:
        """In a worker thread. The one place where everything is caught."""
        try:
            return self._toolbox.call(name, dict(given), meta, peer=peer, running=running)
        except RpcError as error:
            raise MCPError(error.code, error.message, error.data) from None
        except Cancelled:
            raise MCPError(INTERNAL, "The request was cancelled.") from None
        except Exception:  # noqa: BLE001  # the top of a server: the client learns that, and nothing of how
            traceback.print_exc(file=sys.stderr)
            raise MCPError(INTERNAL, "Internal error") from None


def _meta_of(context: Context) -> Mapping[str, Any]:
    """As the client sent it, whatever the revision."""
    meta = (context.params or {}).get("_meta")
    return meta if isinstance(meta, Mapping) else {}


def _peer(context: Context, meta: Mapping[str, Any]) -> Peer:
    handshake = context.session.client_params
    info = {"name": handshake.client_info.name} if handshake is not None else meta.get(CLIENT_KEY)
    return Peer(context.protocol_version, client_name(info))


def _progress(context: Context) -> Callable[[float, str], None]:
    """Told from a worker thread."""

    def tell(done: float, words: str) -> None:
        anyio.from_thread.run(partial(context.session.report_progress, done, None, words))

    return tell


def make_app(
    toolbox: Caller,
    sets: tuple[str, ...],
    *,
    host: str = "127.0.0.1",
    asking: Asking | None = None,
    table: Table | None = None,
) -> Asgi:
    """The ASGI application, with MCP at /mcp. Refuses a public address unless clients are asked who they are."""
    if host not in LOOPBACK and asking is None:
        words = f"{host} can be reached by others; give --require-token or --token-file, or a loopback address."
        raise fault("bad_usage", words)
    app: Starlette = HttpTools(toolbox, sets, table or read_table()).server.streamable_http_app(
        streamable_http_path="/mcp",
        max_request_body_size=BODY_MAX_BYTES,
        transport_security=_security(host),
        host=host,
    )
    return app if asking is None else BearerAuth(app, keys=asking.keys, tokens=asking.tokens)


def _security(host: str) -> TransportSecuritySettings:
    names = ["127.0.0.1", "localhost", "[::1]"] if host in LOOPBACK else [host]
    if host in ("0.0.0.0", "::"):
        return TransportSecuritySettings(enable_dns_rebinding_protection=False)
    return TransportSecuritySettings(
        allowed_hosts=[f"{name}:*" for name in names] + names,
        allowed_origins=[
            f"{scheme}://{name}{port}" for scheme in ("http", "https") for name in names for port in ("", ":*")
        ],
    )


def serve_http(workspace: Workspace, asked: Asked, where: tuple[str, int], *, keys: StaticKeys | None) -> None:
    """Until interrupted. Says on stderr where it listens.

    With `keys`, clients must bear one of them, or a token of this store; without, anyone may come.
    """
    import uvicorn

    ledger = workspace.desk.ledger
    asking = None if keys is None else Asking(keys, Tokens(ledger.store, ledger.journal, clock=ledger.clock))
    toolbox = toolbox_of(workspace, asked)
    host, port = where
    try:
        app = make_app(toolbox, asked.sets, host=host, asking=asking)
        uvicorn.run(app, host=host, port=port, log_level="info", access_log=False)
    finally:
        toolbox.close()
