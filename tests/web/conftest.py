from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.web.serving import Served, record, serving


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "project"


@pytest.fixture
def calls(root: Path, tmp_path: Path) -> dict[str, str]:
    """A recorded history in `root`; the ids of its calls."""
    return record(root, tmp_path / "home")


@pytest.fixture
def server(tmp_path: Path, calls: dict[str, str]) -> Iterator[Served]:
    with serving(tmp_path / "home") as found:
        yield found
