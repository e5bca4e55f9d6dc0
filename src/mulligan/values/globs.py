"""The glob language of tools and policies: `*`, `?` within a name, `**` across directories, `[a-z]`, `{a,b}`, `\\`.

A `**` crosses directories only as a whole name; elsewhere it is a `*`. Hidden names match like any other. Matching is
by character and by case. Patterns are relative: one that begins with `/`, climbs with `..` or ends in `/` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

PATTERN_MAX_CHARACTERS = 4_096
ALTERNATIVES_MAX = 1_024
BRACES_MAX = 32

_ANY_DIRS = "**"


class GlobError(ValueError):
    """The pattern is not valid; the message says why."""


@dataclass(frozen=True)
class GlobPattern:
    """A parsed pattern: alternatives, each a list of patterns for the names of a path."""

    alternatives: tuple[tuple[str, ...], ...]

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the whole relative path."""
        return self.regex.match(path) is not None

    def may_match_below(self, directory: str) -> bool:
        """Whether a path inside this directory could match."""
        names = directory.split("/")
        return any(_leads_into(alternative, names) for alternative in self.alternatives)

    @property
    def starts_anywhere(self) -> bool:
        """Whether a match may be in any directory, so that a walk must enter all of them."""
        return any(alternative[0] == _ANY_DIRS for alternative in self.alternatives)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile("|".join(_path_source(names) for names in self.alternatives), re.DOTALL)

    @cached_property
    def suffix(self) -> str | None:
        """For patterns such as `**/*.py`, the ending that decides whether a path matches; else None."""
        names = self.alternatives[0]
        plain = len(self.alternatives) == 1 and len(names) == 2 and names[0] == _ANY_DIRS
        tail = names[-1][1:] if plain and names[-1].startswith("*") else ""
        return tail if tail and not set(tail) & set("*?[\\") else None


@lru_cache(maxsize=64)
def parse_glob(pattern: str) -> GlobPattern:
    """Raises GlobError."""
    if not pattern or "\0" in pattern or len(pattern) > PATTERN_MAX_CHARACTERS:
        raise GlobError(f"a pattern has 1 to {PATTERN_MAX_CHARACTERS} characters and no NUL")
    alternatives = tuple(dict.fromkeys(_names(alternative) for alternative in _expand_braces(pattern)))
    glob = GlobPattern(alternatives)
    _ = glob.regex  # malformed names show here
    return glob


def _names(pattern: str) -> tuple[str, ...]:
    if pattern.startswith("/"):
        raise GlobError("it begins with '/', and patterns are relative")
    names = [name for name in pattern.split("/") if name != "."]
    if ".." in names:
        raise GlobError("it climbs with '..'")
    if not names or "" in names:
        raise GlobError("it has an empty name; a pattern ends in a file's name, as 'src/**' does")
    return tuple(name for at, name in enumerate(names) if name != _ANY_DIRS or names[at - 1 : at] != [_ANY_DIRS])


def _leads_into(alternative: tuple[str, ...], names: list[str]) -> bool:
    for at, name in enumerate(names):
        if at >= len(alternative) - 1 and alternative[-1] != _ANY_DIRS:
            return False
        if alternative[at] == _ANY_DIRS:
            return True
        if not _name_regex(alternative[at]).match(name):
            return False
    return True


@lru_cache(maxsize=1024)
def _name_regex(name: str) -> re.Pattern[str]:
    return re.compile(_name_source(name, r"\Z"), re.DOTALL)


def _path_source(names: tuple[str, ...]) -> str:
    """The expression for a path.

    What follows a `**` takes the leftmost match without backtracking, which is exact for wildcards.
    """
    source, closing = "", ""
    for name in names[:-1]:
        if name == _ANY_DIRS:
            source += closing + "(?>(?:[^/]*/)*?"
            closing = ")"
        else:
            source += _name_source(name, "/")
    return source + (r".+\Z" if names[-1] == _ANY_DIRS else _name_source(names[-1], r"\Z")) + closing


def _name_source(name: str, end: str) -> str:
    """The expression of one name and of its end. A star and the fixed part after it match atomically."""
    parts, at = [""], 0
    while at < len(name):
        if name[at] != "*":
            source, at = _one_character(name, at)
            parts[-1] += source
            continue
        if not name.startswith("**", at):
            parts.append("")
        at += 1
    parts[-1] += end
    return parts[0] + "".join(f"(?>[^/]*?{part})" for part in parts[1:])


def _one_character(name: str, at: int) -> tuple[str, int]:
    """The expression of the character at a position, and the position after it."""
    if name[at] == "?":
        return "[^/]", at + 1
    if name[at] == "[":
        end = _after_bracket(name, at)
        return _bracket_source(name[at + 1 : end - 1]), end
    if name[at] == "\\":
        at += 1
        if at == len(name):
            raise GlobError("a name ends in a lone backslash")
    return re.escape(name[at]), at + 1


def _after_bracket(pattern: str, at: int) -> int:
    """The position after the `]` that closes this bracket. A `]` that comes first is a member of the bracket."""
    start = at + 1 + (pattern[at + 1 : at + 2] in ("!", "^"))
    at = start
    while at < len(pattern) and (pattern[at] != "]" or at == start):
        at += 2 if pattern[at] == "\\" else 1
    if at >= len(pattern):
        raise GlobError("a '[' is not closed")
    return at + 1


def _bracket_source(body: str) -> str:
    negated = body[0] in "!^"
    ranges = _ranges(body[1:] if negated else body)
    inside = "".join(f"\\U{ord(low):08x}-\\U{ord(high):08x}" for low, high in ranges)
    return f"[^/{inside}]" if negated else f"(?!/)[{inside}]"


def _ranges(members: str) -> list[tuple[str, str]]:
    """The members of a bracket as ranges; a single character is a range of itself."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(members):
        low, at = _member(members, at)
        high = low
        if members.startswith("-", at) and at + 1 < len(members):
            high, at = _member(members, at + 1)
        if high < low:
            raise GlobError(f"the range {low}-{high} is in the wrong order")
        found.append((low, high))
    return found


def _member(members: str, at: int) -> tuple[str, int]:
    at += members[at] == "\\"
    return members[at], at + 1


def _expand_braces(pattern: str) -> list[str]:
    """All patterns that the braces of a pattern make."""
    if pattern.count("{") > BRACES_MAX:
        raise GlobError(f"it has more than {BRACES_MAX} braces")
    opening = next((at for at, character in _plain(pattern, 0) if character == "{"), None)
    if opening is None:
        return [pattern]
    options, end = _options(pattern, opening)
    tails = _expand_braces(pattern[end:])
    heads = [pattern[:opening] + head for option in options for head in _expand_braces(option)]
    if len(heads) * len(tails) > ALTERNATIVES_MAX:
        raise GlobError(f"its braces make more than {ALTERNATIVES_MAX} patterns")
    return [head + tail for head in heads for tail in tails]


def _options(pattern: str, opening: int) -> tuple[list[str], int]:
    """The texts between the commas of a brace, and the position after it."""
    depth, start, options = 0, opening + 1, []
    for at, character in _plain(pattern, opening):
        depth += (character == "{") - (character == "}")
        if depth == 0 or (depth == 1 and character == ","):
            options.append(pattern[start:at])
            start = at + 1
        if depth == 0:
            return options, at + 1
    raise GlobError("a '{' is not closed")


def _plain(pattern: str, at: int) -> Iterator[tuple[int, str]]:
    """The characters that are neither escaped nor inside a bracket."""
    while at < len(pattern):
        if pattern[at] == "[":
            at = _after_bracket(pattern, at)
        elif pattern[at] == "\\":
            at += 2
        else:
            yield at, pattern[at]
            at += 1
