"""One effects for each test of effects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effects.effect_session import EffectSession, open_effect_session


@pytest.fixture
def effects(tmp_path: Path) -> Iterator[EffectSession]:
    opened = open_effect_session(tmp_path)
    yield opened
    opened.workspace.close()
