"""A whole tree again, in a fresh directory of ours: every file, uncommitted and ignored ones too.

Bytes are shared with the original where the file system can (reflink), else copied. Modes, times, links, empty
directories and the user's extended attributes come along. A `.git` that is only a pointer (a worktree's or submodule's)
becomes a git directory of its own, so that nothing done in the copy reaches the original repository.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from mulligan.values.faults import fault, fault_of_os_error
from mulligan.values.paths import path_from_bytes
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import DRAFT_PREFIX, read_xattrs, write_xattrs
from mulligan.workspace.places import Root, open_root, resolve_exactly

_FICLONE = 0x40049409
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_KIND_TRIES = 100
_GIT_POINTERS = (b"commondir", b"gitdir", b"locked")
_GIT_SHARED = frozenset(
    b"branches common config description hooks info logs lost-found modules objects packed-refs refs remotes"
    b" rr-cache shallow svn".split()
)
_GIT_NOT_SHARED = frozenset(
    b"info/sparse-checkout logs/HEAD logs/refs/bisect logs/refs/rewritten logs/refs/worktree refs/bisect"
    b" refs/rewritten refs/worktree".split()
)


@plain(slots=True, frozen=True)
class Copied:
    """One path of the copy. The stamps say later whether either side has been touched since."""

    path: bytes
    mode: int
    source_stamp: str
    copy_stamp: str


@plain(slots=True, frozen=True)
class Skipped:
    """A path that has no copy: a device, FIFO or socket, or one that cannot be read."""

    path: bytes
    reason: str


def stamp(path: bytes) -> str:
    """Changes whenever content, mode or identity of a path changes; "" when it is not there."""
    return _stamp_at(None, path)


def _stamp_at(directory: int | None, name: bytes) -> str:
    try:
        return stamp_of(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return ""


def stamp_of(status: os.stat_result) -> str:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        return f"d:{status.st_mode:o}"
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_mode:o}"


def copy_tree(source: bytes, target: bytes) -> Iterator[Copied | Skipped]:
    """Copy into a directory that must not exist yet, nor be inside the original; each path is told.

    Both trees are walked through open directories and no symbolic link is followed, whatever anybody renames meanwhile.
    A copy that cannot be finished is removed.
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
    with removed_unless_done(target), _opened(source) as here, _opened(target) as there:
        yield from _Copying(here, there).everything()
        _copy_folder_metadata(here.handle, there.handle, os.fstat(here.handle))


@contextmanager
def removed_unless_done(copy: bytes) -> Iterator[None]:
    """Remove a copy of which nobody knows yet, if what is inside does not come to its end."""
    with ExitStack() as undone:
        undone.callback(_try_to_remove, copy)
        yield
        undone.pop_all()


def _try_to_remove(copy: bytes) -> None:
    with suppress(OSError):
        remove_copy(copy)


def _is_inside(target: bytes, source: bytes) -> bool:
    """Whether a place that need not exist would be below a directory, by whatever name that is reached."""
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


class _OfAnotherKind(Exception):
    """What a name stands for was exchanged between the look at it and its copy."""


@dataclass(slots=True)
class _Copying:
    """One tree on its way into a folder of another. `over`: what that has of the same name gives way."""

    here: Root
    there: Root
    into: bytes = b""
    wanted: Callable[[bytes], bool] = lambda _: True
    over: bool = False
    _told: dict[bytes, Copied | Skipped] = field(default_factory=dict)

    def everything(self) -> Iterable[Copied | Skipped]:
        self._folder(b"")
        return self._told.values()

    def _folder(self, below: bytes) -> None:
        """What is in a folder; its own folders when its handles are closed again, so that any depth can be copied."""
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
        """Whether it is one; then there is one for its copy."""
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
                return False
            with suppress(FileExistsError) if self.over else nullcontext():
                os.mkdir(name, 0o700, dir_fd=target)
        except FileNotFoundError:
            return False
        return True

    def _whole_folder(self, path: bytes) -> None:
        """If somebody puts something else there meanwhile, the copy of it begins anew."""
        above, _, name = path.rpartition(b"/")
        for _ in range(_KIND_TRIES):
            try:
                try:
                    self._folder(path)
                except PermissionError:
                    self._told[path + b"/"] = Skipped(path, "not_captured")
                self._folder_done(path)
                return
            except (FileNotFoundError, NotADirectoryError, Refused):
                with self._directories(above) as (source, target):
                    self._begin_anew(target, path)
                    if not self._is_folder(source, target, name):
                        self._leaf(source, target, path)
                        return
        self._told[path] = Skipped(path, "unstable")

    def _begin_anew(self, target: int, path: bytes) -> None:
        for told in [told for told in self._told if told.startswith(path + b"/")]:
            del self._told[told]
        shutil.rmtree(path.rpartition(b"/")[2], dir_fd=target)

    @contextmanager
    def _directories(self, below: bytes) -> Iterator[tuple[int, int]]:
        """A folder and its copy."""
        into = b"/".join(part for part in (self.into, below) if part)
        with _directory(self.here, below) as source, _directory(self.there, into) as target:
            yield source, target

    def _folder_done(self, path: bytes) -> None:
        above, _, name = path.rpartition(b"/")
        with self._directories(above) as (source, target):
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            with _subdirectory(source, name) as original, _subdirectory(target, name) as copy:
                _copy_folder_metadata(original, copy, status)
            self._tell(path, status, target)

    def _tell(self, path: bytes, status: os.stat_result, target: int) -> None:
        copied = _stamp_at(target, path.rpartition(b"/")[2])
        self._told[path] = Copied(path, stat.S_IMODE(status.st_mode), stamp_of(status), copied)

    def _leaf(self, source: int, target: int, path: bytes) -> None:
        """A file or a symbolic link. One that is exchanged for something else all the time has no copy."""
        name = path.rpartition(b"/")[2]
        if self.over:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=target)
        for _ in range(_KIND_TRIES):
            try:
                status = _copy_leaf(source, target, name)
            except _OfAnotherKind:
                continue
            except FileNotFoundError:
                return
            except PermissionError:
                self._told[path] = Skipped(path, "not_captured")
                return
            except OSError as error:
                raise fault_of_os_error(error, f"Copying {os.fsdecode(path)}") from error
            if status is None:
                self._told[path] = Skipped(path, "special_file")
            elif stat.S_ISDIR(status.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                self._whole_folder(path)
            else:
                if name == b".git" and stat.S_ISREG(status.st_mode):
                    self._own_git_directory(source, target, path)
                self._tell(path, status, target)
            return
        self._told[path] = Skipped(path, "unstable")

    def _own_git_directory(self, source: int, target: int, path: bytes) -> None:
        """Replace a copied `.git` pointer by a private copy of the git directory it points to, if it points to one.

        A worktree has a directory for what is its own, and shares the rest with the repository it belongs to.
        """
        with open(os.open(b".git", _READ_FLAGS, dir_fd=source), "rb") as file:
            word, _, named = file.read().strip().partition(b": ")
        git = os.path.normpath(os.path.join(os.path.dirname(self.here.absolute(path_from_bytes(path))), named))
        common = _shared_by(git)
        if word != b"gitdir" or not _is_repository(git, common):
            return
        os.unlink(b".git", dir_fd=target)
        os.mkdir(b".git", 0o700, dir_fd=target)
        self._lay_over(common, path, _is_wanted if common == git else _is_shared)
        if common != git:
            self._lay_over(git, path, lambda inner: inner not in _GIT_POINTERS)
        with _subdirectory(target, b".git") as copy:
            for name in (b"config", b"config.worktree"):
                _forget_worktree(copy, name)

    def _lay_over(self, source: bytes, into: bytes, wanted: Callable[[bytes], bool]) -> None:
        """Copy what is wanted into a folder of the copy, in place of what it has of the same name."""
        with _opened(source) as here:
            _Copying(here, self.there, into, wanted, over=True).everything()


def _copy_leaf(source: int, target: int, name: bytes) -> os.stat_result | None:
    """What was copied, or a folder, which was not; None for a device, FIFO or socket.

    Raises `_OfAnotherKind` if it is another thing by now.
    """
    status = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        try:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise _OfAnotherKind from None
        return status
    if stat.S_ISREG(status.st_mode):
        return _copy_file(source, target, name)
    return status if stat.S_ISDIR(status.st_mode) else None


def _copy_file(source: int, target: int, name: bytes) -> os.stat_result:
    try:
        handle = os.open(name, _READ_FLAGS, dir_fd=source)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _OfAnotherKind from None
    with open(handle, "rb") as original:
        status = os.fstat(original.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _OfAnotherKind
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
    with resolve_exactly(root, path_from_bytes(below + b"/any" if below else b"any")) as spot:
        yield spot.parent


@contextmanager
def _subdirectory(above: int, name: bytes) -> Iterator[int]:
    """-1 for one that may not be opened."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except PermissionError:
        yield -1
        return
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
    """A pointer is anybody's text: what it names is copied only if git would take it for its own."""
    folders = (os.path.join(common, name) for name in (b"objects", b"refs"))
    return os.path.isfile(os.path.join(git, b"HEAD")) and all(map(os.path.isdir, folders))


def _is_wanted(path: bytes) -> bool:
    return path not in (b"worktrees", b"gc.pid")


def _is_shared(path: bytes) -> bool:
    """What all worktrees of a repository have in common; the rest is that of its first one (gitrepository-layout)."""
    return path.split(b"/", 1)[0] in _GIT_SHARED and path not in _GIT_NOT_SHARED


def _forget_worktree(git: int, config: bytes) -> None:
    """`core.worktree` would send git back to the original's files."""
    with suppress(FileNotFoundError):
        with open(os.open(config, _READ_FLAGS, dir_fd=git), "rb") as file:
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
