"""What a command did that no undo can reach: files outside the root, other programs it spoke to, the network.

Known only where every changing call is heard of. Listed in the receipt's coverage, in bounded length.
"""

from __future__ import annotations

import os
import socket
import stat
import time

from mulligan.workspace.exec.ledger import look

LISTED_MAX = 64
"""More paths than this are listed by the folders they are in; more addresses than this not at all."""

_TICK_NS = 20_000_000
_SYSTEM = (b"/dev/", b"/proc/", b"/sys/")
_SHARED_MEMORY = b"/dev/shm/"
_DNS_PORT = 53


class Beyond:
    """Notes for one command. For one thread."""

    def __init__(self) -> None:
        self._since_ns = time.clock_gettime_ns(time.CLOCK_REALTIME) - _TICK_NS
        self._outside: dict[bytes, bool] = {}
        self._spoken_to: dict[bytes, str] = {}
        self._own: set[bytes] = set()

    def may_change(self, path: bytes) -> None:
        """A path outside the root, about to be changed."""
        if path in self._outside or (path.startswith(_SYSTEM) and not path.startswith(_SHARED_MEMORY)):
            return
        self._outside[path] = look_quietly(path) is not None

    def bound(self, address: bytes) -> None:
        """An address at which the command itself listens."""
        self._own.add(address)

    def connected(self, address: bytes, reason: str) -> None:
        if address not in self._own and len(self._spoken_to) < LISTED_MAX:
            self._spoken_to[address] = reason

    def coverage(self) -> dict[bytes, str]:
        changed = [path for path, existed in self._outside.items() if self._has_changed(path, existed)]
        return dict.fromkeys(_in_few_words(changed), "outside_root") | self._spoken_to

    def _has_changed(self, path: bytes, existed: bool) -> bool:
        """What was made and removed again is no trace, nor is what could not be opened after all."""
        status = look_quietly(path)
        if status is None:
            return existed
        plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)
        return plain and status.st_ctime_ns >= self._since_ns


def look_quietly(path: bytes) -> os.stat_result | None:
    try:
        return look(path)
    except OSError:
        return None


def _in_few_words(paths: list[bytes]) -> list[bytes]:
    found = set(paths)
    while len(found) > LISTED_MAX:
        deepest = max(path.count(b"/") for path in found)
        if deepest <= 1:
            break
        found = {path.rpartition(b"/")[0] if path.count(b"/") == deepest else path for path in found}
    return sorted(found)


def unix_name(raw: bytes) -> bytes | None:
    """The name in a Unix socket's address, with @ for what is no path; None for other addresses and for no name."""
    if len(raw) < 3 or int.from_bytes(raw[:2], "little") != socket.AF_UNIX:
        return None
    if raw[2]:
        return raw[2:].split(b"\0", 1)[0]
    return b"@" + raw[3:].rstrip(b"\0") if len(raw) > 3 else None


def internet_address(raw: bytes) -> tuple[bytes, str] | None:
    """From a socket address in memory to words, and what it is: this machine's own is another program's, mostly."""
    family = int.from_bytes(raw[:2], "little")
    port = int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET and len(raw) >= 8:
        host = socket.inet_ntop(socket.AF_INET, raw[4:8])
        shown = f"{host}:{port}"
    elif family == socket.AF_INET6 and len(raw) >= 24:
        host = socket.inet_ntop(socket.AF_INET6, raw[8:24])
        shown = f"[{host}]:{port}"
    else:
        return None
    local = (host.startswith("127.") or host == "::1") and port != _DNS_PORT
    return shown.encode("ascii"), "other_daemon" if local else "network"
