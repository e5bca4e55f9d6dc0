"""The one regular-expression language of grep: what RE2 and Rust's regex both accept and both read the same way.

A pattern is parsed here and never shown to an engine as it was written: engines get a spelling (`spelling.py`) of the
tree made here, in which every class is a plain set of code points. What only one of the two accepts, or what they
read differently, is refused with `invalid_regex`, whichever engine would have run. Rules:

 * Each line is searched by itself, without its `\\n` or `\\r\\n` and without a byte order mark: `^` and `\\A` are its
   beginning, `$` and `\\z` its end. A newline in a pattern is refused; the flags `m`, `s` and `U` change nothing.
 * `\\w \\d \\s \\b` are about ASCII, as in RE2. `i` folds case by Unicode's simple folding.
 * `\\r` is matched where it is written as a single character, never by `.`, a range or a named or negated class.
 * Bytes that are not UTF-8 are matched by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from mulligan.values.refusal import Refused
from mulligan.workspace.search.charset import (
    ANY,
    DIGIT,
    LAST,
    POSIX,
    SPACE,
    WORD,
    CharSet,
    charset,
    fold,
    minus,
    negate,
    single,
    unicode_property,
    union,
)

REPEAT_MAX = 1000
"""RE2's bound, on each count and on the product of nested ones."""
DEPTH_MAX = 100
COST_MAX = 60_000
PATTERN_MAX_CHARACTERS = 10_000


@dataclass(slots=True, frozen=True)
class Chars:
    """One code point out of a set."""

    members: CharSet


@dataclass(slots=True, frozen=True)
class Anchor:
    """A place between two characters: `start` or `end` of the line, `word` boundary, `not_word` boundary."""

    kind: str


@dataclass(slots=True, frozen=True)
class Seq:
    items: tuple[Node, ...]


@dataclass(slots=True, frozen=True)
class Alt:
    branches: tuple[Node, ...]


@dataclass(slots=True, frozen=True)
class Repeat:
    item: Node
    low: int
    high: int | None


Node: TypeAlias = "Chars | Anchor | Seq | Alt | Repeat"

EMPTY = Seq(())

_NEWLINE = single("\n")
_LINE_ENDS = single("\n", "\r")
_CLASS_ESCAPES = {"d": DIGIT, "w": WORD, "s": SPACE}
_CONTROL_ESCAPES = {"a": "\a", "f": "\f", "t": "\t", "r": "\r", "v": "\v", "n": "\n"}
_ANCHOR_ESCAPES = {"A": "start", "z": "end", "b": "word", "B": "not_word"}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_FLAGS = frozenset("imsU")
_SET_OPERATORS = ("&&", "--", "~~")
_REASONS = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?P=": "a back-reference",
    "(?>": "an atomic group",
    "(?#": "a comment",
    "(?(": "a conditional",
}


def parse(pattern: str, *, case_insensitive: bool = False) -> Node:
    """The tree of a pattern. Raises Refused `invalid_regex` for anything outside the language."""
    if len(pattern) > PATTERN_MAX_CHARACTERS:
        _refuse(f"it has more than {PATTERN_MAX_CHARACTERS} characters")
    tree = _Parser(pattern, case_insensitive).whole()
    if cost_of(tree) > COST_MAX:
        _refuse("it is too large")
    return tree


def cost_of(node: Node) -> int:
    """About how many states an engine needs."""
    if isinstance(node, Chars):
        return sum(1 if high < 0x80 else 4 for _, high in node.members)
    if isinstance(node, Repeat):
        return cost_of(node.item) * max(1, node.high if node.high is not None else node.low) + 1
    if isinstance(node, Anchor):
        return 1
    return 1 + sum(map(cost_of, node.items if isinstance(node, Seq) else node.branches))


def _refuse(why: str) -> NoReturn:
    raise Refused("invalid_regex", "invalid_regex", f"This pattern is not searched for: {why}.")


class _Parser:
    def __init__(self, text: str, folding: bool) -> None:
        self.text = text
        self.at = 0
        self.folding = folding
        self.names: set[str] = set()

    def whole(self) -> Node:
        node = self.alternation(depth=0, budget=REPEAT_MAX)
        if self.at < len(self.text):
            _refuse(f"')' at character {self.at + 1} closes nothing")
        return node

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) if found else 0
        return found

    def next(self, inside: str) -> str:
        if self.at >= len(self.text):
            _refuse(f"it ends inside {inside}")
        self.at += 1
        return self.text[self.at - 1]

    def alternation(self, depth: int, budget: int) -> Node:
        """Up to the `)` or the end. `budget` is what is left of the product of nested counts; it is checked later."""
        if depth > DEPTH_MAX:
            _refuse(f"its groups are nested more than {DEPTH_MAX} deep")
        branches = [self.sequence(depth, budget)]
        while self.take("|"):
            branches.append(self.sequence(depth, budget))
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def sequence(self, depth: int, budget: int) -> Node:
        items: list[Node] = []
        while self.at < len(self.text) and not self.peek("|") and not self.peek(")"):
            atom = self.atom(depth, budget)
            if atom is not None:
                items.append(self.repeated(atom))
        return items[0] if len(items) == 1 else Seq(tuple(items))
