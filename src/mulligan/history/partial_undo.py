"""The rest of a call after an undo operation: the caller chose only some of its paths, or a conflict kept them.

A call with such a rest is not undone and can be undone again; then only the rest changes. The record of the undo
operation lists the calls that it undid only in `part`, and those of them of which a conflict `left` something.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace

from mulligan.files.diff import Edit, edits, hunks_of, looks_binary, split_lines, without_hunks
from mulligan.history.cause import PartOfCall
from mulligan.history.multi_root import main_of, with_parts
from mulligan.history.tables import CALLS, CHANGES, TAKEN_IN_PART, WSEQ_END, CallRow, ChangeRow, RootRow
from mulligan.store.protocol import Tx
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import Absent, Change, FileEntry, entry_from_bytes, same_state
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import path_bytes


@fast_dataclass(slots=True, frozen=True)
class UndoneParts:
    """The restored parts of calls: of each call some places, and of some calls everything that is not files."""

    places: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    slices: frozenset[str] = frozenset()


def undone_parts_of(tx: Tx, calls: Sequence[CallRow]) -> UndoneParts:
    """The parts of these calls that undo operations, not undone themselves, have restored."""
    places: dict[str, frozenset[bytes]] = {}
    slices = set[str]()
    for operation in _undo_operations_on(tx, calls):
        cause = operation.undoes
        if cause.hunks:
            # The other hunks of those files can still be undone. Restored lines merge with themselves.
            continue
        part = [call.id for call in calls if call.id in cause.part]
        # By place, because the operation may have worked through another root than the call.
        there = frozenset(
            row.place for one in with_parts(tx, [operation]) for row in tx.select(CHANGES, {"call": one.id})
        )
        places |= {call: places.get(call, frozenset()) | there for call in part}
        slices |= set(cause.left) if cause.verb != "restore" else set()
    return UndoneParts(places, frozenset(slices))


def _undo_operations_on(tx: Tx, calls: Sequence[CallRow]) -> list[CallRow]:
    """The undo operations, not undone themselves, that undid a part of one of the calls."""
    operations = set[str]()
    for call in calls:
        for taken in tx.select(TAKEN_IN_PART, {"call": call.id}):
            operations.add(taken.by)
    # Nearly no call was undone in part, and then no row has to be read.
    if not operations:
        return []
    rows = [row for operation in sorted(operations) if (row := tx.get(CALLS, operation)) is not None]
    return [row for row in rows if row.undone_by is None]


def left_by_conflicts(tx: Tx, calls: Sequence[CallRow]) -> frozenset[str]:
    """The calls of which a conflict left something, when an undo operation that is not undone tried to undo them."""
    operations = _undo_operations_on(tx, calls)
    left = {call for operation in operations for call in operation.undoes.left}
    return frozenset(call.id for call in calls if call.id in left)


def without_undone(tx: Tx, row: ChangeRow) -> ChangeRow:
    """A call's change of a path, adjusted for earlier calls that were undone while it was on top of them.

    One call creates a file, the next moves it away; undo of the first finds nothing to do. Undo of the second must then
    restore what was there before the first. If nothing is left of a change, it becomes a change of nothing.
    """
    if _is_inside_an_undone_change(tx, row):
        return replace(row, before=row.after)
    below: ChangeRow | None = row
    while below is not None:
        row, below = replace(row, before=below.before), _undone_without_effect(tx, below)
    return row


def _undone_without_effect(tx: Tx, row: ChangeRow) -> ChangeRow | None:
    """The change just before at the same place, if its call is undone and the undo changed nothing there."""
    earlier = tx.select(
        CHANGES, {"place": row.place}, between=("wseq", 0, row.wseq), order=("wseq",), descending=True, limit=1
    )
    if not earlier or not _is_same(earlier[0].after, row.before):
        return None
    call = tx.get(CALLS, earlier[0].call)
    if call is None or call.undone_by is None:
        return None
    later = tx.select(CHANGES, {"place": row.place}, between=("wseq", earlier[0].wseq + 1, WSEQ_END))
    calls = (tx.get(CALLS, one.call) for one in later)
    return None if any(main_of(one) == call.undone_by for one in calls if one is not None) else earlier[0]


def _is_inside_an_undone_change(tx: Tx, row: ChangeRow) -> bool:
    """Whether an earlier call was undone later, and its undo found the path as that call had left it.

    Calls delete a file, write it again and delete it again; undo of the first restores the first file. By then the
    other calls' changes had cancelled each other out, so undo of one of them must not remove that file.
    """
    for later in tx.select(CHANGES, {"place": row.place}, between=("wseq", row.wseq + 1, WSEQ_END)):
        operation = tx.get(CALLS, later.call)
        if operation is None or operation.way_back is None:
            continue
        if isinstance(cause := operation.why, PartOfCall):
            operation = tx.get(CALLS, cause.part_of)
        if operation is None or operation.undone_by is not None:
            continue
        undid = operation.undoes
        undone = {*undid.of, *undid.part}
        known = tx.select(CHANGES, {"place": row.place}, between=("wseq", 0, later.wseq), order=("wseq",))
        newest = next((one for one in reversed(known) if one.call in undone), None)
        if newest is not None and newest.wseq < row.wseq and _is_same(newest.after, later.before):
            return True
    return False


def _is_same(one: bytes, other: bytes) -> bool:
    return same_state(entry_from_bytes(one), entry_from_bytes(other))


Chosen = Collection[int]
"""Indexes into `files.diff.hunks_of` of a change."""
Lines = list[tuple[int, int]]
"""Ranges of lines of one version of a file."""


def in_hunks(change: Change, chosen: Chosen, read: Callable[[Digest], bytes]) -> tuple[Change, bytes | None]:
    """A change as if its call had made only the chosen hunks; second, the content before it, if no blob has that.

    All hunks together are the whole change, with its mode. Raises `invalid_params` for a file without these hunks.
    """
    old, new = texts_of(change, read)
    content = without_hunks(old, new, chosen)
    if len(set(chosen)) == len(hunks_of(split_lines(old), split_lines(new))):
        return change, None
    entry = change.after if isinstance(change.after, FileEntry) else change.before
    assert isinstance(entry, FileEntry), "what has hunks is a file on one side at least"
    partial = replace(entry, digest=digest_of(content), size=len(content))
    return replace(change, before=partial), content


def layers_in_hunks(
    calls: Sequence[CallRow],
    layers: Sequence[Sequence[Change]],
    hunks: Mapping[tuple[str, bytes], Chosen],
    *,
    root: RootRow,
    read: Callable[[Digest], bytes],
) -> tuple[list[list[Change]], list[bytes]]:
    """The changes of calls with only the chosen hunks, by call and place, and the contents that result."""
    found: list[list[Change]] = []
    contents: list[bytes] = []
    for call, layer in zip(calls, layers, strict=True):
        found.append([])
        for change in layer:
            chosen = hunks.get((call.id, root.place_of(path_bytes(change.path))))
            part, content = (change, None) if chosen is None else in_hunks(change, chosen, read)
            found[-1] += [part] if chosen is None or chosen else []
            contents += [] if content is None else [content]
    return found, contents


def texts_of(change: Change, read: Callable[[Digest], bytes]) -> tuple[bytes, bytes]:
    """The text before a change and after it. Raises `invalid_params` if one of them is not text."""
    sides: list[bytes] = []
    for entry in (change.before, change.after):
        data = read(entry.digest) if isinstance(entry, FileEntry) else b""
        if looks_binary(data) or not isinstance(entry, FileEntry | Absent):
            raise fault("invalid_params", f"{change.path} has no hunks: it is not text.", field="hunks")
        sides.append(data)
    return sides[0], sides[1]


def hunks_of_later(
    changes: Mapping[str, Change], own: Mapping[str, Chosen], read: Callable[[Digest], bytes]
) -> dict[str, Chosen]:
    """The hunks of later calls that touch the lines which the chosen hunks of a call wrote.

    `changes` are all changes of one file, by call, oldest first; `own` are the chosen hunks of the call itself.
    """
    found: dict[str, Chosen] = {}
    lines, left = Lines(), b""
    for call, change in changes.items():
        before, after = texts_of(change, read)
        if call in own:
            lines = lines_of_hunks(before, after, own[call])
        else:
            lines = carried(left, before, lines)
            found[call] = hunks_at(before, after, lines)
            lines = carried(before, after, lines)
        left = after
    return found


def lines_of_hunks(before: bytes, after: bytes, chosen: Chosen) -> Lines:
    """The lines of `after` that the chosen hunks wrote, or between which they deleted."""
    found = hunks_of(split_lines(before), split_lines(after))
    return [(edit.b_lo, edit.b_hi) for index in chosen if index < len(found) for edit in found[index].edits]


def hunks_at(before: bytes, after: bytes, lines: Lines) -> list[int]:
    """The hunks of a later change that touch these lines of `before`."""
    hunks = hunks_of(split_lines(before), split_lines(after))
    return [
        number for number, hunk in enumerate(hunks) if any(_touches(edit, at) for edit in hunk.edits for at in lines)
    ]


def carried(before: bytes, after: bytes, lines: Lines) -> Lines:
    """The ranges of `after` that have these lines of `before`, or what replaced them."""
    found = edits(split_lines(before), split_lines(after))
    return [_carried(found, at) for at in lines]


def _carried(found: Sequence[Edit], at: tuple[int, int]) -> tuple[int, int]:
    earlier = [edit for edit in found if edit.a_hi < at[0]]
    touching = [edit for edit in found if _touches(edit, at)]
    # Lines after an edit move by as many lines as the edit added or removed.
    shift = earlier[-1].b_hi - earlier[-1].a_hi if earlier else 0
    if not touching:
        return at[0] + shift, at[1] + shift
    last = touching[-1]
    return min(at[0] + shift, touching[0].b_lo), max(at[1] + last.b_hi - last.a_hi, last.b_hi)


def _touches(edit: Edit, at: tuple[int, int]) -> bool:
    return edit.a_lo <= at[1] and at[0] <= edit.a_hi
