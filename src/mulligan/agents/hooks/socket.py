"""How a process reaches the background process of the hooks, and the spool of messages that did not reach it.

This module imports little, because every verb of the command line loads it. `client` writes the spool: one file for
each message, in a private folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from mulligan.agents.hooks.client import FOLDER as FOLDER
from mulligan.agents.hooks.client import background_folder as background_folder
from mulligan.store.sqlite_file import refuse_untrusted

SOCKET = "keeper.sock"
_WAIT_S = 2.0
_DONE = b"0"


def ask_background(folder: str, word: bytes, *, before: Callable[[], object] = bool) -> bytes | None:
    """Sends `stop`, `status` or `sync PROCESS`. None if no background process answers.

    `before` runs once the connection exists. Raises `untrusted_owner` if another user owns the socket.
    """
    import socket  # here, because most processes find no background process

    for path in (folder, os.path.join(folder, SOCKET)):
        refuse_untrusted(path)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as speaker:
            speaker.settimeout(_WAIT_S)
            # The address of a socket has at most 107 bytes, and the path of the folder may be longer.
            speaker.connect(f"/proc/self/fd/{handle}/{SOCKET}")
            before()
            speaker.sendall(len(word).to_bytes(8, "big") + word)
            answer = speaker.recv(1 << 16)
            return answer[1:] if answer[:1] == _DONE else None
    except OSError:
        return None
    finally:
        os.close(handle)


_SPOOL = "spool"


class Spool:
    """The messages that hooks could not deliver, oldest first."""

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
