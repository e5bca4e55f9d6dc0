"""What keeps a store in order without being asked: the sync mark, and the look back after a power cut.

In `process` mode nothing waits for the disk. Instead a thread syncs every few seconds what was written, and then says
so: the bodies that were waiting (UNSYNCED) are taken off the list and the mark moves on. Any process may sync for all,
so a body whose writer was killed is not forgotten. When a store is opened under another boot than its last one, the
bodies still on the list are what a power cut may have taken: they are checked once, and the missing ones become one
`store.lost` record. SQLite itself never keeps half a transaction, so rows need no such check.

A sync that fails harms no call: each survives the death of its process, as promised. But it is told, once on the log
and in META until a sync works again, for from then on a power cut may take more than a few seconds of work.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from mulligan.store.blobs import BESIDE, BLOBS, BODIES, LOST, PARTS, READABLE, UNSYNCED, BlobRow, Blobs
from mulligan.store.journal import Journal
from mulligan.store.machine import boot_id
from mulligan.store.protocol import META, MetaRow, Store, Tx
from mulligan.store.sqlite import SqliteStore
from mulligan.values.clock import Clock, parse_timestamp, timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.faults import MulliganError
from mulligan.values.limits import MIB_BYTES, SYNC_MARK_INTERVAL_S

STORE_JOURNAL = "store"
LOST_KIND = "store.lost"
BOOT, MARK, _FAILED = "boot", "mark", "sync_failed"

_FREE_KEPT_BYTES = 64 * MIB_BYTES
_VACUUM_PAGES = 2_048
_DIGESTS_A_RECORD = 500
_TAKEN = frozenset({"missing_cas_dependency", "blob_corrupt", "evicted"})
_FINAL = frozenset({"sync_failed", "io_error"})
"""After these the disk cannot be trusted to tell the truth about the same bytes again, so the mark stays for good."""


class SyncMark:
    """The background thread of one store. It starts with the first write, in a forked child with that child's first.

    `hand_over` has a background process sync in our stead when we end; whether there is one.
    """

    def __init__(
        self,
        store: SqliteStore,
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
        """Something was written. On the way of every commit, so it does next to nothing."""
        if threading.get_ident() != self._marking:
            self._written = True
            if os.getpid() not in self._threads:
                self._start()

    def _start(self) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="mulligan-sync-mark", daemon=True)
        if self._threads.setdefault(os.getpid(), (thread, stop))[0] is thread:
            thread.start()
            # A process that never closes the store syncs when it ends.
            atexit.register(self.close)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s) and self._try():
            pass

    def _try(self) -> bool:
        """Move the mark if something was written; False once that cannot work any more."""
        if self._written and not self._given_up():
            self._written = False
            try:
                self.move()
                self.failure = None
            except MulliganError as error:
                self.failure, self._written = error, True
                if self._given_up():
                    self._tell(error)
        return not self._given_up()

    def _given_up(self) -> bool:
        return self.failure is not None and self.failure.code in _FINAL

    def _tell(self, error: MulliganError) -> None:
        import logging  # Hardly ever needed, and every process that opens a store would wait for it.

        words = "What is written to the store in %s from now on may not survive a power cut. %s"
        logging.getLogger("mulligan.store").warning(words, self._store.directory, error.message)
        self._marking = threading.get_ident()
        with suppress(MulliganError), self._store.write() as tx:
            tx.put(META, MetaRow(_FAILED, f"{timestamp(self._clock)} {error.message}"))
        self._marking = 0

    def move(self) -> None:
        """Sync everything acknowledged before now, by whichever process, then say so. Gives some free space back."""
        self._marking = threading.get_ident()
        try:
            at = timestamp(self._clock)
            originals = self._store.originals
            taken = [] if originals is None else originals.taken()
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
            if self._store.free_bytes() > _FREE_KEPT_BYTES:
                self._store.give_back_space(_VACUUM_PAGES)
        finally:
            self._marking = 0

    def close(self) -> None:
        """Stop the thread. What is not synced is handed over or synced; else the mark moves only if it is due."""
        thread, stop = self._threads.pop(os.getpid(), (None, None))
        if thread is None or stop is None:
            return
        stop.set()
        thread.join()
        atexit.unregister(self.close)
        if self._written and (not self._hand_over() if self._has_unsynced() else self._is_due()):
            self._try()
        if self._store.originals is not None:
            self._store.originals.close()

    def _has_unsynced(self) -> bool:
        with self._store.read() as tx:
            return bool(self._store.originals and self._store.originals.taken()) or bool(tx.select(UNSYNCED, limit=1))

    def _is_due(self) -> bool:
        with self._store.read() as tx:
            mark = tx.get(META, MARK)
        if mark is None:
            return True
        age = self._clock.now() - parse_timestamp(mark.value)
        return abs(age.total_seconds()) >= self._interval_s


def sync_failure(tx: Tx) -> str | None:
    """When and why a sync failed, if none has worked since."""
    row = tx.get(META, _FAILED)
    return None if row is None else row.value


def look_back(store: Store, journal: Journal, clock: Clock, *, boot: str) -> tuple[Digest, ...]:
    """Under another boot than the store's last one, check once what a power cut could have taken; name what it took."""
    with store.read() as tx:
        known = tx.get(META, BOOT)
        waiting = [digest_from_raw(row.digest) for row in tx.select(UNSYNCED)]
    if known is not None and known.value == boot and boot:
        return ()
    if not boot and known is not None and not waiting:
        return ()
    taken = _taken(store, clock, waiting)
    store.sync()
    # Empties the log, too: behind what SQLite reads of it, the cut may have left commits, which are no damage. A log of
    # which nothing can be read would otherwise go on under the same number.
    store.give_back_space()
    store.bodies.sync(digest for digest in waiting if digest not in taken)
    with store.write() as tx:
        if tx.get(META, BOOT) != known:
            return ()
        lost = sorted(_lose(tx, taken))
        mark = tx.get(META, MARK)
        for start in range(0, len(lost), _DIGESTS_A_RECORD):
            payload = {"digests": lost[start : start + _DIGESTS_A_RECORD], "mark": mark.value if mark else None}
            journal.append(tx, STORE_JOURNAL, LOST_KIND, payload, at=timestamp(clock))
        for digest in taken.union(lost):
            # What is left of it must not be taken for the body when the same bytes are put again.
            store.bodies.delete(digest)
        _delete_unnamed_bodies(tx, store)
        for digest in waiting:
            tx.delete(UNSYNCED, raw_digest(digest))
        tx.put(META, MetaRow(BOOT, boot))
    return tuple(lost)


def _delete_unnamed_bodies(tx: Tx, store: Store) -> None:
    """Bodies whose rows the cut took: it may have taken their bytes too, and no list says so."""
    for digest in list(store.bodies.digests()):
        row = tx.get(BLOBS, raw_digest(digest))
        if row is None or row.place != BESIDE:
            store.bodies.delete(digest)


def _taken(store: Store, clock: Clock, waiting: Iterable[Digest]) -> set[Digest]:
    blobs = Blobs(store, clock)
    found = set()
    for digest in waiting:
        try:
            blobs.read(digest)
        except MulliganError as error:
            if error.code in _TAKEN:
                found.add(digest)
            elif error.code != "unknown_blob":
                raise
    return found


def _lose(tx: Tx, taken: Iterable[Digest]) -> set[Digest]:
    """Mark them lost, and with them every later version packed as a change of one, and every blob it is a part of."""
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


__all__ = ["LOST_KIND", "STORE_JOURNAL", "SyncMark", "boot_id", "look_back", "sync_failure"]
