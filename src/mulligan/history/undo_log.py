"""The changes of an open call in order, each with its block.

A block is a part of a call that can be rolled back alone. Blocks are nested, and two may be open side by side, in two
tasks or threads: a change belongs to the innermost block of the thread or task that makes it.

An intent is what an effect will do to one path; an `IntentStep` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

from mulligan.files.disk import Image
from mulligan.files.replace import TargetEntry
from mulligan.history.tables import TouchRow
from mulligan.store.blobs import Prepared
from mulligan.values import scoped_var
from mulligan.values.entries import ABSENT, Absent, DirEntry, Entry, FileEntry, same_content
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath


@dataclass(slots=True, weakref_slot=True, eq=False)
class Block:
    _outer: Block | None = None
    _entered: scoped_var.ScopedBlock[Block] | None = None
    exit_held: scoped_var.Holder | None = None

    def __enter__(self) -> None:
        held = self.exit_held
        self._outer = _blocks.now()
        self._entered = _blocks.block(self)
        self._entered.enter(held if held is not None and held() is not None else None)

    def enter(self, holder: scoped_var.Holder | None) -> None:
        """Enter the block without `with`; see `scoped_var.ScopedBlock.enter`."""
        self._outer = _blocks.now()
        self._entered = _blocks.block(self)
        self._entered.enter(holder)

    def end(self) -> None:
        """End the block: later changes do not belong to it. It can be called again."""
        if self._entered is not None:
            self._entered.end()

    def again(self) -> scoped_var.ScopedBlock[Block]:
        """Enter the block in another thread, so that the thread's changes belong to it too."""
        return _blocks.block(self)

    @property
    def is_around(self) -> bool:
        return self.holds(_blocks.now())

    def holds(self, block: Block | None) -> bool:
        while block is not None and block is not self:
            block = block._outer
        return block is self


_blocks: scoped_var.ScopedVar[Block] = scoped_var.ScopedVar("mulligan_block")
_VOID = Block()
"""The block of changes whose rollback failed; every later rollback tries them again."""


@dataclass(slots=True)
class Touched:
    """A path that this call has changed: its entry before the call, and the last one that the call knows.

    `unsure`: a change is under way, or it failed and may be there in part. `seen`: an image of `after` as it was read
    there, without its bytes. `bare`: the store does not have the bytes of `after`.
    """

    row: TouchRow
    path: RepoPath
    before: Entry
    after: Entry
    acted: bool = False
    unsure: bool = False
    origin: RepoPath | None = None
    seen: Image | None = None
    bare: bool = False

    def take_seen(self) -> Image | None:
        """The image, once, and only if it is of `after`: a second rollback of the path reads the disk again."""
        seen, self.seen = self.seen, None
        return seen if seen is not None and seen.entry is self.after and not self.unsure else None

    def noted_in(self, row: TouchRow) -> Touched:
        """A copy with another row of the store."""
        return Touched(row, self.path, self.before, self.after, self.acted, self.unsure, self.origin, bare=self.bare)

    def becomes(self, after: Entry, *, bare: bool = False) -> None:
        """Set what the path holds now, for sure."""
        self.after, self.unsure = after, False
        # The store needs no bytes of a folder or a link, nor of what it has as the preimage already.
        has_bytes = isinstance(after, FileEntry) and after.withheld is None
        self.bare = bare and has_bytes and not same_content(self.before, after)
        # A path that is gone is no longer the target of a move.
        if isinstance(after, Absent):
            self.origin = None


@dataclass(slots=True)
class Deed:
    """One change of a path; `was` is what the path held before."""

    path: RepoPath
    was: Entry
    block: Block | None


@fast_dataclass(slots=True, frozen=True)
class Undoing:
    """The plan for rolling a block back: what paths shall hold again, last changed first.

    `overtaken` are paths that were changed outside the block since, which stay as they are. `rest` is the log after the
    rollback.
    """

    before: dict[RepoPath, Entry]
    overtaken: set[RepoPath]
    rest: list[Deed]


@dataclass(slots=True)
class Deeds:
    _all: list[Deed] = field(default_factory=list)

    def add(self, path: RepoPath, was: Entry) -> None:
        self._all.append(Deed(path, was, _blocks.now()))

    def drop_last(self) -> None:
        self._all.pop()

    def revise(self, path: RepoPath, revised: Callable[[Entry], Entry]) -> None:
        """Change what the log says that the path held before."""
        for deed in self._all:
            if deed.path == path:
                deed.was = revised(deed.was)

    def undoing(self, block: Block | None) -> Undoing:
        """The rollback of a block; None rolls back everything."""
        first: dict[RepoPath, Entry] = {}
        overtaken, rest = set[RepoPath](), list[Deed]()
        for deed in self._all:
            if block is None or deed.block is _VOID or block.holds(deed.block):
                # The last change shall come first.
                first[deed.path] = first.pop(deed.path, deed.was)
                continue
            if deed.path in first:
                # Without the block, the next change would have found what the block found.
                deed = replace(deed, was=first.pop(deed.path))
                overtaken.add(deed.path)
            rest.append(deed)
        return Undoing(dict(reversed(first.items())), overtaken - first.keys(), rest)

    def leave(self, undoing: Undoing, *, but: Container[RepoPath]) -> None:
        """Remove the rolled-back changes from the log, except for paths that can only be restored after others."""
        left = [Deed(path, was, _VOID) for path, was in undoing.before.items() if path in but]
        self._all = [*left, *undoing.rest]


Plan = Callable[[Image], TargetEntry]
"""A function from the present image of a path to its target. May raise Refused."""


@fast_dataclass(slots=True, frozen=True)
class Intent:
    """An effect's change of one path.

    `blind`: the plan does not depend on the present content, so it may replace any.
    """

    path: RepoPath
    plan: Plan
    blind: bool = False
    deep: bool = False
    origin: RepoPath | None = None
    lifts: bool = False
    """locked directories of ours are opened for the step, because the call that is undone could write there"""
    spares_writers: bool = False
    """a file that another process has open for writing is written in place, so that the process goes on writing into it
    """
    relinks: bool = False
    """the plan decides of which file the path becomes a name; else it stays a name of the present file"""


@dataclass(slots=True)
class IntentStep:
    """An intent with the image that it was planned on."""

    intent: Intent
    image: Image
    wanted: TargetEntry
    bodies: list[Prepared]
    in_use: bool = False
    """another process has the file open for writing, so it must stay the same inode"""

    @property
    def deep(self) -> bool:
        """Whether the step removes a directory with everything below it, so that no other call may work there."""
        leaves = isinstance(self.image.entry, DirEntry) and not isinstance(self.wanted.entry, DirEntry)
        return self.intent.deep or leaves

    def passing(self) -> tuple[Entry, ...]:
        """The entries that the path holds in between: a directory and a file cannot be exchanged, so one is removed
        first.
        """
        entries = (self.image.entry, self.wanted.entry)
        changes_kind = isinstance(entries[0], DirEntry) != isinstance(entries[1], DirEntry)
        return (ABSENT, entries[1]) if changes_kind and ABSENT not in entries else entries[1:]


def as_it_is(image: Image) -> TargetEntry:
    """A plan for a path that a command will change: the present entry."""
    return TargetEntry(image.entry, image.any_content)
