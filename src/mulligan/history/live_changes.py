"""The part of a call that watches a command change files by itself.

Before a command changes a path its preimage is durable (`about_to_change`), or what it changed is learned afterwards
from somebody who knew what was there before (`learn`). Either way it is the call's change when the command is over.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from mulligan.history.deeds import Deeds
from mulligan.history.ledger import Claimed, Facts, Ledger, intending, meant_to_stay, touch_row, withheld_notes
from mulligan.history.over_cap import changes_over_cap, coverage_of
from mulligan.history.tables import RootRow, TouchRow
from mulligan.history.traits import Traits
from mulligan.store.blobs import Prepared, Vanished
from mulligan.store.claims import Wanted as Claim
from mulligan.store.protocol import Tx
from mulligan.values.digest import Digest
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Change,
    DirEntry,
    Entry,
    FileEntry,
    is_withheld,
    same_content,
    same_state,
)
from mulligan.values.faults import MulliganError
from mulligan.values.ids import OwnerId
from mulligan.values.paths import RepoPath, parent_of, path_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import NOTHING, Disk, Image
from mulligan.workspace.places import Spot, Spots


@dataclass(slots=True)
class Touched:
    """A path this call has changed: what it was before the call, and what we last put there.

    `unsure`: it is being changed right now, or whoever did could not say how far it came. `seen`: an image of `after`
    as it was found there, without its bytes. `bare`: the store does not have the bytes of `after`.
    """

    row: TouchRow
    path: RepoPath
    before: Entry
    after: Entry
    acted: bool = False
    unsure: bool = False
    origin: RepoPath | None = None
    seen: Image | None = None
    bare: bool = False

    def take_seen(self) -> Image | None:
        """Once, and only if it is what we last knew: whoever puts it back a second time has to look for himself."""
        seen, self.seen = self.seen, None
        return seen if seen is not None and seen.entry is self.after and not self.unsure else None

    def noted_in(self, row: TouchRow) -> Touched:
        """The same with another row of the store."""
        return Touched(row, self.path, self.before, self.after, self.acted, self.unsure, self.origin, bare=self.bare)

    def becomes(self, after: Entry, *, bare: bool = False) -> None:
        """What it holds now, for sure. Where nothing is, nothing has come from elsewhere."""
        self.after, self.unsure = after, False
        has_bytes = isinstance(after, FileEntry) and not is_withheld(after)
        self.bare = bare and has_bytes and not same_content(self.before, after)
        if isinstance(after, Absent):
            self.origin = None

    @property
    def change(self) -> Change:
        return Change(self.path, self.before, self.after, self.origin)


@plain(slots=True, frozen=True)
class _Doomed:
    """A path that a command is about to change, with all that the store has to hold before it may."""

    path: RepoPath
    image: Image
    claim: Claim
    row: TouchRow
    bodies: Sequence[Prepared]


@plain(slots=True, frozen=True)
class Learned:
    """A change that somebody else has seen: what was there, under how many names, and what is there now.

    `after` None: whoever saw it has not read it. It is to be absorbed. `bare`: its bytes are not in the store.
    """

    path: RepoPath
    before: Entry
    after: Entry | None
    seen: Image | None = None
    links: int = 1
    bare: bool = False


class Surprised(Exception):
    """Somebody is in the way, or what is there is not what the record says: the careful way is called for."""


class Watching(ABC):
    """What `Call` inherits. It has these, and a careful way of claiming and capturing for the rare cases."""

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
    _traits: Traits
    _times: dict[RepoPath, int]
    _originals: dict[bytes, RepoPath]
    _not_captured: set[RepoPath]
    _lock: threading.RLock

    def about_to_change(self, paths: Sequence[RepoPath], *, going: bool = False) -> None:
        """A running command is about to change these paths: their preimages are durable when this returns.

        `going`: directories among them are about to be moved or removed, which nobody else may be at work in.
        """
        if not paths:
            return
        with self._lock:
            self._check_open()
            images = self._images(path for path in paths if path not in self._touched)
            self._leave_special(path for path, image in images.items() if image.special)
            self._name_unstable(images)
            self._note_times({parent_of(path) for path in images} - self._times.keys())
            fresh = [
                self._doomed(path, image, len(self._touched) + count)
                for count, (path, image) in enumerate(images.items())
                if not image.special
            ]
            if not fresh:
                return
            try:
                self._keep(fresh, going=going)
            except (Claimed, Surprised, Vanished):
                self._keep_carefully([one.path for one in fresh], going=going)

    def _note_times(self, folders: Iterable[RepoPath]) -> None:
        """Of directories in which something is about to change, as that changes their time too."""
        for path, image in self._images(folders).items():
            if isinstance(image.entry, DirEntry):
                self._times[path] = image.entry.mtime_ns

    def _doomed(self, path: RepoPath, image: Image, ordinal: int) -> _Doomed:
        image = self._traits.with_group(image)
        if isinstance(image.entry, DirEntry) and path in self._times:
            image = replace(image, entry=replace(image.entry, mtime_ns=self._times[path]))
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=ordinal, before=image.entry)
        claim = Claim(self.disk.root.place_of(path))
        return _Doomed(path, image, claim, meant_to_stay(row, self._draft(row)), self._body(image))

    def _keep(self, doomed: Sequence[_Doomed], *, going: bool) -> None:
        """All of them in one transaction, if nobody is in the way and everything is as the record says."""
        wanted = {one.claim for one in doomed} - self._claimed
        with self.ledger.store.write() as tx:
            self.begin_in(tx)
            self.ledger.claim(tx, self.facts.id, list(wanted))
            if going:
                folders = [one.claim.place for one in doomed if isinstance(one.image.entry, DirEntry)]
                self.ledger.check_free(tx, self.facts.id, [Claim(place, deep=True) for place in folders])
            for one in doomed:
                seen = self.ledger.last_seen(tx, one.claim.place)
                if seen is not None and not same_state(seen, one.image.entry):
                    self._record_external(tx, Change(one.path, seen, one.image.entry), one.bodies)
                self.ledger.touch(tx, one.row, one.bodies)
        self._begun = True
        self._claimed |= wanted
        for one in doomed:
            before = one.image.entry
            self._touched[one.path] = Touched(one.row, one.path, before, before, unsure=True)
            self._done.add(one.path, before)
            self._traits.note(one.path, one.image)

    def _record_external(self, tx: Tx, change: Change, bodies: Sequence[Prepared]) -> None:
        """Somebody changed it since the record: theirs, if it is still so now that the place is ours."""
        with self._spot(change.path) as spot:
            image = NOTHING if spot is None else self.disk.image(spot, kept=False)
        if not image.holds(change.after):
            raise Surprised
        self.ledger.external(tx, self.root, [change], bodies=bodies)

    def _body(self, image: Image) -> list[Prepared]:
        if image.content is None or not isinstance(image.entry, FileEntry):
            return []
        return [self.ledger.blobs.prepare_seen(image.content, image.entry.digest)]

    def _leave_special(self, paths: Iterable[RepoPath]) -> None:
        """A device, FIFO or socket cannot be kept: said so, and left to the command."""
        self.coverage += [{"path": to_wire(path), "reason": "special_file"} for path in paths]

    def _name_unstable(self, images: Mapping[RepoPath, Image]) -> None:
        """Somebody wrote into these files during every read: what was kept of them may be of no moment at all."""
        notes = [{"path": to_wire(path), "reason": "unstable"} for path, image in images.items() if image.unstable]
        self.coverage += [note for note in notes if note not in self.coverage]

    def absorb(self, paths: Sequence[RepoPath], *, keep: bool = True) -> None:
        """The command is over: what it left at these paths is what this call has done there.

        Without `keep` its bytes are not stored: for a command that is about to be put back. So is one whose bytes the
        store does not take; it cannot be published.
        """
        with self._lock:
            try:
                images = self._images(paths, kept=keep)
                if keep:
                    self.ledger.blobs.store_all(image.content for image in images.values() if image.content is not None)
            except MulliganError:
                if keep:
                    self.absorb(paths, keep=False)
                raise
            self._leave_special(path for path, image in images.items() if image.special)
            self._name_unstable(images)
            for path, image in images.items():
                if not image.special:
                    touched = self._touched.get(path) or self._unannounced(path, ABSENT)
                    self._has_become(touched, image.entry, image.without_content(), bare=not keep)

    def _has_become(self, touched: Touched, after: Entry, seen: Image | None, *, bare: bool) -> None:
        self._touched[touched.path] = touched
        self._done.add(touched.path, touched.after)
        touched.becomes(after, bare=bare)
        touched.acted, touched.seen = True, seen

    def _unannounced(self, path: RepoPath, before: Entry) -> Touched:
        """A path the command changed without our knowing."""
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=len(self._touched), before=before)
        return Touched(intending(row, before, self._draft(row), in_place=False), path, before, before)

    def _note_lift(self, path: RepoPath, now: DirEntry, lifted: DirEntry) -> None:
        """A directory is about to be opened for a step: should we die in it, that mode was ours."""
        touched = self._touched.get(path) or self._unannounced(path, now)
        row = intending(touched.row, lifted, self._draft(touched.row), in_place=False)
        if row != touched.row:
            with self.ledger.store.write() as tx:
                self.begin_in(tx)
                self.ledger.touch(tx, row, ())
            self._begun = True
        touched.row, self._touched[path] = row, touched

    def live_paths(self) -> list[RepoPath]:
        """Paths a command was about to change and that have not been absorbed yet."""
        return [path for path, touched in self._touched.items() if touched.row.in_place and not touched.acted]

    def learn(self, steps: Sequence[Learned], *, also: Iterable[Callable[[Tx], None]] = ()) -> None:
        """What a command did, from somebody who knows the before, whose bytes are in the store, and the after.

        Durable when this returns, together with what `also` write. Should the store fail, it can be put back all the
        same.
        """
        with self._lock:
            self._check_open()
            rows = [self._learned(step) for step in steps]
            with self.ledger.store.write() as tx:
                self.begin_in(tx)
                for row in rows:
                    self.ledger.touch(tx, row, ())
                for act in also:
                    act(tx)
            self._begun = True

    def _learned(self, step: Learned) -> TouchRow:
        touched = self._touched.get(step.path) or self._unannounced(step.path, step.before)
        self._traits.note(step.path, Image(step.before, links=step.links))
        if step.after is None:
            touched.row = intending(touched.row, touched.after, self._draft(touched.row), in_place=True)
            touched.unsure = True
            self._touched[step.path] = touched
            self._done.add(step.path, touched.after)
        else:
            touched.row = intending(touched.row, step.after, self._draft(touched.row), in_place=False)
            self._has_become(touched, step.after, step.seen, bare=step.bare)
        return touched.row

    def may_be_anybodys(self, paths: Iterable[RepoPath]) -> None:
        """Nobody knows who put there what is there: should it be put back, the record names the bytes."""
        for path in paths:
            one = self._touched[path]
            if is_withheld(one.after):
                continue
            if isinstance(one.after, FileEntry) and not (one.unsure or one.bare or same_content(one.before, one.after)):
                self._anybodys[path, one.after.digest] = one.after.size

    def let_be(self, paths: Iterable[RepoPath]) -> None:
        """Somebody else was at work there beside the command, and nobody can say whose is what.

        What is there now stays there, should the call be aborted.
        """
        self._shared.update(path for path in paths if path in self._touched)

    def _leave_shared(self, paths: Iterable[RepoPath]) -> None:
        """Put on record as somebody's what we will not take away."""
        shared = [self._touched[path] for path in paths if path in self._shared]
        changes = [one.change for one in shared if not same_state(one.before, one.after)]
        if changes:
            with self.ledger.store.write() as tx:
                self.ledger.external(tx, self.root, changes)
        self.conflicts += [one.path for one in changes if one.path not in self.conflicts]

    def _lost_with(self, paths: Iterable[RepoPath]) -> list[dict[str, str]]:
        """What is not on what is there now, and no way back can put there again."""
        if not self._traits.had:
            return []
        folders = {path for path, one in self._touched.items() if one.acted and isinstance(one.before, DirEntry)}
        return self._traits.lost(paths, folders, self._image)

    def gaps(self) -> list[dict[str, str]]:
        """What the record would say of it, ended now: what was not captured, and what could not be undone."""
        changes = self.changes()
        with self.ledger.store.read() as tx:
            given_up = changes_over_cap(tx, self.facts.session, changes)
        told = [note for note in withheld_notes(changes) if note not in self.coverage]
        return [*self.coverage, *told, *self._lost_with(change.path for change in changes), *coverage_of(given_up)]

    def before_of(self, path: RepoPath) -> Entry | None:
        """What a path was before this call; None if the call has nothing to do with it."""
        known = self._touched.get(path)
        return None if known is None else known.before

    def begin(self) -> None:
        """On record before a command runs in it: a Mulligan that the command starts finds the call it is part of."""
        with self._lock:
            with self.ledger.store.write() as tx:
                self.begin_command_in(tx)
            self.has_begun()

    def begin_command_in(self, tx: Tx) -> None:
        """As part of somebody's transaction; `has_begun` when that has been published."""
        self.ledger.check_not_inside(tx, [self.root.place_of(b".")])
        self._has_commands = True
        self.begin_in(tx)

    def begin_in(self, tx: Tx) -> None:
        """On record, as part of somebody's transaction; `has_begun` when that has been published."""
        self._check_open()
        if self._begun:
            self.ledger.check_ours(tx, self.facts.id, self._owner)
        else:
            self.ledger.begin(tx, self.facts, self._owner)

    def has_begun(self) -> None:
        self._begun = True

    def _images(self, paths: Iterable[RepoPath], *, kept: bool = True) -> dict[RepoPath, Image]:
        with Spots(self.disk) as spots:
            return {path: self._image_at(spots, path, kept=kept) for path in paths}

    def _image(self, path: RepoPath) -> Image:
        """To be compared: the bytes of a large file are put nowhere."""
        with Spots(self.disk) as spots:
            return self._image_at(spots, path, kept=False)

    def _image_at(self, spots: Spots, path: RepoPath, *, kept: bool) -> Image:
        """What is at a real path: nothing, while its directory is not there, or is a link that leads elsewhere."""
        try:
            return self.disk.image(spots.at(path), kept=kept)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return NOTHING

    # What `Call` has.

    @abstractmethod
    def changes(self) -> list[Change]: ...

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _keep_carefully(self, paths: Sequence[RepoPath], *, going: bool) -> None: ...

    @abstractmethod
    def _draft(self, row: TouchRow) -> bytes: ...

    @abstractmethod
    def _spot(self, path: RepoPath) -> Spot | nullcontext[None]: ...
