"""What an effect means to do to each path: its intents, and each intent on its way to the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mulligan.store.blobs import Prepared
from mulligan.values.entries import ABSENT, DirEntry, Entry
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import Wanted

Plan = Callable[[Image], Wanted]
"""From what a path holds now to what it shall hold. May raise Refused."""


@plain(slots=True, frozen=True)
class Intent:
    """One path's part of an effect. `blind`: the plan does not depend on what is there, so it may simply insist."""

    path: RepoPath
    plan: Plan
    blind: bool = False
    deep: bool = False
    origin: RepoPath | None = None
    lifts: bool = False
    """modes of our own directories that forbid it are lifted for the step: whoever did it first was allowed to"""
    spares_writers: bool = False
    """a file that another process has open for writing is written in place, so that process goes on writing into it"""
    relinks: bool = False
    """the plan says of which file the path shall be a name; else it stays that of the file that is there"""


@dataclass(slots=True)
class Step:
    """One intent on its way to the disk."""

    intent: Intent
    image: Image
    wanted: Wanted
    bodies: list[Prepared]
    in_use: bool = False
    """another process has the file open for writing, and it shall stay that file"""

    @property
    def deep(self) -> bool:
        """A directory that goes away takes everything below it along, so nobody else may be at work there."""
        leaves = isinstance(self.image.entry, DirEntry) and not isinstance(self.wanted.entry, DirEntry)
        return self.intent.deep or leaves

    def passing(self) -> tuple[Entry, ...]:
        """What the path will hold on its way: a directory and a file cannot change places, so one goes first."""
        entries = (self.image.entry, self.wanted.entry)
        changes_kind = isinstance(entries[0], DirEntry) != isinstance(entries[1], DirEntry)
        return (ABSENT, entries[1]) if changes_kind and ABSENT not in entries else entries[1:]


def as_it_is(image: Image) -> Wanted:
    """No plan of ours: somebody else decides what becomes of the path."""
    return Wanted(image.entry, image.any_content)
