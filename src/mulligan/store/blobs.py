"""Blobs: immutable bytes by the SHA-256 of their plain form, packed, deduplicated, verified on every read.

Hashing and packing happen outside transactions (`prepare`); a row is published inside one (`put`). A body up to 64 KiB
is in the database, a larger one in a file beside it, and the `place` column says which. A new version of a file may be
packed as a change of an earlier one: `base` is then an edge that keeps the earlier one reachable. A stream is stored in
parts of 4 MiB, each a blob of its own, so that neither writing nor reading a page needs the whole content in memory.

The format of a body: one leading byte for the packing, then the packed bytes.

`0` the bytes themselves; `1` zstd; `2` zstd with an earlier version of the same file as its prefix. Unpacking stops at
the size that the row states, so a small damaged or forged body cannot fill the memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256

from mulligan.store.protocol import Store, Table, Tx
from mulligan.values import limits
from mulligan.values.clock import Clock
from mulligan.values.digest import Digest, digest_from_raw, digest_of, raw_digest
from mulligan.values.entries import Content, Large
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import BLOB_BATCH_BYTES, BLOB_CHAIN_MAX, BLOB_IN_DATABASE_BYTES, BLOB_PART_BYTES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RAW, ZSTD, ZSTD_PREFIX = b"\0", b"\1", b"\2"

_LEVEL = 1
_WORTH_COMPRESSING_BYTES = 128
_WINDOW_LOG_MAX = 27


def pack(data: bytes) -> bytes:
    if len(data) < _WORTH_COMPRESSING_BYTES:
        return RAW + data
    packed = _deflaters.ours.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return ZSTD + packed if len(packed) < len(data) else RAW + data


class _Deflaters(threading.local):
    """One compressor for each thread: creating one takes longer than compressing a source file."""

    def __init__(self) -> None:
        self.ours = zstd.ZstdCompressor(level=_LEVEL)


_deflaters = _Deflaters()


def pack_after(data: bytes, earlier: bytes) -> bytes:
    """Pack as a change of `earlier`, which `unpack` needs again."""
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _LEVEL,
        zstd.CompressionParameter.window_log: min((len(earlier) + len(data)).bit_length() + 1, _WINDOW_LOG_MAX),
    }
    prefix = zstd.ZstdDict(earlier, is_raw=True).as_prefix
    return ZSTD_PREFIX + zstd.ZstdCompressor(options=options, zstd_dict=prefix).compress(
        data, zstd.ZstdCompressor.FLUSH_FRAME
    )


def unpack(body: bytes, size: int, *, earlier: bytes | None = None) -> bytes:
    """The plain bytes. Raises `blob_corrupt` for anything that does not unpack to exactly `size` bytes."""
    form, packed = body[:1], body[1:]
    try:
        data = packed if form == RAW else _inflate(form, packed, size, earlier)
    except (zstd.ZstdError, EOFError, ValueError) as error:
        raise fault("blob_corrupt", f"A blob does not unpack: {error}") from None
    if len(data) != size:
        raise fault("blob_corrupt", f"A blob unpacks to {len(data)} bytes instead of {size}.")
    return data


def _inflate(form: bytes, packed: bytes, size: int, earlier: bytes | None) -> bytes:
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
    if form == ZSTD_PREFIX:
        if earlier is None:
            raise ValueError("its earlier version is missing")
        inflater = zstd.ZstdDecompressor(options=options, zstd_dict=zstd.ZstdDict(earlier, is_raw=True).as_prefix)
    elif form == ZSTD:
        inflater = zstd.ZstdDecompressor(options=options)
    else:
        raise ValueError("unknown form")
    return inflater.decompress(packed, max_length=size + 1)


IN_DATABASE, BESIDE, IN_PARTS, EVICTED, LOST = "db", "out", "parts", "evicted", "lost"
WHOLE = (IN_DATABASE, BESIDE)
READABLE = (*WHOLE, IN_PARTS)

_BATCH_BLOBS = 250
SMALL_BYTES = 8_192
"""Packing at most this much is faster than a query whether the store has it, and than packing it as a change."""

TOUCH_INTERVAL_MS = 60_000
"""A blob touched more recently than this is not touched again, so gc must allow for touch times this much too old."""

_DELTA_MIN_BYTES = 1_024
_BASE_MIN_BYTES = 64
_DELTA_MAX_BYTES = 32 * 1024 * 1024


@fast_dataclass(slots=True, frozen=True)
class BlobRow:
    digest: bytes
    size: int
    stored: int
    place: str
    base: bytes | None
    depth: int
    touched_ms: int


@fast_dataclass(slots=True, frozen=True)
class BodyRow:
    digest: bytes
    body: bytes


@fast_dataclass(slots=True, frozen=True)
class UnsyncedRow:
    """A body beside the database that a power cut could still destroy; `maintenance` syncs it and removes the row."""

    digest: bytes


@fast_dataclass(slots=True, frozen=True)
class PartRow:
    """One part of a blob that is stored in parts; `part` is an edge that keeps it reachable."""

    digest: bytes
    ordinal: int
    part: bytes
    size: int


BLOBS: Table[BlobRow] = Table("blobs", BlobRow, key=("digest",), indexes=(("base",),))
BODIES: Table[BodyRow] = Table("bodies", BodyRow, key=("digest",), large=True)
PARTS: Table[PartRow] = Table("parts", PartRow, key=("digest", "ordinal"), indexes=(("part",),))
UNSYNCED: Table[UnsyncedRow] = Table("unsynced", UnsyncedRow, key=("digest",))


@fast_dataclass(slots=True, frozen=True)
class Prepared:
    """A blob that is hashed and packed, but no row names it yet. No `body`: the store had the blob at that time.

    `plain`: small bytes that the store most likely has; they are packed only if it does not.
    `fresh`: the blob was touched so recently that publishing it needs no write.
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
class LargeBlob(Large):
    """The content of a file, read from a large blob piece by piece."""

    blobs: Blobs
    digest: Digest
    size: int

    def __iter__(self) -> Iterator[bytes]:
        return self.blobs.pieces(self.digest)


class BlobVanishedError(Exception):
    """gc deleted a blob between its preparation and its publication. The caller prepares it again."""


class Blobs:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def prepare(self, data: Content, *, after: Content | None = None, digest: Digest | None = None) -> Prepared:
        """Hash and pack; large bodies are written beside the database here, before any row names them.

        `after` is an earlier version of the same file, which the caller has put, or will put before this one.
        `digest` is the digest of the data, if the caller already knows it.
        """
        if isinstance(data, Large):
            return Prepared(data.digest, data.size, None)
        digest = digest or digest_of(data)
        after = None if isinstance(after, Large) else after
        if after is None and len(data) <= SMALL_BYTES:
            return Prepared(digest, len(data), pack(data))
        return self._prepare_unless_stored(data, digest, after)

    def prepare_scanned(self, data: Content, digest: Digest) -> Prepared:
        """Prepare what a scan read from a file. The store usually has it, because a recorded change wrote it."""
        if isinstance(data, Large):
            return Prepared(digest, data.size, None)
        if len(data) <= SMALL_BYTES:
            return Prepared(digest, len(data), None, plain=data)
        return self._prepare_unless_stored(data, digest)

    def _prepare_unless_stored(self, data: bytes, digest: Digest, after: bytes | None = None) -> Prepared:
        with self._store.read() as tx:
            known = tx.get(BLOBS, raw_digest(digest))
            base = self._base(tx, data, after)
        if known is not None and known.place in READABLE:
            return Prepared(digest, len(data), None, fresh=self._is_fresh(known))
        if base is None or after is None:
            prepared = Prepared(digest, len(data), pack(data))
        else:
            prepared = Prepared(digest, len(data), pack_after(data, after), base.digest, base.depth)
        if prepared.place == BESIDE and prepared.body is not None:
            self._store.bodies.put(digest, prepared.body, durable=self._store.durability == "power")
        return prepared

    def _base(self, tx: Tx, data: bytes, after: bytes | None) -> _Base | None:
        """The blob to pack against, if that saves bytes and the chain of versions stays short."""
        if after is None or after == data or not _DELTA_MIN_BYTES <= len(data) <= _DELTA_MAX_BYTES:
            return None
        if len(after) < _BASE_MIN_BYTES:
            return None
        raw = sha256(after).digest()
        row = tx.get(BLOBS, raw)
        depth = row.depth + 1 if row is not None else 1
        return _Base(raw, depth) if depth < BLOB_CHAIN_MAX and (row is None or row.place in WHOLE) else None

    def put(self, tx: Tx, prepared: Prepared) -> Digest:
        """Publish in the caller's transaction. A blob that exists is touched, so that gc does not delete it."""
        raw = raw_digest(prepared.digest)
        known = tx.get(BLOBS, raw)
        if known is not None and known.place in READABLE:
            if not self._is_fresh(known):
                tx.update(BLOBS, raw, touched_ms=self._now_ms())
                if known.place == BESIDE and self._store.durability == "power" and tx.delete(UNSYNCED, known.digest):
                    # A process in `process` mode put the body without a sync; this caller promises one.
                    self._store.bodies.sync([digest_from_raw(known.digest)])
            return prepared.digest
        base, place = prepared.base, prepared.place
        body = prepared.body if prepared.plain is None else pack(prepared.plain)
        depth = 0
        if base is not None:
            # gc may have deleted the base, or the caller may not have put it yet, since this blob was packed.
            row = tx.get(BLOBS, base)
            depth = row.depth + 1 if row is not None and row.place in WHOLE else BLOB_CHAIN_MAX
        if body is None or depth >= BLOB_CHAIN_MAX:
            raise BlobVanishedError(prepared.digest)
        if place == BESIDE and not self._store.bodies.has(prepared.digest):
            # `prepare` found a body there, which another process was about to delete with an earlier row.
            raise BlobVanishedError(prepared.digest)
        tx.put(BLOBS, BlobRow(raw, prepared.size, len(body), place, base, depth, self._now_ms()))
        if place == IN_DATABASE:
            tx.put(BODIES, BodyRow(raw, body))
        elif self._store.durability == "process":
            tx.put(UNSYNCED, UnsyncedRow(raw))
        return prepared.digest

    def repack_dependents(self, tx: Tx, digest: Digest, *, but: Container[Digest]) -> None:
        """Pack again as whole bodies the versions that are packed as changes of this one."""
        for row in tx.select(BLOBS, {"base": raw_digest(digest)}):
            own = digest_from_raw(row.digest)
            if own in but or row.place not in WHOLE:
                continue
            self.repack_dependents(tx, own, but=but)
            body = pack(self.read_in(tx, own))
            place = IN_DATABASE if len(body) <= BLOB_IN_DATABASE_BYTES else BESIDE
            if place == IN_DATABASE:
                tx.put(BODIES, BodyRow(row.digest, body))
                tx.drop_body(own)
            else:
                # The first byte of a body names its packing, so it can be read even if we die before the commit.
                self._store.bodies.replace(own, body)
                tx.delete(BODIES, row.digest)
            tx.put(BLOBS, replace(row, place=place, stored=len(body), base=None, depth=0))

    def _is_fresh(self, known: BlobRow) -> bool:
        """Whether the blob was touched recently, and is as durable as the store promises."""
        is_durable = known.place != BESIDE or self._store.durability == "process"
        return is_durable and self._now_ms() - known.touched_ms <= TOUCH_INTERVAL_MS

    def store(self, data: Content) -> Digest:
        """Prepare and publish one blob in a transaction of its own."""
        while True:
            prepared = self.prepare(data)
            if prepared.fresh:
                return prepared.digest
            with suppress(BlobVanishedError), self._store.write() as tx:
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
        """Store bytes of any length as they arrive. Answers their digest and size."""
        whole, parts, size = sha256(), list[PartRow](), 0
        for data in _in_pieces(chunks, BLOB_PART_BYTES):
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

    def store_large(self, chunks: Iterable[bytes]) -> LargeBlob:
        return LargeBlob(self, *self.store_stream(chunks))

    def content(self, digest: Digest, size: int) -> Content:
        """The plain bytes, or a `LargeBlob` if they are too many for memory. Raises as `read` does."""
        if size <= limits.WHOLE_MAX_BYTES:
            return self.read(digest)
        with self._store.read() as tx:
            if self.is_lost(tx, digest):
                raise _lost_error(digest)
        return LargeBlob(self, digest, size)

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
            raise fault("blob_corrupt", f"Blob {digest} does not hold the bytes of its digest.", digest=digest)
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
            raise _lost_error(digest)
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
        """When this returns, a power cut destroys nothing in the store, not even a body that a dead process wrote."""
        with self._store.read() as tx:
            waiting = [digest_from_raw(row.digest) for row in tx.select(UNSYNCED)]
        self._store.bodies.sync(waiting)
        self._store.sync()

    def _now_ms(self) -> int:
        return int(self._clock.now().timestamp() * 1000)


def _lost_error(digest: Digest) -> MulliganError:
    return fault("evicted", f"The bytes of {digest} were lost in a power cut.", digest=digest, lost=True)


def delete_dropped_bodies(store: Store, digests: Iterable[Digest]) -> None:
    """Delete the bodies of `Tx.drop_body` after the commit. If that fails, the bodies stay and `gc` removes them."""
    with suppress(MulliganError):
        delete_unnamed_bodies(store, digests)


def delete_unnamed_bodies(store: Store, digests: Iterable[Digest]) -> None:
    """Delete the bodies that no row names any more, after the rows are on the disk."""
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


@fast_dataclass(slots=True, frozen=True)
class _Base:
    digest: bytes
    depth: int


def _in_pieces(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of exactly `size`, but for the last; at least one piece."""
    pending = bytearray()
    is_first = True
    for chunk in chunks:
        pending += chunk
        while len(pending) >= size:
            yield bytes(pending[:size])
            del pending[:size]
            is_first = False
    if pending or is_first:
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
