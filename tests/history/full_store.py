"""Large files and a store that has no room for them: run in a mount namespace of its own.

`python full_store.py DIRECTORY SCENE` has the workspace in DIRECTORY and the store on a small file system in memory
there, plays the scene, makes room, opens again, and prints one line of JSON with what it saw.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benches import Bench, open_bench
from history.deaths import in_child
from mulligan.history.schema import SCHEMA
from mulligan.history.tables import CALLS
from mulligan.store.verify import verify
from mulligan.values import limits
from mulligan.values.faults import MulliganError
from mulligan.values.limits import MIB_BYTES

ROOM, MORE_ROOM = "size=6m", "size=100m"
MAKE = f"head -c {8 * MIB_BYTES} /dev/urandom > large.bin"


def seen(bench: Bench) -> dict[str, object]:
    """What is there, how every call stands, and what recovery could not end."""
    with bench.desk.ledger.store.read() as tx:
        statuses = [row.status for row in tx.select(CALLS)]
    stuck = [one.stuck is not None for one in bench.recovered]
    sizes = {path.name: path.stat().st_size for path in sorted(bench.root.iterdir())}
    return {"files": sizes, "calls": statuses, "stuck": stuck}


def made_by_a_command(bench: Bench) -> str:
    try:
        with bench.session().call() as call:
            call.exec(["sh", "-c", f"{MAKE}; echo 1 > small.txt"])
    except MulliganError as fault:
        return fault.code
    return ""


def saved_by_somebody(bench: Bench) -> str:
    with bench.session().call() as call:
        call.write_file("large.bin", "ours")
        (bench.root / "large.bin").write_bytes(os.urandom(8 * MIB_BYTES))
        call.write_file("small.txt", "ours")
        call.fail("changed its mind")
    return ""


def left_by_a_program(bench: Bench) -> str:
    """Of `mulligan run`: nobody takes away what it did."""
    words = [sys.executable, "-m", "mulligan", "run", "--", "sh", "-c", f"{MAKE}; echo 1 > small.txt"]
    environment = {**os.environ, "MULLIGAN_HOME": str(bench.home)}
    done = subprocess.run(words, cwd=bench.root, env=environment, capture_output=True, text=True, check=False)
    return f"{done.returncode} {done.stderr}"


def died_with_its_command(bench: Bench) -> str:
    def run() -> int:
        with open_bench(bench.root.parent).session().call() as call:
            call.exec(["sh", "-c", f"{MAKE}; kill -9 {os.getpid()}"])
        return 0

    return signal.Signals(-in_child(run)).name


def coverage_after(bench: Bench, *verb: str) -> str:
    """What `mulligan coverage` says of a command that changes a file for whose old content the store has no room."""
    (bench.root / "large.bin").write_bytes(os.urandom(8 * MIB_BYTES))
    environment = {**os.environ, "MULLIGAN_HOME": str(bench.home)}
    mulligan = [sys.executable, "-m", "mulligan"]
    change = [*verb, "--", "sh", "-c", "echo x >> large.bin; echo 1 > small.txt"]
    subprocess.run([*mulligan, *change], cwd=bench.root, env=environment, capture_output=True, check=False)
    said = [*mulligan, "coverage"]
    return subprocess.run(said, cwd=bench.root, env=environment, capture_output=True, text=True, check=True).stdout


def exec_with(strategy: str) -> Callable[[Bench], str]:
    return lambda bench: coverage_after(bench, "exec", "--strategy", strategy)


def run_by_a_person(bench: Bench) -> str:
    return coverage_after(bench, "run")


def written_by_a_tool(bench: Bench) -> str:
    (bench.root / "large.bin").write_bytes(os.urandom(8 * MIB_BYTES))
    environment = {**os.environ, "MULLIGAN_HOME": str(bench.home)}
    try:
        with bench.session().call() as call:
            call.write_file("large.bin", "ours")
    except MulliganError:
        words = [sys.executable, "-m", "mulligan", "coverage"]
        return subprocess.run(words, cwd=bench.root, env=environment, capture_output=True, text=True, check=True).stdout
    return ""


SCENES = {
    one.__name__: one
    for one in (
        *(made_by_a_command, saved_by_somebody, left_by_a_program, died_with_its_command),
        *(run_by_a_person, written_by_a_tool),
    )
} | {f"exec_{strategy}": exec_with(strategy) for strategy in ("notify", "watch", "scan", "overlay")}


def main(base: Path, scene: str) -> None:
    limits.WHOLE_MAX_BYTES = MIB_BYTES
    home = base / "home"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ROOM, "tmpfs", home], check=True)
    bench = open_bench(base)
    told = SCENES[scene](bench)
    bench.close()
    full = open_bench(base)
    before = seen(full)
    full.close()
    subprocess.run(["mount", "-o", f"remount,{MORE_ROOM}", home], check=True)
    bench = open_bench(base)
    broken = [one.message for one in verify(bench.desk.ledger.store, SCHEMA) if one.severity == "broken"]
    print(json.dumps({"told": told, "full": before, "room": seen(bench), "broken": broken}))
    bench.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
