"""The background sync of a store, the check after a power cut, and the report of what uses its space.

In `process` mode no call waits for the disk. Instead a thread syncs every few seconds, removes the synced bodies from
the list UNSYNCED, and writes the time (the sync mark) into META. Any process syncs for all, so a body is synced even if
its writer was killed. When a process opens the store under another boot than its last one, a power cut may have
destroyed the bodies that are still on the list: the process checks them once and writes the missing ones into a
`store.lost` record. SQLite itself never keeps half a transaction, so rows need no such check.

A sync that fails harms no call: each survives the death of its process, as promised. But from then on a power cut may
destroy more than a few seconds of work, so Mulligan logs the failure once and keeps it in META until a sync works.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from typing import Protocol

from mulligan.store.blobs import BESIDE, BLOBS, BODIES, IN_PARTS, LOST, PARTS, READABLE, UNSYNCED, BlobRow, Blobs
from mulligan.store.host import boot_id
from mulligan.store.journal import HEADS, REFS, STORE_JOURNAL, Journal, rows_by, rows_of_journal, seal
from mulligan.store.protocol import META, MetaRow, Store, Tx
from mulligan.values.clock import Clock, parse_timestamp, timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MIB_BYTES, SYNC_MARK_INTERVAL_S

LOST_KIND = "store.lost"
BOOT, MARK, _FAILED = "boot", "mark", "sync_failed"

_FREE_KEPT_BYTES = 64 * MIB_BYTES
_VACUUM_PAGES = 2_048
_DIGESTS_A_RECORD = 500
_DAMAGE_CODES = frozenset({"missing_cas_dependency", "blob_corrupt", "evicted"})
_FINAL = frozenset({"sync_failed", "io_error"})
"""After these errors the kernel may report success for a sync of the same bytes that never happened, so Mulligan trusts
none.
"""


class SyncedStore(Store, Protocol):
    """A store whose originals, and bodies if they are files, are synced later."""

    after_write: Callable[[], None]
    write_noticed_in: int

    def free_bytes(self) -> int: ...

    def reclaim_space(self, max_pages: int | None = None) -> None: ...


class BackgroundSync:
    """The thread that syncs one store. It starts with the process's first write; a forked child starts its own.

    `hand_over` leaves the sync at the end of this process to a background process, if there is one; it answers whether
    there is.
    """

    def __init__(
        self,
        store: SyncedStore,
        clock: Clock,
        *,
        interval_s: float = SYNC_MARK_INTERVAL_S,
        hand_over: Callable[[], bool] = bool,
    ) -> None:
        self.failure: MulliganError | None = None
        self._store = store
        self._clock = clock
        self._interval_s = interval_s
        self._hand_over = hand_over
        self._written = False
        self._marking = 0
        self._threads: dict[int, tuple[threading.Thread, threading.Event]] = {}
        store.after_write = self.notice
        store.on_close(self.close)

    def notice(self) -> None:
        """Note a write. The store calls this for the first write after each sync."""
        if threading.get_ident() != self._marking:
            self._written, self._store.write_noticed_in = True, os.getpid()
            if os.getpid() not in self._threads:
                self._start()

    def _start(self) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="mulligan-sync-mark", daemon=True)
        if self._threads.setdefault(os.getpid(), (thread, stop))[0] is thread:
            thread.start()
            # A program may end without closing the store; then this syncs.
            atexit.register(self.close)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s) and self._try():
            pass

    def _try(self) -> bool:
        """Sync if something was written. False: a sync failed in a way that makes later ones worthless."""
        if self._written and not self._has_failed_for_good():
            # In this order: a commit between the two lines does not call `notice`, but the sync below covers it.
            self._written = False
            self._store.write_noticed_in = 0
            try:
                self.move()
                self.failure = None
            except MulliganError as error:
                self.failure, self._written = error, True
                if self._has_failed_for_good():
                    self._report_failure(error)
        return not self._has_failed_for_good()

    def _has_failed_for_good(self) -> bool:
        return self.failure is not None and self.failure.code in _FINAL

    def _report_failure(self, error: MulliganError) -> None:
        import logging  # Imported here, because it is hardly ever needed and takes time at every start.

        words = "Changes to the store in %s may not survive a power cut from now on. %s"
        logging.getLogger("mulligan.store").warning(words, self._store.directory, error.message)
        self._marking = threading.get_ident()
        with suppress(MulliganError), self._store.write() as tx:
            tx.put(META, MetaRow(_FAILED, f"{timestamp(self._clock)} {error.message}"))
        self._marking = 0

    def move(self) -> None:
        """Sync everything that any process has committed so far, write the mark, and return some free space."""
        self._marking = threading.get_ident()
        try:
            at = timestamp(self._clock)
            originals = self._store.originals
            taken = [] if originals is None else originals.pending()
            with self._store.read() as tx:
                waiting = tx.select(UNSYNCED)
            self._store.bodies.sync([digest_from_raw(row.digest) for row in waiting])
            if originals is not None and taken:
                originals.sync(taken)
            self._store.sync()
            if originals is not None and taken:
                originals.drop(taken)
            with self._store.write() as tx:
                for row in waiting:
                    tx.delete(UNSYNCED, row.digest)
                tx.put(META, MetaRow(MARK, at))
                tx.delete(META, _FAILED)
                # So the last records of a process do not wait for the next writer to be sealed.
                seal(tx, at=at)
            if self._store.free_bytes() > _FREE_KEPT_BYTES:
                self._store.reclaim_space(_VACUUM_PAGES)
        finally:
            self._marking = 0

    def close(self) -> None:
        """Stop the thread. If something is not synced, hand it over or sync it; else sync only if the mark is old."""
        thread, stop = self._threads.pop(os.getpid(), (None, None))
        if thread is None or stop is None:
            return
        stop.set()
        thread.join()
        atexit.unregister(self.close)
        with self._store.read() as tx:
            is_unsynced = bool(self._store.originals and self._store.originals.pending()) or tx.count(UNSYNCED) > 0
        if self._written and (not self._hand_over() if is_unsynced else self._is_due()):
            self._try()
        if self._store.originals is not None:
            self._store.originals.close()

    def _is_due(self) -> bool:
        with self._store.read() as tx:
            mark = tx.get(META, MARK)
        if mark is None:
            return True
        age = self._clock.now() - parse_timestamp(mark.value)
        return abs(age.total_seconds()) >= self._interval_s


def sync_failure(tx: Tx) -> str | None:
    """The time and reason of the last failed sync, if none has worked since."""
    row = tx.get(META, _FAILED)
    return None if row is None else row.value


def check_after_reboot(store: Store, journal: Journal, clock: Clock, *, boot: str) -> tuple[Digest, ...]:
    """After a reboot, check once which unsynced bodies a power cut destroyed.

    Records them and answers their digests.
    """
    with store.read() as tx:
        known = tx.get(META, BOOT)
        waiting = [digest_from_raw(row.digest) for row in tx.select(UNSYNCED)]
    if known is not None and known.value == boot and boot:
        return ()
    if not boot and known is not None and not waiting:
        return ()
    taken = _damaged(store, clock, waiting)
    store.sync()
    # This empties SQLite's log too. The cut may have left unreadable commits at its end; they are no damage, but
    # `verify` would report them, and a log of which nothing can be read would continue under the same serial number.
    store.reclaim_space()
    store.bodies.sync(digest for digest in waiting if digest not in taken)
    with store.write() as tx:
        if tx.get(META, BOOT) != known:
            return ()
        lost = sorted(_mark_lost(tx, taken))
        mark = tx.get(META, MARK)
        for start in range(0, len(lost), _DIGESTS_A_RECORD):
            payload = {"digests": lost[start : start + _DIGESTS_A_RECORD], "mark": mark.value if mark else None}
            journal.append(tx, STORE_JOURNAL, LOST_KIND, payload, at=timestamp(clock))
        for digest in taken.union(lost):
            # Otherwise `put` of the same bytes would mistake the damaged file for the body.
            store.bodies.delete(digest)
        _delete_unnamed_bodies(tx, store)
        for digest in waiting:
            tx.delete(UNSYNCED, raw_digest(digest))
        tx.put(META, MetaRow(BOOT, boot))
    return tuple(lost)


def _delete_unnamed_bodies(tx: Tx, store: Store) -> None:
    """Delete bodies whose rows the cut destroyed: it may have damaged the bodies too, and no list names them."""
    for digest in list(store.bodies.digests()):
        row = tx.get(BLOBS, raw_digest(digest))
        if row is None or row.place != BESIDE:
            store.bodies.delete(digest)


def _damaged(store: Store, clock: Clock, waiting: Iterable[Digest]) -> set[Digest]:
    blobs = Blobs(store, clock)
    found = set()
    for digest in waiting:
        try:
            blobs.read(digest)
        except MulliganError as error:
            if error.code in _DAMAGE_CODES:
                found.add(digest)
            elif error.code != "unknown_blob":
                raise
    return found


def _mark_lost(tx: Tx, taken: Iterable[Digest]) -> set[Digest]:
    """Mark blobs lost, and with them each later version that is packed as a change of one, and each blob that has one
    as a part."""
    lost: set[Digest] = set()
    rows = [row for digest in taken if (row := tx.get(BLOBS, raw_digest(digest))) is not None]
    while rows:
        row = rows.pop()
        if row.place in READABLE:
            tx.put(BLOBS, BlobRow(row.digest, row.size, row.stored, LOST, row.base, row.depth, row.touched_ms))
            tx.delete(BODIES, row.digest)
            lost.add(digest_from_raw(row.digest))
        wholes = [tx.get(BLOBS, edge.digest) for edge in tx.select(PARTS, {"part": row.digest})]
        built = [*tx.select(BLOBS, {"base": row.digest}), *(whole for whole in wholes if whole is not None)]
        rows += [one for one in built if one.place in READABLE]
    return lost


__all__ = ["LOST_KIND", "STORE_JOURNAL", "BackgroundSync", "boot_id", "check_after_reboot", "sync_failure"]


@fast_dataclass(slots=True, frozen=True)
class JournalUsage:
    """The space of one journal. `blob_bytes` are packed; a blob that several journals need counts in each."""

    journal: str
    records: int
    record_bytes: int
    blobs: int
    blob_bytes: int


@fast_dataclass(slots=True, frozen=True)
class BlobUsage:
    """Blobs in one place: `db`, `out`, `parts` (which are blobs themselves), `evicted` or `lost`."""

    place: str
    blobs: int
    plain_bytes: int
    stored_bytes: int


@fast_dataclass(slots=True, frozen=True)
class StoreUsage:
    total_bytes: int
    journals: tuple[JournalUsage, ...]
    blobs: tuple[BlobUsage, ...]


def store_usage(store: Store) -> StoreUsage:
    with store.read() as tx:
        return StoreUsage(store.size_bytes(), _journals(tx), _blobs(tx))


def _journals(tx: Tx) -> tuple[JournalUsage, ...]:
    blobs: Counter[str] = Counter()
    blob_bytes: Counter[str] = Counter()
    for digest, edges in groupby(rows_by(tx, REFS, "digest"), key=lambda row: row.digest):
        row = tx.get(BLOBS, digest)
        stored = 0 if row is None else _stored(tx, row)
        for journal in {edge.journal for edge in edges}:
            blobs[journal] += 1
            blob_bytes[journal] += stored
    heads = tx.select(HEADS)
    return tuple(
        JournalUsage(
            journal=head.journal,
            records=head.seq,
            record_bytes=sum(len(row.body) for row in rows_of_journal(tx, head.journal)),
            blobs=blobs[head.journal],
            blob_bytes=blob_bytes[head.journal],
        )
        for head in heads
    )


def _stored(tx: Tx, row: BlobRow) -> int:
    """The packed size of a blob; for a blob in parts, the sum of its parts."""
    if row.place != IN_PARTS:
        return row.stored if row.place in READABLE else 0
    parts = (tx.get(BLOBS, edge.part) for edge in tx.select(PARTS, {"digest": row.digest}))
    return sum(part.stored for part in parts if part is not None)


def _blobs(tx: Tx) -> tuple[BlobUsage, ...]:
    count: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for row in rows_by(tx, BLOBS, "digest"):
        count[row.place] += 1
        plain[row.place] += row.size
        stored[row.place] += row.stored if row.place in READABLE else 0
    return tuple(BlobUsage(place, count[place], plain[place], stored[place]) for place in sorted(count))
