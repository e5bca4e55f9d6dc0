"""Digests: `sha256:<64 hex>` of the plain, uncompressed bytes."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from typing import NewType

from mulligan.values.errors import fault

Digest = NewType("Digest", str)

_FORM = re.compile(r"sha256:[0-9a-f]{64}\Z")


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    return Digest("sha256:" + sha256(data).hexdigest())


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _FORM.match(text) is not None


def parse_digest(text: object) -> Digest:
    """Parse a digest. Raises `invalid_digest`."""
    if not isinstance(text, str) or _FORM.match(text) is None:
        raise fault("invalid_digest", "A digest is 'sha256:' and 64 lower-case hex digits.")
    return Digest(text)


@lru_cache(maxsize=1_024)
def raw_digest(digest: Digest) -> bytes:
    """The 32 bytes of a digest, the form in which stores hold it."""
    return bytes.fromhex(digest[7:])


def digest_from_raw(raw: bytes) -> Digest:
    return Digest("sha256:" + raw.hex())
