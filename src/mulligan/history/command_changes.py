"""How an open call takes the changes of commands, which Mulligan does not make itself.

Either the preimage of a path is durable before the command changes it (`about_to_change`), and the call reads the path
when the command is over (`absorb`). Or a scan finds the change afterwards and knows what was there before
(`record_found`). Both ways, the change is then the call's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from mulligan.files.disk import NOTHING, Image
from mulligan.history.file_changes import FileChanges
from mulligan.history.ledger import Claimed, intending, meant_to_stay, touch_row
from mulligan.history.tables import CHANGES, PreimageSpool, TouchRow
from mulligan.history.undo_log import CallState, Touched
from mulligan.store.blobs import BlobVanishedError, Prepared
from mulligan.store.protocol import CLAIMS, SPOOL, Claim, Tx
from mulligan.values.entries import (
    Change,
    DirEntry,
    Entry,
    FileEntry,
    entry_from_bytes,
    same_content,
    same_state,
)
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import BLOB_IN_DATABASE_BYTES
from mulligan.values.paths import RepoPath, parent_of, path_bytes


@fast_dataclass(slots=True, frozen=True)
class _Preimage:
    """A path that a command is about to change, with the rows and bytes that the store needs before."""

    path: RepoPath
    image: Image
    claim: Claim
    row: TouchRow


@fast_dataclass(slots=True, frozen=True)
class FoundChange:
    """A change that a scan has found: what was there, under how many names, and what is there now.

    `after` None: the scan has not read it, so the call has to absorb it. `bare`: the store does not have its bytes.
    """

    path: RepoPath
    before: Entry
    after: Entry | None
    seen: Image | None = None
    links: int = 1
    bare: bool = False


SPOOLED_AFTER = 16
"""So many paths of a command take a transaction each. After them a spool is worth its file."""

_SPOOLED_MAX_BYTES = BLOB_IN_DATABASE_BYTES
_FOLDER_ROWS_MAX = 500
_FOLDERS_MAX = 64


class _RecordDiffersError(Exception):
    """The path differs from its record and is changing right now, so the slow path must capture it under its claim."""


class CommandChanges:
    """Takes the changes that commands make in one root for one call."""

    def __init__(self, state: CallState, files: FileChanges) -> None:
        self._state = state
        self._ledger = state.ledger
        self._files = files
        self._times: dict[RepoPath, int] = {}
        self._recorded: dict[RepoPath, dict[bytes, bytes] | None] = {}
        self._blocked: tuple[bytes, ...] = ()
        """beginnings of places that other calls have claimed"""
        self.absorb = state.absorb

    def begin(self) -> None:
        """Record the call before a command runs in it: a Mulligan that the command starts finds its outer call."""
        with self._state.lock:
            with self._ledger.store.write() as tx:
                self.begin_in(tx)
            self.mark_begun()

    def begin_in(self, tx: Tx) -> None:
        """Begin for a command in the caller's transaction. Call `mark_begun` when that is committed."""
        self._ledger.check_not_inside(tx, [self._state.root.place_of(b".")])
        self._state.has_commands = True
        self._state.begin_in(tx)

    def mark_begun(self) -> None:
        self._state.has_begun = True

    def about_to_change(self, paths: Sequence[RepoPath], *, going: bool = False) -> None:
        """A running command is about to change these paths: their preimages are durable when this returns.

        `going`: the command moves or removes directories among them, so no other call may work in these.
        """
        if not paths:
            return
        with self._state.lock:
            self._state.check_open()
            is_one_of_many = len(paths) == 1 and len(self._state.touched) >= SPOOLED_AFTER
            if is_one_of_many:
                # Without room for the spool, the transaction below says what is missing.
                with suppress(OSError):
                    if self._append_to_spool(paths[0], going=going):
                        return
            images = self._state.images(path for path in paths if path not in self._state.touched)
            self._state.note_gaps(images)
            # Note the times now, while the command has not changed anything in these folders yet.
            folders = {parent_of(path) for path in images}
            if not folders <= self._times.keys():
                self._note_times(folders - self._times.keys())
            fresh = [
                self._preimage_of(path, image, len(self._state.touched) + count)
                for count, (path, image) in enumerate(images.items())
                if not image.special
            ]
            if not fresh:
                return
            try:
                self._save_preimages(fresh, going=going)
            except (Claimed, _RecordDiffersError, BlobVanishedError):
                self._files.keep_preimages([one.path for one in fresh], going=going)

    def _note_times(self, folders: Iterable[RepoPath]) -> None:
        """Note the times of folders in which something is about to change: the change sets them."""
        for path, image in self._state.images(folders).items():
            if isinstance(image.entry, DirEntry):
                self._times[path] = image.entry.mtime_ns

    def _preimage_of(self, path: RepoPath, image: Image, ordinal: int) -> _Preimage:
        image = self._state.lost_metadata.with_group(image)
        if isinstance(image.entry, DirEntry) and path in self._times:
            image = replace(image, entry=replace(image.entry, mtime_ns=self._times[path]))
        row = touch_row(self._state.facts.id, path_bytes(path), self._state.root, ordinal=ordinal, before=image.entry)
        claim = Claim(self._state.disk.root.place_of(path))
        return _Preimage(path, image, claim, meant_to_stay(row, self._state.draft(row)))

    def _save_preimages(self, preimages: Sequence[_Preimage], *, going: bool) -> None:
        """Save all in one transaction, if no other call is in the way and everything is as the record says."""
        wanted = {one.claim for one in preimages} - self._state.claimed
        bodies = [self._body(one.image) for one in preimages]
        with self._ledger.store.write() as tx:
            self._state.begin_in(tx)
            self._ledger.claim(tx, self._state.facts.id, list(wanted))
            # A claim covers one path, but nothing below a removed folder may be claimed by another call either.
            if going:
                folders = [one.claim.place for one in preimages if isinstance(one.image.entry, DirEntry)]
                self._ledger.check_free(tx, self._state.facts.id, [Claim(place, deep=True) for place in folders])
            for one, body in zip(preimages, bodies, strict=True):
                seen = self._ledger.last_seen(tx, one.claim.place)
                # An edit from outside since the last record is not the command's: it gets a record of its own.
                if seen is not None and not same_state(seen, one.image.entry):
                    self._record_external(tx, Change(one.path, seen, one.image.entry), body)
                self._ledger.touch(tx, one.row, body)
            if self._state.spool is not None and self._state.spool.is_stale():
                self._renew(tx, self._state.spool)
        self._state.has_begun = True
        self._state.claimed |= wanted
        for one in preimages:
            self._note_preimage(one)

    def _note_preimage(self, one: _Preimage) -> None:
        before = one.image.entry
        # The entry is unsure until the command has ended, because the command may change the path at any moment.
        self._state.touched[one.path] = Touched(one.row, one.path, before, before, unsure=True)
        self._state.log.add(one.path, before)
        self._state.lost_metadata.note(one.path, one.image)

    def _append_to_spool(self, path: RepoPath, *, going: bool) -> bool:
        """Append the preimage of one path to the spool, which is its claim too. False: it needs a transaction."""
        if path in self._state.touched:
            return True
        spool = self._state.spool or self._start_spool()
        image = self._image_at_once(path)
        entry, content = image.entry, image.content
        is_plain = not (image.special or image.unstable) and image.links == 1 and entry.withheld is None
        is_small = content is None or (isinstance(content, bytes) and len(content) <= _SPOOLED_MAX_BYTES)
        # Nothing below a folder that goes may be claimed by another call, and only the store knows that.
        if spool is None or not (is_plain and is_small) or (going and isinstance(entry, DirEntry)):
            return False
        folder = parent_of(path)
        if folder not in self._times:
            self._note_times([folder])
        one = self._preimage_of(path, image, len(self._state.touched))
        if one.claim.place.startswith(self._blocked) or not self._is_as_recorded(one, folder):
            return False
        if not spool.append(one.row, content if isinstance(content, bytes) else None):
            return False
        self._note_preimage(one)
        return True

    def _start_spool(self) -> PreimageSpool | None:
        """None: a spool would not be as durable as the store promises, or the call is a command of another call."""
        store = self._ledger.store
        if store.directory is None or store.durability != "process" or self._ledger.inside is not None:
            return None
        spool = PreimageSpool(store.directory, self._state.facts.id)
        mark = Claim(SPOOL + self._state.facts.id.encode("ascii"), deep=True)
        try:
            with store.write() as tx:
                self._state.begin_in(tx)
                self._ledger.claim(tx, self._state.facts.id, [mark])
                self._renew(tx, spool)
            self._state.spool = spool
        finally:
            if self._state.spool is None:
                spool.close()
        self._state.claimed.add(mark)
        return spool

    def _renew(self, tx: Tx, spool: PreimageSpool) -> None:
        """Learn what other calls have claimed. What they claim later, the spool notices."""
        spool.renew()
        self._recorded.clear()
        others = [row.place for row in tx.select(CLAIMS) if row.call != self._state.facts.id]
        # Another spool grows without notice, so each path needs a transaction while there is one.
        self._blocked = (b"",) if any(place.startswith(SPOOL) for place in others) else tuple(others)

    def _is_as_recorded(self, one: _Preimage, folder: RepoPath) -> bool:
        """Whether the path is what its last record says, or has none."""
        if folder not in self._recorded:
            if len(self._recorded) == _FOLDERS_MAX:
                self._recorded.clear()
            self._recorded[folder] = self._records_below(folder)
        known = self._recorded[folder]
        if known is not None:
            last = known.pop(one.claim.place, None)
            seen = None if last is None else entry_from_bytes(last)
        else:
            with self._ledger.store.read() as tx:
                seen = self._ledger.last_seen(tx, one.claim.place)
        return seen is None or same_state(seen, one.image.entry)

    def _records_below(self, folder: RepoPath) -> dict[bytes, bytes] | None:
        """The last recorded entry of each place below a folder; None if there are too many records to read at once."""
        place = self._state.disk.root.place_of(folder)
        with self._ledger.store.read() as tx:
            rows = tx.select(
                CHANGES,
                between=("place", place + b"/", place + b"0"),
                order=("place", "wseq"),
                limit=_FOLDER_ROWS_MAX,
            )
        return None if len(rows) == _FOLDER_ROWS_MAX else {row.place: row.after for row in rows}

    def _image_at_once(self, path: RepoPath) -> Image:
        try:
            with self._state.disk.resolve_exactly(path) as spot:
                return self._state.disk.image(spot)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return NOTHING

    def _record_external(self, tx: Tx, change: Change, bodies: Sequence[Prepared]) -> None:
        """Record that another process changed the path since its last record."""
        with self._state.resolved(change.path) as spot:
            image = NOTHING if spot is None else self._state.disk.image(spot, kept=False)
        # Read again: the first read came before the claim, and another call may have changed the path in between.
        if not image.holds(change.after):
            raise _RecordDiffersError
        self._ledger.external(tx, self._state.root, [change], bodies=bodies)

    def _body(self, image: Image) -> list[Prepared]:
        if image.content is None or not isinstance(image.entry, FileEntry):
            return []
        return [self._ledger.blobs.prepare_scanned(image.content, image.entry.digest)]

    def announced_paths(self) -> list[RepoPath]:
        """Paths that a command was about to change and that the call has not absorbed yet."""
        return [path for path, touched in self._state.touched.items() if touched.row.in_place and not touched.acted]

    def record_found(self, steps: Sequence[FoundChange], *, also: Iterable[Callable[[Tx], None]] = ()) -> None:
        """Take changes that a scan has found. The store has the bytes of what was there before.

        They are durable when this returns, together with what `also` write. If the store fails, the call can roll them
        back all the same.
        """
        with self._state.lock:
            self._state.check_open()
            rows = [self._found_row(step) for step in steps]
            with self._ledger.store.write() as tx:
                self._state.begin_in(tx)
                for row in rows:
                    self._ledger.touch(tx, row, ())
                for act in also:
                    act(tx)
            self._state.has_begun = True

    def _found_row(self, step: FoundChange) -> TouchRow:
        touched = self._state.touched.get(step.path) or self._state.unannounced(step.path, step.before)
        self._state.lost_metadata.note(step.path, Image(step.before, links=step.links))
        # As if it had been announced: `absorb` reads the path later, and recovery expects any content.
        if step.after is None:
            touched.row = intending(touched.row, touched.after, self._state.draft(touched.row), in_place=True)
            touched.unsure = True
            self._state.touched[step.path] = touched
            self._state.log.add(step.path, touched.after)
        else:
            touched.row = intending(touched.row, step.after, self._state.draft(touched.row), in_place=False)
            self._state.set_after(touched, step.after, step.seen, bare=step.bare)
        return touched.row

    def note_unattributed(self, paths: Iterable[RepoPath]) -> None:
        """Note paths that another process may have written: if the call rolls them back, its record names the bytes."""
        for path in paths:
            # Bytes of a path that is not captured must not be named by a record.
            one = self._state.touched[path]
            if one.after.withheld is not None:
                continue
            if isinstance(one.after, FileEntry) and not (one.unsure or one.bare or same_content(one.before, one.after)):
                self._state.unattributed[path, one.after.digest] = one.after.size

    def leave_in_place(self, paths: Iterable[RepoPath]) -> None:
        """Leave these paths as they are if the call is aborted, because another process wrote to them beside the
        command.
        """
        self._state.shared.update(path for path in paths if path in self._state.touched)

    def before_of(self, path: RepoPath) -> Entry | None:
        """The entry of a path before this call; None if the call did not touch it."""
        known = self._state.touched.get(path)
        return None if known is None else known.before
