"""The ASGI application: from a request to a function of the table of routes, and back.

A request passes these checks in this order: Host and Origin (`OwnHostOnly`), who asks (`access`), role, the header
against cross-site requests, size of the body, parameters. The function itself runs in a worker thread, because the
store is synchronous.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from mulligan.history.tables import ROOTS
from mulligan.servers.http.access import COOKIE_LIFE, CSRF_HEADER, Access, AuthenticatedClient
from mulligan.servers.http.events import STUCK_S, LiveEvent, TooManyStreams, Wanted, every_event
from mulligan.servers.http.routes import ROUTES, Route, openapi, values_of
from mulligan.servers.http.service import Answer, Asked, Service
from mulligan.servers.own_host import Asgi, Receive, Scope, Send
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import ConflictError, ForbiddenError, InternalError, MulliganError, Refused, fault

ASK_AGAIN_S = 5.0
BODY_MAX_BYTES = 1024 * 1024
WORKERS = 16
_MCP = "/mcp"
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_MEDIA = {"html": "text/html; charset=utf-8", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_STATUS_OF = {
    "unknown_call": 404,
    "unknown_session": 404,
    "unknown_root": 404,
    "unknown_point": 404,
    "root_elsewhere": 404,
    "session_not_found": 404,
    "path_not_found": 404,
    "client_not_attached": 404,
    "nothing_to_undo": 409,
    "nothing_to_redo": 409,
    "call_open": 409,
    "turn_open": 409,
    "not_continuable": 409,
    "session_closed": 409,
    "evicted": 410,
    "store_busy": 503,
}
_LOCKED_PAGE = (
    b"<!doctype html><html lang=en><meta charset=utf-8><title>Mulligan</title>"
    b"<h1>This page needs a key</h1><p>Open the address that <code>mulligan serve</code> printed. It works once; "
    b"start the server again for a new one."
)

T = TypeVar("T")
MakeMcp = Callable[[], Asgi]


class Refusal(Exception):
    """An answer that ends a request before its function runs."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.response = _json({"error": {"code": code, "message": message}}, status, headers)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers or {}, media_type="application/json")


class TimelineApp:
    """The whole server but for `/healthz`. `start` and `stop` belong to the life of the event loop."""

    def __init__(self, service: Service, access: Access, make_mcp: MakeMcp) -> None:
        self._service = service
        self._access = access
        self._make_mcp = make_mcp
        self._mcp: Asgi | None = None
        self._mcp_lock = asyncio.Lock()
        self._life = AsyncExitStack()
        self._limiter = anyio.CapacityLimiter(WORKERS)
        self._answers: Counter[int] = Counter()
        self._routes = [(route, route.whole_path.strip("/").split("/")) for route in ROUTES]
        self._static = {one.name: one.read_bytes() for one in (files(__package__) / "static").iterdir()}

    async def start(self) -> None:
        self._service.events.start(asyncio.get_running_loop())

    def end_streams(self) -> None:
        """From a signal handler of the thread of the loop."""
        self._service.events.end_streams()

    async def stop(self) -> None:
        await self._life.aclose()
        self._service.events.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            if scope["path"] == _MCP or scope["path"].startswith(_MCP + "/"):
                await self._to_mcp(request, send)
                return
            response = await self._respond(request)
        except Refusal as refusal:
            response = refusal.response
        except ClientDisconnect:
            return
        self._answers[response.status_code] += 1
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        segments = [unquote(part) for part in request.scope["raw_path"].decode("ascii").strip("/").split("/")]
        if segments == [""] or segments[0] == "static":
            return await self._page(request, segments)
        route, path = self._match(request.method, segments)
        if route.role is None:
            return await self._ready()
        visitor = await self._visitor(request)
        self._check_role(request, route, visitor)
        body = await _body_of(request)
        query = parse_qsl(request.url.query, keep_blank_values=True, errors="surrogateescape")
        try:
            values = values_of(route, path, query, body)
        except MulliganError as error:
            return _error(error)
        asked = Asked(visitor, values, _if_match(request))
        if route.act is None:
            return await self._own_answer(route, request, asked)
        return await self._in_thread(partial(self._act, route.act, asked))

    def _match(self, method: str, segments: list[str]) -> tuple[Route, dict[str, str]]:
        """Names are decoded one by one, so an encoded slash is part of a name and never a way to another route."""
        allowed: set[str] = set()
        for route, shape in self._routes:
            if len(shape) != len(segments):
                continue
            pairs = list(zip(shape, segments, strict=True))
            if all(part.startswith("{") or part == given for part, given in pairs):
                if route.method == method:
                    return route, {part[1:-1]: given for part, given in pairs if part.startswith("{")}
                allowed.add(route.method)
        if allowed:
            raise Refusal(405, "bad_usage", "This address takes another method.", allow=", ".join(sorted(allowed)))
        raise Refusal(404, "path_not_found", "There is nothing at this address.")

    async def _visitor(self, request: Request) -> AuthenticatedClient:
        found = await self._in_thread(partial(self._access.visitor, _who_in(request)))
        if found is None:
            challenge = {"www-authenticate": 'Bearer realm="mulligan"'}
            raise Refusal(401, "permission_denied", "Send a token, or open the address that was printed.", **challenge)
        return found

    def _check_role(self, request: Request, route: Route, visitor: AuthenticatedClient) -> None:
        if route.role == "controller" and visitor.role != "controller":
            raise Refusal(403, "not_controller", "This token may only read.")
        is_cross_site = request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
        if visitor.csrf is not None and is_cross_site:
            raise Refusal(403, "forbidden", "Pages of another site may not use this cookie.")
        if visitor.csrf is not None and route.method != "GET" and request.headers.get(CSRF_HEADER) != visitor.csrf:
            raise Refusal(403, "forbidden", "A change needs the header that the page sends.")

    def _act(self, act: Callable[[Service, Asked], Answer], asked: Asked) -> Response:
        """In a worker thread. The one place where everything is caught."""
        try:
            answer = act(self._service, asked)
        except MulliganError as error:
            return _error(error)
        except Refused as refused:
            return _error(fault("conflict", refused.message))
        except Exception:  # noqa: BLE001  # the top of a server: the client learns that, and nothing of how
            traceback.print_exc(file=sys.stderr)
            return _json({"error": {"code": "internal", "message": "Internal error"}}, 500)
        if answer.raw is not None:
            return Response(answer.raw, answer.status, {**answer.headers, "content-security-policy": "sandbox"})
        return _json(answer.body, answer.status, dict(answer.headers))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)

    # Answers without a function of their own.

    async def _own_answer(self, route: Route, request: Request, asked: Asked) -> Response:
        if route.path.endswith("/events"):
            return await self._events(request, asked)
        if route.path == "/metrics":
            return await self._in_thread(self._metrics)
        if route.path == "/me":
            who = asked.visitor
            body = {"principal": who.principal, "role": who.role, "csrf": who.csrf, "version": self._service.version}
            return _json(body)
        return _json(openapi(self._service.version))

    async def _ready(self) -> Response:
        """`/readyz`: the store can be read."""

        def look() -> Response:
            try:
                with self._service.ledger.store.read() as tx:
                    tx.count(ROOTS)
            except MulliganError as error:
                return _json({"error": {"code": error.code, "message": error.message}}, 503)
            return _json({"ok": True})

        return await self._in_thread(look)

    def _metrics(self) -> Response:
        lines = ["# TYPE mulligan_http_responses_total counter"]
        lines += [f'mulligan_http_responses_total{{status="{code}"}} {n}' for code, n in sorted(self._answers.items())]
        gauges = {
            "mulligan_event_streams": self._service.events.streams,
            "mulligan_journal_records": self._service.events.newest,
            "mulligan_store_bytes": self._service.ledger.store.size_bytes(),
        }
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _events(self, request: Request, asked: Asked) -> Response:
        try:
            wanted = await self._in_thread(partial(self._wanted, asked.get("session")))
        except MulliganError as error:
            return _error(error)
        after = asked.get("after")
        last = request.headers.get("last-event-id", "")
        if last.isascii() and last.isdigit() and len(last) <= 16:
            after = int(last)
        events, key = self._service.events, asked.visitor.key
        headers = _who_in(request)
        try:
            events.enter(key)
        except TooManyStreams:
            words = "There are too many event streams; try again later."
            raise Refusal(503, "too_many_clients", words, **{"retry-after": "5"}) from None

        async def frames() -> AsyncIterator[bytes]:
            asked_at = monotonic_s()
            try:
                async for data in events.stream(wanted, after):
                    if monotonic_s() - asked_at >= ASK_AGAIN_S:
                        # The token may have expired or been revoked since. A silent stream is asked with each comment.
                        if await self._in_thread(partial(self._access.visitor, headers)) is None:
                            return
                        asked_at = monotonic_s()
                    yield data
            finally:
                events.leave(key)

        return EventStream(frames(), media_type="text/event-stream")

    def _wanted(self, session: str | None) -> Wanted:
        """Which events a client hears: of one session and its files, or of every root that is served."""
        roots = self._service.roots
        if session is not None:
            open_root, row = roots.of_session(session)
            workspace = open_root.root.workspace
            return lambda event: event.session == row.id or event.workspace == workspace
        if roots.serves_all:
            return every_event

        def admitted(event: LiveEvent) -> bool:
            return roots.admits_event(event.session, event.workspace)

        return admitted

    async def _page(self, request: Request, segments: list[str]) -> Response:
        """The page and its files. `/?code=…` buys a cookie."""
        if request.method != "GET":
            raise Refusal(405, "bad_usage", "The page is read with GET.", allow="GET")
        code = request.query_params.get("code") if segments == [""] else None
        if code is not None:
            secret = await self._in_thread(partial(self._access.exchange, code))
            if secret is None:
                return Response(_LOCKED_PAGE, 401, media_type="text/html")
            cookie = f"{self._access.cookie}={secret}; Path=/; HttpOnly; SameSite=Strict"
            cookie += f"; Max-Age={int(COOKIE_LIFE.total_seconds())}"
            return Response(b"", 303, {"location": "/", "set-cookie": cookie})
        try:
            await self._visitor(request)
        except Refusal:
            if segments != [""]:
                raise
            return Response(_LOCKED_PAGE, 401, media_type="text/html")
        name = "index.html" if segments == [""] else "/".join(segments[1:])
        if name not in self._static:
            raise Refusal(404, "path_not_found", "There is no such file.")
        return Response(
            self._static[name], media_type=_MEDIA[name.rpartition(".")[2]], headers={"cache-control": "no-cache"}
        )

    async def _to_mcp(self, request: Request, send: Send) -> None:
        """MCP's tools change files, so they are for controllers with a token; a cookie opens nothing here."""
        visitor = await self._visitor(request)
        if visitor.csrf is not None or visitor.role != "controller":
            raise Refusal(403, "not_controller", "MCP needs the token of a controller.")
        async with self._mcp_lock:
            if self._mcp is None:
                # Loaded with the first request: the SDK takes longer to import than the rest of the server.
                app = await anyio.to_thread.run_sync(self._make_mcp)
                await self._life.enter_async_context(_living(app))
                self._mcp = app
        await self._mcp(request.scope, request.receive, send)


class _living:
    """Runs the lifespan of a mounted application in a task of its own."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        async def send(message: Any) -> None:
            self._started.set()

        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        work: Awaitable[None] = self._app(scope, self._inbox.get, send)
        self._task = asyncio.ensure_future(work)
        await self._inbox.put({"type": "lifespan.startup"})
        await self._started.wait()

    async def __aexit__(self, *_: object) -> None:
        await self._inbox.put({"type": "lifespan.shutdown"})
        if self._task is not None:
            await self._task


class EventStream(StreamingResponse):
    """Ends when the client does not take its bytes: it comes back and goes on from its last event."""

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Any) -> None:
            with anyio.fail_after(STUCK_S):
                await send(message)

        try:
            await super().stream_response(in_time)
        except TimeoutError:
            return


async def _body_of(request: Request) -> bytes:
    """At most a megabyte; more is not read."""
    given = request.headers.get("content-length", "0")
    if not given.isdigit() or int(given) > BODY_MAX_BYTES:
        raise Refusal(413, "invalid_params", "The body is too large.")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_MAX_BYTES:
            raise Refusal(413, "invalid_params", "The body is too large.")
    return bytes(data)


def _who_in(request: Request) -> dict[str, str]:
    """The headers that say who asks."""
    return {name: request.headers[name] for name in ("authorization", "cookie") if name in request.headers}


def _if_match(request: Request) -> str | None:
    given = request.headers.get("if-match")
    return None if given is None else given.strip().strip('"')


def _error(error: MulliganError) -> Response:
    status = _STATUS_OF.get(error.code)
    if status is None:
        kinds: tuple[tuple[type[MulliganError], int], ...] = (
            (ForbiddenError, 403),
            (ConflictError, 409),
            (InternalError, 500),
        )
        status = next((code for kind, code in kinds if isinstance(error, kind)), 400)
    return _json({"error": {"code": error.code, "message": error.message}}, status)
