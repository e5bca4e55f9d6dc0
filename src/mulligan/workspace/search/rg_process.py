"""A ripgrep at work: how it is asked, how long it may take, what its answer means.

Its ignore rules, which are not quite git's, its configuration, its idea of binary files and its transcoding are all
switched off.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from mulligan.values.clock import monotonic_s
from mulligan.values.faults import fault
from mulligan.values.limits import KIB_BYTES, MIB_BYTES
from mulligan.values.refusal import Refused
from mulligan.workspace.search.findings import Job, too_slow
from mulligan.workspace.search.spelling import for_rust

OUTPUT_MAX_BYTES = 32 * MIB_BYTES
COLUMNS_MAX = 1_000
"""Longer lines are not printed; the place is enough."""

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


@dataclass(slots=True)
class Hits:
    """What was found, by path from the root. `all_named`: no file found has a name that the output cannot carry.

    `unasked`: files that were not to be searched.
    """

    by_path: dict[str, list[Hit]] = field(default_factory=dict)
    all_named: bool = True
    unasked: frozenset[str] = frozenset()


class TooMuchOutput(Exception):
    """More came than can be of use."""


def find_ripgrep() -> str | None:
    """The program: beside this interpreter, where the `search` extra puts it, else on the PATH."""
    folders = [os.path.join(sys.prefix, "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    for folder in folders:
        program = os.path.join(folder, "rg")
        if os.path.isabs(folder) and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


class RipgrepRun:
    """One process. Leave `with`, and it has ended."""

    def __init__(self, job: Job, program: str, paths: Sequence[bytes], *, options: Sequence[str] = ()) -> None:
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
        """All that it finds; None when it takes longer than that, and then it may be asked again.

        Raises TooMuchOutput, and Refused: `regex_timeout`, `invalid_regex`.
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
        """Whether all output has come."""
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
                raise TooMuchOutput

    def _check(self, returncode: int) -> None:
        """Code 2 also means that a file could not be read, which is no matter; or that the pattern was refused."""
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
    """In the root by its descriptor, not by its name."""
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
    """`./path NUL line:offset:text` by path. A line that is not of this form is part of a name with a newline in it."""
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
