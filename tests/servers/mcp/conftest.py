from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_server.wire import Peer, on_stdio
from substrate.site import known_repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return known_repository(tmp_path / "repo")


@pytest.fixture
def peer(root: Path, tmp_path: Path) -> Iterator[Peer]:
    with on_stdio(root, tmp_path / "home") as found:
        found.greet()
        yield found
