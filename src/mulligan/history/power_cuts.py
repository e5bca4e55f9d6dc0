"""After a power cut or a crash: check the files that Mulligan replaced, and settle what becomes of their originals.

A process that replaces a file keeps the original until the new file is synced (`store.originals`). `recover_originals`
checks each original that a dead process has left. The file at a path is ours if it has the inode and the time of a
file that Mulligan put there.

| at the path is | then |
| --- | --- |
| ours, complete | it stays |
| ours, but with other bytes than were written | the newest complete original goes back |
| nothing, and the store does not know that a call deleted it | the original goes back |
| anything else | another process's work: it stays |

The bytes of an original that did not go back go into the store, if the store does not have them; a record names the
path. A draft beside its path is an original too, if the process got no further than the exchange; if its call is still
open, the recovery of that call deals with it. Every step can be repeated, so this process may die anywhere.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import field
from typing import Literal, Protocol

from mulligan.files.disk import DRAFT_PREFIX, HostDisk, Image
from mulligan.files.resolve import ResolvedPath
from mulligan.history.ledger import Ledger
from mulligan.history.tables import OPEN, ROOTS, RootRow
from mulligan.store.journal import STORE_JOURNAL
from mulligan.store.originals import NO_FILE, DeadProcessOriginals, NewFile, Original
from mulligan.values.digest import Digest
from mulligan.values.entries import Absent, FileEntry
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import is_inside, path_from_bytes, to_wire

POWER_CUT_KIND = "store.power_cut"

_DRAFT_OF_A_CALL = re.compile(re.escape(DRAFT_PREFIX) + rb"([0-9a-f]{12})-")
_PATHS_PER_RECORD = 500

Outcome = Literal["put_back", "rescued", "lost"]


@fast_dataclass(slots=True, frozen=True)
class CutReport:
    """The result of the check for one path. `rescued`: its earlier bytes are in the store, and `digest` names them."""

    path: str
    outcome: Outcome
    digest: Digest | None = None

    def to_json(self) -> dict[str, str]:
        body = {"path": self.path, "outcome": self.outcome}
        return body if self.digest is None else body | {"digest": self.digest}


class OpenedRoot(Protocol):
    """An open root, which knows the roots of its store that this process sees."""

    @property
    def ledger(self) -> Ledger: ...
    def sees(self, root: RootRow) -> bool: ...


_Item = tuple[DeadProcessOriginals, Original]


@fast_dataclass(slots=True)
class _Path:
    """One path with its moved originals, newest first, and those that a process only announced."""

    folder: bytes
    name: bytes
    taken: list[_Item] = field(default_factory=list)
    announced: list[_Item] = field(default_factory=list)

    def is_torn(self, image: Image) -> bool:
        """Whether an original is a file that Mulligan itself had put at the path, with other bytes than it wrote."""
        made = {one.new.inode: one.new for _, one in self.taken if one.new != NO_FILE}
        new = None if image.stamp is None else made.get(image.stamp[0])
        return new is not None and not (isinstance(image.entry, FileEntry) and image.entry.digest == new.digest)


def recover_originals(opened: OpenedRoot) -> list[CutReport]:
    """Check every original that dead processes have left, and remove those that are not needed any more."""
    ledger = opened.ledger
    originals = ledger.store.originals
    dead_processes = [] if originals is None else originals.of_dead_processes()
    if not dead_processes:
        return []
    with ExitStack() as closing:
        for left in dead_processes:
            closing.callback(left.close)
        with ledger.store.read() as tx:
            open_calls = frozenset(row.call[-12:].encode("ascii") for row in tx.select(OPEN))
        check = _Check(opened, open_calls)
        for path in _paths_of(dead_processes):
            check.path(path)
        for folder in {folder for left in dead_processes for folder in left.folders.values()}:
            # After the paths, because an announced original is a draft, too.
            check.remove_unknown_drafts(folder)
        check.record()
        # Rescued bytes are on the disk before their originals go.
        ledger.blobs.sync()
        if not check.failed:
            for left in dead_processes:
                left.remove()
        return check.reports


def _paths_of(dead_processes: Iterable[DeadProcessOriginals]) -> list[_Path]:
    paths: dict[tuple[bytes, bytes], _Path] = {}
    for left in dead_processes:
        for one in (*left.taken, *left.announced):
            key = left.folders[one.folder], one.name
            path = paths.setdefault(key, _Path(*key))
            (path.taken if one in left.taken else path.announced).append((left, one))
    # One path may have originals of several processes and several replacements.
    for path in paths.values():
        path.taken.sort(key=lambda item: item[1].taken_ns, reverse=True)
    return list(paths.values())


class _Check:
    """One pass over all originals. `failed`: a disk failed somewhere, so all originals stay for the next pass."""

    def __init__(self, opened: OpenedRoot, open_calls: frozenset[bytes]) -> None:
        self.ledger = opened.ledger
        self._sees = opened.sees
        self._open_calls = open_calls
        self.reports: list[CutReport] = []
        self.failed = False

    def path(self, path: _Path) -> None:
        try:
            with ExitStack() as closing:
                disk = self._disk_at(path.folder, closing)
                # The folder is gone, so nothing can be restored in it.
                if disk is None:
                    self._rescue_all(path.taken, path)
                    return
                spot = closing.enter_context(disk.resolve_exactly(path_from_bytes(path.name)))
                self._check_taken(disk, spot, path)
                for _, original in path.announced:
                    self._check_draft(disk, spot, path, original)
                # A complete file, too, may be only in memory, and its original is about to go.
                _sync(disk, spot)
        except OSError:
            # Every step can be repeated, so the next process that opens the store tries all of it again.
            self.failed = True

    def _disk_at(self, folder: bytes, closing: ExitStack) -> HostDisk | None:
        try:
            disk = HostDisk(folder)
        except MulliganError:
            return None
        closing.callback(disk.close)
        disk.keep_large = self.ledger.blobs.store_large
        return disk

    def _check_taken(self, disk: HostDisk, spot: ResolvedPath, path: _Path) -> None:
        if not path.taken:
            return
        now = _status(spot, spot.name)
        ours = next((one for _, one in path.taken if _is_file(now, one.new)), None)
        back = None
        if now is None and path.taken[0][1].new == NO_FILE and not self._is_known_as_deleted(disk, path):
            back = self._newest_complete(path, path.taken)
            if back is not None:
                self._report(path, "put_back")
        elif ours is not None and self._is_damaged(disk, spot, ours):
            # A later original is a version that came after the damaged one.
            earlier = [item for item in path.taken if item[1].taken_ns <= ours.taken_ns]
            back = self._newest_complete(path, earlier)
            self._report(path, "put_back" if back is not None else "lost")
        if back is not None:
            left, original = back
            disk.put_original_back(spot, left.handle, original.entry)
        self._rescue_all([item for item in path.taken if item != back], path)

    def _check_draft(self, disk: HostDisk, spot: ResolvedPath, path: _Path, original: Original) -> None:
        """The process died before the exchange, after it, or after it had set the original aside as a draft."""
        draft, now = _status(spot, original.draft), _status(spot, spot.name)
        if draft is None:
            return
        if original.new != NO_FILE and draft.st_ino == original.new.inode:
            # The draft still is the new file: the exchange did not happen.
            disk.discard(spot, original.draft)
            return
        is_damaged = _is_file(now, original.new) and self._is_damaged(disk, spot, original)
        # Recovery of the call knows more: what it meant to put there, and in which order.
        if self._is_of_open_call(original.draft) and not is_damaged:
            return
        if now is None or _is_file(now, original.new):
            disk.put_original_back(spot, spot.parent, original.draft)
            self._report(path, "put_back")
            return
        self._rescue(disk.image(spot, draft=original.draft), path)
        disk.discard(spot, original.draft)

    def _is_damaged(self, disk: HostDisk, spot: ResolvedPath, original: Original) -> bool:
        entry = disk.image(spot, kept=False).entry
        return isinstance(entry, FileEntry) and entry.digest != original.new.digest

    def _newest_complete(self, path: _Path, items: Sequence[_Item]) -> _Item | None:
        """The newest original that the power cut did not damage. Only files of ours have a digest to check."""
        for left, one in items:
            with ExitStack() as closing:
                if not path.is_torn(self._image_of(left, one, closing)):
                    return left, one
        return None

    def _image_of(self, left: DeadProcessOriginals, original: Original, closing: ExitStack) -> Image:
        disk = self._disk_at(os.fsencode(left.path), closing)
        assert disk is not None, "this process holds its lock, so it exists"
        spot = closing.enter_context(disk.resolve_exactly(path_from_bytes(original.entry)))
        return disk.image(spot)

    def _rescue_all(self, items: Iterable[_Item], path: _Path) -> None:
        for left, one in items:
            with ExitStack() as closing:
                image = self._image_of(left, one, closing)
                if not path.is_torn(image):
                    self._rescue(image, path)

    def _rescue(self, image: Image, path: _Path) -> None:
        """Store the bytes if the store lacks them: the power cut destroyed them there, or another process saved them
        meanwhile.
        """
        if not isinstance(image.entry, FileEntry) or image.content is None:
            return
        with self.ledger.store.read() as tx:
            is_known = self.ledger.blobs.has(tx, image.entry.digest)
        if not is_known:
            self._report(path, "rescued", self.ledger.blobs.store(image.content))

    def _is_known_as_deleted(self, disk: HostDisk, path: _Path) -> bool:
        """Whether a recorded call deleted the path. Each root around it may have the path under a key of its own."""
        place, name = disk.root.place, path_from_bytes(path.name)
        with self.ledger.store.read() as tx:
            around = [row for row in tx.select(ROOTS) if is_inside(place, row.place)]
        # In another mount namespace a root with the same path may be another folder.
        keys = [row.key + place[len(row.place) :] for row in around if self._sees(row)]
        with self.ledger.store.read() as tx:
            seen = [self.ledger.last_seen(tx, disk.root.with_key(key).place_of(name)) for key in keys]
        return any(isinstance(entry, Absent) for entry in seen)

    def _is_of_open_call(self, draft: bytes) -> bool:
        match = _DRAFT_OF_A_CALL.match(draft)
        return match is not None and match[1] in self._open_calls

    def remove_unknown_drafts(self, folder: bytes) -> None:
        """Remove drafts of calls that the store does not know: no process moved them to their paths."""
        with ExitStack() as closing, suppress(OSError):
            disk = self._disk_at(folder, closing)
            if disk is None:
                return
            for name in map(os.fsencode, os.listdir(disk.root.handle)):
                if _DRAFT_OF_A_CALL.match(name) and not self._is_of_open_call(name):
                    with disk.resolve_exactly(path_from_bytes(name)) as spot:
                        disk.discard(spot, name)

    def _report(self, path: _Path, outcome: Outcome, digest: Digest | None = None) -> None:
        whole = os.path.join(path.folder, path.name)
        self.reports.append(CutReport("/" + to_wire(path_from_bytes(whole.lstrip(b"/"))), outcome, digest))

    def record(self) -> None:
        ledger = self.ledger
        for start in range(0, len(self.reports), _PATHS_PER_RECORD):
            some = self.reports[start : start + _PATHS_PER_RECORD]
            body = {"paths": [one.to_json() for one in some]}
            refs = {one.digest for one in some if one.digest is not None}
            with ledger.store.write() as tx:
                ledger.journal.append(tx, STORE_JOURNAL, POWER_CUT_KIND, body, at=ledger.now(), refs=refs)


def _status(spot: ResolvedPath, name: bytes) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=spot.parent)
    except FileNotFoundError:
        return None


def _is_file(now: os.stat_result | None, new: NewFile) -> bool:
    """Whether it is the file that Mulligan put there, and no process has written into it since."""
    return now is not None and (now.st_ino, now.st_mtime_ns) == (new.inode, new.mtime_ns)


def _sync(disk: HostDisk, spot: ResolvedPath) -> None:
    """Only the bytes: the file system keeps the order of names, so this name is on disk before the original's goes."""
    try:
        disk.sync_file(spot)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
