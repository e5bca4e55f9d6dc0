"""What every file was before a command, for the ways of running that see a change only afterwards.

Kept small: a tracked file that git calls clean is a reference into git's object store; files over 2 MiB and what
exceeds 512 MiB in all are not kept, and neither are git's own objects. What is not kept cannot be put back, and the
call says so for each such path that changed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha1, sha256

from mulligan.history.desk import Desk
from mulligan.history.repositories import is_object
from mulligan.values.digest import digest_of
from mulligan.values.entries import ABSENT, Entry, FileEntry, Xattrs
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import RepoPath, path_bytes, path_from_bytes
from mulligan.workspace.disk import Image, read_xattrs
from mulligan.workspace.exec.scan import StatIndex
from mulligan.workspace.git import GitFailed, GitReader, reading

FILE_MAX_BYTES = 2 * MIB_BYTES
WORKSPACE_MAX_BYTES = 512 * MIB_BYTES
_BATCH = 200


@dataclass(slots=True, frozen=True)
class _InGit:
    """A clean tracked file: its bytes are git's, the rest is as it was."""

    oid: str
    size: int
    mode: int
    mtime_ns: int
    ctime_ns: int
    xattrs: Xattrs = ()


class WorkspaceBaseline:
    """Every entry below a root at one moment, contents in the store or in git's."""

    def __init__(
        self, desk: Desk, *, file_max_bytes: int = FILE_MAX_BYTES, workspace_max_bytes: int = WORKSPACE_MAX_BYTES
    ) -> None:
        self._desk = desk
        self._root = desk.disk.root.path
        self._file_max_bytes = file_max_bytes
        self._room_bytes = workspace_max_bytes
        self._entries: dict[bytes, Entry] = {}
        self._in_git: dict[bytes, _InGit] = {}
        self._known: set[bytes] = set()
        self._index: StatIndex | None = None

    def take(self) -> StatIndex:
        """Look at everything and keep what fits."""
        index = StatIndex.take(self._root)
        self._known = set(index.paths())
        self._in_git = self._clean_files()
        pending: list[bytes] = []
        for path in self._known - self._in_git.keys():
            if self._has_room(path):
                pending.append(path)
            if len(pending) >= _BATCH:
                self._keep(pending)
                pending = []
        self._keep(pending)
        self._index = index
        return index

    def touched_by_now(self) -> frozenset[bytes]:
        """What is not as it was when the baseline was taken; nothing if it never was."""
        return frozenset() if self._index is None else self._index.again().touched_since(self._index)

    def before_of(self, path: bytes) -> Entry | None:
        """None: it was there and could not be kept."""
        if path in self._in_git:
            self._fetch(path)
        return self._entries.get(path, None if path in self._known else ABSENT)

    def with_inner(self, touched: Iterable[bytes], moved_away: Iterable[bytes]) -> frozenset[bytes]:
        """Touched paths, and everything that was known below folders that went away as a whole."""
        gone = tuple(folder + b"/" for folder in moved_away)
        inner = [path for path in self._known if path.startswith(gone)] if gone else []
        return frozenset({*touched, *inner})

    def _below(self, path: bytes) -> RepoPath:
        return path_from_bytes(path[len(self._root) :].lstrip(b"/"))

    def _has_room(self, path: bytes) -> bool:
        size = _size(path)
        if size > min(self._file_max_bytes, self._room_bytes) or is_object(self._below(path)):
            return False
        self._room_bytes -= size
        return True

    def _keep(self, paths: list[bytes]) -> None:
        images = {path: image for path in paths if (image := self._image(path)) is not None}
        self._desk.ledger.blobs.store_all(one.content for one in images.values() if one.content is not None)
        self._entries.update({path: one.entry for path, one in images.items() if not one.special})

    def _image(self, path: bytes) -> Image | None:
        try:
            return self._desk.image(self._below(path))
        except PermissionError:
            return None

    # What git has.

    def _clean_files(self) -> dict[bytes, _InGit]:
        """Only files of the size git has for them: others are what attributes made of git's bytes."""
        try:
            with reading(self._root) as git:
                return {} if git is None else dict(self._found_clean(git))
        except GitFailed:
            return {}

    def _found_clean(self, git: GitReader) -> Iterator[tuple[bytes, _InGit]]:
        dirty = {row[3:] for row in git.status(exact=True).split(b"\0") if row}
        tracked = [one for one in git.staged() if stat.S_ISREG(one.mode) and path_bytes(one.path) not in dirty]
        sizes = _sizes(git, [one.oid for one in tracked])
        for one in tracked:
            path = os.path.join(self._root, path_bytes(one.path))
            found = _as_it_is(path, one.oid) if path in self._known else None
            if found is not None and found.size == sizes.get(one.oid):
                yield path, found

    def _fetch(self, path: bytes) -> None:
        """Read what has changed since from git, all at once; what git has lost by now is lost."""
        changed = [other for other, was in self._in_git.items() if other == path or _as_it_is(other, was.oid) != was]
        facts = {other: self._in_git.pop(other) for other in changed}
        try:
            with reading(self._root) as git:
                contents = {} if git is None else git.contents([was.oid for was in facts.values()])
        except GitFailed:
            contents = {}
        self._desk.ledger.blobs.store_all(contents.values())
        for other, was in facts.items():
            data = contents[was.oid] if was.oid in contents else _if_it_is_still(other, was.oid)
            if data is not None:
                self._entries[other] = FileEntry(digest_of(data), len(data), was.mode, was.mtime_ns, was.xattrs)


def _if_it_is_still(path: bytes, oid: str) -> bytes | None:
    """A file's bytes, if they are what git calls by this name."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    named = (sha1 if len(oid) == 40 else sha256)(b"blob %d\0%b" % (len(data), data))
    return data if named.hexdigest() == oid else None


def _sizes(git: GitReader, oids: list[str]) -> dict[str, int]:
    asked = "".join(f"{oid}\n" for oid in oids).encode("ascii")
    rows = [row.split(b" ") for row in git.run("cat-file", "--batch-check", "--buffer", stdin=asked).splitlines()]
    return {row[0].decode("ascii"): int(row[2]) for row in rows if len(row) == 3}


def _as_it_is(path: bytes, oid: str) -> _InGit | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return None
        mode = stat.S_IMODE(status.st_mode)
        return _InGit(oid, status.st_size, mode, status.st_mtime_ns, status.st_ctime_ns, read_xattrs(handle))
    finally:
        os.close(handle)


def _size(path: bytes) -> int:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
