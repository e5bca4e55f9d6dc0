"""What every file was before a command, for the ways of running that see a change only afterwards.

Kept small: files over 2 MiB and what exceeds 512 MiB in all are not captured, and the call says so.
"""

from __future__ import annotations

import os
import stat

from mulligan.history.desk import Desk
from mulligan.values.entries import ABSENT, Entry
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import path_from_bytes
from mulligan.workspace.exec.scan import StatIndex

FILE_MAX_BYTES = 2 * MIB_BYTES
WORKSPACE_MAX_BYTES = 512 * MIB_BYTES
_BATCH = 200


class WorkspaceBaseline:
    """Every entry below a root at one moment, contents in the store."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._root = desk.disk.root.path
        self._entries: dict[bytes, Entry] = {}
        self._known: set[bytes] = set()

    def take(self) -> StatIndex:
        """Look at everything and keep what fits."""
        index = StatIndex.take(self._root, frozenset(_git_object_folders(self._root)))
        kept_bytes, pending = 0, []
        for path in index.paths():
            self._known.add(path)
            size = _size(path)
            if size > FILE_MAX_BYTES or kept_bytes + size > WORKSPACE_MAX_BYTES:
                continue
            kept_bytes += size
            pending.append(path)
            if len(pending) >= _BATCH:
                self._keep(pending)
                pending = []
        self._keep(pending)
        return index

    def _keep(self, paths: list[bytes]) -> None:
        images = {path: self._desk.image(path_from_bytes(path[len(self._root) + 1 :])) for path in paths}
        self._desk.ledger.blobs.store_all(one.content for one in images.values() if one.content is not None)
        self._entries.update({path: one.entry for path, one in images.items() if not one.special})

    def before_of(self, path: bytes) -> Entry | None:
        """None: it was there and could not be kept."""
        return self._entries.get(path, None if path in self._known else ABSENT)


def _size(path: bytes) -> int:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _git_object_folders(root: bytes) -> list[bytes]:
    return [os.path.join(folder, b"objects") for folder in [os.path.join(root, b".git")] if os.path.isdir(folder)]
