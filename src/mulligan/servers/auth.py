"""Who is calling: ASGI middleware that asks for a bearer token, for Starlette or anything else.

    app = Starlette(routes=…, middleware=[Middleware(BearerAuth, keys=keys, tokens=tokens)])

Static keys are tried first, then durable tokens; only a token is touched. A request that is let in finds in its state
`principal`, and `session`: its Token, or None for a static key. All others are answered with 401 here.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from hashlib import sha256
from typing import Any, NamedTuple

from mulligan.session.tokens import Token, Tokens, random_token
from mulligan.values.faults import MulliganError, fault

KEY_PRINCIPAL = "api-key"
"""Who bears a static key: it has no name of its own."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

_CHALLENGE = [(b"www-authenticate", b'Bearer realm="mulligan"'), (b"content-type", b"application/json")]


class Caller(NamedTuple):
    """Somebody who was let in."""

    principal: str
    token: Token | None = None


class StaticKeys:
    """Keys from a file. Which one it was, and how much of it was right, cannot be told from the time it takes."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        # Only digests are kept and compared: all have one length, and a dump of this process shows no key.
        self._digests = [_digest(key) for key in keys]

    def admits(self, given: str) -> bool:
        digest = _digest(given)
        return sum(hmac.compare_digest(digest, one) for one in self._digests) > 0

    def __bool__(self) -> bool:
        return bool(self._digests)


def read_keys(text: str) -> StaticKeys:
    """A file of keys: one a line, `#` begins a comment line."""
    lines = [line.strip() for line in text.splitlines()]
    return StaticKeys(line for line in lines if line and not line.startswith("#"))


def create_key_file(path: str) -> bool:
    """Make a file with one random key that only its owner can read. False if there is such a file already."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{random_token()}\n")
    return True


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def caller_of(given: str, keys: StaticKeys, tokens: Tokens | None) -> Caller | None:
    """Who bears this; None if nobody does. A token counts as seen now."""
    if keys.admits(given):
        return Caller(KEY_PRINCIPAL)
    token = None if tokens is None or not given else tokens.touch(given)
    return None if token is None else Caller(token.principal, token)


def needs_serve(what: str, error: ModuleNotFoundError) -> MulliganError:
    """What to install, for what only the extra brings."""
    return fault("bad_usage", f"{what} needs {error.name}: pip install 'mulligan[serve]'.", missing_extra="serve")


class BearerAuth:
    """Lets in requests that bear a good key or token. `open_paths` need neither. Raises `bad_usage` without anyio."""

    def __init__(
        self,
        app: Asgi,
        *,
        keys: StaticKeys | None = None,
        tokens: Tokens | None = None,
        open_paths: Iterable[str] = (),
    ) -> None:
        try:
            # Here, so that keys can be read where the extra is not installed.
            from anyio.to_thread import run_sync
        except ModuleNotFoundError as error:
            raise needs_serve("BearerAuth", error) from error
        self._in_thread = run_sync
        self._app = app
        self._keys = StaticKeys() if keys is None else keys
        self._tokens = tokens
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("path") in self._open_paths:
            await self._app(scope, receive, send)
            return
        caller = await self._caller(scope)
        if caller is None:
            await _refuse(scope, send)
            return
        # A state of its own for each request: what others put there for the whole server stays theirs.
        state = {**scope.get("state", {}), "principal": caller.principal, "session": caller.token}
        await self._app({**scope, "state": state}, receive, send)

    async def _caller(self, scope: Scope) -> Caller | None:
        given = bearer_in(scope)
        if given is None:
            return None
        # The store is synchronous, and a touch is a write.
        return await self._in_thread(caller_of, given, self._keys, self._tokens)


def bearer_in(scope: Scope) -> str | None:
    """What the one Authorization header bears; None without one, or with more than one."""
    found = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(found) != 1:
        return None
    scheme, _, given = found[0].partition(b" ")
    return given.strip().decode("utf-8", "replace") if scheme.lower() == b"bearer" else None


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        # Before it was accepted this is an answer too: 403, the only one a server can give there.
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": _CHALLENGE})
    await send({"type": "http.response.body", "body": b'{"error":"unauthorized"}'})
