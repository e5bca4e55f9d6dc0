"""Runs the store contract on every engine."""

from __future__ import annotations

import pytest

from mulligan.store.blob_files import DirectoryBodies, MemoryBodies
from mulligan.store.journal import Schema
from mulligan.store.memory import MemoryStore
from mulligan.store.protocol import BlobStore, Store
from mulligan.store.sqlite import SqliteStore
from tests.contracts.blob_contract import BlobContract
from tests.contracts.blob_store_contract import BlobStoreContract
from tests.contracts.store_contract import LifecycleContract, StoreContract, TransactionContract
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing


@pytest.mark.req("D15.one_protocol_one_suite", "D15.memory_strict", "D19.contract_suites", "D3.sync_inside")
class TestMemoryStore(StoreContract):
    lasts = False

    def open_store(self, directory: str, schema: Schema) -> Store:
        return MemoryStore(schema)

    def test_a_select_by_a_key_prefix_compares_only_rows_with_that_prefix(self) -> None:
        store, looked = MemoryStore(CONTRACT_SCHEMA), list[object]()

        class ComparedName(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                looked.append(other)
                return str.__eq__(self, other) is True

            def __ne__(self, other: object) -> bool:
                return not self == other

            __hash__ = str.__hash__

        with store.write() as tx:
            for number in range(300):
                tx.put(THINGS, Thing(f"group {number // 3:02}", number))
        with store.read() as tx:
            assert [row.number for row in tx.select(THINGS, {"group": ComparedName("group 07")})] == [21, 22, 23]
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


class TestSqliteStoreInPowerMode(TransactionContract, LifecycleContract, BlobContract):
    """What may differ when each commit waits for the disk."""

    def open_store(self, directory: str, schema: Schema) -> Store:
        return SqliteStore(directory, schema, durability="power")


@pytest.mark.req("D19.contract_suites")
class TestMemoryBodies(BlobStoreContract):
    lasts = False

    def open_bodies(self, directory: str) -> BlobStore:
        return MemoryBodies()


@pytest.mark.req("D19.contract_suites")
class TestDirectoryBodies(BlobStoreContract):
    def open_bodies(self, directory: str) -> BlobStore:
        return DirectoryBodies(directory + "/blobs")
