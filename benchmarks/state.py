"""The cost of typed state for a call that does not change it: with 10 items in the slices, and with 10 000.

    python benchmarks/state.py [--rounds N]

Goal: the same, at most 1.3 times, in memory and in the store. Also shown: what it costs to
append one item, and to take a snapshot.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from timing import quantile, timed_us

import mulligan
from mulligan import ExecutionState, ProviderToolCall, Session, SlicePolicy, Tool, ToolRunner, append_all

FEW, MANY, GOAL = 10, 10_000, 1.3


@dataclass(slots=True, frozen=True)
class Fact:
    number: int
    text: str = "something an agent keeps in mind"


@dataclass(slots=True, frozen=True)
class Happening:
    number: int


@dataclass(slots=True, frozen=True)
class Touched:
    number: int


def filled(session: Session, items: int) -> Session:
    session[Happening].register(Happening, append_all, policy=SlicePolicy.LOG)
    session[Fact].seed(Fact(number) for number in range(items))
    session[Happening].seed(Happening(number) for number in range(items))
    return session


@contextmanager
def in_memory(items: int) -> Iterator[Session]:
    yield filled(Session(), items)


@contextmanager
def in_the_store(items: int) -> Iterator[Session]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        with mulligan.open(str(work), store=str(Path(folder) / "store")) as m:
            yield filled(m.session(), items)


def a_tool(session: Session) -> Callable[[int], object]:
    runner = ToolRunner(ExecutionState(session), {"look": Tool("look", "", lambda: "nothing changed")}, "bench")
    return lambda number: runner.execute(ProviderToolCall(str(number), "look"))


def an_attempt(session: Session) -> Callable[[int], object]:
    def act(number: int) -> None:
        with session.attempt("look", str(number)):
            pass

    return act


def one_more(session: Session) -> Callable[[int], object]:
    return lambda number: session[Fact].append(Fact(number))


def a_snapshot(session: Session) -> Callable[[int], object]:
    return lambda number: session.snapshot()


def p50s(one: Callable[[int], object], other: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """Turn and turn about, so that a busy moment of the machine meets both."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + rounds // 10):
        for times, act in zip(found, (one, other), strict=True):
            times += timed_us(act, [number])
    return quantile(sorted(found[0][rounds // 10 :]), 0.5), quantile(sorted(found[1][rounds // 10 :]), 0.5)


CASES = {
    "a tool that changes nothing": (a_tool, True),
    "a transaction that changes nothing": (an_attempt, True),
    "a snapshot": (a_snapshot, True),
    "one more item": (one_more, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    for where, opened in (("in memory", in_memory), ("in the store", in_the_store)):
        for name, (make, has_goal) in CASES.items():
            with opened(FEW) as few, opened(MANY) as many:
                one, other = p50s(make(few), make(many), rounds)
            goal = f"(goal {GOAL})" if has_goal else ""
            print(f"{where:13} {name:36} {FEW}: {one:8.1f} us   {MANY}: {other:8.1f} us   x{other / one:.2f} {goal}")


if __name__ == "__main__":
    main()
