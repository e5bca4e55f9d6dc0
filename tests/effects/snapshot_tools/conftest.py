from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from substrate.site import Site, known_repository, open_site


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Site]:
    """The known repository, open."""
    with open_site(known_repository(tmp_path / "repo"), tmp_path / "store") as site:
        yield site


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Site]:
    """A directory without git."""
    (tmp_path / "folder").mkdir()
    with open_site(tmp_path / "folder", tmp_path / "store") as site:
        yield site
