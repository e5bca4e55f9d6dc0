"""A process that imports a bundle or seeds a session and is killed when its clock is asked for the n-th time.

python dying_child.py import|seed FILE ROOT STORE N
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import UTC, datetime

import mulligan


class DeadlyClock:
    def __init__(self, asked_max: int) -> None:
        self.left = asked_max

    def now(self) -> datetime:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return datetime.now(UTC)


def main(verb: str, file: str, root: str, store: str, asked_max: str) -> None:
    clock = DeadlyClock(10**9)
    with mulligan.open(root, store=store, clock=clock) as opened:
        clock.left = int(asked_max)
        if verb == "import":
            with open(file, "rb") as bundle:
                opened.sessions.import_bundle(bundle.read())
        else:
            opened.sessions.seed_from_jsonl(file, {"rename_session": "s"})
        clock.left = 10**9
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
