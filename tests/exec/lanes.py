"""Which cases of the shell tests run in the fast lane. Apart from `kinds`, which also runs where there is no pytest."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet

from tests.exec.change_kinds import ONE_OF_EACH, Kind


def lane(strategy: str, kind: Kind, *values: object) -> ParameterSet:
    """A case for `parametrize`, in the slow lane unless the fast lane tries this kind with this strategy."""
    fast = strategy == "notify" or kind.name in ONE_OF_EACH
    return pytest.param(*values, marks=() if fast else pytest.mark.slow)
