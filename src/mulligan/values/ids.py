"""Ids. Ours are UUIDv7, so they sort by creation time.

Ids that users supply are opaque keys and never become file names.
"""

from __future__ import annotations

import sys
from typing import NewType, Protocol
from uuid import NAMESPACE_OID, UUID, uuid5

from mulligan.values.errors import fault

if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    from uuid_utils import uuid7

SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
CallId = NewType("CallId", str)
WorkspaceId = NewType("WorkspaceId", str)
RootId = NewType("RootId", str)
OwnerId = NewType("OwnerId", int)

_USER_ID_MAX = 256


class IdSource(Protocol):
    """A source of new ids. Each id is unique, and ids sort in the order in which they were created."""

    def new(self) -> str: ...


class SystemIds:
    def new(self) -> str:
        return str(uuid7())


def uuid_of(text: str) -> UUID:
    """An id as a UUID: the id itself if it is one, else a UUID that depends only on the text."""
    try:
        return UUID(text)
    except ValueError:
        return uuid5(NAMESPACE_OID, text)


def parse_user_id(text: object, what: str = "id") -> str:
    """Parse an id that a user chose: any non-blank text of at most 256 characters without control characters."""
    if not isinstance(text, str) or not text.strip():
        raise fault("invalid_id", f"{what} must not be empty.")
    if len(text) > _USER_ID_MAX or not text.isprintable():
        raise fault("invalid_id", f"{what} has at most {_USER_ID_MAX} printable characters.")
    return text
