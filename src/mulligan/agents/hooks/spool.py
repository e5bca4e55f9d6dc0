"""What hooks could not deliver: files in a private folder, one a message, oldest first. Written by `client`."""

from __future__ import annotations

import os
from contextlib import suppress

_SPOOL = "spool"


def private_folder(path: str) -> None:
    """Make it, and what is missing above it, for its owner only."""
    if os.path.isdir(path):
        return
    private_folder(os.path.dirname(path))
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)


class Spool:
    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, _SPOOL)

    def names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._folder) if not name.endswith(".part"))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        with open(os.path.join(self._folder, name), "rb") as file:
            return file.read()

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, name))
