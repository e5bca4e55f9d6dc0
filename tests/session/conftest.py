"""A workspace with a store of its own, and a session in it; and one with several roots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mulligan.opening as opening
from mulligan.effects.session import Session
from mulligan.history.schema import SCHEMA
from mulligan.store.verify import verify
from session.yards import Yard


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[opening.Mulligan]:
    (tmp_path / "work").mkdir()
    with opening.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


@pytest.fixture
def session(opened: opening.Mulligan) -> Session:
    return opened.session("s")


@pytest.fixture
def work(opened: opening.Mulligan) -> Path:
    return Path(opened.root)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    found = Yard(tmp_path)
    yield found
    assert list(verify(found.opened.store, SCHEMA)) == []
    found.opened.close()
