"""The bytes of a file: held whole, or, when that would take too much memory, kept elsewhere and given in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import TypeAlias

from mulligan.values.digest import Digest, digest_from_raw, digest_of


class Large(ABC):
    """Bytes that are too large to hold. They come piece by piece, as often as they are asked for."""

    digest: Digest
    size: int

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]: ...

    def __len__(self) -> int:
        return self.size


Content: TypeAlias = bytes | Large

KeepLarge: TypeAlias = Callable[[Iterable[bytes]], Large]
"""Takes bytes of any length as they come, and has them safe when it returns."""


def digest_of_content(content: Content) -> Digest:
    return digest_of(content) if isinstance(content, bytes) else content.digest


def pieces_of(content: Content) -> Iterable[bytes]:
    return (content,) if isinstance(content, bytes) else content


def digest_of_beginning(content: Content, size: int) -> Digest:
    """Of its first bytes, or of all if there are not so many."""
    seen = sha256()
    for piece in pieces_of(content):
        seen.update(piece[:size])
        size -= min(size, len(piece))
        if not size:
            break
    return digest_from_raw(seen.digest())


def whole(content: Content) -> bytes:
    """For whoever cannot do with less."""
    return b"".join(pieces_of(content))
