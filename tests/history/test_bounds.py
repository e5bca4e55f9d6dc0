"""How much is kept, what goes first, and how space comes back."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from random import Random

import pytest

from benches import Bench, open_bench
from mulligan.history.bounds import collect_garbage, drop_session, evict_over, set_cap, usage_of
from mulligan.history.log import status_shown
from mulligan.history.schema import SCHEMA
from mulligan.history.tables import CALLS, PINS, PinRow
from mulligan.session.tables import session_journal
from mulligan.store.verify import verify
from mulligan.values.clock import FixedClock, SystemClock
from mulligan.values.ids import SessionId

SESSION = SessionId("default")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return open_bench(tmp_path)


def noise(seed: int, size: int = 20_000) -> bytes:
    """Bytes that no packing makes smaller."""
    return Random(seed).randbytes(size)


def write(bench: Bench, name: str, data: bytes) -> str:
    with bench.session().call() as call:
        call.write_file(name, data)
    return call.id


def pin(bench: Bench, call: str) -> None:
    ledger = bench.desk.ledger
    with ledger.store.write() as tx:
        ledger.journal.append(tx, session_journal(SESSION), "call.pinned", {"call": call}, at=ledger.now())
        assert tx.get(PINS, call) == PinRow(call)


def evicted(bench: Bench) -> list[str]:
    with bench.desk.ledger.store.read() as tx:
        return [row.id for row in tx.select(CALLS) if row.evicted]


def problems(bench: Bench) -> list[str]:
    return [one.message for one in verify(bench.desk.ledger.store, SCHEMA) if one.severity == "broken"]


@pytest.mark.req("D6.evict_whole_calls_oldest", "D6.evict_leaves_record")
def test_over_the_cap_whole_calls_go_oldest_first_and_leave_a_record(bench: Bench) -> None:
    calls = [write(bench, f"f{n}", noise(n)) for n in range(4)]
    gone = evict_over(bench.desk.ledger, SESSION, 45_000)
    assert gone == calls[:2] == evicted(bench)
    with bench.desk.ledger.store.read() as tx:
        assert usage_of(tx, SESSION).bytes <= 45_000
        row = tx.get(CALLS, calls[0])
        assert row is not None and status_shown(row) == "evicted"
    assert problems(bench) == []
    bench.session().undo(calls[2])
    assert not (bench.root / "f2").exists()


def test_an_evicted_calls_creation_can_still_be_undone_but_not_its_overwriting(bench: Bench) -> None:
    write(bench, "a", noise(1))
    overwriting = write(bench, "a", noise(2))
    write(bench, "b", b"last turn")
    evict_over(bench.desk.ledger, SESSION, 0)
    way = bench.session().undo(overwriting)
    assert (way.ok, [(one.outcome, one.reason) for one in way.outcomes]) == (False, [("skipped", "evicted")])
    assert (bench.root / "a").read_bytes() == noise(2)


@pytest.mark.req("D6.evict_spares_needed")
def test_the_newest_turn_and_pins_stay(bench: Bench) -> None:
    pinned = write(bench, "pinned", noise(1))
    write(bench, "old", noise(2))
    newest = write(bench, "new", noise(3))
    pin(bench, pinned)
    evict_over(bench.desk.ledger, SESSION, 0)
    assert newest not in evicted(bench) and pinned not in evicted(bench)
    assert len(evicted(bench)) == 1


@pytest.mark.req("H7.needed_preimages_pinned")
def test_a_body_that_a_kept_call_needs_is_not_dropped_with_an_evicted_one(bench: Bench) -> None:
    first = write(bench, "a", noise(1))
    overwriting = write(bench, "a", noise(2))
    write(bench, "b", b"last turn")
    pin(bench, overwriting)
    assert evict_over(bench.desk.ledger, SESSION, 0) == [first]
    assert bench.session().undo(overwriting).ok
    assert (bench.root / "a").read_bytes() == noise(1)


@pytest.mark.req("D6.cap_session")
def test_a_cap_is_in_force_at_once_and_for_every_process(bench: Bench, tmp_path: Path) -> None:
    calls = [write(bench, f"f{n}", noise(n)) for n in range(3)]
    assert set_cap(bench.desk.ledger, SESSION, 25_000) == 2**30
    assert evicted(bench) == calls[:2]
    assert set_cap(open_bench(tmp_path).desk.ledger, SESSION, 2**30) == 25_000


def test_dropping_a_session_drops_its_newest_turn_too(bench: Bench) -> None:
    calls = [write(bench, f"f{n}", noise(n)) for n in range(2)]
    assert drop_session(bench.desk.ledger, SESSION) == calls
    assert problems(bench) == []


@pytest.mark.req("D6.gc_beside_writers")
def test_gc_deletes_only_what_nothing_names_and_nobody_is_about_to(bench: Bench) -> None:
    ledger = bench.desk.ledger
    kept = write(bench, "a", noise(1))
    stray = ledger.blobs.store(noise(2))
    assert collect_garbage(ledger) == (0, 0)
    later = SystemClock().now() + timedelta(hours=1)
    ledger.clock = FixedClock(later)
    blobs, size = collect_garbage(ledger)
    assert (blobs, size > 19_000) == (1, True)
    with ledger.store.read() as tx:
        assert not ledger.blobs.has(tx, stray)
    assert bench.session().undo(kept).ok
    assert problems(bench) == []


def test_gc_waits_for_calls_that_are_still_open(bench: Bench) -> None:
    ledger = bench.desk.ledger
    with bench.session().call() as call:
        call.write_file("a", noise(1))
        stray = ledger.blobs.store(noise(2))
        ledger.clock = FixedClock(SystemClock().now() + timedelta(hours=1))
        assert collect_garbage(ledger) == (0, 0)
    with ledger.store.read() as tx:
        assert ledger.blobs.has(tx, stray)


def test_a_part_of_a_stream_is_not_garbage_while_the_whole_is_named(bench: Bench) -> None:
    ledger = bench.desk.ledger
    with bench.session().call() as call:
        receipt = call.exec(["sh", "-c", "head -c 9000000 /dev/zero | tr '\\0' x"])
    ledger.clock = FixedClock(SystemClock().now() + timedelta(hours=1))
    collect_garbage(ledger)
    assert ledger.blobs.read(receipt.stdout["blob"]["blob_ref"]) == b"x" * 9_000_000
