"""What an open call has done to paths, in order, and in which block of it.

A block is a part of a call that can be put back alone. Blocks lie in one another, and two may be open side by side, in
two tasks or threads: what is done is of the innermost one around whoever does it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from mulligan.values import here
from mulligan.values.entries import Entry
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain


class Block:
    __slots__ = ("__weakref__", "_entered", "_outer", "exit_held")

    def __init__(self) -> None:
        self.exit_held: here.Holder | None = None
        self._outer: Block | None = None
        self._entered = self.again()

    def __enter__(self) -> None:
        self.enter(here.holder_of(self))

    def enter(self, holder: here.Holder | None) -> None:
        """By hand; see `here.Block.enter`."""
        self._outer = _blocks.now()
        self._entered.enter(holder)

    def end(self) -> None:
        """What is done from now on is not done in it. Any number of times."""
        self._entered.end()

    def again(self) -> here.Block[Block]:
        """For a thread that was not told where it was started: what it does is done in this block too."""
        return _blocks.block(self)

    @property
    def is_around(self) -> bool:
        return self.holds(_blocks.now())

    def holds(self, block: Block | None) -> bool:
        while block is not None and block is not self:
            block = block._outer
        return block is self


_blocks: here.Here[Block] = here.Here("mulligan_block")
_VOID = Block()
"""Of what should have been put back and could not be yet: it is tried again with every other block."""


@dataclass(slots=True)
class Deed:
    """A path was about to be changed; `was` is what it held until then."""

    path: RepoPath
    was: Entry
    block: Block | None


@plain(slots=True, frozen=True)
class Undoing:
    """What is to be done for a block never to have been: what paths shall hold again, those changed last first.

    `overtaken` are paths that somebody outside the block has changed since, which stay as they are. `rest` is what has
    been done then.
    """

    before: dict[RepoPath, Entry]
    overtaken: set[RepoPath]
    rest: list[Deed]


class Deeds:
    def __init__(self) -> None:
        self._all: list[Deed] = []

    def add(self, path: RepoPath, was: Entry) -> None:
        self._all.append(Deed(path, was, _blocks.now()))

    def drop_last(self) -> None:
        self._all.pop()

    def revise(self, path: RepoPath, revised: Callable[[Entry], Entry]) -> None:
        """What the path held is to be remembered otherwise."""
        for deed in self._all:
            if deed.path == path:
                deed.was = revised(deed.was)

    def undoing(self, block: Block | None) -> Undoing:
        """With None: of everything."""
        first: dict[RepoPath, Entry] = {}
        overtaken, rest = set[RepoPath](), list[Deed]()
        for deed in self._all:
            if block is None or deed.block is _VOID or block.holds(deed.block):
                # What was changed last shall come first.
                first[deed.path] = first.pop(deed.path, deed.was)
                continue
            if deed.path in first:
                # Had the block never been, whoever came after it would have found what the block did.
                deed = replace(deed, was=first.pop(deed.path))
                overtaken.add(deed.path)
            rest.append(deed)
        return Undoing(dict(reversed(first.items())), overtaken - first.keys(), rest)

    def leave(self, undoing: Undoing, *, but: Container[RepoPath]) -> None:
        """It has been done, but for paths that can only be put back after others."""
        left = [Deed(path, was, _VOID) for path, was in undoing.before.items() if path in but]
        self._all = [*left, *undoing.rest]
