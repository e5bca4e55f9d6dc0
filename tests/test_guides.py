"""Every piece of Python in these guides runs, one after the other as they stand, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


@pytest.mark.parametrize("guide", ["bundles", "roots", "sessions", "tokens"])
def test_the_guide_runs(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    pieces = re.findall(r"```python\n(.*?)```", (GUIDES / f"{guide}.md").read_text("utf-8"), re.DOTALL)
    assert pieces
    names: dict[str, Any] = {"__name__": __name__}
    for number, piece in enumerate(pieces):
        exec(compile(piece, f"{guide}.md piece {number}", "exec", dont_inherit=True), names)
    if "opened" in names:
        names["opened"].close()
