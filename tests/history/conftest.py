"""A workspace for every test of history, whose store is sound when the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mulligan.history.projection import SCHEMA
from mulligan.store.verify import verify
from tests.temp_workspace import TempWorkspace, open_temp_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[TempWorkspace]:
    workspace = open_temp_workspace(tmp_path)
    yield workspace
    assert list(verify(workspace.open_root.ledger.store, SCHEMA)) == []
    workspace.close()
