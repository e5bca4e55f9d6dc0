"""A second power cut while Mulligan recovers from the first one.

    python tests/power/second_cut.py BASE LOG MODE INODES

BASE holds what the first cut left. The process opens it as the next boot does, and its disk operations are recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from random import Random

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.power.disk_states import Dropped, Mode, Node, PowerCut, Recording, materialise
from tests.power.machine import pretend_boot, show_inodes, start_machine
from tests.power.recorder import Recorder, install, read_log


class Recovery:
    """The recorded recovery from one cut, and what it printed."""

    def __init__(self, base: str, cut: PowerCut) -> None:
        log, inodes = f"{base}.second", f"{base}.inodes"
        state = cut.state()
        for old in filter(os.path.exists, (log, inodes)):
            os.unlink(old)
        with open(inodes, "w", encoding="ascii") as file:
            json.dump(materialise(base, state), file)
        Recorder(base, log).mark("start", {place: _as_event(node) for place, node in state.items()})
        argv = [sys.executable, os.path.abspath(__file__), base, log, cut.mode, inodes]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MULLIGAN", "XDG"))}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise AssertionError(f"recovery from the first cut ended with {done.returncode}: {done.stderr}")
        self.printed = done.stdout
        self.recording = Recording(read_log(log))
        self.mode: Mode = cut.mode

    def cut(self, seed: str, dropped: Dropped = lambda _: False) -> PowerCut:
        """A cut at any moment of it."""
        random = Random(seed)
        return PowerCut(self.recording, self.mode, random.randint(1, self.recording.length), random, dropped)


def _as_event(node: Node) -> tuple[str, int, bytes, int, int]:
    return (node.kind, node.mode, node.content, node.inode, node.mtime_ns)


def main(base: str, log: str, mode: Mode, inodes: str) -> None:
    with open(inodes, encoding="ascii") as file:
        recorded = {int(real): inode for real, inode in json.load(file).items()}
    recorder = Recorder(base, log)
    install(recorder)
    pretend_boot("the boot after the first cut")
    show_inodes(recorded)
    start_machine()
    recorder.mark("begin", "recovery")
    import mulligan

    tree, state = os.path.join(base, "tree"), os.path.join(base, "state")
    with mulligan.open(tree, store=state, durability=mode) as opened:
        print(*(one.path for one in opened.power_cut), *(path for one in opened.recovered for path in one.conflicts))
    recorder.mark("end", "recovery", ())


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
