"""The engine that runs ripgrep, and trusts it with nothing but speed.

Ripgrep says where lines match; what is shown is read by us, through descriptors that follow no symlink, and a file in
which a line is not as ripgrep saw it is searched again by the native engine. So is every large file: ripgrep would read
a binary one to its end, and hold a line of any length in memory. And one with a hit in a line that begins with a byte
order mark, which to ripgrep is a character that any line may begin with.

Order and an early end go together so: the first files are handed over by name, and often they are enough. For the rest
ripgrep walks by itself, which is faster than naming every file, and what we did not select is dropped. It sets out
before we walk ourselves. If it is back soon, only the files it found something in are judged; if not, we walk too, and
it is called back should it turn out that it went where it had no business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType

from mulligan.values.limits import BINARY_PROBE_BYTES, KIB_BYTES, WHOLE_MAX_BYTES
from mulligan.values.paths import ROOT, RepoPath, join, path_bytes
from mulligan.workspace.search import native
from mulligan.workspace.search.findings import BOM, READ_AHEAD_BYTES, Job, Line, Selection, is_binary, shown_text
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.reach import Reach
from mulligan.workspace.search.rg_process import COLUMNS_MAX, Hit, Hits, RipgrepRun, TooMuchOutput, find_ripgrep
from mulligan.workspace.search.walk import Walk

__all__ = ["find_ripgrep", "search"]

FIRST_FILES = 128
BATCH_FILES = 2_048
BATCH_BYTES = 96 * KIB_BYTES
PRUNED_MAX = 1_000
PATIENCE_S = 0.4
"""How long ripgrep goes alone. After that it may be somewhere where it had better not be, and we find out."""

_PLAIN_PATH = re.compile(r"[\w./@+-]+", re.ASCII)


def search(job: Job, selection: Selection, program: str, walk: Walk | None) -> list[Line]:
    """The first `job.limit` matching lines. `walk`: where the selection comes from, if it went everywhere.

    Raises Refused: `regex_timeout`, `invalid_regex`.
    """
    return _Search(job, program).run(selection, walk)


@dataclass(slots=True)
class _Ahead:
    """A ripgrep that walks by itself, and how many directories we knew to leave out when it set out."""

    run: RipgrepRun
    walk: Walk
    excluded: int

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.run.__exit__(kind, error, tb)

    def hits(self, job: Job) -> Hits | None:
        """What it finds, if it goes nowhere it should not, or is back already. Else it is called back."""
        if self.walk.complete and (self.excluded == len(self.walk.pruned) or self.run.has_ended):
            hits = self.run.hits(PATIENCE_S)
            if hits is not None or not _large_files(job, self.walk):
                return hits or self.run.hits()
        self.run.kill()
        return None


@dataclass(slots=True)
class _Search:
    job: Job
    program: str

    def run(self, selection: Selection, walk: Walk | None) -> list[Line]:
        first = list(islice(selection, FIRST_FILES))
        with self._set_out_early(first, selection, walk) as ahead:
            found = self._by_name(first, self.job.limit)
            wanted = self.job.limit - len(found)
            if wanted <= 0 or len(first) < FIRST_FILES:
                return found
            return found + self._after(first[-1], selection, wanted, walk=walk, ahead=ahead)

    def _set_out_early(
        self, first: list[RepoPath], selection: Selection, walk: Walk | None
    ) -> AbstractContextManager[_Ahead | None]:
        """When there is more to search than the first files, and it seems that most of the tree is."""
        if walk is None or selection.is_bounded or len(first) < FIRST_FILES:
            return nullcontext()
        came_across = next(number for number, path in enumerate(walk, 1) if path == first[-1])
        return self._set_out(walk) if _is_worth_walking(walk, len(first), came_across) else nullcontext()

    def _set_out(self, walk: Walk, *options: str) -> _Ahead:
        """Over the whole tree but for the directories known to be left out."""
        excluded = [f"--glob=!/{path}" for path in walk.pruned if _PLAIN_PATH.fullmatch(path)]
        base = "./" if walk.plan.base == ROOT else f"./{walk.plan.base}/"
        where = [base.encode("utf-8", "surrogateescape")]
        run = RipgrepRun(self.job, self.program, where, options=[*excluded, "--glob=!.git", *options])
        return _Ahead(run, walk, len(walk.pruned))

    def _after(
        self, last: RepoPath, selection: Selection, wanted: int, *, walk: Walk | None, ahead: _Ahead | None
    ) -> list[Line]:
        """The lines of the files after the last one that was searched by name."""
        try:
            soon = None if ahead is None or ahead.walk.complete else ahead.run.hits(PATIENCE_S)
        except TooMuchOutput:
            return self._in_batches(selection, wanted)  # so many lines match that the first few batches will do
        if soon is not None and soon.all_named and walk is not None:
            return self._judged(soon, last, selection, walk=walk, wanted=wanted)
        rest = list(selection)
        try:
            hits = self._by_walking(len(rest), walk, ahead) if soon is None else soon
        except TooMuchOutput:
            hits = None
        return self._in_batches(rest, wanted) if hits is None else self._confirmed(rest, hits, wanted)

    def _judged(self, hits: Hits, last: RepoPath, selection: Selection, *, walk: Walk, wanted: int) -> list[Line]:
        """The lines of those files that the selection would have come to."""
        raw_last = path_bytes(last)
        after = sorted((raw, path) for path in map(RepoPath, hits.by_path) if (raw := path_bytes(path)) > raw_last)
        with Reach(self.job.root_fd, walk.plan) as reach:
            paths = (path for _, path in after if selection.wants(path) and reach.holds(path))
            return self._confirmed(paths, hits, wanted)

    def _by_walking(self, wanted: int, walk: Walk | None, ahead: _Ahead | None) -> Hits | None:
        """What ripgrep finds on its own way; None when it should not take that."""
        hits = None if ahead is None else ahead.hits(self.job)
        if hits is not None or walk is None or not walk.complete:
            return hits
        if not _is_worth_walking(walk, wanted, walk.file_count):
            return None
        with self._set_out(walk, f"--max-filesize={WHOLE_MAX_BYTES}") as again:
            large = frozenset(_large_files(self.job, walk))
            hits = again.run.hits()
        return None if hits is None else replace(hits, unasked=large)

    def _in_batches(self, paths: Iterable[RepoPath], wanted: int) -> list[Line]:
        found: list[Line] = []
        for batch in _batches(paths):
            found += self._by_name(batch, wanted - len(found))
            if len(found) >= wanted:
                break
        return found

    def _by_name(self, paths: list[RepoPath], wanted: int) -> list[Line]:
        with Handles(self.job.root_fd) as handles:
            large = frozenset(path for path in paths if handles.size_bytes(path) > WHOLE_MAX_BYTES)
        named = [b"./" + path_bytes(path) for path in paths if "\n" not in path and path not in large]
        hits = self._hits_in(named) if named else Hits()
        return self._confirmed(paths, replace(hits, unasked=large), wanted)

    def _hits_in(self, paths: list[bytes]) -> Hits:
        with RipgrepRun(self.job, self.program, paths) as run:
            return run.hits() or Hits()

    def _confirmed(self, paths: Iterable[RepoPath], hits: Hits, wanted: int) -> list[Line]:
        """The lines of those of the paths that were hit, read by us, up to `wanted`."""
        found: list[Line] = []
        doubtful: list[RepoPath] = []
        with Handles(self.job.root_fd) as handles:
            for path in paths:
                known = path in hits.by_path or path in hits.unasked or "\n" in path
                if known and self.job.admits(path):
                    lines = self._lines_of(handles, path, hits.by_path.get(path))
                    found += lines or []
                    if lines is None:
                        doubtful.append(path)
                    if len(found) >= wanted:
                        break
        if doubtful:
            found = sorted([*found, *native.search(self.job, doubtful)], key=lambda line: path_bytes(line.path))
        return found[:wanted]

    def _lines_of(self, handles: Handles, path: RepoPath, hits: list[Hit] | None) -> list[Line] | None:
        """`hits` is None for a file that ripgrep did not search, or whose name its output cannot carry."""
        self.job.left_s()
        return None if hits is None else _read_lines(handles, path, hits)


def _is_worth_walking(walk: Walk, wanted: int, came_across: int) -> bool:
    """Whether most of what ripgrep would come across by itself is wanted, as far as we know."""
    excludable = len(walk.pruned) <= PRUNED_MAX and sum(map(len, walk.pruned)) <= BATCH_BYTES
    return excludable and 2 * wanted >= came_across and walk.ignored_files <= walk.file_count


def _batches(paths: Iterable[RepoPath]) -> Iterator[list[RepoPath]]:
    """In order, each small enough for a command line."""
    batch: list[RepoPath] = []
    size = 0
    for path in paths:
        batch.append(path)
        size += len(path) + 16
        if len(batch) >= BATCH_FILES or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _large_files(job: Job, walk: Walk) -> list[RepoPath]:
    """Those that ripgrep would come across, wanted or not."""
    found: list[RepoPath] = []
    with Handles(job.root_fd) as handles:
        for folder, place in walk.places.items():
            job.left_s()
            paths = (join(RepoPath(folder), name) for name in (*place.kept, *place.ignored) if name[-1] != "/")
            found += [path for path in paths if handles.size_bytes(path) > WHOLE_MAX_BYTES]
    return found


def _read_lines(handles: Handles, path: RepoPath, hits: list[Hit]) -> list[Line] | None:
    """The lines that were hit; None when the file is large, or for one of them it takes more than ripgrep's word."""
    try:
        fd = handles.open_file(path)
    except OSError:
        return []
    try:
        if is_binary(os.pread(fd, BINARY_PROBE_BYTES, 0)):
            return []
        return None if os.fstat(fd).st_size > WHOLE_MAX_BYTES else _lines_at(fd, path, hits)
    except OSError:
        return []
    finally:
        os.close(fd)


def _lines_at(fd: int, path: RepoPath, hits: list[Hit]) -> list[Line] | None:
    lines = []
    for hit in hits:
        if hit.offset and os.pread(fd, 1, hit.offset - 1) != b"\n":
            return None
        raw = _raw_line(fd, hit.offset)
        if raw.startswith(BOM) or (len(raw) <= COLUMNS_MAX and raw != hit.text):
            return None
        lines.append(Line(path, hit.line_no, *shown_text(raw)))
    return lines


def _raw_line(fd: int, offset: int) -> bytes:
    return os.pread(fd, READ_AHEAD_BYTES, offset).partition(b"\n")[0]
