"""What an index of git's says, apart from what git only remembers in it to be quicker.

`git status` writes the index anew with fresh times and inodes of the files, though nobody has staged anything. Two
indexes say the same if they have the same entries: paths, modes, ids, stages and the marks that people set.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import new
from struct import Struct, error

from mulligan.values.plain import plain

_HEADER = Struct(">4sII")
_STAT_AND_MODE = Struct(">24xI12x")
_SHORT = Struct(">H")
_EXTENSION = Struct(">4sI")
_SUMS = (("sha1", 20), ("sha256", 32))
_ASSUMED_AND_STAGE = 0xB000
_EXTENDED = 0x4000
_QUICKER = frozenset({b"TREE", b"UNTR", b"FSMN", b"EOIE", b"IEOT"})
"""extensions that can be computed again"""


@plain(slots=True, frozen=True)
class _Entry:
    path: bytes
    mode: int
    oid: bytes
    marks: tuple[int, int]
    """the stage and whether it is assumed unchanged; whether it is only intended, or not in the working tree"""


def say_the_same(one: bytes, other: bytes) -> bool:
    """Whether both are indexes with the same entries. What cannot be read says nothing."""
    told = _told(one)
    return told is not None and told == _told(other)


def _told(data: bytes) -> list[object] | None:
    """Its ids are as long as the sum at its end, which git may leave out."""
    for algorithm, oid_size in _SUMS:
        summed = new(algorithm, data[:-oid_size], usedforsecurity=False).digest()
        try:
            if data[-oid_size:] in (summed, bytes(oid_size)):
                return list(_parts(data, oid_size))
        except (error, ValueError, IndexError):
            continue
    return None


def _parts(data: bytes, oid_size: int) -> Iterator[object]:
    magic, version, count = _HEADER.unpack_from(data)
    if magic != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("not an index")
    at, path = _HEADER.size, b""
    for _ in range(count):
        entry, at = _entry(data, at, oid_size, None if version < 4 else path)
        path = entry.path
        yield entry
    end = len(data) - oid_size
    while at < end:
        name, size = _EXTENSION.unpack_from(data, at)
        at += _EXTENSION.size
        if name not in _QUICKER:
            yield name, data[at : at + size]
        at += size
    if at != end:
        raise ValueError("it ends elsewhere")


def _entry(data: bytes, start: int, oid_size: int, previous: bytes | None) -> tuple[_Entry, int]:
    """One, and where the next begins. `previous`: the path before, where paths are told by what differs."""
    (mode,) = _STAT_AND_MODE.unpack_from(data, start)
    at = start + _STAT_AND_MODE.size
    oid = data[at : at + oid_size]
    (flags,) = _SHORT.unpack_from(data, at + oid_size)
    at += oid_size + _SHORT.size
    more = 0
    if flags & _EXTENDED:
        (more,) = _SHORT.unpack_from(data, at)
        at += _SHORT.size
    kept = b""
    if previous is not None:
        less, at = _offset(data, at)
        kept = previous[: len(previous) - less]
    nul = data.index(b"\0", at)
    entry = _Entry(kept + data[at:nul], mode, oid, (flags & _ASSUMED_AND_STAGE, more))
    padded = start + (nul - start + 8) // 8 * 8
    return entry, padded if previous is None else nul + 1


def _offset(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = (value + 1 << 7) | (data[at] & 0x7F)
    return value, at + 1
