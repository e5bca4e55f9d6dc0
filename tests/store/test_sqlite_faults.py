"""SQLite on a disk that fails: at every position, in every way, with a typed fault, and sound afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from mulligan.store.blobs import Blobs
from mulligan.store.journal import Journal, records_of
from mulligan.store.protocol import Durability
from mulligan.store.sqlite import SqliteStore
from mulligan.testing import FaultyVfs, SteppingClock
from mulligan.testing.faults import Injury
from mulligan.values.errors import MulliganError
from tests.contracts.journal_contract import AT, broken_journals
from tests.contracts.tables import CONTRACT_SCHEMA

ROUNDS = 4
TYPED = {"no_space": "no_space", "short": "no_space", "io_error": "io_error"}


def blob_of(number: int) -> bytes:
    return Random(number).randbytes(3_000)


def work(store: SqliteStore, acknowledged: list[int]) -> None:
    """Some calls' worth of records and blobs, and a checkpoint; what returned is acknowledged."""
    blobs, journal = Blobs(store, SteppingClock()), Journal(CONTRACT_SCHEMA)
    for number in range(ROUNDS):
        digest = blobs.store(blob_of(number))
        with store.write() as tx:
            journal.append(tx, "j", "added", {"amount": number}, at=AT, refs=[digest])
        acknowledged.append(number)
        if number == ROUNDS // 2:
            store.sync()


@dataclass(frozen=True)
class Findings:
    """What a store holds when opened anew on a sound disk, and everything that is said to be wrong with it."""

    amounts: list[int]
    complaints: list[str]


def look(directory: str) -> Findings:
    try:
        store = SqliteStore(directory, CONTRACT_SCHEMA)
    except MulliganError as fault:
        return Findings([], [fault.code])
    try:
        with store.read() as tx:
            complaints = [*store.check(), *broken_journals(tx)]
            records = list(records_of(tx, "j"))
        blobs = Blobs(store, SteppingClock())
        assert all(blobs.read(record.refs[0]) == blob_of(record.payload["amount"]) for record in records)
        return Findings([record.payload["amount"] for record in records], complaints)
    except MulliganError as fault:
        return Findings([], [fault.code])
    finally:
        store.close()


def amounts_in(directory: str) -> list[int]:
    """What a sound store holds."""
    found = look(directory)
    assert found.complaints == []
    return found.amounts


def attempt(directory: str, disk: FaultyVfs, durability: Durability) -> tuple[list[int], MulliganError | None]:
    """Open and work on the disk: what was acknowledged, and the fault that ended it."""
    acknowledged: list[int] = []
    store: SqliteStore | None = None
    try:
        store = SqliteStore(directory, CONTRACT_SCHEMA, durability=durability, vfs=disk.name)
        work(store, acknowledged)
    except MulliganError as fault:
        return acknowledged, fault
    finally:
        if store is not None:
            store.close()
    return acknowledged, None


@pytest.fixture
def ready(tmp_path: Path) -> str:
    """A store that was made on a sound disk, to be copied."""
    SqliteStore(str(tmp_path / "ready"), CONTRACT_SCHEMA).close()
    return str(tmp_path / "ready")


def count_operations(directory: str, durability: Durability) -> int:
    with FaultyVfs() as disk:
        assert attempt(directory, disk, durability) == (list(range(ROUNDS)), None)
        return len(disk.operations)


def copies(ready: str, durability: Durability) -> Iterator[tuple[int, str]]:
    """Every position of an undisturbed run, each with a store of its own."""
    shutil.copytree(ready, f"{ready}-0")
    for at in range(1, count_operations(f"{ready}-0", durability) + 1):
        yield at, shutil.copytree(ready, f"{ready}-{at}")


def judge_refusal(directory: str, at: int, injury: Injury, durability: Durability) -> None:
    with FaultyVfs() as disk:
        disk.inject(injury, at=at)
        acknowledged, fault = attempt(directory, disk, durability)
        refused = disk.operations[at - 1][0]
    if fault is not None:
        assert fault.code == TYPED[injury] or (refused != "write" and fault.code in ("io_error", "no_space"))
    found = amounts_in(directory)
    assert found[: len(acknowledged)] == acknowledged
    assert len(found) <= len(acknowledged) + 1


@pytest.mark.req("D5.fsync_error_is_fault")
@pytest.mark.parametrize("injury", ["no_space", "io_error", "short"])
@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_refusal_at_any_position_is_a_typed_fault_and_the_store_stays_sound(
    ready: str, durability: Durability, injury: Injury
) -> None:
    for at, directory in copies(ready, durability):
        judge_refusal(directory, at, injury, durability)
    assert at > 20


@pytest.mark.parametrize("injury", ["no_space", "io_error"])
def test_so_it_is_while_the_store_is_being_made(tmp_path: Path, injury: Injury) -> None:
    count = count_operations(str(tmp_path / "plain"), "process")
    for at in range(1, count - 20, 3):
        judge_refusal(str(tmp_path / str(at)), at, injury, "process")


@pytest.mark.parametrize("injury", ["no_space", "io_error"])
def test_a_disk_that_stays_broken_and_is_mended_needs_no_reopening(tmp_path: Path, injury: Injury) -> None:
    for at in range(1, 40, 3):
        with FaultyVfs() as disk:
            store = SqliteStore(str(tmp_path / str(at)), CONTRACT_SCHEMA, vfs=disk.name)
            disk.inject(injury, at=at, lasting=True)
            acknowledged: list[int] = []
            with pytest.raises(MulliganError) as fault:
                work(store, acknowledged)
            assert fault.value.code == TYPED[injury]
            with pytest.raises(MulliganError):
                work(store, [])
            disk.heal()
            work(store, acknowledged)
            store.close()
        assert amounts_in(str(tmp_path / str(at)))[-ROUNDS:] == list(range(ROUNDS))


@pytest.mark.parametrize("injury", ["torn", "lost"])
def test_a_disk_that_lies_is_found_out_or_did_no_harm(ready: str, injury: Injury) -> None:
    """The write reports success and is not there. What cannot be read back must be said, never made up."""

    for at, directory in copies(ready, "process"):
        with FaultyVfs() as disk:
            disk.inject(injury, at=at, operation="write")
            attempt(directory, disk, "process")
        found = look(directory)
        assert found.complaints or found.amounts == list(range(len(found.amounts)))


@pytest.mark.req("D5.durability_power")
def test_after_a_power_cut_at_any_position_power_mode_has_all_it_acknowledged(ready: str) -> None:
    for at, directory in copies(ready, "power"):
        acknowledged, found = cut_at(directory, at, "power")
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) <= len(acknowledged) + 1


def test_after_a_power_cut_at_any_position_process_mode_has_a_sound_beginning(ready: str) -> None:
    lost = 0
    for at, directory in copies(ready, "process"):
        acknowledged, found = cut_at(directory, at, "process")
        assert found == list(range(len(found)))
        lost += len(acknowledged) > len(found)
    assert lost > 0


@pytest.mark.req("D5.durability_process")
def test_in_process_mode_no_commit_waits_for_the_disk(ready: str) -> None:
    def syncs(durability: Durability) -> int:
        with FaultyVfs() as disk:
            store = SqliteStore(ready, CONTRACT_SCHEMA, durability=durability, vfs=disk.name)
            before = len(disk.operations)
            with store.write() as tx:
                Journal(CONTRACT_SCHEMA).append(tx, "j", "added", {"amount": 1}, at=AT)
            done = [operation for operation, _ in disk.operations[before:]]
            store.close()
        assert "write" in done
        return done.count("sync")

    assert (syncs("process"), syncs("power") > 0) == (0, True)


def cut_at(directory: str, at: int, durability: Durability) -> tuple[list[int], list[int]]:
    """Lose power before that operation: what had been acknowledged, and what is there after the reboot."""
    with FaultyVfs(remember=True) as disk:
        disk.power_off_at(at)
        acknowledged, _ = attempt(directory, disk, durability)
        disk.cut_power()
        disk.restore()
    for name in os.listdir(directory):
        if name.endswith("-shm"):
            os.unlink(os.path.join(directory, name))
    return acknowledged, amounts_in(directory)


@pytest.mark.parametrize("size", [3_000, 100_000], ids=["in the database", "beside it"])
def test_on_a_disk_that_is_really_full_nothing_breaks_and_room_is_enough_to_go_on(tmp_path: Path, size: int) -> None:
    script = str(Path(__file__).with_name("full_disk.py"))
    command = ["unshare", "--mount", "--map-root-user", sys.executable, script, str(tmp_path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen, complaints = map(json.loads, done.stdout.splitlines())
    (stored, code), (_, still), after = seen["full"], seen["again"], seen["after"]
    assert (code, still, after) == ("no_space", "no_space", [2, ""])
    assert (seen["records"] >= stored + 2, seen["broken"], complaints) == (True, [], [])
