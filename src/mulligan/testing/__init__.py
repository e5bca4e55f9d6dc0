"""The shipped test kit: contract suites, fault plans, a simulated disk, a seeded world and small builders.

Bind a suite to an engine of your own with a factory and run it with pytest:

    class TestMyStore(StoreContract):
        def open_store(self, directory: str, schema: Schema) -> Store:
            return MyStore(directory, schema)

Names are loaded when first used: only the suites need pytest and hypothesis, only `FaultyVfs` needs apsw.
"""

from __future__ import annotations

import sys
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
    from mulligan.testing.bodies_contract import BodiesContract
    from mulligan.testing.builders import Dir, File, Link, Tree, as_tree, contents_of, plant, tree_of
    from mulligan.testing.disk_contract import DiskContract
    from mulligan.testing.faults import Crash, FaultPlan, steps_of
    from mulligan.testing.faulty_vfs import FaultyVfs
    from mulligan.testing.people import HostPerson, Person
    from mulligan.testing.simulated_disk import SimulatedDisk
    from mulligan.testing.store_contract import CONTRACT_SCHEMA, StoreContract
    from mulligan.testing.world import Scheduler, Seed, SeededIds, SteppingClock, Stuck, World

__all__ = [
    "CONTRACT_SCHEMA",
    "BodiesContract",
    "Crash",
    "Dir",
    "DiskContract",
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
    "StoreContract",
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
    "bodies_contract": "BodiesContract",
    "builders": "Dir File Link Tree as_tree contents_of plant tree_of",
    "disk_contract": "DiskContract",
    "faults": "Crash FaultPlan steps_of",
    "faulty_vfs": "FaultyVfs",
    "people": "HostPerson Person",
    "simulated_disk": "SimulatedDisk",
    "store_contract": "CONTRACT_SCHEMA StoreContract",
    "world": "Scheduler Seed SeededIds SteppingClock Stuck World",
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names.split()}


_SUITES = ("store", "table", "journal", "blob", "claim", "bodies", "disk", "swap")


def _let_pytest_explain() -> None:
    """A suite that is no test module itself says what differed only if pytest is told of it before its import."""
    suites = [f"{__name__}.{name}_contract" for name in _SUITES]
    import_module("pytest").register_assert_rewrite(*(suite for suite in suites if suite not in sys.modules))


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.endswith("_contract"):
        _let_pytest_explain()
    return getattr(import_module(home), name)
