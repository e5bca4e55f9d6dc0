"""Who may ask: bearer tokens and static keys, the one-time code of the printed URL, and the cookie that it buys.

1. A role is `controller` or `observer`. An observer only reads. Static keys and tokens without a role are controllers.
2. The code works once and for five minutes. The server exchanges it for a durable token in an HttpOnly cookie, so that
   a page outlives a restart of the server, and `mulligan token expire` ends it.
3. A cookie alone authorises no request that changes something: the page also sends a header that another site can
   neither read nor set.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie

from mulligan.servers.auth import KEY_PRINCIPAL, Role, StaticKeys, role_of
from mulligan.session.tokens import Tokens, random_token
from mulligan.values.clock import Clock, monotonic_s
from mulligan.values.fast_dataclass import fast_dataclass

BROWSER_PRINCIPAL = "browser"
CODE_LIFE_S = 300.0
COOKIE_LIFE = timedelta(days=30)
CSRF_HEADER = "x-mulligan-csrf"
_TOUCH_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class AuthenticatedClient:
    """Somebody who was let in. `key` tells visitors apart for limits; `csrf` is what a page must send back."""

    principal: str
    role: Role
    key: str
    csrf: str | None = None


@fast_dataclass(slots=True)
class Access:
    """Judges the headers of a request. For worker threads: it reads the store."""

    keys: StaticKeys
    tokens: Tokens
    clock: Clock
    cookie: str
    _code: str | None = None
    _code_until: float = 0.0
    _touched: dict[str, float] = field(default_factory=dict)

    def new_code(self) -> str:
        """The only code that works from now on."""
        self._code, self._code_until = random_token(), monotonic_s() + CODE_LIFE_S
        return self._code

    def exchange(self, code: str) -> str | None:
        """The value of a new cookie; None for a code that is wrong, used or too old."""
        given = self._code or ""
        fits = hmac.compare_digest(sha256(given.encode()).digest(), sha256(code.encode("utf-8", "replace")).digest())
        if not given or not fits or monotonic_s() > self._code_until:
            return None
        self._code = None
        ends = self.clock.now() + COOKIE_LIFE
        made = self.tokens.create(principal=BROWSER_PRINCIPAL, expires_at=ends, attributes={"role": "controller"})
        return made.id

    def visitor(self, headers: Mapping[str, str]) -> AuthenticatedClient | None:
        """Who sent these headers; None for nobody who may ask. Header names are in small letters."""
        given = headers.get("authorization")
        if given is not None:
            scheme, _, secret = given.partition(" ")
            return self._bearer(secret.strip()) if scheme.lower() == "bearer" else None
        cookie = cookie_in(headers.get("cookie", ""), self.cookie)
        found = None if cookie is None else self._token(cookie)
        if found is None or cookie is None:
            return None
        return AuthenticatedClient(found.principal, found.role, found.key, csrf=csrf_of(cookie))

    def _bearer(self, secret: str) -> AuthenticatedClient | None:
        if self.keys.admits(secret):
            return AuthenticatedClient(KEY_PRINCIPAL, "controller", "key:" + sha256(secret.encode()).hexdigest())
        return self._token(secret)

    def _token(self, secret: str) -> AuthenticatedClient | None:
        token = self.tokens.get(secret) if secret else None
        if token is None:
            return None
        now = monotonic_s()
        if now - self._touched.get(token.handle, -_TOUCH_EVERY_S) >= _TOUCH_EVERY_S:
            # A touch is a write, and a page asks often.
            self._touched[token.handle] = now
            self.tokens.touch(secret)
        return AuthenticatedClient(token.principal, role_of(token), token.handle)


def csrf_of(secret: str) -> str:
    """What the page of this cookie sends with each change. It does not tell the cookie."""
    return sha256(b"csrf\n" + secret.encode()).hexdigest()


def cookie_in(header: str, name: str) -> str | None:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return None
    return None if found is None else found.value


def has_lasting_token(tokens: Tokens) -> bool:
    """Whether some client other than a page was given a token that still works."""
    return any(one.principal != BROWSER_PRINCIPAL and not tokens.is_over(one) for one in tokens.listed())
