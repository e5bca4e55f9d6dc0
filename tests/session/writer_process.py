"""A process that writes to a session until it is told to stop, or killed.

    python writer_child.py ROOT STORE SESSION COUNT NAME

It prints a line for each message that is acknowledged; what it printed must be there whatever happens to it.
"""

from __future__ import annotations

import sys

import mulligan.api as api


def main(root: str, store: str, session: str, count: int, name: str) -> None:
    with api.open(root, store=store) as opened:
        talk = opened.session(session)
        for number in range(count):
            talk.inject({"role": "user", "content": f"{name} {number}"})
            if number % 5 == 4:
                talk.set_scratchpad({"facts": [number]})
            print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
