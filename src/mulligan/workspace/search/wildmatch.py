"""Git's wildcard language, as regular expressions over bytes.

Git matches bytes, not characters: `?` is one byte. A pattern is compiled so that no text can make it backtrack: what
follows a `*` is looked for from the left inside an atomic group, which is exact for wildcards and takes at most
quadratic time. A pattern that git would never match (an unclosed bracket, a stray backslash) compiles to None.
"""

from __future__ import annotations

import re

SPECIAL = frozenset(b"*?[\\")

_STAR, _ANY_DIRS, _ANYTHING = "*", "**/", "**"
_SLASH = ord("/")
_BYTES = range(256)

_CLASSES: dict[bytes, frozenset[int]] = {
    b"alnum": frozenset(b for b in range(128) if chr(b).isalnum()),
    b"alpha": frozenset(b for b in range(128) if chr(b).isalpha()),
    b"blank": frozenset(b" \t"),
    b"cntrl": frozenset([*range(32), 127]),
    b"digit": frozenset(b"0123456789"),
    b"graph": frozenset(range(33, 127)),
    b"lower": frozenset(range(ord("a"), ord("z") + 1)),
    b"print": frozenset(range(32, 127)),
    b"punct": frozenset(b for b in range(33, 127) if not chr(b).isalnum()),
    b"space": frozenset(b" \t\n\r\v\f"),
    b"upper": frozenset(range(ord("A"), ord("Z") + 1)),
    b"xdigit": frozenset(b"0123456789abcdefABCDEF"),
}


def literal_prefix(pattern: bytes) -> bytes:
    """What comes before the first special byte."""
    for at, byte in enumerate(pattern):
        if byte in SPECIAL:
            return pattern[:at]
    return pattern


def translate(pattern: bytes, after: bytes = b"") -> bytes | None:
    """Source of a regular expression that matches whole paths, `/` being special; None when nothing can match.

    `after` is what the expression will be put after. Wants the flag DOTALL. Holds no capturing groups.
    """
    try:
        fixed, wild = _Reader(pattern).split()
    except _NeverMatches:
        return None
    return _assemble(fixed, wild, after)


class _NeverMatches(Exception):
    """The pattern is malformed; git lets it match nothing."""


class _Reader:
    def __init__(self, pattern: bytes) -> None:
        self.pattern = pattern
        self.at = 0

    def split(self) -> tuple[list[bytes], list[str]]:
        """The fixed parts, as regex source, and the wildcards between them."""
        fixed, wild = [b""], []
        while self.at < len(self.pattern):
            if self.pattern[self.at] == ord("*"):
                wild.append(self._wildcard())
                fixed.append(b"")
            else:
                fixed[-1] += self._one()
        return fixed, wild

    def _wildcard(self) -> str:
        start = self.at
        while self.pattern[self.at : self.at + 1] == b"*":
            self.at += 1
        rest = self.pattern[self.at :]
        opens = start == 0 or self.pattern[start - 1] == _SLASH
        if self.at - start == 1 or not opens or not (not rest or rest.startswith((b"/", b"\\/"))):
            return _STAR
        if rest.startswith(b"/"):
            self.at += 1
            return _ANY_DIRS
        return _ANYTHING

    def _one(self) -> bytes:
        """The regex of one byte of text, never a wildcard."""
        byte = self.pattern[self.at]
        self.at += 1
        if byte == ord("?"):
            return b"[^/]"
        if byte == ord("["):
            return self._bracket()
        if byte == ord("\\"):
            byte = self._next()
        return re.escape(bytes([byte]))

    def _next(self) -> int:
        if self.at >= len(self.pattern):
            raise _NeverMatches
        self.at += 1
        return self.pattern[self.at - 1]

    def _bracket(self) -> bytes:
        negated = self.pattern[self.at : self.at + 1] in (b"!", b"^")
        self.at += negated
        members: set[int] = set()
        byte, previous = self._next(), 0
        while True:
            previous = self._member(byte, previous, members)
            byte = self._next()
            if byte == ord("]"):
                break
        chosen = set(_BYTES) - members if negated else members
        return _byte_class(chosen - {_SLASH})

    def _member(self, byte: int, previous: int, members: set[int]) -> int:
        """Add what one item of a bracket names; returns the byte a following range would start from, or 0."""
        if byte == ord("\\"):
            byte = self._next()
        elif byte == ord("-") and previous and self.pattern[self.at : self.at + 1] not in (b"", b"]"):
            high = self._next()
            members.update(range(previous, (self._next() if high == ord("\\") else high) + 1))
            return 0
        elif byte == ord("[") and self.pattern[self.at : self.at + 1] == b":":
            named = self._named_class()
            if named is not None:
                members |= named
                return 0
        members.add(byte)
        return byte

    def _named_class(self) -> frozenset[int] | None:
        """`[:alpha:]`, the reader standing on its first colon; None when it is no class but plain members."""
        end = self.pattern.find(b"]", self.at + 1)
        if end < 0:
            raise _NeverMatches
        body = self.pattern[self.at + 1 : end]
        if not body.endswith(b":"):
            return None
        if body[:-1] not in _CLASSES:
            raise _NeverMatches
        self.at = end + 1
        return _CLASSES[body[:-1]]


def _byte_class(members: set[int]) -> bytes:
    if not members:
        return rb"[^\x00-\xff]"
    return b"[" + b"".join(b"\\x%02x" % byte for byte in sorted(members)) + b"]"


def _assemble(fixed: list[bytes], wild: list[str], after: bytes) -> bytes:
    """A star swallows, atomically, the fixed part after it; `**` everything up to the next `**`."""
    source, closing = fixed[0], b""
    for number, (kind, part) in enumerate(zip(wild, fixed[1:], strict=True), start=2):
        if kind != _STAR:
            source += closing + _OPENING[kind] + part
            closing = b")"
        elif number == len(fixed) and _opens_a_name(after + source) and b"/" not in part:
            source += b"[^/]*" + (b"(?<=" + part + b")" if part else b"")
        else:
            source += b"(?>[^/]*?" + part + (rb"\Z)" if number == len(fixed) else b")")
    return source + rb"\Z" + closing


_OPENING = {_ANY_DIRS: b"(?>(?:[^/]*/)*?", _ANYTHING: b"(?>.*?"}


def _opens_a_name(source: bytes) -> bool:
    """Whether what follows is matched from the start of a name, so that looking back from its end is safe and quick."""
    before = source.removesuffix(_OPENING[_ANY_DIRS]).rstrip(b")")
    return not before or before.endswith(b"/")
