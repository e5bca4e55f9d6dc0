"""Fault plans and power cuts of the simulated disk: the test tools have tests too."""

from __future__ import annotations

import errno
from random import Random

import pytest

from mulligan.testing import Crash, FaultPlan, File, SimulatedDisk, as_tree, steps_of
from mulligan.values.paths import RepoPath
from tests.contracts.disk_under_test import DRAFT, file_entry

HERE = RepoPath("x")


def heard(plan: FaultPlan, *steps: str) -> list[str]:
    """What each step came to, in order; a crash ends it."""
    outcomes = []
    for step in steps:
        try:
            plan.reach(step, HERE)
        except OSError as error:
            outcomes.append(errno.errorcode[error.errno or 0])
        except Crash:
            return [*outcomes, "crash"]
        else:
            outcomes.append("ok")
    return outcomes


def test_a_plan_strikes_by_count_and_by_name() -> None:
    steps = ("a", "b", "a", "b")
    assert heard(FaultPlan(), *steps) == ["ok"] * 4
    assert heard(FaultPlan().fail(errno.EIO, at=3), *steps) == ["ok", "ok", "EIO", "ok"]
    assert heard(FaultPlan().fail(errno.ENOSPC, at=2, step="b"), *steps) == ["ok", "ok", "ok", "ENOSPC"]
    assert heard(FaultPlan().fail(errno.EACCES, at=2, lasting=True), *steps) == ["ok", "EACCES", "EACCES", "EACCES"]
    assert heard(FaultPlan().crash_before(step="b"), *steps) == ["ok", "crash"]
    assert heard(FaultPlan().crash_after(step="b"), *steps) == ["ok", "ok", "crash"]


def test_a_dead_process_takes_no_further_step() -> None:
    plan = FaultPlan().crash_before()
    assert (heard(plan, "a"), heard(plan, "a"), plan.reached) == (["crash"], ["crash"], [("a", HERE)])


def test_an_act_is_called_before_its_step() -> None:
    told: list[tuple[str, str]] = []
    plan = FaultPlan().act(lambda step, path: told.append((step, path)), step="b", lasting=True)
    assert heard(plan, "a", "b", "b") == ["ok"] * 3
    assert told == [("b", "x"), ("b", "x")]
    assert steps_of(lambda plan: heard(plan, "a", "b")) == ["a", "b"]


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk({"x": "old", "d/y": "kept"})


def replaced(disk: SimulatedDisk, *, sync_file: bool, sync_dir: bool) -> None:
    with disk.resolve(HERE) as resolved:
        disk.stage_file(resolved, DRAFT, b"new content", like=file_entry(b""))
        disk.exchange(resolved, DRAFT)
        if sync_file:
            disk.sync_file(resolved)
        disk.discard(resolved, DRAFT)
        if sync_dir:
            disk.sync_dir(resolved)


def test_the_first_files_of_a_simulated_disk_are_synced(disk: SimulatedDisk) -> None:
    disk.power_cut()
    assert disk.tree() == as_tree({"x": "old", "d/y": "kept"})


@pytest.mark.parametrize(
    ("sync_file", "sync_dir", "left"),
    [(False, False, b"old"), (True, False, b"old"), (False, True, b""), (True, True, b"new content")],
)
def test_a_power_cut_takes_what_was_not_synced(
    disk: SimulatedDisk, sync_file: bool, sync_dir: bool, left: bytes
) -> None:
    replaced(disk, sync_file=sync_file, sync_dir=sync_dir)
    disk.power_cut()
    assert disk.restarted().tree() == as_tree({"x": left, "d/y": "kept"})


def test_a_power_cut_by_chance_leaves_any_part_but_never_less_than_what_was_synced() -> None:
    seen: set[bytes] = set()
    for seed in range(60):
        disk = SimulatedDisk({"x": "old"})
        replaced(disk, sync_file=False, sync_dir=False)
        disk.power_cut(Random(seed))
        node = disk.tree()["x"]
        assert isinstance(node, File)
        seen.add(node.content)
    assert b"old" in seen and any(b"new content".startswith(one) and one != b"" for one in seen)


def test_writing_in_place_without_sync_can_be_torn() -> None:
    disk = SimulatedDisk({"x": "OLDOLDOLD"})
    with disk.resolve(HERE) as resolved:
        disk.write_in_place(resolved, b"newnewnew")
    disk.power_cut(Random(3))
    node = disk.tree()["x"]
    assert isinstance(node, File)
    assert {chr(c) for c in node.content} <= set("OLDnew") and len(node.content) == 9


def test_new_directories_and_removed_names_come_and_go_with_their_parent(disk: SimulatedDisk) -> None:
    with disk.resolve(RepoPath("new")) as resolved:
        disk.make_dir(resolved, 0o755)
        disk.power_cut()
        assert disk.tree() == as_tree({"x": "old", "d/y": "kept"})
        disk.make_dir(resolved, 0o755)
        disk.sync_dir(resolved)
    with disk.resolve(RepoPath("d/y")) as resolved:
        disk.discard(resolved, b"y")
        disk.power_cut()
        assert disk.tree() == as_tree({"x": "old", "d/y": "kept", "new": None})
        disk.discard(resolved, b"y")
        disk.sync_dir(resolved)
        disk.power_cut()
        assert disk.tree() == as_tree({"x": "old", "d": None, "new": None})
