"""A program that swaps a directory for a symbolic link, again and again, until nobody holds the pipe to it any more.

python swapper.py DIRECTORY LINK      prints how often it has swapped
"""

from __future__ import annotations

import os
import select
import sys

from mulligan.files.kernel import exchange

LOOK_EVERY = 16
SWAPS_MIN = 10_000


def main(directory: str, link: str) -> int:
    parent = os.open(os.path.dirname(directory), os.O_RDONLY)
    one, other = (os.fsencode(os.path.basename(path)) for path in (directory, link))
    count = 0
    while count < SWAPS_MIN or not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(LOOK_EVERY):
            exchange(parent, one, other)
        count += LOOK_EVERY
    return count


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
