"""The regular-expression language of grep: what RE2 and Rust's regex both accept and both read in the same way.

An engine never gets a pattern as the caller wrote it. Mulligan parses the pattern into a tree, in which every class is
a set of code points, and writes the tree again for each engine. What only one engine accepts, or what they read
differently, is refused with `invalid_regex`, whichever engine would run. Rules:

 * Each line is searched by itself, without its `\\n` or `\\r\\n` and without a byte order mark: `^` and `\\A` are its
   beginning, `$` and `\\z` its end. A newline in a pattern is refused; the flags `m`, `s` and `U` change nothing.
 * `\\w \\d \\s \\b` are about ASCII, as in RE2. `i` folds case by Unicode's simple folding.
 * `\\r` is matched where it is written as a single character, never by `.`, a range or a named or negated class.
 * Bytes that are not UTF-8 are matched by nothing.

A set is a tuple of sorted, disjoint ranges, without surrogates, because no file in UTF-8 contains one. Engines disagree
on the members of `\\w` and `\\p{Lu}` and on "the same letter in the other case", by design or because their Unicode
versions differ. So Mulligan decides this once, here.

The two spellings of a tree match the same lines at the same places. The end of a line takes an optional `\\r` with it.
Ripgrep reads files from their first byte, so its beginning of a line takes an optional byte order mark; the caller must
check lines with one again. Greediness is left out, because it cannot change whether a line matches.

The table below has the ranges of the scripts that `\\p{Name}` may name, from version 15 of the Unicode Character
Database: only scripts that people search for in source trees. Python has no such table, and those of the engines
differ.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NoReturn, TypeAlias

from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass

_TABLE = """
Arabic 600-604 606-60b 60d-61a 61c-61e 620-63f 641-64a 656-66f 671-6dc 6de-6ff 750-77f 870-88e 890-891 898-8e1
    8e3-8ff fb50-fbc2 fbd3-fd3d fd40-fd8f fd92-fdc7 fdcf fdf0-fdff fe70-fe74 fe76-fefc 10e60-10e7e 10efd-10eff
    1ee00-1ee03 1ee05-1ee1f 1ee21-1ee22 1ee24 1ee27 1ee29-1ee32 1ee34-1ee37 1ee39 1ee3b 1ee42 1ee47 1ee49 1ee4b
    1ee4d-1ee4f 1ee51-1ee52 1ee54 1ee57 1ee59 1ee5b 1ee5d 1ee5f 1ee61-1ee62 1ee64 1ee67-1ee6a 1ee6c-1ee72
    1ee74-1ee77 1ee79-1ee7c 1ee7e 1ee80-1ee89 1ee8b-1ee9b 1eea1-1eea3 1eea5-1eea9 1eeab-1eebb 1eef0-1eef1
Armenian 531-556 559-58a 58d-58f fb13-fb17
Bengali 980-983 985-98c 98f-990 993-9a8 9aa-9b0 9b2 9b6-9b9 9bc-9c4 9c7-9c8 9cb-9ce 9d7 9dc-9dd 9df-9e3 9e6-9fe
Cyrillic 400-484 487-52f 1c80-1c88 1d2b 1d78 2de0-2dff a640-a69f fe2e-fe2f 1e030-1e06d 1e08f
Devanagari 900-950 955-963 966-97f a8e0-a8ff 11b00-11b09
Ethiopic 1200-1248 124a-124d 1250-1256 1258 125a-125d 1260-1288 128a-128d 1290-12b0 12b2-12b5 12b8-12be 12c0
    12c2-12c5 12c8-12d6 12d8-1310 1312-1315 1318-135a 135d-137c 1380-1399 2d80-2d96 2da0-2da6 2da8-2dae 2db0-2db6
    2db8-2dbe 2dc0-2dc6 2dc8-2dce 2dd0-2dd6 2dd8-2dde ab01-ab06 ab09-ab0e ab11-ab16 ab20-ab26 ab28-ab2e 1e7e0-1e7e6
    1e7e8-1e7eb 1e7ed-1e7ee 1e7f0-1e7fe
Georgian 10a0-10c5 10c7 10cd 10d0-10fa 10fc-10ff 1c90-1cba 1cbd-1cbf 2d00-2d25 2d27 2d2d
Greek 370-373 375-377 37a-37d 37f 384 386 388-38a 38c 38e-3a1 3a3-3e1 3f0-3ff 1d26-1d2a 1d5d-1d61 1d66-1d6a 1dbf
    1f00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fc4 1fc6-1fd3
    1fd6-1fdb 1fdd-1fef 1ff2-1ff4 1ff6-1ffe 2126 ab65 10140-1018e 101a0 1d200-1d245
Gujarati a81-a83 a85-a8d a8f-a91 a93-aa8 aaa-ab0 ab2-ab3 ab5-ab9 abc-ac5 ac7-ac9 acb-acd ad0 ae0-ae3 ae6-af1
    af9-aff
Gurmukhi a01-a03 a05-a0a a0f-a10 a13-a28 a2a-a30 a32-a33 a35-a36 a38-a39 a3c a3e-a42 a47-a48 a4b-a4d a51 a59-a5c
    a5e a66-a76
Han 2e80-2e99 2e9b-2ef3 2f00-2fd5 3005 3007 3021-3029 3038-303b 3400-4dbf 4e00-9fff f900-fa6d fa70-fad9
    16fe2-16fe3 16ff0-16ff1 20000-2a6df 2a700-2b739 2b740-2b81d 2b820-2cea1 2ceb0-2ebe0 2ebf0-2ee5d 2f800-2fa1d
    30000-3134a 31350-323af
Hangul 1100-11ff 302e-302f 3131-318e 3200-321e 3260-327e a960-a97c ac00-d7a3 d7b0-d7c6 d7cb-d7fb ffa0-ffbe
    ffc2-ffc7 ffca-ffcf ffd2-ffd7 ffda-ffdc
Hebrew 591-5c7 5d0-5ea 5ef-5f4 fb1d-fb36 fb38-fb3c fb3e fb40-fb41 fb43-fb44 fb46-fb4f
Hiragana 3041-3096 309d-309f 1b001-1b11f 1b132 1b150-1b152 1f200
Kannada c80-c8c c8e-c90 c92-ca8 caa-cb3 cb5-cb9 cbc-cc4 cc6-cc8 cca-ccd cd5-cd6 cdd-cde ce0-ce3 ce6-cef cf1-cf3
Katakana 30a1-30fa 30fd-30ff 31f0-31ff 32d0-32fe 3300-3357 ff66-ff6f ff71-ff9d 1aff0-1aff3 1aff5-1affb
    1affd-1affe 1b000 1b120-1b122 1b155 1b164-1b167
Khmer 1780-17dd 17e0-17e9 17f0-17f9 19e0-19ff
Lao e81-e82 e84 e86-e8a e8c-ea3 ea5 ea7-ebd ec0-ec4 ec6 ec8-ece ed0-ed9 edc-edf
Latin 41-5a 61-7a aa ba c0-d6 d8-f6 f8-2b8 2e0-2e4 1d00-1d25 1d2c-1d5c 1d62-1d65 1d6b-1d77 1d79-1dbe 1e00-1eff
    2071 207f 2090-209c 212a-212b 2132 214e 2160-2188 2c60-2c7f a722-a787 a78b-a7ca a7d0-a7d1 a7d3 a7d5-a7d9
    a7f2-a7ff ab30-ab5a ab5c-ab64 ab66-ab69 fb00-fb06 ff21-ff3a ff41-ff5a 10780-10785 10787-107b0 107b2-107ba
    1df00-1df1e 1df25-1df2a
Malayalam d00-d0c d0e-d10 d12-d44 d46-d48 d4a-d4f d54-d63 d66-d7f
Mongolian 1800-1801 1804 1806-1819 1820-1878 1880-18aa 11660-1166c
Myanmar 1000-109f a9e0-a9fe aa60-aa7f
Sinhala d81-d83 d85-d96 d9a-db1 db3-dbb dbd dc0-dc6 dca dcf-dd4 dd6 dd8-ddf de6-def df2-df4 111e1-111f4
Tamil b82-b83 b85-b8a b8e-b90 b92-b95 b99-b9a b9c b9e-b9f ba3-ba4 ba8-baa bae-bb9 bbe-bc2 bc6-bc8 bca-bcd bd0
    bd7 be6-bfa 11fc0-11ff1 11fff
Telugu c00-c0c c0e-c10 c12-c28 c2a-c39 c3c-c44 c46-c48 c4a-c4d c55-c56 c58-c5a c5d c60-c63 c66-c6f c77-c7f
Thai e01-e3a e40-e5b
Tibetan f00-f47 f49-f6c f71-f97 f99-fbc fbe-fcc fce-fd4 fd9-fda
"""


def _parse(line: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    name, *ranges = line.split()
    ends = [one.split("-") for one in ranges]
    return name, tuple((int(pair[0], 16), int(pair[-1], 16)) for pair in ends)


SCRIPTS = dict(_parse(line) for line in _TABLE.replace("\n    ", " ").strip().splitlines())


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
    """The set with every letter's other cases, by Unicode simple case folding (for `k`: `K` and the Kelvin sign)."""
    orbits = _ascii_orbits() if not members or members[-1][1] < 0x80 else _orbits()
    extra = [(other, other) for code, orbit in orbits.items() if contains(members, code) for other in orbit]
    return charset([*members, *extra]) if extra else members


@lru_cache(maxsize=1)
def _ascii_orbits() -> dict[int, tuple[int, ...]]:
    """The cases of ASCII letters alone, because computing those of all Unicode is slow."""
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
    """The general categories, without `C`, `Cn` and `Cs`, on whose members engines disagree."""
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


@fast_dataclass(slots=True, frozen=True)
class Chars:
    """One code point out of a set."""

    members: CharSet

    @property
    def is_single(self) -> bool:
        return len(self.members) == 1 and self.members[0][0] == self.members[0][1]


@fast_dataclass(slots=True, frozen=True)
class LineAnchor:
    """A position between two characters: `start` or `end` of the line, a `word` boundary, or `not_word`."""

    kind: str


@fast_dataclass(slots=True, frozen=True)
class Seq:
    items: tuple[Node, ...]


@fast_dataclass(slots=True, frozen=True)
class Alt:
    branches: tuple[Node, ...]


@fast_dataclass(slots=True, frozen=True)
class Repeat:
    item: Node
    low: int
    high: int | None


Node: TypeAlias = "Chars | LineAnchor | Seq | Alt | Repeat"

EMPTY = Seq(())


def cost_of(node: Node) -> int:
    """About how many states an engine needs."""
    if isinstance(node, Chars):
        return sum(1 if high < 0x80 else 4 for _, high in node.members)
    if isinstance(node, Repeat):
        return cost_of(node.item) * max(1, node.low, node.high or 0) + 1
    return 1 + sum(map(cost_of, parts(node)))


def steps_of(node: Node) -> int:
    """About how many positions of the pattern a search can be in at once."""
    if isinstance(node, Chars | LineAnchor):
        return 1
    if isinstance(node, Repeat):
        return steps_of(node.item) * max(1, node.low, node.high or 0)
    return sum(map(steps_of, parts(node)))


def parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Alt):
        return node.branches
    return (node.item,) if isinstance(node, Repeat) else ()


_RE2_ANCHORS = {"start": r"(?m:^)", "end": r"(?:\r?(?m:$))", "word": r"\b", "not_word": r"\B"}
_RUST_ANCHORS = _RE2_ANCHORS | {"start": r"(?:(?m:^)\x{feff}?)", "word": r"(?-u:\b)", "not_word": r"(?-u:\B)"}


def for_re2(tree: Node) -> str:
    """The pattern for RE2 in its default UTF-8 mode."""
    return _spell(tree, _RE2_ANCHORS)


def for_rust(tree: Node) -> str:
    """The pattern for ripgrep's default engine. It also matches some lines that begin with U+FEFF and should not."""
    return _spell(tree, _RUST_ANCHORS)


def required_literal(tree: Node) -> bytes:
    """A text that every matching line contains, as long as possible; empty if none is certain."""
    return max(_literal_runs(tree), key=len, default="").encode()


def _literal_runs(node: Node) -> list[str]:
    if isinstance(node, Repeat):
        return _literal_runs(node.item) if node.low else []
    items = node.items if isinstance(node, Seq) else (node,)
    runs = [""]
    for item in items:
        if isinstance(item, Chars) and item.is_single:
            runs[-1] += chr(item.members[0][0])
        else:
            runs += [*(_literal_runs(item) if isinstance(item, Seq | Repeat) else []), ""]
    return runs


def _spell(node: Node, anchors: dict[str, str]) -> str:
    if isinstance(node, Chars):
        return _spell_chars(node)
    if isinstance(node, LineAnchor):
        return anchors[node.kind]
    if isinstance(node, Seq):
        items = _starts_first(node.items)
        return "".join(_grouped(item, anchors) if isinstance(item, Alt) else _spell(item, anchors) for item in items)
    if isinstance(node, Alt):
        return "|".join(_spell(branch, anchors) for branch in node.branches)
    item = _spell(node.item, anchors) if isinstance(node.item, Chars) else _grouped(node.item, anchors)
    return item + _spell_bounds(node)


def _starts_first(items: tuple[Node, ...]) -> Iterator[Node]:
    """Adjacent anchors in an order that works: `start` first, because ripgrep's may skip a byte order mark."""
    for _, run in groupby(items, key=lambda item: isinstance(item, LineAnchor)):
        yield from sorted(run, key=lambda item: isinstance(item, LineAnchor) and item.kind != "start")


def _grouped(node: Node, anchors: dict[str, str]) -> str:
    return f"(?:{_spell(node, anchors)})"


def _spell_chars(node: Chars) -> str:
    if node.is_single:
        return _spell_character(node.members[0][0])
    if not node.members:
        return f"[^{_spell_character(0)}-{_spell_character(0x10FFFF)}]"
    ranges = [(_spell_character(low), _spell_character(high)) for low, high in node.members]
    return "[" + "".join(low if low == high else f"{low}-{high}" for low, high in ranges) + "]"


def _spell_character(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _spell_bounds(node: Repeat) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    if short:
        return short
    if node.high is None:
        return f"{{{node.low},}}"
    return f"{{{node.low}}}" if node.low == node.high else f"{{{node.low},{node.high}}}"


# RE2's bound, on each count and on the product of nested ones.
REPEAT_MAX = 1000
DEPTH_MAX = 100
COST_MAX = 60_000
PATTERN_MAX_CHARACTERS = 10_000
# This fits into one argument of a command.
SPELLING_MAX_CHARACTERS = 100_000


_NEWLINE = single("\n")
_LINE_ENDS = single("\n", "\r")
_CLASS_ESCAPES = {"d": DIGIT, "w": WORD, "s": SPACE}
_CONTROL_ESCAPES = {"a": "\a", "f": "\f", "t": "\t", "r": "\r", "v": "\v", "n": "\n"}
_ANCHOR_ESCAPES = {"A": "start", "z": "end", "b": "word", "B": "not_word"}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_FLAGS = frozenset("imsU")
_SET_OPERATORS = ("&&", "--", "~~")
_CLASS_STARTS = tuple(f"\\{letter}" for letter in "dwspDWSP")
_FOREIGN_GROUPS = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?P=": "a back-reference",
    "(?P>": "a recursion",
    "(?>": "an atomic group",
    "(?#": "a comment",
    "(?(": "a conditional",
}


def parse(pattern: str, *, case_insensitive: bool = False) -> Node:
    """The tree of a pattern. Raises Refused `invalid_regex` for anything outside the language."""
    if len(pattern) > PATTERN_MAX_CHARACTERS:
        _refuse(f"it has more than {PATTERN_MAX_CHARACTERS} characters")
    tree = _Parser(pattern, case_insensitive).whole()
    _check_repeats(tree, REPEAT_MAX)
    if cost_of(tree) > COST_MAX or len(for_rust(tree)) > SPELLING_MAX_CHARACTERS:
        _refuse("it is too large")
    return tree


def _check_repeats(node: Node, budget: int) -> None:
    """Refuse what RE2 refuses: it divides its bound by each count around a repetition."""
    if isinstance(node, Repeat) and (node.low, node.high) not in ((0, None), (1, None), (0, 1)):
        budget //= max(1, node.low, node.high or 0)
        if not budget:
            _refuse(f"its counts come to more than {REPEAT_MAX} repetitions")
    for part in parts(node):
        _check_repeats(part, budget)


def _refuse(why: str) -> NoReturn:
    raise Refused("invalid_regex", "invalid_regex", f"This pattern is not searched for: {why}.")


def _implied(members: CharSet) -> CharSet:
    """The set of a class whose members the pattern does not list. It has no line ends."""
    return minus(members, _LINE_ENDS)


class _Parser:
    """A recursive-descent parser. Each method reads from the first character of its part to the last."""

    def __init__(self, text: str, folding: bool) -> None:
        self.text = text
        self.at = 0
        self.folding = folding
        self.names: set[str] = set()

    def whole(self) -> Node:
        node = self.alternation(depth=0)
        if self.at < len(self.text):
            _refuse(f"')' at character {self.at + 1} closes nothing")
        return node

    def peek(self, *texts: str) -> bool:
        return self.text.startswith(texts, self.at)

    def take(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def next(self, inside: str) -> str:
        if self.at >= len(self.text):
            _refuse(f"it ends inside {inside}")
        self.at += 1
        return self.text[self.at - 1]

    def until(self, end: str, inside: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            _refuse(f"it ends inside {inside}")
        body = self.text[self.at : stop]
        self.at = stop + len(end)
        return body

    def alternation(self, depth: int) -> Node:
        if depth > DEPTH_MAX:
            _refuse(f"its groups are nested more than {DEPTH_MAX} deep")
        branches = [self.sequence(depth)]
        while self.take("|"):
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.at < len(self.text) and not self.peek("|", ")"):
            atom = self.atom(depth)
            if atom is not None:
                items.append(self.repeated(atom))
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def atom(self, depth: int) -> Node | None:
        """One item that can be repeated; None for a group that only sets flags."""
        character = self.next("an expression")
        if character == "(":
            return self.group(depth)
        if character == "[":
            return Chars(self.bracket())
        if character == "\\":
            return self.escape()
        if character == ".":
            return Chars(_implied(ANY))
        if character in "^$":
            return LineAnchor("start" if character == "^" else "end")
        if character in "*+?{":
            hint = "; a brace that is meant literally is written '\\{'" if character == "{" else ""
            _refuse(f"there is nothing for '{character}' at character {self.at} to repeat{hint}")
        return self.literal(character)

    def literal(self, character: str) -> Chars:
        if character == "\n":
            _refuse("it holds a newline, and lines are searched one by one")
        if 0xD800 <= ord(character) <= 0xDFFF:
            _refuse("it holds half of a surrogate pair")
        return Chars(self.folded(single(character)))

    def folded(self, members: CharSet) -> CharSet:
        return fold(members) if self.folding else members

    def repeated(self, item: Node) -> Node:
        bounds = self.bounds()
        if bounds is None:
            return item
        self.take("?")
        if self.peek("*", "+", "?", "{"):
            _refuse(f"two repetition operators follow each other at character {self.at + 1}")
        low, high = bounds
        if isinstance(item, LineAnchor) or high == 0:
            return item if low else EMPTY
        return Repeat(item, low, high)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return bounds
        return self.counts() if self.take("{") else None

    def counts(self) -> tuple[int, int | None]:
        low, comma, high = self.until("}", "a counted repetition").partition(",")
        if not low.isascii() or not low.isdigit() or (high and not (high.isascii() and high.isdigit())):
            _refuse("a repetition is written {2}, {2,} or {2,5}; a brace that is meant literally is written '\\{'")
        first, last = int(low[:9]), int(high[:9]) if high else None
        if first > REPEAT_MAX or (last or 0) > REPEAT_MAX:
            _refuse(f"nothing is repeated more than {REPEAT_MAX} times")
        if last is not None and last < first:
            _refuse("a repetition's bounds are in the wrong order")
        return first, last if comma else first

    def group(self, depth: int) -> Node | None:
        outer = self.folding
        if self.take("?") and not self.opening():
            return None
        node = self.alternation(depth + 1)
        if not self.take(")"):
            _refuse("a group is not closed")
        self.folding = outer
        return node

    def opening(self) -> bool:
        """Read what follows `(?`. False for flags without a body; they apply until the surrounding group ends."""
        start = self.at - 2
        for prefix, what in _FOREIGN_GROUPS.items():
            if self.text.startswith(prefix, start):
                _refuse(f"{what} is not part of the language that all engines share")
        if self.take("P<") or self.take("<"):
            self.name(self.until(">", "a group's name"))
            return True
        return self.flags()

    def name(self, name: str) -> None:
        if not name.isascii() or not name.isidentifier():
            _refuse(f"{name!r} is no name for a group")
        if name in self.names:
            _refuse(f"two groups have the name {name!r}")
        self.names.add(name)

    def flags(self) -> bool:
        value, seen = True, 0
        while (flag := self.next("a group")) not in ":)":
            if flag == "-" and value:
                value, seen = False, 0
                continue
            if flag not in _FLAGS:
                _refuse(f"(?{flag}) is not part of the language that all engines share")
            self.folding = value if flag == "i" else self.folding
            seen += 1
        if not seen and (flag == ")" or not value):
            _refuse("a group of flags names none")
        return flag == ":"

    def escape(self) -> Node:
        """Read an escape outside brackets, after its backslash."""
        character = self.text[self.at : self.at + 1]
        if character not in _ANCHOR_ESCAPES or not character:
            members = self.class_escape()
            return self.literal(self.character_escape()) if members is None else Chars(members)
        self.at += 1
        if character in "bB" and self.peek("{") and not self.text[self.at + 1 : self.at + 2].isdigit():
            _refuse("\\b{ is not part of the language that all engines share")
        return LineAnchor(_ANCHOR_ESCAPES[character])

    def class_escape(self) -> CharSet | None:
        """Read a class such as `\\d` or `\\p{…}`; None if something else follows the backslash."""
        character = self.text[self.at : self.at + 1]
        if not character or character not in "dwspDWSP":
            return None
        self.at += 1
        members = self.property() if character in "pP" else _CLASS_ESCAPES[character.lower()]
        members = self.folded(members)
        return _implied(negate(members) if character.isupper() else members)

    def property(self) -> CharSet:
        name = self.next("\\p")
        if name == "{":
            name = self.until("}", "\\p{")
        members = unicode_property(name)
        if members is None:
            _refuse(f"\\p{{{name}}} is neither a general category nor a script that all engines share")
        return members

    def character_escape(self) -> str:
        character = self.next("an escape")
        if character == "x":
            return self.hexadecimal()
        if character in _CONTROL_ESCAPES:
            return _CONTROL_ESCAPES[character]
        if character.isdigit():
            _refuse("back-references and octal escapes are not part of the language that all engines share")
        if character.isalnum() or character in "<>" or not character.isascii():
            _refuse(f"\\{character} is not part of the language that all engines share")
        return character

    def hexadecimal(self) -> str:
        if self.take("{"):
            digits = self.until("}", "\\x{")
        else:
            digits = self.next("\\x") + self.next("\\x")
        if not digits or not _HEX_DIGITS.issuperset(digits) or int(digits, 16) > LAST:
            _refuse(f"\\x{{{digits}}} is no character")
        return chr(int(digits, 16))

    def bracket(self) -> CharSet:
        """Read a bracket expression, after its `[`."""
        negated = self.take("^")
        members: list[CharSet] = []
        if self.take("]"):
            if self.peek("-") and not self.peek("-]"):
                _refuse("a range that begins with ']' needs it escaped")
            members.append(single("]"))
        while not self.take("]"):
            members.append(self.bracket_item())
        chosen = self.folded(union(*members))
        if negated:
            return _implied(negate(chosen))
        if chosen == _NEWLINE:
            self.literal("\n")
        return minus(chosen, _NEWLINE)

    def bracket_item(self) -> CharSet:
        if self.peek(*_SET_OPERATORS):
            _refuse(f"'{self.text[self.at]}' twice in a row inside [ ] is an operator to some engines; escape one")
        if self.take("[:"):
            return self.posix_class()
        if self.peek(*_CLASS_STARTS):
            return self.bracket_class()
        low = self.bracket_character()
        if not self.peek("-") or self.peek("-]", "--"):
            return single(low)
        self.at += 1
        high = self.bracket_character()
        if high < low:
            _refuse(f"the range {low}-{high} is in the wrong order")
        return _implied(charset([(ord(low), ord(high))])) if high != low else single(low)

    def bracket_class(self) -> CharSet:
        self.at += 1
        members = self.class_escape()
        assert members is not None
        if self.peek("-") and not self.peek("-]"):
            _refuse("a range cannot begin with a class")
        return members

    def bracket_character(self) -> str:
        character = self.next("[ ]")
        if character == "\\":
            character = self.character_escape()
        elif character == "[":
            _refuse("'[' inside [ ] opens a set within the set to some engines; escape it")
        if 0xD800 <= ord(character) <= 0xDFFF:
            _refuse("it holds half of a surrogate pair")
        return character

    def posix_class(self) -> CharSet:
        name = self.until(":]", "[: :]")
        members = POSIX.get(name.removeprefix("^"))
        if members is None:
            _refuse(f"[:{name}:] is no class")
        members = self.folded(members)
        return _implied(negate(members) if name.startswith("^") else members)
