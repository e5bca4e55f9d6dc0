"""Lines of a text that match a pattern, with the place in the line where the match begins.

In time linear in the text: by RE2, or where that is not installed by walking all ways through the pattern at once. Both
find the same lines, and the leftmost beginning, which does not depend on how greedy anybody is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mulligan.values.plain import plain
from mulligan.workspace.search.charset import single
from mulligan.workspace.search.dialect import parse
from mulligan.workspace.search.expression import Alt, Anchor, Chars, Node, Repeat, Seq
from mulligan.workspace.search.finders import make_finder, recipe_for
from mulligan.workspace.search.findings import shown_text, without_bom
from mulligan.workspace.search.spelling import for_re2

_END = Anchor("end")
_RETURN = Chars(single("\r"))
"""It belongs to the end of a line, if it is there, as it does for the other engines."""


@plain(slots=True, frozen=True)
class Match:
    """`line` and `col` count from 1, `col` in code points of the line without a byte order mark."""

    line: int
    col: int
    text: str


class Matcher:
    """A parsed pattern. Raises Refused `invalid_regex` for what RE2 and Rust's regex would not both take."""

    def __init__(self, pattern: str, *, case_insensitive: bool) -> None:
        tree = parse(pattern, case_insensitive=case_insensitive)
        recipe = recipe_for(tree)
        self._literal = recipe.literal
        self._first: Callable[[str], int | None] = _Program(tree).first
        self._starts: Callable[[bytes], Iterator[int]] = self._walked
        if recipe.kind != "re":
            self._starts = make_finder(recipe).starts
            self._first = _re2_first(tree)

    def matches(self, data: bytes) -> Iterator[Match]:
        """One for each matching line of a file's bytes, in order."""
        data = without_bom(data)
        line_no, counted = 1, 0
        for begin in self._starts(data):
            line_no += data.count(b"\n", counted, begin)
            counted = begin
            end = data.find(b"\n", begin)
            line = data[begin : len(data) if end < 0 else end]
            first = self._first(line.decode("utf-8", "surrogateescape"))
            if first is not None:
                yield Match(line_no, first + 1, shown_text(line)[0].decode("utf-8", "replace"))

    def _walked(self, data: bytes) -> Iterator[int]:
        """Every line that could match."""
        if self._literal not in data:
            return
        begin = 0
        while begin < len(data):
            end = data.find(b"\n", begin)
            end = len(data) if end < 0 else end
            if self._literal in data[begin:end]:
                yield begin
            begin = end + 1


def _re2_first(tree: Node) -> Callable[[str], int | None]:
    try:
        import re2  # optional, and slow to load
    except ModuleNotFoundError:
        return _Program(tree).first
    options = re2.Options()
    options.log_errors = False
    search = re2.compile(for_re2(tree), options).search

    def first(line: str) -> int | None:
        raw = line.encode("utf-8", "surrogateescape")
        hit = search(raw)
        return None if hit is None else len(raw[: hit.start()].decode("utf-8", "surrogateescape"))

    return first


@dataclass(slots=True)
class _Program:
    """A pattern as states: each takes a character of a set, asks about a place, or leads on to others."""

    tree: Node
    takes: list[Chars | Anchor | None] = field(default_factory=list)
    leads: list[list[int]] = field(default_factory=list)
    start: int = 0

    def __post_init__(self) -> None:
        accept = self._state(None)
        self.start = self._add(self.tree, accept)

    def _state(self, takes: Chars | Anchor | None, *leads: int) -> int:
        self.takes.append(takes)
        self.leads.append(list(leads))
        return len(self.takes) - 1

    def _add(self, node: Node, after: int) -> int:
        """The state from which the node leads to `after`."""
        if isinstance(node, Seq):
            for item in reversed(node.items):
                after = self._add(item, after)
            return after
        if isinstance(node, Alt):
            return self._state(None, *(self._add(branch, after) for branch in node.branches))
        if isinstance(node, Repeat):
            return self._add_repeat(node, after)
        place = self._state(node, after)
        return self._state(None, self._state(_RETURN, place), place) if node == _END else place

    def _add_repeat(self, node: Repeat, after: int) -> int:
        if node.high is None:
            loop = self._state(None, after)
            self.leads[loop].insert(0, self._add(node.item, loop))
            after = loop
        for _ in range(0 if node.high is None else node.high - node.low):
            after = self._state(None, self._add(node.item, after), after)
        for _ in range(node.low):
            after = self._add(node.item, after)
        return after

    def first(self, line: str) -> int | None:
        """Where the leftmost match begins."""
        best: int | None = None
        here: dict[int, int] = {}
        for at in range(len(line) + 1):
            if best is None:
                self._enter(self.start, at, (line, at), here)
            found = here.get(0)
            if found is not None and (best is None or found < best):
                best = found
            here = self._step(here, line, at, best)
            if best is not None and not here:
                break
        return best

    def _step(self, here: dict[int, int], line: str, at: int, best: int | None) -> dict[int, int]:
        """The states after the character at a place; ways that began after a match that is found are given up."""
        onwards: dict[int, int] = {}
        if at == len(line):
            return onwards
        code = ord(line[at])
        for state, began in here.items():
            takes = self.takes[state]
            if isinstance(takes, Chars) and (best is None or began < best) and _holds(takes, code):
                for lead in self.leads[state]:
                    self._enter(lead, began, (line, at + 1), onwards)
        return onwards

    def _enter(self, state: int, began: int, place: tuple[str, int], here: dict[int, int]) -> None:
        pending = [state]
        while pending:
            one = pending.pop()
            if here.get(one, began + 1) <= began:
                continue
            here[one] = began
            takes = self.takes[one]
            if takes is None or (isinstance(takes, Anchor) and _is_there(takes.kind, *place)):
                pending += self.leads[one]


def _holds(chars: Chars, code: int) -> bool:
    return any(low <= code <= high for low, high in chars.members)


def _is_there(kind: str, line: str, at: int) -> bool:
    if kind == "start":
        return at == 0
    if kind == "end":
        return at == len(line)
    boundary = _is_word(line[at - 1 : at]) != _is_word(line[at : at + 1])
    return boundary if kind == "word" else not boundary


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")
