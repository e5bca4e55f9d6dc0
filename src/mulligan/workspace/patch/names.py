"""File names in a unified diff: quoting, leading directories, and which names may be touched at all. Pure bytes."""

from __future__ import annotations

import re
from typing import NewType

from mulligan.values.faults import MulliganError
from mulligan.values.paths import ROOT, RepoPath, path_bytes, path_from_bytes
from mulligan.values.plain import plain

PatchName = NewType("PatchName", str)
"""A name as a patch has it, decoded like a path but not admitted as one."""

DEV_NULL = b"/dev/null"

_LETTERS = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
_QUOTED = re.compile(rb'"((?:[^"\\\n]|\\(?:[abtnvfr"\\]|[0-3][0-7]{2}))*)"')
_ESCAPE = re.compile(rb'\\([abtnvfr"\\]|[0-3][0-7]{2})')
_ESCAPED_AS = {code: b"\\" + letter for letter, code in _LETTERS.items()}


def unquote(text: bytes) -> tuple[bytes, bytes] | None:
    """The name inside C-style quotes at the start of `text`, and what follows. None when they are not well-formed."""
    found = _QUOTED.match(text)
    if found is None:
        return None
    return _ESCAPE.sub(_unescaped, found[1]), text[found.end() :]


def _unescaped(escape: re.Match[bytes]) -> bytes:
    code = _LETTERS.get(escape[1])
    return bytes([int(escape[1], 8) if code is None else code])


def quote(name: bytes) -> str:
    """The name as git writes it; printable UTF-8 stays as it is, anything else goes between C-style quotes."""
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if text and not any(byte < 32 or byte in b'"\\\x7f' for byte in name):
        return text
    return '"' + b"".join(map(_escaped, name)).decode("ascii") + '"'


def _escaped(byte: int) -> bytes:
    if byte in _ESCAPED_AS:
        return _ESCAPED_AS[byte]
    return bytes([byte]) if 32 <= byte < 127 else b"\\%03o" % byte


def without_leading(name: bytes, strip: int) -> bytes | None:
    """The name after its first `strip` directories. None when it has not so many, or nothing is left."""
    parts = name.split(b"/", strip)
    return parts[strip] or None if len(parts) > strip else None


def admit(name: bytes) -> RepoPath | None:
    """The path a name stands for. None for the root, anything outside it, anything in a `.git`, and `~` names."""
    if name.startswith(b"~") or name.endswith(b"/"):
        return None
    try:
        path = path_from_bytes(name)
    except MulliganError:
        return None
    inside_git = any(part.lower() == b".git" for part in path_bytes(path).split(b"/"))
    return None if path == ROOT or inside_git else path


@plain(slots=True, frozen=True)
class Named:
    """A file as a header names it. `path` is None when no file may be touched under that name."""

    text: PatchName
    path: RepoPath | None


def named(name: bytes, strip: int) -> Named:
    rest = without_leading(name, strip)
    text = PatchName((name if rest is None else rest).decode("utf-8", "surrogateescape"))
    return Named(text, None if rest is None else admit(rest))
