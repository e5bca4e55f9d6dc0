"""The cost of a transaction: a call that rewrites one file, compared with a plain write and a shadow git repository.

    python benchmarks/calls.py [--rounds N] [--full]

Goals: open to commit adds at most 0.5 ms (p50) to a bare atomic write of the same 4 KB file, flat in
the size of the tree (at most 1.2 times from 1 000 to 100 000 files), at least 100 times less than `git add -A && git
commit` at 10 000 files and 900 times at 100 000; undo of it in at most 2 ms; `power` durability at most 1.5 times its
own fsyncs; 1 000 edits of a 100 KB source file grow the store by less than 8 MB. `--full` measures 100 000 files too.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timing import directory_bytes, quantile, timed_us

import mulligan
from mulligan import Session

FILE_BYTES = 4_096
FOLDER_FILES = 100
ADDED_GOAL_US, UNDO_GOAL_US, FLAT_GOAL, GROWTH_GOAL_BYTES = 500.0, 2_000.0, 1.2, 8_000_000
GIT_GOALS = {10_000: 100, 100_000: 900}
WHO = ("-c", "user.name=b", "-c", "user.email=b@example.org", "-c", "gc.auto=0")


def content(number: int) -> str:
    line = f"value_{number} = {number}  # the line that changes\n"
    return (line + "unchanged = True\n" * FILE_BYTES)[:FILE_BYTES]


def make_tree(root: str, files: int) -> None:
    for number in range(files):
        folder = os.path.join(root, f"d{number // FOLDER_FILES}")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"f{number}.py"), "w") as file:
            file.write(f"# file {number}\n" * 8)


def p50(act: Callable[[int], object], rounds: int) -> float:
    timed_us(act, range(rounds // 10 + 2))
    return quantile(timed_us(act, range(100, 100 + rounds)), 0.5)


def bare(root: str) -> Callable[[int], None]:
    """A new file, written beside and renamed over the old one."""
    path, draft = os.path.join(root, "bare.py"), os.path.join(root, "bare.py.new")

    def act(number: int) -> None:
        with open(draft, "wb") as file:
            file.write(content(number).encode())
        os.replace(draft, path)

    return act


def call(session: Session) -> Callable[[int], None]:
    def act(number: int) -> None:
        with session.call() as call:
            assert call.write_file("called.py", content(number)).ok

    return act


def shadow(root: str, home: str) -> Callable[[int], None]:
    """What others do instead: a repository beside the tree, with a commit for every call."""
    git = ["git", *WHO, f"--git-dir={home}", f"--work-tree={root}"]
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    def run(*words: str) -> None:
        subprocess.run([*git, *words], env=env, check=True, capture_output=True, cwd=root)

    def act(number: int) -> None:
        with open(os.path.join(root, "shadowed.py"), "w") as file:
            file.write(content(number))
        run("add", "-A")
        run("commit", "-q", "-m", str(number))

    run("init", "-q")
    act(-1)
    return act


@contextmanager
def workspace(files: int) -> Iterator[tuple[str, str]]:
    base = tempfile.mkdtemp(prefix="calls-")
    try:
        root = os.path.join(base, "work")
        os.mkdir(root)
        make_tree(root, files)
        yield root, base
    finally:
        shutil.rmtree(base)


def measure(files: int, rounds: int) -> dict[str, float]:
    with workspace(files) as (root, base):
        found = {"bare": p50(bare(root), rounds)}
        with mulligan.open(root, store=os.path.join(base, "home")) as opened:
            session = opened.session("bench")
            found["call"] = p50(call(session), rounds)
            found["undo"] = p50(lambda _: session.undo(), min(rounds // 2, 200))
        found["git"] = p50(shadow(root, os.path.join(base, "shadow")), 3 if files > 1_000 else 10)
    return found


def power(rounds: int) -> tuple[float, float]:
    """A call with `power` durability, and the fsyncs it makes, bare: the file, its directory, and two of the store."""
    with workspace(10) as (root, base):
        with mulligan.open(root, store=os.path.join(base, "home"), durability="power") as opened:
            called = p50(call(opened.session("bench")), rounds)
        log = os.path.join(base, "log")

        def syncs(number: int) -> None:
            bare(root)(number)
            for path in (os.path.join(root, "bare.py"), root):
                _sync(path)
            for _ in range(2):
                with open(log, "ab") as file:
                    file.write(content(number).encode() * 4)
                _sync(log)

        return called, p50(syncs, rounds)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def growth_bytes(edits: int = 1_000) -> int:
    """What a thousand small edits of one source file of 100 KB add to the store."""
    source = random.Random(7)
    words = [
        f"name_{source.randrange(10**6)} = call_{source.randrange(999)}({source.random()})\n" for _ in range(2_300)
    ]
    with workspace(1) as (root, base):
        home, sizes = os.path.join(base, "home"), []
        for count in (1, edits):
            with mulligan.open(root, store=home) as opened:
                session = opened.session("bench")
                for number in range(count):
                    with session.call() as call:
                        call.write_file("source.py", "".join(words))
                    words[source.randrange(len(words))] = f"edited_{number} = {source.random()}\n"
            sizes.append(directory_bytes(home))
        return sizes[1] - sizes[0]


def report(files: int, found: dict[str, float]) -> bool:
    added = found["call"] - found["bare"]
    times = found["git"] / added
    print(
        f"{files:>8} files   bare {found['bare']:7.0f} us   call {found['call']:7.0f} us   added {added:7.0f} us   "
        f"undo {found['undo']:7.0f} us   git {found['git'] / 1000:8.1f} ms = {times:6.0f} times"
    )
    return added <= ADDED_GOAL_US and found["undo"] <= UNDO_GOAL_US and times >= GIT_GOALS.get(files, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time calls beside bare writes and a shadow repository.")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--full", action="store_true", help="a tree of 100 000 files too")
    asked = parser.parse_args()
    sizes = [1_000, 10_000, *([100_000] if asked.full else [])]
    found = {files: measure(files, asked.rounds) for files in sizes}
    good = [report(files, one) for files, one in found.items()]
    ratio = found[sizes[-1]]["call"] / found[sizes[0]]["call"]
    print(f"from {sizes[0]} to {sizes[-1]} files: {ratio:.2f} times")
    called, syncs = power(asked.rounds // 8)
    print(f"power: {called:.0f} us beside {syncs:.0f} us of fsyncs: {called / syncs:.2f} times")
    grown = growth_bytes()
    print(f"1 000 edits of a 100 KB file: {grown / 1e6:.1f} MB")
    good += [ratio <= FLAT_GOAL, called / syncs <= 1.5, grown < GROWTH_GOAL_BYTES]
    print("goals met" if all(good) else "goals missed")


if __name__ == "__main__":
    main()
