"""The cost of capturing a command's changes: each strategy and a plain run, taking turns, on trees of several sizes.

    python benchmarks/exec_capture.py [--files 1000,10000] [--rounds 15] [--folder /dev/shm]

Prints milliseconds (p50, minimum in brackets) and the ratio to `subprocess.run` in the same rounds. The witness reads
and hashes every preimage, as a store would before it writes; nothing is written. `overlay` reads its upper layer and
applies nothing. The ways that need a baseline are in `exec.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mulligan.exec.capture.notify import Capture, Notify
from mulligan.exec.capture.overlay import Overlay
from mulligan.exec.command import Spools, command
from mulligan.exec.run import run
from mulligan.exec.start import LAUNCHER
from tests.exec.window_captures import NoCapture

FILES_PER_FOLDER = 10
BULK = 3000


class Hashing:
    """Reads and hashes each preimage."""

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        for path in paths:
            try:
                with open(path, "rb") as file:
                    hashlib.sha256(file.read()).digest()
            except OSError:
                continue


def plant(root: Path, files: int) -> None:
    for number in range(files):
        folder = root / f"p{number // 1000}" / f"d{number // FILES_PER_FOLDER}"
        if number % FILES_PER_FOLDER == 0:
            folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{number}.py").write_text(f"value_{number} = {number}\n" * 60)


def plant_bulk(root: Path) -> None:
    for number in range(BULK):
        folder = root / "bulk" / f"d{number // 50}"
        if number % 50 == 0:
            folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{number}").write_text("bulk\n" * 200)


HUNDRED = "for i in 0 1 2 3 4 5 6 7 8 9; do for j in 0 1 2 3 4 5 6 7 8 9; do echo x >> p0/d$i/f$i$j.py; done; done"
COMMANDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "noop": (":", lambda root: None),
    "1 change": ("echo x >> p0/d0/f0.py", lambda root: None),
    "100 changes": (HUNDRED, lambda root: None),
    "rm -rf 3000": ("rm -rf bulk", plant_bulk),
    "grep -r": ("grep -rc value_77 . > /dev/null", lambda root: None),
}


WAYS: dict[str, Callable[[], Capture]] = {"bare": NoCapture, "notify": lambda: Notify(Hashing()), "overlay": Overlay}


def once(text: str, root: Path, capture: Capture) -> float:
    asked = command(["sh", "-c", text], str(root))
    started = time.perf_counter()
    ran = run(asked, capture=capture, sink=Spools())
    spent = time.perf_counter() - started
    assert ran.exit_code in (0, 1), ran
    if isinstance(capture, Overlay):
        capture.close()
    return spent * 1000


def plain(text: str, root: Path) -> float:
    """Without any of our machinery: what the standard library needs."""
    started = time.perf_counter()
    subprocess.run(["sh", "-c", text], cwd=root, capture_output=True, check=False)
    return (time.perf_counter() - started) * 1000


def measure(root: Path, rounds: int) -> None:
    for title, (text, prepare) in COMMANDS.items():
        times: dict[str, list[float]] = {name: [] for name in ("subprocess", *WAYS)}
        for _ in range(rounds):
            for name in times:
                prepare(root)
                LAUNCHER.warm_up()
                time.sleep(0.02)  # a person's or a model's pause: the next warden is ready
                times[name].append(plain(text, root) if name == "subprocess" else once(text, root, WAYS[name]()))
        bulk = root / "bulk"
        if bulk.exists():
            shutil.rmtree(bulk)
        show(title, times)


def show(title: str, times: dict[str, list[float]]) -> None:
    base = statistics.median(times["subprocess"])
    cells = []
    for name, spent in times.items():
        middle = statistics.median(spent)
        cells.append(f"{name} {middle:.2f} ({min(spent):.2f}) +{middle - base:.2f} x{middle / base:.2f}")
    print(f"  {title:12s} " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", default="1000,10000")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default=None, help="where the trees are planted (default: the temporary folder)")
    wanted = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} processors, {os.uname().release}")
    for files in (int(word) for word in wanted.files.split(",")):
        root = Path(os.path.realpath(tempfile.mkdtemp(dir=wanted.folder)))
        plant(root, files)
        print(f"{files} files")
        measure(root, wanted.rounds)
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
