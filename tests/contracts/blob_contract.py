"""The contract of blobs on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.store.blobs import BESIDE, BLOBS, BODIES, EVICTED, IN_DATABASE, Blobs, BlobVanishedError, BodyRow
from mulligan.store.protocol import Store, Tx
from mulligan.testing.world import SteppingClock
from mulligan.values.digest import Digest, digest_of, raw_digest
from mulligan.values.errors import MulliganError
from mulligan.values.limits import BLOB_BATCH_BYTES, BLOB_CHAIN_MAX, BLOB_IN_DATABASE_BYTES
from tests.contracts.store_under_test import StoreContractBase, contract_settings


class BlobContract(StoreContractBase):
    """Immutable bytes by digest: stored once, compressed in short chains, verified on every read."""

    def blobs(self, store: Store) -> Blobs:
        return Blobs(store, SteppingClock())

    @pytest.mark.parametrize("size", [0, 1, 127, 128, 4_096, BLOB_IN_DATABASE_BYTES + 1, 300_000])
    @pytest.mark.parametrize("kind", ["plain", "noise"])
    def test_stored_bytes_are_read_back(self, store: Store, size: int, kind: str) -> None:
        data = Random(size).randbytes(size) if kind == "noise" else b"a" * size
        digest = self.blobs(store).store(data)
        assert (digest, self.blobs(store).read(digest)) == (digest_of(data), data)

    def test_large_bodies_are_files_and_small_ones_are_in_the_database(self, store: Store) -> None:
        large, small = Random(1).randbytes(BLOB_IN_DATABASE_BYTES + 1), b"small"
        digests = self.blobs(store).store_all([large, small])
        with store.read() as tx:
            rows = [tx.get(BLOBS, raw_digest(digest)) for digest in digests]
            assert [row and row.place for row in rows] == [BESIDE, IN_DATABASE]
            assert tx.count(BODIES) == 1
        assert list(store.bodies.digests()) == digests[:1]

    def test_many_blobs_are_put_in_batches_so_that_other_writers_get_a_turn(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writes = Counter[str]()
        write = store.write
        monkeypatch.setattr(store, "write", lambda: writes.update(["write"]) or write())
        size = BLOB_BATCH_BYTES // 4
        datas = [Random(number).randbytes(size) for number in range(12)]
        assert self.blobs(store).store_all(datas) == [digest_of(data) for data in datas]
        assert writes["write"] >= len(datas) * size // BLOB_BATCH_BYTES

    def test_the_same_bytes_are_stored_once(self, store: Store) -> None:
        blobs = Blobs(store, SteppingClock(step=timedelta(minutes=2)))
        digest = blobs.store(b"same")
        with store.read() as tx:
            before = tx.select(BLOBS)
        assert blobs.store(b"same") == digest
        with store.read() as tx:
            after = tx.select(BLOBS)
        assert after == [replace(before[0], touched_ms=after[0].touched_ms)]
        assert after[0].touched_ms > before[0].touched_ms

    def test_a_failed_transaction_stores_no_blob(self, store: Store) -> None:
        blobs = self.blobs(store)
        prepared = blobs.prepare(b"never")
        with pytest.raises(LookupError), store.write() as tx:
            blobs.put(tx, prepared)
            raise LookupError
        assert self.code_of(store, prepared.digest) == "unknown_blob"

    def test_versions_of_a_file_are_compressed_in_short_chains(self, store: Store) -> None:
        versions = list(_versions(3 * BLOB_CHAIN_MAX))
        digests = self.put_versions(store, versions)
        assert [self.blobs(store).read(digest) for digest in digests] == versions
        assert max(self.chain_lengths(store)) == BLOB_CHAIN_MAX
        with store.read() as tx:
            keyframes = tx.count(BLOBS, {"base": None})
            assert keyframes == 3
            assert sum(row.stored for row in tx.select(BLOBS)) < sum(map(len, versions)) / 4

    def test_chains_stay_short_when_all_versions_are_prepared_before_any_is_put(self, store: Store) -> None:
        versions = list(_versions(2 * BLOB_CHAIN_MAX + 3))
        blobs = self.blobs(store)
        prepared = [
            blobs.prepare(data, after=earlier) for earlier, data in zip([None, *versions], versions, strict=False)
        ]
        for one, data in zip(prepared, versions, strict=True):
            try:
                blobs.put_all([one])
            except BlobVanishedError:
                blobs.store(data)
        assert [blobs.read(digest_of(data)) for data in versions] == versions
        assert max(self.chain_lengths(store)) <= BLOB_CHAIN_MAX

    def put_versions(self, store: Store, versions: list[bytes]) -> list[Digest]:
        blobs, earlier, digests = self.blobs(store), None, []
        for data in versions:
            prepared = blobs.prepare(data, after=earlier)
            blobs.put_all([prepared])
            digests.append(prepared.digest)
            earlier = data
        return digests

    def chain_lengths(self, store: Store) -> list[int]:
        with store.read() as tx:
            bases = {row.digest: row.base for row in tx.select(BLOBS)}
        lengths = []
        for start in bases:
            length, at = 1, start
            while (at := bases[at] or b"") != b"":
                length += 1
            lengths.append(length)
        return lengths

    @pytest.mark.parametrize("gone", ["row", "evicted"])
    def test_put_notices_that_the_base_of_a_prepared_blob_is_gone(self, store: Store, gone: str) -> None:
        one, two = _versions(2)
        blobs = self.blobs(store)
        digest = blobs.store(one)
        prepared = blobs.prepare(two, after=one)
        with store.write() as tx:
            self.harm_blob(tx, digest, gone)
        with pytest.raises(BlobVanishedError):
            blobs.put_all([prepared])
        assert blobs.read(blobs.store(two)) == two

    def test_an_evicted_blob_can_be_stored_again(self, store: Store) -> None:
        blobs = self.blobs(store)
        digest = blobs.store(b"come back")
        with store.write() as tx:
            self.harm_blob(tx, digest, "evicted")
        assert self.code_of(store, digest) == "evicted"
        assert blobs.read(blobs.store(b"come back")) == b"come back"

    def test_put_notices_that_a_known_blob_was_collected(self, store: Store) -> None:
        blobs = self.blobs(store)
        large = b"collected" * 2_000  # small ones are packed without asking whether they are known
        digest = blobs.store(large)
        prepared = blobs.prepare(large)
        with store.write() as tx:
            self.harm_blob(tx, digest, "row")
        with pytest.raises(BlobVanishedError):
            blobs.put_all([prepared])

    @pytest.mark.parametrize(
        ("harm", "code"),
        [
            ("flipped", "blob_corrupt"),
            ("cut", "blob_corrupt"),
            ("empty", "blob_corrupt"),
            ("other", "blob_corrupt"),
            ("body", "missing_cas_dependency"),
            ("evicted", "evicted"),
            ("row", "unknown_blob"),
            ("circle", "blob_corrupt"),
        ],
    )
    def test_each_kind_of_damage_has_its_error_code(self, store: Store, harm: str, code: str) -> None:
        digest = self.blobs(store).store(b"some text " * 50)
        with store.write() as tx:
            self.harm_blob(tx, digest, harm)
        assert self.code_of(store, digest) == code

    def test_a_deleted_body_file_is_reported_missing(self, store: Store) -> None:
        digest = self.blobs(store).store(Random(2).randbytes(BLOB_IN_DATABASE_BYTES + 1))
        store.bodies.delete(digest)
        assert self.code_of(store, digest) == "missing_cas_dependency"

    def test_a_dropped_body_is_deleted_only_after_the_commit(self, store: Store) -> None:
        data = Random(3).randbytes(BLOB_IN_DATABASE_BYTES + 1)
        digest = self.blobs(store).store(data)
        with suppress(ZeroDivisionError), store.write() as tx:
            tx.delete(BLOBS, raw_digest(digest))
            tx.drop_body(digest)
            raise ZeroDivisionError
        assert self.blobs(store).read(digest) == data
        with store.write() as tx:
            tx.delete(BLOBS, raw_digest(digest))
            tx.drop_body(digest)
            assert store.bodies.has(digest)
        assert not store.bodies.has(digest)

    def test_a_dropped_body_stays_while_a_row_refers_to_it(self, store: Store) -> None:
        digest = self.blobs(store).store(Random(4).randbytes(BLOB_IN_DATABASE_BYTES + 1))
        with store.write() as tx:
            tx.drop_body(digest)
        assert store.bodies.has(digest)

    def test_put_prepares_a_body_again_that_was_deleted_meanwhile(self, store: Store) -> None:
        blobs, data = self.blobs(store), Random(5).randbytes(BLOB_IN_DATABASE_BYTES + 1)
        prepared = blobs.prepare(data)
        store.bodies.delete(prepared.digest)
        with pytest.raises(BlobVanishedError), store.write() as tx:
            blobs.put(tx, prepared)
        assert blobs.read(blobs.store(data)) == data

    def test_damage_of_an_earlier_version_is_found_when_a_later_one_is_read(self, store: Store) -> None:
        one, two = self.put_versions(store, list(_versions(2)))
        with store.write() as tx:
            self.harm_blob(tx, one, "flipped")
        assert self.code_of(store, two) == "blob_corrupt"
        with store.write() as tx:
            self.harm_blob(tx, one, "row")
        assert self.code_of(store, two) == "missing_cas_dependency"

    @contract_settings
    @given(st.integers(0, 10_000), st.integers(0, 7), st.booleans())
    def test_any_flipped_bit_of_a_body_is_found_or_harmless(self, position: int, bit: int, packed: bool) -> None:
        data = b"the same again and again " * 20 if packed else b"short"
        with self.fresh() as store:
            digest = self.blobs(store).store(data)
            with store.write() as tx:
                body = bytearray(tx.select(BODIES)[0].body)
                body[position % len(body)] ^= 1 << bit
                tx.put(BODIES, BodyRow(raw_digest(digest), bytes(body)))
            with suppress(MulliganError):
                assert self.blobs(store).read(digest) == data

    def harm_blob(self, tx: Tx, digest: Digest, harm: str) -> None:
        raw = raw_digest(digest)
        row, kept = tx.get(BLOBS, raw), tx.get(BODIES, raw)
        assert row is not None and kept is not None
        middle = len(kept.body) // 2
        bodies = {
            "flipped": kept.body[:middle] + bytes([kept.body[middle] ^ 1]) + kept.body[middle + 1 :],
            "cut": kept.body[:-1],
            "empty": b"",
            "other": b"\0" + b"x" * row.size,
        }
        if harm in bodies:
            tx.put(BODIES, BodyRow(raw, bodies[harm]))
        elif harm == "evicted":
            tx.put(BLOBS, replace(row, place=EVICTED))
        elif harm == "circle":
            tx.put(BLOBS, replace(row, base=raw))
        else:
            tx.delete(BODIES, raw)
        if harm in ("evicted", "row"):
            tx.delete(BODIES, raw)
        if harm == "row":
            tx.delete(BLOBS, raw)

    def code_of(self, store: Store, digest: Digest) -> str:
        with pytest.raises(MulliganError) as found:
            self.blobs(store).read(digest)
        return found.value.code


def _versions(count: int) -> Iterator[bytes]:
    """A file of noise in which one more line changes each time: only its predecessor makes it small."""
    random = Random(7)
    lines = [random.randbytes(60).hex() for _ in range(60)]
    for _ in range(count):
        lines[random.randrange(len(lines))] = random.randbytes(60).hex()
        yield "\n".join(lines).encode()
