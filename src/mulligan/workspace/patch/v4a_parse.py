"""The grammar of V4A patches: text to operations.

    *** Begin Patch
    *** Add File: PATH        then the lines of the file, each behind a `+`
    *** Delete File: PATH
    *** Update File: PATH     then at most one `*** Move to: PATH`, then hunks
    @@ TEXT                   begins a hunk; TEXT is a line above it, and several `@@` lines narrow it down in turn
     kept, -removed, +added   the lines of a hunk; the first hunk may lack its `@@`
    *** End of File           ends a hunk that is at the end of the file
    *** End Patch

Models take liberties, and these are accepted: a heredoc around the patch, white space around markers, CRLF, blank lines
for empty kept or added lines and between operations, an update that only moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias, cast

from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.normal import WHITE_SPACE, is_blank
from mulligan.workspace.patch.hunks import Hunk, HunkLine, Op

_BEGIN = "*** Begin Patch"
_END = "*** End Patch"
_END_OF_FILE = "*** End of File"
_MOVE = "*** Move to:"
_HEREDOC = re.compile(r"""(?:[\w./-]+[ \t]+)*<<-?[ \t]*(['"]?)(\w+)\1""")
_HEADER = re.compile(r"\*\*\* (Add|Delete|Update) File: (.+)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\*\*\* Environment ID:\s*\S.*", re.DOTALL)
_QUOTED_CHARS_MAX = 120


@plain(slots=True, frozen=True)
class Add:
    path: str
    content: str


@plain(slots=True, frozen=True)
class Delete:
    path: str


@plain(slots=True, frozen=True)
class Update:
    path: str
    move_to: str | None
    hunks: tuple[Hunk, ...]


Operation: TypeAlias = Add | Delete | Update


def parse_v4a(patch: str) -> tuple[Operation, ...]:
    """The operations of a patch in its order; paths are as written. Refuses with `parse_error`/`patch_parse_error`."""
    try:
        patch.encode("utf-8")
    except UnicodeEncodeError:
        _fail("the patch holds half of a surrogate pair, which no file can.")
    lines = [line.rstrip("\r") for line in patch.strip(WHITE_SPACE).split("\n")]
    sections = _sections(_body(_unwrapped(lines)))
    if not sections:
        _fail("the patch has no operations.")
    return tuple(_PARSERS[section.kind](section) for section in sections)


def _fail(message: str, number: int | None = None) -> NoReturn:
    message = message if number is None else f"line {number} of the patch: {message}"
    raise Refused("parse_error", "patch_parse_error", message, errors=[message])


def _shown(line: str) -> str:
    return repr(line[:_QUOTED_CHARS_MAX])


def _unwrapped(lines: list[str]) -> list[str]:
    heredoc = _HEREDOC.fullmatch(lines[0].strip(WHITE_SPACE))
    if heredoc and len(lines) > 2 and lines[-1].strip(WHITE_SPACE).endswith(heredoc[2]):
        return lines[1:-1]
    return lines


def _body(lines: list[str]) -> list[str]:
    if lines[0].strip(WHITE_SPACE) != _BEGIN:
        _fail(f"the first line is {_BEGIN!r}, not {_shown(lines[0])}.")
    if lines[-1].strip(WHITE_SPACE) != _END:
        _fail(f"the last line is {_END!r}, not {_shown(lines[-1])}.")
    return lines[1:-1]


@dataclass(slots=True)
class _Section:
    """One operation's lines, each with its number in the patch."""

    kind: Literal["Add", "Delete", "Update"]
    path: str
    number: int
    lines: list[tuple[int, str]] = field(default_factory=list)


def _sections(body: Sequence[str]) -> list[_Section]:
    sections: list[_Section] = []
    for number, line in enumerate(body, start=2):
        header = _HEADER.fullmatch(_marker(line, sections))
        if header:
            sections.append(_Section(cast(Literal["Add", "Delete", "Update"], header[1]), header[2], number))
        elif sections:
            sections[-1].lines.append((number, line))
        elif not is_blank(line) and not _ENVIRONMENT.fullmatch(line.strip(WHITE_SPACE)):
            _fail(f"an operation begins with *** Add|Delete|Update File: PATH, not {_shown(line)}.", number)
    return sections


def _marker(line: str, sections: Sequence[_Section]) -> str:
    """The line as a marker. Inside an update a leading space makes it a kept line, so only there it counts."""
    in_update = bool(sections) and sections[-1].kind == "Update"
    return line.rstrip(WHITE_SPACE) if in_update else line.strip(WHITE_SPACE)


def _add(section: _Section) -> Add:
    content: list[str] = []
    blanks = 0
    for number, line in section.lines:
        if line.startswith("+"):
            content += [""] * blanks + [line[1:]]
            blanks = 0
        elif is_blank(line):
            blanks += 1
        else:
            _fail(f"the lines of a new file begin with '+', not {_shown(line)}.", number)
    return Add(section.path, "".join(line + "\n" for line in content))


def _delete(section: _Section) -> Delete:
    for number, line in section.lines:
        if not is_blank(line):
            _fail(f"nothing follows *** Delete File but the next operation, not {_shown(line)}.", number)
    return Delete(section.path)


def _update(section: _Section) -> Update:
    lines = section.lines
    move_to = _move_to(*lines[0]) if lines else None
    if move_to is not None:
        lines = lines[1:]
    hunks = _hunks(lines)
    if not hunks and move_to is None:
        if not any(is_blank(line) for _, line in lines):
            _fail(f"the update of {_shown(section.path)} has no hunks.", section.number)
        hunks = (Hunk((HunkLine(" ", ""),)),)  # a blank kept line, and nothing that changes
    return Update(section.path, move_to, hunks)


def _move_to(number: int, line: str) -> str | None:
    """The path that a `*** Move to:` line names; None for any other line."""
    line = line.rstrip(WHITE_SPACE)
    if line != _MOVE:
        return line.removeprefix(_MOVE + " ") if line.startswith(_MOVE + " ") else None
    _fail("*** Move to: names no path.", number)


_PARSERS: dict[str, Callable[[_Section], Operation]] = {"Add": _add, "Delete": _delete, "Update": _update}


@dataclass(slots=True)
class _Draft:
    """A hunk while its lines come in."""

    anchors: list[str] = field(default_factory=list)
    lines: list[HunkLine] = field(default_factory=list)
    at_end: bool = False
    opened: bool = False

    def take(self, number: int, line: str) -> None:
        if line.rstrip(WHITE_SPACE) == _END_OF_FILE and (self.lines or not self.opened):
            self.at_end = bool(self.lines)
        elif not self.at_end:
            self.lines.append(_hunk_line(number, line))
        elif not is_blank(line):
            _fail(f"a hunk begins with '@@' after *** End of File, not with {_shown(line)}.", number)

    @property
    def is_empty(self) -> bool:
        """Blank lines alone are no hunk: they stand between two operations or two anchors."""
        return all(line.op == " " and is_blank(line.text) for line in self.lines)

    def finished(self) -> Hunk:
        return Hunk(tuple(self.lines), tuple(self.anchors), self.at_end)


def _hunks(lines: Sequence[tuple[int, str]]) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    draft = _Draft()
    for number, line in lines:
        if not line.startswith("@@"):
            draft.take(number, line)
            continue
        if not draft.is_empty:
            hunks.append(draft.finished())
        draft = _Draft(draft.anchors if draft.is_empty else [], opened=True)
        draft.anchors += _anchors(line)
    if draft.opened and not draft.lines:
        _fail("a hunk has no lines.", lines[-1][0])
    if draft.opened or not draft.is_empty:
        hunks.append(draft.finished())
    return tuple(hunks)


def _anchors(line: str) -> list[str]:
    anchor = line[2:].rstrip(WHITE_SPACE).removeprefix(" ")
    return [anchor] if anchor else []


def _hunk_line(number: int, line: str) -> HunkLine:
    if line.startswith((" ", "+", "-")):
        return HunkLine(cast(Op, line[0]), line[1:])
    if is_blank(line):
        return HunkLine(" ", "")
    _fail(f"the lines of a hunk begin with ' ', '+' or '-', not {_shown(line)}.", number)
