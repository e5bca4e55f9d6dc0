"""V4A patches: parses a patch, and computes in memory what its operations make of the files.

    *** Begin Patch
    *** Add File: PATH        then the lines of the file, each after a `+`
    *** Delete File: PATH
    *** Update File: PATH     then at most one `*** Move to: PATH`, then hunks
    @@ TEXT                   begins a hunk; TEXT is a line above it, and several `@@` lines narrow it down in turn
     kept, -removed, +added   the lines of a hunk; the first hunk may lack its `@@`
    *** End of File           ends a hunk that is at the end of the file
    *** End Patch

Models write this loosely. So the parser accepts a heredoc around the patch, white space around markers, CRLF, blank
lines for empty kept or added lines and between operations, and an update that only moves.

`apply_hunks` finds the place of each hunk of an update:

- Hunks are in the order of the text and do not overlap.
- The old lines of a hunk are the place of it. They come after its `@@` anchors, each of which is searched for after the
  one before; with `*** End of File` they are at the end of the text, if they fit there. If that finds nothing, an
  anchor that repeats the first old line, or that is above the hunk before, counts as found.
- Lines are compared exactly, then without trailing, then without any surrounding white space, then by the table of
  `files.edit`. The first of these grades that finds a place decides.
- If the same grades also allow another placing of all hunks together, the patch is ambiguous. With anchors only the
  place nearest to them counts, so only other anchors can make another placing.
- A hunk without old lines goes to the end. Lines that the patch keeps stay byte for byte; new lines end as the first
  line of the text does; every line gets a line ending.

`stage_v4a` applies all operations in memory, before the caller touches a file.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Literal, NoReturn, TypeAlias, cast

from mulligan.files.edit import WHITE_SPACE, is_blank, line_key
from mulligan.values.errors import Refused, RequestError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, parse_repo_path, path_bytes

Op = Literal[" ", "-", "+"]

_BOM = "\ufeff"
_LINE = re.compile("([^\r\n]*)(\r\n|\n|\r|\\Z)")
_TRAILING_BLANKS_MAX = 3
_QUOTED_LINES_MAX = 3
_QUOTED_HUNK_CHARS_MAX = 120


@fast_dataclass(slots=True, frozen=True)
class HunkLine:
    op: Op
    text: str


@fast_dataclass(slots=True, frozen=True)
class V4aHunk:
    lines: tuple[HunkLine, ...]
    anchors: tuple[str, ...] = ()
    at_end: bool = False

    @property
    def old(self) -> tuple[str, ...]:
        return tuple(line.text for line in self.lines if line.op != "+")

    @property
    def changes(self) -> bool:
        return any(line.op != " " for line in self.lines)


def apply_hunks(text: str, hunks: Sequence[V4aHunk], *, name: str) -> str:
    """The text with the hunks applied. Refuses with `hunk_rejected` or `ambiguous_matches`; `name` is for messages."""
    bom = _BOM if text.startswith(_BOM) else ""
    # If no hunk contains the byte order mark, the patch is about the text after it.
    if bom and any(line.text.startswith(_BOM) for hunk in hunks for line in hunk.lines):
        bom = ""
    lines = _split(text[len(bom) :])
    placings = _place_all(_Page([line for line, _ in lines]), hunks, name)
    return bom + "".join(_rewritten(lines, placings))


def _split(text: str) -> list[tuple[str, str]]:
    """Lines with their endings: CRLF, LF or CR; an unfinished last line has none."""
    found = [(match[1], match[2]) for match in _LINE.finditer(text)]
    return found[:-1] if found and found[-1] == ("", "") else found


# Finds the first line from `start` on where a block of lines is, if it ends before `stop`.
Seek: TypeAlias = "Callable[[int, int], int | None]"

_GRADES: tuple[Callable[[str], str], ...] = (
    lambda line: line,
    lambda line: line.rstrip(WHITE_SPACE),
    lambda line: line.strip(WHITE_SPACE),
    line_key,
)


@fast_dataclass(slots=True, frozen=True)
class _Script:
    """Lines as numbers (equal lines have equal numbers), and as a text with one character for each number.

    So `str.find` searches for lines, in linear time. There are more numbers than characters, so several numbers may
    share a character: `find` compares the numbers too.
    """

    numbers: dict[str, int]
    lines: list[int]
    text: str

    def find(self, wanted: list[int], start: int, stop: int) -> int | None:
        word = _letters(wanted)
        at = self.text.find(word, start, stop)
        while at >= 0 and self.lines[at : at + len(wanted)] != wanted:
            at = self.text.find(word, at + 1, stop)
        return at if at >= 0 else None


def _letters(numbers: Sequence[int]) -> str:
    return "".join(chr(number % (sys.maxunicode + 1)) for number in numbers)


class _Page:
    """The lines of a text, searchable by grade."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._scripts: dict[int, _Script] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def first(self, block: Sequence[str], start: int) -> tuple[Seek, int] | None:
        """The first place of the block from `start` on, by the best grade that finds it, and a search by that grade."""
        for grade, key in enumerate(_GRADES):
            script = self._script(grade)
            wanted = [script.numbers.get(key(line), -1) for line in block]
            at = None if -1 in wanted else script.find(wanted, start, len(self))
            if at is not None:
                return partial(script.find, wanted), at
        return None

    def _script(self, grade: int) -> _Script:
        if grade not in self._scripts:
            numbers: dict[str, int] = {}
            lines = [numbers.setdefault(_GRADES[grade](line), len(numbers)) for line in self._lines]
            self._scripts[grade] = _Script(numbers, lines, _letters(lines))
        return self._scripts[grade]


@fast_dataclass(slots=True, frozen=True)
class _Placing:
    """The place of a hunk. `at` are the lines of its anchors and of its old lines; `steps` are their searches."""

    hunk: V4aHunk
    place: int
    steps: tuple[Seek, ...]
    at: tuple[int, ...]


def _place_all(page: _Page, hunks: Sequence[V4aHunk], name: str) -> list[_Placing]:
    """The earliest placing of all hunks in order. Refuses if there is none, or more than one."""
    placings = []
    start = 0
    for number, hunk in enumerate(hunks, start=1):
        placing = _place(page, hunk, start, f"hunk {number} of {name}")
        start = _end_of(placing, start)
        placings.append(placing)
    _require_no_other(placings, len(page), name)
    return placings


def _end_of(placing: _Placing, start: int) -> int:
    if placing.hunk.old:
        return placing.place + len(placing.hunk.old)
    return placing.at[-1] + 1 if placing.at else start


def _place(page: _Page, hunk: V4aHunk, start: int, title: str) -> _Placing:
    for anchors in _anchor_choices(page, hunk, start):
        above = _anchors_at(page, anchors, start)
        placing = None if above is None else _below(page, hunk, above, start)
        if placing is not None:
            return placing
    if _anchors_at(page, hunk.anchors, start) is None:
        missing = f"its @@ lines are not in the file from line {start + 1} on: {_quoted(hunk.anchors)}."
    else:
        missing = f"these lines are not in the file from line {start + 1} on: {_quoted(hunk.old)}."
    raise _refused("reject", "hunk_rejected", f"{title}: {missing}")


def _anchor_choices(page: _Page, hunk: V4aHunk, start: int) -> Iterator[tuple[str, ...]]:
    """The anchors; then without one that repeats the first old line; then without those above the hunk before."""
    yield hunk.anchors
    if hunk.anchors and hunk.old and line_key(hunk.anchors[-1]) == line_key(hunk.old[0]):
        yield hunk.anchors[:-1]
    for number, anchor in enumerate(hunk.anchors, start=1):
        found = page.first([anchor], 0)
        if found is None or found[1] >= start:
            return
        yield hunk.anchors[number:]


def _anchors_at(page: _Page, anchors: Sequence[str], start: int) -> list[tuple[Seek, int]] | None:
    above: list[tuple[Seek, int]] = []
    for anchor in anchors:
        found = page.first([anchor], start)
        if found is None:
            return None
        above.append(found)
        start = found[1] + 1
    return above


def _below(page: _Page, hunk: V4aHunk, above: Sequence[tuple[Seek, int]], start: int) -> _Placing | None:
    start = above[-1][1] + 1 if above else start
    for variant, at_end in _variants(hunk):
        if not variant.old:
            return _placing(variant, above, len(page))
        found = _at_end(page, variant.old) if at_end else page.first(variant.old, start)
        if found is not None and found[1] >= start:
            return _placing(variant, [*above, found], found[1])
    return None


def _placing(hunk: V4aHunk, found: Sequence[tuple[Seek, int]], place: int) -> _Placing:
    return _Placing(hunk, place, tuple(seek for seek, _ in found), tuple(at for _, at in found))


def _at_end(page: _Page, block: Sequence[str]) -> tuple[Seek, int] | None:
    last = len(page) - len(block)
    found = page.first(block, last) if last >= 0 else None
    return None if found is None else (lambda start, _: last if start <= last else None, last)


def _require_no_other(placings: Sequence[_Placing], size: int, name: str) -> None:
    """Check from the last hunk to the first that none could also be further down, before the next one."""
    limit = size
    for number, placing in reversed([*enumerate(placings, start=1)]):
        if placing.hunk.changes and placing.hunk.old:
            latest = _latest_start(placing, limit)
            if latest is None:
                message = f"hunk {number} of {name}: more than one place fits {_quoted(placing.hunk.old)}."
                message += " Add lines around the change, or an @@ line above it, until there is one."
                raise _refused("reject", "ambiguous_matches", message)
            limit = latest
        elif placing.at:
            limit = placing.at[0]


def _latest_start(placing: _Placing, limit: int) -> int | None:
    """The last line from which the search for this hunk finds its place; None if it can also find another one."""
    at = [*placing.at]
    while True:
        first = at[0]
        if not _advance(placing.steps, at, limit):
            return first
        if at[-1] != placing.place:
            return None


def _advance(steps: Sequence[Seek], at: list[int], limit: int) -> bool:
    """Move the first anchor to its next line, and the following ones only as far as necessary."""
    start = at[0] + 1
    for level, seek in enumerate(steps):
        if level and at[level] >= start:
            return True
        found = seek(start, limit)
        if found is None:
            return False
        at[level] = found
        start = found + 1
    return True


def _variants(hunk: V4aHunk) -> Iterator[tuple[V4aHunk, bool]]:
    """The hunk, then the hunk without blank lines at its end; `at_end` variants, if it has them, come first."""
    shorter = [hunk]
    while len(shorter) <= _TRAILING_BLANKS_MAX and shorter[-1].old and is_blank(shorter[-1].old[-1]):
        shorter.append(_without_last_blank(shorter[-1]))
    if hunk.at_end:
        yield from ((variant, True) for variant in shorter if variant.old)
    yield from ((variant, False) for variant in shorter)


def _without_last_blank(hunk: V4aHunk) -> V4aHunk:
    """The hunk without its blank last line, which often only ends the line before it."""
    lines = [*hunk.lines]
    _drop_last_blank(lines, of="-", other="+")
    _drop_last_blank(lines, of="+", other="-")
    return replace(hunk, lines=tuple(lines))


def _drop_last_blank(lines: list[HunkLine], *, of: Op, other: Op) -> None:
    """Remove the last line of one side, old or new, if it is blank; a kept line stays on the other side."""
    at = max((index for index, line in enumerate(lines) if line.op != other), default=-1)
    if at < 0 or not is_blank(lines[at].text):
        return
    if lines[at].op == of:
        del lines[at]
    else:
        lines[at] = HunkLine(other, lines[at].text)


def _rewritten(lines: Sequence[tuple[str, str]], placings: Sequence[_Placing]) -> Iterator[str]:
    ending = next((end for _, end in lines if end), "\n")
    removed, added = _changes(placings)
    for index, (text, end) in enumerate(lines):
        yield from (new + ending for new in added[index])
        if index not in removed:
            yield text + (end or ending)
    yield from (new + ending for new in added[len(lines)])


def _changes(placings: Sequence[_Placing]) -> tuple[set[int], defaultdict[int, list[str]]]:
    """The removed lines, and the new lines by the line before which they come."""
    removed: set[int] = set()
    added: defaultdict[int, list[str]] = defaultdict(list)
    for placing in placings:
        run = cursor = placing.place
        for line in placing.hunk.lines:
            if line.op == "+":
                added[run].append(line.text)
                continue
            if line.op == "-":
                removed.add(cursor)
            cursor += 1
            run = run if line.op == "-" else cursor
    return removed, added


def _quoted(lines: Sequence[str]) -> str:
    """The beginning of some lines, shortened, as one line."""
    shown = [repr(line[:_QUOTED_HUNK_CHARS_MAX]) for line in lines[:_QUOTED_LINES_MAX]]
    return ", ".join(shown) + (", …" if len(lines) > _QUOTED_LINES_MAX else "")


_BEGIN = "*** Begin Patch"
_END = "*** End Patch"
_END_OF_FILE = "*** End of File"
_MOVE = "*** Move to:"
_HEREDOC = re.compile(r"""(?:[\w./-]+[ \t]+)*<<-?[ \t]*(['"]?)(\w+)\1""")
_HEADER = re.compile(r"\*\*\* (Add|Delete|Update) File: (.+)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\*\*\* Environment ID:\s*\S.*", re.DOTALL)
_QUOTED_CHARS_MAX = 120


@fast_dataclass(slots=True, frozen=True)
class AddFile:
    path: str
    content: str


@fast_dataclass(slots=True, frozen=True)
class DeleteFile:
    path: str


@fast_dataclass(slots=True, frozen=True)
class UpdateFile:
    path: str
    move_to: str | None
    hunks: tuple[V4aHunk, ...]


Operation: TypeAlias = AddFile | DeleteFile | UpdateFile


def parse_v4a(patch: str) -> tuple[Operation, ...]:
    """The operations of a patch in its order; paths are as written. Refuses with `parse_error`/`patch_parse_error`."""
    try:
        patch.encode("utf-8")
    except UnicodeEncodeError:
        _fail("the patch contains half of a surrogate pair, which no file can contain.")
    lines = [line.rstrip("\r") for line in patch.strip(WHITE_SPACE).split("\n")]
    sections = _sections(_body(_unwrapped(lines)))
    if not sections:
        _fail("the patch has no operations.")
    return tuple(_PARSERS[section.kind](section) for section in sections)


def _fail(message: str, number: int | None = None) -> NoReturn:
    message = message if number is None else f"line {number} of the patch: {message}"
    raise _refused("parse_error", "patch_parse_error", message)


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


@fast_dataclass(slots=True)
class _Section:
    """The lines of one operation, each with its number in the patch."""

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
    """The line as a marker, without surrounding space. In an update a leading space means a kept line, so it stays."""
    in_update = bool(sections) and sections[-1].kind == "Update"
    return line.rstrip(WHITE_SPACE) if in_update else line.strip(WHITE_SPACE)


def _add(section: _Section) -> AddFile:
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
    return AddFile(section.path, "".join(line + "\n" for line in content))


def _delete(section: _Section) -> DeleteFile:
    for number, line in section.lines:
        if not is_blank(line):
            _fail(f"nothing follows *** Delete File but the next operation, not {_shown(line)}.", number)
    return DeleteFile(section.path)


def _update(section: _Section) -> UpdateFile:
    lines = section.lines
    move_to = _move_to(*lines[0]) if lines else None
    if move_to is not None:
        lines = lines[1:]
    hunks = _hunks(lines)
    if not hunks and move_to is None:
        if not any(is_blank(line) for _, line in lines):
            _fail(f"the update of {_shown(section.path)} has no hunks.", section.number)
        hunks = (V4aHunk((HunkLine(" ", ""),)),)  # One blank kept line, which changes nothing.
    return UpdateFile(section.path, move_to, hunks)


def _move_to(number: int, line: str) -> str | None:
    """The path that a `*** Move to:` line names; None for any other line."""
    line = line.rstrip(WHITE_SPACE)
    if line != _MOVE:
        return line.removeprefix(_MOVE + " ") if line.startswith(_MOVE + " ") else None
    _fail("*** Move to: names no path.", number)


_PARSERS: dict[str, Callable[[_Section], Operation]] = {"Add": _add, "Delete": _delete, "Update": _update}


@fast_dataclass(slots=True)
class _Draft:
    """A hunk while the parser reads its lines."""

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
        """Whether it has only blank lines: these are between two operations or two anchors, and no hunk."""
        return all(line.op == " " and is_blank(line.text) for line in self.lines)

    def finished(self) -> V4aHunk:
        return V4aHunk(tuple(self.lines), tuple(self.anchors), self.at_end)


def _hunks(lines: Sequence[tuple[int, str]]) -> tuple[V4aHunk, ...]:
    hunks: list[V4aHunk] = []
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


# Reads the bytes of a file; None if there is none. It may refuse.
Read: TypeAlias = Callable[[RepoPath], bytes | None]


@fast_dataclass(slots=True, frozen=True)
class Staged:
    """The content of every path of a patch, before and after; None means no file.

    `moves` maps a path to the path from which its file comes, so that the file keeps its mode and attributes. Removals
    come before writes, because a patch may create a file in the place of a directory that it empties.
    """

    files: Mapping[RepoPath, bytes | None]
    originals: Mapping[RepoPath, bytes | None]
    moves: Mapping[RepoPath, RepoPath]
    ops: Mapping[str, int]

    @property
    def changed_paths(self) -> tuple[RepoPath, ...]:
        changed = [path for path, content in self.files.items() if content != self.originals[path]]
        return tuple(sorted(changed, key=path_bytes))


def stage_v4a(
    operations: Sequence[Operation], read: Read, *, path_of: Callable[[str], RepoPath] = parse_repo_path
) -> Staged:
    """Apply the operations in order, in memory. Each sees the results of earlier ones; one failure refuses all."""
    targets = [(_resolved(operation.path, path_of), _destination(operation, path_of)) for operation in operations]
    staged = _StagedFiles(read)
    for operation, (path, destination) in zip(operations, targets, strict=True):
        _apply(staged, operation, path, destination)
    _require_no_file_below_a_file(staged.files)
    return Staged(staged.files, staged.originals, staged.moves(), _counts(operations))


def _destination(operation: Operation, path_of: Callable[[str], RepoPath]) -> RepoPath | None:
    if isinstance(operation, UpdateFile) and operation.move_to is not None:
        return _resolved(operation.move_to, path_of)
    return None


def _resolved(text: str, path_of: Callable[[str], RepoPath]) -> RepoPath:
    try:
        path = path_of(text)
    except RequestError as error:
        raise _refused("reject", "invalid_path", error.message) from None
    if path == ROOT:
        raise _refused("reject", "invalid_path", f"{text!r} is the root, not a file.")
    return path


@fast_dataclass(slots=True)
class _StagedFiles:
    """The files after the operations so far. `_origins` has the path of each file before; None for a new file."""

    read: Read
    files: dict[RepoPath, bytes | None] = field(default_factory=dict)
    originals: dict[RepoPath, bytes | None] = field(default_factory=dict)
    _origins: dict[RepoPath, RepoPath | None] = field(default_factory=dict)

    def get(self, path: RepoPath) -> bytes | None:
        if path not in self.files:
            self.files[path] = self.originals[path] = self.read(path)
            self._origins[path] = path if self.files[path] is not None else None
        return self.files[path]

    def put(self, path: RepoPath, content: bytes) -> None:
        self.get(path)
        self.files[path] = content

    def remove(self, path: RepoPath) -> None:
        self.files[path] = self._origins[path] = None

    def move(self, path: RepoPath, to: RepoPath) -> None:
        content, origin = self.files[path], self._origins[path]
        self.remove(path)
        self.get(to)
        self.files[to], self._origins[to] = content, origin

    def moves(self) -> dict[RepoPath, RepoPath]:
        return {path: origin for path, origin in self._origins.items() if origin is not None and origin != path}


def _apply(staged: _StagedFiles, operation: Operation, path: RepoPath, destination: RepoPath | None) -> None:
    if isinstance(operation, AddFile):
        staged.put(path, operation.content.encode("utf-8"))
        return
    content = staged.get(path)
    if content is None:
        verb = "delete" if isinstance(operation, DeleteFile) else "update"
        raise _refused("not_found", f"{verb}_target_not_found", f"There is no file {operation.path!r} to {verb}.")
    if isinstance(operation, DeleteFile):
        staged.remove(path)
        return
    if operation.hunks:
        staged.put(path, _updated(content, operation))
    if destination is not None and destination != path:
        staged.move(path, destination)


def _updated(content: bytes, operation: UpdateFile) -> bytes:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        message = f"{operation.path!r} is not UTF-8 text, so hunks cannot be applied to it."
        raise _refused("reject", "update_target_non_utf8", message) from None
    return apply_hunks(text, operation.hunks, name=operation.path).encode("utf-8")


def _require_no_file_below_a_file(files: Mapping[RepoPath, bytes | None]) -> None:
    present = {path for path, content in files.items() if content is not None}
    for path in sorted(present, key=path_bytes):
        for above in ancestors_of(path):
            if above in present:
                raise _refused("reject", "invalid_path", f"{path!r} is below {above!r}, which is a file.")


def _counts(operations: Sequence[Operation]) -> dict[str, int]:
    """A move is an update too."""
    kinds = Counter(type(operation) for operation in operations)
    moves = sum(isinstance(operation, UpdateFile) and operation.move_to is not None for operation in operations)
    return {"add": kinds[AddFile], "update": kinds[UpdateFile], "delete": kinds[DeleteFile], "move": moves}


def _refused(status: str, code: str, message: str) -> Refused:
    return Refused(status, code, message, errors=[message])
