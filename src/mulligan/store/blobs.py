"""Blobs: immutable bytes by the SHA-256 of their plain form, packed, deduplicated, verified on every read.

Hashing and packing happen outside transactions (`prepare`); a row is published inside one (`put`). A body up to 64 KiB
lives in the database, a larger one beside it, and the `place` column says which. A new version of a file may be packed
as a change of an earlier one: `base` is then an edge that keeps the earlier one reachable. What comes as a stream is
kept in parts of 4 MiB, each a blob of its own, so that neither writing nor paging through it needs it whole in memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256

from mulligan.store.codec import pack, pack_after, unpack
from mulligan.store.protocol import Store, Tx
from mulligan.store.tables import Table
from mulligan.values import limits
from mulligan.values.clock import Clock
from mulligan.values.content import Content, Large
from mulligan.values.digest import Digest, digest_from_raw, digest_of, raw_digest
from mulligan.values.faults import MulliganError, fault
from mulligan.values.limits import BLOB_BATCH_BYTES, BLOB_CHAIN_MAX, BLOB_IN_DATABASE_BYTES, BLOB_PART_BYTES
from mulligan.values.plain import plain

IN_DATABASE, BESIDE, IN_PARTS, EVICTED, LOST = "db", "out", "parts", "evicted", "lost"
WHOLE = (IN_DATABASE, BESIDE)
READABLE = (*WHOLE, IN_PARTS)

_BATCH_BLOBS = 250
SMALL_BYTES = 8_192
"""Packing so little takes no longer than asking whether the store has it, and less than packing it as a change."""

TOUCHED_ANEW_MS = 60_000
"""A blob touched less long ago is not touched again, so whoever collects must look that much further back."""

_DELTA_MIN_BYTES = 1_024
_BASE_MIN_BYTES = 64
_DELTA_MAX_BYTES = 32 * 1024 * 1024


@plain(slots=True, frozen=True)
class BlobRow:
    digest: bytes
    size: int
    stored: int
    place: str
    base: bytes | None
    depth: int
    touched_ms: int


@plain(slots=True, frozen=True)
class BodyRow:
    digest: bytes
    body: bytes


@plain(slots=True, frozen=True)
class UnsyncedRow:
    """A body beside the database that a power cut could still take; `housekeeping` syncs it and removes the row."""

    digest: bytes


@plain(slots=True, frozen=True)
class PartRow:
    """One part of a blob that is kept in parts; `part` is an edge that keeps it reachable."""

    digest: bytes
    ordinal: int
    part: bytes
    size: int


BLOBS: Table[BlobRow] = Table("blobs", BlobRow, key=("digest",), indexes=(("base",),))
BODIES: Table[BodyRow] = Table("bodies", BodyRow, key=("digest",))
PARTS: Table[PartRow] = Table("parts", PartRow, key=("digest", "ordinal"), indexes=(("part",),))
UNSYNCED: Table[UnsyncedRow] = Table("unsynced", UnsyncedRow, key=("digest",))


@plain(slots=True, frozen=True)
class Prepared:
    """Hashed and packed, not yet named by the store. Without a body: the store had it when we looked.

    `plain`: small bytes the store surely has, which are packed only if it turns out that it has not.
    `fresh`: it was touched so lately that nothing is left to do.
    """

    digest: Digest
    size: int
    body: bytes | None
    base: bytes | None = None
    depth: int = 0
    plain: bytes | None = None
    fresh: bool = False

    @property
    def place(self) -> str:
        return IN_DATABASE if len(self.body or b"") <= BLOB_IN_DATABASE_BYTES else BESIDE


@dataclass(frozen=True)
class Stored(Large):
    """A large blob, as content of a file."""

    blobs: Blobs
    digest: Digest
    size: int

    def __iter__(self) -> Iterator[bytes]:
        return self.blobs.pieces(self.digest)


class Vanished(Exception):
    """A blob that was there when it was prepared has been collected since. Prepare again."""


class Blobs:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def prepare(self, data: Content, *, after: Content | None = None, digest: Digest | None = None) -> Prepared:
        """Hash and pack; large bodies are written beside the database here, before any row names them.

        `after` is an earlier version of the same file, which the caller has put, or is about to put before this one.
        `digest` is that of the data, for who knows it already.
        """
        if isinstance(data, Large):
            return Prepared(data.digest, data.size, None)
        digest = digest or digest_of(data)
        after = None if isinstance(after, Large) else after
        if after is None and len(data) <= SMALL_BYTES:
            return Prepared(digest, len(data), pack(data))
        return self._prepare_looking(data, digest, after)

    def prepare_seen(self, data: Content, digest: Digest) -> Prepared:
        """What a look at a file gave. Mostly the store knows it: it is what somebody's last change left there."""
        if isinstance(data, Large):
            return Prepared(digest, data.size, None)
        if len(data) <= SMALL_BYTES:
            return Prepared(digest, len(data), None, plain=data)
        return self._prepare_looking(data, digest)

    def _prepare_looking(self, data: bytes, digest: Digest, after: bytes | None = None) -> Prepared:
        with self._store.read() as tx:
            known = tx.get(BLOBS, raw_digest(digest))
            base = self._base(tx, data, after)
        if known is not None and known.place in READABLE:
            return Prepared(digest, len(data), None, fresh=self._is_fresh(known))
        prepared = (
            Prepared(digest, len(data), pack(data)) if base is None or after is None else _changed(data, after, base)
        )
        if prepared.place == BESIDE and prepared.body is not None:
            self._store.bodies.put(digest, prepared.body, durable=self._store.durability == "power")
        return prepared

    def _base(self, tx: Tx, data: bytes, after: bytes | None) -> _Base | None:
        """What to pack against, if that pays and keeps chains short."""
        if after is None or after == data or not _DELTA_MIN_BYTES <= len(data) <= _DELTA_MAX_BYTES:
            return None
        if len(after) < _BASE_MIN_BYTES:
            return None
        raw = sha256(after).digest()
        row = tx.get(BLOBS, raw)
        depth = row.depth + 1 if row is not None else 1
        return _Base(raw, depth) if depth < BLOB_CHAIN_MAX and (row is None or row.place in WHOLE) else None

    def put(self, tx: Tx, prepared: Prepared) -> Digest:
        """Publish in the caller's transaction. One that is there already is touched, so gc leaves it alone."""
        raw = raw_digest(prepared.digest)
        known = tx.get(BLOBS, raw)
        if known is not None and known.place in READABLE:
            if not self._is_fresh(known):
                tx.update(BLOBS, raw, touched_ms=self._now_ms())
                self._catch_up(tx, known)
            return prepared.digest
        base, body = prepared.base, prepared.body if prepared.plain is None else pack(prepared.plain)
        depth = 0 if base is None else _depth_on(tx, base)
        if body is None or depth >= BLOB_CHAIN_MAX:
            raise Vanished(prepared.digest)
        if prepared.place == BESIDE and not self._store.bodies.has(prepared.digest):
            # Another process was about to delete the body of an earlier row when we found it there.
            raise Vanished(prepared.digest)
        tx.put(BLOBS, BlobRow(raw, prepared.size, len(body), prepared.place, base, depth, self._now_ms()))
        if prepared.place == IN_DATABASE:
            tx.put(BODIES, BodyRow(raw, body))
        elif self._store.durability == "process":
            tx.put(UNSYNCED, UnsyncedRow(raw))
        return prepared.digest

    def unpack_dependents(self, tx: Tx, digest: Digest, *, but: Container[Digest]) -> None:
        """Pack anew, by themselves, the versions that are packed as changes of this one."""
        for row in tx.select(BLOBS, {"base": raw_digest(digest)}):
            own = digest_from_raw(row.digest)
            if own in but or row.place not in WHOLE:
                continue
            self.unpack_dependents(tx, own, but=but)
            body = pack(self.read_in(tx, own))
            place = IN_DATABASE if len(body) <= BLOB_IN_DATABASE_BYTES else BESIDE
            if place == IN_DATABASE:
                tx.put(BODIES, BodyRow(row.digest, body))
                tx.drop_body(own)
            else:
                # A body says how it is packed: should we die before the commit, this one can be read all the same.
                self._store.bodies.replace(own, body)
                tx.delete(BODIES, row.digest)
            tx.put(BLOBS, replace(row, place=place, stored=len(body), base=None, depth=0))

    def _is_fresh(self, known: BlobRow) -> bool:
        """Touched lately, and as durable as we are asked to be."""
        is_durable = known.place != BESIDE or self._store.durability == "process"
        return is_durable and self._now_ms() - known.touched_ms <= TOUCHED_ANEW_MS

    def _catch_up(self, tx: Tx, known: BlobRow) -> None:
        """A body that somebody put without waiting for the disk, now needed by one who must wait."""
        if known.place == BESIDE and self._store.durability == "power" and tx.delete(UNSYNCED, known.digest):
            self._store.bodies.sync([digest_from_raw(known.digest)])

    def store(self, data: Content) -> Digest:
        """Prepare and publish one blob in a transaction of its own."""
        while True:
            prepared = self.prepare(data)
            if prepared.fresh:
                return prepared.digest
            with suppress(Vanished), self._store.write() as tx:
                return self.put(tx, prepared)

    def store_all(self, datas: Iterable[Content]) -> list[Digest]:
        """Many blobs, in transactions of at most 8 MB or 250 blobs, so that a big commit never blocks small ones."""
        found: list[Digest] = []
        for batch in _batches(self.prepare(data) for data in datas):
            self.put_all(batch)
            found += [prepared.digest for prepared in batch]
        return found

    def put_all(self, batch: Iterable[Prepared]) -> None:
        """Publish in a transaction of its own."""
        with self._store.write() as tx:
            for prepared in batch:
                self.put(tx, prepared)

    def store_stream(self, chunks: Iterable[bytes]) -> tuple[Digest, int]:
        """Bytes of any length, as they come. Their digest and size."""
        whole, parts, size = sha256(), list[PartRow](), 0
        for data in _regrouped(chunks, BLOB_PART_BYTES):
            whole.update(data)
            size += len(data)
            part = raw_digest(self.store(data))
            parts.append(PartRow(b"", len(parts), part, len(data)))
        raw = whole.digest()
        with self._store.write() as tx:
            known = tx.get(BLOBS, raw)
            if known is None or known.place not in READABLE:
                tx.put(BLOBS, BlobRow(raw, size, 0, IN_PARTS, None, 0, self._now_ms()))
                for part_row in parts:
                    tx.put(PARTS, replace(part_row, digest=raw))
        return digest_from_raw(raw), size

    def store_large(self, chunks: Iterable[bytes]) -> Stored:
        return Stored(self, *self.store_stream(chunks))

    def content(self, digest: Digest, size: int) -> Content:
        """The plain bytes, or a way to them if they are too large to hold. Raises as `read` does."""
        if size <= limits.WHOLE_MAX_BYTES:
            return self.read(digest)
        with self._store.read() as tx:
            if self.is_lost(tx, digest):
                raise _lost(digest)
        return Stored(self, digest, size)

    def pieces(self, digest: Digest) -> Iterator[bytes]:
        """The plain bytes one piece after the other, each verified. Raises as `read` does."""
        with self._store.read() as tx:
            parts = tx.select(PARTS, {"digest": raw_digest(digest)})
        if not parts:
            yield self.read(digest)
        for part in parts:
            yield self.read(digest_from_raw(part.part))

    def read_range(self, digest: Digest, offset: int, size: int) -> bytes:
        """Some of the plain bytes; of a blob in parts, only the parts that hold them are read."""
        with self._store.read() as tx:
            row = tx.get(BLOBS, raw_digest(digest))
            if row is None or row.place != IN_PARTS:
                return self.read_in(tx, digest)[offset : offset + size]
            found, at = bytearray(), 0
            for part in tx.select(PARTS, {"digest": row.digest}):
                if at < offset + size and at + part.size > offset:
                    data = self.read_in(tx, digest_from_raw(part.part))
                    found += data[max(0, offset - at) : offset + size - at]
                at += part.size
            return bytes(found)

    def size_of(self, digest: Digest) -> int:
        """Raises `unknown_blob`."""
        with self._store.read() as tx:
            row = tx.get(BLOBS, raw_digest(digest))
        if row is None:
            raise fault("unknown_blob", f"The store has no blob {digest}.", digest=digest)
        return row.size

    def read(self, digest: Digest) -> bytes:
        """The plain bytes, verified. Raises `unknown_blob`, `evicted`, `missing_cas_dependency` or `blob_corrupt`."""
        with self._store.read() as tx:
            return self.read_in(tx, digest)

    def read_in(self, tx: Tx, digest: Digest) -> bytes:
        row = tx.get(BLOBS, raw_digest(digest))
        if row is None:
            raise fault("unknown_blob", f"The store has no blob {digest}.", digest=digest)
        data = self._plain(tx, row)
        if digest_of(data) != digest:
            raise fault("blob_corrupt", f"Blob {digest} does not hold the bytes of its name.", digest=digest)
        return data

    def _plain(self, tx: Tx, row: BlobRow) -> bytes:
        """Unpack along the chain of earlier versions, oldest first; short by construction."""
        if row.place == IN_PARTS:
            parts = tx.select(PARTS, {"digest": row.digest})
            return b"".join(self.read_in(tx, digest_from_raw(part.part)) for part in parts)
        chain = [row]
        while (base := chain[-1].base) is not None:
            earlier = tx.get(BLOBS, base)
            if earlier is None:
                digest = digest_from_raw(base)
                raise fault("missing_cas_dependency", f"Blob {digest}, which others build on, is gone.", digest=digest)
            if len(chain) == BLOB_CHAIN_MAX:
                digest = digest_from_raw(row.digest)
                raise fault("blob_corrupt", f"Blob {digest} builds on more versions than there can be.", digest=digest)
            chain.append(earlier)
        data: bytes | None = None
        for link in reversed(chain):
            data = unpack(self._body(tx, link), link.size, earlier=data)
        assert data is not None
        return data

    def _body(self, tx: Tx, row: BlobRow) -> bytes:
        digest = digest_from_raw(row.digest)
        if row.place == BESIDE:
            return self._store.bodies.get(digest)
        if row.place == EVICTED:
            raise fault("evicted", f"The bytes of {digest} were dropped: over the cap, or on demand.", digest=digest)
        if row.place == LOST:
            raise _lost(digest)
        found = tx.get(BODIES, row.digest) if row.place == IN_DATABASE else None
        if found is None:
            raise fault("missing_cas_dependency", f"The body of {digest} is gone.", digest=digest)
        return found.body

    def has(self, tx: Tx, digest: Digest) -> bool:
        """Whether its bytes can be read."""
        row = tx.get(BLOBS, raw_digest(digest))
        return row is not None and row.place in READABLE

    def is_lost(self, tx: Tx, digest: Digest) -> bool:
        """Whether a power cut took its bytes."""
        row = tx.get(BLOBS, raw_digest(digest))
        return row is not None and row.place == LOST

    def sync(self) -> None:
        """When this returns, a power cut takes nothing from the store, nor a body that a process left which is gone."""
        with self._store.read() as tx:
            waiting = [digest_from_raw(row.digest) for row in tx.select(UNSYNCED)]
        self._store.bodies.sync(waiting)
        self._store.sync()

    def _now_ms(self) -> int:
        return int(self._clock.now().timestamp() * 1000)


def _lost(digest: Digest) -> MulliganError:
    return fault("evicted", f"The bytes of {digest} were lost in a power cut.", digest=digest, lost=True)


def delete_dropped_bodies(store: Store, digests: Iterable[Digest]) -> None:
    """What `Tx.drop_body` asked for, after the commit. A body that stays because this fails is garbage for `gc`."""
    with suppress(MulliganError):
        delete_unnamed_bodies(store, digests)


def delete_unnamed_bodies(store: Store, digests: Iterable[Digest]) -> None:
    """Those that no row names any more, now that the disk has the rows."""
    if store.durability == "process":
        store.sync()
    deleted = list[Digest]()
    with store.write() as tx:
        for digest in digests:
            row = tx.get(BLOBS, raw_digest(digest))
            if row is None or row.place != BESIDE:
                store.bodies.delete(digest)
                deleted.append(digest)
    # Without a journal, a name that is still on the disk could come back with the inode of another file.
    store.bodies.sync(deleted)


@plain(slots=True, frozen=True)
class _Base:
    digest: bytes
    depth: int


def _depth_on(tx: Tx, base: bytes) -> int:
    """How deep a change of that blob stands; too deep if there is nothing to stand on any more."""
    row = tx.get(BLOBS, base)
    return row.depth + 1 if row is not None and row.place in WHOLE else BLOB_CHAIN_MAX


def _changed(data: bytes, after: bytes, base: _Base) -> Prepared:
    return Prepared(digest_of(data), len(data), pack_after(data, after), base.digest, base.depth)


def _regrouped(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of exactly `size`, but for the last; at least one piece."""
    pending = bytearray()
    told = False
    for chunk in chunks:
        pending += chunk
        while len(pending) >= size:
            yield bytes(pending[:size])
            del pending[:size]
            told = True
    if pending or not told:
        yield bytes(pending)


def _batches(prepared: Iterable[Prepared]) -> Iterator[list[Prepared]]:
    batch: list[Prepared] = []
    size = 0
    for one in prepared:
        more = len(one.body or b"")
        if batch and (size + more > BLOB_BATCH_BYTES or len(batch) == _BATCH_BLOBS):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += more
    if batch:
        yield batch
