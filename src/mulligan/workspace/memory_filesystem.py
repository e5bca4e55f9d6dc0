"""Files in memory. A snapshot shares them with the file system until the next write, and lives as long as it is held
by somebody."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType
from uuid import UUID

from mulligan.store.fork_locks import shared_lock
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.ids import SystemIds
from mulligan.values.paths import ROOT, RepoPath, is_below, name_of, parent_of, path_bytes
from mulligan.values.state_faults import SnapshotMismatchError
from mulligan.workspace.filesystem import FileKind, FilesystemSnapshot, PlainFilesystem

_WHOLE = 2**256
_REF = "memory:"
_FORM = re.compile(r"memory:[0-9a-f]{64}\Z")


@dataclass(slots=True, frozen=True)
class MemorySnapshot(FilesystemSnapshot):
    """Holds the files themselves, so it can be restored into any file system in memory, and sent as JSON."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    directories: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(self.files) if isinstance(self.files, dict) else self.files)


class InMemoryFilesystem(PlainFilesystem):
    """Safe to use from many threads."""

    def __init__(self, files: Mapping[str, str | bytes] | None = None, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._ids = SystemIds()
        self._lock = shared_lock()
        self._files: dict[str, bytes] = {}
        self._directories: frozenset[str] = frozenset()
        self._is_shared = False
        self._sum = 0
        for path, content in (files or {}).items():
            self.write_bytes(path, content.encode("utf-8") if isinstance(content, str) else content)

    def snapshot(self, *, tag: str | None = None) -> MemorySnapshot:
        """Shares everything with the file system until the next write."""
        with self._lock:
            self._is_shared = True
            return MemorySnapshot(
                snapshot_id=UUID(self._ids.new()),
                created_at=self._clock.now(),
                commit_ref=f"{_REF}{self._sum:064x}",
                root_path=ROOT,
                tag=tag,
                files=self._files,
                directories=self._directories,
            )

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Raises SnapshotMismatchError for the snapshot of a file system of another kind."""
        self.check_restore(snapshot)
        assert isinstance(snapshot, MemorySnapshot)
        with self._lock:
            self._files, self._is_shared = dict(snapshot.files), False
            self._directories = snapshot.directories
            self._sum = int(snapshot.commit_ref.removeprefix(_REF), 16)

    def check_restore(self, snapshot: object) -> None:
        """Raises SnapshotMismatchError for the snapshot of a file system of another kind."""
        if not isinstance(snapshot, MemorySnapshot):
            raise SnapshotMismatchError(f"Files in memory are not restored from a {type(snapshot).__name__}.")
        if _FORM.match(snapshot.commit_ref) is None:
            raise SnapshotMismatchError(f"{snapshot.commit_ref!r} names no files in memory.")

    # The steps.

    def _kind(self, path: RepoPath) -> FileKind | None:
        if path in self._files:
            return "file"
        return "dir" if path in self._directories else None

    def _load(self, path: RepoPath) -> bytes:
        return self._files[path]

    def _changing(self) -> threading.RLock:
        return self._lock

    def _put(self, path: RepoPath, content: bytes) -> None:
        with self._lock:
            self._unshare()
            self._forget(path)
            self._files[path] = bytes(content)
            self._sum = (self._sum + _weight(path, content)) % _WHOLE

    def _make_dir(self, path: RepoPath) -> None:
        with self._lock:
            self._directories |= {path}
            self._sum = (self._sum + _weight(path, None)) % _WHOLE

    def _remove(self, path: RepoPath) -> None:
        with self._lock:
            self._unshare()
            for one in [one for one in self._files if one == path or is_below(RepoPath(one), path)]:
                self._forget(one)
            gone = {one for one in self._directories if one == path or is_below(RepoPath(one), path)}
            self._directories -= gone
            self._sum = (self._sum - sum(_weight(one, None) for one in gone)) % _WHOLE

    def _forget(self, path: str) -> None:
        old = self._files.pop(path, None)
        if old is not None:
            self._sum = (self._sum - _weight(path, old)) % _WHOLE

    def _unshare(self) -> None:
        """Somebody holds a snapshot of these: the next change is made to a copy of the table, not of the files."""
        if self._is_shared:
            self._files, self._is_shared = dict(self._files), False

    def _names(self, path: RepoPath) -> list[str]:
        return sorted(
            name_of(RepoPath(one)) for one in (*self._files, *self._directories) if parent_of(RepoPath(one)) == path
        )

    def _files_below(self, base: RepoPath) -> list[RepoPath]:
        found = [RepoPath(one) for one in self._files if is_below(RepoPath(one), base)]
        return sorted(found, key=path_bytes)


def _weight(path: str, content: bytes | None) -> int:
    """Sums of these tell whether two sets of files are the same, and follow one change at a time."""
    head = path.encode("utf-8", "surrogateescape") + (b"\0d" if content is None else b"\0f")
    return int.from_bytes(sha256(head + (content or b"")).digest(), "big")
