"""A workspace and a store of its own for one test: what `mulligan.open` makes, with every part at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mulligan.boundary.capability import UNLIMITED, Capability
from mulligan.boundary.policy import NO_POLICY, Policy
from mulligan.boundary.verdict import Boundary
from mulligan.effects.session import Session
from mulligan.history.desk import Desk
from mulligan.history.ledger import Ledger
from mulligan.history.recovery import Recovered, recover
from mulligan.history.schema import SCHEMA
from mulligan.store.journal import Journal
from mulligan.store.protocol import Durability
from mulligan.store.sqlite import SqliteStore
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.ids import IdSource, SessionId, SystemIds
from mulligan.workspace.disk import HostDisk, Steps


@dataclass
class Bench:
    """`root` is the workspace, `home` the store's directory beside it."""

    root: Path
    home: Path
    desk: Desk
    recovered: list[Recovered]

    def session(
        self, name: str = "default", *, capability: Capability = UNLIMITED, policy: Policy = NO_POLICY
    ) -> Session:
        return Session(self.desk, SessionId(name), Boundary(str(self.root), capability, policy))

    def close(self) -> None:
        """Any number of times."""
        self.desk.close()
        self.desk.ledger.store.close()


def open_bench(
    base: Path,
    *,
    steps: Steps | None = None,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    durability: Durability = "process",
) -> Bench:
    """Open, or open again, the workspace `base/work` with the store `base/home`; recovers first, like every door."""
    root, home = base / "work", base / "home"
    root.mkdir(parents=True, exist_ok=True)
    store = SqliteStore(str(home), SCHEMA, durability=durability)
    ledger = Ledger(store, Journal(SCHEMA), clock=clock or SystemClock(), ids=ids or SystemIds())
    desk = Desk(ledger, HostDisk(str(root), steps=steps))
    bench = Bench(root, home, desk, recover(desk))
    _left_open.append(bench)
    return bench


_left_open: list[Bench] = []


@contextmanager
def closing_all() -> Iterator[None]:
    """Close what is opened inside and not closed: a run of thousands must not end without file descriptors."""
    before = len(_left_open)
    yield
    for bench in _left_open[before:]:
        bench.close()
    del _left_open[before:]
