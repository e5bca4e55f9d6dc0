"""Unified diffs, git's and plain ones: parses a diff into `FilePatch` values, and applies them in memory. Pure.

The parser refuses the whole text if a part of it belongs to no file: no diff at all, a hunk without a header, a header
that contradicts itself. Any other mistake becomes a refusal of its file or hunk, so that one answer names all mistakes.
Text around the diffs (a mail, a commit message) is skipped.

`stage_unified` applies strictly: byte for byte, at the stated line, all files or none.

- The old lines of a hunk must be in the file at the line that its header states for the old file; nothing is searched
  for. The stated new line follows from the hunks before and is ignored, so one hunk out of a longer diff still fits.
- A second section for a path sees the result of the first one. Renames and copies read the files as they were before
  the patch, as in git, so two files can exchange their names.
- A reason about a whole file is given for each of its hunks, and for hunk 0 if it has none.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Literal

from mulligan.files.diff import DEV_NULL, HeaderName, PatchName, named, split_lines, unquote, without_leading
from mulligan.values.errors import Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MAX_PATH_BYTES
from mulligan.values.paths import RepoPath, ancestors_of

Action = Literal["modify", "create", "delete", "rename", "copy"]

# The beginnings of the lines between `diff --git` and the first hunk.
GIT_FACTS = (
    b"old mode ",
    b"new mode ",
    b"new file mode ",
    b"deleted file mode ",
    b"rename from ",
    b"rename to ",
    b"copy from ",
    b"copy to ",
    b"similarity index ",
    b"dissimilarity index ",
    b"index ",
    b"--- ",
    b"+++ ",
)

_GIT_LINE_BYTES_MAX = 4 * MAX_PATH_BYTES
_MODE = re.compile(rb"[0-7]{6}\Z")
_INDEX_MODE = re.compile(rb"[0-9a-f]+\.\.[0-9a-f]+ ([0-7]{6})\Z")
_STAMP = re.compile(
    rb"(1969-12-31|1970-01-01) ([0-2][0-9]):([0-5][0-9]):00(?:\.0+)? ([+-])([0-2][0-9]):?([0-5][0-9])\s*\Z"
)


@fast_dataclass(slots=True, frozen=True)
class Header:
    """The header of one file. `old` is None for a new file, `new` for a deleted one; a mode that it lacks is None."""

    action: Action
    old: HeaderName | None
    new: HeaderName | None
    mode_before: int | None = None
    mode_after: int | None = None


def unreadable(message: str) -> Refused:
    return Refused("parse_error", "patch_parse_error", message, errors=[message])


def git_header(names: bytes, facts: Mapping[bytes, bytes], strip: int) -> Header:
    """Parse the rest of the `diff --git` line and the lines below it, which come by their beginnings."""
    action = _git_action(facts)
    before, after = _modes(facts)
    moves = action == "rename" or action == "copy"
    old, new = _moved(action, facts, strip) if moves else _stayed(action, _shared_name(names, strip), facts, strip)
    return Header(action, old, new, before, after)


def begins_another(names: bytes, facts: Mapping[bytes, bytes], pair: tuple[bytes, bytes], strip: int) -> bool:
    """Whether a pair of `---` and `+++` lines below a git header belongs to the next file.

    It does if the header is complete without it and the pair names other files. Git would give the first file's mode to
    the second one, or refuse a rename; in both cases the first file would be lost.
    """
    action = _git_action(facts)
    if action == "modify" and b"new mode " not in facts:
        return False
    own = _moved(action, facts, strip) if action in ("rename", "copy") else (_shared(names, strip),)
    others = [_side(line, None, strip) for line in pair]
    if (action == "create" and others[0] is None) or (action == "delete" and others[1] is None):
        return False
    known = {name.text for name in own if name is not None}
    return bool(known) and known.isdisjoint(name.text for name in others if name is not None)


def _shared(names: bytes, strip: int) -> HeaderName | None:
    name = _shared_name(names, strip)
    return None if name is None else named(name, strip)


def _git_action(facts: Mapping[bytes, bytes]) -> Action:
    signs: dict[Action, bool] = {
        "create": b"new file mode " in facts or _name_of(facts.get(b"--- ")) == DEV_NULL,
        "delete": b"deleted file mode " in facts or _name_of(facts.get(b"+++ ")) == DEV_NULL,
        "rename": b"rename from " in facts or b"rename to " in facts,
        "copy": b"copy from " in facts or b"copy to " in facts,
    }
    actions = [action for action, said in signs.items() if said]
    if len(actions) > 1:
        raise unreadable(f"One file header says both {actions[0]} and {actions[1]}.")
    return actions[0] if actions else "modify"


def _modes(facts: Mapping[bytes, bytes]) -> tuple[int | None, int | None]:
    index = _INDEX_MODE.match(facts.get(b"index ", b""))
    kept = int(index[1], 8) if index else None
    before = _mode(facts.get(b"old mode ", facts.get(b"deleted file mode ")))
    after = _mode(facts.get(b"new mode ", facts.get(b"new file mode ")))
    return (before if before is not None else kept), (after if after is not None else kept)


def _mode(text: bytes | None) -> int | None:
    if text is None:
        return None
    if not _MODE.match(text):
        raise unreadable("A file mode in a diff has six octal digits.")
    return int(text, 8)


_Sides = tuple[HeaderName | None, HeaderName | None]


def _moved(action: Action, facts: Mapping[bytes, bytes], strip: int) -> _Sides:
    """The names of a rename or copy. They lack the `a/` and `b/` that `strip` counts."""
    verb = action.encode()
    origin, goal = (_name_of(facts.get(verb + word), tab_ends=False) for word in (b" from ", b" to "))
    if origin is None or goal is None:
        raise unreadable("A rename or copy names where from and where to.")
    old, new = named(origin, max(strip - 1, 0)), named(goal, max(strip - 1, 0))
    for key, one in ((b"--- ", old), (b"+++ ", new)):
        again = _name_of(facts.get(key))
        if again is not None and named(again, strip).text != one.text:
            raise unreadable("A file header gives one file two names.")
    return old, new


def _stayed(action: Action, default: bytes | None, facts: Mapping[bytes, bytes], strip: int) -> _Sides:
    old, new = (_side(facts.get(key), default, strip) for key in (b"--- ", b"+++ "))
    if action == "create":
        _check_missing(facts.get(b"--- "))
        return None, _agreed(new, default, strip)
    if action == "delete":
        _check_missing(facts.get(b"+++ "))
        return _agreed(old, default, strip), None
    if _require_name(old).text != _require_name(new).text:
        raise unreadable("Two names for one file, and no rename.")
    return old, new


def _check_missing(text: bytes | None) -> None:
    if text is not None and _name_of(text) != DEV_NULL:
        raise unreadable("The missing side of a new or deleted file is /dev/null.")


def _agreed(name: HeaderName | None, default: bytes | None, strip: int) -> HeaderName:
    """The name of a new or deleted file. The first line of its header must give the same name."""
    if default is not None and named(default, strip).text != _require_name(name).text:
        raise unreadable("A file header gives one file two names.")
    return _require_name(name)


def _require_name(name: HeaderName | None) -> HeaderName:
    if name is None:
        raise unreadable("A file header names no file; is `strip` right?")
    return name


def _side(text: bytes | None, default: bytes | None, strip: int) -> HeaderName | None:
    name = default if text is None else _name_of(text)
    return None if name is None or name == DEV_NULL else named(name, strip)


def _name_of(text: bytes | None, *, tab_ends: bool = True) -> bytes | None:
    """The name in a header line: quoted, or up to the tab before a time stamp."""
    if text is None:
        return None
    if text.startswith(b'"'):
        quoted = unquote(text)
        if quoted is None:
            raise unreadable("A quoted file name in a diff is not well-formed.")
        return quoted[0]
    return text.partition(b"\t")[0] if tab_ends else text


def _shared_name(names: bytes, strip: int) -> bytes | None:
    """The name, with its prefix, that `a/NAME b/NAME` has twice. Names may contain spaces, so each space is tried."""
    if len(names) > _GIT_LINE_BYTES_MAX:
        return None
    for first, second in _splits(names):
        wanted = without_leading(first, strip)
        if wanted is not None and second.endswith(wanted) and without_leading(second, strip) == wanted:
            return second
    return None


def _splits(names: bytes) -> list[tuple[bytes, bytes]]:
    if names.startswith(b'"'):
        first, rest = unquote(names) or (b"", b"")
        return [(first, _name_of(rest[1:]) or b"")]
    if names.endswith(b'"') and b' "' in names:
        start = names.index(b' "')
        return [(names[:start], _name_of(names[start + 1 :]) or b"")]
    cuts = [at for at, byte in enumerate(names) if byte == 0x20]
    return [(names[:at], names[at + 1 :]) for at in cuts]


def plain_header(old_line: bytes, new_line: bytes, strip: int, *, grows: bool, shrinks: bool) -> Header:
    """Parse `---` and `+++` alone. `grows`: no hunk has old lines; `shrinks`: none has new lines.

    `diff -N` gives a missing file the time 1970-01-01. A real file may be as old, so the hunks must agree.
    """
    old, new = _side(old_line, None, strip), _side(new_line, None, strip)
    if new is not None and (old is None or (grows and _is_epoch(old_line))):
        return Header("create", None, new)
    if old is not None and (new is None or (shrinks and _is_epoch(new_line))):
        return Header("delete", old, None)
    if old is None or new is None:
        raise unreadable("Both sides of a file header are /dev/null.")
    one = old if new.text.startswith(old.text) else new
    return Header("modify", one, one)


def _is_epoch(line: bytes) -> bool:
    stamp = _STAMP.match(line.partition(b"\t")[2])
    if stamp is None:
        return False
    local_min = int(stamp[2]) * 60 + int(stamp[3]) - (1440 if stamp[1] == b"1969-12-31" else 0)
    offset_min = int(stamp[5]) * 60 + int(stamp[6])
    return local_min == (offset_min if stamp[4] == b"+" else -offset_min)


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


@fast_dataclass(slots=True, frozen=True)
class PatchHunk:
    """The lines `old` begin at line `old_start` and become `new`. Without `old`, `new` goes after that line."""

    old_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@fast_dataclass(slots=True, frozen=True)
class MalformedHunk:
    """A hunk with an unreadable header, or with other lines than its header counts."""


AnyHunk = PatchHunk | MalformedHunk


@fast_dataclass(slots=True, frozen=True)
class FilePatch:
    """The change of one file in a diff. Answers call the file `path`.

    `source` is read (None: a new file), `target` is written (None: a deletion). With a `refusal` the section fits no
    file at all; then source and target may be None too. Modes are git's (0o100644); None if the diff has none.
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
    """Every file section of a diff, in order. Refuses only with `parse_error`."""
    if strip < 0:
        raise fault("invalid_params", "strip is the number of leading directories to drop, at least 0.")
    sections = tuple(_Reader(patch, strip).sections())
    if not sections:
        raise unreadable("No diff found: neither a `diff --git` line nor a `---` and `+++` pair.")
    return sections


class _Reader:
    def __init__(self, patch: bytes, strip: int) -> None:
        # Tools and models drop the last line end of a patch; the counts in the headers show whether a line is missing.
        self.lines = split_lines(patch if patch.endswith(b"\n") else patch + b"\n")
        self.at = 0
        self.strip = strip

    def _peek(self, ahead: int = 0) -> bytes:
        """A line ahead; empty after the end."""
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
        grows = all(isinstance(hunk, PatchHunk) and not hunk.old for hunk in hunks)
        shrinks = all(isinstance(hunk, PatchHunk) and not hunk.new for hunk in hunks)
        return _section(plain_header(old, new, self.strip, grows=grows, shrinks=shrinks), hunks)

    def _binary_notice(self) -> FilePatch:
        """`diff -r` has one line for a binary file. Without a refusal the caller would think that all was applied."""
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

    def _counted_hunk(self, header: re.Match[bytes]) -> PatchHunk | None:
        old_start = int(header[1])
        old_count, new_count = (1 if count is None else int(count) for count in (header[2], header[4]))
        body = self._body(old_count, new_count)
        if body is None or (old_count and not old_start):
            return None
        return PatchHunk(old_start, tuple(body.old), tuple(body.new))

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
        """Whether a hunk line follows that the counts do not cover: without it a part of the change would be lost."""
        line = self._peek()
        if not line.startswith((b" ", b"+", b"-", b"\\")) or self._at_plain_header():
            return False
        is_signature = _SIGNATURE.fullmatch(line) and (line.startswith(b"-- ") or _VERSION.match(self._peek(1)))
        return not is_signature

    def _skip_to_header(self) -> None:
        while self._peek() and not self._peek().startswith((b"@@ -", b"diff --git ")) and not self._at_plain_header():
            self.at += 1


class _Body:
    """The two sides of a hunk while the parser reads its lines."""

    def __init__(self) -> None:
        self.old: list[bytes] = []
        self.new: list[bytes] = []
        self.changes = False
        both = (self.old, self.new)
        self._sides: dict[bytes, tuple[list[bytes], ...]] = {b" ": both, b"\n": both, b"-": both[:1], b"+": both[1:]}
        self._last: tuple[list[bytes], ...] = ()

    def add(self, line: bytes) -> bool:
        """Add a line. False: it is no line of a hunk. An empty line is an empty context line that lost its blank."""
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
    """The value of a header line. A CR at its end comes from a conversion to CRLF; a name would have it quoted."""
    return line[len(key) :].removesuffix(b"\n").removesuffix(b"\r")


def _changes_alone(header: Header) -> bool:
    """Whether a git header is a change by itself: it creates, deletes or moves a file, or changes its mode."""
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
    """The hunk, unless it has old lines for a new file or new lines for a deleted one."""
    if isinstance(hunk, PatchHunk) and ((action == "create" and hunk.old) or (action == "delete" and hunk.new)):
        return MalformedHunk()
    return hunk


def _mode_refusal(header: Header) -> Reason | None:
    """The refusal of a submodule, or of a file that becomes a link, for which a diff needs two sections."""
    kinds = {stat.S_IFMT(mode) for mode in (header.mode_before, header.mode_after) if mode is not None}
    if kinds - {stat.S_IFREG, stat.S_IFLNK}:
        return "binary_unsupported"
    return "malformed_hunk" if len(kinds) > 1 else None


Kind = Literal["file", "symlink"]

_EXECUTE_BITS = 0o111
_LINK_MODE = 0o777


@fast_dataclass(slots=True, frozen=True)
class PatchedFile:
    """A file's bytes and permission bits; the content of a symbolic link is its target."""

    content: bytes
    mode: int
    kind: Kind = "file"


@fast_dataclass(slots=True, frozen=True)
class HunkReject:
    index: int
    reason: Reason


@fast_dataclass(slots=True, frozen=True)
class Reject:
    path: RepoPath | PatchName
    hunks: tuple[HunkReject, ...]


@fast_dataclass(slots=True, frozen=True)
class UnifiedStaged:
    """The changed files after a patch (None: deleted), or the rejects; then `files` is empty.

    `applied` has the file of each section once, a renamed one by its new name, in byte order.
    """

    files: dict[RepoPath, PatchedFile | None] = field(default_factory=dict)
    applied: tuple[RepoPath, ...] = ()
    rejects: tuple[Reject, ...] = ()


# Reads the file or symbolic link at a path; None if there is nothing, or a directory.
Look = Callable[[RepoPath], PatchedFile | None]


def stage_unified(patches: Sequence[FilePatch], look: Look) -> UnifiedStaged:
    """Apply every section in memory. The rejects name every hunk that does not fit."""
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
    """The files after the sections so far, and the rejects."""

    def __init__(self, patches: Sequence[FilePatch], look: Look) -> None:
        self.files: dict[RepoPath, PatchedFile | None] = {}
        self._look = look
        self._looked: dict[RepoPath, PatchedFile | None] = {}
        self._arrived: set[RepoPath] = set()
        self._leaving = {patch.source for patch in patches if patch.action == "rename"}
        self._rejects: dict[RepoPath | PatchName, dict[int, Reason]] = {}
        self._hunk_counts: Counter[str] = Counter()

    def add(self, patch: FilePatch) -> None:
        first_index = self._hunk_counts[patch.path]
        self._hunk_counts[patch.path] += max(len(patch.hunks), 1)
        before = self._before(patch)
        outcome = _whole(patch, before) if isinstance(before, str) else _applied(patch, before)
        if isinstance(outcome, PatchedFile):
            self._settle(patch, outcome)
        else:
            reasons = self._rejects.setdefault(patch.path, {})
            reasons.update({first_index + index: reason for index, reason in outcome.items()})

    def check_parents(self) -> None:
        """Reject a file below a file or a link."""
        for path, now in self.files.items():
            if now is not None and any(self._now(above) is not None for above in ancestors_of(path)[:-1]):
                self._rejects.setdefault(path, {}).setdefault(0, "path_rejected")

    def changed(self) -> dict[RepoPath, PatchedFile | None]:
        return {path: now for path, now in self.files.items() if now != self._original(path)}

    def rejects(self) -> tuple[Reject, ...]:
        """The rejects by path in byte order, then by hunk. The hunks of all sections of a path are counted together."""
        paths = sorted(self._rejects, key=_sort_key)
        return tuple(
            Reject(path, tuple(HunkReject(index, reason) for index, reason in sorted(self._rejects[path].items())))
            for path in paths
        )

    def _before(self, patch: FilePatch) -> PatchedFile | Reason | None:
        """The file to which the hunks of a section apply (None: a new file), or the reason why there is none."""
        if patch.refusal is not None:
            return patch.refusal
        if patch.target is not None and patch.action != "modify" and self._is_taken(patch.target):
            return "target_exists"
        if patch.source is None:
            return None
        is_edited = self.files.get(patch.source) is not None and patch.source not in self._arrived
        if patch.action == "rename" and is_edited:
            # The rename would lose the change that an earlier section made to the file in place.
            return "malformed_hunk"
        moves = patch.action == "rename" or patch.action == "copy"
        before = self._original(patch.source) if moves else self._now(patch.source)
        if before is None:
            return "target_missing"
        return before if before.kind == _kind(patch, before) else "context_mismatch"

    def _original(self, path: RepoPath) -> PatchedFile | None:
        if path not in self._looked:
            self._looked[path] = self._look(path)
        return self._looked[path]

    def _now(self, path: RepoPath) -> PatchedFile | None:
        return self.files[path] if path in self.files else self._original(path)

    def _is_taken(self, path: RepoPath) -> bool:
        if path in self.files:
            return self.files[path] is not None
        return path not in self._leaving and self._original(path) is not None

    def _settle(self, patch: FilePatch, after: PatchedFile) -> None:
        gone = patch.action == "delete" or (patch.action == "rename" and patch.source not in self._arrived)
        if gone and patch.source is not None:
            self.files[patch.source] = None
        if patch.target is not None:
            self.files[patch.target] = after
            if patch.action != "modify":
                self._arrived.add(patch.target)


def _whole(patch: FilePatch, reason: Reason) -> dict[int, Reason]:
    """The reason for every hunk; a malformed hunk keeps its own reason."""
    hunks: Sequence[AnyHunk | None] = patch.hunks or (None,)
    return {index: "malformed_hunk" if isinstance(hunk, MalformedHunk) else reason for index, hunk in enumerate(hunks)}


def _applied(patch: FilePatch, before: PatchedFile | None) -> PatchedFile | dict[int, Reason]:
    """The file after a section (empty after a deletion), or the reasons by hunk."""
    content = _spliced(b"" if before is None else before.content, patch.hunks)
    if isinstance(content, dict):
        return content
    if patch.action == "delete" and content:
        return _whole(patch, "content_remains")
    if _kind(patch, before) == "file":
        return PatchedFile(content, _new_mode(patch, before))
    if patch.target is not None and not _stays_inside(patch.target, content):
        return _whole(patch, "path_rejected")
    return PatchedFile(content, _LINK_MODE, "symlink")


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


def _place(lines: Sequence[bytes], done: int, hunk: PatchHunk) -> int | None:
    """The index of the hunk's first line, after the earlier hunks. None if its lines are not there."""
    start = hunk.old_start - 1 if hunk.old else hunk.old_start
    end = start + len(hunk.old)
    if not done <= start <= end <= len(lines) or tuple(lines[start:end]) != hunk.old:
        return None
    ends_file = bool(hunk.new) and not hunk.new[-1].endswith(b"\n")
    return None if ends_file and end < len(lines) else start


def _kind(patch: FilePatch, before: PatchedFile | None) -> Kind:
    """The kind of the file after a section. An exact rename or copy has no mode, and keeps the kind."""
    mode = patch.mode_after if patch.mode_after is not None else patch.mode_before
    if mode is None and before is not None and not patch.hunks:
        return before.kind
    return "symlink" if mode is not None and stat.S_ISLNK(mode) else "file"


def _new_mode(patch: FilePatch, before: PatchedFile | None) -> int:
    """The mode after a section. A diff has only the executable bit; the other bits of an existing file stay."""
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
