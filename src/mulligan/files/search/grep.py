"""Finds lines by regular expression. Every engine gives the same answer; `ripgrep` is used if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from mulligan.files.search import native, ripgrep
from mulligan.files.search.native import (
    SHARED_CACHE,
    Line,
    SearchJob,
    Selection,
    admit_all,
    base_is_directory,
    refusing_bad_base,
)
from mulligan.files.search.pattern import parse
from mulligan.files.tree.directories import Handles
from mulligan.files.tree.index import TreeCache
from mulligan.files.tree.walk import Walk, WalkScope
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.globs import GlobError, GlobPattern, parse_glob
from mulligan.values.limits import REGEX_TIMEOUT_S, RESULTS_DEFAULT
from mulligan.values.paths import ROOT, RepoPath, name_of

Engine = Literal["ripgrep", "native"]


@fast_dataclass(slots=True, frozen=True)
class GrepOptions:
    """The options of grep. Without an `engine`, it uses ripgrep if that is installed."""

    glob_filter: str | None = None
    case_insensitive: bool = False
    max_results: int = RESULTS_DEFAULT
    engine: Engine | None = None
    timeout_s: float = REGEX_TIMEOUT_S
    max_scan_files: int | None = None
    max_scan_bytes: int | None = None
    admits: Callable[[RepoPath], bool] = admit_all
    cache: TreeCache = SHARED_CACHE


_DEFAULTS = GrepOptions()


@fast_dataclass(slots=True, frozen=True)
class GrepResult:
    """The matching lines, ordered by path bytes and line.

    `truncated`: there are more, one of them is cut, or a limit left files unsearched.
    """

    lines: tuple[Line, ...]
    truncated: bool
    engine: Engine

    @property
    def match_count(self) -> int:
        return len(self.lines)


def grep(root_fd: int, base: RepoPath, pattern: str, options: GrepOptions = _DEFAULTS) -> GrepResult:
    """Search the text files below `base`, or the file `base`, for lines that match.

    A `glob_filter` with a slash is compared with the path from the base, one without a slash with the name; a leading
    `!` negates it. In the order of paths, files beyond a scan limit are not searched; files that `admits` denies are
    left out. Raises Refused: `invalid_regex`, `invalid_glob_filter`, `regex_timeout`, or a refusal of
    `refusing_bad_base`.
    """
    searching = _Searching(options, _job(root_fd, pattern, options))
    keeps = FileFilter.parse(options.glob_filter)
    with refusing_bad_base(base):
        if not base_is_directory(root_fd, base):
            return searching.among([base], None, wants=lambda path: keeps.keeps(name_of(path)))
        keeps = keeps.below(base)
        walk = options.cache.walk(root_fd, base, ways=WalkScope(keeps.enters))
    with walk:
        result = searching.among(walk, None if keeps.enters else walk, wants=keeps.keeps)
        if walk.complete and keeps.enters is None:
            options.cache.remember(root_fd, walk)
    return result


def _job(root_fd: int, pattern: str, options: GrepOptions) -> SearchJob:
    return SearchJob(
        root_fd=root_fd,
        tree=parse(pattern, case_insensitive=options.case_insensitive),
        limit=options.max_results + 1,
        deadline_s=monotonic_s() + options.timeout_s,
        admits=options.admits,
    )


@fast_dataclass(slots=True, frozen=True)
class FileFilter:
    """Selects files by a glob filter. It compares a path without its first `prefix` characters."""

    shape: GlobPattern | None = None
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
    def enters(self) -> Callable[[str], bool] | None:
        """Tells whether a walk must enter a directory; None if it must enter all."""
        shape, prefix = self.shape, self.prefix
        if shape is None or self.negated or shape.starts_anywhere:
            return None
        return lambda directory: shape.may_match_below(directory[prefix:])


@fast_dataclass(slots=True, frozen=True)
class _Searching:
    options: GrepOptions
    job: SearchJob

    def among(self, paths: Iterable[RepoPath], walk: Walk | None, *, wants: Callable[[RepoPath], bool]) -> GrepResult:
        budget = _Budget(self.job.root_fd, self.options)
        source = filter(wants, paths)
        if budget.is_limited:
            source = filter(self.job.admits, source)  # Hidden files do not count against the scan limits.
        selection = Selection(budget.spend_on(source), wants, is_bounded=budget.is_limited)
        engine, found = self._run(selection, walk)
        lines = tuple(found[: self.options.max_results])
        truncated = len(found) > len(lines) or budget.exhausted or any(line.cut for line in lines)
        return GrepResult(lines, truncated, engine)

    def _run(self, selection: Selection, walk: Walk | None) -> tuple[Engine, list[Line]]:
        program = ripgrep.find_ripgrep() if self.options.engine != "native" else None
        if program is not None:
            return "ripgrep", ripgrep.search(self.job, selection, program, walk)
        if self.options.engine == "ripgrep":
            raise Refused("error", "ripgrep_not_found", "ripgrep is not installed.")
        return "native", native.search(self.job, selection)


class _Budget:
    """The number of files and bytes that may still be searched."""

    def __init__(self, root_fd: int, options: GrepOptions) -> None:
        self._root_fd = root_fd
        self._files = options.max_scan_files
        self._bytes = options.max_scan_bytes
        self.exhausted = False

    @property
    def is_limited(self) -> bool:
        return self._files is not None or self._bytes is not None

    def spend_on(self, paths: Iterable[RepoPath]) -> Iterator[RepoPath]:
        """The paths, until one exceeds the budget."""
        if not self.is_limited:
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
            self._bytes -= handles.size_bytes(path)
        return (self._files is None or self._files >= 0) and (self._bytes is None or self._bytes >= 0)
