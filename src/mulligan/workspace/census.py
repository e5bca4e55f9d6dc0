"""What files hold, without reading again those whose stamp vouches for them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.clock import Clock
from mulligan.values.digest import Digest, digest_of, parse_digest
from mulligan.values.entries import FileEntry
from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of
from mulligan.values.plain import plain
from mulligan.workspace.capture_rules import NO_RULES
from mulligan.workspace.places import Root
from mulligan.workspace.search.handles import OPEN_FILE, Handles
from mulligan.workspace.search.stamps import is_local, stamp_of, was_at_rest

REMEMBERED_MAX = 300_000

Stamp = tuple[int, ...]


@plain(slots=True, frozen=True)
class Seen:
    """What a path held: kind `file`, `symlink`, `dir`, `special` or `absent`. For a link the digest of its target."""

    kind: str
    digest: Digest | None = None
    size: int = 0
    mode: int = 0

    def to_json(self) -> list[Any]:
        return [self.kind, self.digest, self.size, self.mode]

    @staticmethod
    def from_json(body: list[Any]) -> Seen:
        kind, digest, size, mode = body
        return Seen(str(kind), None if digest is None else parse_digest(digest), int(size), int(mode))


def link_seen(target: bytes) -> Seen:
    return Seen("symlink", digest_of(target), len(target), 0o777)


GONE = Seen("absent")
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class Census:
    """Remembers digests by the stamps of their files. For any thread.

    A stamp is trusted only if the file had been at rest for a while when it was read, on a local file system.
    """

    def __init__(self, root: Root, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._lock = fork_safe_lock()
        self._known: dict[RepoPath, tuple[Stamp, Seen]] = {}
        self._trusts = is_local(root.handle)
        self.capture = NO_RULES

    def look(self, handles: Handles, path: RepoPath) -> Seen:
        """What the path holds now. No link is followed. Raises OSError for a file that cannot be read."""
        try:
            parent = handles.directory(parent_of(path))
            name = name_of(path) if path != ROOT else "."
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            if error.errno in _MISSING:
                return GONE
            raise
        known = self._known.get(path)
        if known is not None and known[0] == _stamp(status):
            return known[1]
        return self._looked_at(parent, name, path, status)

    def _looked_at(self, parent: int, name: str, path: RepoPath, status: os.stat_result) -> Seen:
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            return link_seen(os.fsencode(os.readlink(name, dir_fd=parent)))
        if not stat.S_ISREG(status.st_mode):
            return Seen("dir", mode=mode) if stat.S_ISDIR(status.st_mode) else Seen("special")
        now_ns = int(self._clock.now().timestamp() * 1e9)
        data, after = read_at(parent, name)
        seen = Seen("file", self.digest_at(path, data), len(data), stat.S_IMODE(after.st_mode))
        if self._trusts and _stamp(status) == _stamp(after) and was_at_rest(stamp_of(after), now_ns):
            self._remember(path, _stamp(after), seen)
        return seen

    def digest_at(self, path: RepoPath, data: bytes) -> Digest:
        """Leases are stored with what was seen, so a path under `capture.never` has a keyed digest there too."""
        digest = digest_of(data)
        return digest if not self.capture.any else self.capture.named(path, FileEntry(digest, 0, 0)).digest

    def _remember(self, path: RepoPath, stamp: Stamp, seen: Seen) -> None:
        with self._lock:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[path] = (stamp, seen)


def read_at(parent: int, name: str) -> tuple[bytes, os.stat_result]:
    """The bytes of a regular file in an open directory, and its status after they were read. Raises OSError."""
    fd = os.open(name, OPEN_FILE, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        pieces = []
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces), os.fstat(fd)
    finally:
        os.close(fd)


def bytes_at(handles: Handles, path: RepoPath) -> bytes:
    """The content of a file, or the target of a link. Raises OSError."""
    parent, name = handles.directory(parent_of(path)), name_of(path)
    try:
        return read_at(parent, name)[0]
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return os.fsencode(os.readlink(name, dir_fd=parent))


def _stamp(status: os.stat_result) -> Stamp:
    return (*stamp_of(status), status.st_size, status.st_mode)


Look = Callable[[RepoPath], Seen]
