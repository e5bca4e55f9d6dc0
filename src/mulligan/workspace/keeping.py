"""Whole trees kept: what every path below a root is, and the bytes of every file, each once."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from mulligan.store.bodies import DirectoryBodies
from mulligan.store.codec import pack, unpack
from mulligan.store.fork_locks import shared_lock
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import DirEntry, Entry, FileEntry, SymlinkEntry, entry_from_json, entry_to_json
from mulligan.values.faults import MulliganError
from mulligan.values.paths import RepoPath, from_wire, path_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.values.state_faults import RestoreFailedError
from mulligan.workspace.disk import DRAFT_PREFIX, read_xattrs
from mulligan.workspace.search.handles import OPEN_DIRECTORY, OPEN_FILE
from mulligan.workspace.search.stamps import is_local, stamp_of, was_at_rest

Tree: TypeAlias = dict[RepoPath, Entry | None]
"""Every path below a root but the root, parents first. None: something that cannot be kept, and is left alone."""

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EIO})


class Bodies(Protocol):
    """Where bytes are kept by their digests. A store's `Blobs` is one."""

    def store(self, data: bytes) -> Digest: ...
    def read(self, digest: Digest) -> bytes: ...


@plain(slots=True, frozen=True)
class _Place:
    handle: int
    offset: int
    packed: int
    size: int


class Pack:
    """Bodies in a file without a name: it is gone with the process, however that ends, and leaves nothing behind."""

    def __init__(self) -> None:
        self._places: dict[Digest, _Place] = {}
        self._handle = self._end = self._owner = 0
        self._lock = shared_lock()

    def store(self, data: bytes) -> Digest:
        digest = digest_of(data)
        if digest not in self._places:
            body = pack(data)
            with self._lock:
                handle = self._file()
                os.pwrite(handle, body, self._end)
                self._places[digest] = _Place(handle, self._end, len(body), len(data))
                self._end += len(body)
        return digest

    def read(self, digest: Digest) -> bytes:
        """Raises RestoreFailedError for what was never kept here."""
        place = self._places.get(digest)
        if place is None:
            words = f"The bytes of {digest} are not kept here; a folder given as `bodies` outlives its process."
            raise RestoreFailedError(words, digest=digest)
        return unpack(os.pread(place.handle, place.packed, place.offset), place.size)

    def _file(self) -> int:
        """A forked child shares what is written already and writes on into a file of its own."""
        if self._owner != os.getpid():
            with tempfile.TemporaryFile(prefix="mulligan-", buffering=0) as file:
                self._handle = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._handle)
            self._end, self._owner = 0, os.getpid()
        return self._handle


class Folder:
    """Bodies in a folder: a later process finds them there, and they stay until somebody deletes it."""

    def __init__(self, directory: str) -> None:
        self._files = DirectoryBodies(directory)

    def store(self, data: bytes) -> Digest:
        digest = digest_of(data)
        self._files.put(digest, data)
        return digest

    def read(self, digest: Digest) -> bytes:
        """Raises RestoreFailedError for what is not there, or is not what was kept."""
        try:
            data = self._files.get(digest)
        except MulliganError as error:
            raise RestoreFailedError(error.message, digest=digest) from error
        if digest_of(data) != digest:
            raise RestoreFailedError(f"The bytes of {digest} are not what was kept.", digest=digest)
        return data


class Trees:
    """Looks at everything below a root. Files whose stamps vouch for them are not read again. For one thread."""

    def __init__(self, root: int, bodies: Bodies, clock: Clock) -> None:
        self._root = root
        self._bodies = bodies
        self._clock = clock
        self._known: dict[RepoPath, tuple[tuple[int, ...], FileEntry]] = {}
        self._trusts = is_local(root)

    def look(self) -> Tree:
        """What is there now; the bytes of every file are kept when this returns."""
        tree: Tree = {}
        # Through a descriptor of its own: others may be reading the names in this directory too.
        directory = os.open(".", OPEN_DIRECTORY, dir_fd=self._root)
        try:
            self._look_into(directory, b"", tree)
        finally:
            os.close(directory)
        return tree

    def _look_into(self, directory: int, prefix: bytes, tree: Tree) -> None:
        for name in sorted(os.fsencode(name) for name in os.listdir(directory)):
            if name.startswith(DRAFT_PREFIX):
                continue
            path = RepoPath((prefix + name).decode("utf-8", "surrogateescape"))
            try:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                tree[path] = self._entry(directory, name, path, status)
                if stat.S_ISDIR(status.st_mode):
                    self._look_below(directory, name, prefix, tree)
            except FileNotFoundError:
                tree.pop(path, None)
            except OSError as error:
                if error.errno not in _DENIED:
                    raise
                tree[path] = None

    def _look_below(self, directory: int, name: bytes, prefix: bytes, tree: Tree) -> None:
        handle = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
        try:
            self._look_into(handle, prefix + name + b"/", tree)
        finally:
            os.close(handle)

    def _entry(self, directory: int, name: bytes, path: RepoPath, status: os.stat_result) -> Entry | None:
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            return SymlinkEntry(os.fsdecode(os.readlink(name, dir_fd=directory)))
        if stat.S_ISDIR(status.st_mode):
            return DirEntry(mode, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode):
            return None
        known = self._known.get(path)
        if known is not None and known[0] == _stamp(status):
            return known[1]
        return self._read(directory, name, path)

    def _read(self, directory: int, name: bytes, path: RepoPath) -> FileEntry:
        now_ns = int(self._clock.now().timestamp() * 1e9)
        handle = os.open(name, OPEN_FILE, dir_fd=directory)
        try:
            data, status = _stable(handle)
            xattrs = read_xattrs(handle)
        finally:
            os.close(handle)
        digest = self._bodies.store(data)
        entry = FileEntry(digest, len(data), stat.S_IMODE(status.st_mode), status.st_mtime_ns, xattrs)
        if self._trusts and was_at_rest(stamp_of(status), now_ns):
            self._known[path] = (_stamp(status), entry)
        return entry


def _stable(handle: int) -> tuple[bytes, os.stat_result]:
    """The bytes of a file that nobody was writing meanwhile, or the last of a few tries."""
    for _ in range(5):
        before = os.fstat(handle)
        data = b"".join(iter(lambda: os.read(handle, 1 << 20), b""))
        after = os.fstat(handle)
        if _stamp(before) == _stamp(after):
            break
        os.lseek(handle, 0, os.SEEK_SET)
    return data, after


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (*stamp_of(status), status.st_size, status.st_mode)


def tree_to_bytes(tree: Tree, *, times: bool = True) -> bytes:
    """The canonical form of a tree; without times, the same for all trees that hold the same."""
    kept = tree if times else {path: _timeless(entry) for path, entry in tree.items()}
    return encode({to_wire(path): None if entry is None else entry_to_json(entry) for path, entry in kept.items()})


def tree_from_bytes(data: bytes) -> Tree:
    body: Mapping[str, Any] = decode(data)
    tree = {from_wire(path): None if entry is None else entry_from_json(entry) for path, entry in body.items()}
    return {path: tree[path] for path in sorted(tree, key=path_bytes)}


def _timeless(entry: Entry | None) -> Entry | None:
    return replace(entry, mtime_ns=0) if isinstance(entry, FileEntry | DirEntry) else entry


def files_below(root: int, base: bytes) -> Iterator[bytes]:
    """Paths of the regular files below a directory, links not followed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        handle = os.open(base, OPEN_DIRECTORY, dir_fd=root)
        try:
            yield from _files_in(handle, b"" if base == b"." else base + b"/")
        finally:
            os.close(handle)


def _files_in(directory: int, prefix: bytes) -> Iterator[bytes]:
    for name in sorted(os.fsencode(name) for name in os.listdir(directory)):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            yield prefix + name
        elif stat.S_ISDIR(status.st_mode):
            handle = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
            try:
                yield from _files_in(handle, prefix + name + b"/")
            finally:
                os.close(handle)
