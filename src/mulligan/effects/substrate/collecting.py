"""Snapshots that nobody refers to any more, given up.

A snapshot is kept while another one derives from it, and for as long after it was last created as asked for, but never
less than a day: who creates it again within that time finds it whole. Its bodies go in small transactions, each with a
record of what went, so that writers are not held up; its row goes last. Whoever reads it meanwhile is told NOT_FOUND,
by the first byte that is gone or by its row, and is never given anything else than what was captured. If we die in
between, the next time goes on; if somebody creates it again in between, it is whole again and stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from mulligan.history.dropping import drop_body, droppable, holder_of_snapshot
from mulligan.history.ledger import Ledger
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.housekeeping import STORE_JOURNAL
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import FixedClock, timestamp
from mulligan.values.digest import Digest, parse_digest, raw_digest
from mulligan.values.plain import plain
from mulligan.workspace.manifest import Manifest
from mulligan.workspace.snapshots import LINEAGE, SNAPSHOTS, SnapshotRow

KEPT_AT_LEAST = timedelta(days=1)
KEPT_BY_DEFAULT = timedelta(days=30)

_BODIES_PER_RECORD = 500


@plain(slots=True, frozen=True)
class Collected:
    """How many snapshots were given up, and how many stored bytes came back."""

    snapshots: int
    bytes: int


def collect_snapshots(ledger: Ledger, older_than: timedelta = KEPT_BY_DEFAULT) -> Collected:
    """Give up the snapshots, of every root, that were last created before that and that no other derives from."""
    kept_since = timestamp(FixedClock(ledger.clock.now() - max(older_than, KEPT_AT_LEAST)))
    count, size, before = 0, 0, -1
    while count > before:  # what another derived from may go when that one is gone
        before = count
        with ledger.store.read() as tx:
            doomed = [row for row in tx.select(SNAPSHOTS) if _may_go(tx, row, kept_since)]
        for row in doomed:
            gone, given_back = _Giving(ledger, row, kept_since).up()
            count, size = count + gone, size + given_back
    return Collected(count, size)


def _may_go(tx: Tx, row: SnapshotRow, kept_since: str) -> bool:
    if row.created_at >= kept_since:
        return False
    children = tx.select(LINEAGE, {"root": row.root, "parent": row.id})
    return not any(tx.has(SNAPSHOTS, row.root, child.child) for child in children)


@plain(slots=True, frozen=True)
class _Giving:
    ledger: Ledger
    row: SnapshotRow
    kept_since: str

    def up(self) -> tuple[bool, int]:
        """Whether it is gone, and the bytes given back on the way there."""
        size = 0
        for chunk in self._chunks():
            with self.ledger.store.write() as tx:
                if not self._stands(tx):
                    return False, size
                size += self._drop(tx, chunk)
        with self.ledger.store.write() as tx:
            if not self._stands(tx):
                return False, size
            return True, size + self._drop(tx, [parse_digest(self.row.manifest)], is_last=True)

    def _stands(self, tx: Tx) -> bool:
        """Whether it may still go: looked at again in each transaction."""
        row = tx.get(SNAPSHOTS, self.row.root, self.row.id)
        return row is not None and _may_go(tx, row, self.kept_since)

    def _chunks(self) -> Iterator[Sequence[Digest]]:
        """Its bodies; of one whose manifest went already, none are left."""
        manifest = parse_digest(self.row.manifest)
        with self.ledger.store.read() as tx:
            found = tx.get(BLOBS, raw_digest(manifest))
            readable = found is not None and found.place in READABLE
            content = self.ledger.blobs.read_in(tx, manifest) if readable else None
        if content is not None:
            bodies = sorted({entry.blob for entry in Manifest.from_json(decode(content)).entries})
            yield from (bodies[at : at + _BODIES_PER_RECORD] for at in range(0, len(bodies), _BODIES_PER_RECORD))

    def _drop(self, tx: Tx, digests: Sequence[Digest], *, is_last: bool = False) -> int:
        holder = holder_of_snapshot(self.row.root, self.row.id)
        gone = droppable(tx, digests, but_for=holder)
        if not gone and not is_last:
            return 0
        body = {"root": self.row.root, "snapshot": self.row.id, "digests": gone, "is_last": is_last}
        self.ledger.journal.append(tx, STORE_JOURNAL, "snapshot.evicted", body, at=self.ledger.now())
        return sum(drop_body(tx, digest) for digest in gone)
