"""The cost of a shell command that can be undone: whole calls, compared with a shadow git repository.

    python benchmarks/exec.py [--files 1000,10000,100000] [--rounds 15] [--folder DIR] [--ways notify,watch]

Prints by how many milliseconds a command takes longer than `subprocess.run` of the same command (p50, minimum in
brackets). `shadow git` is a common alternative: `git add -A` and a commit into a separate repository, before and after.
`roll back` is a command that changes 100 files and fails under `rollback_on="nonzero"`; `undo` undoes 100 changes.
`first` is the first command of strategies that need a baseline. `one scan` is compared with a C program that walks the
tree (`nftw`). On a shared machine, `chrt -f 5 python benchmarks/exec.py` measures as if the machine were quiet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from exec_capture import HUNDRED, plant

import mulligan
from mulligan.effects.session import DurableSession
from mulligan.exec.capture.scan import StatIndex
from mulligan.exec.start import LAUNCHER

ONE = "echo x >> p0/d0/f0.py"
COMMANDS = {
    "0 changes": ":",
    "1 change": ONE,
    "100 changes": HUNDRED,
    "roll back": f"{HUNDRED}; exit 1",
    "grep -r": "grep -rc value_77 . > /dev/null",
}
PAUSE_S = 0.02
"""A person's or a model's pause, in which the next warden gets ready."""


def bare(root: Path, text: str) -> None:
    subprocess.run(["sh", "-c", text], cwd=root, capture_output=True, check=False)


class ShadowGit:
    """A checkpoint before and after, in a repository of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._env = {**os.environ, "GIT_DIR": str(folder / "shadow"), "GIT_WORK_TREE": str(root)}
        self._git("init", "-q")
        self._checkpoint()

    def run(self, text: str) -> None:
        self._checkpoint()
        bare(self._root, text)
        self._checkpoint()

    def _checkpoint(self) -> None:
        self._git("add", "-A")
        self._git("-c", "user.name=u", "-c", "user.email=e", "commit", "-q", "--allow-empty", "--no-verify", "-m", "c")

    def _git(self, *words: str) -> None:
        # Otherwise git repacks in the background, while the measurement goes on and after the folder is deleted.
        command = ["git", "-c", "gc.auto=0", "-c", "maintenance.auto=false", *words]
        subprocess.run(command, cwd=self._root, env=self._env, check=True, capture_output=True)


def ours(session: DurableSession, way: str) -> Callable[[str], None]:
    def run(text: str) -> None:
        params = {"argv": ["sh", "-c", text], "strategy": way}
        rolls_back = text.endswith("exit 1")
        receipt, _ = session.perform("host.exec", {**params, "rollback_on": "nonzero"} if rolls_back else params)
        assert receipt.ok or rolls_back, receipt

    return run


def timed(act: Callable[[], object]) -> float:
    LAUNCHER.warm_up()
    time.sleep(PAUSE_S)
    started = time.perf_counter()
    act()
    return (time.perf_counter() - started) * 1000


def measure(root: Path, folder: Path, ways: list[str], rounds: int) -> None:
    twin = folder / "twin"  # the plain runs must not look like external edits
    twin.mkdir()
    plant(twin, 1000)
    with mulligan.open(str(root), store=str(folder / "store")) as opened:
        session = opened.session("bench")
        runners = {way: ours(session, way) for way in ways}
        first = [f"{way} {timed(lambda run=run: run(':')):.0f}" for way, run in runners.items()]  # type: ignore[misc]
        print(f"  {'first':12s} " + " | ".join(first), flush=True)
        for title, text in COMMANDS.items():
            where = root if title == "grep -r" else twin
            plain = taking(rounds, lambda: bare(where, text))  # noqa: B023  # called at once
            times = {name: taking(rounds, lambda: run(text)) for name, run in runners.items()}  # noqa: B023
            show(title, plain, times)
        show("undo 100", [0.0], {way: [_undo(session, runners[way]) for _ in range(rounds)] for way in ways})
    shadow = ShadowGit(root, folder)
    for title, text in COMMANDS.items():
        where = root if title == "grep -r" else twin
        plain = taking(rounds, lambda: bare(where, text))  # noqa: B023
        show(title, plain, {"shadow git": taking(min(rounds, 7), lambda: shadow.run(text))})  # noqa: B023
    walk(root)


def taking(rounds: int, act: Callable[[], object]) -> list[float]:
    """The first one does not count: it may find the caches cold."""
    timed(act)
    return [timed(act) for _ in range(rounds)]


WALK = r"""
#define _XOPEN_SOURCE 700
#include <ftw.h>
#include <stdio.h>
#include <time.h>
static int seen(const char *path, const struct stat *s, int kind, struct FTW *at) { return 0; }
int main(int count, char **words) {
    for (int i = 0; i < 12; i++) {
        struct timespec a, b;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
        nftw(words[1], seen, 64, FTW_PHYS);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
        printf("%f\n", (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6);
    }
}
"""


def walk(root: Path) -> None:
    """Processor time of one scan after the first, and of the same walk in C, taking turns; the least of each."""
    if shutil.which("cc") is None:
        print("  one scan     no C compiler to compare with")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "walk.c"), Path(folder, "walk")
        source.write_text(WALK)
        subprocess.run(["cc", "-O2", "-o", program, source], check=True)
        index = StatIndex.take(os.fsencode(root)).again()
        in_c, in_python = [], []
        for _ in range(3):
            output = subprocess.run([program, root], check=True, capture_output=True, text=True).stdout
            in_c += [float(line) for line in output.split()]
            for _ in range(12):
                started = time.process_time()
                index = index.again()
                in_python.append((time.process_time() - started) * 1000)
    print(
        f"  one scan     {min(in_python):.1f} ms, C {min(in_c):.1f} ms: x{min(in_python) / min(in_c):.2f}", flush=True
    )


def _undo(session: DurableSession, run: Callable[[str], None]) -> float:
    run(HUNDRED)
    return timed(session.undo)


def show(title: str, plain: list[float], times: dict[str, list[float]]) -> None:
    base = statistics.median(plain)
    cells = [
        f"{name} +{statistics.median(spent) - base:.1f} ({min(spent) - base:.1f})" for name, spent in times.items()
    ]
    print(f"  {title:12s} bare {base:6.1f} | " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", default="1000,10000,100000")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default=None, help="where the trees are planted (default: the temporary folder)")
    parser.add_argument("--ways", default="notify,watch,overlay,scan")
    wanted = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} processors, {os.uname().release}")
    for files in (int(word) for word in wanted.files.split(",")):
        folder = Path(os.path.realpath(tempfile.mkdtemp(dir=wanted.folder)))
        root = folder / "work"
        root.mkdir()
        plant(root, files)
        print(f"{files} files, milliseconds more than the bare command")
        measure(root, folder, wanted.ways.split(","), wanted.rounds)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
