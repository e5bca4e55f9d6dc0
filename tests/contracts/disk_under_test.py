"""What the disk contracts share: a disk with given files, a person who changes them, a plan that records the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from mulligan.files.disk import Disk
from mulligan.files.resolve import ResolvedPath
from mulligan.testing.builders import Person, Sketch, Tree
from mulligan.testing.faults import FaultPlan
from mulligan.values.digest import digest_of
from mulligan.values.entries import FileEntry
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath

DRAFT = b".mulligan-draft"


@fast_dataclass(slots=True, frozen=True)
class DiskUnderTest:
    """The disk, a person who works on the same files, the recorded steps, and the content of the disk."""

    disk: Disk
    person: Person
    plan: FaultPlan
    tree: Callable[[], Tree]

    def resolve(self, path: str) -> ResolvedPath:
        return self.disk.resolve(RepoPath(path), final=False)

    def steps(self) -> list[str]:
        return [step for step, _ in self.plan.reached]


class DiskContractBase(ABC):
    @abstractmethod
    def open_disk(self, sketch: Sketch, plan: FaultPlan | None = None) -> AbstractContextManager[DiskUnderTest]:
        """Open a new disk with these files. It announces its steps to the plan."""


def file_entry(content: bytes, mode: int = 0o644, mtime_ns: int = 0) -> FileEntry:
    return FileEntry(digest_of(content), len(content), mode, mtime_ns)
