"""The contract, bound to every engine: a factory each."""

from __future__ import annotations

import pytest

from mulligan.store.bodies import DirectoryBodies, MemoryBodies
from mulligan.store.journal import Schema
from mulligan.store.memory import MemoryStore
from mulligan.store.protocol import BlobStore, Store
from mulligan.store.sqlite import SqliteStore
from mulligan.testing import BodiesContract, StoreContract
from mulligan.testing.blob_contract import BlobContract
from mulligan.testing.contract_tables import CONTRACT_SCHEMA, THINGS, Thing
from mulligan.testing.store_contract import LifeContract, TransactionContract


@pytest.mark.req("D15.one_protocol_one_suite", "D15.memory_strict", "D19.contract_suites", "D3.sync_inside")
class TestMemoryStore(StoreContract):
    lasts = False

    def open_store(self, directory: str, schema: Schema) -> Store:
        return MemoryStore(schema)

    def test_where_the_key_begins_so_the_rest_of_the_table_is_not_looked_at(self) -> None:
        store, looked = MemoryStore(CONTRACT_SCHEMA), list[object]()

        class Shelf(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                looked.append(other)
                return str.__eq__(self, other) is True

            def __ne__(self, other: object) -> bool:
                return not self == other

            __hash__ = str.__hash__

        with store.write() as tx:
            for number in range(300):
                tx.put(THINGS, Thing(f"shelf {number // 3:02}", number))
        with store.read() as tx:
            assert [row.number for row in tx.select(THINGS, {"shelf": Shelf("shelf 07")})] == [21, 22, 23]
        assert len(looked) < 20


@pytest.mark.req(
    "D15.one_protocol_one_suite",
    "D19.contract_suites",
    "D3.sync_inside",
    "D4.projections_same_transaction",
    "D4.record_shape",
    "D4.record_seq_contiguous",
    "D4.blob_address",
    "D4.blob_verified_on_read",
    "D4.blob_prefix_chain",
    "D4.blob_batches_8_mb",
    "D18.journal_tampering",
    "S0.storage.bodies_by_sha256",
    "S0.storage.dedup_across_snapshots",
)
class TestSqliteStore(StoreContract):
    def open_store(self, directory: str, schema: Schema) -> Store:
        return SqliteStore(directory, schema)


class TestSqliteStoreInPowerMode(TransactionContract, LifeContract, BlobContract):
    """What may differ when each commit waits for the disk."""

    def open_store(self, directory: str, schema: Schema) -> Store:
        return SqliteStore(directory, schema, durability="power")


@pytest.mark.req("D19.contract_suites")
class TestMemoryBodies(BodiesContract):
    lasts = False

    def open_bodies(self, directory: str) -> BlobStore:
        return MemoryBodies()


@pytest.mark.req("D19.contract_suites")
class TestDirectoryBodies(BodiesContract):
    def open_bodies(self, directory: str) -> BlobStore:
        return DirectoryBodies(directory + "/blobs")
