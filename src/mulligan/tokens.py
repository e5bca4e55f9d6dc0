"""Bearer tokens of the innermost `mulligan.open`, else of the current folder's store.

with mulligan.open("."):
    token = mulligan.tokens.create(principal="ci", expires_at=tomorrow)
    print(token.id)                             # Mulligan does not store it: show it now
    mulligan.tokens.touch(token.id)             # None once it has expired or was revoked: answer 401
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mulligan.api import innermost
from mulligan.session.tokens import Token

__all__ = ["Token", "create", "expire", "get", "touch"]


def create(
    *,
    principal: str,
    expires_at: datetime | str,
    id: str | None = None,
    created_at: datetime | str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Token:
    """Creates a token; its `id` is what the client sends as `Authorization: Bearer …`."""
    return innermost().tokens.create(
        principal=principal, expires_at=expires_at, id=id, created_at=created_at, attributes=attributes
    )


def get(id: str) -> Token | None:
    """The token, or None if it is unknown, expired or revoked."""
    return innermost().tokens.get(id)


def touch(
    id: str, *, expires_at: datetime | str | None = None, attributes: Mapping[str, Any] | None = None
) -> Token | None:
    """Like `get`, and marks the token as seen now."""
    return innermost().tokens.touch(id, expires_at=expires_at, attributes=attributes)


def expire(id: str) -> Token | None:
    """Revokes a token now; it cannot become valid again. None if there is no such token."""
    return innermost().tokens.expire(id)
