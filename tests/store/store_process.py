"""Other processes on a store, as real as they come: started by tests with what to do and where.

`python store_process.py write DIRECTORY NAME COUNT`    commit so many times, once told to
`python store_process.py own DIRECTORY`                 become an owner, say which, live until told
`python store_process.py beside DIRECTORY`              what children forked while other threads write say, as JSON
`python store_process.py many DIRECTORY [RUNS FORKS]`   what children of many threads, each with its own store, say
`python store_process.py held DIRECTORY`                what a child says, forked inside another thread's transaction
`python store_process.py ended DIRECTORY`               what a child says, forked after a thread ended in a transaction
`python store_process.py lost DIRECTORY`                what a child says, forked after an interrupt lost a connection
`python store_process.py orphan DIRECTORY`              what a forked child says of its dead parent's lock, as JSON
`python store_process.py fork DIRECTORY`                what a forked child sees of its parent's store, as JSON
`python store_process.py ask DIRECTORY OWNER`           many at once ask whether an owner lives, as JSON
`python store_process.py kill DIRECTORY MODE COUNT SEED` kill a writing child again and again, as JSON
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from mulligan.store import sqlite
from mulligan.store.blobs import Blobs
from mulligan.store.journal import Journal, records_of
from mulligan.store.protocol import Durability, Store
from mulligan.store.sqlite import SqliteStore
from mulligan.testing.world import SteppingClock
from mulligan.values.errors import MulliganError
from mulligan.values.ids import OwnerId
from tests.contracts.journal_contract import AT, broken_journals
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing
from tests.thread_idents import ended_thread, thread_with_ident

STORE_KILLS_MAX = 10
"""How often one store has its writer killed before another takes its place: looking at it takes longer each time."""


def commit(store: Store, name: str, number: int) -> None:
    """One acknowledged act: a blob, then a record in two journals and a row, all in one transaction."""
    digest = Blobs(store, SteppingClock()).store(f"{name} {number}\n".encode() * 50)
    with store.write() as tx:
        for journal in ("shared", name):
            payload = {"amount": number, "by": name}
            Journal(CONTRACT_SCHEMA).append(tx, journal, "added", payload, at=AT, refs=[digest])
        tx.put(THINGS, Thing(name, number))


def write(directory: str, name: str, count: str) -> None:
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(count)):
        commit(store, name, number)
    store.close()


def own(directory: str) -> None:
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    print(store.owner(), flush=True)
    sys.stdin.readline()
    store.close()


def _begin_child(act: Callable[[], object]) -> int:
    """A forked child that does `act` and ends; one that hangs is ended by its alarm."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        act()
        os._exit(0)
    return pid


def in_child(act: Callable[[], object]) -> str:
    """What `act` gives in a forked child, or how the child ended."""
    reading, writing = os.pipe()
    pid = _begin_child(lambda: os.write(writing, json.dumps(act()).encode()))
    os.close(writing)
    with open(reading, encoding="ascii") as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    return said if status == 0 else f"ended with {status}"


def fork(directory: str) -> None:
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    mine = store.owner()
    commit(store, "parent", 1)

    def child() -> object:
        commit(store, "child", 1)
        return [store.owner() != mine, store.is_alive(mine), store.is_alive(store.owner())]

    seen = [in_child(child), store.is_alive(mine), store.is_alive(OwnerId(mine + 1))]
    with store.write():
        seen.append(in_child(lambda: _shelves(store)))
    print(json.dumps([*seen, _shelves(store), _complaints(store)]))


def fork_beside(directory: str) -> None:
    """Forks while another thread writes and a third copies the log, again and again; each child writes."""
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    done = threading.Event()

    def until_done(act: Callable[[int], object]) -> threading.Thread:
        thread = threading.Thread(target=lambda: [act(number) for number in _counting(done)])
        thread.start()
        return thread

    beside = [until_done(lambda number: commit(store, "beside", number)), until_done(lambda _: store.sync())]
    said = [in_child(partial(commit, store, "child", number)) for number in range(30)]
    done.set()
    for thread in beside:
        thread.join()
    print(json.dumps([sorted(set(said)), _shelves(store).count("child"), _complaints(store)]))


def fork_from_many(directory: str, runs: str = "1", forks: str = "15") -> None:
    """Four threads that each open a store, fork and close it, again and again, beside each other."""
    said: list[str] = []

    def lane(name: str) -> None:
        for number in range(int(forks)):
            store = SqliteStore(os.path.join(directory, name), CONTRACT_SCHEMA)
            commit(store, "parent", number)
            said.append(in_child(partial(commit, store, "child", number)))
            store.close()

    for _ in range(int(runs)):
        lanes = [threading.Thread(target=lane, args=(str(number),)) for number in range(4)]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
    print(json.dumps([sorted(set(said)), len(said)]))


def fork_while_held(directory: str) -> None:
    """A fork does not wait for ever for a thread that stays in a transaction. Here it waits only briefly."""
    sqlite.FORK_WAIT_S = 0.1
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    begun, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store.write():
            begun.set()
            done.wait()

    holding = threading.Thread(target=hold)
    holding.start()
    begun.wait()

    def child() -> list[str]:
        try:
            commit(store, "child", 1)
        except MulliganError as error:
            return [error.code, error.message]
        return []

    said = json.loads(in_child(child))
    done.set()
    holding.join()
    commit(store, "parent", 1)
    print(json.dumps([said, json.loads(in_child(child)), _complaints(store)]))


def fork_after_ended_thread(directory: str) -> None:
    """A thread has ended inside a transaction that something still refers to, and another thread has its ident."""
    sqlite.FORK_WAIT_S = 0.1
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    left = store.read()
    with thread_with_ident(ended_thread(left.__enter__)):
        said = in_child(partial(commit, store, "child", 1))
    print(json.dumps([said, _shelves(store), _complaints(store)]))


def fork_after_lost_connection(directory: str) -> None:
    """An interrupt ended `take` just before the connection had a user, and a traceback still refers to it."""
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    lost = store._pool.take()
    lost.user = None
    said = in_child(partial(commit, store, "child", 1))
    print(json.dumps([said, len(list(store._pool.users())), _shelves(store), _complaints(store)]))


def orphan(directory: str) -> None:
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    parent, parent_pid = store.owner(), os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent_pid:
        os.sched_yield()
    mine = store.owner()
    asked = subprocess.run([sys.executable, __file__, "ask", directory, str(mine)], stdout=subprocess.PIPE, check=True)
    child_lives = json.loads(asked.stdout) == ["[true]"] * 4
    print(json.dumps({"parent_lives": store.is_alive(parent), "child_lives": child_lives}))


def _counting(done: threading.Event) -> Iterator[int]:
    number = 0
    while not done.is_set():
        yield (number := number + 1)


def _shelves(store: Store) -> list[str]:
    with store.read() as tx:
        return [row.group for row in tx.select(THINGS)]


def _complaints(store: Store) -> list[str]:
    with store.read() as tx:
        return [*store.check(), *broken_journals(tx)]


def ask(directory: str, owner: str) -> None:
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    store.close()

    def many() -> list[bool | None]:
        return sorted({store.is_alive(OwnerId(int(owner))) for _ in range(3_000)}, key=str)

    asking = [threading.Thread(target=lambda: answers.append(in_child(many))) for _ in range(4)]
    answers: list[str] = []
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    print(json.dumps(answers))


def kill(parent: str, mode: Durability, count: str, seed: str) -> None:
    random = Random(int(seed))
    directory, acknowledged, total = parent, list[int](), 0
    for point in range(int(count)):
        if point % STORE_KILLS_MAX == 0:
            directory, acknowledged = os.path.join(parent, str(point)), []
        acknowledged += _killed(
            directory, mode, first=point * 100, after=random.randrange(6), spin=random.randrange(20_000)
        )
        missing, extra, complaints = _judged(directory, acknowledged)
        if missing or complaints or len(extra) > 1:
            print(json.dumps({"point": point, "missing": missing, "extra": sorted(extra), "complaints": complaints}))
            return
        acknowledged += extra
        total += len(acknowledged)
    print(json.dumps({"points": int(count), "acknowledged": total}))


def _killed(directory: str, mode: Durability, *, first: int, after: int, spin: int) -> list[int]:
    """A child that commits and acknowledges until it is killed: a while after so many acknowledgements."""
    reading, writing = os.pipe()

    def go_on() -> None:
        store = SqliteStore(directory, CONTRACT_SCHEMA, durability=mode)
        for number in range(first, first + 100):
            os.write(writing, b"%d\n" % number)
            commit(store, "c", number)

    pid = _begin_child(go_on)
    os.close(writing)
    with open(reading, "rb", buffering=0) as lines:
        said = b""
        while said.count(b"\n") <= after:
            said += lines.read(64)
        for _ in range(spin):
            pass
        os.kill(pid, signal.SIGKILL)
        while more := lines.read(4096):
            said += more
    os.waitpid(pid, 0)
    # Every number says that the one before it was committed.
    return [first + n for n in range(said.count(b"\n") - 1)]


def _judged(directory: str, acknowledged: list[int]) -> tuple[list[int], set[int], list[str]]:
    """Acknowledged and gone; there without having been acknowledged; and all that is wrong."""
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    complaints = _complaints(store)
    with store.read() as tx:
        seen = [{int(record.payload["amount"]) for record in records_of(tx, journal)} for journal in ("c", "shared")]
        seen.append({row.number for row in tx.select(THINGS)})
        for record in records_of(tx, "c", after=max(0, len(seen[0]) - 20)):
            Blobs(store, SteppingClock()).read_in(tx, record.refs[0])
    if not seen[0] == seen[1] == seen[2]:
        complaints.append("half a transaction is visible")
    store.close()
    return sorted(set(acknowledged) - seen[0]), seen[0] - set(acknowledged), complaints


if __name__ == "__main__":
    act = {
        "write": write,
        "own": own,
        "fork": fork,
        "orphan": orphan,
        "beside": fork_beside,
        "many": fork_from_many,
        "held": fork_while_held,
        "ended": fork_after_ended_thread,
        "lost": fork_after_lost_connection,
        "ask": ask,
        "kill": kill,
    }[sys.argv[1]]
    act(*sys.argv[2:])  # type: ignore[operator]
