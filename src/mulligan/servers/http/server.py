"""Runs the server: binds the address, answers `/healthz` at once, and opens the store behind it.

Loading history takes longer than loading an HTTP server. So the server listens first, and every other request waits
until the store is open.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from mulligan.servers.own_host import EVERY_ADDRESS, Asgi, OwnHostOnly, Receive, Scope, Send
from mulligan.values.errors import fault

if TYPE_CHECKING:
    from mulligan.servers.http.app import TimelineApp

SHUTDOWN_LIMIT_S = 2
KEEP_ALIVE_S = 600
_BACKLOG = 2_048
_HEALTHY = b'{"ok":true}'
_JSON = [
    (b"content-type", b"application/json"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(frozen=True, slots=True)
class Opened:
    """What the composition root hands over: the application, and what to do at the end."""

    app: TimelineApp
    new_code: Callable[[], str]
    close: Callable[[], None]


Open = Callable[[], Opened]


def bind(host: str, port: int, options: str = "--host or --port") -> socket.socket:
    """A listening socket. Raises `bad_usage` if the address cannot be had, and names the options to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only for a socket that names its protocol. The delay costs 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        words = f"Cannot listen on {host}:{port}: {error.strerror}. Choose another with {options}."
        raise fault("bad_usage", words) from None
    listener.listen(_BACKLOG)
    return listener


class _Uvicorn(uvicorn.Server):
    """Ends event streams when the process is asked to end: their clients never hang up by themselves.

    It does not raise the signal again, so that the store is closed as after any other end.
    """

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self._end_streams()


class Server:
    """The outermost application. `tell` runs once the store is open; `failure` is why it could not be opened."""

    def __init__(self, open_store: Open, host: str, tell: Callable[[Opened], None]) -> None:
        self.failure: BaseException | None = None
        self._open = open_store
        self._tell = tell
        self._opened: Opened | None = None
        self._ready: asyncio.Future[Opened] | None = None
        self._guarded: Asgi = OwnHostOnly(self._answer, host)
        self._uvicorn: uvicorn.Server | None = None

    def run(self, listener: socket.socket) -> None:
        """Until interrupted. Raises what opening the store raised."""
        config = uvicorn.Config(
            self,
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            date_header=False,
            # A browser does not repeat a change whose connection the server closed at that moment.
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
        )
        self._uvicorn = _Uvicorn(config, self._end_streams)
        try:
            self._uvicorn.run(sockets=[listener])
        finally:
            if self._opened is not None:
                self._opened.close()
        if self.failure is not None:
            raise self.failure

    def _end_streams(self) -> None:
        if self._opened is not None:
            self._opened.app.end_streams()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._guarded(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        loading = asyncio.ensure_future(self._load())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await loading
        if self._opened is not None:
            await self._opened.app.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        try:
            self._opened = await loop.run_in_executor(None, self._open)
            await self._opened.app.start()
        except BaseException as error:  # noqa: BLE001  # `run` raises it again, once the server has stopped
            self.failure = error
            self._ready.cancel()
            assert self._uvicorn is not None, "it calls us"
            self._uvicorn.should_exit = True
            return
        self._ready.set_result(self._opened)
        self._tell(self._opened)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/healthz" and scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": _JSON})
            await send({"type": "http.response.body", "body": _HEALTHY})
            return
        assert self._ready is not None, "requests come after startup"
        opened = await asyncio.shield(self._ready)
        await opened.app(scope, receive, send)


def url_of(host: str, listener: socket.socket, code: str) -> str:
    """The address to open in a browser on this machine."""
    port: Any = listener.getsockname()[1]
    shown = "127.0.0.1" if host in EVERY_ADDRESS else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/?code={code}"
