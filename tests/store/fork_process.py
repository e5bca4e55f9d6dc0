"""A program that embeds Mulligan and forks; tests start it and read what it says, as JSON.

`python fork_process.py calls DIRECTORY RUNS`  four threads, each with an open call, fork inside their calls
`python fork_process.py interrupted DIRECTORY` a thread forks after another was interrupted at many lines of its calls
`python fork_process.py foreign DIRECTORY`     a thread that uses SQLite without Mulligan holds a lock of it at the fork
`python fork_process.py importing DIRECTORY`   a thread is in the middle of an import when the process wants to fork
`python fork_process.py locked DIRECTORY`      a thread holds a lock of Mulligan's at the fork
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import SupportsIndex

import apsw

import mulligan
from mulligan.store.fork_locks import fork_safe_lock

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interrupts import Lines, lines_of


def in_child(act: Callable[[], object]) -> object:
    """What `act` returns in a forked child. A child that hangs is killed by its alarm."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        os.write(writing, json.dumps(act()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="ascii") as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(said) if status == 0 else f"ended with {status}"


def fork_after_interrupts(directory: str) -> None:
    """The exceptions are kept, and with them the frames: once of threads that have ended, once as garbage.

    In the second case another thread also writes in this process. An alarm ends what waits for ever.
    """
    signal.alarm(900)
    folder = Path(directory, "work")
    folder.mkdir()
    with mulligan.open(folder, store=Path(directory, "store")) as m:

        def write(name: str) -> str:
            with m.session(name).call() as call:
                return call.write_file(name, name).status

        def in_thread(act: Callable[[], object]) -> object:
            answers: list[object] = []
            thread = threading.Thread(target=lambda: answers.append(act()))
            thread.start()
            thread.join()
            return answers[0]

        kept: list[BaseException] = []

        def interrupt(at: int) -> None:
            lines = Lines(at)
            lines.run(lambda: write("interrupted"))
            if lines.raised is not None:
                kept.append(lines.raised)

        write("first")
        count = lines_of(lambda: write("counted"))
        lines = range(1, count, count // 30)
        after_threads, after_garbage = set(), set()
        gc.disable()
        for at in lines:
            in_thread(lambda at=at: interrupt(at))  # type: ignore[misc]
            after_threads.add(in_child(lambda: write("child")))
        for at in lines:
            interrupt(at)
            kept.append(kept)  # type: ignore[arg-type]
            kept = []
            after_garbage.add(in_thread(lambda: write("beside")))
            after_garbage.add(in_thread(lambda: in_child(lambda: write("child"))))
    print(json.dumps({"after_threads": sorted(after_threads), "after_garbage": sorted(after_garbage)}))


def fork_inside_calls(directory: str, runs: str) -> None:
    folder = Path(directory, "work")
    folder.mkdir()
    said: list[str] = []
    with mulligan.open(folder, store=Path(directory, "store")) as m:

        def child(name: str) -> str:
            with m.session(f"child of {name}").call() as call:
                call.write_file(f"{name}.child", name)
            return "ok"

        def lane(name: str) -> None:
            with m.session(name).call() as call:
                call.write_file(f"{name}.before", name)
                together.wait()
                said.append(str(in_child(lambda: child(name))))
                call.write_file(f"{name}.after", name)

        for number in range(int(runs)):
            together = threading.Barrier(4)
            lanes = [threading.Thread(target=lane, args=(f"{number}-{of}",)) for of in range(4)]
            for thread in lanes:
                thread.start()
            for thread in lanes:
                thread.join()
        # Each call is whole: undo of the parents' calls leaves exactly what the children's calls wrote.
        names = [f"{number}-{of}" for number in range(int(runs)) for of in range(4)]
        wanted = {f"{name}.{part}" for name in names for part in ("before", "child", "after")}
        wrong = sorted(wanted ^ {path.name for path in folder.iterdir()})
        for name in names:
            m.session(name).undo()
        wrong += sorted({f"{name}.child" for name in names} ^ {path.name for path in folder.iterdir()})
    print(json.dumps({"said": sorted(set(said)), "wrong": wrong, "children": len(said)}))


class SlowRandomness(apsw.VFS):
    """SQLite asks it for random bytes while it holds the lock of its random numbers, and gets no answer."""

    def __init__(self) -> None:
        super().__init__("slow-randomness", base="unix", makedefault=True)
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def xRandomness(self, numbytes: int) -> bytes:
        self.is_asked.set()
        self.may_answer.wait()
        return bytes(numbytes)


def fork_beside_a_foreign_thread(directory: str) -> None:
    folder = Path(directory, "work")
    folder.mkdir()
    mulligan.open(folder, store=Path(directory, "store")).close()
    slow = SlowRandomness()
    apsw.randomness(0)
    foreign = threading.Thread(target=apsw.randomness, args=(8,))
    foreign.start()
    slow.is_asked.wait()
    slow.unregister()

    def child() -> list[str]:
        try:
            mulligan.open(folder, store=Path(directory, "store")).close()
        except mulligan.MulliganError as error:
            return [error.code, error.message]
        return []

    said = in_child(child)
    slow.may_answer.set()
    foreign.join()
    print(json.dumps(said))


import_begun, import_may_end = threading.Event(), threading.Event()


def fork_beside_an_import(directory: str) -> None:
    """The import ends only when the thread that forks has begun to wait for it."""
    folder = Path(directory, "work")
    folder.mkdir()
    mulligan.open(folder, store=Path(directory, "store")).close()
    body = "import __main__ as program\nprogram.import_begun.set()\nprogram.import_may_end.wait()\n"
    Path(directory, "slow_to_import.py").write_text(body)
    sys.path.insert(0, directory)
    importing = threading.Thread(target=__import__, args=("slow_to_import",))
    importing.start()
    import_begun.wait()
    nap = time.sleep

    def waits(seconds: float | SupportsIndex) -> None:
        import_may_end.set()
        nap(seconds)

    def child() -> str:
        signal.alarm(20)
        __import__("slow_to_import")
        return "imported"

    time.sleep = waits
    said = in_child(child)
    import_may_end.set()
    importing.join()
    print(json.dumps(said))


def fork_beside_a_held_lock(_: str) -> None:
    lock, is_held, may_end = fork_safe_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    holding = threading.Thread(target=hold)
    holding.start()
    is_held.wait()
    said = in_child(lambda: lock.acquire(blocking=False))
    may_end.set()
    holding.join()
    print(json.dumps(said))


ACTS: dict[str, Callable[..., None]] = {
    "calls": fork_inside_calls,
    "interrupted": fork_after_interrupts,
    "foreign": fork_beside_a_foreign_thread,
    "importing": fork_beside_an_import,
    "locked": fork_beside_a_held_lock,
}

if __name__ == "__main__":
    ACTS[sys.argv[1]](*sys.argv[2:])
