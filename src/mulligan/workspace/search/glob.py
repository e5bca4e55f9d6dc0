"""Files by the shape of their paths, newest first."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from mulligan.values.limits import GLOB_RESULTS_DEFAULT
from mulligan.values.paths import ROOT, RepoPath
from mulligan.workspace.search.bases import SHARED_CACHE, refusing_bad_base
from mulligan.workspace.search.glob_pattern import Glob, required_glob
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.tree_cache import TreeCache
from mulligan.workspace.search.walk import Walk


@dataclass(slots=True, frozen=True)
class GlobResult:
    """`count` is how many files matched, of which `paths` are the newest. `truncated`: there is or may be more."""

    paths: tuple[RepoPath, ...]
    count: int
    truncated: bool
    unreadable: tuple[RepoPath, ...] = ()


def glob(
    root_fd: int,
    base: RepoPath,
    pattern: str,
    *,
    include_ignored: bool = False,
    limit: int = GLOB_RESULTS_DEFAULT,
    max_scan_files: int | None = None,
    cache: TreeCache = SHARED_CACHE,
) -> GlobResult:
    """The regular files below `base` whose path from there matches, by modification time descending, then path bytes.

    Symlinks are not listed. Raises Refused: `invalid_pattern`, or what `refusing_bad_base` says.
    """
    shape = required_glob(pattern)
    below = 0 if base == ROOT else len(base) + 1
    admits = None if shape.starts_anywhere else lambda path: shape.may_match_below(path[below:])
    with refusing_bad_base(base):
        walk = cache.walk(root_fd, base, include_ignored=include_ignored, admits=admits)
    with walk:
        cut = _go(walk, max_scan_files)
        if walk.complete and admits is None:
            cache.remember(root_fd, walk)
        matching = _select(walk, shape, below, max_scan_files)
        newest = _newest_first(root_fd, matching)
    return GlobResult(tuple(newest[:limit]), len(newest), cut or len(newest) > limit, tuple(walk.unreadable))


def _go(walk: Walk, max_files: int | None) -> bool:
    """Walk to the end, or to the limit; whether the limit cut it off."""
    if max_files is None:
        walk.finish()
        return False
    return next(islice(walk, max_files, None), None) is not None


def _select(walk: Walk, shape: Glob, below: int, max_files: int | None) -> list[RepoPath]:
    if max_files is not None:
        return _matching(walk.files[:max_files], shape, below)
    if shape not in walk.memo:
        walk.memo.clear()
        walk.memo[shape] = _matching(walk.files, shape, below)
    return walk.memo[shape]


def _matching(files: Iterable[RepoPath], shape: Glob, below: int) -> list[RepoPath]:
    if shape.suffix is not None:
        suffix = shape.suffix
        return [path for path in files if path.endswith(suffix)]
    match = shape.regex.match
    return [path for path in files if match(path[below:])] if below else [path for path in files if match(path)]


def _newest_first(root_fd: int, paths: list[RepoPath]) -> list[RepoPath]:
    """Those of the files that are still there. The order they come in, of path bytes, is kept among equals."""
    times = []
    with Handles(root_fd) as handles:
        for path in paths:
            mtime_ns = _mtime_ns(handles, path)
            if mtime_ns is not None:
                times.append((-mtime_ns, path))
    times.sort(key=_first)
    return [path for _, path in times]


def _first(pair: tuple[int, RepoPath]) -> int:
    return pair[0]


def _mtime_ns(handles: Handles, path: RepoPath) -> int | None:
    parent, _, name = path.rpartition("/")
    try:
        status = os.stat(name, dir_fd=handles.directory(parent or ROOT), follow_symlinks=False)
    except OSError:
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None
