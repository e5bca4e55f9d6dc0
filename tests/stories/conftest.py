from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stories.user_project import UserProject, make_project


@pytest.fixture
def project(tmp_path: Path) -> UserProject:
    return make_project(Path(os.path.realpath(tmp_path)))
