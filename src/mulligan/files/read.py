"""Reading parts of files, never more than is returned."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.places import Spot

_CHUNK_BYTES = 64 * 1024
_UTF8_TAIL_MAX = 3
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@plain(slots=True, frozen=True)
class Slice:
    """Some bytes of a file and where they lie. `lines`: first line and number of lines, for a read by lines."""

    data: bytes
    offset: int
    size_bytes: int
    mtime_ns: int
    truncated: bool
    lines: tuple[int, int] | None = None


@contextmanager
def opened(spot: Spot) -> Iterator[int]:
    """A handle on the regular file at the spot. Refuses everything else, and does not open what it can see is not one:
    opening a FIFO wakes its writer, opening a device may do anything."""
    try:
        _require_regular(os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False), spot.path)
        handle = os.open(spot.name, _OPEN_FLAGS, dir_fd=spot.parent)
    except OSError as error:
        raise refusal_of(error, spot.path) from None
    try:
        _require_regular(os.fstat(handle), spot.path)
        yield handle
    finally:
        os.close(handle)


def _require_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise Refused("is_directory", "is_directory", f"{path} is a directory.")
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if not stat.S_ISREG(status.st_mode):
        raise Refused("error", "special_file", f"{path} is a device, FIFO or socket.")


def refusal_of(error: OSError, path: str) -> Refused:
    """What the operating system refused, as the outcome of an effect."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Refused("not_found", "path_not_found", f"{path} does not exist.")
    if error.errno == errno.ELOOP:
        return Refused("forbidden", "symlink_not_allowed", f"{path} goes through too many symbolic links.")
    if error.errno == errno.EISDIR:
        return Refused("is_directory", "is_directory", f"{path} is a directory.")
    if error.errno == errno.ENXIO:
        return Refused("error", "special_file", f"{path} is a device, FIFO or socket.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused("error", "permission_denied", f"The system does not let us touch {path}.")
    if error.errno == errno.ENAMETOOLONG:
        return Refused("error", "invalid_path", f"{path[:80]}… is longer than this file system allows.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused("error", "no_space", f"There is no space left to write {path}.")
    return Refused("error", "io_error", f"{path}: {error.strerror}.")


def read_bytes(
    handle: int, offset: int, limit: int | None, *, whole_characters: bool, ceiling: int | None = None
) -> Slice:
    """The bytes at `offset`; with `whole_characters`, widened so that no UTF-8 character is cut.

    Never more than `ceiling`: where widening would pass it, the last character is left out instead.
    """
    status = os.fstat(handle)
    start = min(offset, status.st_size)
    end = status.st_size if limit is None else min(start + limit, status.st_size)
    if whole_characters and end - start < status.st_size:
        first = max(0, start - _UTF8_TAIL_MAX)
        window = _pread(handle, first, end + _UTF8_TAIL_MAX)
        begin, data = whole_page(window, start - first, end - start, ceiling=ceiling)
        start = first + begin
    else:
        data = _pread(handle, start, end)
    end = start + len(data)
    return Slice(data, start, status.st_size, status.st_mtime_ns, truncated=end < status.st_size)


def whole_page(window: bytes, at: int, length: int, *, ceiling: int | None) -> tuple[int, bytes]:
    """`length` bytes of the window and where they begin, widened to whole characters if that makes them text.

    The window reaches a character beyond them at both ends, where there is more.
    """
    stop = min(at + length, len(window))
    begin, end = _widened(window, at, stop) if at < stop else (at, at)
    if ceiling is None or end - begin <= ceiling:
        return begin, window[begin:end]
    # What was widened is text, so only a character at the end can be incomplete.
    whole = window[begin : begin + ceiling].decode("utf-8", "ignore").encode("utf-8")
    return (begin, whole) if whole else (at, window[at:stop])


def _pread(handle: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end and (piece := os.pread(handle, end - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _widened(window: bytes, start: int, end: int) -> tuple[int, int]:
    """Grown at both ends to whole characters, if that makes it text; else as it was."""
    ahead = range(start, max(-1, start - _UTF8_TAIL_MAX - 1), -1)
    begin = next((at for at in ahead if not _continues(window[at])), start)
    for stop in range(end, min(end + _UTF8_TAIL_MAX, len(window)) + 1):
        if _is_utf8(window[begin:stop]):
            return begin, stop
        if stop < len(window) and not _continues(window[stop]):
            break
    return start, end


def _continues(byte: int) -> bool:
    return 0x80 <= byte < 0xC0


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def read_lines(
    handle: int,
    first: int,
    count: int | None,
    limit: int | None,
    *,
    whole_characters: bool = True,
    ceiling: int | None = None,
) -> Slice:
    """`count` lines from line `first` (from 0), at most `limit` bytes of them; characters as `read_bytes` does."""
    status = os.fstat(handle)
    start = _line_start(handle, first)
    data = _lines_at(handle, start, count, limit)
    if whole_characters and len(data) == limit:
        end = start + limit
        _, data = whole_page(data + _pread(handle, end, end + _UTF8_TAIL_MAX), 0, limit, ceiling=ceiling)
    found = data.count(b"\n") + (1 if data and not data.endswith(b"\n") else 0)
    truncated = start + len(data) < status.st_size
    return Slice(data, start, status.st_size, status.st_mtime_ns, truncated, lines=(first, found))


def _line_start(handle: int, line: int) -> int:
    at = 0
    while line > 0 and (chunk := os.pread(handle, _CHUNK_BYTES, at)):
        newlines = chunk.count(b"\n")
        if newlines < line:
            line -= newlines
            at += len(chunk)
            continue
        cut = -1
        for _ in range(line):
            cut = chunk.index(b"\n", cut + 1)
        return at + cut + 1
    return at


def _lines_at(handle: int, start: int, count: int | None, limit: int | None) -> bytes:
    pieces: list[bytes] = []
    size, found = 0, 0
    while (count is None or found < count) and (limit is None or size < limit):
        chunk = os.pread(handle, _CHUNK_BYTES, start + size)
        if not chunk:
            break
        if limit is not None:
            chunk = chunk[: limit - size]
        if count is not None and found + chunk.count(b"\n") >= count:
            cut = -1
            for _ in range(count - found):
                cut = chunk.index(b"\n", cut + 1)
            chunk = chunk[: cut + 1]
        found += chunk.count(b"\n")
        size += len(chunk)
        pieces.append(chunk)
        if count is not None and found >= count:
            break
    return b"".join(pieces)
