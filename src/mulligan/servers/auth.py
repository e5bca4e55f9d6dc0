"""ASGI middleware that requires a bearer token.

    app = Starlette(routes=…, middleware=[Middleware(BearerAuth, keys=keys, tokens=tokens)])

It tries static keys first, then durable tokens, and marks a token as seen. An accepted request has in its state
`principal` and `session`: its Token, or None for a static key. The middleware answers all others with 401.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from hashlib import sha256
from typing import Literal, NamedTuple

from mulligan.servers.own_host import Asgi, Receive, Scope, Send
from mulligan.session.tokens import Token, Tokens, random_token
from mulligan.values.errors import MulliganError, fault

KEY_PRINCIPAL = "api-key"
"""The principal of all static keys."""

Role = Literal["observer", "controller"]

_CHALLENGE = [(b"www-authenticate", b'Bearer realm="mulligan"'), (b"content-type", b"application/json")]


class Caller(NamedTuple):
    """The sender of an accepted request."""

    principal: str
    token: Token | None = None


class StaticKeys:
    """Keys from a file. The time of a comparison does not reveal which key matched, or how much of it."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        # Digests all have the same length, and a dump of this process shows no key.
        self._digests = [_digest(key) for key in keys]

    def admits(self, given: str) -> bool:
        digest = _digest(given)
        return sum(hmac.compare_digest(digest, one) for one in self._digests) > 0

    def __bool__(self) -> bool:
        return bool(self._digests)


def read_keys(text: str) -> StaticKeys:
    """Reads a file of keys: one on each line; `#` begins a comment line."""
    lines = [line.strip() for line in text.splitlines()]
    return StaticKeys(line for line in lines if line and not line.startswith("#"))


def create_key_file(path: str) -> bool:
    """Creates a file with one random key, which only its owner can read. False if the file exists."""
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
    """The caller with this key or token; None if it is not valid. Marks a token as seen."""
    if keys.admits(given):
        return Caller(KEY_PRINCIPAL)
    token = None if tokens is None or not given else tokens.touch(given)
    return None if token is None else Caller(token.principal, token)


def role_of(token: Token | None) -> Role:
    """An observer only reads. Static keys, and tokens without a role, are controllers."""
    return "observer" if token is not None and token.attributes.get("role") == "observer" else "controller"


def needs_serve(what: str, error: ModuleNotFoundError) -> MulliganError:
    """The error for a feature of the extra `serve`, if it is not installed."""
    return fault("bad_usage", f"{what} needs {error.name}: pip install 'mulligan[serve]'.", missing_extra="serve")


class BearerAuth:
    """Accepts requests with a valid key or token; with `controllers_only`, not with an observer's token.

    `open_paths` need neither. Raises `bad_usage` without anyio.
    """

    def __init__(
        self,
        app: Asgi,
        *,
        keys: StaticKeys | None = None,
        tokens: Tokens | None = None,
        open_paths: Iterable[str] = (),
        controllers_only: bool = False,
    ) -> None:
        try:
            # Imported here, so that the functions for keys work without the extra.
            from anyio.to_thread import run_sync
        except ModuleNotFoundError as error:
            raise needs_serve("BearerAuth", error) from error
        self._in_thread = run_sync
        self._app = app
        self._keys = StaticKeys() if keys is None else keys
        self._tokens = tokens
        self._open_paths = frozenset(open_paths)
        self._controllers_only = controllers_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("path") in self._open_paths:
            await self._app(scope, receive, send)
            return
        caller = await self._caller(scope)
        if caller is None or (self._controllers_only and role_of(caller.token) != "controller"):
            await _refuse(scope, send, 401 if caller is None else 403)
            return
        # A new mapping for each request: the server's own state must not change.
        state = {**scope.get("state", {}), "principal": caller.principal, "session": caller.token}
        await self._app({**scope, "state": state}, receive, send)

    async def _caller(self, scope: Scope) -> Caller | None:
        given = bearer_in(scope)
        if given is None:
            return None
        # The store is synchronous, and marking a token as seen writes.
        return await self._in_thread(caller_of, given, self._keys, self._tokens)


def bearer_in(scope: Scope) -> str | None:
    """The bearer token in the Authorization header; None without the header, or with two of them."""
    found = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(found) != 1:
        return None
    scheme, _, given = found[0].partition(b" ")
    return given.strip().decode("utf-8", "replace") if scheme.lower() == b"bearer" else None


async def _refuse(scope: Scope, send: Send, status: int) -> None:
    if scope["type"] == "websocket":
        # Closing a websocket before it is accepted answers 403; a server has no other way.
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": status, "headers": _CHALLENGE})
    await send({"type": "http.response.body", "body": b'{"error":"unauthorized"}'})
