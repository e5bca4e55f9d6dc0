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

from typing import NoReturn

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
from mulligan.workspace.search.expression import EMPTY, Alt, Anchor, Chars, Node, Repeat, Seq, cost_of, parts
from mulligan.workspace.search.spelling import for_rust

REPEAT_MAX = 1000
"""RE2's bound, on each count and on the product of nested ones."""
DEPTH_MAX = 100
COST_MAX = 60_000
PATTERN_MAX_CHARACTERS = 10_000
SPELLING_MAX_CHARACTERS = 100_000
"""What fits into one argument of a command, with room to spare."""


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
    """RE2 divides its bound by every count on the way down."""
    if isinstance(node, Repeat) and (node.low, node.high) not in ((0, None), (1, None), (0, 1)):
        budget //= max(1, node.low, node.high or 0)
        if not budget:
            _refuse(f"its counts come to more than {REPEAT_MAX} repetitions")
    for part in parts(node):
        _check_repeats(part, budget)


def _refuse(why: str) -> NoReturn:
    raise Refused("invalid_regex", "invalid_regex", f"This pattern is not searched for: {why}.")


def _implied(members: CharSet) -> CharSet:
    """A set that the pattern names without spelling its members out."""
    return minus(members, _LINE_ENDS)


class _Parser:
    """Recursive descent; each method stands on the first character of what it reads and leaves after the last."""

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
        """One thing that can be repeated; None for a group that only sets flags."""
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
            return Anchor("start" if character == "^" else "end")
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
        if isinstance(item, Anchor) or high == 0:
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
        """What follows `(?`. False when it was a group of flags without a body, which speak on to the group's end."""
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
        """After a backslash, outside brackets."""
        character = self.text[self.at : self.at + 1]
        if character not in _ANCHOR_ESCAPES or not character:
            members = self.class_escape()
            return self.literal(self.character_escape()) if members is None else Chars(members)
        self.at += 1
        if character in "bB" and self.peek("{") and not self.text[self.at + 1 : self.at + 2].isdigit():
            _refuse("\\b{ is not part of the language that all engines share")
        return Anchor(_ANCHOR_ESCAPES[character])

    def class_escape(self) -> CharSet | None:
        """`\\d` and its kin, `\\p{…}`; None when something else follows the backslash."""
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
        """After `[`."""
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
