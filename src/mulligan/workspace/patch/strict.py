"""Applying a unified diff strictly: byte for byte, at the stated line, all files or none. Pure.

- A hunk's old lines stand in the file at the line its header states for the old file; nothing is searched for. The
  stated new line follows from the hunks before and is not asked, so one hunk taken out of a longer diff still fits.
- A second section for a path sees the result of the first. Renames and copies read the files as they were before the
  patch, as git means them, so two files can swap names.
- A reason about a whole file is given for each of its hunks, and for hunk 0 when it has none.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Literal

from mulligan.values.paths import RepoPath, ancestors_of
from mulligan.values.plain import plain
from mulligan.workspace.lines import split_lines
from mulligan.workspace.patch.names import PatchName
from mulligan.workspace.patch.unified import AnyHunk, FilePatch, Hunk, MalformedHunk, Reason

Kind = Literal["file", "symlink"]

_EXECUTE_BITS = 0o111
_LINK_MODE = 0o777


@plain(slots=True, frozen=True)
class Present:
    """A file's bytes and permission bits; the content of a symbolic link is its target."""

    content: bytes
    mode: int
    kind: Kind = "file"


@plain(slots=True, frozen=True)
class HunkReject:
    index: int
    reason: Reason


@plain(slots=True, frozen=True)
class Reject:
    path: RepoPath | PatchName
    hunks: tuple[HunkReject, ...]


@plain(slots=True, frozen=True)
class UnifiedStaged:
    """What a patch makes of the files it changes (None: deleted), or why it cannot: then `files` is empty.

    A file that is in the end what it was before is not among them.
    `applied` has each section's file once, a renamed one by its new name, in byte order.
    """

    files: dict[RepoPath, Present | None] = field(default_factory=dict)
    applied: tuple[RepoPath, ...] = ()
    rejects: tuple[Reject, ...] = ()


Look = Callable[[RepoPath], Present | None]
"""What a path holds now: a regular file or a symbolic link. None for nothing, and for a directory."""


def stage_unified(patches: Sequence[FilePatch], look: Look) -> UnifiedStaged:
    """Apply every section in memory. Every hunk that does not fit is told, of every file."""
    stage = _Stage(patches, look)
    for patch in patches:
        stage.add(patch)
    stage.check_parents()
    if rejects := stage.rejects():
        return UnifiedStaged(rejects=rejects)
    applied = {path for patch in patches if (path := patch.target or patch.source)}
    return UnifiedStaged(files=stage.changed(), applied=tuple(sorted(applied, key=_sort_key)))


def _sort_key(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


class _Stage:
    """The files as the sections so far leave them, and what did not fit."""

    def __init__(self, patches: Sequence[FilePatch], look: Look) -> None:
        self.files: dict[RepoPath, Present | None] = {}
        self._look = look
        self._looked: dict[RepoPath, Present | None] = {}
        self._arrived: set[RepoPath] = set()
        self._leaving = {patch.source for patch in patches if patch.action == "rename"}
        self._rejects: dict[RepoPath | PatchName, dict[int, Reason]] = {}
        self._hunk_counts: Counter[str] = Counter()

    def add(self, patch: FilePatch) -> None:
        first_index = self._hunk_counts[patch.path]
        self._hunk_counts[patch.path] += max(len(patch.hunks), 1)
        before = self._before(patch)
        outcome = _whole(patch, before) if isinstance(before, str) else _applied(patch, before)
        if isinstance(outcome, Present):
            self._settle(patch, outcome)
        else:
            told = self._rejects.setdefault(patch.path, {})
            told.update({first_index + index: reason for index, reason in outcome.items()})

    def check_parents(self) -> None:
        """A file below a file, or below a link that leads elsewhere, has no place."""
        for path, now in self.files.items():
            if now is not None and any(self._now(above) is not None for above in ancestors_of(path)[:-1]):
                self._rejects.setdefault(path, {}).setdefault(0, "path_rejected")

    def changed(self) -> dict[RepoPath, Present | None]:
        return {path: now for path, now in self.files.items() if now != self._original(path)}

    def rejects(self) -> tuple[Reject, ...]:
        """By path, in byte order, then by hunk. Hunks of a path with several sections are counted through."""
        paths = sorted(self._rejects, key=_sort_key)
        return tuple(
            Reject(path, tuple(HunkReject(index, reason) for index, reason in sorted(self._rejects[path].items())))
            for path in paths
        )

    def _before(self, patch: FilePatch) -> Present | Reason | None:
        """What the hunks of a section meet (None: a new file), or why they meet nothing."""
        if patch.refusal is not None:
            return patch.refusal
        if patch.target is not None and patch.action != "modify" and self._is_taken(patch.target):
            return "target_exists"
        if patch.source is None:
            return None
        if patch.action == "rename" and self._is_edited(patch.source):
            return "malformed_hunk"
        moves = patch.action == "rename" or patch.action == "copy"
        before = self._original(patch.source) if moves else self._now(patch.source)
        if before is None:
            return "target_missing"
        return before if before.kind == _kind(patch, before) else "context_mismatch"

    def _original(self, path: RepoPath) -> Present | None:
        if path not in self._looked:
            self._looked[path] = self._look(path)
        return self._looked[path]

    def _now(self, path: RepoPath) -> Present | None:
        return self.files[path] if path in self.files else self._original(path)

    def _is_taken(self, path: RepoPath) -> bool:
        if path in self.files:
            return self.files[path] is not None
        return path not in self._leaving and self._original(path) is not None

    def _is_edited(self, path: RepoPath) -> bool:
        """An earlier section changed it in place; renaming it away now would drop one of the two."""
        return self.files.get(path) is not None and path not in self._arrived

    def _settle(self, patch: FilePatch, after: Present) -> None:
        gone = patch.action == "delete" or (patch.action == "rename" and patch.source not in self._arrived)
        if gone and patch.source is not None:
            self.files[patch.source] = None
        if patch.target is not None:
            self.files[patch.target] = after
            if patch.action != "modify":
                self._arrived.add(patch.target)


def _whole(patch: FilePatch, reason: Reason) -> dict[int, Reason]:
    """The reason for every hunk, but a malformed one is that whatever else is wrong."""
    hunks: Sequence[AnyHunk | None] = patch.hunks or (None,)
    return {index: "malformed_hunk" if isinstance(hunk, MalformedHunk) else reason for index, hunk in enumerate(hunks)}


def _applied(patch: FilePatch, before: Present | None) -> Present | dict[int, Reason]:
    """The file after a section (what a deletion leaves of it: nothing), or the reasons by hunk."""
    content = _spliced(b"" if before is None else before.content, patch.hunks)
    if isinstance(content, dict):
        return content
    if patch.action == "delete" and content:
        return _whole(patch, "content_remains")
    if _kind(patch, before) == "file":
        return Present(content, _mode(patch, before))
    if patch.target is not None and not _stays_inside(patch.target, content):
        return _whole(patch, "path_rejected")
    return Present(content, _LINK_MODE, "symlink")


def _spliced(content: bytes, hunks: Sequence[AnyHunk]) -> bytes | dict[int, Reason]:
    lines = split_lines(content)
    after: list[bytes] = []
    done = 0
    bad: dict[int, Reason] = {}
    for index, hunk in enumerate(hunks):
        if isinstance(hunk, MalformedHunk):
            bad[index] = "malformed_hunk"
        elif (start := _place(lines, done, hunk)) is None:
            bad[index] = "context_mismatch"
        else:
            after += lines[done:start]
            if hunk.new and after and not after[-1].endswith(b"\n"):
                bad[index] = "context_mismatch"
            after += hunk.new
            done = start + len(hunk.old)
    return bad or b"".join(after + lines[done:])


def _place(lines: Sequence[bytes], done: int, hunk: Hunk) -> int | None:
    """Where the hunk stands, if it does: after those before it, and at the end of the file if it says so."""
    start = hunk.old_start - 1 if hunk.old else hunk.old_start
    end = start + len(hunk.old)
    if not done <= start <= end <= len(lines) or tuple(lines[start:end]) != hunk.old:
        return None
    ends_file = bool(hunk.new) and not hunk.new[-1].endswith(b"\n")
    return None if ends_file and end < len(lines) else start


def _kind(patch: FilePatch, before: Present | None) -> Kind:
    """An exact rename or copy tells no mode and holds no lines: it takes what is there as it is."""
    told = patch.mode_after if patch.mode_after is not None else patch.mode_before
    if told is None and before is not None and not patch.hunks:
        return before.kind
    return "symlink" if told is not None and stat.S_ISLNK(told) else "file"


def _mode(patch: FilePatch, before: Present | None) -> int:
    """Diffs know only whether a file is executable. The other bits of a file that was there stay."""
    executable = bool((patch.mode_after or 0) & stat.S_IXUSR)
    if before is None:
        return 0o755 if executable else 0o644
    if patch.mode_after is None or patch.mode_after == patch.mode_before:
        return before.mode
    readers = (before.mode & 0o444) >> 2
    return before.mode | readers if executable else before.mode & ~_EXECUTE_BITS


def _stays_inside(path: RepoPath, target: bytes) -> bool:
    """Whether a link at `path` leads, by its words alone, to something below the root."""
    depth = path.count("/")
    for name in target.split(b"/"):
        depth += {b"..": -1, b".": 0, b"": 0}.get(name, 1)
        if depth < 0:
            return False
    return bool(target) and b"\0" not in target and not target.startswith(b"/")
