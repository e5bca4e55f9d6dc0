"""Files by when they were modified, the newest first."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain

from mulligan.values.globs import Glob
from mulligan.values.paths import ROOT, RepoPath, path_bytes
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.walk import Walk

_FIRST_FILES = 256
_KIND_BITS, _REGULAR = stat.S_IFMT(0o777777), stat.S_IFREG


class Ages:
    """Asks the files of one shape for their times, directory by directory. `below`: where the part that counts begins.

    What a walk knows already is not asked again. A file with several names is asked always: a change through another
    of them is not heard of.
    """

    def __init__(self, shape: Glob, below: int) -> None:
        self._shape = shape
        self._below = below
        self.folders: list[tuple[str, dict[str, int]]] = []
        """The times of the files asked, by name, each folder behind its path with a slash."""
        self.can_be_kept = True
        """Whether these times hold for as long as the walk does."""

    def visit(self, walk: Walk, path: str, kept: tuple[str, ...], opened: Callable[[], int]) -> None:
        prefix = "" if path == ROOT else path + "/"
        self._ask(walk, path, self._matching(prefix, kept), opened)

    def visit_all(self, root_fd: int, walk: Walk) -> None:
        """Every directory of a complete walk."""
        with Handles(root_fd) as handles:
            for path, place in walk.places.items():
                self.visit(walk, path, place.kept, lambda path=path: handles.directory(path))  # type: ignore[misc]

    def ask_these(self, root_fd: int, walk: Walk, paths: Iterable[RepoPath]) -> None:
        """Those of the files that match."""
        folders: dict[str, list[str]] = {}
        for path in filter(self._matches, paths):
            folder, _, name = path.rpartition("/")
            folders.setdefault(folder or ROOT, []).append(name)
        with Handles(root_fd) as handles:
            for folder, names in folders.items():
                self._ask(walk, folder, names, lambda folder=folder: handles.directory(folder))  # type: ignore[misc]

    def _matches(self, path: str) -> bool:
        return self._shape.regex.match(path, self._below) is not None

    def _matching(self, prefix: str, kept: tuple[str, ...]) -> list[str]:
        suffix, match, below = self._shape.suffix, self._shape.regex.match, self._below
        if suffix is not None:
            return [name for name in kept if name.endswith(suffix)]
        return [name for name in kept if name[-1] != "/" and match(prefix + name, below)]

    def _ask(self, walk: Walk, path: str, names: list[str], opened: Callable[[], int]) -> None:
        """Write down the time of each of the files of a directory that is still there."""
        prefix = "" if path == ROOT else path + "/"
        known = walk.times.get(path)
        if known is None:
            known = walk.times[path] = {}
        unknown = [name for name in names if name not in known] if known else names
        if unknown:
            with suppress(OSError):
                known = known | self._look(opened(), unknown, known)
        if names:
            self.folders.append((prefix, {name: known[name] for name in names if name in known}))

    def _look(self, fd: int, names: list[str], known: dict[str, int]) -> dict[str, int]:
        """The times of those of the files that are there; `known` learns those that it may keep."""
        times: dict[str, int] = {}
        for name in names:
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue
            if status.st_mode & _KIND_BITS != _REGULAR:
                continue
            times[name] = status.st_mtime_ns
            if status.st_nlink == 1:
                known[name] = status.st_mtime_ns
            else:
                self.can_be_kept = False
        return times


class Ranking:
    """Files by time, the newest first, then by path bytes. Whoever wants only a few does not wait for the rest."""

    def __init__(self, folders: list[tuple[str, dict[str, int]]]) -> None:
        all_ns = sorted(chain.from_iterable(times_ns.values() for _, times_ns in folders))
        self._limit_ns = all_ns[-_FIRST_FILES] if len(all_ns) > _FIRST_FILES else 0
        self._first = _in_order(folders, lambda time_ns: time_ns >= self._limit_ns)
        self._folders = folders
        self._rest: list[RepoPath] | None = None

    def __iter__(self) -> Iterator[RepoPath]:
        yield from self._first
        if self._rest is None:
            self._rest = _in_order(self._folders, lambda time_ns: time_ns < self._limit_ns)
            self._folders = []
        yield from self._rest


def _in_order(folders: list[tuple[str, dict[str, int]]], counts: Callable[[int], bool]) -> list[RepoPath]:
    """The files whose times count."""
    found = [
        (-time_ns, path_bytes(RepoPath(prefix + name)))
        for prefix, times_ns in folders
        for name, time_ns in times_ns.items()
        if counts(time_ns)
    ]
    return [RepoPath(raw.decode("utf-8", "surrogateescape")) for _, raw in sorted(found)]
