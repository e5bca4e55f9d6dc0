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
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mulligan.history.ledger import STORE_FULL
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import CALLS
from mulligan.store.verify import verify
from mulligan.values import limits
from mulligan.values.canonical import decode
from mulligan.values.errors import MulliganError
from mulligan.values.limits import MIB_BYTES
from tests.history.killed_process import in_child
from tests.temp_workspace import TempWorkspace, open_temp_workspace

ROOM, MORE_ROOM = "size=6m", "size=100m"
MAKE = f"head -c {8 * MIB_BYTES} /dev/urandom > large.bin"


def seen(workspace: TempWorkspace) -> dict[str, object]:
    """What is there, how every call stands, and what recovery could not end."""
    with workspace.open_root.ledger.store.read() as tx:
        statuses = [row.status for row in tx.select(CALLS)]
    stuck = [one.stuck is not None for one in workspace.recovered]
    sizes = {path.name: path.stat().st_size for path in sorted(workspace.root.iterdir())}
    return {"files": sizes, "calls": statuses, "stuck": stuck}


def full_in_coverage(workspace: TempWorkspace) -> list[bool]:
    """Of each call, whether its coverage says that the store was full."""
    with workspace.open_root.ledger.store.read() as tx:
        return [STORE_FULL in decode(row.coverage) for row in tx.select(CALLS)]


def made_by_a_command(workspace: TempWorkspace) -> str:
    try:
        with workspace.session().call() as call:
            call.exec(["sh", "-c", f"{MAKE}; echo 1 > small.txt"])
    except MulliganError as fault:
        return fault.code
    return ""


def saved_by_somebody(workspace: TempWorkspace) -> str:
    with workspace.session().call() as call:
        call.write_file("large.bin", "ours")
        (workspace.root / "large.bin").write_bytes(os.urandom(8 * MIB_BYTES))
        call.write_file("small.txt", "ours")
        call.fail("changed its mind")
    return ""


def left_by_a_program(workspace: TempWorkspace) -> str:
    """Of `mulligan run`: nobody takes away what it did. What it said, and what the coverage says then."""
    mulligan = [sys.executable, "-m", "mulligan"]
    environment = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
    running, listing = [*mulligan, "run", "--", "sh", "-c", f"{MAKE}; echo 1 > small.txt"], [*mulligan, "coverage"]
    done = subprocess.run(running, cwd=workspace.root, env=environment, capture_output=True, text=True, check=False)
    said = subprocess.run(listing, cwd=workspace.root, env=environment, capture_output=True, text=True, check=True)
    return f"{done.returncode} {done.stderr} {said.stdout}"


def died_with_its_command(workspace: TempWorkspace) -> str:
    def run() -> int:
        with open_temp_workspace(workspace.root.parent).session().call() as call:
            call.exec(["sh", "-c", f"{MAKE}; kill -9 {os.getpid()}"])
        return 0

    return signal.Signals(-in_child(run)).name


def coverage_after(workspace: TempWorkspace, *verb: str) -> str:
    """What `mulligan coverage` says of a command that changes a file for whose old content the store has no room."""
    (workspace.root / "large.bin").write_bytes(os.urandom(8 * MIB_BYTES))
    environment = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
    mulligan = [sys.executable, "-m", "mulligan"]
    change = [*verb, "--", "sh", "-c", "echo x >> large.bin; echo 1 > small.txt"]
    subprocess.run([*mulligan, *change], cwd=workspace.root, env=environment, capture_output=True, check=False)
    said = [*mulligan, "coverage"]
    return subprocess.run(said, cwd=workspace.root, env=environment, capture_output=True, text=True, check=True).stdout


def exec_with(strategy: str) -> Callable[[TempWorkspace], str]:
    return lambda workspace: coverage_after(workspace, "exec", "--strategy", strategy)


def run_by_a_person(workspace: TempWorkspace) -> str:
    return coverage_after(workspace, "run")


def written_by_a_tool(workspace: TempWorkspace) -> str:
    (workspace.root / "large.bin").write_bytes(os.urandom(8 * MIB_BYTES))
    environment = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
    try:
        with workspace.session().call() as call:
            call.write_file("large.bin", "ours")
    except MulliganError:
        words = [sys.executable, "-m", "mulligan", "coverage"]
        return subprocess.run(
            words, cwd=workspace.root, env=environment, capture_output=True, text=True, check=True
        ).stdout
    return ""


def saved_beside_a_command(workspace: TempWorkspace) -> str:
    """A person saves a file that the command has removed, while the store is full. Whether the save can be read."""
    base = workspace.root.parent
    (workspace.root / "d").mkdir()
    for number in range(400):
        (workspace.root / "d" / str(number)).write_bytes(os.urandom(30_000))
    for name in ("reached", "go"):
        os.mkfifo(base / name)

    def save() -> None:
        (base / "reached").read_text()
        (workspace.root / "d").mkdir(exist_ok=True)
        (workspace.root / "d" / "0").write_text("a person's\n")
        (base / "go").write_text("\n")

    person = threading.Thread(target=save)
    person.start()
    script = f"rm d/1*; rm d/0; rm -r d; echo > {base}/reached; read line < {base}/go"
    mulligan = [sys.executable, "-m", "mulligan", "exec", "--", "sh", "-c", script]
    environment = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
    subprocess.run(mulligan, cwd=workspace.root, env=environment, capture_output=True, check=False)
    person.join()
    return str((workspace.root / "d" / "0").read_bytes() == b"a person's\n")


def removed_by_a_command(workspace: TempWorkspace) -> str:
    """Many small files, whose preimages go into a spool first. Whether all are there again, and as they were."""
    files = {f"d/{number}": os.urandom(30_000) for number in range(400)}
    (workspace.root / "d").mkdir()
    for name, data in files.items():
        (workspace.root / name).write_bytes(data)
    told = "committed"
    try:
        with workspace.session().call() as call:
            call.exec(["sh", "-c", "rm -r d"])
    except MulliganError as fault:
        told = fault.code
    found = {f"d/{path.name}": path.read_bytes() for path in (workspace.root / "d").iterdir()}
    return f"{told} {found == files}"


SCENES = {
    one.__name__: one
    for one in (
        *(
            made_by_a_command,
            removed_by_a_command,
            saved_beside_a_command,
            saved_by_somebody,
            left_by_a_program,
            died_with_its_command,
        ),
        *(run_by_a_person, written_by_a_tool),
    )
} | {f"exec_{strategy}": exec_with(strategy) for strategy in ("notify", "watch", "scan", "overlay")}


def main(base: Path, scene: str) -> None:
    limits.WHOLE_MAX_BYTES = MIB_BYTES
    home = base / "home"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ROOM, "tmpfs", home], check=True)
    workspace = open_temp_workspace(base)
    told = SCENES[scene](workspace)
    workspace.close()
    full = open_temp_workspace(base)
    before = seen(full)
    full.close()
    subprocess.run(["mount", "-o", f"remount,{MORE_ROOM}", home], check=True)
    workspace = open_temp_workspace(base)
    broken = [one.message for one in verify(workspace.open_root.ledger.store, SCHEMA) if one.severity == "broken"]
    after = seen(workspace)
    said = {"told": told, "full": before, "room": after, "broken": broken, "store_full": full_in_coverage(workspace)}
    if scene == "saved_beside_a_command":
        with workspace.open_root.ledger.store.read() as tx:
            said["coverage"] = [note for row in tx.select(CALLS) for note in decode(row.coverage)]
    print(json.dumps(said))
    workspace.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
