"""How much is kept, what goes first, and how space comes back."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

import mulligan.api
from mulligan.history.log import status_shown
from mulligan.history.plan import OnConflict
from mulligan.history.projection import SCHEMA
from mulligan.history.retention import (
    collect_garbage,
    drop_session,
    droppable,
    enforce_all_caps,
    evict_over,
    put_cap,
    session_usage,
    set_cap,
    set_store_cap,
)
from mulligan.history.tables import CALLS, PINS, PinRow
from mulligan.session.tables import session_journal
from mulligan.store.blobs import BLOBS
from mulligan.store.journal import RECORDS
from mulligan.store.protocol import META, MetaRow, Table, Tx, Value
from mulligan.store.verify import verify
from mulligan.values.canonical import decode
from mulligan.values.clock import FixedClock, SystemClock
from mulligan.values.digest import digest_of
from mulligan.values.errors import ForbiddenError, RequestError
from mulligan.values.ids import SessionId
from tests.temp_workspace import TempWorkspace, open_temp_workspace

SESSION = SessionId("default")


@pytest.fixture
def workspace(tmp_path: Path) -> TempWorkspace:
    return open_temp_workspace(tmp_path)


def noise(seed: int, size: int = 20_000) -> bytes:
    """Bytes that no packing makes smaller."""
    return Random(seed).randbytes(size)


def write(workspace: TempWorkspace, name: str, data: bytes) -> str:
    with workspace.session().call() as call:
        call.write_file(name, data)
    return call.id


def pin(workspace: TempWorkspace, call: str) -> None:
    ledger = workspace.open_root.ledger
    with ledger.store.write() as tx:
        ledger.journal.append(tx, session_journal(SESSION), "call.pinned", {"call": call}, at=ledger.now())
        assert tx.get(PINS, call) == PinRow(call)


def coverage(workspace: TempWorkspace, call: str) -> list[dict[str, str]]:
    with workspace.open_root.ledger.store.read() as tx:
        row = tx.get(CALLS, call)
    assert row is not None
    return list(decode(row.coverage))


def evicted(workspace: TempWorkspace) -> list[str]:
    with workspace.open_root.ledger.store.read() as tx:
        return [row.id for row in tx.select(CALLS) if row.evicted]


def problems(workspace: TempWorkspace) -> list[str]:
    return [one.message for one in verify(workspace.open_root.ledger.store, SCHEMA) if one.severity == "broken"]


@pytest.mark.req("D6.evict_whole_calls_oldest", "D6.evict_leaves_record")
def test_over_the_cap_whole_calls_go_oldest_first_and_leave_a_record(workspace: TempWorkspace) -> None:
    calls = [write(workspace, f"f{n}", noise(n)) for n in range(4)]
    gone = evict_over(workspace.open_root.ledger, SESSION, 45_000)
    assert gone == calls[:2] == evicted(workspace)
    with workspace.open_root.ledger.store.read() as tx:
        assert session_usage(tx, SESSION).bytes <= 45_000
        row = tx.get(CALLS, calls[0])
        assert row is not None and status_shown(row) == "evicted"
    assert problems(workspace) == []
    workspace.session().undo(calls[2])
    assert not (workspace.root / "f2").exists()


def test_an_evicted_calls_creation_can_still_be_undone_but_not_its_overwriting(workspace: TempWorkspace) -> None:
    write(workspace, "a", noise(1))
    overwriting = write(workspace, "a", noise(2))
    write(workspace, "b", b"last turn")
    evict_over(workspace.open_root.ledger, SESSION, 0)
    way = workspace.session().undo(overwriting)
    assert (way.ok, [(one.outcome, one.reason) for one in way.outcomes]) == (False, [("skipped", "evicted")])
    assert (workspace.root / "a").read_bytes() == noise(2)


@pytest.mark.req("D6.evict_spares_needed")
def test_the_newest_turn_and_pins_stay(workspace: TempWorkspace) -> None:
    pinned = write(workspace, "pinned", noise(1))
    write(workspace, "old", noise(2))
    newest = write(workspace, "new", noise(3))
    pin(workspace, pinned)
    evict_over(workspace.open_root.ledger, SESSION, 0)
    assert newest not in evicted(workspace) and pinned not in evicted(workspace)
    assert len(evicted(workspace)) == 1


@pytest.mark.req("H7.needed_preimages_pinned")
def test_bytes_that_a_person_wrote_are_evicted_with_the_call_that_recorded_them(workspace: TempWorkspace) -> None:
    saves = [noise(number) for number in range(8)]
    for number, saved in enumerate(saves):
        (workspace.root / "f").write_bytes(saved)
        newest = write(workspace, "f", noise(100 + number))
    ledger = workspace.open_root.ledger
    gone = len(evict_over(ledger, SESSION, 60_000))
    with ledger.store.read() as tx:
        kept = [ledger.blobs.has(tx, digest_of(saved)) for saved in saves]
        # What the last of them left is what the first outside edit that stays began from.
        assert 0 < gone < 8 and not any(kept[: gone - 1]) and all(kept[gone:])
        assert sum(row.stored for row in tx.select(BLOBS)) < 100_000
    assert workspace.session().undo(newest).ok and (workspace.root / "f").read_bytes() == saves[-1]
    assert problems(workspace) == []


def test_a_body_that_a_kept_call_needs_is_not_dropped_with_an_evicted_one(workspace: TempWorkspace) -> None:
    first = write(workspace, "a", noise(1))
    overwriting = write(workspace, "a", noise(2))
    write(workspace, "b", b"last turn")
    pin(workspace, overwriting)
    assert evict_over(workspace.open_root.ledger, SESSION, 0) == [first]
    assert workspace.session().undo(overwriting).ok
    assert (workspace.root / "a").read_bytes() == noise(1)


def test_a_pinned_calls_files_come_back_over_calls_that_were_evicted_since(workspace: TempWorkspace) -> None:
    write(workspace, "a", noise(0))
    pinned = write(workspace, "a", noise(1))
    pin(workspace, pinned)
    later = [write(workspace, "a", noise(n)) for n in range(2, 5)]
    write(workspace, "b", b"last turn")
    evict_over(workspace.open_root.ledger, SESSION, 0)
    assert set(later) < set(evicted(workspace))
    modes: tuple[OnConflict, ...] = ("merge", "overwrite", "refuse")
    for on_conflict in modes:
        assert workspace.session().restore(pinned, on_conflict=on_conflict).ok
        assert (workspace.root / "a").read_bytes() == noise(0)
        assert workspace.session().redo().ok


def test_undo_goes_on_past_calls_of_which_nothing_can_come_back(workspace: TempWorkspace) -> None:
    (workspace.root / "a").write_bytes(noise(0))
    pinned = write(workspace, "kept", noise(1))
    pin(workspace, pinned)
    overwriting = [write(workspace, "a", noise(n)) for n in (2, 3)]
    newest = write(workspace, "b", b"last turn")
    assert evict_over(workspace.open_root.ledger, SESSION, 0) == overwriting
    assert [workspace.session().undo().of for _ in range(2)] == [(newest,), (pinned,)]
    nothing_else = workspace.session().undo()
    assert (nothing_else.of, nothing_else.outcomes[0].reason) == ((overwriting[-1],), "evicted")


@pytest.mark.req("D6.cap_session")
def test_a_cap_applies_at_once_and_for_every_process(workspace: TempWorkspace, tmp_path: Path) -> None:
    calls = [write(workspace, f"f{n}", noise(n)) for n in range(3)]
    assert set_cap(workspace.open_root.ledger, SESSION, 25_000) == 2**30
    assert evicted(workspace) == calls[:2]
    assert set_cap(open_temp_workspace(tmp_path).open_root.ledger, SESSION, 2**30) == 25_000


@pytest.mark.parametrize("cap", [2e9, 1.5, "9", None, True])
def test_a_cap_that_is_no_whole_number_is_refused_and_changes_nothing(workspace: TempWorkspace, cap: object) -> None:
    with pytest.raises(RequestError) as caught:
        set_cap(workspace.open_root.ledger, SESSION, cap)  # type: ignore[arg-type]  # what a program may do all the same
    assert caught.value.code == "invalid_params"
    write(workspace, "a", b"1")
    assert set_cap(workspace.open_root.ledger, SESSION, 2**30) == 2**30


def test_a_cap_that_an_earlier_version_stored_wrongly_does_no_harm(workspace: TempWorkspace) -> None:
    with workspace.open_root.ledger.store.write() as tx:
        tx.put(META, MetaRow(f"cap:{SESSION}", "2000000000.0"))
    write(workspace, "a", noise(1, 100_000))
    workspace.session().undo()
    assert enforce_all_caps(workspace.open_root.ledger) == []
    assert set_cap(workspace.open_root.ledger, SESSION, 1_000) == 2**30


class TestACapHoldsWhileCallsGoOn:
    CAP_BYTES = 200_000
    CALLS = 12

    def worked(self, opened: mulligan.api.Mulligan, number: int) -> None:
        """Somebody's file is replaced: both contents have to be kept."""
        (Path(opened.root) / f"f{number}").write_bytes(noise(number))
        with opened.session(SESSION).call() as call:
            call.write_file(f"f{number}", noise(1000 + number))

    def held(self, tmp_path: Path) -> bool:
        workspace = open_temp_workspace(tmp_path)
        with workspace.open_root.ledger.store.read() as tx:
            kept = session_usage(tx, SESSION).bytes
        assert problems(workspace) == [] and evicted(workspace)
        workspace.close()
        return kept <= self.CAP_BYTES

    def opened(self, tmp_path: Path) -> mulligan.api.Mulligan:
        (tmp_path / "work").mkdir(exist_ok=True)
        return mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home"))

    @pytest.mark.req("D6.cap_session")
    def test_in_one_process(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as opened:
            set_cap(opened.open_root.ledger, SESSION, self.CAP_BYTES)
            for number in range(self.CALLS):
                self.worked(opened, number)
            assert self.held(tmp_path)

    @pytest.mark.req("D6.cap_session")
    def test_in_many_that_do_little_each(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as opened:
            set_cap(opened.open_root.ledger, SESSION, self.CAP_BYTES)
        for number in range(self.CALLS):
            with self.opened(tmp_path) as opened:
                self.worked(opened, number)
        assert self.held(tmp_path)

    def test_of_the_whole_store_too(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as opened:
            set_store_cap(opened.open_root.ledger, self.CAP_BYTES)
        for number in range(self.CALLS):
            with self.opened(tmp_path) as opened:
                self.worked(opened, number)
        assert self.held(tmp_path)

    def test_over_versions_that_are_packed_against_each_other(self, tmp_path: Path) -> None:
        version = bytearray(noise(1))
        with self.opened(tmp_path) as opened:
            set_cap(opened.open_root.ledger, SESSION, 50_000)
            for number in range(60):
                version[number * 100] ^= 1
                with opened.session(SESSION).call() as call:
                    call.write_file("f", bytes(version))
            with opened.open_root.ledger.store.read() as tx:
                assert session_usage(tx, SESSION).bytes <= 50_000
                gone = [row.evicted for row in tx.select(CALLS, order=("id",))]
            assert 0 < sum(gone) < 50 and gone == sorted(gone, reverse=True)
            assert opened.session(SESSION).undo().ok
        workspace = open_temp_workspace(tmp_path)
        assert problems(workspace) == []

    def test_and_when_another_writer_collects_garbage(self, workspace: TempWorkspace) -> None:
        calls = [write(workspace, f"f{n}", noise(n)) for n in range(3)]
        with workspace.open_root.ledger.store.write() as tx:
            put_cap(tx, SESSION, 25_000)
        assert enforce_all_caps(workspace.open_root.ledger) == calls[:2] == evicted(workspace)


class TestTheStoresCap:
    """It is held to what the store itself keeps, which is also what it says of its size."""

    @pytest.mark.req("D6.cap_store")
    def test_eviction_ends_once_the_store_is_under_its_cap(self, workspace: TempWorkspace) -> None:
        calls, store = [write(workspace, f"f{n}", noise(n)) for n in range(10)], workspace.open_root.ledger.store
        cap = store.size_bytes() - 50_000
        assert set_store_cap(workspace.open_root.ledger, cap) == calls[:3] == evicted(workspace)
        assert store.size_bytes() <= cap

    @pytest.mark.req("D6.cap_store")
    def test_copies_of_files_beside_it_do_not_count(self, workspace: TempWorkspace) -> None:
        write(workspace, "f", noise(1))
        write(workspace, "g", noise(2))
        store = workspace.open_root.ledger.store
        (workspace.root / "large").write_bytes(noise(3, 3_000_000))
        workspace.session().fork(files="copy").close()
        assert [one.stat().st_size for one in workspace.home.glob("forks/*/large")] == [3_000_000]
        assert store.size_bytes() < 1_000_000
        assert set_store_cap(workspace.open_root.ledger, 1_000_000) == []


def test_a_check_of_a_cap_waits_for_no_writer(workspace: TempWorkspace) -> None:
    write(workspace, "f", noise(1))
    with workspace.open_root.ledger.store.write():
        assert evict_over(workspace.open_root.ledger, SESSION, 2**30) == []


def test_eviction_reads_few_records_to_find_who_needs_a_body(workspace: TempWorkspace) -> None:
    """Else a session that wrote the same bytes n times would be evicted in n * n steps, and all others wait."""
    calls = [write(workspace, "f", noise(n % 2)) for n in range(60)]
    assert evict_over(workspace.open_root.ledger, SESSION, 0) == calls[:-1]

    class Counted:
        def __init__(self, tx: Tx) -> None:
            self.tx, self.records = tx, 0

        def get(self, table: Table[Any], *key: Value) -> Any:
            self.records += table is RECORDS
            return self.tx.get(table, *key)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tx, name)

    with workspace.open_root.ledger.store.read() as tx:
        counted = Counted(tx)
        assert droppable(cast(Tx, counted), [digest_of(noise(1))], holder=calls[0]) == []
    assert counted.records <= 3


def test_dropping_a_session_drops_its_newest_turn_too(workspace: TempWorkspace) -> None:
    calls = [write(workspace, f"f{n}", noise(n)) for n in range(2)]
    assert drop_session(workspace.open_root.ledger, SESSION) == calls
    assert problems(workspace) == []


@pytest.mark.req("D6.gc_beside_writers")
def test_gc_deletes_only_what_nothing_names_and_no_call_is_about_to_name(workspace: TempWorkspace) -> None:
    ledger = workspace.open_root.ledger
    kept = write(workspace, "a", noise(1))
    stray = ledger.blobs.store(noise(2))
    assert collect_garbage(ledger) == (0, 0)
    later = SystemClock().now() + timedelta(hours=1)
    ledger.clock = FixedClock(later)
    blobs, size = collect_garbage(ledger)
    assert (blobs, size > 19_000) == (1, True)
    with ledger.store.read() as tx:
        assert not ledger.blobs.has(tx, stray)
    assert workspace.session().undo(kept).ok
    assert problems(workspace) == []


def test_gc_waits_for_calls_that_are_still_open(workspace: TempWorkspace) -> None:
    ledger = workspace.open_root.ledger
    with workspace.session().call() as call:
        call.write_file("a", noise(1))
        stray = ledger.blobs.store(noise(2))
        ledger.clock = FixedClock(SystemClock().now() + timedelta(hours=1))
        assert collect_garbage(ledger) == (0, 0)
    with ledger.store.read() as tx:
        assert ledger.blobs.has(tx, stray)


def test_gc_leaves_what_an_open_call_found_there_already(workspace: TempWorkspace) -> None:
    """It was touched so lately that the call did not touch it again."""
    ledger = workspace.open_root.ledger
    found = ledger.blobs.store(noise(2))
    with workspace.session().call() as call:
        call.write_file("a", noise(1))
        assert ledger.blobs.store(noise(2)) == found
        ledger.clock = FixedClock(SystemClock().now() + timedelta(hours=1))
        assert collect_garbage(ledger) == (0, 0)
        assert ledger.blobs.read(found) == noise(2)


def test_a_part_of_a_stream_is_not_garbage_while_the_whole_is_named(workspace: TempWorkspace) -> None:
    ledger = workspace.open_root.ledger
    with workspace.session().call() as call:
        receipt = call.exec(["sh", "-c", "head -c 9000000 /dev/zero | tr '\\0' x"])
    ledger.clock = FixedClock(SystemClock().now() + timedelta(hours=1))
    collect_garbage(ledger)
    assert ledger.blobs.read(receipt.stdout["blob"]["blob_ref"]) == b"x" * 9_000_000


@pytest.mark.req("D6.gc_beside_writers")
def test_gc_sweeps_bodies_and_halves_of_writers_that_died(workspace: TempWorkspace, tmp_path: Path) -> None:
    ledger = workspace.open_root.ledger
    kept = write(workspace, "a", Random(1).randbytes(200_000))
    stray = Random(2).randbytes(200_000)
    prepared = ledger.blobs.prepare(stray)
    folder = tmp_path / "home" / "blobs" / prepared.digest[7:9]
    half = folder / "half.1-2-3.part"
    half.write_bytes(b"x" * 1000)
    assert (folder / prepared.digest[9:]).exists()
    assert collect_garbage(ledger) == (0, 0)
    ledger.clock = FixedClock(SystemClock().now() + timedelta(hours=1))
    assert collect_garbage(ledger)[0] == 2
    assert not half.exists()
    assert ledger.blobs.read(ledger.blobs.store(stray)) == stray
    assert workspace.session().undo(kept).ok
    assert problems(workspace) == []


def pages(seed: int, kilobytes: int) -> bytes:
    return noise(seed, kilobytes * 1024)


class TestACallOverItsCap:
    """It runs; its largest paths are given up, and said to be."""

    @pytest.fixture
    def capped(self, workspace: TempWorkspace) -> TempWorkspace:
        for name, size in (("small", 10), ("large", 200), ("larger", 300)):
            (workspace.root / name).write_bytes(pages(size, size))
        with workspace.open_root.ledger.store.write() as tx:
            put_cap(tx, SESSION, 500 * 1024)
        return workspace

    def rewrite(self, workspace: TempWorkspace, *, strict: bool = False) -> str:
        with workspace.session().call(strict=strict) as call:
            for name, size in (("small", 10), ("large", 200), ("larger", 300)):
                assert call.write_file(name, pages(size + 1, size)).ok
        return call.id

    @pytest.mark.req("D6.over_cap_not_undoable")
    def test_runs_and_its_largest_paths_are_not_undoable_in_coverage(self, capped: TempWorkspace) -> None:
        call = self.rewrite(capped)
        assert coverage(capped, call) == [{"path": "larger", "reason": "not_undoable"}]
        assert [(capped.root / name).read_bytes() for name in ("small", "larger")] == [pages(11, 10), pages(301, 300)]
        with capped.open_root.ledger.store.read() as tx:
            assert session_usage(tx, SESSION).bytes <= 500 * 1024
        assert problems(capped) == []

    @pytest.mark.parametrize("way", ["notify", "watch", "scan", "overlay"])
    def test_a_commands_receipt_says_of_it_what_the_record_says(self, capped: TempWorkspace, way: str) -> None:
        (capped.root.parent / "new").write_bytes(pages(9, 300))
        with capped.session().call() as call:
            receipt = call.exec(["sh", "-c", f"cat {capped.root.parent}/new > larger; echo 1 > small"], strategy=way)
        assert receipt.coverage == coverage(capped, call.id) == [{"path": "larger", "reason": "not_undoable"}]

    @pytest.mark.req("D6.nothing_claimed_uncaptured", "D6.outcome.skipped")
    def test_undoing_it_brings_the_others_back_and_says_what_it_left(self, capped: TempWorkspace) -> None:
        way = capped.session().undo(self.rewrite(capped))
        told = [(one.path, one.outcome, one.reason) for one in way.outcomes]
        assert (way.ok, told) == (
            False,
            [("large", "restored", None), ("larger", "skipped", "evicted"), ("small", "restored", None)],
        )
        assert (capped.root / "large").read_bytes() == pages(200, 200)
        assert (capped.root / "larger").read_bytes() == pages(301, 300)

    def test_a_failing_one_is_rolled_back_whole(self, capped: TempWorkspace) -> None:
        with pytest.raises(LookupError), capped.session().call() as call:
            call.write_file("larger", pages(1, 300))
            call.write_file("large", pages(2, 300))
            raise LookupError
        assert [(capped.root / name).read_bytes() for name in ("large", "larger")] == [pages(200, 200), pages(300, 300)]

    @pytest.mark.req("D6.strict_refuses")
    def test_a_strict_one_is_refused_and_leaves_no_trace(self, capped: TempWorkspace) -> None:
        with pytest.raises(ForbiddenError) as refused:
            self.rewrite(capped, strict=True)
        assert (refused.value.code, refused.value.details["paths"]) == ("not_undoable", ["larger"])
        names = ("small", "large", "larger")
        assert [(capped.root / name).read_bytes() for name in names] == [
            pages(10, 10),
            pages(200, 200),
            pages(300, 300),
        ]
        with capped.open_root.ledger.store.read() as tx:
            assert [(row.status, row.reason) for row in tx.select(CALLS) if not row.external] == [
                ("aborted", "not_undoable")
            ]

    def test_however_small_the_cap_is(self, workspace: TempWorkspace) -> None:
        (workspace.root / "a").write_bytes(noise(1, 2000))
        (workspace.root / "b").write_bytes(b"b")
        with workspace.open_root.ledger.store.write() as tx:
            put_cap(tx, SESSION, 1000)
        with workspace.session().call() as call:
            assert call.write_file("a", "1").ok and call.write_file("b", "2").ok
        assert coverage(workspace, call.id) == [{"path": "a", "reason": "not_undoable"}]
        with pytest.raises(ForbiddenError), workspace.session().call(strict=True) as call:
            call.write_file("b", noise(2, 2000))
        assert (workspace.root / "b").read_bytes() == b"2"

    def test_a_new_large_file_can_still_be_undone(self, capped: TempWorkspace) -> None:
        with capped.session().call() as call:
            call.write_file("new", pages(9, 600))
        assert coverage(capped, call.id) == [{"path": "new", "reason": "evicted"}]
        assert capped.session().undo().ok
        assert not (capped.root / "new").exists()


def test_eviction_spares_what_an_open_call_would_restore(workspace: TempWorkspace) -> None:
    write(workspace, "a", noise(1))
    write(workspace, "b", b"another turn")
    with pytest.raises(LookupError), workspace.session("other").call() as call:
        call.write_file("a", noise(2))
        evict_over(workspace.open_root.ledger, SESSION, 0)
        raise LookupError
    assert (workspace.root / "a").read_bytes() == noise(1)
