"""Bytes and text in other forms: base64 for JSON, escapes and columns for a terminal."""

from __future__ import annotations

import unicodedata
from base64 import b64decode, b64encode

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that are invisible, or that move, recolour or reverse text."""


def in_base64(data: bytes) -> str:
    """Bytes as JSON holds them: `base64:` and base64."""
    return "base64:" + b64encode(data).decode("ascii")


def from_base64(text: str) -> bytes:
    """The bytes of `in_base64`. Raises ValueError if the text is not base64."""
    return b64decode(text.removeprefix("base64:"), validate=True)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def legible(text: str) -> str:
    """The text without lone surrogates, which come from names that are not UTF-8 and which JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def visible(text: str) -> str:
    """The text with every character that a terminal would act on escaped."""
    return text if text.isascii() and text.isprintable() else "".join(_shown(c) for c in text)


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    point = ord(character)
    if 0xDC80 <= point <= 0xDCFF:
        return f"\\x{point - 0xDC00:02x}"
    if point <= 0xFF:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes, if it is `visible`."""
    if text.isascii():
        return len(text)
    return sum(_width(character) for character in text)


def _width(character: str) -> int:
    # An accent is drawn over the character before it.
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def shortened(text: str, columns: int) -> str:
    """The text in at most that many columns; an ellipsis stands for what is left out."""
    if width_of(text) <= columns:
        return text
    used, kept = 1, 0
    for character in text:
        used += _width(character)
        if used > columns:
            break
        kept += 1
    return text[:kept] + "…"


def padded(text: str, columns: int) -> str:
    """The text with spaces after it, up to that many columns."""
    return text + " " * (columns - width_of(text))
