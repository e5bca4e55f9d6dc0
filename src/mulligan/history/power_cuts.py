"""After a power cut: what it took of the files that Mulligan replaced, and what becomes of their originals.

`recover_originals` looks once at each original that a process which is gone has left (`store.originals`). The file at
a path is ours if it has the inode and the time of a file that Mulligan put there.

| at the path is | then |
| --- | --- |
| ours, complete | it stays |
| ours, but other bytes than were written | the newest complete original goes back |
| nothing, and the store does not know that a call deleted it | the original goes back |
| anything else | somebody's work: it stays |

The bytes of an original that did not go back go into the store, if the store does not have them; a record names the
path. A draft beside its path is an original too, if the process got no further than the exchange; it is left to the
recovery of its call where that is still open. All of it can be done again from the start, so it may die anywhere.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mulligan.history.ledger import Ledger
from mulligan.history.tables import OPEN, ROOTS, RootRow
from mulligan.store.housekeeping import STORE_JOURNAL
from mulligan.store.originals import NO_FILE, Left, NewFile, Original
from mulligan.values.digest import Digest
from mulligan.values.entries import Absent, FileEntry
from mulligan.values.faults import MulliganError
from mulligan.values.paths import is_inside, path_from_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.disk import DRAFT_PREFIX, HostDisk, Image
from mulligan.workspace.places import Spot

POWER_CUT_KIND = "store.power_cut"

_DRAFT_OF_A_CALL = re.compile(re.escape(DRAFT_PREFIX) + rb"([0-9a-f]{12})-")
_PATHS_A_RECORD = 500


Outcome = Literal["put_back", "rescued", "lost"]


@plain(slots=True, frozen=True)
class Found:
    """What came of one path. `rescued`: its earlier bytes are in the store, and `digest` names them."""

    path: str
    outcome: Outcome
    digest: Digest | None = None

    def to_json(self) -> dict[str, str]:
        body = {"path": self.path, "outcome": self.outcome}
        return body if self.digest is None else body | {"digest": self.digest}


class Opened(Protocol):
    """A root that is open, and which roots of its store this process sees."""

    @property
    def ledger(self) -> Ledger: ...
    def sees(self, root: RootRow) -> bool: ...


_Item = tuple[Left, Original]


@dataclass(slots=True)
class _Path:
    """One path and the originals taken from it, the newest first."""

    folder: bytes
    name: bytes
    taken: list[_Item] = field(default_factory=list)
    announced: list[_Item] = field(default_factory=list)


def recover_originals(opened: Opened) -> list[Found]:
    """Look through what processes that are gone have left, and keep nothing of it that is not needed any more."""
    ledger = opened.ledger
    originals = ledger.store.originals
    lefts = [] if originals is None else originals.left()
    if not lefts:
        return []
    with ExitStack() as closing:
        for left in lefts:
            closing.callback(left.close)
        with ledger.store.read() as tx:
            open_calls = frozenset(row.call[-12:].encode("ascii") for row in tx.select(OPEN))
        look = _Look(opened, open_calls)
        for path in _paths_of(lefts):
            look.at(path)
        for folder in {folder for left in lefts for folder in left.folders.values()}:
            look.sweep(folder)
        look.record()
        ledger.blobs.sync()
        if not look.failed:
            for left in lefts:
                left.remove()
        return look.found


def _paths_of(lefts: Iterable[Left]) -> list[_Path]:
    paths: dict[tuple[bytes, bytes], _Path] = {}
    for left in lefts:
        for one in (*left.taken, *left.announced):
            key = left.folders[one.folder], one.name
            path = paths.setdefault(key, _Path(*key))
            if one in left.taken:
                path.taken.append((left, one))
            else:
                path.announced.append((left, one))
    for path in paths.values():
        path.taken.sort(key=lambda item: item[1].taken_ns, reverse=True)
    return list(paths.values())


class _Look:
    """One look through everything that was left. `failed`: not all could be done, so all is kept for the next look."""

    def __init__(self, opened: Opened, open_calls: frozenset[bytes]) -> None:
        self.ledger = opened.ledger
        self._sees = opened.sees
        self._open_calls = open_calls
        self.found: list[Found] = []
        self.failed = False

    def at(self, path: _Path) -> None:
        try:
            with ExitStack() as closing:
                disk = self._disk_at(path.folder, closing)
                if disk is None:
                    self._rescue_all(path.taken, path)
                    return
                spot = closing.enter_context(disk.resolve_exactly(path_from_bytes(path.name)))
                self._look_at_taken(disk, spot, path)
                for _, original in path.announced:
                    self._look_at_draft(disk, spot, path, original)
                # Also what is complete: it may be only in memory, and its original is about to go.
                _sync(disk, spot)
        except OSError:
            self.failed = True

    def _disk_at(self, folder: bytes, closing: ExitStack) -> HostDisk | None:
        try:
            disk = HostDisk(folder)
        except MulliganError:
            return None
        closing.callback(disk.close)
        disk.keep_large = self.ledger.blobs.store_large
        return disk

    def _look_at_taken(self, disk: HostDisk, spot: Spot, path: _Path) -> None:
        if not path.taken:
            return
        now = _status(spot, spot.name)
        ours = next((one for _, one in path.taken if _is_of(now, one.new)), None)
        back = None
        if now is None and path.taken[0][1].new == NO_FILE and not self._is_known_as_gone(disk, path):
            back = self._newest_complete(path, path.taken)
        elif ours is not None and self._is_damaged(disk, spot, ours):
            earlier = [item for item in path.taken if item[1].taken_ns <= ours.taken_ns]
            back = self._newest_complete(path, earlier)
            self._note(path, "put_back" if back is not None else "lost")
        if back is not None:
            left, original = back
            if now is None:
                self._note(path, "put_back")
            disk.put_original_back(spot, left.handle, original.entry)
        self._rescue_all([item for item in path.taken if item != back], path)

    def _look_at_draft(self, disk: HostDisk, spot: Spot, path: _Path, original: Original) -> None:
        """The process got as far as the exchange, or as setting it aside, or not even there."""
        draft, now = _status(spot, original.draft), _status(spot, spot.name)
        if draft is None:
            return
        if original.new != NO_FILE and draft.st_ino == original.new.inode:
            disk.discard(spot, original.draft)
            return
        is_damaged = _is_of(now, original.new) and self._is_damaged(disk, spot, original)
        if self._is_open(original.draft) and not is_damaged:
            return
        if now is None or _is_of(now, original.new):
            disk.put_original_back(spot, spot.parent, original.draft)
            self._note(path, "put_back")
            return
        self._rescue(disk.image(spot, draft=original.draft), path)
        disk.discard(spot, original.draft)

    def _is_damaged(self, disk: HostDisk, spot: Spot, original: Original) -> bool:
        entry = disk.image(spot, kept=False).entry
        return isinstance(entry, FileEntry) and entry.digest != original.new.digest

    def _newest_complete(self, path: _Path, items: Sequence[_Item]) -> _Item | None:
        """An original that a power cut took nothing from: one of ours by its digest; of others nobody can tell more."""
        made = {one.new.inode: one.new for _, one in path.taken if one.new != NO_FILE}
        for left, one in items:
            with ExitStack() as closing:
                image = self._original(left, one, closing)
                new = None if image.stamp is None else made.get(image.stamp[0])
                if new is None or (isinstance(image.entry, FileEntry) and image.entry.digest == new.digest):
                    return left, one
        return None

    def _original(self, left: Left, original: Original, closing: ExitStack) -> Image:
        disk = self._disk_at(os.fsencode(left.path), closing)
        assert disk is not None, "it is locked, so it is there"
        spot = closing.enter_context(disk.resolve_exactly(path_from_bytes(original.entry)))
        return disk.image(spot)

    def _rescue_all(self, items: Iterable[_Item], path: _Path) -> None:
        made = {one.new.inode: one.new for _, one in path.taken if one.new != NO_FILE}
        for left, one in items:
            with ExitStack() as closing:
                image = self._original(left, one, closing)
                new = None if image.stamp is None else made.get(image.stamp[0])
                is_torn = new is not None and isinstance(image.entry, FileEntry) and image.entry.digest != new.digest
                if not is_torn:
                    self._rescue(image, path)

    def _rescue(self, image: Image, path: _Path) -> None:
        """What the store does not have, because the power cut took that from it, or because somebody saved it."""
        if not isinstance(image.entry, FileEntry) or image.content is None:
            return
        with self.ledger.store.read() as tx:
            known = self.ledger.blobs.has(tx, image.entry.digest)
        if not known:
            self._note(path, "rescued", self.ledger.blobs.store(image.content))

    def _is_known_as_gone(self, disk: HostDisk, path: _Path) -> bool:
        """Whether a call that is on record deleted it, by the key that the store has for the path."""
        place, name = disk.root.place, path_from_bytes(path.name)
        with self.ledger.store.read() as tx:
            around = [row for row in tx.select(ROOTS) if is_inside(place, row.place)]
        keys = [row.key + place[len(row.place) :] for row in around if self._sees(row)]
        with self.ledger.store.read() as tx:
            seen = [self.ledger.last_seen(tx, disk.root.with_key(key).place_of(name)) for key in keys]
        return any(isinstance(entry, Absent) for entry in seen)

    def _is_open(self, draft: bytes) -> bool:
        match = _DRAFT_OF_A_CALL.match(draft)
        return match is not None and match[1] in self._open_calls

    def sweep(self, folder: bytes) -> None:
        """Remove drafts of calls that the store knows nothing of: they never took a place."""
        with ExitStack() as closing, suppress(OSError):
            disk = self._disk_at(folder, closing)
            for name in () if disk is None else map(os.fsencode, os.listdir(disk.root.handle)):
                if disk is not None and _DRAFT_OF_A_CALL.match(name) and not self._is_open(name):
                    with disk.resolve_exactly(path_from_bytes(name)) as spot:
                        disk.discard(spot, name)

    def _note(self, path: _Path, outcome: Outcome, digest: Digest | None = None) -> None:
        whole = os.path.join(path.folder, path.name)
        self.found.append(Found("/" + to_wire(path_from_bytes(whole.lstrip(b"/"))), outcome, digest))

    def record(self) -> None:
        ledger = self.ledger
        for start in range(0, len(self.found), _PATHS_A_RECORD):
            some = self.found[start : start + _PATHS_A_RECORD]
            body = {"paths": [one.to_json() for one in some]}
            refs = {one.digest for one in some if one.digest is not None}
            with ledger.store.write() as tx:
                ledger.journal.append(tx, STORE_JOURNAL, POWER_CUT_KIND, body, at=ledger.now(), refs=refs)


def _status(spot: Spot, name: bytes) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=spot.parent)
    except FileNotFoundError:
        return None


def _is_of(now: os.stat_result | None, new: NewFile) -> bool:
    """Whether it is the file that Mulligan put there, and nobody has written into it since."""
    return now is not None and (now.st_ino, now.st_mtime_ns) == (new.inode, new.mtime_ns)


def _sync(disk: HostDisk, spot: Spot) -> None:
    """The bytes only: the file system keeps the order of names, so it has this one before those that go."""
    try:
        disk.sync_file(spot)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
