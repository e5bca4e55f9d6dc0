"""The words of inotify(7), and how its events are read."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
OVERFLOW, IGNORED, IS_FOLDER = 0x4000, 0x8000, 0x40000000
ONLY_FOLDERS, DO_NOT_FOLLOW, EXCLUDE_UNLINKED = 0x01000000, 0x02000000, 0x04000000

_EVENT = struct.Struct("=iIII")


def events_in(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Watch, mask and name of each event that one read gave."""
    at = 0
    while at < len(data):
        watch, mask, _, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        yield watch, mask, data[at : at + length].rstrip(b"\0")
        at += length
