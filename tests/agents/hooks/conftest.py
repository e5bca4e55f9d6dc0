from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_room.hooks.people import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    root, home = tmp_path / "project", tmp_path / "home"
    root.mkdir()
    home.mkdir()
    (root / "a.txt").write_text("one\ntwo\n")
    (root / ".env").write_text("KEY=1\n")
    (root / ".gitignore").write_text(".env\n")
    (root / "gone.txt").write_text("stay\n")
    made = Site(root, home, tmp_path / "store")
    yield made
    made.stop()
