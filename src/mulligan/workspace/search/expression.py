"""The tree of a regular expression: what is left when every way of writing it is gone."""

from __future__ import annotations

from typing import TypeAlias

from mulligan.values.plain import plain
from mulligan.workspace.search.charset import CharSet


@plain(slots=True, frozen=True)
class Chars:
    """One code point out of a set."""

    members: CharSet

    @property
    def is_single(self) -> bool:
        return len(self.members) == 1 and self.members[0][0] == self.members[0][1]


@plain(slots=True, frozen=True)
class Anchor:
    """A place between two characters: `start` or `end` of the line, `word` boundary, `not_word` boundary."""

    kind: str


@plain(slots=True, frozen=True)
class Seq:
    items: tuple[Node, ...]


@plain(slots=True, frozen=True)
class Alt:
    branches: tuple[Node, ...]


@plain(slots=True, frozen=True)
class Repeat:
    item: Node
    low: int
    high: int | None


Node: TypeAlias = "Chars | Anchor | Seq | Alt | Repeat"

EMPTY = Seq(())


def cost_of(node: Node) -> int:
    """About how many states an engine needs."""
    if isinstance(node, Chars):
        return sum(1 if high < 0x80 else 4 for _, high in node.members)
    if isinstance(node, Repeat):
        return cost_of(node.item) * max(1, node.low, node.high or 0) + 1
    return 1 + sum(map(cost_of, parts(node)))


def steps_of(node: Node) -> int:
    """About how many places of the pattern a search can be in at once."""
    if isinstance(node, Chars | Anchor):
        return 1
    if isinstance(node, Repeat):
        return steps_of(node.item) * max(1, node.low, node.high or 0)
    return sum(map(steps_of, parts(node)))


def is_found_inside(node: Node) -> bool:
    """Whether it is found where only `not_word` holds, and no character is left to match."""
    if isinstance(node, Chars | Anchor):
        return isinstance(node, Anchor) and node.kind == "not_word"
    if isinstance(node, Repeat):
        return node.low == 0 or is_found_inside(node.item)
    return (any if isinstance(node, Alt) else all)(map(is_found_inside, parts(node)))


def parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Alt):
        return node.branches
    return (node.item,) if isinstance(node, Repeat) else ()
