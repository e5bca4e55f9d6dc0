"""Calls at the same time: claims, waiting, giving up, and that nobody disturbs anybody."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path

import pytest

from mulligan.effects.handle import CallHandle
from mulligan.effects.receipt import Receipt, text_of
from mulligan.history.log import calls_of
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import OPEN, TOUCHES
from mulligan.store.journal import REFS
from mulligan.store.protocol import CLAIMS
from mulligan.store.verify import verify
from mulligan.testing import contents_of, plant, tree_of
from mulligan.values.canonical import decode
from mulligan.values.clock import FixedClock
from mulligan.values.digest import digest_of, raw_digest
from tests.temp_workspace import TempWorkspace, open_temp_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[TempWorkspace]:
    workspace = open_temp_workspace(tmp_path)
    yield workspace
    assert list(verify(workspace.open_root.ledger.store, SCHEMA)) == []
    with workspace.open_root.ledger.store.read() as tx:
        assert (tx.select(OPEN), tx.select(CLAIMS)) == ([], [])
    workspace.close()


def apart(act: Callable[[], Receipt]) -> Receipt:
    """On another thread, in a context where no call is open."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.Context().run, act).result()


def open_two(workspace: TempWorkspace) -> tuple[CallHandle, CallHandle]:
    """An older and a younger call."""
    return workspace.session("one").call(), workspace.session("two").call()


class TestClaims:
    @pytest.mark.req("D5.younger_refused_at_once", "D9.claimed_path")
    def test_the_younger_call_is_refused_at_once(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": "a"})
        older, younger = open_two(workspace)
        with older:
            older.write_file("a.txt", "older")
            with younger:
                receipt = younger.write_file("a.txt", "younger")
                assert (receipt.status, receipt.error_code) == ("conflict", "path_claimed")
                assert receipt.claimed_by == [older.id]
                refused = younger.edit_file("a.txt", "older", "younger")
                assert (refused.status, refused.error_code) == ("error", "path_claimed")
        assert contents_of(workspace.root) == {"a.txt": b"older"}

    @pytest.mark.req("D5.older_waits")
    def test_the_older_call_waits_until_the_younger_has_ended(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": "a"})
        older, younger = open_two(workspace)
        asked = threading.Event()

        def work() -> Receipt:
            asked.set()
            return older.edit_file("a.txt", "younger", "younger and older")

        with older, ThreadPoolExecutor(1) as pool:
            with younger:
                younger.write_file("a.txt", "younger")
                waiting = pool.submit(work)
                asked.wait()
            assert waiting.result().ok
        assert contents_of(workspace.root) == {"a.txt": b"younger and older"}

    @pytest.mark.req("D5.older_waits")
    def test_waiting_has_an_end(self, workspace: TempWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mulligan.history.file_changes.CLAIM_WAIT_S", 0.01)
        older, younger = open_two(workspace)
        with older, younger:
            younger.write_file("a.txt", "younger")
            assert older.write_file("a.txt", "older").error_code == "path_claimed"

    @pytest.mark.req("D5.claim_directory_conflicts_below")
    def test_a_directory_cannot_be_deleted_or_moved_while_another_call_works_below_it(
        self, workspace: TempWorkspace
    ) -> None:
        plant(workspace.root, {"d/sub/x.txt": "x", "d/y.txt": "y"})
        older, younger = open_two(workspace)
        with older:
            older.write_file("d/sub/x.txt", "older")
            with younger:
                assert younger.delete("d", recursive=True).error_code == "path_claimed"
                assert younger.move("d/sub", "elsewhere").error_code == "path_claimed"
                assert younger.delete("d/y.txt").ok
        assert contents_of(workspace.root) == {"d/sub/x.txt": b"older"}

    @pytest.mark.req("D5.claim_directory_conflicts_below")
    def test_an_empty_directory_counts_too(self, workspace: TempWorkspace) -> None:
        """What the older call means to make in it is not there yet, and is its business all the same."""
        plant(workspace.root, {"d": None})
        older, younger = open_two(workspace)
        with older:
            older.write_file("d/x.txt", "older")
            older.delete("d/x.txt")
            with younger:
                assert younger.delete("d").error_code == "path_claimed"
        assert tree_of(workspace.root).keys() == {"d"}

    @pytest.mark.req("D5.claim_directory_conflicts_below")
    @pytest.mark.parametrize("command", ["rm -rf d", "mv d elsewhere"])
    def test_nor_by_a_command(self, workspace: TempWorkspace, command: str) -> None:
        plant(workspace.root, {"d/sub/x.txt": "x"})
        older, younger = open_two(workspace)
        with older:
            older.delete("d/sub/x.txt")
            with younger:
                assert younger.exec(["sh", "-c", command], strategy="notify").exit_code != 0
            older.fail("changed its mind")
        assert contents_of(workspace.root) == {"d/sub/x.txt": b"x"}

    @pytest.mark.req("D5.claim_directory_conflicts_below")
    def test_where_a_command_could_the_bytes_are_kept_and_the_path_is_named(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"d/sub/x.txt": "only there"})
        older, younger = open_two(workspace)
        with older:
            older.delete("d/sub/x.txt")
            with younger:
                assert younger.exec(["rm", "-r", "d"], strategy="watch").ok
            older.fail("changed its mind")
        assert older.conflicts == ["d/sub/x.txt"]
        with workspace.open_root.ledger.store.read() as tx:
            assert [row.journal for row in tx.select(REFS, {"digest": raw_digest(digest_of(b"only there"))})] == [
                "s:one"
            ]

    @pytest.mark.req("D5.claim_directory_conflicts_below")
    def test_no_call_works_below_a_directory_that_another_call_has_deleted(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"d/x.txt": "x"})
        older, younger = open_two(workspace)
        with older:
            older.delete("d", recursive=True)
            with younger:
                receipt = younger.write_file("d/new.txt", "n", create_parents=True)
                assert receipt.error_code == "path_claimed"
            older.fail("changed its mind")
        assert contents_of(workspace.root) == {"d/x.txt": b"x"}

    def test_what_was_claimed_with_all_below_it_stays_claimed_so(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"d/x.txt": "x"})
        older, younger = open_two(workspace)
        with older:
            older.delete("d", recursive=True)
            older.mkdir("d")
            with younger:
                assert younger.write_file("d/y.txt", "y").error_code == "path_claimed"

    @pytest.mark.req("D5.claims_sorted_one_transaction")
    def test_an_effect_gets_all_its_places_or_none(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"s/a": "a", "s/b": "b"})
        older, younger = open_two(workspace)
        with older:
            older.write_file("s/b", "older")
            with younger:
                assert younger.move("s", "t").error_code == "path_claimed"
                with workspace.open_root.ledger.store.read() as tx:
                    assert {claim.call for claim in tx.select(CLAIMS)} == {older.id}

    def test_neighbours_with_a_common_beginning_do_not_meet(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"d/x": "x", "d.txt": "t", "d-e/y": "y", "d0": "z"})
        older, younger = open_two(workspace)
        with older:
            older.delete("d", recursive=True)
            with younger:
                assert all(younger.write_file(path, "ok").ok for path in ("d.txt", "d-e/y", "d0"))


ENDS = [("good", "good"), ("good", "bad"), ("bad", "good"), ("bad", "bad")]
ORDERS = [tuple("A" if i in first else "B" for i in range(8)) for first in combinations(range(8), 4)]


class TestInterleavings:
    @pytest.mark.req("W14.overlapping_calls", "D5.parallel_calls")
    @pytest.mark.parametrize("ends", ENDS, ids="-".join)
    def test_two_calls_never_disturb_each_other(self, workspace: TempWorkspace, ends: tuple[str, str]) -> None:
        """In all 70 orders of four steps each: what succeeds stays, what fails leaves nothing."""
        end_of = dict(zip("AB", ends, strict=True))
        for number, order in enumerate(ORDERS):
            folder = f"case{number}"
            plant(workspace.root / folder, {"A": "old A", "B": "old B", "both/A": "in A", "both/B": "in B"})
            play(workspace, folder, order, end_of)
            assert contents_of(workspace.root / folder) == expected(end_of), order

    @pytest.mark.req("W14.overlapping_calls")
    def test_three_endings_of_one_shared_directory(self, workspace: TempWorkspace) -> None:
        for number, (first, second) in enumerate(product(("good", "bad"), repeat=2)):
            folder = f"shared{number}"
            (workspace.root / folder).mkdir()
            one, two = workspace.session("one").call(), workspace.session("two").call()
            with one:
                one.write_file(f"{folder}/d/one", "1", create_parents=True)
                with two:
                    two.write_file(f"{folder}/d/two", "2")
                    if second == "bad":
                        two.fail("bad")
                if first == "bad":
                    one.fail("bad")
            kept = {"d/one": b"1"} if first == "good" else {}
            assert contents_of(workspace.root / folder) == kept | ({"d/two": b"2"} if second == "good" else {})


def play(workspace: TempWorkspace, folder: str, order: tuple[str, ...], end_of: dict[str, str]) -> None:
    actors = {name: actor(workspace, folder, name, end_of[name]) for name in "AB"}
    for name in order:
        next(actors[name], None)


def actor(workspace: TempWorkspace, folder: str, name: str, end: str) -> Iterator[None]:
    call = workspace.session(name).call()
    context = contextvars.Context()
    context.run(call.__enter__)
    context.run(call.write_file, f"{folder}/{name}", f"new {name}")
    yield
    context.run(call.delete, f"{folder}/both/{name}")
    yield
    context.run(call.write_file, f"{folder}/made by {name}", name)
    yield
    if end == "bad":
        call.fail("bad")
    context.run(call.__exit__, None, None, None)
    yield


def expected(end_of: dict[str, str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, end in end_of.items():
        good = {name: b"new " + name.encode(), f"made by {name}": name.encode()}
        files |= good if end == "good" else {name: b"old " + name.encode(), f"both/{name}": b"in " + name.encode()}
    return files


class TestThreads:
    THREADS = 16
    CALLS = 1_000
    COUNTERS = 8

    @pytest.mark.req("W13.parallel_snapshots", "D5.parallel_calls")
    def test_sixteen_threads_and_a_thousand_calls_lose_no_update(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {f"count-{i}.txt": "0" for i in range(self.COUNTERS)})
        tickets = iter(range(self.CALLS))
        lock = threading.Lock()
        refused: list[str] = []

        def work(number: int) -> int:
            session, done = workspace.session(f"s{number % 4}"), 0
            while True:
                with lock:
                    ticket = next(tickets, None)
                if ticket is None:
                    return done
                paths = f"count-{ticket % self.COUNTERS}.txt", f"own-{number}.txt"
                while not increment(session.call(), *paths, refused):
                    pass
                done += 1

        with ThreadPoolExecutor(self.THREADS) as pool:
            counts = list(pool.map(work, range(self.THREADS)))
        assert sum(counts) == self.CALLS
        counted = {f"count-{i}.txt": str(self.CALLS // self.COUNTERS).encode() for i in range(self.COUNTERS)}
        assert counted.items() <= contents_of(workspace.root).items()
        assert set(refused) <= {"path_claimed", "stale_base"}
        with workspace.open_root.ledger.store.read() as tx:
            rows = list(calls_of(tx, workspace.open_root, None))
        assert {row.status for row in rows} <= {"committed", "aborted"}
        assert len([row for row in rows if row.status == "committed"]) == self.CALLS
        assert [row for row in rows if row.external] == []


def increment(call: CallHandle, counter: str, own: str, refused: list[str]) -> bool:
    """One call: count up in the shared file and write one of its own. False: somebody was faster."""
    with call:
        assert call.write_file(own, call.id).ok
        seen = text_of(call.read_file(counter).content)
        assert seen is not None
        receipt = call.write_file(counter, str(int(seen) + 1), expected_digest=digest_of(seen.encode()))
        if not receipt.ok:
            refused.append(receipt.error_code)
            call.fail(receipt.error_code)
        return receipt.ok


@pytest.mark.req("H15.unique_temp_names")
def test_names_of_drafts_never_meet(tmp_path: Path) -> None:
    """Many calls in one directory at one and the same moment, on files that differ in their ending only."""
    workspace = open_temp_workspace(tmp_path, clock=FixedClock(datetime(2026, 1, 1, tzinfo=UTC)))
    with ExitStack() as open_calls:
        for number in range(40):
            call = open_calls.enter_context(workspace.session(f"s{number % 3}").call())
            call.write_file(f"{number}.txt", "x")
            call.write_file(f"{number}.rs", "y")
        with workspace.open_root.ledger.store.read() as tx:
            drafts = [name for row in tx.select(TOUCHES) for name in decode(row.drafts)]
    assert len(drafts) == len(set(drafts)) == 80


def test_nor_do_they_within_a_call_that_comes_back_to_what_it_has_touched(workspace: TempWorkspace) -> None:
    """A draft that is taken for another path's would be put there by whoever recovers the call."""
    plant(workspace.root, {"d/c.txt": "c"})
    with workspace.session().call() as call:
        assert (
            call.write_file("d/c.txt", "").ok and call.delete("d", recursive=True).ok and call.write_file("a", "a").ok
        )
        with workspace.open_root.ledger.store.read() as tx:
            ordinals = [row.ordinal for row in tx.select(TOUCHES)]
    assert sorted(ordinals) == [0, 1, 2]
