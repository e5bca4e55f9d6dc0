"""Files by the shape of their paths, newest first."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import islice

from mulligan.values.globs import Glob, GlobError, parse_glob
from mulligan.values.limits import GLOB_RESULTS_DEFAULT
from mulligan.values.paths import ROOT, RepoPath
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.search.ages import Ages, Ranking
from mulligan.workspace.search.bases import SHARED_CACHE, admit_all, base_is_directory, refusing_bad_base
from mulligan.workspace.search.tree_cache import TreeCache
from mulligan.workspace.search.walk import Walk, Ways


@plain(slots=True, frozen=True)
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
    ages = Ages(shape, below)
    with refusing_bad_base(base):
        if not base_is_directory(root_fd, base):
            raise OSError(errno.ENOTDIR, "a file", base)
        ways = Ways(enters, ages if max_scan_files is None else None)
        walk = cache.walk(root_fd, base, include_ignored=include_ignored, ways=ways)
    with walk:
        if max_scan_files is None:
            ranking, cut = _rank_all(root_fd, walk, shape, ages), False
        else:
            admitted = iter(filter(admits, walk))
            ages.ask_these(root_fd, walk, list(islice(admitted, max_scan_files)))
            ranking, cut = Ranking(ages.folders), next(admitted, None) is not None
        if walk.complete and enters is None:
            cache.remember(root_fd, walk)
    ranked = filter(admits, ranking)
    chosen = tuple(islice(ranked, max_results))
    return GlobResult(chosen, cut or next(ranked, None) is not None, tuple(walk.unreadable))


def _rank_all(root_fd: int, walk: Walk, shape: Glob, ages: Ages) -> Ranking:
    """While walking, or of a walk that was complete from the start and perhaps was ranked so before."""
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


def _parse(pattern: str) -> Glob:
    try:
        return parse_glob(pattern)
    except GlobError as error:
        raise Refused("invalid_pattern", "invalid_pattern", f"Not a glob pattern: {error}.") from None
