"""Every piece of Python in the guide runs, one after the other as they stand, in one folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "python.md"
PIECES = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"__name__": __name__}
    yield found
    found["m"].close()


def test_the_code_of_the_python_guide_runs(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    for number, piece in enumerate(PIECES):
        exec(compile(piece, f"python.md piece {number}", "exec", dont_inherit=True), names)
    assert [path.name for path in Path.cwd().iterdir() if path.suffix == ".py"] == []
    assert len(PIECES) == 12
