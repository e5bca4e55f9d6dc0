"""What the store has of a kept tree, a row for each path, and what it has for commands in windows over that tree."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import TypeAlias

from mulligan.history.ledger import entry_bytes, intending, touch_row
from mulligan.history.tables import KEPT, KEPT_ROOTS, TOUCHES, WINDOWS, KeptRow, RootRow, TouchRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.digest import raw_digest
from mulligan.values.entries import Entry, FileEntry, entry_from_json
from mulligan.values.ids import CallId
from mulligan.values.paths import RepoPath, path_bytes
from mulligan.workspace.disk import DRAFT_PREFIX
from mulligan.workspace.exec.scan import Stamp

Known: TypeAlias = Entry | str | None
"""An entry whose bytes are in the store, git's name for a clean file, or None for what nobody knows."""

OF_A_WINDOW = -1
"""The ordinal of what was kept for a command that sees its changes only afterwards."""

_STAMP = struct.Struct("<5q")


def row_of(root: str, path: bytes, stamp: Stamp, known: Known) -> KeptRow:
    entry, oid = (None, known) if isinstance(known, str) else (known, None)
    digest = raw_digest(entry.digest) if isinstance(entry, FileEntry) else None
    text = None if entry is None else entry_bytes(entry)
    return KeptRow(root, path, _STAMP.pack(*stamp), text, oid, digest)


def kept_in(row: KeptRow) -> tuple[Stamp, Known]:
    return _STAMP.unpack(row.stamp), row.oid if row.entry is None else entry_from_json(decode(row.entry))


def keep_for_windows(tx: Tx, root: RootRow, befores: Mapping[RepoPath, Entry | None]) -> None:
    """Before rows change: a command in a window of its own has its before in them, and needs it should it die."""
    for window in tx.select(WINDOWS, {"root": root.id}) if befores else ():
        for path, before in befores.items():
            if before is not None and not tx.has(TOUCHES, window.call, path_bytes(path)):
                tx.put(TOUCHES, watched_row(CallId(window.call), path_bytes(path), root, before=before))


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
