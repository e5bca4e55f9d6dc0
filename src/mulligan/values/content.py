"""The bytes of a file: held whole, or, when that would take too much memory, kept elsewhere and given in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from mulligan.values.digest import Digest, digest_of


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


def begins_with(content: Content, beginning: Content) -> bool:
    """Whether it starts with these bytes, however both are cut into pieces."""
    rest, held = iter(pieces_of(content)), b""
    for piece in pieces_of(beginning):
        while len(held) < len(piece):
            more = next(rest, b"")
            if not more:
                return False
            held += more
        if not held.startswith(piece):
            return False
        held = held[len(piece) :]
    return True


def whole(content: Content) -> bytes:
    """For whoever cannot do with less."""
    return b"".join(pieces_of(content))
