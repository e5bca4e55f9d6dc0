"""The cost of a commit: compared with plain apsw, in a small and a large store, and during a big commit elsewhere.

python benchmarks/store.py [--records 1000000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable
from hashlib import sha256
from multiprocessing.synchronize import Event

import apsw
from timing import quantile, show, timed_us

from mulligan.api import open_store
from mulligan.store.blobs import Blobs
from mulligan.store.journal import Journal, Schema
from mulligan.store.protocol import Store
from mulligan.values.clock import SystemClock, timestamp

SCHEMA = Schema((), {})
CLOCK = SystemClock()
RUNS = 4_000
BATCH_RECORDS = 5_000


def text_of(number: int, size: int = 4_096) -> bytes:
    """Something like source: words, of which there are few."""
    rng = random.Random(number)
    words = b" ".join(b"%x" % (rng.randrange(4_000) * 7_919) for _ in range(size // 4))
    return (b"%d " % number + words)[:size]


def opened(directory: str) -> Store:
    return open_store(directory, SCHEMA, durability="process", clock=CLOCK)


def commit_with(store: Store, texts: Callable[[int], bytes]) -> Callable[[int], None]:
    """One record and one blob of 4 KB in one transaction, as a call ends."""
    blobs, journal = Blobs(store, CLOCK), Journal(SCHEMA)

    def commit(number: int) -> None:
        prepared = blobs.prepare(texts(number))
        with store.write() as tx:
            digest = blobs.put(tx, prepared)
            payload = {"call": "01a0", "path": "src/module.py", "number": number}
            journal.append(tx, "s:bench", "call.ended", payload, at=timestamp(CLOCK), refs=[digest])

    return commit


def ours(texts: list[bytes]) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        store = opened(directory)
        found = timed_us(commit_with(store, texts.__getitem__), range(len(texts)))
        store.close()
        return found


def bare_connection(path: str) -> apsw.Connection:
    connection = apsw.Connection(path)
    connection.pragma("journal_mode", "wal")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.wal_autocheckpoint(16_384)
    connection.execute("CREATE TABLE records (journal TEXT, seq INTEGER, body BLOB, PRIMARY KEY (journal, seq))")
    connection.execute("CREATE TABLE bodies (digest BLOB PRIMARY KEY, body BLOB)")
    connection.execute("CREATE TABLE log (body BLOB, blob BLOB)")
    return connection


def bare(texts: list[bytes], *, keyed: bool) -> list[float]:
    """The same bytes and nothing else: findable by their keys, or (`keyed=False`) only appended."""
    record = b"r" * 350
    keys = [sha256(text).digest() for text in texts]
    with tempfile.TemporaryDirectory() as directory:
        connection = bare_connection(os.path.join(directory, "bare.db"))

        def commit(number: int) -> None:
            connection.execute("BEGIN IMMEDIATE")
            if keyed:
                connection.execute("INSERT INTO records VALUES (?, ?, ?)", ("s:bench", number, record))
                connection.execute("INSERT INTO bodies VALUES (?, ?)", (keys[number], texts[number]))
            else:
                connection.execute("INSERT INTO log VALUES (?, ?)", (record, texts[number]))
            connection.execute("COMMIT")

        return timed_us(commit, range(len(texts)))


def beside_bare() -> None:
    print("One record + one 4 KB blob + commit, `process` mode")
    texts = [text_of(number) for number in range(RUNS)]
    rounds = [(ours(texts), bare(texts, keyed=True), bare(texts, keyed=False)) for _ in range(3)]
    best = min(rounds, key=lambda found: quantile(found[0], 0.5))
    for name, found in zip(("Mulligan", "bare apsw, keyed", "bare apsw, appended only"), best, strict=True):
        show("  " + name, found)
    mine = quantile(best[0], 0.5)
    print(f"  ratio to keyed {mine / quantile(best[1], 0.5):.2f}, to appended {mine / quantile(best[2], 0.5):.2f}\n")


def fill(store: Store, records: int) -> None:
    journal = Journal(SCHEMA)
    for start in range(0, records, BATCH_RECORDS):
        with store.write() as tx:
            for number in range(start, min(records, start + BATCH_RECORDS)):
                journal.append(tx, f"s:{number % 50}", "call.ended", {"number": number}, at=timestamp(CLOCK))


def growing(records: int) -> None:
    print(f"The same in a store of 1 000 and of {records:,} records")
    medians = []
    for size in (1_000, records):
        with tempfile.TemporaryDirectory() as directory:
            store = opened(directory)
            fill(store, size)
            store.sync()
            texts = [text_of(number) for number in range(RUNS)]
            found = timed_us(commit_with(store, texts.__getitem__), range(RUNS))
            store.close()
        show(f"  {size:,} records", found)
        medians.append(quantile(found, 0.5))
    print(f"  ratio {medians[1] / medians[0]:.2f}\n")


def small_commits(directory: str, seed: int, stop: Event, answers: multiprocessing.Queue[list[float]]) -> None:
    store = opened(directory)
    commit = commit_with(store, lambda number: text_of(seed * 10**6 + number))
    found: list[float] = []
    while not stop.is_set():
        found += timed_us(commit, range(len(found), len(found) + 10))
    answers.put(found)
    store.close()


def big_commit(store: Store) -> None:
    """5 000 files: blobs in batches first, then one record that names them all."""
    blobs, journal = Blobs(store, CLOCK), Journal(SCHEMA)
    digests = blobs.store_all(text_of(-number) for number in range(5_000))
    with store.write() as tx:
        journal.append(tx, "s:big", "call.ended", {"files": len(digests)}, at=timestamp(CLOCK), refs=digests)


def side_by_side(processes: int = 8) -> None:
    print(f"{processes} processes with small commits, beside a commit of 5 000 files")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        store = opened(directory)
        stop, answers = context.Event(), context.Queue()
        workers = [
            context.Process(target=small_commits, args=(directory, seed, stop, answers)) for seed in range(processes)
        ]
        for worker in workers:
            worker.start()
        (big_us,) = timed_us(lambda _: big_commit(store), range(1))
        stop.set()
        found = sorted(one for _ in workers for one in answers.get())
        for worker in workers:
            worker.join()
        store.close()
    show(f"  {len(found):,} small commits", found)
    print(f"  the big one took {big_us / 1e6:.2f} s\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=1_000_000)
    wanted = parser.parse_args()
    beside_bare()
    growing(wanted.records)
    side_by_side()


if __name__ == "__main__":
    main()
