"""The contract, bound to every engine: a factory each."""

from __future__ import annotations

from mulligan.store.bodies import DirectoryBodies, MemoryBodies
from mulligan.store.journal import Schema
from mulligan.store.memory import MemoryStore
from mulligan.store.protocol import BlobStore, Store
from mulligan.store.sqlite import SqliteStore
from mulligan.testing import BodiesContract, StoreContract
from mulligan.testing.blob_contract import BlobContract
from mulligan.testing.store_contract import LifeContract, TransactionContract


class TestMemoryStore(StoreContract):
    lasts = False

    def open_store(self, directory: str, schema: Schema) -> Store:
        return MemoryStore(schema)


class TestSqliteStore(StoreContract):
    def open_store(self, directory: str, schema: Schema) -> Store:
        return SqliteStore(directory, schema)


class TestSqliteStoreInPowerMode(TransactionContract, LifeContract, BlobContract):
    """What may differ when each commit waits for the disk."""

    def open_store(self, directory: str, schema: Schema) -> Store:
        return SqliteStore(directory, schema, durability="power")


class TestMemoryBodies(BodiesContract):
    lasts = False

    def open_bodies(self, directory: str) -> BlobStore:
        return MemoryBodies()


class TestDirectoryBodies(BodiesContract):
    def open_bodies(self, directory: str) -> BlobStore:
        return DirectoryBodies(directory + "/blobs")
