"""Commands that change thousands of files, and their undo, as multiples of the same without Mulligan.

    python benchmarks/bulk.py [--what rm,write,sed,checkout,hundred] [--rounds 3] [--folder DIR] [--strategy notify]
                              [--scale 1.0] [--memory 200000]

In each round, the bare command and the command as a call take turns, each in a tree of its own; then the undo of the
call takes its turn with `cp -a` of the files that it restores. Prints the medians, their ratios, and the goals for the
kind of file system. The CPU time of Mulligan's process says something even on a busy machine. `--scale` multiplies the
numbers of files. `--memory` measures the peak memory of a process that runs `rm -rf` on that many files and undoes it.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mulligan
from mulligan.effects.session import DurableSession

FILES_PER_FOLDER = 40
WRITE = "i=0; while [ $i -lt {folders} ]; do mkdir out/$i; j=0; while [ $j -lt {each} ]; do "
WRITE += 'echo "object $i $j" > out/$i/$j.o; j=$((j+1)); done; i=$((i+1)); done'


@dataclass(frozen=True)
class Workload:
    """`plant` makes the files and answers the command. The goals: on tmpfs and on a disk."""

    files: int
    plant: Callable[[Path, int], str]
    goals: tuple[float, float]
    undo_goals: tuple[float, float] = (6, 2.5)
    rolls_back: bool = False
    makes_files: bool = False


def plant_files(root: Path, files: int) -> None:
    for number in range(files):
        folder = root / f"d{number // (FILES_PER_FOLDER * 10)}" / f"e{number // FILES_PER_FOLDER}"
        if number % FILES_PER_FOLDER == 0:
            folder.mkdir(parents=True, exist_ok=True)
        text = f"first line of {number}\n" + f"value_{number} = {number}\n" * 20
        (folder / f"f{number}.py").write_text(text, "utf-8")


def plant_removal(root: Path, files: int) -> str:
    plant_files(root / "gone", files)
    return "rm -rf gone"


def plant_writing(root: Path, files: int) -> str:
    (root / "out").mkdir(parents=True)
    return WRITE.format(folders=max(1, files // 100), each=min(100, files))


def plant_editing(root: Path, files: int) -> str:
    plant_files(root / "src", files)
    return "find src -type f -print0 | xargs -0 sed -i s/first/second/"


def plant_checkout(root: Path, files: int) -> str:
    plant_files(root, files)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    for path in root.rglob("*.py"):
        path.write_text(path.read_text("utf-8").replace("first", "second"), "utf-8")
    git(root, "commit", "-q", "-a", "-m", "second")
    # Git believes an index that is newer than all files, and reads the files otherwise.
    for path in root.rglob("*.py"):
        os.utime(path, (1e9, 1e9))
    git(root, "status")
    return "git checkout -q HEAD~1"


def git(root: Path, *words: str) -> None:
    identity = ("-c", "user.name=u", "-c", "user.email=e", "-c", "gc.auto=0")
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


def plant_hundred(root: Path, files: int) -> str:
    plant_files(root, files)
    return "for f in $(find . -name '*.py'); do echo x >> $f; done"


WORKLOADS = {
    "rm": Workload(40_000, plant_removal, (15, 8)),
    "write": Workload(20_000, plant_writing, (6, 4), makes_files=True),
    "sed": Workload(5_000, plant_editing, (7, 2.5)),
    "checkout": Workload(5_000, plant_checkout, (3.5, 2.5)),
    "hundred": Workload(100, plant_hundred, (20, 20)),
    "rollback": Workload(100, plant_hundred, (30, 30), rolls_back=True),
}


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time, and of CPU time of this process."""
    started, worked = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - started, time.process_time() - worked


def run_bare(root: Path, command: str) -> None:
    subprocess.run(["sh", "-c", command], cwd=root, check=True, capture_output=True)


def run_call(session: DurableSession, command: str, strategy: str, *, rolls_back: bool = False) -> None:
    command += "; exit 1" if rolls_back else ""
    params: dict[str, object] = {"argv": ["sh", "-c", command], "strategy": strategy, "timeout_ms": 3_600_000}
    receipt, _ = session.perform("host.exec", params | ({"rollback_on": "nonzero"} if rolls_back else {}))
    assert receipt.ok or rolls_back, receipt


def undo(session: DurableSession) -> None:
    result = session.undo(git="restore")
    assert result.ok, [one for one in result.outcomes if one.outcome != "restored"][:3]


@contextmanager
def opened(folder: Path, name: str) -> Iterator[tuple[Path, DurableSession]]:
    root = folder / name / "work"
    root.mkdir(parents=True)
    with mulligan.open(str(root), store=str(folder / name / "store")) as one:
        yield root, one.session("bench")


def turns(work: Workload, folder: Path, files: int, strategy: str) -> tuple[float, ...]:
    """One round: the bare command, the call and its CPU, a copy of the changed files, the undo and its CPU."""
    bare = folder / "bare"
    bare.mkdir()
    command = work.plant(bare, files)
    with opened(folder, "ours") as (root, session):
        work.plant(root, files)
        run_call(session, "true", strategy)
        copy = ["cp", "-a", str(bare), str(folder / "copy")]
        copying = timed(lambda: subprocess.run(copy, check=True))
        plain = timed(lambda: run_bare(bare, command))
        calling = timed(lambda: run_call(session, command, strategy, rolls_back=work.rolls_back))
        if work.makes_files:
            shutil.rmtree(folder / "copy")
            copying = timed(lambda: subprocess.run(copy, check=True))
        undoing = (0.0, 0.0) if work.rolls_back else timed(lambda: undo(session))
    return plain[0], *calling, copying[0], *undoing


def measure(name: str, wanted: argparse.Namespace) -> None:
    work = WORKLOADS[name]
    files = max(1, round(work.files * wanted.scale))
    rounds = []
    for _ in range(wanted.rounds):
        with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
            rounds.append(turns(work, Path(os.path.realpath(folder)), files, wanted.strategy))
            os.sync()
    on_disk = not is_tmpfs(wanted.folder or tempfile.gettempdir())
    plain, calling, cpu, copying, undoing, undo_cpu = map(statistics.median, zip(*rounds, strict=True))
    show(f"{name} {files}", plain, calling, cpu / files, goal=work.goals[on_disk])
    if not work.rolls_back:
        show(f"{name} {files}, undo", copying, undoing, undo_cpu / files, goal=work.undo_goals[on_disk])


def show(title: str, base: float, ours: float, cpu: float, *, goal: float) -> None:
    ratio = ours / base
    met = "met" if ratio <= goal else "MISSED"
    print(
        f"| {title} | {base:.3f} s | {ours:.3f} s | {ratio:.1f} | {goal:g} | {met} | {cpu * 1e6:.0f} us |", flush=True
    )


def is_tmpfs(folder: str) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True)
    return kind.stdout.strip() == "tmpfs"


def measure_memory(files: int, wanted: argparse.Namespace) -> None:
    """In this process, whose peak therefore must not have been reached before."""
    with (
        tempfile.TemporaryDirectory(dir=wanted.folder) as name,
        opened(Path(os.path.realpath(name)), "ours") as (root, session),
    ):
        command = plant_removal(root, files)
        before = peak_mb()
        run_call(session, command, wanted.strategy)
        after = peak_mb()
        undo(session)
        print(f"memory, {files} files: {before} MB before, {after} MB after rm -rf, {peak_mb()} MB after undo")


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where the trees are (default: the temporary folder)")
    parser.add_argument("--strategy", default="notify")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--memory", type=int, default=0)
    wanted = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    if wanted.memory:
        measure_memory(wanted.memory, wanted)
        return
    print("| what | bare | ours | ratio | goal | | CPU of Mulligan for a file |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in wanted.what.split(","):
        measure(name, wanted)


if __name__ == "__main__":
    main()
