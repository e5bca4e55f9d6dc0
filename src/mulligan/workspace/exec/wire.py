"""Messages between us, the launcher and a command's warden: a length, a marshalled value, descriptors beside it.

Both ends are the same interpreter and neither is the command, so `marshal` is safe here and costs no import.
"""

from __future__ import annotations

import array
import marshal
import os
import socket
from typing import Any

_HEADER_BYTES = 4
_FDS_MAX = 8


def send(channel: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Descriptors travel with the first byte, so they are there when the message is."""
    body = marshal.dumps(message)
    head = len(body).to_bytes(_HEADER_BYTES, "little")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    packet = head + body
    sent = channel.sendmsg([packet], rights)
    if sent < len(packet):
        channel.sendall(packet[sent:])


def receive(channel: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and its descriptors (close-on-exec); None when the other end is gone."""
    try:
        head, fds = _first_bytes(channel)
        if len(head) < _HEADER_BYTES:
            return None
        body = _exactly(channel, int.from_bytes(head, "little"))
    except ConnectionResetError:
        return None
    return None if body is None else (marshal.loads(body), fds)


def _first_bytes(channel: socket.socket) -> tuple[bytes, list[int]]:
    received = array.array("i")
    head, ancillary, _, _ = channel.recvmsg(
        _HEADER_BYTES, socket.CMSG_SPACE(_FDS_MAX * received.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    fds = list(received)
    if head and len(head) < _HEADER_BYTES:
        head += _exactly(channel, _HEADER_BYTES - len(head)) or b""
    return head, fds


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def close_all(fds: list[int] | tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
