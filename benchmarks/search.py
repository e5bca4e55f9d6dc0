"""Search, compared with ripgrep itself: `python benchmarks/search.py [--grep-files N] [--glob-files N]`.

Every row is the median of several interleaved runs, so that a busy machine slows both sides alike.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mulligan.files.search.glob import glob
from mulligan.files.search.grep import GrepOptions, grep
from mulligan.files.search.ripgrep import find_ripgrep
from mulligan.files.tree.index import TreeCache
from mulligan.values.paths import ROOT

RG = find_ripgrep() or "rg"
FILES_PER_FOLDER = 20
EXTENSIONS = [".py", ".py", ".py", ".txt", ".js", ".md", ".json"]
PATTERNS = {
    "literal, nowhere": "zzzz_not_there",
    "literal, rare": "w4999 w17",
    "words": r"\bw7\b.*\bw8\b",
    "no literal": r"w[0-9]+ w12[0-9]? w9",
    "case folded": "(?i)W499 W3",
    "everywhere": "w1",
}


def build(root: Path, count: int, rng: random.Random) -> None:
    """Folders of twenty files, nested a few deep, with a .gitignore and something for it to leave out."""
    words = [f"w{number}" for number in range(5_000)]
    folders = [root]
    (root / ".gitignore").write_text("*.log\nbuild/\n__pycache__/\n*.py[co]\n/dist\n")
    for number in range(0, count, FILES_PER_FOLDER):
        parent = rng.choice(folders[-400:])
        folder = (parent if len(parent.parts) < len(root.parts) + 6 else root) / f"pkg{number}"
        folder.mkdir()
        folders.append(folder)
        for file in range(number, min(number + FILES_PER_FOLDER, count)):
            lines = (" ".join(rng.choices(words, k=8)) for _ in range(rng.randrange(10, 120)))
            (folder / f"mod{file}{rng.choice(EXTENSIONS)}").write_text("\n".join(lines) + "\n")


def run(*arguments: str, cwd: Path) -> None:
    subprocess.run([RG, "--no-config", *arguments], cwd=cwd, stdout=subprocess.PIPE, check=False)


def side_by_side(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds, the middle of the rounds, of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - started) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, measured: dict[str, float]) -> None:
    (_, reference), *rest = measured.items()
    cells = "  ".join(f"{name} {ms:7.1f} ({ms / reference:4.2f}x)" for name, ms in rest)
    print(f"{title:22} {next(iter(measured))} {reference:7.1f}  {cells}")


def bench_grep(root: Path, rounds: int) -> None:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    warm = TreeCache()
    for title, pattern in PATTERNS.items():
        show(
            title,
            side_by_side(
                {
                    "rg": lambda p=pattern: run("--hidden", "--line-number", "-e", p, "./", cwd=root),  # type: ignore[misc]
                    "ours": lambda p=pattern: grep(fd, ROOT, p, GrepOptions(engine="ripgrep", cache=warm)),  # type: ignore[misc]
                    "ours, first": lambda p=pattern: grep(
                        fd, ROOT, p, GrepOptions(engine="ripgrep", cache=TreeCache())
                    ),  # type: ignore[misc]
                    "native": lambda p=pattern: grep(fd, ROOT, p, GrepOptions(engine="native", cache=warm)),  # type: ignore[misc]
                },
                rounds,
            ),
        )
    os.close(fd)


def bench_glob(root: Path, rounds: int) -> None:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    warm = TreeCache()
    for pattern in ("**/*.py", "**/mod1*.md", "pkg0/**/*.js"):
        show(
            pattern,
            side_by_side(
                {
                    "rg --files": lambda: run("--hidden", "--files", "./", cwd=root),
                    "rg, same answer": lambda p=pattern: run(
                        "--hidden", "--files", "--sortr=modified", "-g", p, "./", cwd=root
                    ),  # type: ignore[misc]
                    "ours, first": lambda p=pattern: glob(fd, ROOT, p, cache=TreeCache()),  # type: ignore[misc]
                    "ours, again": lambda p=pattern: glob(fd, ROOT, p, cache=warm),  # type: ignore[misc]
                },
                rounds,
            ),
        )
    os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grep-files", type=int, default=10_000)
    parser.add_argument("--glob-files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in (("grep", options.grep_files), ("glob", options.glob_files)):
            root = Path(folder) / kind
            root.mkdir()
            build(root, count, random.Random(count))
            print(f"\n{kind}, {count} files, ms")
            (bench_grep if kind == "grep" else bench_glob)(root, options.rounds)


if __name__ == "__main__":
    main()
