"""File systems as resources of an agent: one small protocol, `Filesystem`, and two implementations.

Paths are relative to the root; `..` and absolute paths raise PermissionError, a missing path FileNotFoundError, and so
on, as everywhere in Python. Text is decoded as it is: no newline is added, dropped or translated.

`HostFilesystem` has the files below a folder. It needs no git, and treats files that git ignores or owns like any
other. `InMemoryFilesystem` has files in memory; a snapshot shares them with the file system until the next write.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from types import MappingProxyType
from typing import Literal, Protocol, Self, runtime_checkable
from uuid import UUID

from mulligan.files.copy import Bodies, FolderBodies, Pack, Tree, Trees, files_below, tree_from_bytes, tree_to_bytes
from mulligan.files.disk import DRAFT_PREFIX, HostDisk, Image, Steps
from mulligan.files.replace import FoundEntry, HardLinks, Replacement, TargetEntry, creation_mode, staying_that_file
from mulligan.files.resolve import ResolvedPath
from mulligan.store.fork_locks import shared_lock
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.digest import digest_of, parse_digest
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, same_state
from mulligan.values.errors import MulliganError, Refused, RestoreFailedError, SnapshotMismatchError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.globs import parse_glob
from mulligan.values.ids import SystemIds
from mulligan.values.paths import (
    ROOT,
    RepoPath,
    ancestors_of,
    is_below,
    is_within,
    join,
    name_of,
    parent_of,
    parse_repo_path,
    path_bytes,
)
from mulligan.values.scoped_var import check_call_open

WriteMode = Literal["create", "overwrite", "append"]
FileKind = Literal["file", "dir"]


@fast_dataclass(slots=True, frozen=True)
class ReadResult:
    """Some lines of a file. `limit` is how many; `truncated`: there are more after them."""

    content: str
    path: str
    total_lines: int
    offset: int = 0
    limit: int = 0
    truncated: bool = False


@fast_dataclass(slots=True, frozen=True)
class ReadBytesResult:
    content: bytes
    path: str
    size_bytes: int
    offset: int = 0
    limit: int = 0
    truncated: bool = False


@fast_dataclass(slots=True, frozen=True)
class WriteResult:
    path: str
    bytes_written: int
    mode: WriteMode


@fast_dataclass(slots=True, frozen=True)
class FileEntryShown:
    """One name in a directory."""

    name: str
    path: str
    is_file: bool
    is_directory: bool


@dataclass(slots=True, frozen=True)
class FilesystemSnapshot:
    """The files below a root at one moment. Two with the same `commit_ref` have the same files, apart from times."""

    snapshot_id: UUID
    created_at: datetime
    commit_ref: str
    root_path: str
    tag: str | None = None
    manifest: str | None = None


@runtime_checkable
class Filesystem(Protocol):
    """The file operations that tools need."""

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """Read lines of a text, from `offset` on. Raises FileNotFoundError, and ValueError if it is not text."""
        ...

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """Bytes of a file, from `offset` on. Raises FileNotFoundError, IsADirectoryError."""
        ...

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write a text as UTF-8: replace the file, `append` to it, or `create` it if the path is free."""
        ...

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """The same for bytes. In the mode `create`, raises FileExistsError if the path exists."""
        ...

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file, a link or an empty directory; with `recursive`, also a directory that is not empty."""
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory. Raises FileExistsError for a file, or, unless `exist_ok`, for a directory."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the path exists."""
        ...

    def list(self, path: str = ".") -> tuple[FileEntryShown, ...]:
        """The entries of a directory, sorted by name. Raises FileNotFoundError, NotADirectoryError."""
        ...

    def glob(self, pattern: str, path: str = ".") -> tuple[str, ...]:
        """Files below `path` that match, sorted: `*` within a name, `**` across directories."""
        ...


@runtime_checkable
class SnapshotableFilesystem(Filesystem, Protocol):
    """A file system whose whole state can be captured and restored."""

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Capture all files as they are now."""
        ...

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Restore all files to the snapshot, or, if that fails, leave everything as it is now."""
        ...


def repo_path(path: str) -> RepoPath:
    """A path inside the root. Raises PermissionError for one that leads out, ValueError for an invalid one."""
    try:
        return parse_repo_path(path)
    except MulliganError as error:
        leads_out = error.details.get("absolute") or error.details.get("climbs")
        raise (PermissionError if leads_out else ValueError)(error.message) from None


class PlainFilesystem(ABC):
    """Implements the protocol. Subclasses implement a few steps on parsed paths."""

    @abstractmethod
    def _kind(self, path: RepoPath) -> FileKind | None:
        """The kind of a path; None if it does not exist. A link has the kind of its target."""

    @abstractmethod
    def _load(self, path: RepoPath) -> bytes:
        """The bytes of an existing file."""

    @abstractmethod
    def _put(self, path: RepoPath, content: bytes) -> None:
        """Write a file, all of it or nothing. Its directory exists."""

    @abstractmethod
    def _make_dir(self, path: RepoPath) -> None:
        """Make a directory. Its parent exists, and nothing has this name."""

    @abstractmethod
    def _remove(self, path: RepoPath) -> None:
        """Remove a path with everything below it; of a link, the link itself."""

    @abstractmethod
    def _names(self, path: RepoPath) -> Sequence[str]:
        """The names in a directory, sorted."""

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """Lines from `offset` on. Raises ValueError for a file that is no text in that encoding."""
        _check_window(offset, limit)
        found = repo_path(path)
        lines = self._text(found, encoding).splitlines(keepends=True)
        part = lines[offset : None if limit is None else offset + limit]
        more = offset + len(part) < len(lines)
        return ReadResult("".join(part), found, len(lines), offset, len(part), truncated=more)

    def _text(self, path: RepoPath, encoding: str) -> str:
        try:
            return self._load_file(path).decode(encoding)
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no {encoding} text; use read_bytes.") from None

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """Bytes of a file, from `offset` on. Raises FileNotFoundError, IsADirectoryError."""
        _check_window(offset, limit)
        found = repo_path(path)
        whole = self._load_file(found)
        part = whole[offset : None if limit is None else offset + limit]
        more = offset + len(part) < len(whole)
        return ReadBytesResult(part, found, len(whole), offset, len(part), truncated=more)

    def _load_file(self, path: RepoPath) -> bytes:
        kind = self._kind(path)
        if kind is None:
            raise FileNotFoundError(f"{path} does not exist.")
        if kind == "dir":
            raise IsADirectoryError(f"{path} is a directory.")
        return self._load(path)

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write a text as UTF-8. `create` never replaces a file, `append` adds to it."""
        return self.write_bytes(path, content.encode("utf-8"), mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write all bytes in one step, or nothing. `create` never replaces a file, `append` adds to it."""
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"There is no mode {mode!r}; use create, overwrite or append.")
        found = repo_path(path)
        check_call_open()
        with self._changing():
            kind = self._kind(found)
            if found == ROOT or kind == "dir":
                raise IsADirectoryError(f"{path} is a directory.")
            if kind is not None and mode == "create":
                raise FileExistsError(f"{path} exists already.")
            self._make_parents(found, create=create_parents)
            before = self._load(found) if mode == "append" and kind is not None else b""
            self._put(found, before + content)
        return WriteResult(found, len(content), mode)

    def _changing(self) -> AbstractContextManager[object]:
        """A lock that orders changes."""
        return nullcontext()

    def _make_parents(self, path: RepoPath, *, create: bool) -> None:
        for parent in reversed(ancestors_of(path)[:-1]):
            kind = self._kind(parent)
            if kind == "file":
                raise NotADirectoryError(f"{parent} is not a directory.")
            if kind is None and not create:
                raise FileNotFoundError(f"There is no directory {parent}.")
            if kind is None:
                self._make_dir(parent)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory. Raises FileExistsError for a file, or, unless `exist_ok`, for a directory."""
        found = repo_path(path)
        kind = ROOT if found == ROOT else self._kind(found)
        if kind == "file" or (kind is not None and not exist_ok):
            raise FileExistsError(f"{path} exists already.")
        if kind is None:
            check_call_open()
            self._make_parents(found, create=parents)
            self._make_dir(found)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a path; of a link, the link itself.

        A directory that is not empty only if `recursive`; the root never.
        """
        found = repo_path(path)
        if found == ROOT:
            raise PermissionError("The root itself cannot be deleted.")
        if not self._is_there(found):
            raise FileNotFoundError(f"{path} does not exist.")
        if not recursive and not self._is_link(found) and self._kind(found) == "dir" and self._names(found):
            raise IsADirectoryError(f"{path} is a directory that is not empty; set recursive to delete it.")
        check_call_open()
        self._remove(found)

    def _is_there(self, path: RepoPath) -> bool:
        return self._kind(path) is not None

    def _is_link(self, path: RepoPath) -> bool:
        return False

    def exists(self, path: str) -> bool:
        """Whether the path exists; a link that leads nowhere does not."""
        found = repo_path(path)
        return found == ROOT or self._kind(found) is not None

    def list(self, path: str = ".") -> tuple[FileEntryShown, ...]:
        """The entries of a directory, sorted by name. Raises FileNotFoundError, NotADirectoryError."""
        base = repo_path(path)
        kind: str | None = "dir" if base == ROOT else self._kind(base)
        if kind is None:
            raise FileNotFoundError(f"{path} does not exist.")
        if kind == "file":
            raise NotADirectoryError(f"{path} is not a directory.")
        return tuple(self._shown(join(base, name)) for name in self._names(base))

    def _shown(self, path: RepoPath) -> FileEntryShown:
        kind = self._kind(path)
        return FileEntryShown(name_of(path), path, is_file=kind == "file", is_directory=kind == "dir")

    def glob(self, pattern: str, path: str = ".") -> tuple[str, ...]:
        """Files below `path` whose path from there matches: `*` within a name, `**` across directories; sorted."""
        base, shape = repo_path(path), parse_glob(pattern)
        below = 0 if base == ROOT else len(base) + 1
        return tuple(found for found in self._files_below(base) if shape.matches(found[below:]))

    @abstractmethod
    def _files_below(self, base: RepoPath) -> Sequence[RepoPath]:
        """Every file at any depth, sorted."""


def _check_window(offset: int, limit: int | None) -> None:
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError("offset and limit must not be negative.")


class HostFilesystem(PlainFilesystem):
    """A folder on disk. Safe to use from many threads.

    A snapshot stores the bytes of every file in `bodies`: by default in an unnamed file, which disappears with the
    process. If you pass a folder outside the root, a later process can restore the snapshots that this one saved as
    JSON; the folder grows until you delete it. Each snapshot reads only files that have changed since the last one.
    """

    def __init__(
        self,
        _root: str | os.PathLike[str],
        *,
        bodies: Bodies | str | os.PathLike[str] | None = None,
        clock: Clock | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._disk = HostDisk(os.fspath(_root), steps=steps)
        self._end = weakref.finalize(self, self._disk.close)
        self._bodies = self._bodies_in(bodies)
        self._clock = clock or SystemClock()
        self._ids = SystemIds()
        self._trees = Trees(self._disk.root.handle, self._bodies, self._clock)
        self._lock = shared_lock()
        self._last_snapshot: tuple[Tree, str, str] | None = None
        self._drafts = 0
        self._unfinished: dict[bytes, tuple[RepoPath, Entry]] = {}

    def _bodies_in(self, given: Bodies | str | os.PathLike[str] | None) -> Bodies:
        if not isinstance(given, str | os.PathLike):
            return Pack() if given is None else given
        place = os.path.realpath(given)
        if os.path.commonpath([place, self.root]) == self.root:
            raise fault("store_inside_workspace", f"{place} is below {self.root}: snapshots would hold each other.")
        return FolderBodies(place)

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return os.fsdecode(self._disk.root.path)

    def close(self) -> None:
        """Close it. It can be called again, and also runs when Python collects the object."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Snapshots.

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Every file below the root as it is now, ignored ones too."""
        with self._lock:
            tree = self._trees.look()
            if self._last_snapshot is None or self._last_snapshot[0] != tree:
                manifest = self._bodies.store(tree_to_bytes(tree))
                self._last_snapshot = (tree, digest_of(tree_to_bytes(tree, times=False)), manifest)
            _, ref, kept = self._last_snapshot
        return FilesystemSnapshot(UUID(self._ids.new()), self._clock.now(), ref, self.root, tag, kept)

    def check_restore(self, snapshot: object) -> None:
        """Raises SnapshotMismatchError for a snapshot of another root or kind, RestoreFailedError if its files are not
        stored.
        """
        if not isinstance(snapshot, FilesystemSnapshot) or snapshot.manifest is None:
            raise SnapshotMismatchError(f"A folder is not restored from a {type(snapshot).__name__}.")
        if os.path.realpath(snapshot.root_path) != os.path.realpath(self.root):
            words = f"This is a snapshot of {snapshot.root_path}; this file system is {self.root}."
            raise SnapshotMismatchError(words, root=self.root)
        self._tree_of(snapshot)

    def _tree_of(self, snapshot: FilesystemSnapshot) -> Tree:
        try:
            return tree_from_bytes(self._bodies.read(parse_digest(snapshot.manifest)))
        except RestoreFailedError:
            raise
        except MulliganError as error:
            raise RestoreFailedError(f"The files of this snapshot are not stored here: {error.message}") from error

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Restore every path below the root, and remove others; or, if that fails, leave everything as it is now."""
        self.check_restore(snapshot)
        with self._lock:
            self._clean_up_unfinished()
            wanted, now = self._tree_of(snapshot), self._trees.look()
            moves = list(_moves(now, wanted))
            try:
                links = self._links(moves, now, wanted)
                with self._all_or_none(now) as done:
                    for path, target in moves:
                        done.append(path)
                        self._replace(path, now.get(path) or ABSENT, target, links)
                    self._restore_directory_times(done, wanted)
            except (OSError, Refused) as error:
                raise RestoreFailedError(f"Mulligan could not restore the files of {self.root}: {error}") from error

    @contextmanager
    def _all_or_none(self, now: Tree) -> Iterator[list[RepoPath]]:
        done: list[RepoPath] = []
        finished = False
        try:
            yield done
            finished = True
        finally:
            stuck = [] if finished else [path for path in reversed(done) if not self._put_back(path, now)]
            if stuck:
                message = f"Mulligan changed these paths and could not set them back: {', '.join(stuck)}."
                raise RestoreFailedError(message, paths=stuck)

    def _put_back(self, path: RepoPath, now: Tree) -> bool:
        try:
            self._replace(path, self._entry(path), now.get(path) or ABSENT, HardLinks(self._disk, {}))
        except (OSError, Refused):
            return False
        return True

    def _restore_directory_times(self, done: list[RepoPath], wanted: Tree) -> None:
        """Restore the times of directories, which change when files in them are restored."""
        touched = {parent for path in done for parent in ancestors_of(path)} | set(done)
        for path in sorted(touched, key=path_bytes, reverse=True):
            entry = wanted.get(path)
            if isinstance(entry, DirEntry):
                with self._disk.resolve_exactly(path) as resolved:
                    self._disk.set_mtime(resolved, entry.mtime_ns)

    def _entry(self, path: RepoPath) -> Entry:
        with self._disk.resolve_exactly(path) as resolved:
            return self._disk.image(resolved).entry

    def _links(self, moves: Sequence[tuple[RepoPath, Entry]], now: Tree, wanted: Tree) -> HardLinks:
        """The hard links of changed files, with the names that change with them."""
        linked = {path: image for path, _ in moves if (image := self._linked_image(path)) is not None}
        if linked:
            linked |= {path: image for path in now if (image := self._linked_image(path)) is not None}
        targets = {
            path: (image, staying_that_file(wanted.get(path) or ABSENT, image)) for path, image in linked.items()
        }
        return HardLinks(self._disk, targets)

    def _linked_image(self, path: RepoPath) -> Image | None:
        """The image of a file with several names; None for anything else."""
        try:
            with self._disk.resolve_exactly(path) as resolved:
                status = os.stat(resolved.name, dir_fd=resolved.parent, follow_symlinks=False)
                several = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
                return self._disk.image(resolved, kept=False) if several else None
        except (FileNotFoundError, NotADirectoryError, Refused):
            return None

    def _replace(self, path: RepoPath, now: Entry, target: Entry, links: HardLinks) -> None:
        if same_state(now, target):
            return
        content = self._bodies.read(target.digest) if isinstance(target, FileEntry) else None
        with self._disk.resolve_exactly(path) as resolved:
            self._place(resolved, now, TargetEntry(target, content), links)

    def _place(self, resolved: ResolvedPath, now: Entry, wanted: TargetEntry, links: HardLinks) -> None:
        draft, finished, inside = self._draft(), False, links.inside(resolved.path)
        with links.same_file(resolved.path) as same_as:
            swap = Replacement(
                self._disk, resolved, draft, now, wanted, self._rescue, insist=True, inside=inside, same_as=same_as
            )
            self._unfinished[draft] = (resolved.path, now)
            try:
                found = swap.run()
                finished = True
            finally:
                if not finished:
                    self._clean_up(resolved, draft, now)
                self._unfinished.pop(draft, None)
        if isinstance(found, FoundEntry):
            raise FileExistsError(f"{resolved.path} was changed by another process meanwhile.")
        links.was_placed(resolved.path)

    def _clean_up(self, resolved: ResolvedPath, draft: bytes, before: Entry) -> None:
        """Clean up after a failed step.

        A displaced file gets its path back if that is free. Other drafts are our own, or their bytes are stored.
        """
        aside = self._disk.image(resolved, draft=draft)
        if aside.holds(ABSENT):
            return
        if aside.holds(before):
            with suppress(OSError):
                self._disk.place(resolved, draft)
                return
        self._rescue(aside)
        self._disk.discard(resolved, draft)

    def _clean_up_unfinished(self) -> None:
        """Clean up what a second interrupt left while the first was cleaned up."""
        for draft, (path, before) in list(self._unfinished.items()):
            with suppress(FileNotFoundError, NotADirectoryError, Refused), self._disk.resolve_exactly(path) as resolved:
                self._clean_up(resolved, draft, before)
            self._unfinished.pop(draft, None)

    def _rescue(self, theirs: Image) -> None:
        if theirs.content is not None:
            self._bodies.store(theirs.data)

    def _draft(self) -> bytes:
        self._drafts += 1
        return DRAFT_PREFIX + f"{os.getpid()}-{id(self):x}-{self._drafts}".encode("ascii")

    # The steps.

    def _changing(self) -> threading.RLock:
        return self._lock

    def _kind(self, path: RepoPath) -> FileKind | None:
        try:
            with self._resolved(path) as resolved:
                mode = os.stat(resolved.name, dir_fd=resolved.parent, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        return "dir" if stat.S_ISDIR(mode) else "file"

    @contextmanager
    def _resolved(self, path: RepoPath, *, final: bool = True) -> Iterator[ResolvedPath]:
        """Resolve a path and follow links inside the root. Raises PermissionError for one that leads out."""
        try:
            resolved = self._disk.resolve(path, final=final)
        except Refused as refused:
            raise PermissionError(refused.message) from None
        with resolved:
            yield resolved

    def _load(self, path: RepoPath) -> bytes:
        with self._resolved(path) as resolved:
            image = self._disk.image(resolved)
        if image.content is None:
            raise OSError(f"{path} is a device, FIFO or socket.")
        return image.data

    def _put(self, path: RepoPath, content: bytes) -> None:
        with self._resolved(path) as resolved:
            image = self._disk.image(resolved)
            now = image.entry
            mode = now.mode if isinstance(now, FileEntry) else creation_mode(0o666)
            xattrs = now.xattrs if isinstance(now, FileEntry) else ()
            entry = FileEntry(digest_of(content), len(content), mode, 0, xattrs, now.link_group)
            links = HardLinks(self._disk, {resolved.path: (image, entry)})
            self._place(resolved, now, TargetEntry(entry, content), links)
            for name in links.followers(resolved.path):
                self._follow(name, now, TargetEntry(entry, content), resolved)

    def _follow(self, name: RepoPath, before: Entry, wanted: TargetEntry, placed: ResolvedPath) -> None:
        """After a file was replaced by a new one, make another name of the old file a name of the new one."""
        with self._disk.resolve_exactly(name) as resolved:
            if self._disk.image(resolved, kept=False).holds(before):
                Replacement(self._disk, resolved, self._draft(), before, wanted, self._rescue, same_as=placed).run()

    def _make_dir(self, path: RepoPath) -> None:
        with self._resolved(path) as resolved:
            self._disk.make_dir(resolved, creation_mode(0o777))

    def _remove(self, path: RepoPath) -> None:
        with self._lock, self._resolved(path, final=False) as resolved:
            entry = self._disk.image(resolved).entry
            if isinstance(entry, DirEntry):
                for name in self._disk.children(resolved):
                    self._remove(join(path, name.decode("utf-8", "surrogateescape")))
            self._place(resolved, entry, TargetEntry(ABSENT), HardLinks(self._disk, {}))

    def _is_there(self, path: RepoPath) -> bool:
        try:
            with self._resolved(path, final=False) as resolved:
                return self._disk.image(resolved).entry != ABSENT
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _is_link(self, path: RepoPath) -> bool:
        with self._resolved(path, final=False) as resolved:
            return stat.S_ISLNK(os.stat(resolved.name, dir_fd=resolved.parent, follow_symlinks=False).st_mode)

    def _names(self, path: RepoPath) -> list[str]:
        with self._resolved(path) as resolved:
            return [name.decode("utf-8", "surrogateescape") for name in self._disk.children(resolved)]

    def _files_below(self, base: RepoPath) -> list[RepoPath]:
        found = files_below(self._disk.root.handle, path_bytes(base))
        return sorted((RepoPath(os.fsdecode(path)) for path in found), key=path_bytes)


def _moves(now: Tree, wanted: Tree) -> Iterator[tuple[RepoPath, Entry]]:
    """The changes in order: first removals, deepest first, then the rest, parents first."""
    for path in sorted(now, key=path_bytes, reverse=True):
        if now[path] is not None and path not in wanted:
            yield path, ABSENT
    for path, target in wanted.items():
        present = now.get(path, ABSENT)
        if target is not None and present is not None and not same_state(present, target):
            yield path, target


_WHOLE = 2**256
_REF = "memory:"
_FORM = re.compile(r"memory:[0-9a-f]{64}\Z")


@dataclass(slots=True, frozen=True)
class MemorySnapshot(FilesystemSnapshot):
    """A snapshot with the files themselves, so it can be restored into any file system in memory, and sent as JSON."""

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
            raise SnapshotMismatchError(f"Files in memory cannot be restored from a {type(snapshot).__name__}.")
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
            for one in [one for one in self._files if is_within(RepoPath(one), path)]:
                self._forget(one)
            gone = {one for one in self._directories if is_within(RepoPath(one), path)}
            self._directories -= gone
            self._sum = (self._sum - sum(_weight(one, None) for one in gone)) % _WHOLE

    def _forget(self, path: str) -> None:
        old = self._files.pop(path, None)
        if old is not None:
            self._sum = (self._sum - _weight(path, old)) % _WHOLE

    def _unshare(self) -> None:
        """Copy the table of files before the next change, because a snapshot shares it.

        The files' bytes stay shared.
        """
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
    """A hash of one file. Sums of these tell whether two sets of files are equal, and each change updates a sum."""
    head = path.encode("utf-8", "surrogateescape") + (b"\0d" if content is None else b"\0f")
    return int.from_bytes(sha256(head + (content or b"")).digest(), "big")
