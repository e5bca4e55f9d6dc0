"""A bench for every test of history, whose store is sound when the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benches import Bench, open_bench
from mulligan.history.schema import SCHEMA
from mulligan.store.verify import verify


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tmp_path)
    yield bench
    assert list(verify(bench.desk.ledger.store, SCHEMA)) == []
    bench.close()
