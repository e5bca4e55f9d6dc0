"""MCP over streamable HTTP: the official SDK, with the same table and toolbox as stdio.

Every request needs a key or a token: the tools run commands as the owner of this process, and every user of the machine
can reach a loopback address. The server also checks Host and Origin, so that a web page with a token cannot reach the
tools by DNS rebinding.
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

from mulligan.servers.auth import BearerAuth, StaticKeys
from mulligan.servers.mcp.protocol import (
    CLIENT_KEY,
    INSTRUCTIONS,
    INTERNAL,
    INVALID_PARAMS,
    TOOLS_TTL_MS,
    Peer,
    RequestCancelledError,
    RpcError,
    Running,
    ToolTable,
    client_name,
    names_of,
    prompt_result,
    prompts_in,
    read_table,
    tools_in,
)
from mulligan.servers.mcp.stdio import McpOptions, McpWorkspace, toolbox_of
from mulligan.servers.own_host import Asgi, OwnHostOnly
from mulligan.session.tokens import Tokens

BODY_MAX_BYTES = 64 * 1024 * 1024
WORKERS = 32
SHUTDOWN_LIMIT_S = 5

Context = ServerRequestContext[Any, Any]


class AcceptedClients(NamedTuple):
    """The static keys and durable tokens with which the server accepts clients."""

    keys: StaticKeys
    tokens: Tokens


def parse_address(text: str) -> tuple[str, int] | None:
    """Parses HOST:PORT; an IPv6 host is in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


class ToolCaller(Protocol):
    """What runs tool calls: a Toolbox."""

    def call(
        self, name: str, arguments: object, meta: Mapping[str, Any], *, peer: Peer, running: Running
    ) -> dict[str, Any]: ...


class HttpTools:
    """The SDK's server with Mulligan's table of tools."""

    def __init__(self, toolbox: ToolCaller, sets: tuple[str, ...], table: ToolTable) -> None:
        self._toolbox = toolbox
        self._sets = sets
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
            cache_hints={name: CacheHint(TOOLS_TTL_MS, "public") for name in ("tools/list", "prompts/list")},
            on_list_tools=self._list,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            on_call_tool=self._call,
        )

    async def _list(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult.model_validate({"tools": self._tools})

    async def _list_prompts(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        return types.ListPromptsResult.model_validate({"prompts": prompts_in(self._sets)})

    async def _get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        try:
            return types.GetPromptResult.model_validate(prompt_result(params.name, params.arguments, self._sets))
        except RpcError as error:
            raise MCPError(error.code, error.message) from None

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
        """Runs a tool in a worker thread. Catches every exception, because it is the top of the server."""
        try:
            return self._toolbox.call(name, dict(given), meta, peer=peer, running=running)
        except RpcError as error:
            raise MCPError(error.code, error.message, error.data) from None
        except RequestCancelledError:
            raise MCPError(INTERNAL, "The request was cancelled.") from None
        except Exception:  # noqa: BLE001  # the top of a server: the client learns that it failed, not how
            traceback.print_exc(file=sys.stderr)
            raise MCPError(INTERNAL, "Internal error") from None


def _meta_of(context: Context) -> Mapping[str, Any]:
    """The `_meta` that the client sent, in any revision."""
    meta = (context.params or {}).get("_meta")
    return meta if isinstance(meta, Mapping) else {}


def _peer(context: Context, meta: Mapping[str, Any]) -> Peer:
    handshake = context.session.client_params
    info = {"name": handshake.client_info.name} if handshake is not None else meta.get(CLIENT_KEY)
    return Peer(context.protocol_version, client_name(info))


def _progress(context: Context) -> Callable[[float, str], None]:
    """Reports progress from a worker thread."""

    def tell(done: float, words: str) -> None:
        anyio.from_thread.run(partial(context.session.report_progress, done, None, words))

    return tell


def make_app(
    toolbox: ToolCaller,
    sets: tuple[str, ...],
    *,
    clients: AcceptedClients,
    host: str = "127.0.0.1",
    table: ToolTable | None = None,
) -> Asgi:
    """The ASGI application, with MCP at /mcp. It refuses others than `clients`."""
    app: Starlette = HttpTools(toolbox, sets, table or read_table()).server.streamable_http_app(
        streamable_http_path="/mcp",
        max_request_body_size=BODY_MAX_BYTES,
        # The SDK compares beginnings of names; OwnHostOnly compares whole names.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        host=host,
    )
    # Not for observers, because the tools change files.
    return BearerAuth(OwnHostOnly(app, host), keys=clients.keys, tokens=clients.tokens, controllers_only=True)


def serve_http(workspace: McpWorkspace, asked: McpOptions, where: tuple[str, int], *, keys: StaticKeys) -> None:
    """Serves until interrupted. Clients must send one of `keys`, or a token of this store."""
    import uvicorn

    ledger = workspace.open_root.ledger
    clients = AcceptedClients(keys, Tokens(ledger.store, ledger.journal, clock=ledger.clock))
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
            # A client that waits for events never closes its connection.
            timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
        )
    finally:
        toolbox.close()
