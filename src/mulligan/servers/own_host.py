"""Checks that a request is meant for this server: its Host, and its Origin if there is one, must name the server.

Otherwise a web page that a browser on this machine has open could reach the server by rebinding a name of its own. It
imports little, because `mulligan serve` answers before anything else is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")

_AUTHORITY = r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?"
_HOST = re.compile(_AUTHORITY, re.IGNORECASE)
_ORIGIN = re.compile(rf"https?://{_AUTHORITY}", re.IGNORECASE)


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
            await _answer(send, 421, b"This server has another name.")
        elif origin is not None and origin not in names:
            await _answer(send, 403, b"Pages of another origin may not call this server.")
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


async def _answer(send: Send, status: int, message: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": message})
