"""Diffs as values for the page: hunks, lines, changed words and token classes. The page makes no markup from text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mulligan.files.diff import DiffHunk, hunks_of, line_counts, looks_binary, match_blocks, split_lines
from mulligan.servers.http.colours import ColourBudget, Colours, Spans
from mulligan.values.entries import DirEntry, Entry, FileEntry, SymlinkEntry, kind_of
from mulligan.values.errors import MulliganError
from mulligan.values.limits import MIB_BYTES

LINES_MAX = 2_000
LINE_MAX_CHARACTERS = 2_000
FILE_MAX_BYTES = 4 * MIB_BYTES
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_ALIKE_MIN = 0.3
_PAIRS_MAX = 400

ReadEntry = Callable[[Entry], bytes]


@dataclass(frozen=True, slots=True)
class Colouring:
    """The colours of one request."""

    colours: Colours
    budget: ColourBudget = field(default_factory=ColourBudget)

    def of(self, name: str, texts: list[str]) -> list[Spans]:
        """The spans of each line; of lines beyond the budget, none."""
        return self.colours.of(name, texts, self.budget) or [[] for _ in texts]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What is asked for: a file before and after. `name` chooses the language of the colours."""

    name: str
    before: Entry
    after: Entry
    origin: str | None = None


def diff_view(one: FileDiff, read: ReadEntry, colouring: Colouring, *, lines_max: int = LINES_MAX) -> dict[str, Any]:
    """`state` says why there are no hunks: `binary`, `large`, `evicted`, `dir`, or `same` if only the mode differs."""
    body: dict[str, Any] = {
        "path": one.name,
        "from": one.origin,
        "before": entry_view(one.before),
        "after": entry_view(one.after),
        "state": "text",
        "added": 0,
        "removed": 0,
        "hunks": [],
        "truncated": False,
    }
    sizes = [entry.size for entry in (one.before, one.after) if isinstance(entry, FileEntry)]
    if any(isinstance(entry, DirEntry) for entry in (one.before, one.after)):
        return body | {"state": "dir"}
    if any(size > FILE_MAX_BYTES for size in sizes):
        return body | {"state": "large"}
    try:
        before, after = read(one.before), read(one.after)
    except MulliganError:
        return body | {"state": "evicted"}
    if looks_binary(before) or looks_binary(after):
        return body | {"state": "binary"}
    if before == after:
        return body | {"state": "same"}
    a, b = split_lines(before), split_lines(after)
    hunks, truncated = _shown(hunks_of(a, b), lines_max)
    added, removed = line_counts(before, after)
    views = [_hunk_view(index, hunk, a, b) for index, hunk in enumerate(hunks)]
    _colour(one.name, views, colouring)
    return body | {"added": added, "removed": removed, "hunks": views, "truncated": truncated}


def entry_view(entry: Entry) -> dict[str, Any]:
    """What kind of thing a path held, and how large it was."""
    size = entry.size if isinstance(entry, FileEntry) else None
    mode = f"{entry.mode & 0o7777:04o}" if isinstance(entry, FileEntry | DirEntry) else None
    return {"kind": kind_of(entry), "size": size, "mode": mode}


def _shown(hunks: Sequence[DiffHunk], lines_max: int) -> tuple[list[DiffHunk], bool]:
    """Whole hunks up to the limit; at least one, which the page shows in part."""
    found: list[DiffHunk] = []
    left = lines_max
    for hunk in hunks:
        left -= (hunk.a_hi - hunk.a_lo) + (hunk.b_hi - hunk.b_lo)
        if left < 0 and found:
            return found, True
        found.append(hunk)
        if left < 0:
            return found, len(hunks) > 1
    return found, False


def _hunk_view(index: int, hunk: DiffHunk, a: Sequence[bytes], b: Sequence[bytes]) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    at, there = hunk.a_lo, hunk.b_lo
    for edit in hunk.edits:
        lines += [_line(" ", a[at + n], at + n, there + n) for n in range(edit.a_lo - at)]
        removed = [_line("-", a[n], n, None) for n in range(edit.a_lo, edit.a_hi)]
        added = [_line("+", b[n], None, n) for n in range(edit.b_lo, edit.b_hi)]
        _mark_words(removed, added)
        lines += removed + added
        at, there = edit.a_hi, edit.b_hi
    lines += [_line(" ", a[at + n], at + n, there + n) for n in range(hunk.a_hi - at)]
    return {
        "index": index,
        "old_start": hunk.a_lo + 1,
        "old_lines": hunk.a_hi - hunk.a_lo,
        "new_start": hunk.b_lo + 1,
        "new_lines": hunk.b_hi - hunk.b_lo,
        "lines": lines[: 2 * LINES_MAX],
    }


def _line(kind: str, raw: bytes, old: int | None, new: int | None) -> dict[str, Any]:
    text = shown_text(raw)
    line: dict[str, Any] = {
        "kind": kind,
        "text": text,
        "old": _number(old),
        "new": _number(new),
        "words": [],
        "spans": [],
    }
    if not raw.endswith(b"\n"):
        line["no_newline"] = True
    return line


def _number(index: int | None) -> int | None:
    return None if index is None else index + 1


def shown_text(raw: bytes) -> str:
    """A line without its end, cut where it is too long for a screen."""
    text = raw.rstrip(b"\n").decode("utf-8", "replace")
    return text if len(text) <= LINE_MAX_CHARACTERS else text[:LINE_MAX_CHARACTERS] + "…"


def _mark_words(removed: Sequence[dict[str, Any]], added: Sequence[dict[str, Any]]) -> None:
    """Of lines that were changed into each other, in order: which words differ."""
    for old, new in _alike(removed, added):
        a, b = _WORD.findall(old["text"]), _WORD.findall(new["text"])
        blocks = match_blocks(a, b)
        old["words"] = _gaps(a, [(block.a_start, block.length) for block in blocks])
        new["words"] = _gaps(b, [(block.b_start, block.length) for block in blocks])


def _alike(removed: Sequence[dict[str, Any]], added: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Pairs of lines in order, chosen so that they have most in common. Of many lines, the first with the first."""
    if len(removed) * len(added) > _PAIRS_MAX:
        return [pair for pair in zip(removed, added, strict=False) if _likeness(*pair) >= _ALIKE_MIN]
    best: list[list[tuple[float, list[tuple[Any, Any]]]]] = [[(0.0, [])] * (len(added) + 1)]
    for old in removed:
        row = [(0.0, list[tuple[Any, Any]]())]
        for n, new in enumerate(added):
            likeness, (sum_before, pairs) = _likeness(old, new), best[-1][n]
            options = [best[-1][n + 1], row[n]]
            if likeness >= _ALIKE_MIN:
                options.insert(0, (sum_before + likeness, [*pairs, (old, new)]))
            row.append(max(options, key=lambda option: option[0]))
        best.append(row)
    return best[-1][-1][1]


def _likeness(old: dict[str, Any], new: dict[str, Any]) -> float:
    """The share of the longer line that both lines have."""
    a, b = _WORD.findall(old["text"]), _WORD.findall(new["text"])
    same = sum(len(word) for block in match_blocks(a, b) for word in a[block.a_start : block.a_start + block.length])
    return same / max(1, len(old["text"]), len(new["text"]))


def _gaps(words: Sequence[str], blocks: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The characters that no block covers, as start and end."""
    found: list[list[int]] = []
    done = 0
    for start, length in [*blocks, (len(words), 0)]:
        if start > done:
            begin = sum(map(len, words[:done]))
            found.append([begin, begin + sum(map(len, words[done:start]))])
        done = start + length
    return found


def _colour(name: str, hunks: Sequence[dict[str, Any]], colouring: Colouring) -> None:
    """The new side and the old side are each coloured as one text, in one request."""
    lines = [line for hunk in hunks for line in hunk["lines"]]
    for side in ("+", "-"):
        mine = [line for line in lines if line["kind"] == side or (side == "+" and line["kind"] == " ")]
        for line, spans in zip(mine, colouring.of(name, [line["text"] for line in mine]), strict=True):
            line["spans"] = spans


def content_reader(read: Callable[[FileEntry], bytes]) -> ReadEntry:
    """A file's bytes, a link's target, and nothing for the rest."""

    def content(entry: Entry) -> bytes:
        if isinstance(entry, FileEntry):
            return read(entry)
        return entry.target.encode("utf-8", "surrogateescape") if isinstance(entry, SymlinkEntry) else b""

    return content
