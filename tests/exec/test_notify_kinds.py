"""What `notify` tells beforehand is enough to put every kind of change back, byte for byte and mode for mode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.exec.change_kinds import KINDS, Kind, not_brought_back
from tests.exec.unprivileged_user import NOBODY, run_as_nobody


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_it_comes_back(kind: Kind, tmp_path: Path) -> None:
    assert not_brought_back(kind, os.fsencode(os.path.realpath(tmp_path))) == {}


@pytest.mark.req("D7.notify_unprivileged")
def test_all_of_them_come_back_for_an_unprivileged_user() -> None:
    last = run_as_nobody("tests.exec.change_kinds").splitlines()
    assert last == [f"{len(KINDS)} kinds as {NOBODY if os.geteuid() == 0 else os.geteuid()}"]
