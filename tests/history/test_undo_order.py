"""Undo of calls in any order, in parts or whole: in the end nothing is left over, and nothing is lost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mulligan
from mulligan.testing import contents_of, plant

Ops = Sequence[tuple[str, str, str]]

PATHS = ["x", "y", "d/z"]
BEFORE = {"y": "first line\nsecond line\nthird line\n"}
OPS = st.tuples(st.sampled_from(["write", "edit", "delete", "move"]), st.sampled_from(PATHS), st.sampled_from(PATHS))


@st.composite
def scripts(draw: st.DrawFn, *, most: int = 5) -> Ops:
    """Calls on two paths, each of which changes something."""
    ops, there = list[tuple[str, str, str]](), {"y"}
    for _ in range(draw(st.integers(1, most))):
        op = draw(st.sampled_from(possible_ops(there)))
        ops.append(op)
        there = paths_after(op, there)
    return ops


def possible_ops(there: Set[str]) -> Ops:
    paths = sorted(there)
    changes = [(verb, path, "") for path in paths for verb in ("edit", "delete")]
    return [*changes, ("write", "x", ""), ("write", "y", ""), *(("move", path, other_of(path)) for path in paths)]


def paths_after(op: tuple[str, str, str], there: Set[str]) -> set[str]:
    verb, path, other = op
    return {*there, path} if verb in ("write", "edit") else {*there} - {path} | ({other} if verb == "move" else set())


def other_of(path: str) -> str:
    return "x" if path == "y" else "y"


def every_script(length: int) -> Iterator[Ops]:
    begun: list[tuple[Ops, Set[str]]] = [((), {"y"})]
    for _ in range(length):
        begun = [((*ops, op), paths_after(op, there)) for ops, there in begun for op in possible_ops(there)]
    return (ops for ops, _ in begun)


def act(call: Any, op: tuple[str, str, str], number: int) -> None:
    verb, path, other = op
    if verb == "write":
        call.write_file(path, f"by call {number}\nsecond line\nthird line\n", create_parents=True)
    elif verb == "edit":
        call.edit_file(path, "second line", f"second line, call {number}")
    elif verb == "delete":
        call.delete(path)
    else:
        if other.startswith("d/"):
            call.mkdir("d", parents=True)
        call.move(path, other, overwrite=True)


def run(session: Any, ops: Ops) -> list[str]:
    """Each in a call of its own; those that changed something."""
    done = []
    for number, op in enumerate(ops):
        with session.call() as call:
            act(call, op, number)
        if call.changes:
            done.append(call.id)
    return done


def undo_all(session: Any, calls: Sequence[str]) -> list[str]:
    """In this order; what a conflict has kept, again, once for each call. What stays in conflict."""
    left = list(calls)
    for _ in calls:
        left = [call for call in left if not session.undo(call).ok]
    return left


def redo_all(session: Any) -> None:
    while True:
        try:
            assert session.redo().ok
        except mulligan.MulliganError as error:
            assert error.code == "nothing_to_redo"
            return


@pytest.mark.req("D6.undo_out_of_order")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ops=scripts() | st.lists(OPS, min_size=1, max_size=4), data=st.data())
def test_calls_undone_in_any_order_leave_nothing_over_and_redo_brings_all_back(ops: Ops, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as base:
        root = Path(base) / "work"
        plant(root, BEFORE)
        with mulligan.open(str(root), store=base + "/home") as m:
            session = m.session("s")
            calls = run(session, ops)
            before, after = contents_of_start(), contents_of(root)
            assert undo_all(session, data.draw(st.permutations(calls))) == []
            assert contents_of(root) == before
            redo_all(session)
            assert contents_of(root) == after


def contents_of_start() -> dict[str, bytes]:
    return {path: text.encode() for path, text in BEFORE.items()}


SCRIPTS: dict[str, Ops] = {
    "created, moved": [("write", "x", ""), ("move", "x", "d/z")],
    "created, deleted": [("write", "x", ""), ("delete", "x", "")],
    "created, edited, deleted": [("write", "x", ""), ("edit", "x", ""), ("delete", "x", "")],
    "edited, moved": [("edit", "y", ""), ("move", "y", "x")],
    "deleted, made again": [("delete", "y", ""), ("write", "y", "")],
    "moved there and back": [("move", "y", "x"), ("move", "x", "y")],
    "moved over": [("write", "x", ""), ("move", "x", "y"), ("edit", "y", "")],
    "deleted, written, deleted": [("delete", "y", ""), ("write", "y", ""), ("delete", "y", "")],
    "deleted, written, moved": [("delete", "y", ""), ("write", "y", ""), ("move", "y", "x")],
    "moved, written, moved": [("move", "y", "x"), ("write", "y", ""), ("move", "y", "x")],
    "written, moved there and back": [("write", "y", ""), ("move", "y", "x"), ("move", "x", "y")],
    "moved twice": [("write", "x", ""), ("move", "x", "y"), ("move", "y", "d/z")],
}


@pytest.mark.req("D6.undo_out_of_order")
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_order_of_undo_ends_where_it_began(tmp_path: Path, name: str) -> None:
    undo_in_every_order(tmp_path, SCRIPTS[name])


@pytest.mark.slow
@pytest.mark.req("D6.undo_out_of_order")
@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_order_of_undo_of_every_few_calls_on_two_paths_ends_where_it_began(tmp_path: Path, length: int) -> None:
    for number, ops in enumerate(every_script(length)):
        undo_in_every_order(tmp_path / str(number), ops)


def undo_in_every_order(folder: Path, ops: Ops) -> None:
    for order in permutations(range(len(ops))):
        base = folder / "".join(map(str, order))
        plant(base / "work", BEFORE)
        with mulligan.open(str(base / "work"), store=str(base / "home")) as m:
            session = m.session("s")
            calls = run(session, ops)
            after = contents_of(base / "work")
            assert undo_all(session, [calls[at] for at in order]) == [], (ops, order)
            assert contents_of(base / "work") == contents_of_start(), (ops, order)
            redo_all(session)
            assert contents_of(base / "work") == after, (ops, order)


@pytest.mark.req("D6.undo_out_of_order")
@pytest.mark.parametrize("on_conflict", ["merge", "overwrite"])
def test_undo_of_what_has_cancelled_itself_out_leaves_the_file_that_an_undo_brought_back(
    tmp_path: Path, on_conflict: Any
) -> None:
    root = tmp_path / "work"
    plant(root, BEFORE)
    with mulligan.open(str(root), store=str(tmp_path / "home")) as m:
        session = m.session("s")
        first, second, third = run(session, [("delete", "y", ""), ("write", "y", ""), ("delete", "y", "")])
        assert session.undo(first).ok
        assert contents_of(root) == contents_of_start()
        for call in (second, third):
            assert [one.outcome for one in session.undo(call, on_conflict=on_conflict).outcomes] == ["skipped"]
        assert contents_of(root) == contents_of_start()


@pytest.mark.req("D6.undo_out_of_order")
def test_what_a_person_wrote_into_a_moved_file_stays(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    with mulligan.open(str(root), store=str(tmp_path / "home")) as m:
        session = m.session("s")
        first, second = run(session, [("write", "x", ""), ("move", "x", "y")])
        (root / "y").write_text("by a person\n")
        assert session.undo(first).ok
        outcomes = {one.path: one.outcome for one in session.undo(second).outcomes}
        assert outcomes == {"x": "skipped", "y": "conflicted"}
        assert contents_of(root) == {"y": b"by a person\n"}


@pytest.mark.req("D6.undo_rest_after_paths")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ops=st.lists(OPS, min_size=1, max_size=4), data=st.data())
def test_after_undo_of_some_paths_undo_of_the_call_undoes_the_rest(ops: Ops, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as base:
        root = Path(base) / "work"
        plant(root, BEFORE)
        with mulligan.open(str(root), store=base + "/home") as m:
            session = m.session("s")
            with session.call() as call:
                for number, op in enumerate(ops):
                    act(call, op, number)
            after = contents_of(root)
            changed = [str(change.path) for change in call.changes]
            if not changed:
                return
            session.undo(call.id, paths=data.draw(st.lists(st.sampled_from(changed), min_size=1, unique=True)))
            with suppress(mulligan.MulliganError):  # the paths may have been all of it
                assert session.undo(call.id).ok
            assert contents_of(root) == contents_of_start()
            redo_all(session)
            assert contents_of(root) == after
