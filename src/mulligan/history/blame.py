"""Which call, turn and prompt wrote each line of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mulligan.history.desk import Desk
from mulligan.history.log import change_from_row
from mulligan.history.tables import CALLS, CHANGES, TURNS, CallRow, TurnRow
from mulligan.store.protocol import Tx
from mulligan.values.entries import Entry, FileEntry
from mulligan.values.faults import MulliganError, fault
from mulligan.values.paths import RepoPath
from mulligan.workspace.lines import match_blocks, split_lines

BEFORE_HISTORY = "before"
UNRECORDED = "external"


@dataclass(slots=True, frozen=True)
class BlamedLine:
    """`origin` is a call id, "before" for lines older than the record, "external" for edits not on record yet."""

    origin: str
    line: bytes
    call: CallRow | None = None
    turn: TurnRow | None = None


def blame(desk: Desk, path: RepoPath) -> list[BlamedLine]:
    image = desk.image(path)
    if image.content is None:
        raise fault("path_not_found", f"{path} is not a file.")
    with desk.ledger.store.read() as tx:
        lines, origins = _from_history(desk, tx, desk.disk.root.place_of(path))
        now = split_lines(image.data)
        origins = _carried(lines, origins, now, UNRECORDED)
        return [_named(tx, origin, line) for origin, line in zip(origins, now, strict=True)]


def _from_history(desk: Desk, tx: Tx, place: bytes) -> tuple[list[bytes], list[str]]:
    """The file after its newest recorded change, and where each of its lines came from."""
    lines: list[bytes] = []
    origins: list[str] = []
    for number, row in enumerate(tx.select(CHANGES, {"place": place}, order=("wseq",))):
        change = change_from_row(row)
        before, after = _lines(desk, tx, change.before), _lines(desk, tx, change.after)
        origins = _carried(lines, origins, before, BEFORE_HISTORY if number == 0 else UNRECORDED)
        origins = _carried(before, origins, after, row.call)
        lines = after
    return lines, origins


def _lines(desk: Desk, tx: Tx, entry: Entry) -> list[bytes]:
    if not isinstance(entry, FileEntry):
        return []
    try:
        return split_lines(desk.ledger.blobs.read_in(tx, entry.digest))
    except MulliganError:
        return []


def _carried(old: Sequence[bytes], origins: Sequence[str], new: Sequence[bytes], author: str) -> list[str]:
    """Lines both versions share keep their origin; the others are the author's."""
    found = [author] * len(new)
    for block in match_blocks(old, new):
        found[block.b_start : block.b_start + block.length] = origins[block.a_start : block.a_start + block.length]
    return found


def _named(tx: Tx, origin: str, line: bytes) -> BlamedLine:
    call = tx.get(CALLS, origin) if origin not in (BEFORE_HISTORY, UNRECORDED) else None
    if call is None:
        return BlamedLine(origin, line)
    turn = tx.get(TURNS, call.session, call.turn) if call.session else None
    return BlamedLine(UNRECORDED if call.external else origin, line, call, turn)
