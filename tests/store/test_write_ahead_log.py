"""Whoever wrote much leaves a short log behind, so that opening a large store stays quick; nobody is waited for."""

from __future__ import annotations

import os
from pathlib import Path

from mulligan.store.sqlite import SqliteStore
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing

BIG = b"x" * 200_000


def fill(store: SqliteStore, rows: int) -> None:
    for number in range(rows):
        with store.write() as tx:
            tx.put(THINGS, Thing("a", number, "box", number, BIG))


def log_bytes(folder: Path) -> int:
    path = folder / "store.db-wal"
    return os.stat(path).st_size if path.exists() else 0


def test_much_writing_leaves_a_short_log_and_everything_is_there(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    fill(store, 50)
    before = log_bytes(tmp_path)
    store.close()
    assert before > 8 * 1024 * 1024 and log_bytes(tmp_path) == 0
    again = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    with again.read() as tx:
        assert tx.count(THINGS) == 50
    again.close()


def test_little_writing_leaves_it_to_whoever_tends_the_store(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    fill(store, 2)
    before = log_bytes(tmp_path)
    store.close()
    assert 0 < before == log_bytes(tmp_path)


def test_a_reader_at_work_is_neither_waited_for_nor_disturbed(tmp_path: Path) -> None:
    store, other = SqliteStore(str(tmp_path), CONTRACT_SCHEMA), SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    fill(store, 25)
    with other.read() as tx:
        assert tx.count(THINGS) == 25
        fill(store, 50)
        store.close()
        assert tx.count(THINGS) == 25
    with other.read() as tx:
        assert tx.count(THINGS) == 50
    other.close()
