"""Tools for tests of your own agents: a model without network, fault plans, a simulated disk, a seeded world, builders.

Names are loaded when first used: only `FaultyVfs` needs apsw.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mulligan.testing.agents import (
        create_execution_state,
        execute_tool,
        execute_via_claude_sdk,
        execute_via_litellm,
        execute_via_openai,
        snapshots_equivalent,
    )
    from mulligan.testing.builders import (
        Dir,
        File,
        HostPerson,
        Link,
        Person,
        Tree,
        as_tree,
        contents_of,
        plant,
        tree_of,
    )
    from mulligan.testing.faults import Crash, FaultPlan, FaultyVfs, steps_of
    from mulligan.testing.simulated_disk import SimulatedDisk
    from mulligan.testing.world import Scheduler, Seed, SeededIds, SteppingClock, Stuck, World

__all__ = [
    "Crash",
    "Dir",
    "FaultPlan",
    "FaultyVfs",
    "File",
    "HostPerson",
    "Link",
    "Person",
    "Scheduler",
    "Seed",
    "SeededIds",
    "SimulatedDisk",
    "SteppingClock",
    "Stuck",
    "Tree",
    "World",
    "as_tree",
    "contents_of",
    "create_execution_state",
    "execute_tool",
    "execute_via_claude_sdk",
    "execute_via_litellm",
    "execute_via_openai",
    "plant",
    "snapshots_equivalent",
    "steps_of",
    "tree_of",
]

_HOMES = {
    "agents": (
        "create_execution_state execute_tool snapshots_equivalent"
        " execute_via_claude_sdk execute_via_litellm execute_via_openai"
    ),
    "builders": "Dir File HostPerson Link Person Tree as_tree contents_of plant tree_of",
    "faults": "Crash FaultPlan FaultyVfs steps_of",
    "simulated_disk": "SimulatedDisk",
    "world": "Scheduler Seed SeededIds SteppingClock Stuck World",
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
