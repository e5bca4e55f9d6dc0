"""What grep is asked and what it finds, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mulligan.values.clock import monotonic_s
from mulligan.values.limits import BINARY_PROBE_BYTES
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.search.expression import Node

TEXT_MAX_BYTES = 2_000
READ_AHEAD_BYTES = TEXT_MAX_BYTES + 2
"""How much of a line is enough to know what is shown of it: room for a `\\r` and one byte more."""

BOM = b"\xef\xbb\xbf"


@plain(slots=True, frozen=True)
class Line:
    """A line that matches. `text` is without line ending and byte order mark; `cut` when its end is not shown."""

    path: RepoPath
    line_no: int
    text: bytes
    cut: bool = False

    @property
    def shown(self) -> str:
        return self.text.decode("utf-8", "replace") + ("…" if self.cut else "")


@plain(slots=True, frozen=True)
class Job:
    """Find the first `limit` lines that match `tree`, in order, before `deadline_s` of the monotonic clock.

    `admits` is asked only about files in which something was found: it may be slow.
    """

    root_fd: int
    tree: Node
    limit: int
    deadline_s: float
    admits: Callable[[RepoPath], bool]

    def left_s(self) -> float:
        """Raises Refused `regex_timeout` when there is none."""
        left = self.deadline_s - monotonic_s()
        if left <= 0:
            raise too_slow()
        return left


@dataclass(slots=True)
class Selection:
    """The files to search, in order, drawn one by one: those of a walk that are wanted, or just some."""

    source: Iterable[RepoPath]
    wants: Callable[[RepoPath], bool]
    is_bounded: bool = False
    """Whether a limit may end it before its source does."""
    _rest: Iterator[RepoPath] | None = None

    def __iter__(self) -> Iterator[RepoPath]:
        """Each file once, whoever asks: a second loop goes on where the first stopped."""
        if self._rest is None:
            self._rest = iter(self.source)
        return self._rest


def too_slow() -> Refused:
    return Refused("error", "regex_timeout", "The search did not end in time; narrow the path or simplify the pattern.")


def is_binary(head: bytes) -> bool:
    """Decided by the first bytes of a file."""
    return head.find(b"\0", 0, BINARY_PROBE_BYTES) >= 0


def without_bom(text: bytes) -> bytes:
    """A file from its beginning, as it is searched. One that holds nothing else has one empty line."""
    return (text[len(BOM) :] or b"\n") if text.startswith(BOM) else text


def shown_text(raw: bytes) -> tuple[bytes, bool]:
    """What is shown of a line, and whether it is cut, given its first READ_AHEAD_BYTES."""
    text = raw.removesuffix(b"\r") if len(raw) < READ_AHEAD_BYTES else raw
    if len(text) <= TEXT_MAX_BYTES:
        return text, False
    for end in range(TEXT_MAX_BYTES, TEXT_MAX_BYTES - 4, -1):
        if text[end] & 0xC0 != 0x80:
            return text[:end], True
    return text[:TEXT_MAX_BYTES], True
