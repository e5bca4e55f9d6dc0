"""Copies a whole tree into a new directory: every file, uncommitted and ignored ones too.

The copy shares bytes with the original if the file system can (reflink). It has the same modes, times, links, empty
directories and user's extended attributes. A `.git` that is only a pointer (a worktree's or submodule's) becomes a git
directory of its own, so that no command in the copy reaches the original repository.

`Trees` stores whole trees: the entry of every path below a root, and the bytes of every file, each once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import field, replace
from typing import Any, Protocol, TypeAlias

from mulligan.files.disk import DRAFT_PREFIX, read_xattrs, write_xattrs
from mulligan.files.resolve import Root, open_root, resolve_exactly
from mulligan.files.tree.directories import OPEN_DIRECTORY, OPEN_FILE, is_local, stamp_of, was_at_rest
from mulligan.store.blob_files import DirectoryBodies
from mulligan.store.blobs import pack, unpack
from mulligan.store.fork_locks import shared_lock
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, now_ns
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import DirEntry, Entry, FileEntry, SymlinkEntry, entry_from_json, entry_to_json
from mulligan.values.errors import MulliganError, Refused, RestoreFailedError, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, from_wire, path_bytes, path_from_bytes, to_wire

_FICLONE = 0x40049409
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_KIND_TRIES = 100
_GIT_NOT_COPIED = (b"worktrees", b"gc.pid")
_GIT_POINTERS = (b"commondir", b"gitdir", b"locked")
_GIT_SHARED = frozenset(
    b"branches common config description hooks info logs lost-found modules objects packed-refs refs remotes"
    b" rr-cache shallow svn".split()
)
_GIT_NOT_SHARED = frozenset(
    b"info/sparse-checkout logs/HEAD logs/refs/bisect logs/refs/rewritten logs/refs/worktree refs/bisect"
    b" refs/rewritten refs/worktree".split()
)


@fast_dataclass(slots=True, frozen=True)
class Copied:
    """One path of the copy. The stamps tell later whether either side has changed since."""

    path: bytes
    mode: int
    source_stamp: str
    copy_stamp: str


@fast_dataclass(slots=True, frozen=True)
class Skipped:
    """A path that has no copy: a device, FIFO or socket, or one that cannot be read."""

    path: bytes
    reason: str


def stamp(path: bytes) -> str:
    """A text that changes whenever content, mode or identity of a path changes; "" if it does not exist."""
    return _stamp_at(None, path)


def _stamp_at(directory: int | None, name: bytes) -> str:
    try:
        return copied_stamp(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return ""


def copied_stamp(status: os.stat_result) -> str:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        return f"d:{status.st_mode:o}"
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_mode:o}"


def copy_tree(source: bytes, target: bytes) -> Iterator[Copied | Skipped]:
    """Copy into a directory that must not exist yet, nor be inside the original. Yields each path.

    It walks both trees through open directories and follows no symbolic link, even if another process renames
    directories meanwhile. If the copy cannot be finished, it is removed.
    """
    if _is_inside(os.path.realpath(target), source):
        shown = os.fsdecode(target)
        raise fault("invalid_params", f"{shown} is inside the files to be copied; choose a place outside.")
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.mkdir(target, 0o700)
    except FileExistsError:
        shown = os.fsdecode(target)
        raise fault("file_exists", f"{shown} exists already; choose another place for the copy.") from None
    with removed_unless_done(target), _opened(source) as original, _opened(target) as copy:
        yield from _TreeCopy(original, copy).run()
        _copy_folder_metadata(original.handle, copy.handle, os.fstat(original.handle))


@contextmanager
def removed_unless_done(copy: bytes) -> Iterator[None]:
    """Remove a copy that the store does not know yet, if the block raises."""
    with ExitStack() as undone:
        undone.callback(_try_to_remove, copy)
        yield
        undone.pop_all()


def _try_to_remove(copy: bytes) -> None:
    with suppress(OSError):
        remove_copy(copy)


def _is_inside(target: bytes, source: bytes) -> bool:
    """Whether a path, which need not exist, is below a directory. Links and mounts to that directory count."""
    original, above = os.stat(source), os.path.dirname(target)
    while not (os.path.isdir(above) and os.path.samestat(os.stat(above), original)):
        if above == os.path.dirname(above):
            return False
        above = os.path.dirname(above)
    return True


@contextmanager
def _opened(path: bytes) -> Iterator[Root]:
    root = open_root(path)
    try:
        yield root
    finally:
        os.close(root.handle)


class _KindChangedError(Exception):
    """Another process exchanged the file of a name between the check and the copy."""


@fast_dataclass(slots=True)
class _TreeCopy:
    """Copies one tree into a folder of another. If `over`, it replaces files of the same name."""

    source: Root
    target: Root
    into: bytes = b""
    wanted: Callable[[bytes], bool] = lambda _: True
    over: bool = False
    _outcomes: dict[bytes, Copied | Skipped] = field(default_factory=dict)

    def run(self) -> Iterable[Copied | Skipped]:
        self._folder(b"")
        return self._outcomes.values()

    def _folder(self, below: bytes) -> None:
        """Copy what is in a folder; its subfolders after its handles are closed, so that trees of any depth can be
        copied.
        """
        folders: list[bytes] = []
        with self._directories(below) as (source, target):
            for name in sorted(os.fsencode(name) for name in os.listdir(source)):
                path = below + b"/" + name if below else name
                if name.startswith(DRAFT_PREFIX) or not self.wanted(path):
                    continue
                if self._is_folder(source, target, name):
                    folders.append(path)
                else:
                    self._leaf(source, target, path)
        for path in folders:
            self._whole_folder(path)

    def _is_folder(self, source: int, target: int, name: bytes) -> bool:
        """Whether the name is a folder; if so, it creates the folder's copy."""
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
                return False
            with suppress(FileExistsError) if self.over else nullcontext():
                os.mkdir(name, 0o700, dir_fd=target)
        except FileNotFoundError:
            return False
        return True

    def _whole_folder(self, path: bytes) -> None:
        """Copy a folder; start again if another process puts something else there meanwhile."""
        above, _, name = path.rpartition(b"/")
        for _ in range(_KIND_TRIES):
            try:
                try:
                    self._folder(path)
                except PermissionError:
                    self._outcomes[path + b"/"] = Skipped(path, "not_captured")
                self._folder_done(path)
                return
            except (FileNotFoundError, NotADirectoryError, Refused):
                with self._directories(above) as (source, target):
                    self._start_again(target, path)
                    if not self._is_folder(source, target, name):
                        self._leaf(source, target, path)
                        return
        self._outcomes[path] = Skipped(path, "unstable")

    def _start_again(self, target: int, path: bytes) -> None:
        for below in [below for below in self._outcomes if below.startswith(path + b"/")]:
            del self._outcomes[below]
        shutil.rmtree(path.rpartition(b"/")[2], dir_fd=target)

    @contextmanager
    def _directories(self, below: bytes) -> Iterator[tuple[int, int]]:
        """A folder and its copy."""
        into = b"/".join(part for part in (self.into, below) if part)
        with _directory(self.source, below) as source, _directory(self.target, into) as target:
            yield source, target

    def _folder_done(self, path: bytes) -> None:
        above, _, name = path.rpartition(b"/")
        with self._directories(above) as (source, target):
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            with _subdirectory(source, name) as original, _subdirectory(target, name) as copy:
                _copy_folder_metadata(original, copy, status)
            self._note_copied(path, status, target)

    def _note_copied(self, path: bytes, status: os.stat_result, target: int) -> None:
        copied = _stamp_at(target, path.rpartition(b"/")[2])
        self._outcomes[path] = Copied(path, stat.S_IMODE(status.st_mode), copied_stamp(status), copied)

    def _leaf(self, source: int, target: int, path: bytes) -> None:
        """Copy a file or a symbolic link. If another process exchanges it again and again, it is skipped."""
        name = path.rpartition(b"/")[2]
        if self.over:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=target)
        for _ in range(_KIND_TRIES):
            try:
                status = _copy_leaf(source, target, name)
            except _KindChangedError:
                continue
            except FileNotFoundError:
                return
            except PermissionError:
                self._outcomes[path] = Skipped(path, "not_captured")
                return
            except OSError as error:
                raise fault_of_os_error(error, f"Copying {os.fsdecode(path)}") from error
            if status is None:
                self._outcomes[path] = Skipped(path, "special_file")
            elif stat.S_ISDIR(status.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                self._whole_folder(path)
            else:
                if name == b".git" and stat.S_ISREG(status.st_mode):
                    self._own_git_directory(source, target, path)
                self._note_copied(path, status, target)
            return
        self._outcomes[path] = Skipped(path, "unstable")

    def _own_git_directory(self, source: int, target: int, path: bytes) -> None:
        """Replace a copied `.git` pointer by a private copy of the git directory it points to, if it points to one.

        A worktree has a directory for what is its own, and shares the rest with the repository it belongs to.
        """
        with open(os.open(b".git", OPEN_FILE, dir_fd=source), "rb") as file:
            word, _, named = file.read().strip().partition(b": ")
        git = os.path.normpath(os.path.join(os.path.dirname(self.source.absolute(path_from_bytes(path))), named))
        common = _shared_by(git)
        if word != b"gitdir" or not _is_repository(git, common):
            return
        os.unlink(b".git", dir_fd=target)
        os.mkdir(b".git", 0o700, dir_fd=target)
        own = common == git
        self._copy_over(common, path, (lambda inner: inner not in _GIT_NOT_COPIED) if own else _is_shared)
        if common != git:
            self._copy_over(git, path, lambda inner: inner not in _GIT_POINTERS)
        with _subdirectory(target, b".git") as copy:
            for name in (b"config", b"config.worktree"):
                _forget_worktree(copy, name)

    def _copy_over(self, source: bytes, into: bytes, wanted: Callable[[bytes], bool]) -> None:
        """Copy the wanted paths into a folder of the copy, over files of the same name."""
        with _opened(source) as original:
            _TreeCopy(original, self.target, into, wanted, over=True).run()


def _copy_leaf(source: int, target: int, name: bytes) -> os.stat_result | None:
    """Copy a file or link. Answers its status, also for a folder, which is not copied; None for a device, FIFO or
    socket.

    Raises `_KindChangedError` if it is another thing by now.
    """
    status = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        try:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise _KindChangedError from None
        return status
    if stat.S_ISREG(status.st_mode):
        return _copy_file(source, target, name)
    return status if stat.S_ISDIR(status.st_mode) else None


def _copy_file(source: int, target: int, name: bytes) -> os.stat_result:
    try:
        handle = os.open(name, OPEN_FILE, dir_fd=source)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _KindChangedError from None
    with open(handle, "rb") as original:
        status = os.fstat(original.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _KindChangedError
        with open(os.open(name, _CREATE_FLAGS, 0o600, dir_fd=target), "wb") as copy:
            try:
                fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                shutil.copyfileobj(original, copy, 1024 * 1024)
                copy.flush()
            with suppress(OSError):
                write_xattrs(copy.fileno(), read_xattrs(original.fileno()))
            os.fchmod(copy.fileno(), stat.S_IMODE(status.st_mode))
            os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return status


@contextmanager
def _directory(root: Root, below: bytes) -> Iterator[int]:
    """A folder of a tree, opened from its root through no symbolic link. Raises as `resolve_exactly` does."""
    with resolve_exactly(root, path_from_bytes(below + b"/any" if below else b"any")) as resolved:
        yield resolved.parent


@contextmanager
def _subdirectory(above: int, name: bytes) -> Iterator[int]:
    """Open a folder; -1 if this process has no permission."""
    try:
        handle = os.open(name, OPEN_DIRECTORY, dir_fd=above)
    except PermissionError:
        yield -1
        return
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _opened_directory(above: int, name: bytes) -> Iterator[int]:
    handle = os.open(name, OPEN_DIRECTORY, dir_fd=above)
    try:
        yield handle
    finally:
        os.close(handle)


def _copy_folder_metadata(original: int, copy: int, status: os.stat_result) -> None:
    if original >= 0:
        with suppress(OSError):
            write_xattrs(copy, read_xattrs(original))
    os.fchmod(copy, stat.S_IMODE(status.st_mode))
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def _shared_by(git: bytes) -> bytes:
    with suppress(OSError), open(os.path.join(git, b"commondir"), "rb") as file:
        return os.path.normpath(os.path.join(git, file.read().strip()))
    return git


def _is_repository(git: bytes, common: bytes) -> bool:
    """Whether a `.git` pointer names a repository that git would accept.

    Any process can write a pointer, so other directories are not copied.
    """
    folders = (os.path.join(common, name) for name in (b"objects", b"refs"))
    return os.path.isfile(os.path.join(git, b"HEAD")) and all(map(os.path.isdir, folders))


def _is_shared(path: bytes) -> bool:
    """Whether all worktrees of a repository share the path.

    The rest belongs to its first one (gitrepository-layout).
    """
    return path.split(b"/", 1)[0] in _GIT_SHARED and path not in _GIT_NOT_SHARED


def _forget_worktree(git: int, config: bytes) -> None:
    """Remove `core.worktree`, which would make git work on the original's files."""
    with suppress(FileNotFoundError):
        with open(os.open(config, OPEN_FILE, dir_fd=git), "rb") as file:
            lines = file.readlines()
        kept = [line for line in lines if line.partition(b"=")[0].strip().lower() not in (b"worktree", b"bare")]
        with open(os.open(config, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, dir_fd=git), "wb") as file:
            file.writelines(kept)


def remove_copy(directory: bytes) -> None:
    """Delete a copy that `copy_tree` made, read-only directories in it included."""
    for folder, names, _ in os.walk(directory):
        for name in names:
            child = os.path.join(folder, name)
            if not os.path.islink(child):
                os.chmod(child, stat.S_IMODE(os.lstat(child).st_mode) | 0o700)
    shutil.rmtree(directory)


# Every path below a root without the root itself, parents first. None: it cannot be stored, and does not change.
Tree: TypeAlias = dict[RepoPath, Entry | None]

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EIO})


class Bodies(Protocol):
    """Stores bytes by their digests. A store's `Blobs` is one."""

    def store(self, data: bytes) -> Digest: ...
    def read(self, digest: Digest) -> bytes: ...


@fast_dataclass(slots=True, frozen=True)
class _Place:
    handle: int
    offset: int
    packed: int
    size: int


class Pack:
    """Bodies in an unnamed file, which disappears with the process, however that ends."""

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
        """Raises RestoreFailedError if it does not have these bytes."""
        place = self._places.get(digest)
        if place is None:
            words = (
                f"The bytes of {digest} are not stored here; pass a folder as `bodies` to keep them after the process."
            )
            raise RestoreFailedError(words, digest=digest)
        return unpack(os.pread(place.handle, place.packed, place.offset), place.size)

    def _file(self) -> int:
        """The file. A forked child reads what its parent wrote, and writes into a new file."""
        if self._owner != os.getpid():
            with tempfile.TemporaryFile(prefix="mulligan-", buffering=0) as file:
                self._handle = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._handle)
            self._end, self._owner = 0, os.getpid()
        return self._handle


class FolderBodies:
    """Bodies in a folder. They stay until the user deletes the folder, so a later process can read them."""

    def __init__(self, directory: str) -> None:
        self._files = DirectoryBodies(directory)

    def store(self, data: bytes) -> Digest:
        digest = digest_of(data)
        self._files.put(digest, data)
        return digest

    def read(self, digest: Digest) -> bytes:
        """Raises RestoreFailedError if it does not have these bytes, or they are damaged."""
        try:
            data = self._files.get(digest)
        except MulliganError as error:
            raise RestoreFailedError(error.message, digest=digest) from error
        if digest_of(data) != digest:
            raise RestoreFailedError(f"The stored bytes of {digest} are damaged.", digest=digest)
        return data


class Trees:
    """Reads everything below a root. A file whose stamp is the same is not read again. For one thread."""

    def __init__(self, root: int, bodies: Bodies, clock: Clock) -> None:
        self._root = root
        self._bodies = bodies
        self._clock = clock
        self._known: dict[RepoPath, tuple[tuple[int, ...], FileEntry]] = {}
        self._trusts = is_local(root)

    def look(self) -> Tree:
        """The present tree. The bytes of every file are stored when this returns."""
        tree: Tree = {}
        # Open another descriptor, because another thread may list the same directory through this one.
        with _opened_directory(self._root, b".") as directory:
            self._look_into(directory, b"", tree)
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
                    with _opened_directory(directory, name) as below:
                        self._look_into(below, prefix + name + b"/", tree)
            except FileNotFoundError:
                tree.pop(path, None)
            except OSError as error:
                if error.errno not in _DENIED:
                    raise
                tree[path] = None

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
        now = now_ns(self._clock)
        handle = os.open(name, OPEN_FILE, dir_fd=directory)
        try:
            data, status = _stable(handle)
            xattrs = read_xattrs(handle)
        finally:
            os.close(handle)
        digest = self._bodies.store(data)
        entry = FileEntry(digest, len(data), stat.S_IMODE(status.st_mode), status.st_mtime_ns, xattrs)
        if self._trusts and was_at_rest(stamp_of(status), now):
            self._known[path] = (_stamp(status), entry)
        return entry


def _stable(handle: int) -> tuple[bytes, os.stat_result]:
    """The bytes of a file that did not change during the read, or those of the last of a few tries."""
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
    """The canonical form of a tree; without times, it is equal for all trees with the same files."""
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
    yield from _files_in(root, base, b"" if base == b"." else base + b"/")


def _files_in(above: int, name: bytes, prefix: bytes) -> Iterator[bytes]:
    # Another process may remove a path or put something else there after it was listed. Then the rest counts.
    with suppress(FileNotFoundError, NotADirectoryError), _opened_directory(above, name) as directory:
        for inner in sorted(os.fsencode(entry) for entry in os.listdir(directory)):
            with suppress(FileNotFoundError):
                mode = os.stat(inner, dir_fd=directory, follow_symlinks=False).st_mode
                if stat.S_ISREG(mode):
                    yield prefix + inner
                elif stat.S_ISDIR(mode):
                    yield from _files_in(directory, inner, prefix + inner + b"/")
