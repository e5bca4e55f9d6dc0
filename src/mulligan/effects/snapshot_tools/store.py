"""Stores snapshots, deletes old ones, and turns every failure of a snapshot tool into S2's error envelope.

`SnapshotStore` finds and stores the snapshots of one root. `collect_snapshots` deletes the old ones of every root: a
snapshot stays while another one derives from it, and for the requested time after its last creation, but at least for a
day. So a caller that creates it again within that time finds it complete.

Mulligan deletes the bodies of a snapshot in small transactions, each with a record of what it deleted, so that other
writers need not wait; the row goes last. A reader never gets anything else than what was captured: from the first
deleted body on, it gets NOT_FOUND. If the process dies in between, the next collection continues. If a caller creates
the snapshot again in between, all its bodies are stored again, and it stays.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mulligan.files.snapshot.fingerprint import Fingerprint
from mulligan.files.snapshot.lease import StaleLeaseError, UnknownLeaseError
from mulligan.files.snapshot.manifest import (
    LINEAGE,
    SNAPSHOTS,
    CapturedFile,
    Manifest,
    SnapshotRow,
    follow_link,
    snapshot_id,
)
from mulligan.history.ledger import Ledger
from mulligan.history.retention import drop_body, droppable, holder_of_snapshot
from mulligan.session.tables import session_journal
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.journal import STORE_JOURNAL
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import FixedClock, parse_timestamp, timestamp
from mulligan.values.digest import Digest, parse_digest, raw_digest
from mulligan.values.errors import Family, MulliganError, Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, to_wire
from mulligan.values.text import legible

CODES = (
    *("NOT_FOUND", "INVALID_ARGUMENT", "REPO_CHANGED", "PERMISSION_DENIED"),
    *("TOO_LARGE", "INTERNAL", "STALE_LEASE", "CONFLICT"),
)

_BY_CODE = {
    "path_not_found": "NOT_FOUND",
    "unknown_root": "NOT_FOUND",
    "parent_not_found": "NOT_FOUND",
    "path_claimed": "CONFLICT",
    "path_busy": "CONFLICT",
    "conflict": "CONFLICT",
    "file_exists": "CONFLICT",
    "repo_changed": "REPO_CHANGED",
    "unknown_blob": "NOT_FOUND",
    "evicted": "NOT_FOUND",
    "io_error": "INTERNAL",
    "no_space": "INTERNAL",
    "output_store_failed": "INTERNAL",
}
_BY_STATUS = {"forbidden": "PERMISSION_DENIED", "not_found": "NOT_FOUND", "conflict": "CONFLICT"}
_BY_FAMILY = {
    Family.REQUEST: "INVALID_ARGUMENT",
    Family.FORBIDDEN: "PERMISSION_DENIED",
    Family.CONFLICT: "CONFLICT",
    Family.INTERNAL: "INTERNAL",
}
_BY_ERRNO = {
    errno.ENOENT: "NOT_FOUND",
    errno.ENOTDIR: "NOT_FOUND",
    errno.EACCES: "PERMISSION_DENIED",
    errno.EPERM: "PERMISSION_DENIED",
    errno.ELOOP: "PERMISSION_DENIED",
    errno.ENAMETOOLONG: "INVALID_ARGUMENT",
}


class SnapshotToolError(Exception):
    """The failure of a snapshot tool. `details` is JSON."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def envelope(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": legible(self.message), "details": self.details}}


def failure_of(error: Exception) -> SnapshotToolError:
    """Any exception as a failure with one of S2's codes."""
    if isinstance(error, SnapshotToolError):
        return error
    if isinstance(error, StaleLeaseError):
        return _stale(error)
    if isinstance(error, UnknownLeaseError):
        return SnapshotToolError("NOT_FOUND", "There is no such lease for this root.", lease_id=legible(str(error)))
    if isinstance(error, Refused):
        code = _BY_CODE.get(error.code) or _BY_STATUS.get(error.status, "INVALID_ARGUMENT")
        return SnapshotToolError(code, error.message, reason=error.code)
    if isinstance(error, MulliganError):
        code = _BY_CODE.get(error.code) or _BY_FAMILY[error.family]
        return SnapshotToolError(code, error.message, reason=error.code)
    if isinstance(error, OSError):
        return SnapshotToolError(_BY_ERRNO.get(error.errno or 0, "INTERNAL"), error.strerror or "The disk refused.")
    return SnapshotToolError("INTERNAL", "Mulligan failed; nothing was changed.")


def _stale(error: StaleLeaseError) -> SnapshotToolError:
    words = "The lease expired." if error.expired else "What you read under this lease has changed since."
    return SnapshotToolError(
        "STALE_LEASE",
        f"{words} Read again without a lease_id to get a new one.",
        fingerprint=error.fingerprint.to_json(),
        lease_id=error.lease,
        changed_paths=[to_wire(path) for path in error.changed],
    )


RECENT = timedelta(hours=12)
"""A snapshot that is older is created again when a caller asks for it. It is half of `KEPT_AT_LEAST`."""

_BODIES_PER_RECORD = 1_000


@dataclass(slots=True, frozen=True)
class StoredSnapshot:
    id: str
    fingerprint: Fingerprint
    manifest: Manifest


class SnapshotStore:
    """The snapshots of one root."""

    def __init__(self, ledger: Ledger, root: str) -> None:
        self._ledger = ledger
        self._root = root

    def get(self, identifier: str) -> StoredSnapshot:
        with self._ledger.store.read() as tx:
            row = tx.get(SNAPSHOTS, self._root, identifier)
            if row is None:
                raise SnapshotToolError(
                    "NOT_FOUND", f"There is no snapshot {identifier} of this root.", snapshot_id=identifier
                )
            manifest = self._ledger.blobs.read_in(tx, parse_digest(row.manifest))
        return StoredSnapshot(identifier, Fingerprint(**decode(row.fingerprint)), Manifest.from_json(decode(manifest)))

    def _is_recent(self, identifier: str) -> bool:
        """Whether it was created so recently that no collection deletes it."""
        with self._ledger.store.read() as tx:
            row = tx.get(SNAPSHOTS, self._root, identifier)
        clock = self._ledger.clock
        return row is not None and clock.now() - parse_timestamp(row.created_at) < RECENT

    def parent_of(self, identifier: str) -> str | None:
        with self._ledger.store.read() as tx:
            row = tx.get(LINEAGE, self._root, identifier)
        return None if row is None else row.parent

    def read(self, digest: Digest) -> bytes:
        """The bytes of a captured file or link."""
        return self._ledger.blobs.read(digest)

    def target_of(self, snapshot: StoredSnapshot, path: RepoPath) -> CapturedFile | None:
        """The captured file at a path; it follows captured links."""
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
        bytes_of: Callable[[CapturedFile], bytes],
        derived_from: str | None = None,
    ) -> str:
        """Store a snapshot, and those of its bytes that are not stored yet. Returns its id."""
        identifier = snapshot_id(fingerprint, manifest)
        while not self._is_recent(identifier):
            # In small transactions: so no more than a few megabytes are in memory at once.
            self._ledger.blobs.store_all(bytes_of(entry) for entry in self._missing(manifest.entries))
            if self._record(session, identifier, fingerprint, manifest):
                break
        if derived_from is not None and derived_from != identifier and self.parent_of(identifier) is None:
            self._name(session, "snapshot.derived", {"snapshot": identifier, "from": derived_from})
        return identifier

    def _missing(self, entries: Sequence[CapturedFile]) -> list[CapturedFile]:
        wanted = {entry.blob: entry for entry in entries}
        with self._ledger.store.read() as tx:
            rows = {blob: tx.get(BLOBS, raw_digest(blob)) for blob in wanted}
        return [wanted[blob] for blob, row in rows.items() if row is None or row.place not in READABLE]

    def _record(self, session: SessionId, identifier: str, fingerprint: Fingerprint, manifest: Manifest) -> bool:
        """Write the records that make a snapshot of stored bytes. From then on no collection deletes these bytes.

        False if some of the bytes were deleted before that: then there is no snapshot.
        """
        body = self._ledger.blobs.store(encode(manifest.to_json()))
        blobs = sorted({entry.blob for entry in manifest.entries})
        *early, last = [blobs[at : at + _BODIES_PER_RECORD] for at in range(0, len(blobs), _BODIES_PER_RECORD)] or [[]]
        created = {"snapshot": identifier, "fingerprint": fingerprint.to_json(), "manifest": body}
        named = all(self._name(session, "snapshot.bodies", {"snapshot": identifier}, refs=chunk) for chunk in early)
        return named and self._name(session, "snapshot.created", created, refs=[*last, body])

    def _name(self, session: SessionId, kind: str, body: Mapping[str, object], refs: Sequence[Digest] = ()) -> bool:
        """Write a record, if in the same transaction every blob is there that the record names."""
        with self._ledger.store.write() as tx:
            rows = [tx.get(BLOBS, raw_digest(digest)) for digest in refs]
            if not all(row is not None and row.place in READABLE for row in rows):
                return False
            body = {**body, "root": self._root}
            self._ledger.journal.append(tx, session_journal(session), kind, body, at=self._ledger.now(), refs=refs)
            return True


KEPT_AT_LEAST = timedelta(days=1)
KEPT_BY_DEFAULT = timedelta(days=30)

_BODIES_PER_REMOVAL = 500


@fast_dataclass(slots=True, frozen=True)
class Collected:
    """How many snapshots were deleted, and how many stored bytes that freed."""

    snapshots: int
    bytes: int


def collect_snapshots(ledger: Ledger, older_than: timedelta = KEPT_BY_DEFAULT) -> Collected:
    """Delete the snapshots of every root that were last created before that and from which no other derives."""
    kept_since = timestamp(FixedClock(ledger.clock.now() - max(older_than, KEPT_AT_LEAST)))
    count, size, before = 0, 0, -1
    while count > before:  # A snapshot can be deleted once those that derive from it are deleted.
        before = count
        with ledger.store.read() as tx:
            doomed = [row for row in tx.select(SNAPSHOTS) if _is_deletable(tx, row, kept_since)]
        for row in doomed:
            gone, freed = _SnapshotDeletion(ledger, row, kept_since).run()
            count, size = count + gone, size + freed
    return Collected(count, size)


def _is_deletable(tx: Tx, row: SnapshotRow, kept_since: str) -> bool:
    if row.created_at >= kept_since:
        return False
    children = tx.select(LINEAGE, {"root": row.root, "parent": row.id})
    return not any(tx.has(SNAPSHOTS, row.root, child.child) for child in children)


@fast_dataclass(slots=True, frozen=True)
class _SnapshotDeletion:
    ledger: Ledger
    row: SnapshotRow
    kept_since: str

    def run(self) -> tuple[bool, int]:
        """Whether the snapshot is deleted, and how many bytes were freed."""
        size = 0
        for chunk in self._chunks():
            with self.ledger.store.write() as tx:
                if not self._may_go_on(tx):
                    return False, size
                size += self._drop(tx, chunk)
        with self.ledger.store.write() as tx:
            if not self._may_go_on(tx):
                return False, size
            return True, size + self._drop(tx, [parse_digest(self.row.manifest)], is_last=True)

    def _may_go_on(self, tx: Tx) -> bool:
        """Whether it may still be deleted. Each transaction checks that again."""
        row = tx.get(SNAPSHOTS, self.row.root, self.row.id)
        return row is not None and _is_deletable(tx, row, self.kept_since)

    def _chunks(self) -> Iterator[Sequence[Digest]]:
        """Its bodies; none if its manifest was deleted already, because that goes last."""
        manifest = parse_digest(self.row.manifest)
        with self.ledger.store.read() as tx:
            found = tx.get(BLOBS, raw_digest(manifest))
            readable = found is not None and found.place in READABLE
            content = self.ledger.blobs.read_in(tx, manifest) if readable else None
        if content is not None:
            bodies = sorted({entry.blob for entry in Manifest.from_json(decode(content)).entries})
            yield from (bodies[at : at + _BODIES_PER_REMOVAL] for at in range(0, len(bodies), _BODIES_PER_REMOVAL))

    def _drop(self, tx: Tx, digests: Sequence[Digest], *, is_last: bool = False) -> int:
        holder = holder_of_snapshot(self.row.root, self.row.id)
        gone = droppable(tx, digests, holder=holder)
        if not gone and not is_last:
            return 0
        body = {"root": self.row.root, "snapshot": self.row.id, "digests": gone, "is_last": is_last}
        self.ledger.journal.append(tx, STORE_JOURNAL, "snapshot.evicted", body, at=self.ledger.now())
        return sum(drop_body(tx, digest) for digest in gone)
