"""Files by the shape of their paths, newest first."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from mulligan.values.globs import Glob, GlobError, parse_glob
from mulligan.values.limits import GLOB_RESULTS_DEFAULT
from mulligan.values.paths import ROOT, RepoPath
from mulligan.values.refusal import Refused
from mulligan.workspace.search.bases import SHARED_CACHE, admit_all, base_is_directory, refusing_bad_base
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.tree_cache import TreeCache
from mulligan.workspace.search.walk import Walk


@dataclass(slots=True, frozen=True)
class GlobResult:
    """The files that match, newest first. `truncated`: there are more, or a limit kept the walk from its end."""

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
    max_results: int = GLOB_RESULTS_DEFAULT,
    max_scan_files: int | None = None,
    admits: Callable[[RepoPath], bool] = admit_all,
    cache: TreeCache = SHARED_CACHE,
) -> GlobResult:
    """The regular files below `base` whose path from there matches, by modification time descending, then path bytes.

    Symlinks are not listed, nor what `admits` denies. Raises Refused: `invalid_pattern`, or for a base that is no
    directory what `refusing_bad_base` says.
    """
    shape = _parse(pattern)
    below = 0 if base == ROOT else len(base) + 1
    enters = None if shape.starts_anywhere else lambda path: shape.may_match_below(path[below:])
    with refusing_bad_base(base):
        if not base_is_directory(root_fd, base):
            raise OSError(errno.ENOTDIR, "a file", base)
        walk = cache.walk(root_fd, base, include_ignored=include_ignored, enters=enters)
    with walk:
        cut = _go(walk, max_scan_files)
        if walk.complete and enters is None:
            cache.remember(root_fd, walk)
        newest = _newest_first(root_fd, _select(walk, shape, below, max_scan_files))
    chosen = list(islice(filter(admits, newest), max_results + 1))
    return GlobResult(tuple(chosen[:max_results]), cut or len(chosen) > max_results, tuple(walk.unreadable))


def _parse(pattern: str) -> Glob:
    try:
        return parse_glob(pattern)
    except GlobError as error:
        raise Refused("invalid_pattern", "invalid_pattern", f"Not a glob pattern: {error}.") from None


def _go(walk: Walk, max_files: int | None) -> bool:
    """Walk to the end, or to the limit; whether the limit cut it off."""
    if max_files is None:
        walk.finish()
        return False
    return next(islice(walk, max_files, None), None) is not None


@dataclass(slots=True, frozen=True)
class _Matched:
    """The files that match, in order of path bytes; and their places in that list by folder, with their names."""

    paths: list[RepoPath]
    folders: dict[str, list[tuple[int, str]]]


def _select(walk: Walk, shape: Glob, below: int, max_files: int | None) -> _Matched:
    if max_files is not None:
        return _matching(walk.files[:max_files], shape, below)
    known = walk.memo.get(shape)
    if not isinstance(known, _Matched):
        walk.memo.clear()
        known = walk.memo[shape] = _matching(walk.files, shape, below)
    return known


def _matching(files: list[RepoPath], shape: Glob, below: int) -> _Matched:
    suffix, match = shape.suffix, shape.regex.match
    if suffix is not None:
        paths = [path for path in files if path.endswith(suffix)]
    else:
        paths = [path for path in files if match(path, below)]
    folders: dict[str, list[tuple[int, str]]] = {}
    for place, path in enumerate(paths):
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder or ROOT, []).append((place, name))
    return _Matched(paths, folders)


def _newest_first(root_fd: int, matched: _Matched) -> list[RepoPath]:
    """Those of the files that are still there. Each is asked for its time: nothing else tells of a change in it."""
    times: list[tuple[int, int]] = []
    with Handles(root_fd) as handles:
        for folder, files in matched.folders.items():
            with suppress(OSError):
                times += _times(handles.directory(folder), files)
    times.sort()
    return [matched.paths[place] for _, place in times]


def _times(dir_fd: int, files: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """For each file that is there its time, negative so that the newest sorts first, and its place."""
    times = []
    for place, name in files:
        try:
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            times.append((-status.st_mtime_ns, place))
    return times
