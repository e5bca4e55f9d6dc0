"""What is there now, for whoever plans. Bytes that a person wrote may be only on disk, so they are kept at hand."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from mulligan.history.desk import Desk
from mulligan.history.plans import Move
from mulligan.store.protocol import Tx
from mulligan.values.content import Content
from mulligan.values.digest import Digest
from mulligan.values.entries import Entry, FileEntry
from mulligan.values.paths import RepoPath
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import is_held_open


@dataclass(slots=True)
class Present:
    desk: Desk
    _contents: dict[Digest, bytes] = field(default_factory=dict)

    def entry(self, path: RepoPath) -> Entry | None:
        """None for what cannot be captured: a device, FIFO or socket."""
        image = self.desk.image(path)
        if isinstance(image.content, bytes) and isinstance(image.entry, FileEntry):
            self._contents[image.entry.digest] = image.content
        return None if image.special else image.entry

    def is_held_open(self, path: RepoPath) -> bool:
        """Whether another process has the file open for writing."""
        with suppress(OSError, Refused), self.desk.disk.resolve_exactly(path) as spot:
            return is_held_open(self.desk.disk, spot, spot.name)
        return False

    def read(self, digest: Digest) -> bytes:
        return self._contents[digest] if digest in self._contents else self.desk.ledger.blobs.read(digest)

    def has(self, tx: Tx, digest: Digest) -> bool:
        return digest in self._contents or self.desk.ledger.blobs.has(tx, digest)


def content_for(desk: Desk, move: Move, image: Image) -> Content | None:
    """The bytes that a move writes where `image` is."""
    if move.content is not None or not isinstance(move.target, FileEntry):
        return move.content
    # Bytes that stay may be somebody's own, which no store has yet.
    stays = isinstance(image.entry, FileEntry) and image.entry.digest == move.target.digest
    return image.content if stays else desk.ledger.blobs.content(move.target.digest, move.target.size)
