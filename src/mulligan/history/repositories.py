"""What a call did to git's own files, and which part of it a way back leaves alone.

A repository that was there before a call and after it is its owner's: commits are not undone with the files. One that
the call itself made or removed is ordinary files. New objects are content-addressed and harmless, so they are never
taken away from a repository that was there before.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mulligan.values.digest import Digest
from mulligan.values.entries import Absent, Change, FileEntry
from mulligan.values.paths import RepoPath, to_wire
from mulligan.values.plain import plain

_GIT = ".git"
COMMIT_OUTSIDE = "commit_outside"
"""The reason in a note of coverage: the call made commits in a git directory outside the root."""
_MOVED = re.compile(rb"\A([0-9a-f]{40,64}) ([0-9a-f]{40,64}) ")
_LOCKED = ("HEAD", "index", "config", "packed-refs", "refs/")


@plain(slots=True, frozen=True)
class LeftAlone:
    """A repository that an undo operation leaves alone although the call changed it, and how its HEAD moved.

    `outside`: its git directory is not in the root, so Mulligan did not capture it and cannot put it back.
    """

    repository: RepoPath
    head: tuple[str, str] | None = None
    outside: bool = False

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"repository": to_wire(self.repository)}
        body |= {"outside": True} if self.outside else {}
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
            return _ends_of(read(change.after.digest).removeprefix(earlier))
    return None


def _ends_of(added: bytes) -> tuple[str, str] | None:
    """Where HEAD was before the lines that were added to its log, and where it is after them."""
    ends = [move for line in added.splitlines() if (move := _MOVED.match(line)) is not None]
    if not ends or ends[0][1] == ends[-1][2]:
        return None
    return ends[0][1].decode("ascii"), ends[-1][2].decode("ascii")


class LinkedHead:
    """HEAD of a linked working tree, whose git directory is outside the root. Made before a command runs."""

    def __init__(self, root: bytes) -> None:
        self._log = _log_of_linked(os.path.join(root, b".git"))
        self._size_bytes = len(_content(self._log))

    def note(self) -> dict[str, str] | None:
        """What the call says of the commits that the command made, if it made any."""
        ends = _ends_of(_content(self._log)[self._size_bytes :])
        if ends is None:
            return None
        return {"path": _GIT, "reason": COMMIT_OUTSIDE, "head_before": ends[0], "head_after": ends[1]}


def _log_of_linked(link: bytes) -> bytes | None:
    """The log of HEAD, if `.git` is a file that names the git directory."""
    if not stat.S_ISREG(_mode(link)):
        return None
    named = _content(link).removeprefix(b"gitdir:").strip()
    return os.path.join(os.path.dirname(link), named, b"logs", b"HEAD") if named else None


def _mode(path: bytes) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _content(path: bytes | None) -> bytes:
    """Nothing, if it cannot be read: then nothing is said of commits."""
    try:
        with open(path or b"", "rb") as file:
            return file.read()
    except OSError:
        return b""


def left_outside(notes: Iterable[Mapping[str, str]]) -> list[LeftAlone]:
    """The repositories outside the root that the notes of calls name, with how each HEAD moved in all of the calls."""
    by_path: dict[str, dict[str, str]] = {}
    for note in notes:
        if note["reason"] == COMMIT_OUTSIDE:
            by_path.setdefault(note["path"], {})[note["head_before"]] = note["head_after"]
    found = []
    for path, moves in by_path.items():
        before = next((one for one in moves if one not in moves.values()), next(iter(moves)))
        after = before
        for _ in moves:
            after = moves.get(after, after)
        found.append(LeftAlone(RepoPath(path), (before, after), outside=True))
    return found
