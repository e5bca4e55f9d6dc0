"""Bringing a store from an older format to ours: forward only, one step a version, all steps in one transaction.

A step is written once, when the format changes, and never edited after its release. It speaks SQL of its own: the
tables declared in the code are those of today, not those it starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import apsw

from mulligan.values.faults import fault

Step: TypeAlias = Callable[[apsw.Connection], None]

SCHEMA_VERSION = 1

STEPS: Mapping[int, Step] = MappingProxyType({})
"""For each older version, the step that leads to the next one."""


def migrate(connection: apsw.Connection, *, to: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS) -> None:
    """Run what is missing, in the caller's transaction. Raises `store_unreadable` if a step no longer exists."""
    version = int(connection.pragma("user_version"))
    for stage in range(version, to):
        step = steps.get(stage)
        if step is None:
            raise fault("store_unreadable", f"This store has format {version}, which this Mulligan no longer reads.")
        step(connection)
    if version < to:
        connection.pragma("user_version", to)
