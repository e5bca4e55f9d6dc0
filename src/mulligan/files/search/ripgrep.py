"""The search engine that runs ripgrep. Mulligan uses it for its speed and checks everything that it reports.

Ripgrep reports where lines match. Mulligan reads these lines itself, through descriptors that follow no symbolic link.
The native engine searches a file again if

* a line in it is not as ripgrep reported it;
* it is large: ripgrep would read a binary file to its end, and hold a line of any length in memory;
* a found line begins with a byte order mark, which for ripgrep is a character that may begin any line.

The answer has the first lines in the order of paths, and the search should end early. So `_Search` names the first
files to ripgrep; often they are enough. For the rest ripgrep walks the tree by itself, which is faster than naming
every file, and Mulligan drops what it did not select. This second process starts before Mulligan's own walk (`_Ahead`).
If it ends within PATIENCE_S, Mulligan checks only the files in which it found something. If not, Mulligan walks the
tree too, and stops ripgrep if it goes into directories that Mulligan ignores.

Ripgrep's own ignore rules (which differ from git's), configuration, detection of binary files and transcoding are
switched off. `WalkRules` tells for a few files, without walking, whether a walk would list them.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from itertools import islice
from types import TracebackType
from typing import NamedTuple

from mulligan.files.search import native
from mulligan.files.search.native import (
    BOM,
    READ_AHEAD_BYTES,
    Line,
    SearchJob,
    Selection,
    is_binary,
    shown_text,
    too_slow,
)
from mulligan.files.search.pattern import for_rust
from mulligan.files.tree.directories import Handles
from mulligan.files.tree.ignore import IgnoreRules, read_sources
from mulligan.files.tree.walk import MARKS, Walk, WalkPlan
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import BINARY_PROBE_BYTES, KIB_BYTES, MIB_BYTES, WHOLE_MAX_BYTES
from mulligan.values.paths import ROOT, RepoPath, join, name_of, parent_of, path_bytes

OUTPUT_MAX_BYTES = 32 * MIB_BYTES
# Ripgrep prints no longer lines; their offsets are enough.
COLUMNS_MAX = 1_000

_OPTIONS = (
    "--no-config --no-ignore --hidden --no-follow --text --encoding=none --no-mmap --no-messages --no-pcre2 "
    "--color=never --no-heading --with-filename --line-number --byte-offset --null --no-multiline --no-crlf "
    f"--case-sensitive --regex-size-limit=1G --max-columns={COLUMNS_MAX}"
).split()


class Hit(NamedTuple):
    """A matching line as ripgrep reports it. `text` may be a note that the line is too long to print."""

    line_no: int
    offset: int
    text: bytes


@fast_dataclass(slots=True)
class Hits:
    """The matches by path from the root.

    `all_named`: no file with a match has a newline in its name, which the output cannot show. `unasked`: files that
    ripgrep did not search.
    """

    by_path: dict[str, list[Hit]] = field(default_factory=dict)
    all_named: bool = True
    unasked: frozenset[str] = frozenset()


class TooMuchOutputError(Exception):
    """Ripgrep reports more matches than the answer can have."""


def find_ripgrep() -> str | None:
    """The path of ripgrep: beside this interpreter, where the `search` extra installs it, else on the PATH."""
    folders = [os.path.join(sys.prefix, "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    for folder in folders:
        program = os.path.join(folder, "rg")
        if os.path.isabs(folder) and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


class RipgrepRun:
    """One ripgrep process, which ends with its `with` block at the latest."""

    def __init__(self, job: SearchJob, program: str, paths: Sequence[bytes], *, options: Sequence[str] = ()) -> None:
        self._job = job
        self._command: list[str | bytes] = [program, *_OPTIONS, f"--regexp={for_rust(job.tree)}"]
        settings: list[str | bytes] = [f"--max-count={job.limit}", *options, "--", *paths]
        self._process = _start(job.root_fd, self._command + settings)
        self._chunks: list[bytes] = []
        self._room = max(OUTPUT_MAX_BYTES, 2 * KIB_BYTES * job.limit)

    def __enter__(self) -> RipgrepRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.__exit__(kind, error, tb)

    def kill(self) -> None:
        self._process.kill()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def hits(self, patience_s: float | None = None) -> Hits | None:
        """All matches; None if it takes longer than `patience_s`. Then this may be called again.

        Raises TooMuchOutputError, and Refused: `regex_timeout`, `invalid_regex`.
        """
        if not self._drain(None if patience_s is None else monotonic_s() + patience_s):
            return None
        try:
            code = self._process.wait(self._job.left_s())
        except subprocess.TimeoutExpired:
            raise too_slow() from None
        self._check(code)
        return _parse(b"".join(self._chunks))

    def _drain(self, until_s: float | None) -> bool:
        """Read the output until `until_s`. Whether it is complete."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            left_s = self._job.left_s()
            if until_s is not None:
                left_s = min(left_s, until_s - monotonic_s())
            if left_s <= 0:
                return False
            if not poll.poll(left_s * 1000):
                continue
            chunk = os.read(fd, MIB_BYTES)
            if not chunk:
                return True
            self._chunks.append(chunk)
            self._room -= len(chunk)
            if self._room < 0:
                raise TooMuchOutputError

    def _check(self, returncode: int) -> None:
        """Exit code 2 means that a file could not be read, which is fine, or that ripgrep refused the pattern."""
        if returncode in (0, 1):
            return
        if returncode != 2:
            raise fault("internal", "ripgrep ended without an answer.", returncode=returncode)
        with _start(self._job.root_fd, [*self._command, "-"]) as probe:
            try:
                code = probe.wait(self._job.left_s())
            except subprocess.TimeoutExpired:
                raise too_slow() from None
            finally:
                probe.kill()
        if code not in (0, 1):
            raise Refused("invalid_regex", "invalid_regex", "This pattern is too large to be searched for.")


def _start(root_fd: int, command: list[str | bytes]) -> subprocess.Popen[bytes]:
    """Start a command in the root, which it reaches by its descriptor and not by its name."""
    on_linux = os.path.isdir("/proc/self/fd")
    return subprocess.Popen(
        command,
        cwd=f"/proc/self/fd/{root_fd}" if on_linux else None,
        preexec_fn=None if on_linux else lambda: os.fchdir(root_fd),
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _parse(output: bytes) -> Hits:
    """Parse rows `./path NUL line:offset:text`. Another row is a part of a name that contains a newline."""
    hits = Hits()
    for row in output.split(b"\n")[:-1]:
        path, _, rest = row.partition(b"\0")
        line_no, _, rest = rest.partition(b":")
        offset, _, text = rest.partition(b":")
        if line_no.isdigit() and offset.isdigit():
            name = path.removeprefix(b"./").decode("utf-8", "surrogateescape")
            hits.by_path.setdefault(name, []).append(Hit(int(line_no), int(offset), text))
        else:
            hits.all_named = False
    return hits


class WalkRules:
    """Tells which files a walk with this plan would list. It reads each ignore file once."""

    def __init__(self, root_fd: int, plan: WalkPlan) -> None:
        self._handles = Handles(root_fd)
        self._plan = plan
        self._inside: dict[str, IgnoreRules | None] = {}

    def __enter__(self) -> WalkRules:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handles.__exit__(kind, error, tb)

    def holds(self, path: RepoPath) -> bool:
        """Whether neither the path nor a directory between it and the base is ignored. The path may not exist."""
        rules = self._rules_in(parent_of(path))
        return rules is not None and not rules.ignores(name_of(path), is_dir=False)

    def _rules_in(self, directory: RepoPath) -> IgnoreRules | None:
        """The rules inside a directory; None if a walk would not enter it."""
        missing = [directory]
        while missing[-1] not in self._inside and missing[-1] != self._plan.base:
            missing.append(parent_of(missing[-1]))
        for one in reversed(missing):
            if one not in self._inside:
                self._inside[one] = self._read_rules(one)
        return self._inside[directory]

    def _read_rules(self, directory: RepoPath) -> IgnoreRules | None:
        if directory == self._plan.base:
            inside = self._plan.rules.inside(directory)
        else:
            above = self._inside[parent_of(directory)]
            if above is None or above.ignores(name_of(directory), is_dir=True):
                return None
            inside = above.child(name_of(directory))
        try:
            return inside.with_sources(read_sources(self._handles.directory(directory), MARKS))
        except OSError:
            return None


FIRST_FILES = 128
BATCH_FILES = 2_048
BATCH_BYTES = 96 * KIB_BYTES
PRUNED_MAX = 1_000
# How long ripgrep walks alone. After that Mulligan checks whether it is in ignored directories.
PATIENCE_S = 0.4

_PLAIN_PATH = re.compile(r"[\w./@+-]+", re.ASCII)


def search(job: SearchJob, selection: Selection, program: str, walk: Walk | None) -> list[Line]:
    """The first `job.limit` matching lines. `walk`: where the selection comes from, if it went everywhere.

    Raises Refused: `regex_timeout`, `invalid_regex`.
    """
    return _Search(job, program).run(selection, walk)


@fast_dataclass(slots=True)
class _Ahead:
    """A ripgrep that walks by itself, and the number of ignored directories that were known when it started."""

    run: RipgrepRun
    walk: Walk
    excluded: int

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.run.__exit__(kind, error, tb)

    def hits(self, job: SearchJob) -> Hits | None:
        """All matches, if it has ended or enters no ignored directory. Otherwise Mulligan stops it: None."""
        if self.walk.complete and (self.excluded == len(self.walk.pruned) or self.run.has_ended):
            hits = self.run.hits(PATIENCE_S)
            if hits is not None or not _large_files(job, self.walk):
                return hits or self.run.hits()
        self.run.kill()
        return None


@fast_dataclass(slots=True)
class _Search:
    job: SearchJob
    program: str

    def run(self, selection: Selection, walk: Walk | None) -> list[Line]:
        first = list(islice(selection, FIRST_FILES))
        with self._start_early(first, selection, walk) as ahead:
            found = self._by_name(first, self.job.limit)
            wanted = self.job.limit - len(found)
            if wanted <= 0 or len(first) < FIRST_FILES:
                return found
            return found + self._after(first[-1], selection, wanted, walk=walk, ahead=ahead)

    def _start_early(
        self, first: list[RepoPath], selection: Selection, walk: Walk | None
    ) -> AbstractContextManager[_Ahead | None]:
        """Start it if more than the first files must be searched, and apparently most of the tree."""
        if walk is None or selection.is_bounded or len(first) < FIRST_FILES:
            return nullcontext()
        searched = next(number for number, path in enumerate(walk, 1) if path == first[-1])
        return self._start_walking(walk) if _is_worth_walking(walk, len(first), searched) else nullcontext()

    def _start_walking(self, walk: Walk, *options: str) -> _Ahead:
        """Start ripgrep on the whole tree, without the directories that are known to be ignored."""
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
        except TooMuchOutputError:
            return self._in_batches(selection, wanted)  # So many lines match that the first few batches are enough.
        if soon is not None and soon.all_named and walk is not None:
            return self._after_rules(soon, last, selection, walk=walk, wanted=wanted)
        rest = list(selection)
        try:
            hits = self._by_walking(len(rest), walk, ahead) if soon is None else soon
        except TooMuchOutputError:
            hits = None
        return self._in_batches(rest, wanted) if hits is None else self._confirmed(rest, hits, wanted)

    def _after_rules(self, hits: Hits, last: RepoPath, selection: Selection, *, walk: Walk, wanted: int) -> list[Line]:
        """The lines of those files that the selection contains."""
        raw_last = path_bytes(last)
        after = sorted((raw, path) for path in map(RepoPath, hits.by_path) if (raw := path_bytes(path)) > raw_last)
        with WalkRules(self.job.root_fd, walk.plan) as reach:
            paths = (path for _, path in after if selection.wants(path) and reach.holds(path))
            return self._confirmed(paths, hits, wanted)

    def _by_walking(self, wanted: int, walk: Walk | None, ahead: _Ahead | None) -> Hits | None:
        """The matches of a ripgrep that walks by itself; None if naming the files is better."""
        hits = None if ahead is None else ahead.hits(self.job)
        if hits is not None or walk is None or not walk.complete:
            return hits
        if not _is_worth_walking(walk, wanted, walk.file_count):
            return None
        with self._start_walking(walk, f"--max-filesize={WHOLE_MAX_BYTES}") as again:
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
        hits = Hits()
        if named:
            with RipgrepRun(self.job, self.program, named) as run:
                hits = run.hits() or hits
        return self._confirmed(paths, replace(hits, unasked=large), wanted)

    def _confirmed(self, paths: Iterable[RepoPath], hits: Hits, wanted: int) -> list[Line]:
        """Up to `wanted` lines of those paths with matches. Mulligan reads them itself."""
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
        """`hits` is None for a file that ripgrep did not search, or whose name its output cannot show."""
        self.job.left_s()
        return None if hits is None else _read_lines(handles, path, hits)


def _is_worth_walking(walk: Walk, wanted: int, searched: int) -> bool:
    """Whether most of the files that ripgrep would search by itself are wanted, as far as Mulligan knows."""
    excludable = len(walk.pruned) <= PRUNED_MAX and sum(map(len, walk.pruned)) <= BATCH_BYTES
    return excludable and 2 * wanted >= searched and walk.ignored_files <= walk.file_count


def _batches(paths: Iterable[RepoPath]) -> Iterator[list[RepoPath]]:
    """The paths in order, in lists that are short enough for a command line."""
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


def _large_files(job: SearchJob, walk: Walk) -> list[RepoPath]:
    """The large files that ripgrep would search, wanted or not."""
    found: list[RepoPath] = []
    with Handles(job.root_fd) as handles:
        for folder, place in walk.places.items():
            job.left_s()
            paths = (join(RepoPath(folder), name) for name in (*place.kept, *place.ignored) if name[-1] != "/")
            found += [path for path in paths if handles.size_bytes(path) > WHOLE_MAX_BYTES]
    return found


def _read_lines(handles: Handles, path: RepoPath, hits: list[Hit]) -> list[Line] | None:
    """The matching lines; None if the native engine must search the file."""
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
