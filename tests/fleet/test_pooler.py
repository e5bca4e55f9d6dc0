"""The store contract through PgBouncer in transaction mode, where each transaction may get another connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mulligan.store.journal import Schema
from mulligan.store.postgres import PostgresStore
from tests.contracts.store_contract import LifecycleContract, TransactionContract
from tests.fleet.servers import Postgres, has_pooler, pooler
from tests.fleet.test_contracts import SchemaForEachDirectory, schema_of

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def pooler_port(postgres: Postgres) -> Iterator[int]:
    with pooler(postgres) as port:
        yield port


if has_pooler():

    class TestThroughAPooler(SchemaForEachDirectory, TransactionContract, LifecycleContract):
        @pytest.fixture(autouse=True)
        def _pooler(self, pooler_port: int) -> None:
            self.port = pooler_port

        def open_store(self, directory: str, schema: Schema) -> PostgresStore:
            url = self.server.url(port=self.port, schema=schema_of(directory))
            return PostgresStore(url, schema, local=directory)
