from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benches import Bench, open_bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    opened = open_bench(tmp_path)
    yield opened
    opened.close()
