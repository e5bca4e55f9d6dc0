"""What the record of a call says besides files: its effects with their receipts, and the blobs it answered with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.store.blobs import SMALL_BYTES, Blobs, Prepared
from mulligan.store.protocol import Tx
from mulligan.values.digest import Digest, digest_of
from mulligan.values.paths import RepoPath


class Account:
    def __init__(self, blobs: Blobs) -> None:
        self.effects: list[dict[str, Any]] = []
        self.handed_out: set[Digest] = set()
        self.rescued: dict[tuple[RepoPath, Digest], None] = {}
        """what is about to go from the disk and may be anybody's, in order"""
        self._blobs = blobs
        self._to_store: list[Prepared] = []

    def note_effect(self, name: str, params: Mapping[str, Any], receipt: Mapping[str, Any]) -> None:
        """For replay and for people."""
        self.effects.append({"effect": name, "params": params, "receipt": receipt})

    def hand_out(self, digest: Digest) -> None:
        """A blob this call answers with: the session may read it from now on, and its record keeps it reachable."""
        self.handed_out.add(digest)

    def rescue(self, path: RepoPath, digest: Digest) -> None:
        """What is at a path is in the store by now, and about to go from the disk: the record names it."""
        self.rescued[path, digest] = None
        self.hand_out(digest)

    def keep(self, data: bytes) -> Digest:
        """Bytes that the record names by their digest. Small ones are stored with it, in the same transaction."""
        if len(data) > SMALL_BYTES:
            digest = self._blobs.store(data)
        else:
            digest = digest_of(data)
            self._to_store.append(self._blobs.prepare_seen(data, digest))
        self.hand_out(digest)
        return digest

    def store_kept(self, tx: Tx) -> None:
        for prepared in self._to_store:
            self._blobs.put(tx, prepared)
