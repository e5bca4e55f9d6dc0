"""Sets of code points, as sorted, disjoint ranges. Surrogates are never members: no file in UTF-8 holds one.

Regular-expression engines disagree on what `\\w`, `\\p{Lu}` or "the same letter in the other case" are, by design and
by the Unicode version they were built with. So we decide it here, once, and hand every engine plain ranges.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

from mulligan.workspace.search.scripts import SCRIPTS

CharSet: TypeAlias = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_LAST_CASED = 0x1E943


def charset(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """The set of all code points of the ranges, in normal form."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    first, last = _SURROGATES
    for low, high in ranges:
        if low < first:
            yield low, min(high, first - 1)
        if high > last:
            yield max(low, last + 1), high


def single(*characters: str) -> CharSet:
    return charset((ord(c), ord(c)) for c in characters)


def union(*sets: CharSet) -> CharSet:
    return charset(pair for one in sets for pair in one)


def negate(members: CharSet) -> CharSet:
    gaps, start = [], 0
    for low, high in members:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        gaps.append((start, LAST))
    return charset(gaps)


def minus(members: CharSet, others: CharSet) -> CharSet:
    return negate(union(negate(members), others))


def contains(members: CharSet, code: int) -> bool:
    at = bisect_right(members, (code, LAST + 1)) - 1
    return at >= 0 and members[at][0] <= code <= members[at][1]


def fold(members: CharSet) -> CharSet:
    """The set with every letter's other cases, by Unicode simple case folding (`k` brings `K` and the Kelvin sign)."""
    orbits = _ascii_orbits() if not members or members[-1][1] < 0x80 else _orbits()
    extra = [(other, other) for code, orbit in orbits.items() if contains(members, code) for other in orbit]
    return charset([*members, *extra]) if extra else members


@lru_cache(maxsize=1)
def _ascii_orbits() -> dict[int, tuple[int, ...]]:
    """Folding of ASCII alone, known without a walk through Unicode."""
    beyond = {"k": "\u212a", "s": "\u017f"}
    letters = [(c, c.upper(), *beyond.get(c, "")) for c in "abcdefghijklmnopqrstuvwxyz"]
    return {ord(c): tuple(map(ord, group)) for group in letters for c in group}


@lru_cache(maxsize=1)
def _orbits() -> dict[int, tuple[int, ...]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for code in range(_LAST_CASED + 1):
        character = chr(code)
        folded = character.casefold()
        if len(folded) != 1:
            folded = character.lower()
        if len(folded) == 1:
            groups[folded].append(code)
    return {code: tuple(group) for group in groups.values() if len(group) > 1 for code in group}


WORD = charset([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
DIGIT = charset([(0x30, 0x39)])
SPACE = single("\t", "\n", "\v", "\f", "\r", " ")
ANY = negate(())

POSIX: dict[str, CharSet] = {
    "alnum": minus(WORD, single("_")),
    "alpha": charset([(0x41, 0x5A), (0x61, 0x7A)]),
    "ascii": charset([(0, 0x7F)]),
    "blank": single("\t", " "),
    "cntrl": charset([(0, 0x1F), (0x7F, 0x7F)]),
    "digit": DIGIT,
    "graph": charset([(0x21, 0x7E)]),
    "lower": charset([(0x61, 0x7A)]),
    "print": charset([(0x20, 0x7E)]),
    "punct": minus(charset([(0x21, 0x7E)]), minus(WORD, single("_"))),
    "space": SPACE,
    "upper": charset([(0x41, 0x5A)]),
    "word": WORD,
    "xdigit": charset([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)]),
}


def unicode_property(name: str) -> CharSet | None:
    """The set of `\\p{name}`: a general category or a script that we know; None for any other."""
    if name == "Any":
        return ANY
    if name in SCRIPTS:
        return charset(SCRIPTS[name])
    return _categories().get(name)


@lru_cache(maxsize=1)
def _categories() -> dict[str, CharSet]:
    """Without `C`, `Cn` and `Cs`, on whose members engines disagree."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for code in range(LAST + 1):
        name = unicodedata.category(chr(code))
        ranges = found[name]
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    for major in "LMNPSZ":
        found[major] = [pair for name in list(found) if name[0] == major and len(name) == 2 for pair in found[name]]
    return {name: charset(ranges) for name, ranges in found.items() if name not in ("Cn", "Cs")}
