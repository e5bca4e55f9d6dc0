"""Bearer tokens: which principal a caller is, and until when.

Invariants:
1. A raw token leaves this module once, from `create`. The store knows only its handle, which does not work as a token.
2. A token that has expired or was revoked never works again, even if the clock is set back.
3. A touch updates the row of last use in place. The journal gets a record at most every ten minutes, or when the touch
   changes something, so that a request does not write a record each time.
"""

from __future__ import annotations

import hmac
import os
import re
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from math import log2
from typing import Any

from mulligan.session.lifecycle import checked_object
from mulligan.store.journal import STORE_JOURNAL, Journal, Record
from mulligan.store.protocol import Store, Table, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, FixedClock, parse_timestamp, timestamp
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import parse_user_id

PREFIX = "mlg_"
HANDLE_PREFIX = "sha256:v1:"
RANDOM_BYTES = 32
SUPPLIED_MIN_BASE64 = 43
# Characters that 32 random bytes take.
SUPPLIED_MIN_HEX = 64
SUPPLIED_MIN_BITS = 80
ATTRIBUTES_MAX_BYTES = 4_096
TOUCH_RECORD_EVERY = timedelta(minutes=10)

_DOMAIN = b"mulligan.token.v1\0"
_BASE64URL = re.compile(rf"[A-Za-z0-9_-]{{{SUPPLIED_MIN_BASE64},}}={{0,2}}")
_HEX = re.compile("[0-9a-fA-F]+")
_NO_HANDLE = HANDLE_PREFIX + "0" * 64

# Returns that many random bytes that are good enough for secrets.
Entropy = Callable[[int], bytes]


@fast_dataclass(slots=True, frozen=True)
class TokenRow:
    """A token as folded from the journal. `last_seen_at` is its last recorded use; LAST_SEEN has the newest use."""

    handle: str
    principal: str
    created_at: str
    last_seen_at: str
    expires_at: str
    ended: int
    attributes: str


@fast_dataclass(slots=True, frozen=True)
class LastSeenRow:
    """When a token was last used: coordination, updated in place."""

    handle: str
    last_seen_at: str


TOKENS: Table[TokenRow] = Table("tokens", TokenRow, key=("handle",), indexes=(("principal",),), projected=True)
LAST_SEEN: Table[LastSeenRow] = Table("token_sights", LastSeenRow, key=("handle",))


def project_token_created(tx: Tx, record: Record) -> None:
    body = record.payload
    created, attributes = body["created_at"], encode(body["attributes"]).decode("utf-8")
    row = TokenRow(body["handle"], body["principal"], created, created, body["expires_at"], 0, attributes)
    tx.put(TOKENS, row)


def project_token_touched(tx: Tx, record: Record) -> None:
    body = record.payload
    row = tx.get(TOKENS, body["handle"])
    if row is not None:
        seen = replace(row, last_seen_at=body["last_seen_at"], expires_at=body.get("expires_at", row.expires_at))
        given = body.get("attributes")
        tx.put(TOKENS, seen if given is None else replace(seen, attributes=encode(given).decode("utf-8")))


def project_token_expired(tx: Tx, record: Record) -> None:
    row = tx.get(TOKENS, record.payload["handle"])
    if row is not None:
        tx.put(TOKENS, replace(row, expires_at=record.payload["expires_at"], ended=1))


@fast_dataclass(slots=True, frozen=True)
class Token:
    """A token. `id` is the bearer token itself after `create`, or if the caller passed it; None if the caller passed
    the handle. `repr` never shows it.
    """

    id: str | None = field(repr=False)
    handle: str
    principal: str
    created_at: str
    last_seen_at: str
    expires_at: str
    attributes: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Everything except the token itself, so it may be shown and stored."""
        texts = ("handle", "principal", "created_at", "last_seen_at", "expires_at")
        return {**{name: getattr(self, name) for name in texts}, "attributes": dict(self.attributes)}


def handle_of(token: str) -> str:
    """The one-way hash under which a token is stored."""
    return HANDLE_PREFIX + sha256(_DOMAIN + token.encode("utf-8", "surrogatepass")).hexdigest()


def random_token(entropy: Entropy = os.urandom) -> str:
    return PREFIX + urlsafe_b64encode(entropy(RANDOM_BYTES)).rstrip(b"=").decode("ascii")


class Tokens:
    """The tokens of one store. Thread-safe, and the same for every process on the store."""

    def __init__(self, store: Store, journal: Journal, *, clock: Clock, entropy: Entropy = os.urandom) -> None:
        self._store = store
        self._journal = journal
        self._clock = clock
        self._entropy = entropy

    def create(
        self,
        *,
        principal: str,
        expires_at: datetime | str,
        id: str | None = None,
        created_at: datetime | str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Token:
        """Create a token for a principal. Only this result contains a generated token; no later call returns it.

        A caller's own `id` must be 32 random bytes: base64url of at least 43, or hex of at least 64 characters.
        """
        token = random_token(self._entropy) if id is None else _parse_supplied(id)
        created = self._now() if created_at is None else _stamp(created_at, "created_at")
        handle = handle_of(token)
        body = {
            "handle": handle,
            "principal": parse_user_id(principal, "principal"),
            "created_at": created,
            "expires_at": _later(_stamp(expires_at, "expires_at"), created, "created_at"),
            "attributes": _parse_attributes(attributes),
        }
        with self._store.write(about=(STORE_JOURNAL,)) as tx:
            if tx.has(TOKENS, handle):
                raise fault("token_exists", "A token with this id exists or existed. Choose another.")
            self._append(tx, "token.created", body)
            return _token(tx, handle, token)

    def get(self, id: str) -> Token | None:
        """The token, or None if it is unknown, expired or revoked.

        Writes only if the token has expired and no record says so yet.
        """
        with self._store.read() as tx:
            row = self._known(tx, _parse_given(id))
            if row is not None and not self._is_over(row):
                return _token(tx, row.handle, id)
        self._record_end(row)
        return None

    def touch(
        self,
        id: str,
        *,
        expires_at: datetime | str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Token | None:
        """Record a use of the token now; None as for `get`. `expires_at` and `attributes` replace the token's.

        The time of last use never runs backwards. An expired or revoked token stays so.
        """
        given = _parse_given(id)
        with self._store.write(about=(STORE_JOURNAL,)) as tx:
            return self._seen(tx, self._known(tx, given), id, expires_at=expires_at, attributes=attributes)

    def expire(self, id: str) -> Token | None:
        """Revoke a token now. It cannot become valid again. None if there is no such token."""
        return self._revoke(handle_of(_parse_given(id)), id)

    # By handle: for operators, who do not have the tokens.

    def listed(self, principal: str | None = None) -> list[Token]:
        """All tokens, or those of one principal, oldest first. Expired and revoked ones are included."""
        with self._store.read() as tx:
            rows = tx.select(TOKENS, None if principal is None else {"principal": principal}, order=("created_at",))
            return [_token(tx, row.handle, None) for row in rows]

    def named(self, handle: str) -> Token | None:
        """The token with this handle, valid or not. A handle gives no access."""
        with self._store.read() as tx:
            return _token(tx, handle, None) if tx.has(TOKENS, handle) else None

    def touch_named(self, handle: str, *, expires_at: datetime | str | None = None) -> Token | None:
        with self._store.write(about=(STORE_JOURNAL,)) as tx:
            return self._seen(tx, tx.get(TOKENS, handle), None, expires_at=expires_at, attributes=None)

    def expire_named(self, handle: str) -> Token | None:
        return self._revoke(handle, None)

    def is_over(self, token: Token) -> bool:
        """Whether the token no longer works. If it has expired, this records it, so that it never works again."""
        with self._store.read() as tx:
            row = tx.get(TOKENS, token.handle)
        if row is not None and not self._is_over(row):
            return False
        self._record_end(row)
        return True

    # Internal.

    def _seen(
        self,
        tx: Tx,
        row: TokenRow | None,
        id: str | None,
        *,
        expires_at: datetime | str | None,
        attributes: Mapping[str, Any] | None,
    ) -> Token | None:
        if row is None or self._is_over(row):
            self._end(tx, row)
            return None
        seen = max(_last_seen(tx, row), self._now())
        changed: dict[str, Any] = {} if attributes is None else {"attributes": _parse_attributes(attributes)}
        if expires_at is not None:
            changed["expires_at"] = _later(_stamp(expires_at, "expires_at"), seen, "last_seen_at")
        tx.put(LAST_SEEN, LastSeenRow(row.handle, seen))
        if changed or parse_timestamp(seen) - parse_timestamp(row.last_seen_at) >= TOUCH_RECORD_EVERY:
            self._append(tx, "token.touched", {"handle": row.handle, "last_seen_at": seen, **changed})
        return _token(tx, row.handle, id)

    def _revoke(self, handle: str, id: str | None) -> Token | None:
        with self._store.write(about=(STORE_JOURNAL,)) as tx:
            row = tx.get(TOKENS, handle)
            if row is None:
                return None
            self._end(tx, row)
            return _token(tx, handle, id)

    def _known(self, tx: Tx, token: str) -> TokenRow | None:
        """The row of a token. We look up and compare the handle, so the time needed reveals nothing about the token."""
        handle = handle_of(token)
        row = tx.get(TOKENS, handle)
        is_same = hmac.compare_digest(_NO_HANDLE if row is None else row.handle, handle)
        return row if is_same else None

    def _is_over(self, row: TokenRow) -> bool:
        return bool(row.ended) or parse_timestamp(row.expires_at) <= self._clock.now()

    def _record_end(self, seen: TokenRow | None) -> None:
        """Record that the token has expired, because an answer said so; a clock set back must not revive it."""
        if seen is None or seen.ended:
            return
        with self._store.write(about=(STORE_JOURNAL,)) as tx:
            self._end(tx, tx.get(TOKENS, seen.handle))

    def _end(self, tx: Tx, row: TokenRow | None) -> None:
        """Write the record of the token's end once, so that a clock set back does not revive the token."""
        if row is not None and not row.ended:
            ends = min(row.expires_at, self._now())
            self._append(tx, "token.expired", {"handle": row.handle, "expires_at": ends})

    def _append(self, tx: Tx, kind: str, body: Mapping[str, Any]) -> None:
        self._journal.append(tx, STORE_JOURNAL, kind, body, at=self._now())

    def _now(self) -> str:
        return timestamp(self._clock)


def _token(tx: Tx, handle: str, id: str | None) -> Token:
    row = tx.get(TOKENS, handle)
    assert row is not None, "looked up just before, in the same transaction"
    seen, attributes = _last_seen(tx, row), decode(row.attributes)
    return Token(id, handle, row.principal, row.created_at, seen, row.expires_at, attributes)


def _last_seen(tx: Tx, row: TokenRow) -> str:
    sight = tx.get(LAST_SEEN, row.handle)
    return row.last_seen_at if sight is None else max(sight.last_seen_at, row.last_seen_at)


def _parse_given(id: object) -> str:
    if not isinstance(id, str):
        raise fault("invalid_params", "A token must be text.", field="id")
    return id.strip()


def _parse_supplied(id: object) -> str:
    """Checks a caller's own id: valid in a header and not guessable. The error message never repeats it."""
    token = _parse_given(id)
    if not _is_random_text(token):
        words = (
            f"Your own token must be base64url of at least {SUPPLIED_MIN_BASE64} characters, or hex of at least"
            f" {SUPPLIED_MIN_HEX}: 32 random bytes. Leave `id` out and Mulligan generates one."
        )
        raise fault("weak_token", words)
    # An upper bound of the text's entropy, from the frequency of its characters.
    if -sum(count * log2(count / len(token)) for count in Counter(token).values()) < SUPPLIED_MIN_BITS:
        raise fault("weak_token", "This token is too easy to guess. Leave `id` out and Mulligan generates one.")
    return token


def _is_random_text(token: str) -> bool:
    """Whether it looks like 32 random bytes: hex, or base64url that is not made of words."""
    if _HEX.fullmatch(token):
        return len(token) >= SUPPLIED_MIN_HEX
    if not _BASE64URL.fullmatch(token):
        return False
    lower = sum(character.islower() for character in token)
    others = sum(character.isupper() or character.isdigit() for character in token)
    # Of random base64url 40 % are small letters and 56 % capitals and digits; words have nearly none of one of them.
    return others * 4 >= len(token) and lower * 10 >= len(token)


def _parse_attributes(attributes: object) -> dict[str, Any]:
    if attributes is None:
        return {}
    return checked_object(attributes, "attributes", "attributes", max_bytes=ATTRIBUTES_MAX_BYTES)


def _stamp(given: object, name: str) -> str:
    """A time with its zone, in the one format of the store, which sorts as text."""
    try:
        moment = datetime.fromisoformat(given) if isinstance(given, str) else given
        if isinstance(moment, datetime) and moment.tzinfo is not None:
            return timestamp(FixedClock(moment.astimezone(UTC)))
    except (ValueError, OverflowError):
        pass
    raise fault("invalid_params", f"{name} must be an RFC 3339 time with a zone, or an aware datetime.", field=name)


def _later(moment: str, than: str, what: str) -> str:
    if moment <= than:
        raise fault("invalid_params", f"expires_at must be later than {what}.", field="expires_at")
    return moment
