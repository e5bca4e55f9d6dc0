"""What the parts of the store contract share: open a store, fill it, use it from another thread."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from mulligan.store.journal import Schema
from mulligan.store.protocol import Store
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing

TIMEOUT_S = 60.0
"""A test that waits longer than this for another thread fails: the thread hangs."""

R = TypeVar("R")

BOX = Thing("a", 1, "box", 5, b"\x00\xff")
"""A row with a value in every column."""

contract_settings = settings(
    max_examples=40,
    deadline=None,
    # One suite is bound to many engines on purpose, and opening a store in a real directory takes its time.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class StoreContractBase(ABC):
    lasts = True
    """Whether the store keeps its content when it is closed and opened again."""

    @abstractmethod
    def open_store(self, directory: str, schema: Schema) -> Store:
        """Open the engine under test in this directory. Opened again there, it must be the same store."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with self.fresh() as store:
            yield store

    @pytest.fixture
    def directory(self) -> Iterator[str]:
        with self.scratch() as directory:
            yield directory

    @contextmanager
    def fresh(self) -> Iterator[Store]:
        """An empty store, closed at the end of the block."""
        with self.scratch() as directory:
            store = self.open_store(directory, CONTRACT_SCHEMA)
            try:
                yield store
            finally:
                store.close()

    @contextmanager
    def scratch(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="mulligan-contract-") as directory:
            yield directory

    def fill(self, store: Store, *rows: Thing) -> None:
        """Put the rows in one transaction."""
        with store.write() as tx:
            for row in rows:
                tx.put(THINGS, row)

    def things(self, store: Store) -> list[Thing]:
        with store.read() as tx:
            return tx.select(THINGS)

    def in_other_thread(self, act: Callable[[], R]) -> R:
        """The result of `act` on another thread. The test fails if that thread waits for this one."""
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(act).result(TIMEOUT_S)
        finally:
            pool.shutdown(wait=False)
