"""Which call, turn and prompt wrote each line of a file.

Lines are followed through what moves a file, brings it in from a fork, or brings an earlier state of it back: whoever
does that has not written them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mulligan.history.desk import Desk
from mulligan.history.log import change_from_row
from mulligan.history.sites import main_of
from mulligan.history.tables import CALLS, CHANGES, ROOTS, TURNS, WSEQ_END, CallRow, ChangeRow, TurnRow
from mulligan.store.protocol import Tx
from mulligan.values.entries import Entry, FileEntry
from mulligan.values.faults import MulliganError, fault
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain
from mulligan.workspace.lines import match_blocks, split_lines

BEFORE_HISTORY = "before"
UNRECORDED = "external"

_VERSIONS_KEPT = 64
"""A file's older versions are no longer looked at for lines that came back."""
_HOPS_MAX = 100
"""A file that was moved more often is followed no further."""


@plain(slots=True, frozen=True)
class BlamedLine:
    """`origin` is a call id, "before" for lines older than the record, "external" for edits not on record yet."""

    origin: str
    line: bytes
    call: CallRow | None = None
    turn: TurnRow | None = None


def blame(desk: Desk, path: RepoPath) -> list[BlamedLine]:
    image = desk.image(path)
    if image.any_content is None:
        raise fault("path_not_found", f"{path} is not a file.")
    with desk.ledger.store.read() as tx:
        newest = _Past(desk, tx).version_before(desk.disk.root.place_of(path), WSEQ_END) or _Version(0, [], [])
        now = split_lines(image.data)
        origins = newest.carried_to(now, UNRECORDED)
        return [_named(tx, origin, line) for origin, line in zip(origins, now, strict=True)]


@plain(slots=True, frozen=True)
class _Version:
    """A file before or after the change at `wseq`, and where each of its lines came from."""

    wseq: int
    lines: Sequence[bytes]
    origins: Sequence[str]

    def carried_to(self, lines: Sequence[bytes], author: str) -> list[str]:
        """Lines that both share keep their origin; the others are the author's."""
        found = [author] * len(lines)
        self.fill(found, lines, author)
        return found

    def fill(self, origins: list[str], lines: Sequence[bytes], author: str) -> None:
        """Give lines that are the author's the origin they have here, if they are here and it is known."""
        for block in match_blocks(self.lines, lines):
            for step in range(block.length):
                if origins[block.b_start + step] == author:
                    origins[block.b_start + step] = self.origins[block.a_start + step]


@dataclass(slots=True)
class _File:
    """The recorded changes of one place that are still ahead, and the newest versions of those that are not."""

    ahead: deque[ChangeRow]
    versions: list[_Version] = field(default_factory=list)


@dataclass(slots=True)
class _Past:
    """What is on record of files, each read once and only as far as it is asked for."""

    desk: Desk
    tx: Tx
    _files: dict[bytes, _File] = field(default_factory=dict)
    _hops: int = 0

    def version_before(self, place: bytes, wseq: int) -> _Version | None:
        if place not in self._files:
            self._files[place] = _File(deque(self.tx.select(CHANGES, {"place": place}, order=("wseq",))))
        file = self._files[place]
        while file.ahead and file.ahead[0].wseq < wseq:
            self._add(file, file.ahead.popleft())
        return next((one for one in reversed(file.versions) if one.wseq < wseq), None)

    def _add(self, file: _File, row: ChangeRow) -> None:
        change = change_from_row(row)
        found, after = self._found(row, change.before), self._lines(change.after)
        origins = (self._moved(row) or found).carried_to(after, row.call)
        for source in self._sources(file, row, after):
            if row.call not in origins:
                break
            source.fill(origins, after, row.call)
        file.versions += [found, _Version(row.wseq, after, origins)]
        del file.versions[:-_VERSIONS_KEPT]

    def _found(self, row: ChangeRow, before: Entry) -> _Version:
        """The file as a change found it."""
        lines, last = self._lines(before), self.version_before(row.place, row.wseq)
        origins = [BEFORE_HISTORY] * len(lines) if last is None else last.carried_to(lines, UNRECORDED)
        return _Version(row.wseq, lines, origins)

    def _moved(self, row: ChangeRow) -> _Version | None:
        """The file that the call moved here, as it found it."""
        source = None if row.origin is None else self.tx.get(CHANGES, row.call, row.origin)
        if source is None or self._hops >= _HOPS_MAX:
            return None
        self._hops += 1
        try:
            return self._found(source, change_from_row(source).before)
        finally:
            self._hops -= 1

    def _sources(self, file: _File, row: ChangeRow, after: Sequence[bytes]) -> Iterator[_Version]:
        """From where a merge or a way back may have lines that are not its own work."""
        call = self.tx.get(CALLS, row.call)
        cause = {} if call is None else call.why
        copy = self._in_copy(cause["copy"], row) if "copy" in cause else None
        if copy is not None:
            yield copy
        if copy is not None or (call is not None and call.way_back is not None):
            # Newest first, but for those that it is again as a whole: after these no line is left to be looked for.
            yield from sorted(file.versions, key=lambda one: (one.lines == after, one.wseq), reverse=True)

    def _in_copy(self, root: str, row: ChangeRow) -> _Version | None:
        """The file in a fork's copy when it was merged, with what the copy began with as the merge's own."""
        known = self.tx.get(ROOTS, root)
        if known is None:
            return None
        place = known.place_of(row.path)
        until = [one.wseq for one in self.tx.select(CHANGES, {"place": place}) if one.call < row.call]
        found = self.version_before(place, max(until, default=0) + 1)
        if found is None:
            return None
        return _Version(found.wseq, found.lines, [row.call if one == BEFORE_HISTORY else one for one in found.origins])

    def _lines(self, entry: Entry) -> list[bytes]:
        if not isinstance(entry, FileEntry):
            return []
        try:
            return split_lines(self.desk.ledger.blobs.read_in(self.tx, entry.digest))
        except MulliganError:
            return []


def _named(tx: Tx, origin: str, line: bytes) -> BlamedLine:
    call = tx.get(CALLS, origin) if origin not in (BEFORE_HISTORY, UNRECORDED) else None
    if call is None:
        return BlamedLine(origin, line)
    # What a call did in a mounted root is a part of it; people know the whole call.
    call = tx.get(CALLS, main_of(call)) or call
    turn = tx.get(TURNS, call.session, call.turn) if call.session else None
    return BlamedLine(UNRECORDED if call.external else call.id, line, call, turn)
