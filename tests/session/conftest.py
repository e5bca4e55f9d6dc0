"""A workspace with a store of its own, and a session in it; and one with several roots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mulligan.api as api
from mulligan.effects.session import DurableSession
from mulligan.history.projection import SCHEMA
from mulligan.store.verify import verify
from tests.session.mounted_roots import MountedRoots


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[api.Mulligan]:
    (tmp_path / "work").mkdir()
    with api.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


@pytest.fixture
def session(opened: api.Mulligan) -> DurableSession:
    return opened.session("s")


@pytest.fixture
def work(opened: api.Mulligan) -> Path:
    return Path(opened.root)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[MountedRoots]:
    found = MountedRoots(tmp_path)
    yield found
    assert list(verify(found.opened.store, SCHEMA)) == []
    found.opened.close()
