"""What a call did to git's own files, and which part of it a way back leaves alone.

A repository that was there before a call and after it is its owner's: commits are not undone with the files. One that
the call itself made or removed is ordinary files. New objects are content-addressed and harmless, so they are never
taken away from a repository that was there before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mulligan.values.digest import Digest
from mulligan.values.entries import Absent, Change, FileEntry
from mulligan.values.paths import RepoPath, to_wire
from mulligan.values.plain import plain

_GIT = ".git"
_MOVED = re.compile(rb"\A([0-9a-f]{40,64}) ([0-9a-f]{40,64}) ")
_LOCKED = ("HEAD", "index", "config", "packed-refs", "refs/")


@plain(slots=True, frozen=True)
class LeftAlone:
    """A repository that a way back does not touch although the call did, and how its HEAD moved, if it did."""

    repository: RepoPath
    head: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"repository": to_wire(self.repository)}
        return body if self.head is None else body | {"head": {"before": self.head[0], "after": self.head[1]}}


def repository_of(path: RepoPath) -> RepoPath | None:
    """The innermost `.git` that a path is or is in."""
    names = path.split("/")
    if _GIT not in names:
        return None
    depth = len(names) - names[::-1].index(_GIT)
    return RepoPath("/".join(names[:depth]))


def is_object(path: RepoPath) -> bool:
    """Whether a path is in the object store of a repository, or is that folder itself."""
    repository = repository_of(path)
    return repository is not None and f"{path}/".startswith(f"{repository}/objects/")


def is_locked_by_git(path: RepoPath) -> bool:
    """Whether git itself changes this path only while it holds `<path>.lock`."""
    repository = repository_of(path)
    if repository is None:
        return False
    return path[len(repository) + 1 :].startswith(_LOCKED) and not path.endswith(".lock")


def is_index(path: RepoPath) -> bool:
    """Whether a path may be an index of git's, of a repository or of one of its further working trees."""
    return path.endswith("/index") and repository_of(path) is not None


def without_objects(layer: Sequence[Change]) -> list[Change]:
    """Everything but what was added to the object store of a repository that was there before."""
    ordinary, kept = split_off(layer)
    return [*ordinary, *(one for one in kept if not (is_object(one.path) and isinstance(one.before, Absent)))]


def split_off(layer: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """Changes to go back on, and those inside repositories that were there before and after."""
    moved = {one.path for one in layer if isinstance(one.before, Absent) or isinstance(one.after, Absent)}
    ordinary, kept = list[Change](), list[Change]()
    for change in layer:
        repository = repository_of(change.path)
        is_ordinary = repository is None or repository in moved
        (ordinary if is_ordinary else kept).append(change)
    return ordinary, kept


def left_alone(kept: Iterable[Change], read: Callable[[Digest], bytes]) -> list[LeftAlone]:
    """One for each repository, in path order."""
    kept = list(kept)
    found = sorted({repository for one in kept if (repository := repository_of(one.path)) is not None})
    return [LeftAlone(repository, _head_moved(repository, kept, read)) for repository in found]


def _head_moved(repository: RepoPath, kept: list[Change], read: Callable[[Digest], bytes]) -> tuple[str, str] | None:
    """From HEAD's own log: every commit, checkout and reset adds a line `old new who when what`."""
    for change in kept:
        if change.path == f"{repository}/logs/HEAD" and isinstance(change.after, FileEntry):
            earlier = read(change.before.digest) if isinstance(change.before, FileEntry) else b""
            moves = [_MOVED.match(line) for line in read(change.after.digest).removeprefix(earlier).splitlines()]
            ends = [move for move in moves if move is not None]
            if ends and ends[0][1] != ends[-1][2]:
                return ends[0][1].decode("ascii"), ends[-1][2].decode("ascii")
    return None
