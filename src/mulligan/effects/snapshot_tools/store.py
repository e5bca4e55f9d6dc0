"""Snapshots kept: found by id, put once, read as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from mulligan.effects.substrate.failure import Failure
from mulligan.history.ledger import Ledger
from mulligan.session.tables import session_journal
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest, parse_digest, raw_digest
from mulligan.values.ids import SessionId
from mulligan.values.limits import BLOB_BATCH_BYTES
from mulligan.values.paths import RepoPath
from mulligan.workspace.fingerprint import Fingerprint
from mulligan.workspace.manifest import Captured, Manifest, follow_link, snapshot_id
from mulligan.workspace.snapshots import LINEAGE, SNAPSHOTS

RECENT = timedelta(hours=12)
"""Half of what a snapshot is kept at least. Older than this, it is created anew when somebody asks for it again."""

_BODIES_PER_RECORD = 1_000


@dataclass(slots=True, frozen=True)
class Snapshot:
    id: str
    fingerprint: Fingerprint
    manifest: Manifest


class Shelf:
    """The snapshots of one root. Those of another do not exist here."""

    def __init__(self, ledger: Ledger, root: str) -> None:
        self._ledger = ledger
        self._root = root

    def get(self, identifier: str) -> Snapshot:
        with self._ledger.store.read() as tx:
            row = tx.get(SNAPSHOTS, self._root, identifier)
            if row is None:
                raise Failure("NOT_FOUND", f"There is no snapshot {identifier} of this root.", snapshot_id=identifier)
            manifest = self._ledger.blobs.read_in(tx, parse_digest(row.manifest))
        return Snapshot(identifier, Fingerprint(**decode(row.fingerprint)), Manifest.from_json(decode(manifest)))

    def _is_recent(self, identifier: str) -> bool:
        """Whether it was created so lately that nobody gives it up."""
        with self._ledger.store.read() as tx:
            row = tx.get(SNAPSHOTS, self._root, identifier)
        clock = self._ledger.clock
        return row is not None and clock.now() - parse_timestamp(row.created_at) < RECENT

    def parent_of(self, identifier: str) -> str | None:
        with self._ledger.store.read() as tx:
            row = tx.get(LINEAGE, self._root, identifier)
        return None if row is None else row.parent

    def read(self, digest: Digest) -> bytes:
        return self._ledger.blobs.read(digest)

    def target_of(self, snapshot: Snapshot, path: RepoPath) -> Captured | None:
        """The file that a captured path leads to, through captured links."""
        links = {
            one.path: self.read(one.blob).decode("utf-8", "surrogateescape")
            for one in snapshot.manifest.entries
            if one.kind == "symlink"
        }
        found = follow_link(snapshot.manifest, path, links)
        return None if found is None else snapshot.manifest.by_path[found]

    def put(
        self,
        session: SessionId,
        fingerprint: Fingerprint,
        manifest: Manifest,
        *,
        bytes_of: Callable[[Captured], bytes],
        derived_from: str | None = None,
    ) -> str:
        """Keep a snapshot, and the bytes of it that are not kept yet. Its id."""
        identifier = snapshot_id(fingerprint, manifest)
        while not self._is_recent(identifier):
            self._keep_bodies(manifest, bytes_of)
            if self._record(session, identifier, fingerprint, manifest):
                break
        if derived_from is not None and derived_from != identifier and self.parent_of(identifier) is None:
            self._append(session, "snapshot.derived", {"snapshot": identifier, "from": derived_from})
        return identifier

    def _keep_bodies(self, manifest: Manifest, bytes_of: Callable[[Captured], bytes]) -> None:
        for batch in _batches(self._missing(manifest.entries)):
            self._ledger.blobs.store_all(bytes_of(entry) for entry in batch)

    def _missing(self, entries: Sequence[Captured]) -> list[Captured]:
        wanted = {entry.blob: entry for entry in entries}
        with self._ledger.store.read() as tx:
            rows = {blob: tx.get(BLOBS, raw_digest(blob)) for blob in wanted}
        return [wanted[blob] for blob, row in rows.items() if row is None or row.place not in READABLE]

    def _record(self, session: SessionId, identifier: str, fingerprint: Fingerprint, manifest: Manifest) -> bool:
        """The bytes are there; the record that names them makes it a snapshot, and keeps them from being collected.

        False if some of the bytes were given up before that: then nothing was made.
        """
        body = self._ledger.blobs.store(encode(manifest.to_json()))
        blobs = sorted({entry.blob for entry in manifest.entries})
        *early, last = [blobs[at : at + _BODIES_PER_RECORD] for at in range(0, len(blobs), _BODIES_PER_RECORD)] or [[]]
        told = {"snapshot": identifier, "fingerprint": fingerprint.to_json(), "manifest": body}
        named = all(self._name(session, "snapshot.bodies", {"snapshot": identifier}, refs=chunk) for chunk in early)
        return named and self._name(session, "snapshot.created", told, refs=[*last, body])

    def _name(self, session: SessionId, kind: str, body: Mapping[str, object], *, refs: Sequence[Digest]) -> bool:
        """Record it, if everything it names is there in the very transaction that names it."""
        with self._ledger.store.write() as tx:
            rows = [tx.get(BLOBS, raw_digest(digest)) for digest in refs]
            if not all(row is not None and row.place in READABLE for row in rows):
                return False
            self._append_in(tx, session, kind, body, refs=refs)
            return True

    def _append(self, session: SessionId, kind: str, body: Mapping[str, object], refs: Iterable[Digest] = ()) -> None:
        with self._ledger.store.write() as tx:
            self._append_in(tx, session, kind, body, refs=refs)

    def _append_in(
        self, tx: Tx, session: SessionId, kind: str, body: Mapping[str, object], *, refs: Iterable[Digest]
    ) -> None:
        told = {**body, "root": self._root}
        self._ledger.journal.append(tx, session_journal(session), kind, told, at=self._ledger.now(), refs=refs)


def _batches(entries: Sequence[Captured]) -> Iterable[list[Captured]]:
    """By size, so that no more than a few megabytes of them are in memory at once."""
    batch: list[Captured] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += entry.size
        if size >= BLOB_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
