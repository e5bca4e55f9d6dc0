"""The grammar of unified diffs: git's and plain ones. Bytes in, `FilePatch` values out; nothing is looked up.

What cannot be tied to a file (no diff at all, a hunk without a header, a header that contradicts itself) refuses the
whole text. What can be is kept as a refusal of that file or hunk, so that one answer names everything that is wrong.
Text around the diffs (a mail, a commit message) is skipped.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mulligan.values.faults import fault
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain
from mulligan.workspace.lines import split_lines
from mulligan.workspace.patch.headers import (
    GIT_FACTS,
    Action,
    Header,
    begins_another,
    git_header,
    plain_header,
    unreadable,
)
from mulligan.workspace.patch.names import PatchName

Reason = Literal[
    "context_mismatch",
    "target_missing",
    "target_exists",
    "content_remains",
    "malformed_hunk",
    "binary_unsupported",
    "path_rejected",
]

_HUNK = re.compile(rb"@@ -([0-9]{1,19})(?:,([0-9]{1,19}))? \+([0-9]{1,19})(?:,([0-9]{1,19}))? @@")
_NOTICE, _NOTICE_END = b"Binary files ", b" differ"
_SIGNATURE = re.compile(rb"-- ?\r?\n")
_VERSION = re.compile(rb"[0-9]+\.")


@plain(slots=True, frozen=True)
class Hunk:
    """`old` stands from line `old_start` on and becomes `new`. Without `old`, `new` goes after line `old_start`."""

    old_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@plain(slots=True, frozen=True)
class MalformedHunk:
    """A hunk whose header cannot be read, or whose lines are not those its header counts."""


AnyHunk = Hunk | MalformedHunk


@plain(slots=True, frozen=True)
class FilePatch:
    """What a diff does to one file. `path` is the name it is reported by.

    `source` is read (None: created), `target` is written (None: deleted). `refusal` says that no file anywhere could
    take this section; then source and target may be missing too. Modes are git's (0o100644), None when not told.
    """

    path: RepoPath | PatchName
    action: Action
    source: RepoPath | None
    target: RepoPath | None
    mode_before: int | None
    mode_after: int | None
    hunks: tuple[AnyHunk, ...]
    refusal: Reason | None = None


def parse_unified(patch: bytes, *, strip: int = 1) -> tuple[FilePatch, ...]:
    """Every file section of a diff, in order. Refuses with `parse_error` and for nothing else."""
    if strip < 0:
        raise fault("invalid_params", "strip is the number of leading directories to drop, at least 0.")
    sections = tuple(_Reader(patch, strip).sections())
    if not sections:
        raise unreadable("No diff found: neither a `diff --git` line nor a `---` and `+++` pair.")
    return sections


class _Reader:
    def __init__(self, patch: bytes, strip: int) -> None:
        # Tools and models drop the last line end of a patch; the counts in the headers still guard its content.
        self.lines = split_lines(patch if patch.endswith(b"\n") else patch + b"\n")
        self.at = 0
        self.strip = strip

    def _peek(self, ahead: int = 0) -> bytes:
        """The line there, empty after the end."""
        return self.lines[self.at + ahead] if self.at + ahead < len(self.lines) else b""

    def _take(self) -> bytes:
        line = self._peek()
        self.at += 1
        return line

    def sections(self) -> Iterator[FilePatch]:
        while line := self._peek():
            if line.startswith(b"diff --git "):
                yield self._git_section()
            elif self._at_plain_header():
                yield self._plain_section()
            elif line.startswith(_NOTICE) and line.rstrip().endswith(_NOTICE_END):
                yield self._binary_notice()
            elif _HUNK.match(line):
                raise unreadable(f"Line {self.at + 1} begins a hunk, but no file header comes before it.")
            else:
                self.at += 1

    def _at_plain_header(self) -> bool:
        return self._peek().startswith(b"--- ") and self._peek(1).startswith(b"+++ ")

    def _git_section(self) -> FilePatch:
        names = _rest(self._take(), b"diff --git ")
        facts = self._git_facts(names)
        header = git_header(names, facts, self.strip)
        if self._peek().startswith((b"GIT binary patch", _NOTICE)):
            return self._binary_section(header)
        hunks = self._hunks()
        complete = hunks or (b"--- " not in facts and _changes_alone(header))
        return _section(header, hunks if complete else (MalformedHunk(),))

    def _git_facts(self, names: bytes) -> dict[bytes, bytes]:
        facts: dict[bytes, bytes] = {}
        while key := next((key for key in GIT_FACTS if self._peek().startswith(key)), None):
            if key in facts or (key == b"--- " and not self._continues(names, facts)):
                break
            facts[key] = _rest(self._take(), key)
        return facts

    def _continues(self, names: bytes, facts: Mapping[bytes, bytes]) -> bool:
        """Whether the `---` line here belongs to the git header above it."""
        pair = _rest(self._peek(), b"--- "), _rest(self._peek(1), b"+++ ")
        return self._at_plain_header() and not begins_another(names, facts, pair, self.strip)

    def _binary_section(self, header: Header) -> FilePatch:
        while self._peek() and not self._peek().startswith(b"diff --git ") and not self._at_plain_header():
            self.at += 1
        return _section(header, (), refusal="binary_unsupported")

    def _plain_section(self) -> FilePatch:
        old, new = _rest(self._take(), b"--- "), _rest(self._take(), b"+++ ")
        hunks = self._hunks() or (MalformedHunk(),)
        grows = all(isinstance(hunk, Hunk) and not hunk.old for hunk in hunks)
        shrinks = all(isinstance(hunk, Hunk) and not hunk.new for hunk in hunks)
        return _section(plain_header(old, new, self.strip, grows=grows, shrinks=shrinks), hunks)

    def _binary_notice(self) -> FilePatch:
        """`diff -r` has one line for a binary file. Skipping it would call a half-applied diff applied."""
        names = self._take().rstrip()[len(_NOTICE) : -len(_NOTICE_END)]
        old, _, new = names.partition(b" and ")
        header = plain_header(old, new, self.strip, grows=False, shrinks=False)
        return _section(header, (), refusal="binary_unsupported")

    def _hunks(self) -> tuple[AnyHunk, ...]:
        hunks = []
        while self._peek().startswith(b"@@"):
            hunks.append(self._hunk())
        return tuple(hunks)

    def _hunk(self) -> AnyHunk:
        header = _HUNK.match(self._take())
        hunk = self._counted_hunk(header) if header else None
        if hunk is None or self._more_lines_follow():
            self._skip_to_header()
            return MalformedHunk()
        return hunk

    def _counted_hunk(self, header: re.Match[bytes]) -> Hunk | None:
        old_start = int(header[1])
        old_count, new_count = (1 if count is None else int(count) for count in (header[2], header[4]))
        body = self._body(old_count, new_count)
        if body is None or (old_count and not old_start):
            return None
        return Hunk(old_start, tuple(body.old), tuple(body.new))

    def _body(self, old_count: int, new_count: int) -> _Body | None:
        body = _Body()
        while len(body.old) < old_count or len(body.new) < new_count:
            if not body.add(self._peek()):
                return None
            self.at += 1
            if self._peek().startswith(b"\\ "):
                self.at += 1
                body.end_without_newline()
        fits = len(body.old) == old_count and len(body.new) == new_count
        return body if fits and body.changes else None

    def _more_lines_follow(self) -> bool:
        """A hunk line beyond the counts: leaving it out would drop a part of what was meant."""
        line = self._peek()
        if not line.startswith((b" ", b"+", b"-", b"\\")) or self._at_plain_header():
            return False
        is_signature = _SIGNATURE.fullmatch(line) and (line.startswith(b"-- ") or _VERSION.match(self._peek(1)))
        return not is_signature

    def _skip_to_header(self) -> None:
        while self._peek() and not self._peek().startswith((b"@@ -", b"diff --git ")) and not self._at_plain_header():
            self.at += 1


class _Body:
    """The two sides of a hunk as its lines are read."""

    def __init__(self) -> None:
        self.old: list[bytes] = []
        self.new: list[bytes] = []
        self.changes = False
        both = (self.old, self.new)
        self._sides: dict[bytes, tuple[list[bytes], ...]] = {b" ": both, b"\n": both, b"-": both[:1], b"+": both[1:]}
        self._last: tuple[list[bytes], ...] = ()

    def add(self, line: bytes) -> bool:
        """Whether the line has a place in a hunk. An empty one is an empty context line whose blank was lost."""
        self._last = self._sides.get(line[:1], ())
        self.changes = self.changes or len(self._last) == 1
        for side in self._last:
            if side and not side[-1].endswith(b"\n"):
                return False
            side.append(line[1:] or b"\n")
        return bool(self._last)

    def end_without_newline(self) -> None:
        for side in self._last:
            side[-1] = side[-1].removesuffix(b"\n")


def _rest(line: bytes, key: bytes) -> bytes:
    """A header line's value. A CR before its end comes from a patch converted to CRLF; a real one would be quoted."""
    return line[len(key) :].removesuffix(b"\n").removesuffix(b"\r")


def _changes_alone(header: Header) -> bool:
    """Whether the lines of a git header say all there is to do: come, go, move, or change the mode."""
    return header.action != "modify" or header.mode_after not in (None, header.mode_before)


def _section(header: Header, hunks: Sequence[AnyHunk], refusal: Reason | None = None) -> FilePatch:
    names = [name for name in (header.new, header.old) if name is not None]
    rejected = [name.text for name in names if name.path is None]
    return FilePatch(
        path=rejected[0] if rejected else names[0].path or names[0].text,
        action=header.action,
        source=header.old.path if header.old else None,
        target=header.new.path if header.new else None,
        mode_before=header.mode_before,
        mode_after=header.mode_after,
        hunks=tuple(_fitting(header.action, hunk) for hunk in hunks),
        refusal="path_rejected" if rejected else refusal or _mode_refusal(header),
    )


def _fitting(action: Action, hunk: AnyHunk) -> AnyHunk:
    """A new file has nothing to match, a deleted one nothing to add."""
    if isinstance(hunk, Hunk) and ((action == "create" and hunk.old) or (action == "delete" and hunk.new)):
        return MalformedHunk()
    return hunk


def _mode_refusal(header: Header) -> Reason | None:
    """Submodules are no files; a file that turns into a link is a deletion and a creation, in two sections."""
    kinds = {stat.S_IFMT(mode) for mode in (header.mode_before, header.mode_after) if mode is not None}
    if kinds - {stat.S_IFREG, stat.S_IFLNK}:
        return "binary_unsupported"
    return "malformed_hunk" if len(kinds) > 1 else None
