"""Runs the disk contract on the real disk and on the simulated one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from mulligan.files.disk import HostDisk
from mulligan.testing import FaultPlan, HostPerson, SimulatedDisk, plant, tree_of
from mulligan.testing.builders import Sketch
from tests.contracts.disk_contract import DiskContract
from tests.contracts.disk_under_test import DiskUnderTest


@contextmanager
def host_disk(sketch: Sketch, plan: FaultPlan | None = None) -> Iterator[DiskUnderTest]:
    plan = plan or FaultPlan()
    with tempfile.TemporaryDirectory(prefix="mulligan-disk-") as directory:
        root = plant(directory + "/root", sketch)
        disk = HostDisk(root, steps=plan)
        try:
            yield DiskUnderTest(disk, HostPerson(root), plan, lambda: tree_of(root))
        finally:
            disk.close()


@pytest.mark.req("D3.disk_steps_named", "D19.contract_suites")
class TestHostDisk(DiskContract):
    def open_disk(self, sketch: Sketch, plan: FaultPlan | None = None) -> AbstractContextManager[DiskUnderTest]:
        return host_disk(sketch, plan)


@pytest.mark.req("D3.simulated_disk", "D3.disk_steps_named", "D19.contract_suites")
class TestSimulatedDisk(DiskContract):
    @contextmanager
    def open_disk(self, sketch: Sketch, plan: FaultPlan | None = None) -> Iterator[DiskUnderTest]:
        plan = plan or FaultPlan()
        disk = SimulatedDisk(sketch, steps=plan)
        yield DiskUnderTest(disk, disk.person, plan, disk.tree)
