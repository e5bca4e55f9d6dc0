"""MCP over streamable HTTP: the official SDK around the same table and the same toolbox as stdio.

Every request must carry a key or a token: the tools run commands as the owner of this process, and every user of the
machine can reach a loopback address. Host and Origin are checked too, so that no web page that holds a token can reach
the tools by rebinding a name.
"""

from __future__ import annotations

import re
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

from mulligan.servers.auth import Asgi, BearerAuth, Receive, Scope, Send, StaticKeys
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

BODY_MAX_BYTES = 64 * 1024 * 1024
WORKERS = 32
SHUTDOWN_LIMIT_S = 5
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")

_AUTHORITY = r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?"
_HOST = re.compile(_AUTHORITY, re.IGNORECASE)
_ORIGIN = re.compile(rf"https?://{_AUTHORITY}", re.IGNORECASE)

Context = ServerRequestContext[Any, Any]


class Clients(NamedTuple):
    """What clients are let in by: a static key, or a durable token."""

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


class OwnHostOnly:
    """Lets in requests whose Host, and Origin if there is one, name this server. The whole header must match.

    A server that listens on every address does not know its names. There, Origin must name the host that Host names.
    """

    def __init__(self, app: Asgi, host: str) -> None:
        self._app = app
        names = LOOPBACK if host in LOOPBACK else (host,)
        self._names = None if host in EVERY_ADDRESS else frozenset(_bracketed(name.lower()) for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = _name_in(scope, b"host", _HOST)
        origin = _name_in(scope, b"origin", _ORIGIN)
        names = {host} if self._names is None else self._names
        if host is None or not host or host not in names:
            await _refuse(send, 421, b"This server has another name.")
        elif origin is not None and origin not in names:
            await _refuse(send, 403, b"Pages of another origin may not call this server.")
        else:
            await self._app(scope, receive, send)


def _name_in(scope: Scope, header: bytes, shape: re.Pattern[str]) -> str | None:
    """The host name in a header. None without the header; empty if the header is not whole, or is there twice."""
    values = [value for name, value in scope["headers"] if name.lower() == header]
    if not values:
        return None
    found = shape.fullmatch(values[0].decode("latin-1")) if len(values) == 1 else None
    return "" if found is None else found[1].lower()


def _bracketed(host: str) -> str:
    """A host as it is written before a port."""
    return f"[{host}]" if ":" in host else host


async def _refuse(send: Send, status: int, message: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": message})


def make_app(
    toolbox: Caller,
    sets: tuple[str, ...],
    *,
    clients: Clients,
    host: str = "127.0.0.1",
    table: Table | None = None,
) -> Asgi:
    """The ASGI application, with MCP at /mcp. It answers nothing to a request without a key or token of `clients`."""
    app: Starlette = HttpTools(toolbox, sets, table or read_table()).server.streamable_http_app(
        streamable_http_path="/mcp",
        max_request_body_size=BODY_MAX_BYTES,
        # The SDK compares beginnings of names; OwnHostOnly compares whole names.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        host=host,
    )
    return BearerAuth(OwnHostOnly(app, host), keys=clients.keys, tokens=clients.tokens)


def serve_http(workspace: Workspace, asked: Asked, where: tuple[str, int], *, keys: StaticKeys) -> None:
    """Until interrupted. Says on stderr where it listens. Clients must send one of `keys`, or a token of this store."""
    import uvicorn

    ledger = workspace.desk.ledger
    clients = Clients(keys, Tokens(ledger.store, ledger.journal, clock=ledger.clock))
    toolbox = toolbox_of(workspace, asked)
    host, port = where
    try:
        app = make_app(toolbox, asked.sets, clients=clients, host=host)
        uvicorn.run(
            app,
            host=host,
            port=port,
            log_level="info",
            access_log=False,
            # A client that listens for events never hangs up by itself.
            timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
        )
    finally:
        toolbox.close()
