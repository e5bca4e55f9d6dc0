"""A store on a disk that is really full: run in a mount namespace of its own, on a small file system in memory.

`python full_disk.py DIRECTORY` mounts there, works until the disk is full, makes room, goes on, and prints one line of
JSON with what it saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from mulligan.store.blobs import Blobs
from mulligan.store.journal import RECORDS, Journal
from mulligan.store.sqlite import SqliteStore
from mulligan.testing.world import SteppingClock
from mulligan.values.errors import MulliganError
from tests.contracts.journal_contract import AT, broken_journals
from tests.contracts.tables import CONTRACT_SCHEMA


def fill(store: SqliteStore, size: int, *, rounds: int) -> tuple[int, str]:
    """Store blobs and records until the rounds or the space are over: how many, and the fault's code."""
    blobs, journal, done = Blobs(store, SteppingClock()), Journal(CONTRACT_SCHEMA), 0
    # Bytes that the store does not have yet: a record alone may still find room where a body does not.
    random = Random(f"{size} bytes, {rounds} rounds")
    try:
        for _ in range(rounds):
            digest = blobs.store(random.randbytes(size))
            with store.write() as tx:
                journal.append(tx, "j", "added", {"amount": 1}, at=AT, refs=[digest])
            done += 1
    except MulliganError as fault:
        return done, fault.code
    return done, ""


def main(directory: str, size: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", directory], check=True)
    ballast = os.path.join(directory, "ballast")
    with open(ballast, "wb") as file:
        file.write(bytes(1_000_000))
    store = SqliteStore(os.path.join(directory, "store"), CONTRACT_SCHEMA)
    full = fill(store, size, rounds=10_000)
    again = fill(store, size, rounds=1)
    os.unlink(ballast)
    after = fill(store, size, rounds=2)
    with store.read() as tx:
        records = tx.count(RECORDS)
        broken = broken_journals(tx)
    print(json.dumps({"full": full, "again": again, "after": after, "records": records, "broken": broken}))
    print(json.dumps(store.check()))
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
