"""The servers of a test run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.servers import Postgres, PostgresTemplate, Seaweed


@pytest.fixture(scope="session")
def postgres_template() -> Iterator[PostgresTemplate]:
    with PostgresTemplate.made() as template:
        yield template


@pytest.fixture(scope="session")
def postgres(postgres_template: PostgresTemplate) -> Iterator[Postgres]:
    """A server that tests share. A test that stops its server makes one of its own from the template."""
    with postgres_template.server("shared") as server:
        yield server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    server = Seaweed(Path(tmp_path_factory.mktemp("seaweed")))
    server.start()
    try:
        yield server
    finally:
        server.stop()
