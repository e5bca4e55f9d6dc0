"""The contract, bound to every engine: a factory each."""

from __future__ import annotations

from mulligan.store.bodies import DirectoryBodies, MemoryBodies
from mulligan.store.journal import Schema
from mulligan.store.memory import MemoryStore
from mulligan.store.protocol import BlobStore, Store
from mulligan.store.sqlite import SqliteStore
from mulligan.testing import BodiesContract, StoreContract


class TestMemoryStore(StoreContract):
    lasts = False

    def open_store(self, directory: str, schema: Schema) -> Store:
        return MemoryStore(schema)


class TestSqliteStore(StoreContract):
    def open_store(self, directory: str, schema: Schema) -> Store:
        return SqliteStore(directory, schema)


class TestSqliteStoreInPowerMode(StoreContract):
    def open_store(self, directory: str, schema: Schema) -> Store:
        return SqliteStore(directory, schema, durability="power")


class TestMemoryBodies(BodiesContract):
    lasts = False

    def open_bodies(self, directory: str) -> BlobStore:
        return MemoryBodies()


class TestDirectoryBodies(BodiesContract):
    def open_bodies(self, directory: str) -> BlobStore:
        return DirectoryBodies(directory + "/blobs")
