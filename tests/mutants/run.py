"""`make mutants`: apply each wrong change to a copy of the tree and run the tests that must fail. All must be caught.

`python -m tests.mutants.run [WORD…]` runs only the mutants whose names contain one of the words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.mutants.mutation import ROOT, Mutant, all_mutants

T = TypeVar("T")

SIDE_BY_SIDE = 2
TIMEOUT_S = 600
FAILED = 1
"""What pytest returns when tests ran and some failed. Anything else (no such test, a broken import) proves nothing."""


def copy_tree(to: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    # Compiled once. Python compares the hash of a source file, so it never runs old code for a file that was changed.
    compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src", "tests"]
    subprocess.run([sys.executable, *compiled], cwd=to, check=True)
    return to


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """The exit code of pytest in that tree, and what it said."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def verdict_on(mutant: Mutant, tree: Path) -> str | None:
    """Why the mutant counts as not caught; None if each of its tests failed."""
    file = tree / mutant.file
    original = file.read_text("utf-8")
    file.write_text(mutant.applied_to(original), "utf-8")
    try:
        for test in mutant.tests:
            code, said = run_tests(tree, (test,))
            if code != FAILED:
                return f"{test} ended with {code}\n{said[-1500:]}"
    finally:
        file.write_text(original, "utf-8")
    return None


def main(words: list[str]) -> int:
    mutants = [one for one in all_mutants() if not words or any(word in one.name for word in words)]
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mulligan-mutants-") as place, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for tree in pool.map(copy_tree, (Path(place, str(number)) for number in range(SIDE_BY_SIDE))):
            trees.put(tree)

        def in_a_tree(act: Callable[[Path], T]) -> T:
            tree = trees.get()
            try:
                return act(tree)
            finally:
                trees.put(tree)

        def judge(mutant: Mutant) -> str | None:
            why = in_a_tree(lambda tree: verdict_on(mutant, tree))
            print(f"{'caught  ' if why is None else 'SURVIVED'} {mutant.name}", flush=True)
            return why

        # A test that fails anyway shows nothing.
        parts = [tuple(tests[start::SIDE_BY_SIDE]) for start in range(SIDE_BY_SIDE)]
        for code, said in pool.map(lambda part: in_a_tree(lambda tree: run_tests(tree, part)), filter(None, parts)):
            if code != 0:
                print(f"The tests fail without any mutant, too:\n{said[-3000:]}")
                return 1
        verdicts = zip(mutants, pool.map(judge, mutants), strict=True)
        survivors = [(mutant, why) for mutant, why in verdicts if why is not None]
    for mutant, why in survivors:
        print(f"\n{mutant.name} ({mutant.file}: {mutant.function}): {why}")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants caught in {time.monotonic() - began_s:.0f} s")
    return 1 if survivors or not mutants else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
