"""Lines by what is in them: the same answer from every engine."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mulligan.values.clock import monotonic_s
from mulligan.values.limits import GREP_RESULTS_DEFAULT, REGEX_TIMEOUT_S
from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.search import native, ripgrep
from mulligan.workspace.search.bases import SHARED_CACHE, refusing_bad_base
from mulligan.workspace.search.dialect import parse
from mulligan.workspace.search.findings import Job, Line, Selection
from mulligan.workspace.search.glob_pattern import Glob, GlobError, parse_glob
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.tree_cache import TreeCache
from mulligan.workspace.search.walk import Walk

Engine = Literal["ripgrep", "native"]


@dataclass(slots=True, frozen=True)
class GrepLimits:
    """How much a search may return, take and read. Files beyond a scan limit are not searched, in order of paths."""

    max_results: int = GREP_RESULTS_DEFAULT
    timeout_s: float = REGEX_TIMEOUT_S
    max_scan_files: int | None = None
    max_scan_bytes: int | None = None


@dataclass(slots=True, frozen=True)
class GrepResult:
    """The matching lines by path bytes, then line. `truncated`: there are more, or a limit kept files unsearched.

    `files_searched` counts up to the file that holds the last line looked at; binary and unreadable files count too.
    """

    lines: tuple[Line, ...]
    truncated: bool
    engine: Engine
    files_searched: int
    unreadable: tuple[RepoPath, ...] = ()

    @property
    def match_count(self) -> int:
        return len(self.lines)


def grep(
    root_fd: int,
    base: RepoPath,
    pattern: str,
    *,
    glob_filter: str | None = None,
    case_insensitive: bool = False,
    limits: GrepLimits = GrepLimits(),  # noqa: B008  # immutable
    engine: Engine | None = None,
    cache: TreeCache = SHARED_CACHE,
) -> GrepResult:
    """Search the text files below `base`, or the one file that it is, for lines that match.

    Without an `engine`, ripgrep if it is there. A `glob_filter` with a slash is matched against the path from the base,
    one without against the name; `!` before it turns it round. Raises Refused: `invalid_regex`, `invalid_glob_filter`,
    `regex_timeout`, or what `refusing_bad_base` says.
    """
    job = Job(
        root_fd=root_fd,
        tree=parse(pattern, case_insensitive=case_insensitive),
        limit=limits.max_results + 1,
        deadline_s=monotonic_s() + limits.timeout_s,
    )
    keeps = FileFilter.parse(glob_filter)
    with refusing_bad_base(base):
        if not _is_directory(root_fd, base):
            return _Searching(job, limits, engine).among([base] if keeps.keeps(name_of(base)) else [], None)
        keeps = keeps.below(base)
        walk = cache.walk(root_fd, base, admits=keeps.admits)
    with walk:
        result = _Searching(job, limits, engine).among(filter(keeps.keeps, walk), None if keeps.admits else walk)
        if walk.complete and keeps.admits is None:
            cache.remember(root_fd, walk)
    return result


def render(result: GrepResult) -> str:
    """`path:line:text` a line, as people and models read it."""
    rows = (f"{to_wire(line.path)}:{line.line_no}:{line.text.decode('utf-8', 'replace')}" for line in result.lines)
    return "\n".join(rows)


@dataclass(slots=True, frozen=True)
class FileFilter:
    """Which files are wanted. `prefix` is the length of what comes before the part of a path that is matched."""

    shape: Glob | None = None
    negated: bool = False
    prefix: int = 0

    @staticmethod
    def parse(text: str | None) -> FileFilter:
        if text is None:
            return FileFilter()
        body = text.removeprefix("!")
        anchored = body.removeprefix("/") + ("**" if body.endswith("/") else "")
        try:
            return FileFilter(parse_glob(anchored if "/" in body else f"**/{body}"), body != text)
        except GlobError as error:
            raise Refused("error", "invalid_glob_filter", f"Not a glob pattern: {error}.") from None

    def below(self, base: RepoPath) -> FileFilter:
        return FileFilter(self.shape, self.negated, 0 if base == ROOT else len(base) + 1)

    def keeps(self, path: str) -> bool:
        return self.shape is None or self.shape.matches(path[self.prefix :]) is not self.negated

    @property
    def admits(self) -> Callable[[str], bool] | None:
        """Where a walk need go, when that is not everywhere."""
        shape, prefix = self.shape, self.prefix
        if shape is None or self.negated or shape.starts_anywhere:
            return None
        return lambda directory: shape.may_match_below(directory[prefix:])


@dataclass(slots=True, frozen=True)
class _Searching:
    job: Job
    limits: GrepLimits
    engine: Engine | None

    def among(self, paths: Iterable[RepoPath], walk: Walk | None) -> GrepResult:
        budget = _Budget(self.job.root_fd, self.limits)
        selection = Selection(budget.spend_on(paths))
        engine, found = self._run(selection, walk)
        more = len(found) > self.limits.max_results
        searched = selection.drawn.index(found[-1].path) + 1 if more else len(selection.drawn)
        return GrepResult(
            lines=tuple(found[: self.limits.max_results]),
            truncated=more or budget.exhausted,
            engine=engine,
            files_searched=searched,
            unreadable=tuple(walk.unreadable) if walk else (),
        )

    def _run(self, selection: Selection, walk: Walk | None) -> tuple[Engine, list[Line]]:
        program = ripgrep.find_ripgrep() if self.engine != "native" else None
        if program is not None:
            return "ripgrep", ripgrep.search(self.job, selection, program, walk)
        if self.engine == "ripgrep":
            raise Refused("error", "ripgrep_not_found", "ripgrep is not installed.")
        return "native", native.search(self.job, selection)


class _Budget:
    """How many files and bytes may still be searched."""

    def __init__(self, root_fd: int, limits: GrepLimits) -> None:
        self._root_fd = root_fd
        self._files = limits.max_scan_files
        self._bytes = limits.max_scan_bytes
        self.exhausted = False

    def spend_on(self, paths: Iterable[RepoPath]) -> Iterator[RepoPath]:
        """The paths, until one is more than is left."""
        if self._files is None and self._bytes is None:
            yield from paths
            return
        with Handles(self._root_fd) as handles:
            for path in paths:
                if not self._allows(handles, path):
                    self.exhausted = True
                    return
                yield path

    def _allows(self, handles: Handles, path: RepoPath) -> bool:
        if self._files is not None:
            self._files -= 1
        if self._bytes is not None:
            self._bytes -= _size_bytes(handles, path)
        return (self._files is None or self._files >= 0) and (self._bytes is None or self._bytes >= 0)


def _size_bytes(handles: Handles, path: RepoPath) -> int:
    try:
        return os.stat(name_of(path), dir_fd=handles.directory(parent_of(path)), follow_symlinks=False).st_size
    except OSError:
        return 0


def _is_directory(root_fd: int, base: RepoPath) -> bool:
    """Raises OSError when there is neither a directory nor a regular file by that name."""
    if base == ROOT:
        return True
    with Handles(root_fd) as handles:
        mode = os.stat(name_of(base), dir_fd=handles.directory(parent_of(base)), follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "a symlink", base)
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise OSError(errno.ENOTDIR, "a special file", base)
    return stat.S_ISDIR(mode)
