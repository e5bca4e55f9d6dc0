"""Blame: which call, turn and prompt wrote each line of a file.

Blame follows lines through a call that moves the file, merges it in from a fork, or restores an earlier state of it:
such a call did not write the lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import field

from mulligan.files.diff import match_blocks, split_lines
from mulligan.history.cause import MergedCopy
from mulligan.history.multi_root import main_of
from mulligan.history.open_root import OpenRoot
from mulligan.history.tables import CALLS, CHANGES, ROOTS, TURNS, WSEQ_END, CallRow, ChangeRow, TurnRow, change_from_row
from mulligan.store.protocol import Tx
from mulligan.values.entries import Entry, FileEntry
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath

BEFORE_HISTORY = "before"
UNRECORDED = "external"

_VERSIONS_MAX = 64
"""Blame searches only so many versions of a file for lines that came back."""
_MOVES_MAX = 100
"""Blame follows a file through only so many moves."""


@fast_dataclass(slots=True, frozen=True)
class BlamedLine:
    """`origin` is a call id, "before" for lines older than the record, "external" for edits not on record yet."""

    origin: str
    line: bytes
    call: CallRow | None = None
    turn: TurnRow | None = None


def blame(open_root: OpenRoot, path: RepoPath) -> list[BlamedLine]:
    image = open_root.image(path)
    if image.any_content is None:
        raise fault("path_not_found", f"{path} is not a file.")
    with open_root.ledger.store.read() as tx:
        newest = _History(open_root, tx).version_before(open_root.disk.root.place_of(path), WSEQ_END)
        now = split_lines(image.data)
        origins = (newest or _Version(0, [], [])).origins_in(now, UNRECORDED)
        return [_blamed(tx, origin, line) for origin, line in zip(origins, now, strict=True)]


def _blamed(tx: Tx, origin: str, line: bytes) -> BlamedLine:
    call = tx.get(CALLS, origin) if origin not in (BEFORE_HISTORY, UNRECORDED) else None
    if call is None:
        return BlamedLine(origin, line)
    # What a call did in a mounted root is a part of it; people know the whole call.
    call = tx.get(CALLS, main_of(call)) or call
    turn = tx.get(TURNS, call.session, call.turn) if call.session else None
    return BlamedLine(UNRECORDED if call.external else call.id, line, call, turn)


@fast_dataclass(slots=True, frozen=True)
class _Version:
    """A file before or after the change at `wseq`, and the origin of each of its lines."""

    wseq: int
    lines: Sequence[bytes]
    origins: Sequence[str]

    def origins_in(self, lines: Sequence[bytes], author: str) -> list[str]:
        """The origins of another version's lines: shared lines keep theirs, the others are the author's."""
        found = [author] * len(lines)
        self.fill(found, lines, author)
        return found

    def fill(self, origins: list[str], lines: Sequence[bytes], author: str) -> None:
        """Replace the author by the origin that this version knows, for each line that it shares."""
        for block in match_blocks(self.lines, lines):
            for step in range(block.length):
                if origins[block.b_start + step] == author:
                    origins[block.b_start + step] = self.origins[block.a_start + step]


@fast_dataclass(slots=True)
class _File:
    """The recorded changes of one place that are not read yet, and the newest versions that are."""

    unread: deque[ChangeRow]
    versions: list[_Version] = field(default_factory=list)


@fast_dataclass(slots=True)
class _History:
    """The recorded versions of files. Each change is read once, and only when it is needed."""

    open_root: OpenRoot
    tx: Tx
    _files: dict[bytes, _File] = field(default_factory=dict)
    _moves: int = 0

    def version_before(self, place: bytes, wseq: int) -> _Version | None:
        if place not in self._files:
            self._files[place] = _File(deque(self.tx.select(CHANGES, {"place": place}, order=("wseq",))))
        file = self._files[place]
        # In order, because the origins of a version come from the version before it.
        while file.unread and file.unread[0].wseq < wseq:
            self._add(file, file.unread.popleft())
        return next((one for one in reversed(file.versions) if one.wseq < wseq), None)

    def _add(self, file: _File, row: ChangeRow) -> None:
        change = change_from_row(row)
        before, after = self._before(row, change.before), self._lines(change.after)
        origins = (self._moved_from(row) or before).origins_in(after, row.call)
        for source in self._sources(file, row, after):
            if row.call not in origins:
                break
            source.fill(origins, after, row.call)
        file.versions += [before, _Version(row.wseq, after, origins)]
        del file.versions[:-_VERSIONS_MAX]

    def _before(self, row: ChangeRow, before: Entry) -> _Version:
        """The file as a change found it."""
        lines, last = self._lines(before), self.version_before(row.place, row.wseq)
        origins = [BEFORE_HISTORY] * len(lines) if last is None else last.origins_in(lines, UNRECORDED)
        return _Version(row.wseq, lines, origins)

    def _moved_from(self, row: ChangeRow) -> _Version | None:
        """The file that the call moved here, as it found it."""
        source = None if row.origin is None else self.tx.get(CHANGES, row.call, row.origin)
        if source is None or self._moves >= _MOVES_MAX:
            return None
        # The source may have been moved as well, so this counts how deep the search is.
        self._moves += 1
        try:
            return self._before(source, change_from_row(source).before)
        finally:
            self._moves -= 1

    def _sources(self, file: _File, row: ChangeRow, after: Sequence[bytes]) -> Iterator[_Version]:
        """Versions from which a merge or an undo operation may have lines that it did not write."""
        call = self.tx.get(CALLS, row.call)
        cause = None if call is None else call.why
        copy = self._version_in_copy(cause.copy, row) if isinstance(cause, MergedCopy) else None
        if copy is not None:
            yield copy
        if copy is not None or (call is not None and call.way_back is not None):
            # An identical version explains every line. After it the newest version comes first.
            yield from sorted(file.versions, key=lambda one: (one.lines == after, one.wseq), reverse=True)

    def _version_in_copy(self, root: str, row: ChangeRow) -> _Version | None:
        """The file in a fork's copy when it was merged. Lines that the copy began with count as the merge's own."""
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
            return split_lines(self.open_root.ledger.blobs.read_in(self.tx, entry.digest))
        except MulliganError:
            # Retention has evicted the bytes: every line counts as new.
            return []
