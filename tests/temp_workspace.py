"""A workspace and a store of its own for one test: what `mulligan.open` makes, with every part at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mulligan.boundary.capability import UNLIMITED, Capability
from mulligan.boundary.policy import NO_POLICY, Policy
from mulligan.boundary.verdict import Boundary
from mulligan.effects.session import DurableSession
from mulligan.files.disk import HostDisk, Steps
from mulligan.history.ledger import Ledger
from mulligan.history.open_root import OpenRoot
from mulligan.history.projection import SCHEMA
from mulligan.history.recovery import Recovered, recover
from mulligan.store.journal import Journal
from mulligan.store.protocol import Durability
from mulligan.store.sqlite import SqliteStore
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.ids import IdSource, SessionId, SystemIds


@dataclass
class TempWorkspace:
    """`root` is the workspace, `home` the store's directory beside it."""

    root: Path
    home: Path
    open_root: OpenRoot
    recovered: list[Recovered]

    def session(
        self, name: str = "default", *, capability: Capability = UNLIMITED, policy: Policy = NO_POLICY
    ) -> DurableSession:
        return DurableSession(self.open_root, SessionId(name), Boundary(str(self.root), capability, policy))

    def close(self) -> None:
        """Any number of times."""
        self.open_root.close()
        self.open_root.ledger.store.close()


def open_temp_workspace(
    base: Path,
    *,
    steps: Steps | None = None,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    durability: Durability = "process",
) -> TempWorkspace:
    """Open, or open again, the workspace `base/work` with the store `base/home`; recovers first, like every door."""
    root, home = base / "work", base / "home"
    root.mkdir(parents=True, exist_ok=True)
    store = SqliteStore(str(home), SCHEMA, durability=durability)
    ledger = Ledger(store, Journal(SCHEMA), clock=clock or SystemClock(), ids=ids or SystemIds())
    open_root = OpenRoot(ledger, HostDisk(str(root), steps=steps))
    workspace = TempWorkspace(root, home, open_root, recover(open_root))
    _left_open.append(workspace)
    return workspace


_left_open: list[TempWorkspace] = []


@contextmanager
def closing_workspaces() -> Iterator[None]:
    """Close what is opened inside and not closed: a run of thousands must not end without file descriptors."""
    before = len(_left_open)
    yield
    for workspace in _left_open[before:]:
        workspace.close()
    del _left_open[before:]
