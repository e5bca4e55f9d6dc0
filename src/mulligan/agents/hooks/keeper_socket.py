"""How a process reaches the background process of the hooks. It imports little, because command lines wait for it."""

from __future__ import annotations

import os
from collections.abc import Callable

from mulligan.store.sqlite_file import refuse_untrusted

FOLDER = "hooks"
SOCKET = "keeper.sock"
_WAIT_S = 2.0
_DONE = b"0"


def keeper_folder(home: str) -> str:
    """Where hooks reach the background process of their own mount namespace, and leave what they could not deliver.

    A container has other files at the same paths, so its hooks need a process that sees the same files as they do.
    """
    try:
        namespace = os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        namespace = 0
    return os.path.join(home, FOLDER, str(namespace))


def ask_keeper(folder: str, word: bytes, *, before: Callable[[], object] = bool) -> bytes | None:
    """`stop`, `status` or `sync PROCESS`. None if no background process answers. `before` runs only if one is there.

    Raises `untrusted_owner` for one of another user.
    """
    import socket  # Most processes find no background process, and need none.

    for path in (folder, os.path.join(folder, SOCKET)):
        refuse_untrusted(path)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as speaker:
            speaker.settimeout(_WAIT_S)
            # The name of a socket has at most 107 bytes, and the folder may have more.
            speaker.connect(f"/proc/self/fd/{handle}/{SOCKET}")
            before()
            speaker.sendall(len(word).to_bytes(8, "big") + word)
            answer = speaker.recv(1 << 16)
            return answer[1:] if answer[:1] == _DONE else None
    except OSError:
        return None
    finally:
        os.close(handle)
