from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effects.snapshot_tools.snapshot_workspace import SnapshotWorkspace, known_repository, open_snapshot_workspace


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[SnapshotWorkspace]:
    """The known repository, open."""
    with open_snapshot_workspace(known_repository(tmp_path / "repo"), tmp_path / "store") as workspace:
        yield workspace


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SnapshotWorkspace]:
    """A directory without git."""
    (tmp_path / "folder").mkdir()
    with open_snapshot_workspace(tmp_path / "folder", tmp_path / "store") as workspace:
        yield workspace
