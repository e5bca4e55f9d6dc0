"""Power cuts on real file systems: `make test-power`, as root.

A history with every kind of call runs on a file system in a loop device. At seeded moments its processes are stopped
and the file behind the device is copied: what the kernel had not written by then is not in the copy, as after a power
cut. Each copy is mounted in the place of the original, which replays its journal, and the promise is checked there.

    python tests/power/mounted.py [FILE_SYSTEM MODE]
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.power.disk_states import Mode
from tests.power.history import SEGMENTS, start_recording, start_segment
from tests.power.recorder import read_log

CHECK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "check.py")
MAKERS = {
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "ext4 without journal": ["mkfs.ext4", "-q", "-F", "-O", "^has_journal"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
MOUNT_OPTIONS = {"xfs": "loop,nouuid"}
"""A process in a mount namespace of its own may keep the copy before mounted; xfs then refuses another with its id."""
RUNS: tuple[tuple[str, Mode], ...] = (
    *(("ext4", mode) for mode in ("process", "power")),
    *(("xfs", mode) for mode in ("process", "power")),
    *(("btrfs", mode) for mode in ("process", "power")),
    ("ext4 without journal", "power"),
)
DISK_BYTES = 400 * 1024 * 1024
CUTS = 12
"""Of each run, spread over its operations."""
PATIENCE_S = 300.0


@dataclass
class Run:
    """One history on one file system."""

    system: str
    mode: Mode
    folder: str
    copies: list[tuple[str, int]] = field(default_factory=list)

    @property
    def disk(self) -> str:
        return os.path.join(self.folder, "disk")

    @property
    def place(self) -> str:
        return os.path.join(self.folder, "mounted")

    @property
    def base(self) -> str:
        return os.path.join(self.place, "base")

    @property
    def log(self) -> str:
        return os.path.join(self.folder, "log")

    def broken_promises(self) -> list[str]:
        with open(self.disk, "wb") as file:
            file.truncate(DISK_BYTES)
        _run([*MAKERS[self.system], self.disk])
        os.mkdir(self.place)
        with mounted(self.system, self.disk, self.place):
            os.mkdir(self.base)
            start_recording(self.base, self.log, seed=1)
            os.sync()
            self._run_history()
        return [found for copy, events in self.copies for found in self._check(copy, events)]

    def _run_history(self) -> None:
        random = Random(f"{self.system} {self.mode}")
        per_segment = CUTS // SEGMENTS
        for segment in range(SEGMENTS):
            process = start_segment(self.base, self.log, mode=self.mode, seed=1, segment=segment, syncs=True)
            try:
                for _ in range(per_segment):
                    if not self._wait_for_operations(process, random.randint(20, 200)):
                        break
                    self._cut(process)
                process.wait(PATIENCE_S)
            finally:
                _signal(process, signal.SIGKILL)
                process.wait()
            self._cut(None)

    def _wait_for_operations(self, process: subprocess.Popen[str], more: int) -> bool:
        """Until so many operations more were recorded; False if the process ended before."""
        size, wanted = os.path.getsize(self.log), more * 400
        while process.poll() is None:
            if os.path.getsize(self.log) >= size + wanted:
                return True
            os.sched_yield()
        return False

    def _cut(self, process: subprocess.Popen[str] | None) -> None:
        """Copy the disk while no process of the history runs and the kernel writes nothing to it."""
        copy = f"{self.disk}.{len(self.copies)}"
        if process is not None:
            _signal(process, signal.SIGSTOP)
        while True:
            before = os.stat(self.disk).st_mtime_ns
            subprocess.run(["cp", "--sparse=always", self.disk, copy], check=True)
            if os.stat(self.disk).st_mtime_ns == before:
                break
        self.copies.append((copy, len(read_log(self.log))))
        if process is not None:
            _signal(process, signal.SIGCONT)

    def _check(self, copy: str, events: int) -> list[str]:
        if self.system == "ext4 without journal":
            # A machine does this when it starts; its status says whether it had to repair anything.
            subprocess.run(["e2fsck", "-fy", copy], capture_output=True, check=False)
        with mounted(self.system, copy, self.place):
            argv = [sys.executable, CHECK, self.base, self.log, self.mode, "mounted", str(events + 1)]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
        os.unlink(copy)
        if done.returncode != 0:
            return [done.stderr]
        return [f"after {events} operations: {found}" for found in json.loads(done.stdout)["violations"]]


@contextmanager
def mounted(system: str, disk: str, place: str) -> Iterator[None]:
    _run(["mount", "-o", MOUNT_OPTIONS.get(system, "loop"), disk, place])
    try:
        yield
    finally:
        _run(["umount", place])


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """To the process and the commands that it runs."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def refuse_missing() -> None:
    """Every file system must be there: a run without one of them would prove less than it says."""
    with contextlib.suppress(OSError):
        subprocess.run(["modprobe", "-a", "ext4", "xfs", "btrfs"], capture_output=True, check=False)
    with open("/proc/filesystems", encoding="ascii") as file:
        known = {line.split()[-1] for line in file}
    missing = [name for name in ("ext4", "xfs", "btrfs") if name not in known]
    if missing:
        raise SystemExit(f"This kernel has no {' and no '.join(missing)}, so make test-power cannot test it.")


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}: {done.stderr.strip()}")


def main(*wanted: str) -> int:
    if os.geteuid() != 0:
        raise SystemExit("The power cuts on real file systems need root: they mount loop devices.")
    refuse_missing()
    broken = 0
    for system, mode in RUNS:
        if wanted and wanted != (system, mode):
            continue
        folder = tempfile.mkdtemp(prefix="mulligan-power-")
        try:
            run = Run(system, mode, folder)
            found = run.broken_promises()
            print(f"{system}, {mode}: {len(run.copies)} power cuts, {len(found)} broken promises", flush=True)
            for one in found:
                print(f"  {one}", flush=True)
            broken += len(found)
        finally:
            shutil.rmtree(folder)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
