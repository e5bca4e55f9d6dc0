"""A workspace to stand in, with a store of its own, and the command line on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mulligan.cli import run as run_cli
from tests.cli.cli_result import Done, Run


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MULLIGAN_CALL", raising=False)
    return folder


@pytest.fixture
def run(work: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: str) -> Done:
        capfd.readouterr()
        code = run_cli(arguments)
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return run_it
