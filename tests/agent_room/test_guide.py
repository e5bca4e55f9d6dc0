"""Every piece of Python in the guide runs, one after the other, in one folder."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

import mulligan

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "python.md"
PIECES = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    names: dict[str, Any] = {"__name__": __name__, "random": random}
    with mulligan.open(".") as m:
        for number, piece in enumerate(PIECES):
            names |= {"m": m}
            if "rollback_to_tool" in piece:
                names["state"] = m.session("fresh").execution_state()
                names["state"].checkpoint("call_7")
            exec(compile(piece, f"python.md piece {number}", "exec", dont_inherit=True), names)
    assert not os.path.exists("a.txt")
    assert len(PIECES) == 5
