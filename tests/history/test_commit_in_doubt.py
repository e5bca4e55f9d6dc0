"""A commit whose outcome nobody can tell: the files stay as they are until the store has been asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from mulligan.boundary.verdict import Boundary
from mulligan.effects.session import DurableSession
from mulligan.files.disk import HostDisk
from mulligan.history.ledger import Ledger
from mulligan.history.open_root import OpenRoot
from mulligan.history.projection import SCHEMA
from mulligan.history.recovery import recover
from mulligan.history.tables import CALLS, OPEN
from mulligan.store.journal import Journal
from mulligan.store.sqlite import SqliteStore
from mulligan.store.verify import verify
from mulligan.values.clock import SystemClock
from mulligan.values.errors import InternalError, MulliganError, fault
from mulligan.values.ids import SessionId, SystemIds
from tests.history.killed_process import in_child
from tests.temp_workspace import TempWorkspace, open_temp_workspace


class LosingStore(SqliteStore):
    """A store whose connection is lost once, at a COMMIT: before it was published, or after; and maybe for longer."""

    cut: Literal["before", "after"] | None = None
    stays_away = False
    reachable = True

    def _end(self, tx: Any, *, writable: bool, failed: bool) -> None:
        cut = self.cut if writable and not failed else None
        super()._end(tx, writable=writable, failed=failed or cut == "before")
        if cut is not None:
            self.cut, self.reachable = None, not self.stays_away
            raise fault("io_error", "The connection was lost at COMMIT.")

    def _begin(self, tx: Any, *, writable: bool) -> None:
        if not self.reachable:
            raise fault("io_error", "The store cannot be reached.")
        super()._begin(tx, writable=writable)


@dataclass
class World:
    workspace: TempWorkspace
    store: LosingStore

    @property
    def session(self) -> DurableSession:
        return self.workspace.session()

    def file(self) -> bytes:
        return (self.workspace.root / "f").read_bytes()

    def statuses(self) -> list[str]:
        with self.store.read() as tx:
            return [row.status for row in tx.select(CALLS) if not row.external]

    def lose(self, cut: Literal["before", "after"]) -> str:
        """Write in a call whose commit is lost so, and the store with it. What the caller is told."""
        self.store.stays_away = True
        with pytest.raises(InternalError) as told, self.session.call() as call:
            assert call.write_file("f", "ours").ok
            self.store.cut = cut
        return told.value.code


def open_world(base: Path) -> World:
    root, home = base / "work", base / "home"
    root.mkdir(parents=True, exist_ok=True)
    (root / "f").write_bytes(b"before")
    store = LosingStore(str(home), SCHEMA)
    ledger = Ledger(store, Journal(SCHEMA), clock=SystemClock(), ids=SystemIds())
    open_root = OpenRoot(ledger, HostDisk(str(root)))
    return World(TempWorkspace(root, home, open_root, recover(open_root)), store)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = open_world(tmp_path)
    yield made
    made.workspace.close()


def test_a_commit_that_was_published_counts_though_its_answer_was_lost(world: World) -> None:
    with world.session.call() as call:
        call.write_file("f", "ours")
        world.store.cut = "after"
    assert (call.status, world.file(), world.statuses()) == ("committed", b"ours", ["committed"])


def test_a_commit_that_was_not_published_is_rolled_back_once_the_store_says_so(world: World) -> None:
    with pytest.raises(InternalError), world.session.call() as call:
        call.write_file("f", "ours")
        world.store.cut = "before"
    assert (call.status, world.file(), world.statuses()) == ("aborted", b"before", ["aborted"])


@pytest.mark.req("D5.in_doubt_waits")
@pytest.mark.parametrize(
    ("how", "after", "status"), [("after", b"ours", "committed"), ("before", b"before", "aborted")]
)
def test_files_stay_until_the_store_can_be_asked_and_then_follow_its_word(
    world: World, how: Literal["before", "after"], after: bytes, status: str
) -> None:
    assert world.lose(how) == "in_doubt"
    assert world.file() == b"ours"
    world.store.reachable = True
    with world.session.call() as next_call:
        assert next_call.read_file("f").ok
    assert (world.file(), world.statuses()[0]) == (after, status)
    assert [one for one in verify(world.store, SCHEMA) if one.severity == "broken"] == []


def test_while_the_store_is_away_a_doubt_is_neither_settled_nor_forgotten(world: World) -> None:
    world.lose("before")
    for _ in range(2):
        with pytest.raises(MulliganError):
            world.session.call().__enter__().write_file("f", "more")
    assert (world.file(), len(world.workspace.open_root.ledger.doubts)) == (b"ours", 1)
    world.store.reachable = True
    with world.session.call():
        pass
    assert (world.file(), world.workspace.open_root.ledger.doubts) == (b"before", [])


@pytest.mark.parametrize(("how", "after"), [("after", b"ours"), ("before", b"before")])
def test_a_process_that_dies_in_doubt_is_settled_by_the_next_process_that_opens_the_store(
    tmp_path: Path, how: Literal["before", "after"], after: bytes
) -> None:
    def die() -> int:
        world = open_world(tmp_path)
        return 0 if world.lose(how) == "in_doubt" else 1

    assert in_child(die) == 0
    workspace = open_temp_workspace(tmp_path)
    assert (workspace.root / "f").read_bytes() == after
    workspace.close()


@pytest.mark.req("D5.recovery_other_host_marked")
def test_the_open_calls_of_a_process_on_another_host_are_left_to_it(tmp_path: Path) -> None:
    """Its life cannot be seen from here: its files are not touched, and what it claims stays claimed."""

    class Elsewhere(LosingStore):
        def is_alive(self, owner: int) -> bool | None:
            return None if owner == theirs else super().is_alive(owner)  # type: ignore[arg-type]  # an owner's number

    def die() -> int:
        workspace = open_temp_workspace(tmp_path)
        (workspace.root / "f").write_bytes(b"before")
        workspace.session().call().__enter__().write_file("f", "theirs")
        os._exit(0)

    assert in_child(die) == 0
    theirs = -1
    store = Elsewhere(str(tmp_path / "home"), SCHEMA)
    with store.read() as tx:
        (row,) = tx.select(OPEN)
    theirs = row.owner
    ledger = Ledger(store, Journal(SCHEMA), clock=SystemClock(), ids=SystemIds())
    open_root = OpenRoot(ledger, HostDisk(str(tmp_path / "work")))
    assert recover(open_root) == []
    session = DurableSession(open_root, SessionId("mine"), Boundary(str(tmp_path / "work")))
    with session.call() as call:
        told = call.write_file("f", "mine")
    assert (told.status, told.error_code) == ("conflict", "path_claimed")
    assert (tmp_path / "work" / "f").read_bytes() == b"theirs"
    theirs = -1
    assert [one.call for one in recover(open_root)] == [row.call]
    assert (tmp_path / "work" / "f").read_bytes() == b"before"
    open_root.close()
    store.close()


def test_an_abort_that_the_store_did_not_take_down_is_taken_down_before_the_next_call(world: World) -> None:
    with pytest.raises(InternalError), world.session.call() as call:
        assert call.write_file("f", "ours").ok
        world.store.cut = "before"
        call.fail("it went wrong")
    assert (world.file(), world.statuses()) == (b"before", ["open"])
    with world.session.call() as after:
        assert after.write_file("f", "again").ok
    assert (world.file(), world.statuses()) == (b"again", ["aborted", "committed"])
