"""Reads parts of files, and never more than it returns.

`list_below` lists everything below a directory as a person would: files, links and directories, in byte order of their
paths. Devices, FIFOs and sockets are `special`. It never lists or enters `.git`, nor lists our drafts, and does not
follow links. It leaves out ignored entries unless the caller wants them; the base itself is never ignored.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from mulligan.files.disk import DRAFT_PREFIX
from mulligan.files.resolve import ResolvedPath
from mulligan.files.tree.directories import OPEN_DIRECTORY, OPEN_FILE, Handles
from mulligan.files.tree.ignore import IgnoreRules, read_sources
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, ancestors_of, join
from mulligan.values.text import is_utf8

_CHUNK_BYTES = 64 * 1024
_UTF8_TAIL_MAX = 3


@fast_dataclass(slots=True, frozen=True)
class Slice:
    """Some bytes of a file and their offset. `lines`: first line and number of lines, for a read by lines."""

    data: bytes
    offset: int
    size_bytes: int
    mtime_ns: int
    truncated: bool
    lines: tuple[int, int] | None = None


@contextmanager
def opened(resolved: ResolvedPath) -> Iterator[int]:
    """A handle on a regular file.

    Refuses everything else without opening it: opening a FIFO wakes its writer, and opening a device may have any
    effect.
    """
    try:
        _require_regular(os.stat(resolved.name, dir_fd=resolved.parent, follow_symlinks=False), resolved.path)
        handle = os.open(resolved.name, OPEN_FILE, dir_fd=resolved.parent)
    except OSError as error:
        raise refusal_of(error, resolved.path) from None
    try:
        _require_regular(os.fstat(handle), resolved.path)
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
    """The refusal for an OSError of this path."""
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
    """`length` bytes of the window and their offset, widened to whole characters if that makes them text.

    The window has a character more at both ends, if the file does.
    """
    stop = min(at + length, len(window))
    begin, end = _widened(window, at, stop) if at < stop else (at, at)
    if ceiling is None or end - begin <= ceiling:
        return begin, window[begin:end]
    # The widened bytes are text, so only a character at the end can be incomplete.
    whole = window[begin : begin + ceiling].decode("utf-8", "ignore").encode("utf-8")
    return (begin, whole) if whole else (at, window[at:stop])


def _pread(handle: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end and (piece := os.pread(handle, end - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _widened(window: bytes, start: int, end: int) -> tuple[int, int]:
    """The range widened at both ends to whole characters, if that makes it text; else unchanged."""
    ahead = range(start, max(-1, start - _UTF8_TAIL_MAX - 1), -1)
    begin = next((at for at in ahead if not _continues(window[at])), start)
    for stop in range(end, min(end + _UTF8_TAIL_MAX, len(window)) + 1):
        if is_utf8(window[begin:stop]):
            return begin, stop
        if stop < len(window) and not _continues(window[stop]):
            break
    return start, end


def _continues(byte: int) -> bool:
    return 0x80 <= byte < 0xC0


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


Kind = Literal["file", "dir", "symlink", "special"]

_GIT = ".git"
_DRAFT = DRAFT_PREFIX.decode("ascii")
_MARKS = (".gitignore", ".ignore", _GIT)


@fast_dataclass(slots=True, frozen=True)
class Listed:
    """One entry. `empty`: a directory without any entry; known only for directories that were entered."""

    path: RepoPath
    kind: Kind
    empty: bool = False


def list_below(
    root_fd: int, base: RepoPath, *, depth: int | None = None, include_ignored: bool = False
) -> Iterator[Listed]:
    """Entries at most `depth` levels below the base, each directory before what is in it.

    Raises OSError when the base cannot be opened as a directory; one further down that cannot be is listed only.
    """
    with Handles(root_fd) as handles:
        rules = IgnoreRules() if include_ignored else _rules_above(handles, base)
        fd = handles.open_directory(base)
    yield from _entered(fd, base, rules, depth=0 if depth is None else depth, include_ignored=include_ignored)


def _rules_above(handles: Handles, base: RepoPath) -> IgnoreRules:
    """The rules that hold inside the base, before its own ignore files."""
    rules = IgnoreRules()
    for directory in reversed(ancestors_of(base)):
        rules = rules.inside(directory).with_sources(read_sources(handles.directory(directory), _MARKS))
    return rules.inside(base)


def _entered(fd: int, base: RepoPath, rules: IgnoreRules, *, depth: int, include_ignored: bool) -> Iterator[Listed]:
    """List a directory and close `fd`. A `depth` of 0 means without limit."""
    try:
        rules = rules if include_ignored else rules.with_sources(read_sources(fd, _MARKS))
        for name, kind in _entries(fd):
            if not rules.is_empty and rules.ignores(name, kind == "dir"):
                continue
            path = join(base, name)
            if kind != "dir" or depth == 1:
                yield Listed(path, kind)
                continue
            below = _open_directory(fd, name)
            yield Listed(path, kind, empty=below is not None and _is_empty(below))
            if below is not None:
                inside = rules.child(name)
                yield from _entered(below, path, inside, depth=max(depth - 1, 0), include_ignored=include_ignored)
    finally:
        os.close(fd)


def _open_directory(fd: int, name: str) -> int | None:
    try:
        return os.open(name, OPEN_DIRECTORY, dir_fd=fd)
    except OSError:
        return None


def _is_empty(fd: int) -> bool:
    with os.scandir(fd) as entries:
        return next(iter(entries), None) is None


def _entries(fd: int) -> list[tuple[str, Kind]]:
    """Names with their kinds; a directory sorts as if its name had a slash, so that whole paths are in order."""
    found: list[tuple[bytes, str, Kind]] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            kind = _kind(entry)
            if entry.name != _GIT and not entry.name.startswith(_DRAFT):
                found.append((os.fsencode(entry.name) + (b"/" if kind == "dir" else b""), entry.name, kind))
    return [(name, kind) for _, name, kind in sorted(found)]


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return "symlink"
    if entry.is_dir(follow_symlinks=False):
        return "dir"
    return "file" if entry.is_file(follow_symlinks=False) else "special"
