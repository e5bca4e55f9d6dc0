"""What every part of the store contract stands on: how to get a store, fill it, and look from another thread."""

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
from mulligan.testing.contract_tables import CONTRACT_SCHEMA, THINGS, Thing

PATIENCE_S = 60.0
"""How long a test waits for something that must happen before it calls it a hang."""

R = TypeVar("R")

BOX = Thing("a", 1, "box", 5, b"\x00\xff")
"""A row with a value in every column."""

judged = settings(
    max_examples=40,
    deadline=None,
    # One suite is bound to many engines on purpose, and opening a store in a real directory takes its time.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class StoreBench(ABC):
    lasts = True
    """Whether the store outlives its closing and can be opened twice."""

    @abstractmethod
    def open_store(self, directory: str, schema: Schema) -> Store:
        """The engine under judgement, in a directory that is its own; opened again there, it is the same store."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with self.fresh() as store:
            yield store

    @contextmanager
    def fresh(self) -> Iterator[Store]:
        """An empty store for the length of a block, for tests that need more than one."""
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
        """All in one transaction."""
        with store.write() as tx:
            for row in rows:
                tx.put(THINGS, row)

    def things(self, store: Store) -> list[Thing]:
        with store.read() as tx:
            return tx.select(THINGS)

    def elsewhere(self, act: Callable[[], R]) -> R:
        """What `act` gives on another thread; one that waits for us is a failure."""
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(act).result(PATIENCE_S)
        finally:
            pool.shutdown(wait=False)
