"""Finding the lines of a block of bytes that match: by plain text, by RE2, or by Python's `re`.

A block holds whole lines; only the last may lack its newline. The three agree on every block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from mulligan.values.limits import MIB_BYTES
from mulligan.workspace.search.expression import Chars, Node, Seq
from mulligan.workspace.search.spelling import for_python, for_re2, required_literal

_RE2_MEMORY_BYTES = 64 * MIB_BYTES
_SEEK_MIN_BYTES = 3
"""A literal shorter than this is too common to look for line by line."""


class Finder(Protocol):
    def starts(self, block: bytes) -> Iterator[int]:
        """Where the matching lines begin, in order."""
        ...


class Recipe(NamedTuple):
    """How to make a finder, in plain values that can be sent to another process."""

    kind: str
    expression: str
    literal: bytes


def recipe_for(tree: Node) -> Recipe:
    literal = required_literal(tree)
    if _is_plain(tree):
        return Recipe("literal", "", literal)
    if find_spec("re2") is not None:
        return Recipe("re2", for_re2(tree), literal)
    return Recipe("re", for_python(tree), literal)


def make_finder(recipe: Recipe) -> Finder:
    if recipe.kind == "literal":
        return LiteralFinder(recipe.literal)
    if recipe.kind == "re2":
        return Re2Finder(recipe.expression, recipe.literal)
    return PythonFinder(recipe.expression, recipe.literal)


def _is_plain(tree: Node) -> bool:
    """Whether the pattern is nothing but its characters."""
    items = tree.items if isinstance(tree, Seq) else (tree,)
    return bool(items) and all(isinstance(item, Chars) and item.is_single for item in items)


class LiteralFinder:
    def __init__(self, literal: bytes) -> None:
        self._literal = literal

    def starts(self, block: bytes) -> Iterator[int]:
        return (begin for begin, _ in _lines_with(block, self._literal))


def _lines_with(block: bytes, literal: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of every line that holds the literal."""
    at = 0
    while (hit := block.find(literal, at)) >= 0:
        end = block.find(b"\n", hit)
        end = len(block) if end < 0 else end
        yield block.rfind(b"\n", 0, hit) + 1, end
        at = end + 1


class Re2Finder:
    def __init__(self, expression: str, literal: bytes) -> None:
        import re2  # optional, and slow to load

        options = re2.Options()
        options.log_errors = False
        options.never_capture = True
        options.max_mem = _RE2_MEMORY_BYTES
        self._search = re2.compile(expression, options).search
        self._literal = literal

    def starts(self, block: bytes) -> Iterator[int]:
        if len(self._literal) >= _SEEK_MIN_BYTES:
            return self._near_literal(block)
        return self._anywhere(block) if self._literal in block else iter(())

    def _near_literal(self, block: bytes) -> Iterator[int]:
        search = self._search
        return (begin for begin, end in _lines_with(block, self._literal) if search(block, begin, end) is not None)

    def _anywhere(self, block: bytes) -> Iterator[int]:
        at, size = 0, len(block)
        while at < size and (hit := self._search(block, at)) is not None:
            start = hit.start()
            if start == size and block.endswith(b"\n"):
                return  # after the last newline there is no line
            yield block.rfind(b"\n", 0, start) + 1
            end = block.find(b"\n", start)
            at = size if end < 0 else end + 1


class PythonFinder:
    """On decoded text, in which a byte that is not UTF-8 is a surrogate that no set of ours holds."""

    def __init__(self, expression: str, literal: bytes) -> None:
        self._search = re.compile(expression, re.ASCII | re.MULTILINE).search
        self._literal = literal

    def starts(self, block: bytes) -> Iterator[int]:
        if self._literal not in block:
            return
        text = block.decode("utf-8", "surrogateescape")
        at = offset = 0
        while at < len(text):
            hit = self._search(text, at)
            if hit is None or (hit.start() == len(text) and text.endswith("\n")):
                return
            begin = text.rfind("\n", 0, hit.start()) + 1
            offset += len(text[at:begin].encode("utf-8", "surrogateescape"))
            yield offset
            end = text.find("\n", hit.start())
            at_next = len(text) if end < 0 else end + 1
            offset += len(text[begin:at_next].encode("utf-8", "surrogateescape"))
            at = at_next
