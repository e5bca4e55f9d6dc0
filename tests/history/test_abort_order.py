"""The order in which an abort puts things back: newest first, as far as directories allow, and always wholly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mulligan.effects.handle import CallHandle
from mulligan.files.disk import Image
from mulligan.files.replace import TargetEntry
from mulligan.history.call import current_call
from mulligan.history.undo_log import Intent
from mulligan.testing import FaultPlan, contents_of, plant, tree_of
from mulligan.values.entries import DirEntry
from mulligan.values.paths import RepoPath
from tests.history.killed_process import KILLED, in_child
from tests.temp_workspace import closing_workspaces, open_temp_workspace


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    with closing_workspaces():
        yield


def paths_reached(plan: FaultPlan) -> list[str]:
    """Each path once, where it was first acted on."""
    return list(dict.fromkeys(str(path) for _, path in plan.reached))


def work(call: CallHandle) -> None:
    """In no order of names, with one file touched first and last."""
    receipts = [
        call.write_file("m", "first"),
        call.write_file("a", "second"),
        call.write_file("z", "third"),
        call.delete("k"),
        call.write_file("m", "again"),
    ]
    assert all(receipt.ok for receipt in receipts), receipts


SCENE = {"a": "a", "k": "k", "m": "m"}


@pytest.mark.req("D5.abort_newest_first")
def test_what_was_changed_last_is_restored_first_and_nothing_else_is_touched(tmp_path: Path) -> None:
    plan = FaultPlan()
    workspace = open_temp_workspace(tmp_path, steps=plan)
    plant(workspace.root, {**SCENE, "other": "stays"})
    before = tree_of(workspace.root)
    with workspace.session().call() as call:
        work(call)
        plan.reached.clear()
        call.fail("on purpose")
    assert paths_reached(plan) == ["m", "k", "z", "a"]
    assert tree_of(workspace.root) == before


@pytest.mark.req("D5.abort_newest_first")
def test_so_does_what_a_dead_process_did(tmp_path: Path) -> None:
    """By when it first touched a path: that is all a dead process has left on record."""

    def die() -> int:
        with open_temp_workspace(tmp_path).session().call() as call:
            work(call)
            os._exit(KILLED)

    plant(tmp_path / "work", SCENE)
    assert in_child(die) == KILLED
    plan = FaultPlan()
    workspace = open_temp_workspace(tmp_path, steps=plan)
    assert paths_reached(plan) == ["k", "z", "a", "m"]
    assert contents_of(workspace.root) == {name: text.encode() for name, text in SCENE.items()}


def set_mode(root: Path, path: str) -> None:
    """There is no effect for the mode of a directory, so as a part of the call that is being made."""

    def plan(image: Image) -> TargetEntry:
        assert isinstance(image.entry, DirEntry)
        return TargetEntry(replace(image.entry, mode=0o711))

    call = current_call()
    assert call is not None
    if (root / path).is_dir():
        call.change([Intent(RepoPath(path), plan)])


def act(root: Path, call: CallHandle, step: str) -> None:
    """A refusal of what is not possible there is an answer like any other."""
    verb, _, path = step.partition(" ")
    if verb == "chmod":
        set_mode(root, path)
    elif verb == "delete":
        call.delete(path, recursive=True)
    else:
        call.write_file(path, step, create_parents=True)


STEPS = [f"{verb} {path}" for verb in ("chmod", "delete", "write") for path in ("d", "d/e", "d/e/f", "d/g", "h")]


@example(["write h/a", "chmod h"])
@example(["chmod d", "delete d/g", "delete d"])
@example(["delete d", "write d", "delete d", "write d/g", "chmod d"])
@settings(max_examples=60)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=8))
def test_whatever_a_call_did_to_a_tree_of_directories_all_of_it_is_restored(steps: list[str]) -> None:
    with TemporaryDirectory() as base, closing_workspaces():
        workspace = open_temp_workspace(Path(base))
        plant(workspace.root, {"d/e/f": "f", "d/g": "g"})
        before = tree_of(workspace.root)
        with workspace.session().call() as call:
            for step in steps:
                act(workspace.root, call, step)
            call.fail("on purpose")
        assert (tree_of(workspace.root), call.conflicts) == (before, [])
