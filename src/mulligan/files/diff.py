"""Computes the difference of two texts as a unified diff that git and our own strict applier apply exactly. Pure.

`match_blocks` finds the lines that two texts share, in three ways, the exact one first:

1. it sets aside what both texts begin and end with, and lines that only one of them has;
2. it searches the shortest edit script (Myers, 1986), if that is short;
3. else it takes lines that occur once on both sides, in the longest common order, as anchors, and searches again
between them.

All of this has one budget of work, so time is bounded whatever the texts. What is unmatched when the budget is spent
counts as different: the diff stays correct, only longer.

The module also has the file names of unified diffs: quoting, leading directories, and which names a patch may touch.
"""

from __future__ import annotations

import re
import stat
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import NamedTuple, NewType, TypeVar

from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import BINARY_PROBE_BYTES
from mulligan.values.paths import ROOT, RepoPath, path_bytes, path_from_bytes
from mulligan.values.text import is_utf8

# A file name of a patch, decoded like a path, but not checked to be one.
PatchName = NewType("PatchName", str)

DEV_NULL = b"/dev/null"

_LETTERS = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
_QUOTED = re.compile(rb'"((?:[^"\\\n]|\\(?:[abtnvfr"\\]|[0-3][0-7]{2}))*)"')
_ESCAPE = re.compile(rb'\\([abtnvfr"\\]|[0-3][0-7]{2})')
_ESCAPED_AS = {code: b"\\" + letter for letter, code in _LETTERS.items()}


def unquote(text: bytes) -> tuple[bytes, bytes] | None:
    """The name in C-style quotes at the start of `text`, and the rest. None if the quotes are not well-formed."""
    found = _QUOTED.match(text)
    if found is None:
        return None
    return _ESCAPE.sub(_unescaped, found[1]), text[found.end() :]


def _unescaped(escape: re.Match[bytes]) -> bytes:
    code = _LETTERS.get(escape[1])
    return bytes([int(escape[1], 8) if code is None else code])


def quote(name: bytes) -> str:
    """The name as git writes it: printable UTF-8 as it is, anything else in C-style quotes."""
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if text and not any(byte < 32 or byte in b'"\\\x7f' for byte in name):
        return text
    return '"' + b"".join(map(_escaped, name)).decode("ascii") + '"'


def _escaped(byte: int) -> bytes:
    if byte in _ESCAPED_AS:
        return _ESCAPED_AS[byte]
    return bytes([byte]) if 32 <= byte < 127 else b"\\%03o" % byte


def without_leading(name: bytes, strip: int) -> bytes | None:
    """The name without its first `strip` directories. None if it has fewer, or nothing is left."""
    parts = name.split(b"/", strip)
    return parts[strip] or None if len(parts) > strip else None


def admit(name: bytes) -> RepoPath | None:
    """The path of a name. None for the root, a path outside it or in a `.git`, and `~` names."""
    if name.startswith(b"~") or name.endswith(b"/"):
        return None
    try:
        path = path_from_bytes(name)
    except MulliganError:
        return None
    inside_git = any(part.lower() == b".git" for part in path_bytes(path).split(b"/"))
    return None if path == ROOT or inside_git else path


@fast_dataclass(slots=True, frozen=True)
class HeaderName:
    """A file name in a header. `path` is None if a patch may not touch a file of that name."""

    text: PatchName
    path: RepoPath | None


def named(name: bytes, strip: int) -> HeaderName:
    rest = without_leading(name, strip)
    text = PatchName((name if rest is None else rest).decode("utf-8", "surrogateescape"))
    return HeaderName(text, None if rest is None else admit(rest))


T = TypeVar("T", bound=Hashable)

_WORK_STEPS = 2_000_000
_EDITS_MAX = 400
_ROUNDS_MAX = 8


class MatchingBlock(NamedTuple):
    """`a[a_start : a_start + length]` equals `b[b_start : b_start + length]`."""

    a_start: int
    b_start: int
    length: int


class _Box(NamedTuple):
    """The parts of both texts that still have to be compared with each other."""

    a_lo: int
    a_hi: int
    b_lo: int
    b_hi: int


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ends. Only LF ends a line; CR, form feed and the like are content."""
    return BytesIO(data).readlines()


def looks_binary(data: bytes) -> bool:
    return b"\0" in data[:BINARY_PROBE_BYTES]


def match_blocks(a: Sequence[T], b: Sequence[T]) -> list[MatchingBlock]:
    """The blocks that `a` and `b` share, in order. Blocks never touch and are never empty.

    An insertion or deletion that fits in several places goes into the last one, unless an earlier place joins it to
    another change; so equal edits give equal diffs.
    """
    ids: dict[T, int] = {}
    left = [ids.setdefault(item, len(ids)) for item in a]
    right = [ids.setdefault(item, len(ids)) for item in b]
    return _settled(_joined(_matches(left, right)), left, right)


def _matches(a: list[int], b: list[int]) -> Iterator[MatchingBlock]:
    whole = _Box(0, len(a), 0, len(b))
    head, tail = _common_ends(a, b, whole)
    yield MatchingBlock(0, 0, head)
    in_a, in_b = set(a), set(b)
    a_kept = [i for i in range(head, len(a) - tail) if a[i] in in_b]
    b_kept = [j for j in range(head, len(b) - tail) if b[j] in in_a]
    search = _Search([a[i] for i in a_kept], [b[j] for j in b_kept])
    for found in search.run():
        for step in range(found.length):
            yield MatchingBlock(a_kept[found.a_start + step], b_kept[found.b_start + step], 1)
    yield MatchingBlock(len(a) - tail, len(b) - tail, tail)


def _common_ends(a: list[int], b: list[int], box: _Box) -> tuple[int, int]:
    """The length of the common beginning, and of the common end of the rest."""
    shorter = min(box.a_hi - box.a_lo, box.b_hi - box.b_lo)
    head = 0
    while head < shorter and a[box.a_lo + head] == b[box.b_lo + head]:
        head += 1
    tail = 0
    while tail < shorter - head and a[box.a_hi - 1 - tail] == b[box.b_hi - 1 - tail]:
        tail += 1
    return head, tail


class _Search:
    """A search in two lists of ids, with the rest of its budget."""

    def __init__(self, a: list[int], b: list[int]) -> None:
        self.a = a
        self.b = b
        self.steps_left = _WORK_STEPS + _ROUNDS_MAX * (len(a) + len(b))
        self.found: list[MatchingBlock] = []

    def run(self) -> list[MatchingBlock]:
        pending = [_Box(0, len(self.a), 0, len(self.b))]
        while pending:
            box = self._trimmed(pending.pop())
            if box.a_lo < box.a_hi and box.b_lo < box.b_hi:
                pending.extend(self._divided(box))
        return sorted(self.found)

    def _trimmed(self, box: _Box) -> _Box:
        head, tail = _common_ends(self.a, self.b, box)
        self.steps_left -= head + tail
        if head:
            self.found.append(MatchingBlock(box.a_lo, box.b_lo, head))
        if tail:
            self.found.append(MatchingBlock(box.a_hi - tail, box.b_hi - tail, tail))
        return _Box(box.a_lo + head, box.a_hi - tail, box.b_lo + head, box.b_hi - tail)

    def _divided(self, box: _Box) -> list[_Box]:
        """Match a part of the box. Returns the rest; nothing if all is matched or the budget is spent."""
        if self.steps_left <= 0:
            return []
        walk = _Walk(self.a[box.a_lo : box.a_hi], self.b[box.b_lo : box.b_hi])
        finished = walk.go(self.steps_left)
        self.steps_left -= walk.steps
        if not finished and (anchors := self._anchors(box)):
            return self._between(anchors, box)
        a_end, b_end = walk.furthest()
        self.found.extend(
            MatchingBlock(box.a_lo + x, box.b_lo + y, length) for x, y, length in walk.matches(a_end, b_end)
        )
        return [] if finished else [_Box(box.a_lo + a_end, box.a_hi, box.b_lo + b_end, box.b_hi)]

    def _anchors(self, box: _Box) -> list[tuple[int, int]]:
        self.steps_left -= box.a_hi - box.a_lo + box.b_hi - box.b_lo
        if self.steps_left <= 0:
            return []
        b_once = _once(self.b, box.b_lo, box.b_hi)
        pairs = [(i, b_once[item]) for item, i in _once(self.a, box.a_lo, box.a_hi).items() if item in b_once]
        return _longest_rising(pairs)

    def _between(self, anchors: list[tuple[int, int]], box: _Box) -> list[_Box]:
        gaps = []
        a_lo, b_lo = box.a_lo, box.b_lo
        for i, j in anchors:
            self.found.append(MatchingBlock(i, j, 1))
            gaps.append(_Box(a_lo, i, b_lo, j))
            a_lo, b_lo = i + 1, j + 1
        gaps.append(_Box(a_lo, box.a_hi, b_lo, box.b_hi))
        return gaps


class _Walk:
    """The shortest edit script from one list to another, by growing edit distance, up to a limit.

    `reached[d]` has, for each diagonal k = -d, -d+2 … d, the furthest position in `a` that d edits reach.
    """

    def __init__(self, a: list[int], b: list[int]) -> None:
        self.a = a
        self.b = b
        self.steps = 0
        self.reached: list[list[int]] = []

    def go(self, steps_max: int) -> bool:
        """Whether the ends of both lists were reached."""
        row = [_snake_end(self.a, self.b, 0, 0)]
        self.reached.append(row)
        goal = len(self.a) - len(self.b)
        while not self._ends(row, goal):
            if len(self.reached) > _EDITS_MAX or self.steps > steps_max:
                return False
            row = self._next_row(row)
            self.reached.append(row)
        return True

    def _ends(self, row: list[int], goal: int) -> bool:
        edits = len(self.reached) - 1
        return abs(goal) <= edits and (goal + edits) % 2 == 0 and row[(goal + edits) // 2] >= len(self.a)

    def _next_row(self, row: list[int]) -> list[int]:
        """The row with one more edit. A deletion enters a diagonal from below, an insertion from above."""
        a, b = self.a, self.b
        a_len, b_len = len(a), len(b)
        edits = len(self.reached)
        after = []
        for slot in range(edits + 1):
            deleted = row[slot - 1] + 1 if slot > 0 else -1
            x = max(deleted, row[slot] if slot < edits else -1)
            start = x
            y = x - (2 * slot - edits)
            while x < a_len and y < b_len and a[x] == b[y]:
                x += 1
                y += 1
            self.steps += x - start
            after.append(x)
        self.steps += edits
        return after

    def furthest(self) -> tuple[int, int]:
        """The furthest point of the last row inside both lists."""
        edits = len(self.reached) - 1
        ends = ((x, x - (2 * slot - edits)) for slot, x in enumerate(self.reached[-1]))
        inside = [(x, y) for x, y in ends if x <= len(self.a) and y <= len(self.b)]
        return max(inside, key=sum, default=(0, 0))

    def matches(self, x: int, y: int) -> Iterator[tuple[int, int, int]]:
        """The matching runs on the path from a point of the last row back to the start."""
        for edits in range(len(self.reached) - 1, 0, -1):
            row = self.reached[edits - 1]
            slot = (x - y + edits) // 2
            deleted = row[slot - 1] + 1 if slot > 0 else -1
            kept = row[slot] if slot < edits else -1
            start = max(deleted, kept)
            if x > start:
                yield start, start - (x - y), x - start
            y = start - (x - y)
            x = start
            if deleted >= kept:
                x -= 1
            else:
                y -= 1
        if x:
            yield 0, 0, x


def _snake_end(a: list[int], b: list[int], x: int, y: int) -> int:
    while x < len(a) and y < len(b) and a[x] == b[y]:
        x += 1
        y += 1
    return x


def _once(items: list[int], lo: int, hi: int) -> dict[int, int]:
    """The index of each item that occurs exactly once in `items[lo:hi]`, in order."""
    places: dict[int, int] = {}
    for place in range(lo, hi):
        item = items[place]
        places[item] = -1 if item in places else place
    return {item: place for item, place in places.items() if place >= 0}


def _longest_rising(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence, of pairs sorted by their first part, whose second parts rise too."""
    tops: list[int] = []
    top_pairs: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        pile = bisect_left(tops, j)
        before.append(top_pairs[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [j]
        top_pairs[pile : pile + 1] = [index]
    chain = []
    index = top_pairs[-1] if top_pairs else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


def _joined(blocks: Iterator[MatchingBlock]) -> list[list[int]]:
    """The same matches as mutable runs; those that touch become one."""
    runs: list[list[int]] = []
    for a_start, b_start, length in blocks:
        if not length:
            continue
        if runs and runs[-1][0] + runs[-1][2] == a_start and runs[-1][1] + runs[-1][2] == b_start:
            runs[-1][2] += length
        else:
            runs.append([a_start, b_start, length])
    return runs


def _settled(runs: list[list[int]], a: list[int], b: list[int]) -> list[MatchingBlock]:
    """Slide each pure insertion or deletion up as far as possible, where it joins others, then down."""
    out = [[0, 0, 0]]
    for run in [*runs, [len(a), len(b), 0]]:
        _slide_up(out, run, a, b)
        _slide_down(out[-1], run, a, b)
        if run[2]:
            out.append(run)
    return [MatchingBlock(*run) for run in out if run[2]]


def _gap(run: list[int], following: list[int], a: list[int], b: list[int]) -> tuple[list[int], int, int] | None:
    """The list and range of a change that is only an insertion or only a deletion; else None."""
    a_lo, b_lo = run[0] + run[2], run[1] + run[2]
    if a_lo == following[0] and b_lo < following[1]:
        return b, b_lo, following[1]
    if b_lo == following[1] and a_lo < following[0]:
        return a, a_lo, following[0]
    return None


def _slide_up(out: list[list[int]], run: list[int], a: list[int], b: list[int]) -> None:
    while gap := _gap(out[-1], run, a, b):
        items, lo, hi = gap
        above = out[-1]
        count = 0
        while count < above[2] and items[lo - 1 - count] == items[hi - 1 - count]:
            count += 1
        above[2] -= count
        run[0], run[1], run[2] = run[0] - count, run[1] - count, run[2] + count
        if above[2] or len(out) == 1:
            return
        out.pop()


def _slide_down(above: list[int], run: list[int], a: list[int], b: list[int]) -> None:
    gap = _gap(above, run, a, b)
    if gap is None:
        return
    items, lo, hi = gap
    count = 0
    while count < run[2] and items[lo + count] == items[hi + count]:
        count += 1
    above[2] += count
    run[0], run[1], run[2] = run[0] + count, run[1] + count, run[2] - count


class Edit(NamedTuple):
    """Lines `a_lo:a_hi` of one text become lines `b_lo:b_hi` of the other."""

    a_lo: int
    a_hi: int
    b_lo: int
    b_hi: int


def edits(before: Sequence[bytes], after: Sequence[bytes]) -> list[Edit]:
    """The edits between the matching blocks of two texts, in order. No two edits touch."""
    found = []
    a_lo = b_lo = 0
    for a_hi, b_hi, length in [*match_blocks(before, after), (len(before), len(after), 0)]:
        if a_lo < a_hi or b_lo < b_hi:
            found.append(Edit(a_lo, a_hi, b_lo, b_hi))
        a_lo, b_lo = a_hi + length, b_hi + length
    return found


def line_counts(before: bytes, after: bytes) -> tuple[int, int]:
    """The number of added and of removed lines; 0 for binary files."""
    if looks_binary(before) or looks_binary(after):
        return 0, 0
    found = edits(split_lines(before), split_lines(after))
    return sum(edit.b_hi - edit.b_lo for edit in found), sum(edit.a_hi - edit.a_lo for edit in found)


def unified_diff(
    before: bytes,
    after: bytes,
    *,
    path_before: RepoPath | None,
    path_after: RepoPath | None,
    context: int = 3,
    mode_before: int = 0o644,
    mode_after: int = 0o644,
    only_utf8: bool = False,
) -> str:
    """A git diff of one file, or "" if nothing differs. A path of None means that the file does not exist on that side.

    Modes are permission bits, or `stat.S_IFLNK` for a symbolic link, whose content is its target. A file that becomes a
    link gives a deletion and a creation, because one diff cannot express that.

    Bytes that are not UTF-8 become lone surrogates (`surrogateescape`), so that encoding restores them. With
    `only_utf8`, for readers that cannot take those, a file with such bytes counts as binary.
    """
    if path_before is not None and path_after is not None and stat.S_ISLNK(mode_before) != stat.S_ISLNK(mode_after):
        whole = partial(unified_diff, context=context, only_utf8=only_utf8)
        gone = whole(before, b"", path_before=path_before, path_after=None, mode_before=mode_before)
        return gone + whole(b"", after, path_before=None, path_after=path_after, mode_after=mode_after)
    sides = _Sides(path_before, path_after)
    header = sides.header(mode_before, mode_after)
    is_binary = any(looks_binary(side) or (only_utf8 and not is_utf8(side)) for side in (before, after))
    body = _differ(before, after, sides) if is_binary else _body(before, after, sides, context)
    return sides.first_line() + header + body if header or body else ""


@fast_dataclass(slots=True, frozen=True)
class _Sides:
    before: RepoPath | None
    after: RepoPath | None

    def first_line(self) -> str:
        names = [name for name in (self.before, self.after) if name is not None]
        return f"diff --git {_name('a/', names[0])} {_name('b/', names[-1])}\n" if names else ""

    def header(self, mode_before: int, mode_after: int) -> str:
        old, new = _git_mode(mode_before), _git_mode(mode_after)
        if self.before is None or self.after is None:
            return self._one_sided(old, new)
        lines = f"old mode {old}\nnew mode {new}\n" if old != new else ""
        if self.before != self.after:
            lines += f"rename from {_name('', self.before)}\nrename to {_name('', self.after)}\n"
        return lines

    def _one_sided(self, old: str, new: str) -> str:
        if self.after is not None:
            return f"new file mode {new}\n"
        return f"deleted file mode {old}\n" if self.before is not None else ""

    def names(self) -> tuple[str, str]:
        return _name("a/", self.before), _name("b/", self.after)


def _git_mode(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "120000"
    return "100755" if mode & 0o100 else "100644"


def _name(prefix: str, path: RepoPath | None) -> str:
    return "/dev/null" if path is None else quote(prefix.encode() + path_bytes(path))


def _differ(before: bytes, after: bytes, sides: _Sides) -> str:
    old, new = sides.names()
    return "" if before == after else f"Binary files {old} and {new} differ\n"


def _body(before: bytes, after: bytes, sides: _Sides, context: int) -> str:
    if before == after:
        return ""
    old, new = sides.names()
    # A name with a space ends with a tab, so that readers do not take the text after the space for a time stamp.
    header = "".join(
        f"{mark} {name}\t\n" if " " in name else f"{mark} {name}\n" for mark, name in (("---", old), ("+++", new))
    )
    a, b = split_lines(before), split_lines(after)
    hunks = b"".join(_hunk_lines(a, b, hunk) for hunk in hunks_of(a, b, context))
    return header + hunks.decode("utf-8", "surrogateescape")


def _groups(found: Sequence[Edit], context: int) -> Iterator[list[Edit]]:
    """The edits of each hunk: edits whose context lines would touch are in one hunk."""
    group: list[Edit] = []
    for edit in found:
        if group and edit.a_lo - group[-1].a_hi > 2 * context:
            yield group
            group = []
        group.append(edit)
    if group:
        yield group


@fast_dataclass(slots=True, frozen=True)
class DiffHunk:
    """Edits that a diff shows together, and the range of lines of both texts that it shows."""

    a_lo: int
    a_hi: int
    b_lo: int
    b_hi: int
    edits: tuple[Edit, ...]


def hunks_of(a: Sequence[bytes], b: Sequence[bytes], context: int = 3) -> list[DiffHunk]:
    """The hunks of the diff of two texts, in order. Other functions name a hunk by its index in this list."""
    return [_hunk(a, group, context) for group in _groups(edits(a, b), context)]


def _hunk(a: Sequence[bytes], group: Sequence[Edit], context: int) -> DiffHunk:
    first, last = group[0], group[-1]
    lead, trail = min(context, first.a_lo), min(context, len(a) - last.a_hi)
    return DiffHunk(first.a_lo - lead, last.a_hi + trail, first.b_lo - lead, last.b_hi + trail, tuple(group))


def without_hunks(before: bytes, after: bytes, chosen: Collection[int]) -> bytes:
    """`after` with the chosen hunks undone. Raises `invalid_params` for an index that no hunk has."""
    a, b = split_lines(before), split_lines(after)
    found = hunks_of(a, b)
    for index in chosen:
        if index not in range(len(found)):
            raise fault("invalid_params", f"There is no hunk {index}; the diff has {len(found)}.", field="hunks")
    lines: list[bytes] = []
    at = 0
    for edit in (edit for index in sorted(chosen) for edit in found[index].edits):
        lines += [*b[at : edit.b_lo], *a[edit.a_lo : edit.a_hi]]
        at = edit.b_hi
    return b"".join(lines + b[at:])


def _hunk_lines(a: Sequence[bytes], b: Sequence[bytes], hunk: DiffHunk) -> bytes:
    lines = [f"@@ -{_span(hunk.a_lo, hunk.a_hi)} +{_span(hunk.b_lo, hunk.b_hi)} @@\n".encode()]
    at = hunk.a_lo
    for edit in hunk.edits:
        lines += _marked(b" ", a[at : edit.a_lo])
        lines += _marked(b"-", a[edit.a_lo : edit.a_hi])
        lines += _marked(b"+", b[edit.b_lo : edit.b_hi])
        at = edit.a_hi
    lines += _marked(b" ", a[at : hunk.a_hi])
    return b"".join(lines)


def _span(lo: int, hi: int) -> str:
    """A range of lines for a hunk header.

    It counts from 1, omits a count of one, and states an empty range by its end.
    """
    count = hi - lo
    if count == 1:
        return str(lo + 1)
    return f"{lo + 1 if count else lo},{count}"


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"
