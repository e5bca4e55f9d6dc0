"""Finding where the hunks of a V4A update go in a text, and the text that comes out.

- Hunks are in the order of the text and do not overlap.
- A hunk goes where its old lines are: after its `@@` anchors, each looked for after the one before; with
  `*** End of File` at the end if it fits there. Where that leads nowhere, an anchor that repeats the first old line or
  lies above the hunk before is as good as met.
- Lines are compared exactly, then without trailing, then without any surrounding white space, then by the table of
  `normal`. The first of these grades that finds a place decides.
- If the same grades also allow another placing of all hunks together, the patch is ambiguous. With anchors only the
  place nearest to them counts, so only other anchors can make another placing.
- A hunk without old lines goes to the end. Lines that the patch keeps stay byte for byte; new lines end as the first
  line of the text does; no line is left without a line ending.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.normal import WHITE_SPACE, is_blank, line_key

Op = Literal[" ", "-", "+"]

_BOM = "\ufeff"
_LINE = re.compile("([^\r\n]*)(\r\n|\n|\r|\\Z)")
_TRAILING_BLANKS_MAX = 3
_QUOTED_LINES_MAX = 3
_QUOTED_CHARS_MAX = 120


@plain(slots=True, frozen=True)
class HunkLine:
    op: Op
    text: str


@plain(slots=True, frozen=True)
class Hunk:
    lines: tuple[HunkLine, ...]
    anchors: tuple[str, ...] = ()
    at_end: bool = False

    @property
    def old(self) -> tuple[str, ...]:
        return tuple(line.text for line in self.lines if line.op != "+")

    @property
    def changes(self) -> bool:
        return any(line.op != " " for line in self.lines)


def apply_hunks(text: str, hunks: Sequence[Hunk], *, name: str) -> str:
    """The text with the hunks applied. Refuses with `hunk_rejected` or `ambiguous_matches`; `name` is for messages."""
    bom = _BOM if text.startswith(_BOM) and not _mention_bom(hunks) else ""
    lines = _split(text[len(bom) :])
    placings = _place_all(_Page([line for line, _ in lines]), hunks, name)
    return bom + "".join(_rewritten(lines, placings))


def _mention_bom(hunks: Sequence[Hunk]) -> bool:
    """A patch that does not speak of the byte-order mark means the text behind it."""
    return any(line.text.startswith(_BOM) for hunk in hunks for line in hunk.lines)


def _split(text: str) -> list[tuple[str, str]]:
    """Lines with their endings: CRLF, LF or CR; an unfinished last line has none."""
    found = [(match[1], match[2]) for match in _LINE.finditer(text)]
    return found[:-1] if found and found[-1] == ("", "") else found


Seek: TypeAlias = "Callable[[int, int], int | None]"
"""The first line from `start` on where something is, wholly before `stop`."""

_GRADES: tuple[Callable[[str], str], ...] = (
    lambda line: line,
    lambda line: line.rstrip(WHITE_SPACE),
    lambda line: line.strip(WHITE_SPACE),
    line_key,
)


@plain(slots=True, frozen=True)
class _Script:
    """Lines as numbers, equal lines as equal ones, and as text with one character for each number.

    So `str.find` searches for lines, in linear time. Beyond the number of characters there are, numbers share one,
    hence the second look.
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
        """The best grade that finds the block from `start` on, as a way to look for more, and the first place."""
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


def _only_at(place: int, start: int, _stop: int) -> int | None:
    return place if start <= place else None


@plain(slots=True, frozen=True)
class _Placing:
    """Where a hunk goes. `at` are the lines of its anchors, then of its old lines; `steps` are how they were found."""

    hunk: Hunk
    place: int
    steps: tuple[Seek, ...]
    at: tuple[int, ...]

    @property
    def can_be_misplaced(self) -> bool:
        return self.hunk.changes and bool(self.hunk.old)


def _place_all(page: _Page, hunks: Sequence[Hunk], name: str) -> list[_Placing]:
    """The earliest placing of all hunks in order. Refuses if there is none, or another one."""
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


def _place(page: _Page, hunk: Hunk, start: int, title: str) -> _Placing:
    for anchors in _anchor_choices(page, hunk, start):
        above = _anchors_at(page, anchors, start)
        placing = None if above is None else _below(page, hunk, above, start)
        if placing is not None:
            return placing
    if _anchors_at(page, hunk.anchors, start) is None:
        raise _rejected(f"{title}: its @@ lines are not in the file from line {start + 1} on: {_quoted(hunk.anchors)}.")
    raise _rejected(f"{title}: these lines are not in the file from line {start + 1} on: {_quoted(hunk.old)}.")


def _anchor_choices(page: _Page, hunk: Hunk, start: int) -> Iterator[tuple[str, ...]]:
    """The anchors; without one that is also the first old line; without those that the hunk before has passed."""
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


def _below(page: _Page, hunk: Hunk, above: Sequence[tuple[Seek, int]], start: int) -> _Placing | None:
    start = above[-1][1] + 1 if above else start
    for variant, at_end in _variants(hunk):
        if not variant.old:
            return _placing(variant, above, len(page))
        found = _at_end(page, variant.old) if at_end else page.first(variant.old, start)
        if found is not None and found[1] >= start:
            return _placing(variant, [*above, found], found[1])
    return None


def _placing(hunk: Hunk, found: Sequence[tuple[Seek, int]], place: int) -> _Placing:
    return _Placing(hunk, place, tuple(seek for seek, _ in found), tuple(at for _, at in found))


def _at_end(page: _Page, block: Sequence[str]) -> tuple[Seek, int] | None:
    last = len(page) - len(block)
    found = page.first(block, last) if last >= 0 else None
    return None if found is None else (partial(_only_at, last), last)


def _require_no_other(placings: Sequence[_Placing], size: int, name: str) -> None:
    """From the last hunk to the first: none can move down without meeting the next one."""
    limit = size
    for number, placing in reversed([*enumerate(placings, start=1)]):
        if placing.can_be_misplaced:
            latest = _latest_start(placing, limit)
            if latest is None:
                raise _ambiguous(f"hunk {number} of {name}: more than one place fits {_quoted(placing.hunk.old)}.")
            limit = latest
        elif placing.at:
            limit = placing.at[0]


def _latest_start(placing: _Placing, limit: int) -> int | None:
    """The last line where the search for this hunk could begin and still end in its place; None if elsewhere too."""
    at = [*placing.at]
    while True:
        first = at[0]
        if not _advance(placing.steps, at, limit):
            return first
        if at[-1] != placing.place:
            return None


def _advance(steps: Sequence[Seek], at: list[int], limit: int) -> bool:
    """Move the first anchor to its next line, and those after it only as far as that pushes them."""
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


def _variants(hunk: Hunk) -> Iterator[tuple[Hunk, bool]]:
    """The hunk, then without blank lines at its end; first all of that at the end of the text if it says so."""
    shorter = [hunk]
    while len(shorter) <= _TRAILING_BLANKS_MAX and shorter[-1].old and is_blank(shorter[-1].old[-1]):
        shorter.append(_without_last_blank(shorter[-1]))
    if hunk.at_end:
        yield from ((variant, True) for variant in shorter if variant.old)
    yield from ((variant, False) for variant in shorter)


def _without_last_blank(hunk: Hunk) -> Hunk:
    """A blank last line is often no line of the text but the patch's way to say that the line before it ends."""
    lines = [*hunk.lines]
    _drop_last_blank(lines, of="-", other="+")
    _drop_last_blank(lines, of="+", other="-")
    return replace(hunk, lines=tuple(lines))


def _drop_last_blank(lines: list[HunkLine], *, of: Op, other: Op) -> None:
    """Take the last line from one side, old or new, if it is blank; a kept line stays on the other side."""
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
    """Which lines go, and what comes in front of which line."""
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


def _rejected(message: str) -> Refused:
    return Refused("reject", "hunk_rejected", message, errors=[message])


def _ambiguous(message: str) -> Refused:
    message += " Add lines around the change, or an @@ line above it, until there is one."
    return Refused("reject", "ambiguous_matches", message, errors=[message])


def _quoted(lines: Sequence[str]) -> str:
    """The beginning of some lines, bounded, as one line."""
    shown = [repr(line[:_QUOTED_CHARS_MAX]) for line in lines[:_QUOTED_LINES_MAX]]
    return ", ".join(shown) + (", …" if len(lines) > _QUOTED_LINES_MAX else "")
