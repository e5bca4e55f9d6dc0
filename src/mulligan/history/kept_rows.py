"""What is known of a kept tree, a row for each path, and what the store has for commands in windows over that tree."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import TypeAlias

from mulligan.history.ledger import entry_bytes, intending, touch_row
from mulligan.history.putting_back import Site
from mulligan.history.tables import KEPT, KEPT_ROOTS, TOUCHES, WATCH_WINDOWS, KeptRootRow, KeptRow, RootRow, TouchRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.content import Content
from mulligan.values.digest import raw_digest
from mulligan.values.entries import ABSENT, Absent, Entry, FileEntry, entry_from_json
from mulligan.values.ids import CallId
from mulligan.values.paths import RepoPath, path_bytes, path_from_bytes
from mulligan.workspace.disk import DRAFT_PREFIX
from mulligan.workspace.exec.scan import Stamp

Known: TypeAlias = Entry | str | None
"""An entry whose bytes are in the store, git's name for a clean file, or None for what nobody knows."""

OF_A_WINDOW = -1
"""The ordinal of what was kept for a command that sees its changes only afterwards."""

_STAMP = struct.Struct("<5q")


_BATCH = 200


class KeptRows:
    """What each path was at the last look, by its absolute path: here at once, in the store once it is published."""

    def __init__(self, desk: Site) -> None:
        self._desk = desk
        self.stamps: dict[bytes, Stamp] = {}
        self.known: dict[bytes, Known] = {}
        self.fresh: dict[bytes, Entry | None] = {}
        """what it was before, of each that looks have found to be another since the last time"""
        self.unsaved: set[bytes] = set()
        self.small: list[Content] = []
        """bytes that the next rows to be published name"""

    def entry(self, path: bytes) -> Entry | None:
        """What it was, with its bytes in the store or in git's; None if nobody knows."""
        known = self.known.get(path, ABSENT)
        return None if isinstance(known, str) else known

    def forget(self, path: bytes) -> None:
        self.stamps.pop(path, None)
        self.known.pop(path, None)

    def take_back(self) -> frozenset[bytes]:
        """All is said to be as it was before the last look. Of which that is not so."""
        changed = frozenset(self.fresh)
        for path, was in self.fresh.items():
            if isinstance(was, Absent):
                self.forget(path)
            else:
                self.known[path] = was
        self.fresh = {}
        self.small.clear()
        return changed

    def begin(self, stamps: Mapping[bytes, Stamp]) -> None:
        """As if nobody had looked before: nothing is known yet but the stamps."""
        with self._desk.ledger.store.write() as tx:
            forget(tx, self._desk.root.id)
        self.stamps.update(stamps)
        self.known.update(dict.fromkeys(stamps))
        self.unsaved = set(stamps)

    def publish(self, tx: Tx, taken_ns: int | None) -> None:
        """What looks have found since the last time. `taken_ns`: when all of the stamps were taken.

        `has_published` when the transaction is over: what a failed one took along goes with the next.
        """
        root = self._desk.disk.root
        self.put_small(tx)
        keep_for_windows(tx, self._desk.root, {root.below(path): was for path, was in self.fresh.items()})
        for path in self.fresh:
            self._put(tx, path)
        if self.unsaved <= self.fresh.keys() and taken_ns is not None:
            tx.put(KEPT_ROOTS, KeptRootRow(self._desk.root.id, taken_ns, self._desk.ledger.now()))

    def put_small(self, tx: Tx) -> None:
        blobs = self._desk.ledger.blobs
        for content in self.small:
            blobs.put(tx, blobs.prepare(content))

    def has_published(self) -> None:
        self.unsaved.difference_update(self.fresh)
        self.fresh = {}
        self.small.clear()

    def save_some(self, taken_ns: int | None) -> None:
        """Of what nobody has published; with the last of it, all is."""
        some = [path for path, _ in zip(self.unsaved, range(_BATCH), strict=False)]
        with self._desk.ledger.store.write() as tx:
            for path in some:
                self._put(tx, path)
            self.unsaved.difference_update(some)
            if not self.unsaved:
                self.publish(tx, taken_ns)
        if not self.unsaved:
            self.has_published()

    def _put(self, tx: Tx, path: bytes) -> None:
        root, key, stamp = self._desk.root.id, path_bytes(self._desk.disk.root.below(path)), self.stamps.get(path)
        if stamp is None:
            tx.delete(KEPT, root, key)
        else:
            tx.put(KEPT, _row_of(root, key, stamp, self.known.get(path)))

    def restore(self) -> int | None:
        """Go on from what another process left: when all of its stamps were taken. None if not all of it is there."""
        with self._desk.ledger.store.read() as tx:
            whole = tx.get(KEPT_ROOTS, self._desk.root.id)
            rows = tx.select(KEPT, {"root": self._desk.root.id}) if whole is not None else []
        for row in rows:
            path = self._desk.disk.root.absolute(path_from_bytes(row.path))
            self.stamps[path], self.known[path] = _kept_in(row)
        return whole.taken_ns if whole is not None and rows else None


def _row_of(root: str, path: bytes, stamp: Stamp, known: Known) -> KeptRow:
    entry, oid = (None, known) if isinstance(known, str) else (known, None)
    digest = raw_digest(entry.digest) if isinstance(entry, FileEntry) else None
    text = None if entry is None else entry_bytes(entry)
    return KeptRow(root, path, _STAMP.pack(*stamp), text, oid, digest)


def _kept_in(row: KeptRow) -> tuple[Stamp, Known]:
    return _STAMP.unpack(row.stamp), row.oid if row.entry is None else entry_from_json(decode(row.entry))


def keep_for_windows(tx: Tx, root: RootRow, befores: Mapping[RepoPath, Entry | None]) -> None:
    """Before rows change: a command in a window of its own has its before in them, and needs it should it die."""
    for window in tx.select(WATCH_WINDOWS, {"root": root.id}) if befores else ():
        for path, before in befores.items():
            if before is not None and not tx.has(TOUCHES, window.call, path_bytes(path)):
                tx.put(TOUCHES, watched_row(CallId(window.call), path_bytes(path), root, before=before))


def forget_kept_for(tx: Tx, call: str) -> None:
    """A window of the call is over: what others kept for it, and it did not come to need."""
    for row in tx.select(TOUCHES, {"call": call, "ordinal": OF_A_WINDOW}):
        tx.delete(TOUCHES, call, row.path)


def watched_row(call: CallId, path: bytes, root: RootRow, *, before: Entry) -> TouchRow:
    """What a path was before a command that is watched by nobody but the kernel."""
    row = touch_row(call, path, root, ordinal=OF_A_WINDOW, before=before)
    return intending(row, before, draft_name(call, path), in_place=True)


def draft_name(call: CallId, path: bytes) -> bytes:
    return DRAFT_PREFIX + f"{call[-12:]}-{sha256(path).hexdigest()[:16]}".encode("ascii")


def forget(tx: Tx, root: str) -> None:
    """Nobody looks at this root any more."""
    tx.delete(KEPT_ROOTS, root)
    for row in tx.select(KEPT, {"root": root}):
        tx.delete(KEPT, root, row.path)


def forget_unused(tx: Tx, before: str) -> list[str]:
    """Forget the roots that nobody has looked at since that time. Which they were."""
    stale = [row.root for row in tx.select(KEPT_ROOTS) if row.looked_at < before]
    for root in stale:
        forget(tx, root)
    return stale
