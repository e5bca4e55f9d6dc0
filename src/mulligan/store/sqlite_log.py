"""SQLite's log, looked at from outside: does it hold commits that SQLite does not see?

Opening a store, SQLite reads its log up to the first page whose checksum does not hold, and takes the rest for what a
killed writer left. That is right for the tail of a log. A damaged byte further in makes it pass over every commit that
follows, acknowledged ones, and nothing inside the database can tell: what is left is sound, only older. But a killed
writer leaves no commit behind, so a commit beyond the place where SQLite stopped is one that was lost.

Format: https://sqlite.org/fileformat2.html#the_write_ahead_log.
"""

from __future__ import annotations

import os
import struct

from mulligan.values.plain import plain

_HEAD_BYTES, _FRAME_HEAD_BYTES = 32, 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
"""The first number of a log, and the byte order its checksums are made in."""


@plain(slots=True, frozen=True)
class _Head:
    order: str
    page_bytes: int
    salts: bytes
    checksum: tuple[int, int]

    @property
    def frame_bytes(self) -> int:
        return _FRAME_HEAD_BYTES + self.page_bytes

    def offset_of(self, frame: int) -> int:
        return _HEAD_BYTES + frame * self.frame_bytes


def log_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def unread_commits(path: str, frames_seen: int) -> str | None:
    """What is wrong with the log at `path`, of which SQLite reads so many pages; None if nothing is.

    Nobody may write the log meanwhile.
    """
    if log_bytes(path) <= _HEAD_BYTES:
        return None
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = _head(os.pread(handle, _HEAD_BYTES, 0))
        if head is None:
            return "the head of its log is damaged: what the log holds cannot be read"
        lost = _lost(handle, head, frames_seen)
    finally:
        os.close(handle)
    return f"its log is damaged after page {frames_seen}: {lost} commits behind it cannot be read" if lost else None


def _lost(handle: int, head: _Head, frames_seen: int) -> int:
    frames = (os.fstat(handle).st_size - _HEAD_BYTES) // head.frame_bytes
    broken = _first_broken(handle, head, frames_seen)
    if broken is None:
        return 0  # All of it is in the main file, and the next writer begins the log anew.
    commits = _commits(handle, head, range(frames_seen, frames))
    # A writer that overwrites an older log and fails between the two halves of its last page leaves this.
    was_torn = commits == [broken] and broken + 1 < frames
    return 0 if was_torn else len(commits)


def _head(raw: bytes) -> _Head | None:
    magic, _, page_bytes, serial = struct.unpack(">4I", raw[:16])
    order = _MAGIC.get(magic)
    if order is None:
        return None
    # A writer that begins the log anew, when all of it is in the main file, may get no further than its serial number.
    for number in (serial, serial - 1):
        head = raw[:12] + struct.pack(">I", number & 0xFFFFFFFF) + raw[16:24]
        checksum = _checksum(order, head, (0, 0))
        if struct.pack(">2I", *checksum) == raw[24:]:
            return _Head(order, page_bytes, raw[16:24], checksum)
    return None


def _checksum(order: str, data: bytes, seed: tuple[int, int]) -> tuple[int, int]:
    first, second = seed
    for one, other in struct.iter_unpack(f"{order}2I", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


def _first_broken(handle: int, head: _Head, first: int) -> int | None:
    """The first page from there on that does not check out; None if a whole transaction does."""
    checksum = head.checksum
    if first:
        checksum = struct.unpack(">2I", _frame(handle, head, first - 1)[16:24])
    while len(raw := _frame(handle, head, first)) == head.frame_bytes:
        checksum = _checksum(head.order, raw[_FRAME_HEAD_BYTES:], _checksum(head.order, raw[:8], checksum))
        if raw[8:24] != head.salts + struct.pack(">2I", *checksum):
            return first
        if _is_commit(raw):
            return None
        first += 1
    return first


def _commits(handle: int, head: _Head, frames: range) -> list[int]:
    """Pages of this log, not of one that was in the file before it, that end a transaction."""
    heads = ((number, os.pread(handle, _FRAME_HEAD_BYTES, head.offset_of(number))) for number in frames)
    return [number for number, raw in heads if raw[8:16] == head.salts and _is_commit(raw)]


def _frame(handle: int, head: _Head, number: int) -> bytes:
    return os.pread(handle, head.frame_bytes, head.offset_of(number))


def _is_commit(frame: bytes) -> bool:
    return frame[4:8] != bytes(4)


__all__ = ["log_bytes", "unread_commits"]
