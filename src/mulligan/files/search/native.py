"""The search engine without ripgrep, and what both engines share: `SearchJob`, `Line`, and the base of a search.

`search` answers grep: it gets a `SearchJob` and returns its lines. `Matcher` answers `snapshot.grep`, which also wants
the column of each match. Both find lines with a `Finder`: `LiteralFinder` for plain text, `Re2Finder` for every other
pattern. A finder gets blocks of whole lines, in which only the last line may lack its newline.

RE2 takes time linear in the text, so it needs no child process that can be killed. But it cannot be interrupted within
a block, and the time for each byte grows with the pattern. So the engine searches for a wide pattern in smaller blocks,
in a thread for which it stops waiting when the time is over.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from itertools import chain, islice
from typing import Any, Protocol

from mulligan.files.search.pattern import Chars, Node, Seq, for_re2, parse, required_literal, steps_of
from mulligan.files.tree.directories import Handles, open_regular
from mulligan.files.tree.index import TreeCache
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import Refused, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import BINARY_PROBE_BYTES, KIB_BYTES, MIB_BYTES, WHOLE_MAX_BYTES
from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of

TEXT_MAX_BYTES = 2_000
# The bytes of a line that decide what is shown of it: with a `\r`, and one byte more.
READ_AHEAD_BYTES = TEXT_MAX_BYTES + 2

BOM = b"\xef\xbb\xbf"


@fast_dataclass(slots=True, frozen=True)
class Line:
    """A line that matches. `text` has no line ending and no byte order mark; `cut` if its end is not shown."""

    path: RepoPath
    line_no: int
    text: bytes
    cut: bool = False

    @property
    def shown(self) -> str:
        return self.text.decode("utf-8", "replace") + ("…" if self.cut else "")


@fast_dataclass(slots=True, frozen=True)
class SearchJob:
    """Find the first `limit` lines that match `tree`, in order, before `deadline_s` of the monotonic clock.

    `admits` tells whether the caller may see a file. It may be slow, so it is called only for files with a match.
    """

    root_fd: int
    tree: Node
    limit: int
    deadline_s: float
    admits: Callable[[RepoPath], bool]

    def left_s(self) -> float:
        """The seconds that are left. Raises Refused `regex_timeout` if there are none."""
        left = self.deadline_s - monotonic_s()
        if left <= 0:
            raise too_slow()
        return left


@fast_dataclass(slots=True)
class Selection:
    """The files to search, in order: those of a walk that `wants` accepts, or a list."""

    source: Iterable[RepoPath]
    wants: Callable[[RepoPath], bool]
    # Whether a scan limit may end the selection before its source ends.
    is_bounded: bool = False
    _rest: Iterator[RepoPath] | None = None

    def __iter__(self) -> Iterator[RepoPath]:
        """Each file once: a second loop continues where the first one stopped."""
        if self._rest is None:
            self._rest = iter(self.source)
        return self._rest


def too_slow() -> Refused:
    return Refused("error", "regex_timeout", "The search did not end in time; narrow the path or simplify the pattern.")


def is_binary(head: bytes) -> bool:
    """Whether a file that begins with these bytes is binary."""
    return head.find(b"\0", 0, BINARY_PROBE_BYTES) >= 0


def without_bom(text: bytes) -> bytes:
    """The beginning of a file without its byte order mark. A file with nothing else has one empty line."""
    return (text[len(BOM) :] or b"\n") if text.startswith(BOM) else text


def shown_text(raw: bytes) -> tuple[bytes, bool]:
    """The part of a line that is shown, and whether it is cut, given the first READ_AHEAD_BYTES of the line."""
    text = raw.removesuffix(b"\r") if len(raw) < READ_AHEAD_BYTES else raw
    if len(text) <= TEXT_MAX_BYTES:
        return text, False
    for end in range(TEXT_MAX_BYTES, TEXT_MAX_BYTES - 4, -1):
        if text[end] & 0xC0 != 0x80:
            return text[:end], True
    return text[:TEXT_MAX_BYTES], True


SHARED_CACHE = TreeCache()
"""The cache of this process. Callers with different rights can share it, because it only saves reading again."""


def admit_all(path: RepoPath) -> bool:
    """For a search in which the caller may see every file."""
    return True


@contextmanager
def refusing_bad_base(base: RepoPath) -> Iterator[None]:
    """Turn an error at the base of a search into a refusal. The walk itself skips errors further down."""
    try:
        yield
    except OSError as error:
        raise _refusal(base, error) from error


def base_is_directory(root_fd: int, base: RepoPath) -> bool:
    """Whether the base is a directory. Raises OSError if it is neither a directory nor a regular file."""
    if base == ROOT:
        return True
    with Handles(root_fd) as handles:
        mode = os.stat(name_of(base), dir_fd=handles.directory(parent_of(base)), follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "a symlink", base)
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise OSError(errno.ENOTDIR, "a special file", base)
    return stat.S_ISDIR(mode)


def _refusal(base: RepoPath, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return Refused("not_found", "path_not_found", f"{base} does not exist.")
    if error.errno == errno.ELOOP:
        return Refused("forbidden", "symlink_not_allowed", f"{base} leads through a symlink.")
    if error.errno == errno.ENOTDIR:
        return Refused("error", "not_directory", f"{base} is not a directory.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused("forbidden", "forbidden", f"{base} may not be read.")
    return fault_of_os_error(error, f"Searching {base}")


BLOCK_BYTES = 4 * MIB_BYTES
WIDE_PATTERN_STEPS = 300
# RE2 was measured at 6 microseconds a byte for 900 steps: 1.5 seconds for such a block.
WIDE_PATTERN_BLOCK_BYTES = 256 * KIB_BYTES

_RE2_MEMORY_BYTES = 64 * MIB_BYTES
# A shorter literal is too common to look for line by line.
_SEEK_MIN_BYTES = 3


class Finder(Protocol):
    def starts(self, block: bytes) -> Iterator[int]:
        """The offset of each matching line, in order."""
        ...

    def first_in(self, line: bytes) -> int | None:
        """The offset of the leftmost match in a line."""
        ...


def finder_for(tree: Node) -> Finder:
    literal = required_literal(tree)
    return LiteralFinder(literal) if _is_plain(tree) else Re2Finder(for_re2(tree), literal)


def _is_plain(tree: Node) -> bool:
    """Whether the pattern is plain text."""
    items = tree.items if isinstance(tree, Seq) else (tree,)
    return bool(items) and all(isinstance(item, Chars) and item.is_single for item in items)


class LiteralFinder:
    def __init__(self, literal: bytes) -> None:
        self._literal = literal

    def starts(self, block: bytes) -> Iterator[int]:
        return (begin for begin, _ in _lines_with(block, self._literal))

    def first_in(self, line: bytes) -> int | None:
        at = line.find(self._literal)
        return None if at < 0 else at


def _lines_with(block: bytes, literal: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of every line that contains the literal."""
    at = 0
    while (hit := block.find(literal, at)) >= 0:
        end = block.find(b"\n", hit)
        end = len(block) if end < 0 else end
        yield block.rfind(b"\n", 0, hit) + 1, end
        at = end + 1


class Re2Finder:
    def __init__(self, expression: str, literal: bytes) -> None:
        import re2  # Imported here, because it is slow to load and most commands do not search.

        options = re2.Options()
        options.log_errors = False
        options.never_capture = True
        options.max_mem = _RE2_MEMORY_BYTES
        self._search: Callable[..., Any] = re2.compile(expression, options).search
        self._literal = literal

    def starts(self, block: bytes) -> Iterator[int]:
        if len(self._literal) >= _SEEK_MIN_BYTES:
            return self._near_literal(block)
        return self._anywhere(block) if self._literal in block else iter(())

    def first_in(self, line: bytes) -> int | None:
        hit = self._search(line)
        return None if hit is None else int(hit.start())

    def _near_literal(self, block: bytes) -> Iterator[int]:
        search = self._search
        return (begin for begin, end in _lines_with(block, self._literal) if search(block, begin, end) is not None)

    def _anywhere(self, block: bytes) -> Iterator[int]:
        at, size = 0, len(block)
        while at < size and (hit := self._search(block, at)) is not None:
            start = hit.start()
            if start == size and block.endswith(b"\n"):
                return  # There is no line after the last newline.
            yield block.rfind(b"\n", 0, start) + 1
            end = block.find(b"\n", start)
            at = size if end < 0 else end + 1


@fast_dataclass(slots=True, frozen=True)
class Match:
    """`line` and `col` count from 1, `col` in code points of the line without a byte order mark."""

    line: int
    col: int
    text: str


class Matcher:
    """A parsed pattern. Raises Refused `invalid_regex` for a pattern that RE2 and Rust's regex do not both accept."""

    def __init__(self, pattern: str, *, case_insensitive: bool) -> None:
        self._finder = finder_for(parse(pattern, case_insensitive=case_insensitive))

    def matches(self, data: bytes) -> Iterator[Match]:
        """One match for each matching line of a file's bytes, in order."""
        data = without_bom(data)
        line_no, counted = 1, 0
        for begin in self._finder.starts(data):
            line_no += data.count(b"\n", counted, begin)
            counted = begin
            end = data.find(b"\n", begin)
            line = data[begin : len(data) if end < 0 else end]
            first = self._finder.first_in(line)
            if first is not None:
                # A byte that is not UTF-8 counts as one code point: a surrogate.
                col = len(line[:first].decode("utf-8", "surrogateescape")) + 1
                yield Match(line_no, col, shown_text(line)[0].decode("utf-8", "replace"))


class _DeadlineFinder:
    """Waits for another finder only as long as the job has time. Raises Refused `regex_timeout`.

    RE2 gives up Python's global lock while it searches, so this thread notices the deadline. The abandoned thread holds
    only the block, and ends when RE2 has read it.
    """

    def __init__(self, finder: Finder, job: SearchJob) -> None:
        self._finder = finder
        self._job = job

    def starts(self, block: bytes) -> Iterator[int]:
        answers: list[list[int]] = []
        # One more than the limit: the first line of a block may be the rest of a line that is already counted.
        wanted = self._job.limit + 1
        worker = threading.Thread(
            target=lambda: answers.append(list(islice(self._finder.starts(block), wanted))), daemon=True
        )
        worker.start()
        worker.join(self._job.left_s())
        if not answers:
            raise too_slow()
        return iter(answers[0])

    def first_in(self, line: bytes) -> int | None:
        return self._finder.first_in(line)


def search(job: SearchJob, paths: Iterable[RepoPath]) -> list[Line]:
    """The first `job.limit` matching lines. Raises Refused `regex_timeout`."""
    finder, block_bytes = finder_for(job.tree), BLOCK_BYTES
    if steps_of(job.tree) > WIDE_PATTERN_STEPS:
        finder, block_bytes = _DeadlineFinder(finder, job), min(BLOCK_BYTES, WIDE_PATTERN_BLOCK_BYTES)
    return _FileSearch(job, finder, block_bytes).among(paths)


@fast_dataclass(slots=True)
class _FileSearch:
    job: SearchJob
    finder: Finder
    block_bytes: int
    found: list[Line] = field(default_factory=list)

    def among(self, paths: Iterable[RepoPath]) -> list[Line]:
        with Handles(self.job.root_fd) as handles:
            for path in paths:
                self.job.left_s()
                try:
                    self._search_file(handles, path)
                except OSError:
                    continue  # Another process has deleted or replaced it, or we may not read it.
                if len(self.found) >= self.job.limit:
                    break
        return self.found

    def _search_file(self, handles: Handles, path: RepoPath) -> None:
        parent, _, name = path.rpartition("/")
        fd, status = open_regular(handles.directory(parent or ROOT), name)
        try:
            line_no = 1
            for number, block in enumerate(self._blocks(fd, status.st_size)):
                text = block if number else without_bom(block)
                if not self._search_block(text, path, line_no):
                    break
                line_no += text.count(b"\n")
        finally:
            os.close(fd)

    def _blocks(self, fd: int, size: int) -> Iterator[bytes]:
        """The bytes of a text file in blocks of whole lines; a very long line comes in pieces. Mostly one block."""
        wanted = min(max(size + 1, BINARY_PROBE_BYTES), self.block_bytes)
        data = os.read(fd, wanted)
        if is_binary(data):
            return
        if len(data) == size < wanted:
            yield data
            return
        pending = b""
        while data:
            self.job.left_s()
            pending += data
            end = pending.rfind(b"\n") + 1 or (len(pending) if len(pending) >= WHOLE_MAX_BYTES else 0)
            if end:
                yield pending[:end]
                pending = pending[end:]
            data = os.read(fd, self.block_bytes)
        if pending:
            yield pending

    def _search_block(self, block: bytes, path: RepoPath, line_no: int) -> bool:
        """Add the lines of a block. False: the rest of the file need not be searched."""
        starts = self.finder.starts(block)
        first = next(starts, None)
        if first is None:
            return True
        if not self.job.admits(path):
            return False
        counted = 0
        for begin in chain((first,), starts):
            line_no += block.count(b"\n", counted, begin)
            counted = begin
            if begin == 0 and self._has_last(path, line_no):
                continue  # This is a later piece of a line that was added already.
            self.found.append(Line(path, line_no, *shown_text(_raw_line(block, begin))))
            if len(self.found) >= self.job.limit:
                return False
        return True

    def _has_last(self, path: RepoPath, line_no: int) -> bool:
        return bool(self.found) and (self.found[-1].path, self.found[-1].line_no) == (path, line_no)


def _raw_line(block: bytes, begin: int) -> bytes:
    end = block.find(b"\n", begin, begin + READ_AHEAD_BYTES)
    return block[begin : begin + READ_AHEAD_BYTES] if end < 0 else block[begin:end]
