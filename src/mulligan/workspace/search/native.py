"""The engine without ripgrep: whole files, searched by RE2 in this process or in a child that can be killed.

RE2 takes time linear in the text, so it may run here, with a look at the clock between blocks. Two things go to a child
(`child.py`) instead: Python's own `re`, when RE2 is not installed, because it can take forever; and patterns so wide
that even a linear search of one block may pass the limit.
"""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from mulligan.values.faults import fault
from mulligan.values.limits import BINARY_PROBE_BYTES, MIB_BYTES, WHOLE_MAX_BYTES
from mulligan.values.paths import ROOT, RepoPath
from mulligan.workspace.search.expression import steps_of
from mulligan.workspace.search.finders import Finder, Recipe, make_finder, recipe_for
from mulligan.workspace.search.findings import (
    READ_AHEAD_BYTES,
    Job,
    Line,
    is_binary,
    shown_text,
    too_slow,
    without_bom,
)
from mulligan.workspace.search.handles import Handles, open_regular

BLOCK_BYTES = 4 * MIB_BYTES
STEPS_IN_PROCESS_MAX = 300


def search(job: Job, paths: Iterable[RepoPath]) -> list[Line]:
    """The first `job.limit` matching lines. Raises Refused `regex_timeout`."""
    recipe = recipe_for(job.tree)
    if recipe.kind == "re" or steps_of(job.tree) > STEPS_IN_PROCESS_MAX:
        return _search_in_child(job, recipe, list(paths))
    return FileSearch(job.root_fd, make_finder(recipe), job.limit, job.admits, job.left_s).among(paths)


@dataclass(slots=True)
class FileSearch:
    """The search itself. `still_time` is called often and raises when there is none left."""

    root_fd: int
    finder: Finder
    limit: int
    admits: Callable[[RepoPath], bool]
    still_time: Callable[[], object]
    found: list[Line] = field(default_factory=list)

    def among(self, paths: Iterable[RepoPath]) -> list[Line]:
        with Handles(self.root_fd) as handles:
            for path in paths:
                self.still_time()
                try:
                    self._search_file(handles, path)
                except OSError:
                    continue  # gone, unreadable or no longer a file: as if it were not there
                if len(self.found) >= self.limit:
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
        """The bytes of a text file in blocks of whole lines, a line that is too long in pieces. Mostly one block."""
        wanted = min(max(size + 1, BINARY_PROBE_BYTES), BLOCK_BYTES)
        data = os.read(fd, wanted)
        if is_binary(data):
            return
        if len(data) == size < wanted:
            yield data
            return
        pending = b""
        while data:
            self.still_time()
            pending += data
            end = pending.rfind(b"\n") + 1 or (len(pending) if len(pending) >= WHOLE_MAX_BYTES else 0)
            if end:
                yield pending[:end]
                pending = pending[end:]
            data = os.read(fd, BLOCK_BYTES)
        if pending:
            yield pending

    def _search_block(self, block: bytes, path: RepoPath, line_no: int) -> bool:
        """Whether to go on with the file."""
        starts = self.finder.starts(block)
        first = next(starts, None)
        if first is None:
            return True
        if not self.admits(path):
            return False
        counted = 0
        for begin in chain((first,), starts):
            line_no += block.count(b"\n", counted, begin)
            counted = begin
            if begin == 0 and self._has_last(path, line_no):
                continue  # a piece further on of the same line
            self.found.append(Line(path, line_no, *shown_text(_raw_line(block, begin))))
            if len(self.found) >= self.limit:
                return False
        return True

    def _has_last(self, path: RepoPath, line_no: int) -> bool:
        return bool(self.found) and (self.found[-1].path, self.found[-1].line_no) == (path, line_no)


def _raw_line(block: bytes, begin: int) -> bytes:
    end = block.find(b"\n", begin, begin + READ_AHEAD_BYTES)
    return block[begin : begin + READ_AHEAD_BYTES] if end < 0 else block[begin:end]


def _search_in_child(job: Job, recipe: Recipe, paths: list[RepoPath]) -> list[Line]:
    """It cannot ask `admits`, so only what is admitted is sent."""
    command = [sys.executable, "-P", "-m", "mulligan.workspace.search.child"]
    request = marshal.dumps((job.root_fd, tuple(recipe), [path for path in paths if job.admits(path)], job.limit))
    child = subprocess.Popen(
        command,
        cwd="/",
        env={"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[job.root_fd],
    )
    with child:
        try:
            answer, _ = child.communicate(request, timeout=job.left_s())
        except subprocess.TimeoutExpired:
            raise too_slow() from None
        finally:
            child.kill()
    if child.returncode != 0:
        raise fault("internal", "The process that searches ended without an answer.", returncode=child.returncode)
    return [Line(RepoPath(path), line_no, text, cut) for path, line_no, text, cut in marshal.loads(answer)]
