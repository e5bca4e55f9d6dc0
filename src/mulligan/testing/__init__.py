"""Tools for tests of your own agents: a model without network, fault plans, a simulated disk, a seeded world, builders.

Names are loaded when first used: only `FaultyVfs` needs apsw.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mulligan.testing.agents import create_execution_state as create_execution_state
    from mulligan.testing.agents import execute_tool as execute_tool
    from mulligan.testing.agents import execute_via_claude_sdk as execute_via_claude_sdk
    from mulligan.testing.agents import execute_via_litellm as execute_via_litellm
    from mulligan.testing.agents import execute_via_openai as execute_via_openai
    from mulligan.testing.agents import snapshots_equivalent as snapshots_equivalent
    from mulligan.testing.builders import Dir as Dir
    from mulligan.testing.builders import File as File
    from mulligan.testing.builders import HostPerson as HostPerson
    from mulligan.testing.builders import Link as Link
    from mulligan.testing.builders import Person as Person
    from mulligan.testing.builders import Tree as Tree
    from mulligan.testing.builders import as_tree as as_tree
    from mulligan.testing.builders import contents_of as contents_of
    from mulligan.testing.builders import plant as plant
    from mulligan.testing.builders import tree_of as tree_of
    from mulligan.testing.faults import Crash as Crash
    from mulligan.testing.faults import FaultPlan as FaultPlan
    from mulligan.testing.faults import FaultyVfs as FaultyVfs
    from mulligan.testing.faults import steps_of as steps_of
    from mulligan.testing.simulated_disk import SimulatedDisk as SimulatedDisk
    from mulligan.testing.world import Scheduler as Scheduler
    from mulligan.testing.world import Seed as Seed
    from mulligan.testing.world import SeededIds as SeededIds
    from mulligan.testing.world import SteppingClock as SteppingClock
    from mulligan.testing.world import Stuck as Stuck
    from mulligan.testing.world import World as World

_NAMES_IN = {
    "agents": (
        "create_execution_state execute_tool snapshots_equivalent"
        " execute_via_claude_sdk execute_via_litellm execute_via_openai"
    ),
    "builders": "Dir File HostPerson Link Person Tree as_tree contents_of plant tree_of",
    "faults": "Crash FaultPlan FaultyVfs steps_of",
    "simulated_disk": "SimulatedDisk",
    "world": "Scheduler Seed SeededIds SteppingClock Stuck World",
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES_IN.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
