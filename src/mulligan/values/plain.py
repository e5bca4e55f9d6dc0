"""A decorator for the small values that every call makes many of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as plain
else:
    from dataclasses import dataclass

    def plain(*, slots: bool, frozen: bool, order: bool = False) -> Callable[[type[T]], type[T]]:
        """`@plain(slots=True, frozen=True)` is a dataclass that only the type checker keeps frozen.

        At run time it can be compared and hashed like a frozen one, and is made five times as fast: freezing was a
        tenth of the time of a call.
        """
        return dataclass(slots=slots, unsafe_hash=frozen, order=order)


__all__ = ["plain"]
