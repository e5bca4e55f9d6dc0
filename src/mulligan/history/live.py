"""The part of a call that watches a command change files by itself.

Before a command changes a path its preimage is durable (`about_to_change`), or what it changed is learned afterwards
from somebody who knew what was there before (`learn`). Either way it is the call's change when the command is over.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from mulligan.history.ledger import Claimed, Facts, Ledger, intending, meant_to_stay, touch_row
from mulligan.history.tables import RootRow, TouchRow
from mulligan.history.traits import Traits
from mulligan.store.blobs import Prepared, Vanished
from mulligan.store.claims import Wanted as Claim
from mulligan.store.protocol import Tx
from mulligan.values.entries import ABSENT, Change, DirEntry, Entry, FileEntry, same_state
from mulligan.values.ids import OwnerId
from mulligan.values.paths import RepoPath, path_bytes, to_wire
from mulligan.workspace.disk import NOTHING, Disk, Image
from mulligan.workspace.places import Spot


@dataclass(slots=True)
class Touched:
    """A path this call has changed: what it was before the call, and what we last put there.

    `unsure`: it is being changed right now, or whoever did could not say how far it came.
    """

    row: TouchRow
    path: RepoPath
    before: Entry
    after: Entry
    acted: bool = False
    unsure: bool = False
    origin: RepoPath | None = None

    def noted_in(self, row: TouchRow) -> Touched:
        """The same with another row of the store."""
        return Touched(row, self.path, self.before, self.after, self.acted, self.unsure, self.origin)

    @property
    def change(self) -> Change:
        return Change(self.path, self.before, self.after, self.origin)


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
    _claimed: set[Claim]
    _touched: dict[RepoPath, Touched]
    _done: list[tuple[RepoPath, Entry]]
    _shared: set[RepoPath]
    _traits: Traits
    _lock: threading.RLock

    def about_to_change(self, paths: Sequence[RepoPath], *, going: bool = False) -> None:
        """A running command is about to change these paths: their preimages are durable when this returns.

        `going`: directories among them are about to be moved or removed, which nobody else may be at work in.
        """
        with self._lock:
            self._check_open()
            images = {path: self._image(path) for path in paths if path not in self._touched}
            self._leave_special(path for path, image in images.items() if image.special)
            fresh = {path: image for path, image in images.items() if not image.special}
            if not fresh:
                return
            try:
                self._keep(fresh, going=going)
            except (Claimed, Surprised, Vanished):
                self._keep_carefully(list(fresh), going=going)

    def _keep(self, images: Mapping[RepoPath, Image], *, going: bool) -> None:
        """All of them in one transaction, if nobody is in the way and everything is as the record says."""
        bodies = {path: self._body(image) for path, image in images.items()}
        rows = {path: self._live_row(path, image.entry, count) for count, (path, image) in enumerate(images.items())}
        places = {path: self.disk.root.place_of(path) for path in images}
        wanted = {Claim(place) for place in places.values()} - self._claimed
        with self.ledger.store.write() as tx:
            self.begin_in(tx)
            self.ledger.claim(tx, self.facts.id, list(wanted))
            if going:
                folders = [path for path, image in images.items() if isinstance(image.entry, DirEntry)]
                self.ledger.check_free(tx, self.facts.id, [Claim(places[path], deep=True) for path in folders])
            for path, image in images.items():
                seen = self.ledger.last_seen(tx, places[path])
                if seen is not None and not same_state(seen, image.entry):
                    self._record_external(tx, Change(path, seen, image.entry), bodies[path])
                self.ledger.touch(tx, rows[path], bodies[path])
        self._begun = True
        self._claimed |= wanted
        for path, image in images.items():
            self._touched[path] = Touched(rows[path], path, image.entry, image.entry, unsure=True)
            self._done.append((path, image.entry))
            self._traits.note(path, image)

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

    def _live_row(self, path: RepoPath, before: Entry, count: int) -> TouchRow:
        ordinal = len(self._touched) + count
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=ordinal, before=before)
        return meant_to_stay(row, self._draft(row))

    def _leave_special(self, paths: Iterable[RepoPath]) -> None:
        """A device, FIFO or socket cannot be kept: said so, and left to the command."""
        self.coverage += [{"path": to_wire(path), "reason": "special_file"} for path in paths]

    def absorb(self, paths: Sequence[RepoPath], *, keep: bool = True) -> None:
        """The command is over: what it left at these paths is what this call has done there.

        Without `keep` its bytes are not stored: for a command that is about to be put back.
        """
        with self._lock:
            images = {path: self._image(path) for path in paths}
            self._leave_special(path for path, image in images.items() if image.special)
            if keep:
                self.ledger.blobs.store_all(image.content for image in images.values() if image.content is not None)
            for path, image in images.items():
                if not image.special:
                    self._has_become(self._touched.get(path) or self._unannounced(path, ABSENT), image.entry)

    def _has_become(self, touched: Touched, after: Entry) -> None:
        self._touched[touched.path] = touched
        self._done.append((touched.path, touched.after))
        touched.after, touched.acted, touched.unsure = after, True, False

    def _unannounced(self, path: RepoPath, before: Entry) -> Touched:
        """A path the command changed without our knowing."""
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=len(self._touched), before=before)
        return Touched(intending(row, before, self._draft(row), in_place=False), path, before, before)

    def live_paths(self) -> list[RepoPath]:
        """Paths a command was about to change and that have not been absorbed yet."""
        return [path for path, touched in self._touched.items() if touched.row.in_place and not touched.acted]

    def learn(
        self, steps: Sequence[tuple[RepoPath, Entry, Entry]], *, also: Iterable[Callable[[Tx], None]] = ()
    ) -> None:
        """What a command did, from somebody who knows the before and the after, whose bytes are in the store.

        Durable when this returns, together with what `also` write.
        """
        with self._lock:
            self._check_open()
            with self.ledger.store.write() as tx:
                self.begin_in(tx)
                for path, before, after in steps:
                    touched = self._touched.get(path) or self._unannounced(path, before)
                    touched.row = intending(touched.row, after, self._draft(touched.row), in_place=False)
                    self.ledger.touch(tx, touched.row, ())
                    self._has_become(touched, after)
                for act in also:
                    act(tx)
            self._begun = True

    def adopt(self, path: RepoPath, before: Entry) -> None:
        """What a path was before a command, as somebody knows who kept it; its bytes are in the store."""
        if path not in self._touched:
            self._touched[path] = self._unannounced(path, before)

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

    def _names_of(self, paths: Iterable[RepoPath]) -> dict[RepoPath, list[RepoPath]]:
        """All names of files that have several and are about to change: all preimages are durable when this returns.

        Where one may be outside the root, that is said.
        """
        found: dict[RepoPath, list[RepoPath]] = {}
        for path in paths:
            found[path], complete = self._traits.names_of(self.disk.root.path, path)
            note = {"path": to_wire(path), "reason": "hard_link"}
            if not complete and note not in self.coverage:
                self.coverage.append(note)
        if found:
            self.about_to_change(list(dict.fromkeys(name for names in found.values() for name in names)))
        return found

    def _lost_with(self, paths: Iterable[RepoPath]) -> list[dict[str, str]]:
        """What is not on what is there now, and no way back can put there again."""
        if not self._traits.had:
            return []
        folders = {path for path, one in self._touched.items() if one.acted and isinstance(one.before, DirEntry)}
        return self._traits.lost(paths, folders, self._image)

    def before_of(self, path: RepoPath) -> Entry | None:
        """What a path was before this call; None if the call has nothing to do with it."""
        known = self._touched.get(path)
        return None if known is None else known.before

    def seen_at_start(self, paths: Iterable[RepoPath]) -> dict[RepoPath, Entry | None]:
        """What the record says of paths; None where it says nothing."""
        with self.ledger.store.read() as tx:
            return {
                path: known.after if (known := self._touched.get(path)) else self._last_seen(tx, path) for path in paths
            }

    def _last_seen(self, tx: Tx, path: RepoPath) -> Entry | None:
        return self.ledger.last_seen(tx, self.disk.root.place_of(path))

    def begin(self) -> None:
        """On record before a command runs in it: a Mulligan that the command starts finds the call it is part of."""
        with self._lock:
            with self.ledger.store.write() as tx:
                self.ledger.check_not_inside(tx, [self.root.place])
                self.begin_in(tx)
            self.has_begun()

    def begin_in(self, tx: Tx) -> None:
        """On record, as part of somebody's transaction; `has_begun` when that has been published."""
        if self._begun:
            self.ledger.check_ours(tx, self.facts.id, self._owner)
        else:
            self.ledger.begin(tx, self.facts, self._owner)

    def has_begun(self) -> None:
        self._begun = True

    def _image(self, path: RepoPath) -> Image:
        with self._spot(path) as spot:
            return NOTHING if spot is None else self.disk.image(spot)

    # What `Call` has.

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _keep_carefully(self, paths: Sequence[RepoPath], *, going: bool) -> None: ...

    @abstractmethod
    def _draft(self, row: TouchRow) -> bytes: ...

    @abstractmethod
    def _spot(self, path: RepoPath) -> Spot | nullcontext[None]: ...
