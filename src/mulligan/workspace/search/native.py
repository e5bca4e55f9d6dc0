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

from mulligan.values.faults import fault
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import ROOT, RepoPath
from mulligan.workspace.search.expression import steps_of
from mulligan.workspace.search.finders import Finder, Recipe, make_finder, recipe_for
from mulligan.workspace.search.findings import (
    READ_AHEAD_BYTES,
    Job,
    Line,
    Selection,
    is_binary,
    shown_text,
    too_slow,
)
from mulligan.workspace.search.handles import Handles, open_regular

BLOCK_BYTES = 4 * MIB_BYTES
STEPS_IN_PROCESS_MAX = 300


def search(job: Job, selection: Selection) -> list[Line]:
    """The first `job.limit` matching lines. Raises Refused `regex_timeout`."""
    recipe = recipe_for(job.tree)
    if recipe.kind == "re" or steps_of(job.tree) > STEPS_IN_PROCESS_MAX:
        return _search_in_child(job, recipe, list(selection))
    return search_files(job.root_fd, selection, make_finder(recipe), limit=job.limit, still_time=job.left_s)


def search_files(
    root_fd: int, paths: Iterable[RepoPath], finder: Finder, *, limit: int, still_time: Callable[[], object]
) -> list[Line]:
    """The search itself. `still_time` is called often and raises when there is none left."""
    found: list[Line] = []
    with Handles(root_fd) as handles:
        for path in paths:
            still_time()
            try:
                _search_file(handles, path, finder, found=found, limit=limit, still_time=still_time)
            except OSError:
                continue  # gone, unreadable or no longer a file: as if it were not there
            if len(found) >= limit:
                break
    return found


def _search_file(
    handles: Handles,
    path: RepoPath,
    finder: Finder,
    *,
    found: list[Line],
    limit: int,
    still_time: Callable[[], object],
) -> None:
    parent, _, name = path.rpartition("/")
    fd, status = open_regular(handles.directory(parent or ROOT), name)
    try:
        line_no, offset = 1, 0
        for block in _blocks(fd, status.st_size):
            if offset == 0 and is_binary(block):
                return
            still_time()
            counted = 0
            for begin in finder.starts(block):
                line_no += block.count(b"\n", counted, begin)
                counted = begin
                found.append(_line(path, line_no, block, begin, offset + begin))
                if len(found) >= limit:
                    return
            line_no += block.count(b"\n", counted)
            offset += len(block)
    finally:
        os.close(fd)


def _line(path: RepoPath, line_no: int, block: bytes, begin: int, offset: int) -> Line:
    end = block.find(b"\n", begin, begin + READ_AHEAD_BYTES)
    raw = block[begin : begin + READ_AHEAD_BYTES] if end < 0 else block[begin:end]
    return Line(path, line_no, *shown_text(raw, offset))


def _blocks(fd: int, size: int) -> Iterator[bytes]:
    """The bytes of a file in blocks of whole lines. Small files come in one read."""
    wanted = min(size + 1, BLOCK_BYTES)
    pending: list[bytes] = []
    while data := os.read(fd, wanted):
        cut = data.rfind(b"\n") + 1
        if len(data) < wanted and len(data) == size and not pending:
            yield data
            return
        if not cut:
            pending.append(data)
            continue
        yield b"".join([*pending, data[:cut]])
        pending = [data[cut:]] if cut < len(data) else []
    if pending:
        yield b"".join(pending)


def _search_in_child(job: Job, recipe: Recipe, paths: list[RepoPath]) -> list[Line]:
    command = [sys.executable, "-P", "-m", "mulligan.workspace.search.child"]
    request = marshal.dumps((job.root_fd, tuple(recipe), paths, job.limit))
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
