"""The engine that runs ripgrep, and trusts it with nothing but speed.

Ripgrep says where lines match; what is shown is read by us, through descriptors that follow no symlink, and a line that
is not there as ripgrep saw it is searched again from our own descriptor. Ripgrep's ignore rules, which are not quite
git's, its configuration, its idea of binary files and its transcoding are all switched off.

Order and an early end go together so: the first files are handed over by name, and often they are enough. For the rest
ripgrep walks by itself, which is faster than naming every file, and what we did not select is dropped.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from mulligan.values.faults import fault
from mulligan.values.limits import BINARY_PROBE_BYTES, KIB_BYTES, MIB_BYTES
from mulligan.values.paths import ROOT, RepoPath, path_bytes
from mulligan.values.refusal import Refused
from mulligan.workspace.search.findings import READ_AHEAD_BYTES, Job, Line, Selection, is_binary, shown_text, too_slow
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.spelling import for_rust
from mulligan.workspace.search.walk import Walk

FIRST_FILES = 128
BATCH_FILES = 2_048
BATCH_BYTES = 96 * KIB_BYTES
OUTPUT_MAX_BYTES = 32 * MIB_BYTES
PRUNED_MAX = 1_000
COLUMNS_MAX = 1_000
"""Longer lines are not printed; the place is enough."""

_PLAIN_PATH = re.compile(r"[\w./@+-]+", re.ASCII)

_OPTIONS = (
    "--no-config --no-ignore --hidden --no-follow --text --encoding=none --no-mmap --no-messages --no-pcre2 "
    "--color=never --no-heading --with-filename --line-number --byte-offset --null --no-multiline --no-crlf "
    f"--case-sensitive --regex-size-limit=1G --max-columns={COLUMNS_MAX}"
).split()


class Hit(NamedTuple):
    """A matching line as ripgrep saw it. `text` may be a note that the line was too long to print."""

    line_no: int
    offset: int
    text: bytes


class _TooMuchOutput(Exception):
    """More came than can be of use."""


def find_ripgrep() -> str | None:
    """The program: beside this interpreter, where the `search` extra puts it, else on the PATH."""
    folders = [os.path.join(sys.prefix, "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    for folder in folders:
        program = os.path.join(folder, "rg")
        if os.path.isabs(folder) and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


def search(job: Job, selection: Selection, program: str, walk: Walk | None) -> list[Line]:
    """The first `job.limit` matching lines. `walk`: where the selection comes from, if it went everywhere.

    Raises Refused `regex_timeout`.
    """
    return _Search(job, program).run(selection, walk)


@dataclass(slots=True)
class _Search:
    job: Job
    program: str

    def run(self, selection: Selection, walk: Walk | None) -> list[Line]:
        found = self._by_name(list(islice(selection, FIRST_FILES)), self.job.limit)
        rest = list(selection) if len(found) < self.job.limit else []
        if not rest:
            return found
        wanted = self.job.limit - len(found)
        if walk is not None and _is_worth_walking(walk, len(rest)):
            try:
                return found + self._by_walking(walk, rest, wanted)
            except _TooMuchOutput:
                pass  # so many lines match that the first few batches will do
        return found + self._in_batches(rest, wanted)

    def _by_walking(self, walk: Walk, rest: list[RepoPath], wanted: int) -> list[Line]:
        excluded = [f"--glob=!/{path}" for path in walk.pruned if _PLAIN_PATH.fullmatch(path)]
        base = "./" if walk.plan.base == ROOT else f"./{walk.plan.base}/"
        hits = self._hits([*excluded, "--glob=!.git"], [base.encode("utf-8", "surrogateescape")])
        return self._confirmed(rest, hits, wanted)

    def _in_batches(self, paths: list[RepoPath], wanted: int) -> list[Line]:
        found: list[Line] = []
        for batch in _batches(paths):
            found += self._by_name(batch, wanted - len(found))
            if len(found) >= wanted:
                break
        return found

    def _by_name(self, paths: list[RepoPath], wanted: int) -> list[Line]:
        named = [b"./" + path_bytes(path) for path in paths if "\n" not in path]
        return self._confirmed(paths, self._hits([], named) if named else {}, wanted)

    def _confirmed(self, paths: list[RepoPath], hits: dict[str, list[Hit]], wanted: int) -> list[Line]:
        """The lines of those of the paths that were hit, read by us, up to `wanted`."""
        found: list[Line] = []
        with Handles(self.job.root_fd) as handles:
            for path in paths:
                if (path in hits or "\n" in path) and self.job.admits(path):
                    found += self._lines_of(handles, path, hits.get(path))
                    if len(found) >= wanted:
                        break
        return found[:wanted]

    def _lines_of(self, handles: Handles, path: RepoPath, hits: list[Hit] | None) -> list[Line]:
        """`hits` is None for a file whose name ripgrep's output cannot carry."""
        self.job.left_s()
        try:
            fd = handles.open_file(path)
        except OSError:
            return []
        try:
            if is_binary(os.pread(fd, BINARY_PROBE_BYTES, 0)):
                return []
            lines = None if hits is None else _read_lines(fd, path, hits)
            return self._search_again(fd, path) if lines is None else lines
        except OSError:
            return []
        finally:
            os.close(fd)

    def _search_again(self, fd: int, path: RepoPath) -> list[Line]:
        """What our own descriptor holds, given to ripgrep to read."""
        hits = self._hits([], [b"-"], stdin=fd).get("<stdin>", [])
        return [Line(path, hit.line_no, *shown_text(_raw_line(fd, hit.offset), hit.offset)) for hit in hits]

    def _hits(
        self, options: Sequence[str], paths: Sequence[bytes], stdin: int = subprocess.DEVNULL
    ) -> dict[str, list[Hit]]:
        pattern = f"--regexp={for_rust(self.job.tree)}"
        settings = [*_OPTIONS, f"--max-count={self.job.limit}", *options]
        command: list[str | bytes] = [self.program, *settings, pattern, "--", *paths]
        with self._start(command, stdin) as process:
            try:
                output = self._read(process)
            except subprocess.TimeoutExpired:
                raise too_slow() from None
            finally:
                process.kill()
        self._check(process.returncode)
        return _parse(output)

    def _start(self, command: Sequence[str | bytes], stdin: int) -> subprocess.Popen[bytes]:
        """In the root by its descriptor, not by its name."""
        on_linux = os.path.isdir("/proc/self/fd")
        return subprocess.Popen(
            command,
            cwd=f"/proc/self/fd/{self.job.root_fd}" if on_linux else None,
            preexec_fn=None if on_linux else lambda: os.fchdir(self.job.root_fd),
            env={},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        chunks: list[bytes] = []
        room = max(OUTPUT_MAX_BYTES, 2 * KIB_BYTES * self.job.limit)
        while True:
            poll.poll(self.job.left_s() * 1000)
            self.job.left_s()
            chunk = os.read(fd, MIB_BYTES)
            chunks.append(chunk)
            room -= len(chunk)
            if room < 0:
                raise _TooMuchOutput
            if not chunk:
                process.wait(self.job.left_s())
                return b"".join(chunks)

    def _check(self, returncode: int) -> None:
        """Code 2 also means that a file could not be read, which is no matter; or that the pattern was refused."""
        if returncode in (0, 1):
            return
        probe = [self.program, *_OPTIONS, f"--regexp={for_rust(self.job.tree)}", "-"]
        with self._start(probe, subprocess.DEVNULL) as process:
            try:
                code = process.wait(self.job.left_s())
            except subprocess.TimeoutExpired:
                raise too_slow() from None
            finally:
                process.kill()
        if code not in (0, 1) and returncode == 2:
            raise Refused("invalid_regex", "invalid_regex", "This pattern is too large to be searched for.")
        if returncode != 2:
            raise fault("internal", "ripgrep ended without an answer.", returncode=returncode)


def _is_worth_walking(walk: Walk, wanted: int) -> bool:
    """Whether most of what ripgrep would come across by itself is wanted."""
    excludable = len(walk.pruned) <= PRUNED_MAX and sum(map(len, walk.pruned)) <= BATCH_BYTES
    return walk.complete and excludable and 2 * wanted >= len(walk.files) + walk.ignored_files


def _batches(paths: list[RepoPath]) -> Iterator[list[RepoPath]]:
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


def _parse(output: bytes) -> dict[str, list[Hit]]:
    """`./path NUL line:offset:text` by path. A line that is not of this form is part of a name with a newline in it."""
    hits: dict[str, list[Hit]] = {}
    for row in output.split(b"\n"):
        path, _, rest = row.partition(b"\0")
        line_no, _, rest = rest.partition(b":")
        offset, _, text = rest.partition(b":")
        if line_no.isdigit() and offset.isdigit():
            name = path.removeprefix(b"./").decode("utf-8", "surrogateescape")
            hits.setdefault(name, []).append(Hit(int(line_no), int(offset), text))
    return hits


def _read_lines(fd: int, path: RepoPath, hits: list[Hit]) -> list[Line] | None:
    """The lines that were hit, from our own descriptor; None when one of them is not what ripgrep saw there."""
    lines = []
    for hit in hits:
        if hit.offset and os.pread(fd, 1, hit.offset - 1) != b"\n":
            return None
        raw = _raw_line(fd, hit.offset)
        if len(raw) <= COLUMNS_MAX and raw != hit.text:
            return None
        lines.append(Line(path, hit.line_no, *shown_text(raw, hit.offset)))
    return lines


def _raw_line(fd: int, offset: int) -> bytes:
    return os.pread(fd, READ_AHEAD_BYTES, offset).partition(b"\n")[0]
