"""What the disk contracts stand on: a disk that holds a sketch, a person at the same files, a plan that hears all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from mulligan.testing.builders import Sketch, Tree
from mulligan.testing.faults import FaultPlan
from mulligan.testing.people import Person
from mulligan.values.digest import digest_of
from mulligan.values.entries import FileEntry
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain
from mulligan.workspace.disk import Disk
from mulligan.workspace.places import Spot

DRAFT = b".mulligan-draft"


@plain(slots=True, frozen=True)
class Scene:
    """One disk under judgement, who else is at it, and all that is on it."""

    disk: Disk
    person: Person
    plan: FaultPlan
    tree: Callable[[], Tree]

    def spot(self, path: str) -> Spot:
        return self.disk.resolve(RepoPath(path), final=False)

    def steps(self) -> list[str]:
        return [step for step, _ in self.plan.reached]


class DiskBench(ABC):
    @abstractmethod
    def scene(self, sketch: Sketch, plan: FaultPlan | None = None) -> AbstractContextManager[Scene]:
        """A fresh disk that holds the sketch and announces its steps to the plan."""


def file_entry(content: bytes, mode: int = 0o644, mtime_ns: int = 0) -> FileEntry:
    return FileEntry(digest_of(content), len(content), mode, mtime_ns)
