"""Runs the store contract on PostgreSQL, and the blob contract on PostgreSQL and S3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mulligan.store.journal import Schema
from mulligan.store.postgres import PostgresStore
from mulligan.values.digest import digest_of
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_under_test import StoreContractBase
from tests.fleet.servers import Postgres

pytestmark = pytest.mark.fleet


def schema_of(directory: str) -> str:
    """One schema for each directory of a test."""
    return "t" + digest_of(directory.encode())[7:27]


class SchemaForEachDirectory(StoreContractBase):
    """Removes the schema of a directory with the directory."""

    @pytest.fixture(autouse=True)
    def _server(self, postgres: Postgres) -> None:
        self.server = postgres

    @contextmanager
    def scratch(self) -> Iterator[str]:
        with super().scratch() as directory:
            yield directory
            self.server.run(f'DROP SCHEMA IF EXISTS "{schema_of(directory)}" CASCADE')


@pytest.mark.req("D15.one_protocol_one_suite", "D19.contract_suites")
class TestPostgresStore(SchemaForEachDirectory, StoreContract):
    def open_store(self, directory: str, schema: Schema) -> PostgresStore:
        return PostgresStore(self.server.url(schema=schema_of(directory)), schema, local=directory)
