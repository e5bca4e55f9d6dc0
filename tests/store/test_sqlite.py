"""What is particular to the SQLite engine."""

from __future__ import annotations

import os
from collections.abc import Generator
from hashlib import sha256
from pathlib import Path

import apsw
import pytest

from mulligan.store import sqlite, sqlite_file
from mulligan.store.sqlite import SqliteStore
from mulligan.store.sqlite_file import BusyWait
from mulligan.values.errors import MulliganError
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing
from tests.thread_idents import ended_thread, thread_with_ident


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(str(tmp_path / "store"), CONTRACT_SCHEMA)


def hashes(store: SqliteStore) -> dict[str, str]:
    """The database and its log, if there is anything in it. Shared memory is where readers note where they stand."""
    files = [Path(store.directory, name) for name in ("store.db", "store.db-wal")]
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files if file.exists() and file.stat().st_size}


def test_reading_changes_no_byte(store: SqliteStore) -> None:
    with store.write() as tx:
        tx.put(THINGS, Thing("a", 1))
    before = hashes(store)
    again = SqliteStore(store.directory, CONTRACT_SCHEMA, create=False)
    with again.read() as tx:
        assert tx.select(THINGS) == [Thing("a", 1)]
    assert again.check() == []
    again.close()
    assert hashes(store) == before


def test_a_writer_who_waits_too_long_is_reported(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_LIMIT_S", 0.0)
    other = apsw.Connection(os.path.join(store.directory, "store.db"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(MulliganError) as busy, store.write():
        pass
    assert busy.value.code == "store_busy"
    other.execute("ROLLBACK")
    with store.write() as tx:
        tx.put(THINGS, Thing("a", 1))


@pytest.mark.req("W15.cancel_and_interrupt")
def test_a_writer_does_not_wait_for_a_transaction_that_interrupts_took_from_its_thread(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    waits: list[int] = []
    wait = BusyWait.__call__

    def counted(busy: BusyWait, tries: int) -> bool:
        waits.append(tries)
        return wait(busy, tries)

    monkeypatch.setattr(BusyWait, "__call__", counted)
    held: list[BaseException] = []
    with monkeypatch.context() as patched:
        patched.setattr(sqlite, "roll_back", interrupt)
        patched.setattr(sqlite.ConnectionPool, "give_back", interrupt)
        try:
            with store.write() as tx:
                tx.put(THINGS, Thing("a", 1))
                raise ZeroDivisionError
        except KeyboardInterrupt as error:
            held.append(error)
    with store.write() as tx:
        tx.put(THINGS, Thing("b", 2))
    assert held and waits == [0]
    with store.read() as reading:
        assert reading.select(THINGS) == [Thing("b", 2)]


def test_a_writer_takes_over_from_an_ended_thread_that_had_its_ident(store: SqliteStore) -> None:
    def suspended() -> Generator[None, None, None]:
        with store.write() as tx:
            tx.put(THINGS, Thing("never committed", 1))
            yield

    def write() -> None:
        with store.write() as tx:
            tx.put(THINGS, Thing("committed", 2))

    left = suspended()
    with thread_with_ident(ended_thread(lambda: next(left)), write):
        pass
    write()
    with store.read() as tx:
        assert tx.select(THINGS) == [Thing("committed", 2)]
    with pytest.raises(MulliganError):
        left.close()


@pytest.mark.req("D4.state_mode_0700")
def test_no_other_client_may_look_into_a_store(store: SqliteStore) -> None:
    assert [os.stat(store.directory).st_mode & 0o777, os.stat(store.directory + "/store.db").st_mode & 0o777] == [
        0o700,
        0o600,
    ]


def test_a_store_that_must_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(MulliganError) as missing:
        SqliteStore(str(tmp_path / "none"), CONTRACT_SCHEMA, create=False)
    assert (missing.value.code, list(tmp_path.iterdir())) == ("store_unreadable", [])


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to look like one" * 20, b"\0" * 4096])
def test_a_file_that_is_no_store_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "store.db").write_bytes(content)
    with pytest.raises(MulliganError) as refused:
        SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    assert refused.value.code == "store_corrupt"
    assert (tmp_path / "store.db").read_bytes() == content


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE theirs (a)", "PRAGMA user_version = 7", "PRAGMA application_id = 9"]
)
def test_another_programs_database_is_refused(tmp_path: Path, statement: str) -> None:
    connection = apsw.Connection(str(tmp_path / "store.db"))
    connection.execute(statement)
    connection.close()
    before = (tmp_path / "store.db").read_bytes()
    with pytest.raises(MulliganError) as refused:
        SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    assert refused.value.code == "store_corrupt"
    assert (tmp_path / "store.db").read_bytes() == before


@pytest.mark.req("D4.newer_store_refused")
def test_a_newer_store_is_refused_and_unchanged(store: SqliteStore) -> None:
    store.close()
    connection = apsw.Connection(os.path.join(store.directory, "store.db"))
    connection.pragma("user_version", 1_000)
    connection.close()
    before = hashes(store)
    with pytest.raises(MulliganError) as refused:
        SqliteStore(store.directory, CONTRACT_SCHEMA)
    assert refused.value.code == "store_newer"
    assert hashes(store) == before


def test_a_file_in_the_way_of_the_directory_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(MulliganError) as refused:
        SqliteStore(str(tmp_path / "file"), CONTRACT_SCHEMA)
    assert refused.value.code == "store_unreadable"


def test_damage_in_the_file_is_a_typed_fault(store: SqliteStore) -> None:
    with store.write() as tx:
        for number in range(500):
            tx.put(THINGS, Thing("a", number, "label" * 20))
    store.reclaim_space()
    store.close()
    path = Path(store.directory, "store.db")
    damaged = bytearray(path.read_bytes())
    for page in range(4096, len(damaged), 4096):
        damaged[page : page + 64] = b"\xff" * 64
    path.write_bytes(bytes(damaged))
    with pytest.raises(MulliganError) as fault:
        _read_everything(store.directory)
    assert fault.value.code == "store_corrupt"


def _read_everything(directory: str) -> None:
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    try:
        with store.read() as tx:
            for table in CONTRACT_SCHEMA.tables:
                tx.select(table)
    finally:
        store.close()
