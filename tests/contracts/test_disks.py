"""The disk contract, bound to the real disk and to the simulated one, and what only one of them can do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from mulligan.testing import DiskContract, FaultPlan, HostPerson, SimulatedDisk, plant, tree_of
from mulligan.testing.builders import Sketch
from mulligan.testing.disk_bench import Scene
from mulligan.workspace.disk import HostDisk


@contextmanager
def host_scene(sketch: Sketch, plan: FaultPlan | None = None) -> Iterator[Scene]:
    plan = plan or FaultPlan()
    with tempfile.TemporaryDirectory(prefix="mulligan-disk-") as directory:
        root = plant(directory + "/root", sketch)
        disk = HostDisk(root, steps=plan)
        try:
            yield Scene(disk, HostPerson(root), plan, lambda: tree_of(root))
        finally:
            disk.close()


@pytest.mark.req("D3.disk_steps_named", "D19.contract_suites")
class TestHostDisk(DiskContract):
    def scene(self, sketch: Sketch, plan: FaultPlan | None = None) -> AbstractContextManager[Scene]:
        return host_scene(sketch, plan)


@pytest.mark.req("D3.simulated_disk", "D3.disk_steps_named", "D19.contract_suites")
class TestSimulatedDisk(DiskContract):
    @contextmanager
    def scene(self, sketch: Sketch, plan: FaultPlan | None = None) -> Iterator[Scene]:
        plan = plan or FaultPlan()
        disk = SimulatedDisk(sketch, steps=plan)
        yield Scene(disk, disk.person, plan, disk.tree)
