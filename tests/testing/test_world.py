"""The seeded world and the builders: the same seed, the same run; the same sketch, the same tree."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

import mulligan.testing
from mulligan.testing import (
    Dir,
    File,
    Link,
    Seed,
    SeededIds,
    SteppingClock,
    Stuck,
    World,
    as_tree,
    contents_of,
    plant,
    tree_of,
)
from mulligan.testing.builders import Node
from mulligan.testing.world import SEED_VARIABLE, Actor


def test_every_name_of_the_kit_can_be_had() -> None:
    assert [name for name in mulligan.testing.__all__ if not hasattr(mulligan.testing, name)] == []
    with pytest.raises(AttributeError):
        _ = mulligan.testing.nonsense


def test_a_stepping_clock_moves_each_time_one_looks() -> None:
    clock = SteppingClock(step=timedelta(seconds=1))
    times = [clock.now() for _ in range(3)]
    assert [later - earlier for earlier, later in pairwise(times)] == [timedelta(seconds=1)] * 2
    clock.advance(timedelta(hours=-1))
    assert clock.now() < times[0]


def test_seeded_ids_are_uuid_7_in_order_and_follow_from_the_seed() -> None:
    ids = SeededIds(5)
    born = [ids.new() for _ in range(500)]
    again = SeededIds(5)
    assert born == [again.new() for _ in range(500)] == sorted(set(born))
    assert {(UUID(one).version, UUID(one).variant) for one in born} == {(7, UUID(born[0]).variant)}
    assert SeededIds(6).new() != born[0]


def test_a_failure_names_the_seed_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "77")
    with pytest.raises(LookupError) as failed, Seed.chosen(otherwise=1):
        raise LookupError
    assert failed.value.__notes__ == [f"Repeat with {SEED_VARIABLE}=77"]
    monkeypatch.delenv(SEED_VARIABLE)
    assert Seed.chosen(otherwise=1) == Seed(1)


def test_the_same_seed_gives_the_same_interleaving_and_others_give_others() -> None:
    def run(number: int) -> list[str]:
        world = World(Seed(number))
        world.scheduler.run({name: _steps(5) for name in "abc"})
        return world.scheduler.trace

    assert run(1) == run(1)
    assert len({tuple(run(number)) for number in range(10)}) > 5
    assert sorted(run(3)) == sorted("abc" * 6)


def _steps(count: int) -> Actor:
    for _ in range(count):
        yield None


def test_an_actor_waits_for_its_condition_and_a_circle_is_found() -> None:
    done: list[str] = []

    def first() -> Actor:
        yield lambda: "second" in done
        done.append("first")

    def second() -> Actor:
        yield None
        done.append("second")

    World(Seed(1)).scheduler.run({"first": first(), "second": second()})
    assert done == ["second", "first"]
    with pytest.raises(Stuck):
        World(Seed(1)).scheduler.run({"first": _never(), "second": _never()})


def _never() -> Actor:
    yield lambda: False


def test_a_sketch_planted_is_the_tree_found(tmp_path: Path) -> None:
    sketch: dict[str, Node | str | bytes | None] = {
        "text": "x",
        "bin/run": File(b"\0\xff", 0o755, 1_000_000_000),
        "empty": None,
        "deep/er/link": Link("../../nowhere"),
        "closed": Dir(0o700, 2_000_000_000),
        "\udcff": b"odd name",
    }
    plant(tmp_path / "root", sketch)
    assert tree_of(tmp_path / "root") == as_tree(sketch | {"bin/run": File(b"\0\xff", 0o755), "closed": Dir(0o700)})
    timed = tree_of(tmp_path / "root", times=True)
    assert (timed["bin/run"], timed["closed"]) == (sketch["bin/run"], sketch["closed"])
    assert contents_of(tmp_path / "root") == {"text": b"x", "bin/run": b"\0\xff", "\udcff": b"odd name"}
    assert list(as_tree(sketch)) == sorted(as_tree(sketch), key=os.fsencode)
