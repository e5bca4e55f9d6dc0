"""A person who saves one file as fast as they can, in a process of their own, and knows what they gave up themselves.

`python hot_saver.py FILE rename|in_place` saves until its standard input ends, then prints the numbers of the saves it
never took out again itself. By rename: a new file is exchanged with the old one, so the save knows what it replaced. In
place: the old bytes are read through the very handle that then empties and writes the file.
"""

from __future__ import annotations

import os
import select
import sys

from mulligan.files import kernel


def content_of(number: int) -> bytes:
    return b"person %d\n" % number * 50


def number_of(content: bytes) -> int | None:
    """Which save these bytes are; None if they are none, or not a whole one."""
    first = content.split(b"\n", 1)[0]
    if not first.startswith(b"person "):
        return None
    number = int(first[7:])
    return number if content == content_of(number) else None


def save_by_rename(path: str, number: int) -> int | None:
    """The save that this one replaced, if it replaced one."""
    folder, name = os.path.split(path)
    draft = name.encode() + b".saving"
    handle = os.open(folder, os.O_RDONLY)
    try:
        with open(os.path.join(folder, draft.decode()), "wb") as file:
            file.write(content_of(number))
        kernel.exchange(handle, draft, name.encode())
        with open(os.path.join(folder, draft.decode()), "rb") as file:
            return number_of(file.read())
    finally:
        os.close(handle)


def save_in_place(path: str, number: int) -> int | None:
    with open(path, "r+b", buffering=0) as file:
        before = file.read()
        file.seek(0)
        file.truncate()
        file.write(content_of(number))
    return number_of(before)


def main(path: str, how: str) -> None:
    save = save_by_rename if how == "rename" else save_in_place
    kept: set[int] = set()
    number = 0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        kept.discard(save(path, number) or 0)
        kept.add(number)
    print(number, *sorted(kept))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
