"""Lines: how bytes fall into them, and which ones two texts share. Pure.

`match_blocks` looks in three ways, the exact one first:

1. what both texts begin and end with, and lines only one of them has, are set aside;
2. the shortest edit script (Myers, 1986), as long as it is short;
3. else lines that occur once on both sides, in the longest common order, as anchors, and again between them.

Every way is charged to one budget, so time is bounded whatever the texts. What is unmatched when the budget is spent is
called different: any answer is correct, more work only makes it shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from io import BytesIO
from typing import NamedTuple, TypeVar

from mulligan.values.limits import BINARY_PROBE_BYTES

T = TypeVar("T", bound=Hashable)

_WORK_STEPS = 2_000_000
_EDITS_MAX = 400
_ROUNDS_MAX = 8


class Block(NamedTuple):
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


def is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def match_blocks(a: Sequence[T], b: Sequence[T]) -> list[Block]:
    """What `a` and `b` share, in order, as few and long blocks as found. Never touching, never empty.

    An insertion or deletion that could stand in several places stands in the last one, unless an earlier place joins
    it to another change; so equal edits are told the same way wherever they come from.
    """
    ids: dict[T, int] = {}
    left = [ids.setdefault(item, len(ids)) for item in a]
    right = [ids.setdefault(item, len(ids)) for item in b]
    return _settled(_joined(_matches(left, right)), left, right)


def _matches(a: list[int], b: list[int]) -> Iterator[Block]:
    whole = _Box(0, len(a), 0, len(b))
    head, tail = _common_ends(a, b, whole)
    yield Block(0, 0, head)
    in_a, in_b = set(a), set(b)
    a_kept = [i for i in range(head, len(a) - tail) if a[i] in in_b]
    b_kept = [j for j in range(head, len(b) - tail) if b[j] in in_a]
    search = _Search([a[i] for i in a_kept], [b[j] for j in b_kept])
    for found in search.run():
        for step in range(found.length):
            yield Block(a_kept[found.a_start + step], b_kept[found.b_start + step], 1)
    yield Block(len(a) - tail, len(b) - tail, tail)


def _common_ends(a: list[int], b: list[int], box: _Box) -> tuple[int, int]:
    """Lengths of the common beginning and, in what it leaves, of the common end."""
    shorter = min(box.a_hi - box.a_lo, box.b_hi - box.b_lo)
    head = 0
    while head < shorter and a[box.a_lo + head] == b[box.b_lo + head]:
        head += 1
    tail = 0
    while tail < shorter - head and a[box.a_hi - 1 - tail] == b[box.b_hi - 1 - tail]:
        tail += 1
    return head, tail


class _Search:
    """One search in two id lists, and the work it has left."""

    def __init__(self, a: list[int], b: list[int]) -> None:
        self.a = a
        self.b = b
        self.steps_left = _WORK_STEPS + _ROUNDS_MAX * (len(a) + len(b))
        self.found: list[Block] = []

    def run(self) -> list[Block]:
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
            self.found.append(Block(box.a_lo, box.b_lo, head))
        if tail:
            self.found.append(Block(box.a_hi - tail, box.b_hi - tail, tail))
        return _Box(box.a_lo + head, box.a_hi - tail, box.b_lo + head, box.b_hi - tail)

    def _divided(self, box: _Box) -> list[_Box]:
        """Matches some of the box and gives back what is left to do. Empty when done, or out of work."""
        if self.steps_left <= 0:
            return []
        walk = _Walk(self.a[box.a_lo : box.a_hi], self.b[box.b_lo : box.b_hi])
        finished = walk.go(self.steps_left)
        self.steps_left -= walk.steps
        if not finished and (anchors := self._anchors(box)):
            return self._between(anchors, box)
        a_end, b_end = walk.furthest()
        self.found.extend(Block(box.a_lo + x, box.b_lo + y, length) for x, y, length in walk.matches(a_end, b_end))
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
            self.found.append(Block(i, j, 1))
            gaps.append(_Box(a_lo, i, b_lo, j))
            a_lo, b_lo = i + 1, j + 1
        gaps.append(_Box(a_lo, box.a_hi, b_lo, box.b_hi))
        return gaps


class _Walk:
    """The shortest edit script from one list to another, by growing edit distance, up to a limit.

    `reached[d]` holds, for each diagonal k = -d, -d+2 … d, how far in `a` one comes with d edits.
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
        """One edit more: each diagonal is entered by a deletion from below or an insertion from above."""
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
        """The point inside both lists that got furthest in the last row."""
        edits = len(self.reached) - 1
        ends = ((x, x - (2 * slot - edits)) for slot, x in enumerate(self.reached[-1]))
        inside = [(x, y) for x, y in ends if x <= len(self.a) and y <= len(self.b)]
        return max(inside, key=sum, default=(0, 0))

    def matches(self, x: int, y: int) -> Iterator[tuple[int, int, int]]:
        """The matching runs on the way back from a point of the last row."""
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
    """Where each item stands that occurs exactly once in `items[lo:hi]`, in order of place."""
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


def _joined(blocks: Iterator[Block]) -> list[list[int]]:
    """The same matches as changeable runs, touching ones made one."""
    runs: list[list[int]] = []
    for a_start, b_start, length in blocks:
        if not length:
            continue
        if runs and runs[-1][0] + runs[-1][2] == a_start and runs[-1][1] + runs[-1][2] == b_start:
            runs[-1][2] += length
        else:
            runs.append([a_start, b_start, length])
    return runs


def _settled(runs: list[list[int]], a: list[int], b: list[int]) -> list[Block]:
    """Moves each pure insertion or deletion up as far as it goes, joining others, then down as far as it goes."""
    out = [[0, 0, 0]]
    for run in [*runs, [len(a), len(b), 0]]:
        _slide_up(out, run, a, b)
        _slide_down(out[-1], run, a, b)
        if run[2]:
            out.append(run)
    return [Block(*run) for run in out if run[2]]


def _gap(run: list[int], following: list[int], a: list[int], b: list[int]) -> tuple[list[int], int, int] | None:
    """The list and range of a change that is only an insertion or only a deletion."""
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
