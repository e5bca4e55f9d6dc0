from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effects.snapshot_tools.snapshot_workspace import known_repository
from tests.servers.mcp.server_process import Peer, on_stdio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return known_repository(tmp_path / "repo")


@pytest.fixture
def peer(root: Path, tmp_path: Path) -> Iterator[Peer]:
    with on_stdio(root, tmp_path / "home") as found:
        found.greet()
        yield found
