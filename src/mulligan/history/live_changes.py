"""The part of a call that takes the changes of commands, which Mulligan does not make itself.

Either the preimage of a path is durable before the command changes it (`about_to_change`), and the call reads the path
when the command is over (`absorb`). Or a scan finds the change afterwards and knows what was there before
(`record_found`). Both ways, the change is then the call's.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from mulligan.files.disk import NOTHING, Disk, Image
from mulligan.files.resolve import ResolvedPath, Spots
from mulligan.history.ledger import Claimed, Facts, Ledger, intending, meant_to_stay, touch_row, withheld_notes
from mulligan.history.permissions import LostMetadata
from mulligan.history.retention_rules import changes_over_cap, coverage_of
from mulligan.history.tables import RootRow, TouchRow
from mulligan.history.undo_log import Deeds, Touched
from mulligan.store.blobs import BlobVanishedError, Prepared
from mulligan.store.protocol import Claim, Tx
from mulligan.values.digest import Digest
from mulligan.values.entries import (
    ABSENT,
    Change,
    DirEntry,
    Entry,
    FileEntry,
    same_content,
    same_state,
)
from mulligan.values.errors import MulliganError, Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import OwnerId
from mulligan.values.paths import RepoPath, parent_of, path_bytes, to_wire


@fast_dataclass(slots=True, frozen=True)
class _Preimage:
    """A path that a command is about to change, with the rows and bytes that the store needs before."""

    path: RepoPath
    image: Image
    claim: Claim
    row: TouchRow
    bodies: Sequence[Prepared]


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


class RecordDiffersError(Exception):
    """The path differs from its record and is changing right now, so `_keep_carefully` must run."""


class CommandChanges(ABC):
    """A base of `Call`. `Call` provides the attributes, and the slow path for claims and captures that collide."""

    ledger: Ledger
    disk: Disk
    root: RootRow
    facts: Facts
    coverage: list[dict[str, str]]
    conflicts: list[RepoPath]
    _owner: OwnerId
    _begun: bool
    _has_commands: bool
    _claimed: set[Claim]
    _touched: dict[RepoPath, Touched]
    _done: Deeds
    _shared: set[RepoPath]
    _anybodys: dict[tuple[RepoPath, Digest], int]
    _traits: LostMetadata
    _times: dict[RepoPath, int]
    _originals: dict[bytes, RepoPath]
    _not_captured: set[RepoPath]
    _lock: threading.RLock

    def about_to_change(self, paths: Sequence[RepoPath], *, going: bool = False) -> None:
        """A running command is about to change these paths: their preimages are durable when this returns.

        `going`: the command moves or removes directories among them, so no other call may work in these.
        """
        if not paths:
            return
        with self._lock:
            self._check_open()
            images = self._images(path for path in paths if path not in self._touched)
            self._note_special(path for path, image in images.items() if image.special)
            self._note_unstable(images)
            # Note the times now, while the command has not changed anything in these folders yet.
            self._note_times({parent_of(path) for path in images} - self._times.keys())
            fresh = [
                self._preimage_of(path, image, len(self._touched) + count)
                for count, (path, image) in enumerate(images.items())
                if not image.special
            ]
            if not fresh:
                return
            try:
                self._save_preimages(fresh, going=going)
            except (Claimed, RecordDiffersError, BlobVanishedError):
                self._keep_carefully([one.path for one in fresh], going=going)

    def _note_times(self, folders: Iterable[RepoPath]) -> None:
        """Note the times of folders in which something is about to change: the change sets them."""
        for path, image in self._images(folders).items():
            if isinstance(image.entry, DirEntry):
                self._times[path] = image.entry.mtime_ns

    def _preimage_of(self, path: RepoPath, image: Image, ordinal: int) -> _Preimage:
        image = self._traits.with_group(image)
        if isinstance(image.entry, DirEntry) and path in self._times:
            image = replace(image, entry=replace(image.entry, mtime_ns=self._times[path]))
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=ordinal, before=image.entry)
        claim = Claim(self.disk.root.place_of(path))
        return _Preimage(path, image, claim, meant_to_stay(row, self._draft(row)), self._body(image))

    def _save_preimages(self, preimages: Sequence[_Preimage], *, going: bool) -> None:
        """Save all in one transaction, if no other call is in the way and everything is as the record says."""
        wanted = {one.claim for one in preimages} - self._claimed
        with self.ledger.store.write() as tx:
            self.begin_in(tx)
            self.ledger.claim(tx, self.facts.id, list(wanted))
            # A claim covers one path, but nothing below a removed folder may be claimed by another call either.
            if going:
                folders = [one.claim.place for one in preimages if isinstance(one.image.entry, DirEntry)]
                self.ledger.check_free(tx, self.facts.id, [Claim(place, deep=True) for place in folders])
            for one in preimages:
                seen = self.ledger.last_seen(tx, one.claim.place)
                # An edit from outside since the last record is not the command's: it gets a record of its own.
                if seen is not None and not same_state(seen, one.image.entry):
                    self._record_external(tx, Change(one.path, seen, one.image.entry), one.bodies)
                self.ledger.touch(tx, one.row, one.bodies)
        self._begun = True
        self._claimed |= wanted
        for one in preimages:
            before = one.image.entry
            # The entry is unsure until the command has ended, because the command may change the path at any moment.
            self._touched[one.path] = Touched(one.row, one.path, before, before, unsure=True)
            self._done.add(one.path, before)
            self._traits.note(one.path, one.image)

    def _record_external(self, tx: Tx, change: Change, bodies: Sequence[Prepared]) -> None:
        """Record that another process changed the path since its last record."""
        with self._spot(change.path) as spot:
            image = NOTHING if spot is None else self.disk.image(spot, kept=False)
        # Read again: the first read came before the claim, and another call may have changed the path in between.
        if not image.holds(change.after):
            raise RecordDiffersError
        self.ledger.external(tx, self.root, [change], bodies=bodies)

    def _body(self, image: Image) -> list[Prepared]:
        if image.content is None or not isinstance(image.entry, FileEntry):
            return []
        return [self.ledger.blobs.prepare_scanned(image.content, image.entry.digest)]

    def _note_special(self, paths: Iterable[RepoPath]) -> None:
        """Note devices, FIFOs and sockets in the coverage, because they cannot be captured."""
        self.coverage += [{"path": to_wire(path), "reason": "special_file"} for path in paths]

    def _note_unstable(self, images: Mapping[RepoPath, Image]) -> None:
        """Note files that another process wrote during every read: the stored bytes may mix several states."""
        notes = [{"path": to_wire(path), "reason": "unstable"} for path, image in images.items() if image.unstable]
        self.coverage += [note for note in notes if note not in self.coverage]

    def absorb(self, paths: Sequence[RepoPath], *, keep: bool = True) -> None:
        """Take what a finished command left at these paths as changes of the call.

        Without `keep`, the bytes are not stored, because the caller will roll the command back. If the store does not
        take the bytes, this raises, and the call cannot be committed.
        """
        with self._lock:
            try:
                images = self._images(paths, kept=keep)
                if keep:
                    self.ledger.blobs.store_all(image.content for image in images.values() if image.content is not None)
            except MulliganError:
                # A full store must not keep the call from knowing the paths: abort has to roll them back.
                if keep:
                    self.absorb(paths, keep=False)
                raise
            self._note_special(path for path, image in images.items() if image.special)
            self._note_unstable(images)
            for path, image in images.items():
                if not image.special:
                    touched = self._touched.get(path) or self._unannounced(path, ABSENT)
                    self._set_after(touched, image.entry, image.without_content(), bare=not keep)

    def _set_after(self, touched: Touched, after: Entry, seen: Image | None, *, bare: bool) -> None:
        self._touched[touched.path] = touched
        self._done.add(touched.path, touched.after)
        touched.becomes(after, bare=bare)
        touched.acted, touched.seen = True, seen

    def _unannounced(self, path: RepoPath, before: Entry) -> Touched:
        """A path that the command changed without an announcement."""
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=len(self._touched), before=before)
        return Touched(intending(row, before, self._draft(row), in_place=False), path, before, before)

    def _note_lift(self, path: RepoPath, now: DirEntry, lifted: DirEntry) -> None:
        """Record that Mulligan opens a folder for a step, so that recovery knows the mode as ours."""
        touched = self._touched.get(path) or self._unannounced(path, now)
        row = intending(touched.row, lifted, self._draft(touched.row), in_place=False)
        # Durable before the mode changes, in case the process dies while the folder is open.
        if row != touched.row:
            with self.ledger.store.write() as tx:
                self.begin_in(tx)
                self.ledger.touch(tx, row, ())
            self._begun = True
        touched.row, self._touched[path] = row, touched

    def announced_paths(self) -> list[RepoPath]:
        """Paths that a command was about to change and that the call has not absorbed yet."""
        return [path for path, touched in self._touched.items() if touched.row.in_place and not touched.acted]

    def record_found(self, steps: Sequence[FoundChange], *, also: Iterable[Callable[[Tx], None]] = ()) -> None:
        """Take changes that a scan has found. The store has the bytes of what was there before.

        They are durable when this returns, together with what `also` write. If the store fails, the call can roll them
        back all the same.
        """
        with self._lock:
            self._check_open()
            rows = [self._found_row(step) for step in steps]
            with self.ledger.store.write() as tx:
                self.begin_in(tx)
                for row in rows:
                    self.ledger.touch(tx, row, ())
                for act in also:
                    act(tx)
            self._begun = True

    def _found_row(self, step: FoundChange) -> TouchRow:
        touched = self._touched.get(step.path) or self._unannounced(step.path, step.before)
        self._traits.note(step.path, Image(step.before, links=step.links))
        # As if it had been announced: `absorb` reads the path later, and recovery expects any content.
        if step.after is None:
            touched.row = intending(touched.row, touched.after, self._draft(touched.row), in_place=True)
            touched.unsure = True
            self._touched[step.path] = touched
            self._done.add(step.path, touched.after)
        else:
            touched.row = intending(touched.row, step.after, self._draft(touched.row), in_place=False)
            self._set_after(touched, step.after, step.seen, bare=step.bare)
        return touched.row

    def note_unattributed(self, paths: Iterable[RepoPath]) -> None:
        """Note paths that another process may have written: if the call rolls them back, its record names the bytes."""
        for path in paths:
            # Bytes of a path that is not captured must not be named by a record.
            one = self._touched[path]
            if one.after.withheld is not None:
                continue
            if isinstance(one.after, FileEntry) and not (one.unsure or one.bare or same_content(one.before, one.after)):
                self._anybodys[path, one.after.digest] = one.after.size

    def leave_in_place(self, paths: Iterable[RepoPath]) -> None:
        """Leave these paths as they are if the call is aborted, because another process wrote to them beside the
        command.
        """
        self._shared.update(path for path in paths if path in self._touched)

    def _leave_shared(self, paths: Iterable[RepoPath]) -> None:
        """Record what an abort leaves in place as external changes."""
        shared = [self._touched[path] for path in paths if path in self._shared]
        changes = [
            Change(one.path, one.before, one.after, one.origin)
            for one in shared
            if not same_state(one.before, one.after)
        ]
        if changes:
            with self.ledger.store.write() as tx:
                self.ledger.external(tx, self.root, changes)
        self.conflicts += [one.path for one in changes if one.path not in self.conflicts]

    def _lost_with(self, paths: Iterable[RepoPath]) -> list[dict[str, str]]:
        """Notes for metadata that is gone and that no undo operation can restore."""
        if not self._traits.had:
            return []
        # A folder that the call replaced took the names below it along; one note for the folder is enough.
        folders = {path for path, one in self._touched.items() if one.acted and isinstance(one.before, DirEntry)}
        return self._traits.lost(paths, folders, self._image)

    def gaps(self) -> list[dict[str, str]]:
        """The coverage if the call ended now: what was not captured, and what could not be undone."""
        changes = self.changes()
        with self.ledger.store.read() as tx:
            given_up = changes_over_cap(tx, self.facts.session, changes)
        withheld = [note for note in withheld_notes(changes) if note not in self.coverage]
        return [*self.coverage, *withheld, *self._lost_with(change.path for change in changes), *coverage_of(given_up)]

    def before_of(self, path: RepoPath) -> Entry | None:
        """The entry of a path before this call; None if the call did not touch it."""
        known = self._touched.get(path)
        return None if known is None else known.before

    def begin(self) -> None:
        """Record the call before a command runs in it: a Mulligan that the command starts finds its outer call."""
        with self._lock:
            with self.ledger.store.write() as tx:
                self.begin_command_in(tx)
            self.mark_begun()

    def begin_command_in(self, tx: Tx) -> None:
        """Begin for a command in the caller's transaction. Call `mark_begun` when that is committed."""
        self.ledger.check_not_inside(tx, [self.root.place_of(b".")])
        self._has_commands = True
        self.begin_in(tx)

    def begin_in(self, tx: Tx) -> None:
        """Record the call in the caller's transaction. Call `mark_begun` when that is committed."""
        self._check_open()
        if self._begun:
            self.ledger.check_ours(tx, self.facts.id, self._owner)
        else:
            self.ledger.begin(tx, self.facts, self._owner)

    def mark_begun(self) -> None:
        self._begun = True

    def _images(self, paths: Iterable[RepoPath], *, kept: bool = True) -> dict[RepoPath, Image]:
        with Spots(self.disk) as spots:
            return {path: self._image_at(spots, path, kept=kept) for path in paths}

    def _image(self, path: RepoPath) -> Image:
        """For a comparison: the bytes of a large file are not stored."""
        with Spots(self.disk) as spots:
            return self._image_at(spots, path, kept=False)

    def _image_at(self, spots: Spots, path: RepoPath, *, kept: bool) -> Image:
        """The image of a real path; empty if its folder is missing or is a symlink."""
        try:
            return self.disk.image(spots.at(path), kept=kept)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return NOTHING

    # What `Call` provides.

    @abstractmethod
    def changes(self) -> list[Change]: ...

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _keep_carefully(self, paths: Sequence[RepoPath], *, going: bool) -> None: ...

    @abstractmethod
    def _draft(self, row: TouchRow) -> bytes: ...

    @abstractmethod
    def _spot(self, path: RepoPath) -> ResolvedPath | nullcontext[None]: ...
