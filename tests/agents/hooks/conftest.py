from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.hooks.hooked_workspace import HookedWorkspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[HookedWorkspace]:
    root, home = tmp_path / "project", tmp_path / "home"
    root.mkdir()
    home.mkdir()
    (root / "a.txt").write_text("one\ntwo\n")
    (root / ".env").write_text("KEY=1\n")
    (root / ".gitignore").write_text(".env\n")
    (root / "gone.txt").write_text("stay\n")
    made = HookedWorkspace(root, home, tmp_path / "store")
    yield made
    made.stop()
