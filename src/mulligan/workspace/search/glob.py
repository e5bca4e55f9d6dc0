"""Files by the shape of their paths, newest first."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
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


def _select(walk: Walk, shape: Glob, below: int, max_files: int | None) -> ByFolder:
    if max_files is not None:
        return _by_folder(_matching(walk.files[:max_files], shape, below))
    if shape not in walk.memo:
        walk.memo.clear()
        walk.memo[shape] = _by_folder(_matching(walk.files, shape, below))
    return walk.memo[shape]


def _matching(files: Iterable[RepoPath], shape: Glob, below: int) -> list[RepoPath]:
    if shape.suffix is not None:
        suffix = shape.suffix
        return [path for path in files if path.endswith(suffix)]
    match = shape.regex.match
    return [path for path in files if match(path[below:])] if below else [path for path in files if match(path)]


def _by_folder(paths: list[RepoPath]) -> ByFolder:
    """The names of the files with their paths, by the folder they are in, so that each folder is opened once."""
    folders: ByFolder = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder or ROOT, []).append((name, path))
    return folders


def _newest_first(root_fd: int, folders: ByFolder) -> list[RepoPath]:
    """Those of the files that are still there. Every one is asked for its time: nothing else tells of a change in it."""
    times: list[tuple[int, bytes, RepoPath]] = []
    with Handles(root_fd) as handles:
        for folder, files in folders.items():
            with suppress(OSError):
                times += _times(handles.directory(folder), files)
    times.sort()
    return [path for _, _, path in times]
