"""Finds files by a pattern for their paths, the newest first.

`FileTimes` reads the modification times of matching files during the walk, and `Ranking` sorts the files by them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TypeAlias

from mulligan.files.search.native import SHARED_CACHE, admit_all, base_is_directory, refusing_bad_base
from mulligan.files.tree.directories import Handles
from mulligan.files.tree.index import TreeCache
from mulligan.files.tree.walk import Walk, WalkScope
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.globs import GlobError, GlobPattern, parse_glob
from mulligan.values.limits import RESULTS_DEFAULT
from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of, path_bytes

# The path of a directory, and the times of its files by name. It never changes once it is made.
Folder: TypeAlias = tuple[str, dict[str, int]]

_FIRST_FILES = 256
_EVER_NS = 1 << 63
_KIND_BITS, _REGULAR = stat.S_IFMT(0o777777), stat.S_IFREG


class FileTimes:
    """Reads the times of the files that match `shape`, directory by directory.

    The shape is compared with a path without its first `below` characters. Times that the walk has already are not read
    again, except those of files with several names, because no watch reports a change through another name.
    """

    def __init__(self, shape: GlobPattern, below: int) -> None:
        self._shape = shape
        self._below = below
        self.folders: list[Folder] = []
        # Whether these times stay valid as long as the walk.
        self.can_be_kept = True

    def visit(self, walk: Walk, path: str, kept: tuple[str, ...], opened: Callable[[], int]) -> None:
        names = self._matching(path, kept)
        if names:
            self._read_times(walk, path, names, opened)

    def visit_all(self, root_fd: int, walk: Walk) -> None:
        """Read the times in every directory of a complete walk."""
        with Handles(root_fd) as handles:
            for path, place in walk.places.items():
                self.visit(walk, path, place.kept, lambda path=path: handles.directory(path))  # type: ignore[misc]

    def read_times_of(self, root_fd: int, walk: Walk, paths: Iterable[RepoPath]) -> None:
        """Read the times of those of the paths that match."""
        folders: defaultdict[str, list[str]] = defaultdict(list)
        for path in paths:
            if self._shape.regex.match(path, self._below):
                folders[parent_of(path)].append(name_of(path))
        with Handles(root_fd) as handles:
            for folder, names in folders.items():
                self._read_times(walk, folder, names, lambda folder=folder: handles.directory(folder))  # type: ignore[misc]

    def _matching(self, path: str, kept: tuple[str, ...]) -> list[str]:
        suffix = self._shape.suffix
        if suffix is not None:  # `in` is several times as fast as `endswith` and rules out most names.
            return [name for name in kept if suffix in name and name.endswith(suffix)]
        prefix, match, below = _prefix(path), self._shape.regex.match, self._below
        return [name for name in kept if name[-1] != "/" and match(prefix + name, below)]

    def _read_times(self, walk: Walk, path: str, names: list[str], opened: Callable[[], int]) -> None:
        """Note the time of each named file of a directory that still exists."""
        known = walk.times.get(path)
        times = {name: known[name] for name in names if name in known} if known else {}
        if len(times) < len(names):
            try:
                linked = _look(opened(), names, times)
            except OSError:
                linked = []
            if linked:
                self.can_be_kept = False
            walk.times[path] = _with_lasting(known, times, linked)
        self.folders.append((path, times))


def _look(fd: int, names: list[str], times: dict[str, int]) -> list[str]:
    """Add the times of existing files that have none yet. Returns the files with several names."""
    linked = []
    for name in names:
        if name in times:
            continue
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            continue
        if status.st_mode & _KIND_BITS == _REGULAR:
            times[name] = status.st_mtime_ns
            if status.st_nlink != 1:
                linked.append(name)
    return linked


def _with_lasting(known: dict[str, int] | None, times: dict[str, int], linked: list[str]) -> dict[str, int]:
    """The known times and those of the new ones that stay valid."""
    lasting = {name: time_ns for name, time_ns in times.items() if name not in linked} if linked else times
    return known | lasting if known else lasting


class Ranking:
    """Files ordered by time, the newest first, then by path bytes. The first few are sorted without the rest."""

    def __init__(self, folders: list[Folder]) -> None:
        all_ns = sorted(chain.from_iterable(times.values() for _, times in folders))
        self._limit_ns = all_ns[-_FIRST_FILES] if len(all_ns) > _FIRST_FILES else -_EVER_NS
        self._first = _in_order(folders, self._limit_ns, _EVER_NS)
        self._folders = folders
        self._rest: list[RepoPath] | None = None

    def __iter__(self) -> Iterator[RepoPath]:
        yield from self._first
        folders = self._folders  # Read before `_rest`, because another thread may set `_rest` and drop the folders.
        if self._rest is None:
            self._rest = _in_order(folders, -_EVER_NS, self._limit_ns)
            self._folders = []
        yield from self._rest


def _in_order(folders: list[Folder], from_ns: int, to_ns: int) -> list[RepoPath]:
    """The files with a time between these, the second excluded."""
    found = [
        (-time_ns, path_bytes(RepoPath(_prefix(path) + name)))
        for path, times in folders
        for name, time_ns in times.items()
        if from_ns <= time_ns < to_ns
    ]
    return [RepoPath(raw.decode("utf-8", "surrogateescape")) for _, raw in sorted(found)]


def _prefix(path: str) -> str:
    return "" if path == ROOT else path + "/"


@fast_dataclass(slots=True, frozen=True)
class GlobResult:
    """The files that match, newest first. `truncated`: there are more, or a limit ended the walk."""

    paths: tuple[RepoPath, ...]
    truncated: bool
    unreadable: tuple[RepoPath, ...] = ()

    @property
    def count(self) -> int:
        return len(self.paths)


def glob(
    root_fd: int,
    base: RepoPath,
    pattern: str,
    *,
    include_ignored: bool = False,
    max_results: int = RESULTS_DEFAULT,
    max_scan_files: int | None = None,
    admits: Callable[[RepoPath], bool] = admit_all,
    cache: TreeCache = SHARED_CACHE,
) -> GlobResult:
    """The regular files below `base` whose path from there matches, by modification time descending, then path bytes.

    Symlinks are not listed, nor what `admits` denies. Raises Refused: `invalid_pattern`, or for a base that is no
    directory a refusal of `refusing_bad_base`.
    """
    shape = _parse(pattern)
    below = 0 if base == ROOT else len(base) + 1
    enters = None if shape.starts_anywhere else lambda path: shape.may_match_below(path[below:])
    ages = FileTimes(shape, below)
    with refusing_bad_base(base):
        if not base_is_directory(root_fd, base):
            raise OSError(errno.ENOTDIR, "a file", base)
        ways = WalkScope(enters, ages if max_scan_files is None else None)
        walk = cache.walk(root_fd, base, include_ignored=include_ignored, ways=ways)
    with walk:
        if max_scan_files is None:
            ranking, cut = _rank_all(root_fd, walk, shape, ages), False
        else:
            admitted = iter(filter(admits, walk))
            ages.read_times_of(root_fd, walk, list(islice(admitted, max_scan_files)))
            ranking, cut = Ranking(ages.folders), next(admitted, None) is not None
        if walk.complete and enters is None:
            cache.remember(root_fd, walk)
    ranked = filter(admits, ranking)
    chosen = tuple(islice(ranked, max_results))
    return GlobResult(chosen, cut or next(ranked, None) is not None, tuple(walk.unreadable))


def _rank_all(root_fd: int, walk: Walk, shape: GlobPattern, ages: FileTimes) -> Ranking:
    """The ranking of all files, read while walking. A cached walk may have the ranking already."""
    known = walk.memo.get(shape)
    if isinstance(known, Ranking):
        return known
    if walk.complete:
        ages.visit_all(root_fd, walk)
    else:
        walk.finish()
    ranking = Ranking(ages.folders)
    walk.memo.clear()
    if ages.can_be_kept:
        walk.memo[shape] = ranking
    return ranking


def _parse(pattern: str) -> GlobPattern:
    try:
        return parse_glob(pattern)
    except GlobError as error:
        raise Refused("invalid_pattern", "invalid_pattern", f"Not a glob pattern: {error}.") from None
