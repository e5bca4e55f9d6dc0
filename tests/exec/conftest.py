from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.temp_workspace import TempWorkspace, open_temp_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[TempWorkspace]:
    opened = open_temp_workspace(tmp_path)
    yield opened
    opened.close()
