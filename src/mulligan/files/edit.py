"""Replaces one piece of text by another: finds `old`, and computes the new text of the file.

The first rule that finds anything decides, and everything that it finds is a candidate:

1. `exact`: the very characters, never half of a CRLF;
2. `fuzzy`: the same by the table of look-alikes, unless `old` is nothing but white space. So LF finds CRLF.

Text outside the replaced spans does not change, and the new lines end as the lines around them do. All of it takes time
linear in the text: the searches use `str.find`, and a merge maps offsets back.

The table says what counts as the same text when an exact match fails; edits and patches share it. Any run of white
space equals any other; typographic quotes and dashes equal their plain forms. Nothing else is folded: letters keep
their case and their Unicode form, and a zero-width space is not white space.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Literal, TypeAlias

from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.text import is_utf8

WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space property. `str.strip()` without it would also take the separators U+001C to U+001F."""

LOOK_ALIKES = {
    " ": WHITE_SPACE,
    "'": "\u2018\u2019\u201a\u201b\u02bc",
    '"': "\u201c\u201d\u201e\u201f",
    "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
}
"""Plain character: everything that equals it."""

SPACES = re.compile(" {2,}")
"""Runs of spaces in folded text, which count as one space."""

_FOLD = str.maketrans({alike: plain for plain, alikes in LOOK_ALIKES.items() for alike in alikes})


def fold(text: str) -> str:
    """Every look-alike as its plain character. One to one, so offsets stay valid."""
    return text.translate(_FOLD)


def line_key(line: str) -> str:
    """A key that is equal for two lines that differ only by the table, or by white space at their ends."""
    return SPACES.sub(" ", fold(line)).strip(" ")


def is_blank(text: str) -> bool:
    return not text.strip(WHITE_SPACE)


_CRLF = re.compile("\r\n")
_WHOLE_CRLF = "\ud800"  # Stands for a CRLF; no text contains this character.
_PIECES = re.compile("\r\n|\n|\r|[^\r\n]+")
_LINES_NAMED = 5

Span: TypeAlias = tuple[int, int]


@fast_dataclass(slots=True, frozen=True)
class Edited:
    """The text after the edit, how many places changed, and how they were found."""

    text: str
    replacements: int
    match: Literal["exact", "fuzzy"]


def edit_text(text: str, old: str, new: str, *, replace_all: bool = False) -> Edited:
    """Replace `old` at its only place, or everywhere. Refuses with the statuses and codes of `edit_file`."""
    if not old:
        raise Refused("error", "invalid_input_empty_old_string", "old_string is empty; give the text to replace.")
    if not is_utf8(new.encode("utf-8", "surrogatepass")):
        raise Refused(
            "error", "invalid_params", "new_string contains half of a surrogate pair, which no file can contain."
        )
    spans = _exact(text, old)
    match: Literal["exact", "fuzzy"] = "exact" if spans else "fuzzy"
    spans = spans or _same_by_table(text, old)
    _require_one(text, old, spans, replace_all=replace_all)
    return Edited(_replaced(text, spans, new), len(spans), match)


def _require_one(text: str, old: str, spans: Sequence[Span], *, replace_all: bool) -> None:
    if not spans:
        message = "old_string is not in the file, not even with other white space, quotes or dashes. Read it again."
        if is_blank(old):
            message = (
                "old_string is not in the file. If it is only white space, it must match exactly, line endings too."
            )
        raise Refused("not_found", "edit_target_not_found", message, replacements=0, applied=False)
    if len(spans) > 1 and not replace_all:
        message = (
            f"old_string is in the file {len(spans)} times ({_lines_of(text, spans)}). "
            "Add lines around it until it is unique, or set replace_all."
        )
        raise Refused("ambiguous", "ambiguous_matches", message, replacements=len(spans), applied=False)


def _lines_of(text: str, spans: Sequence[Span]) -> str:
    named = [str(text.count("\n", 0, start) + 1) for start, _ in spans[:_LINES_NAMED]]
    return "lines " + ", ".join(named) + (", …" if len(spans) > _LINES_NAMED else "")


def _exact(text: str, old: str) -> list[Span]:
    if "\r\n" not in text or not (old.startswith("\n") or old.endswith("\r")) or _WHOLE_CRLF in old:
        return [*_occurrences(text, old)]
    view = _squeezed(text, _CRLF, _WHOLE_CRLF)
    return [view.origin(span) for span in _occurrences(view.text, _CRLF.sub(_WHOLE_CRLF, old))]


def _occurrences(text: str, old: str) -> Iterator[Span]:
    """The occurrences from left to right, without overlaps."""
    at = text.find(old)
    while at >= 0:
        end = at + len(old)
        yield at, end
        at = text.find(old, end)


def _same_by_table(text: str, old: str) -> list[Span]:
    if is_blank(old):
        return []
    view = _squeezed(fold(text), SPACES, " ")
    wanted = SPACES.sub(" ", fold(old))
    head = _edge(_pieces(old[: len(old) - len(old.lstrip(WHITE_SPACE))])[::-1])
    tail = _edge(_pieces(old[len(old.rstrip(WHITE_SPACE)) :]))
    return [_fitted(text, view, span, head=head, tail=tail) for span in _occurrences(view.text, wanted)]


@fast_dataclass(slots=True, frozen=True)
class _View:
    """A text in which some runs became one character, with a map to the offsets of the original."""

    text: str
    squeezed_at: list[int]
    removed: list[int]  # the characters that the first n runs lost together

    def origin(self, span: Span) -> Span:
        """The span in the original. A run at its ends belongs to it whole."""
        return self.offset(span[0]), self.offset(span[1])

    def offset(self, at: int) -> int:
        return at + self.removed[bisect_left(self.squeezed_at, at)]


def _squeezed(text: str, runs: re.Pattern[str], mark: str) -> _View:
    squeezed_at: list[int] = []
    removed = [0]
    for run in runs.finditer(text):
        squeezed_at.append(run.start() - removed[-1])
        removed.append(removed[-1] + run.end() - run.start() - 1)
    return _View(runs.sub(mark, text), squeezed_at, removed)


@fast_dataclass(slots=True, frozen=True)
class _Edge:
    """The white space at one end of `old`, read outwards: its line breaks, and whether spaces follow the last."""

    breaks: int
    goes_on: bool

    def taken_of(self, run: Sequence[str]) -> int:
        """The number of characters of a run in the text that this matches.

        It never takes more line breaks than `old` has there.
        """
        breaks = self.breaks
        taken = 0
        for piece in run:
            if not (breaks or (self.goes_on and not _is_break(piece))):
                break
            breaks -= _is_break(piece)
            taken += len(piece)
        return taken


def _edge(run: Sequence[str]) -> _Edge | None:
    return _Edge(sum(map(_is_break, run)), not _is_break(run[-1])) if run else None


def _fitted(text: str, view: _View, span: Span, *, head: _Edge | None, tail: _Edge | None) -> Span:
    """The original of a span without the line breaks that `old` does not have at that end."""
    start, end = view.origin(span)
    if head:
        inner = view.offset(span[0] + 1)
        start = inner - head.taken_of(_pieces(text[start:inner])[::-1])
    if tail:
        inner = view.offset(span[1] - 1)
        end = inner + tail.taken_of(_pieces(text[inner:end]))
    return start, end


def _pieces(run: str) -> list[str]:
    """A run of white space as line breaks and what is between them."""
    return _PIECES.findall(run)


def _is_break(piece: str) -> bool:
    return piece[0] in "\r\n"


def _replaced(text: str, spans: Sequence[Span], new: str) -> str:
    lines = new.replace("\r\n", "\n")
    by_ending = {None: new} | {ending: lines.replace("\n", ending) for ending in ("\r\n", "\n", "\r")}
    pieces = []
    done = 0
    for (start, end), ending in zip(spans, _endings(text, spans) if "\n" in new else repeat(None), strict=False):
        pieces += [text[done:start], by_ending[ending]]
        done = end
    return "".join([*pieces, text[done:]])


def _endings(text: str, spans: Sequence[Span]) -> Iterator[str | None]:
    """The line ending for each span: that of the next line break, else of one before it; None in a text of one line."""
    pattern = re.compile("\r?\n" if "\n" in text else "\r")
    breaks = pattern.finditer(text)
    found = next(breaks, None)
    for start, _ in spans:
        while found is not None and found.start() < start:
            later = next(breaks, None)
            if later is None:
                break
            found = later
        yield found.group() if found is not None else None
