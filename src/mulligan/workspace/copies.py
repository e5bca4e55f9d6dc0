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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from mulligan.values.faults import fault, fault_of_os_error
from mulligan.values.plain import plain
from mulligan.workspace.disk import DRAFT_PREFIX, read_xattrs, write_xattrs

_FICLONE = 0x40049409
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
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
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return ""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        return f"d:{status.st_mode:o}"
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_mode:o}"


def copy_tree(source: bytes, target: bytes) -> Iterator[Copied | Skipped]:
    """Copy into a directory that must not exist yet, nor be inside the original; each path is told, parents first.

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
    with removed_unless_done(target):
        yield from _copy_directory(source, target, b"")
        shutil.copystat(source, target, follow_symlinks=False)


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


def _copy_directory(source: bytes, target: bytes, below: bytes) -> Iterator[Copied | Skipped]:
    try:
        names = sorted(os.listdir(os.path.join(source, below) if below else source))
    except PermissionError:
        yield Skipped(below, "not_captured")
        return
    for name in names:
        if not name.startswith(DRAFT_PREFIX):
            yield from _copy_one(source, target, os.path.join(below, name) if below else name)


def _copy_one(source: bytes, target: bytes, path: bytes) -> Iterator[Copied | Skipped]:
    here, there = os.path.join(source, path), os.path.join(target, path)
    try:
        status = os.lstat(here)
        before = stamp(here)
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(there, 0o700)
            yield from _copy_directory(source, target, path)
            shutil.copystat(here, there, follow_symlinks=False)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(here), there)
        elif stat.S_ISREG(status.st_mode):
            _copy_file(here, there)
        else:
            yield Skipped(path, "special_file")
            return
    except FileNotFoundError:
        return
    except PermissionError:
        yield Skipped(path, "not_captured")
        return
    except OSError as error:
        raise fault_of_os_error(error, f"Copying {os.fsdecode(path)}") from error
    if os.path.basename(path) == b".git" and stat.S_ISREG(status.st_mode):
        own_git_directory(here, there)
    yield Copied(path, stat.S_IMODE(status.st_mode), before, stamp(there))


def _copy_file(here: bytes, there: bytes) -> None:
    with open(here, "rb") as source, open(there, "xb") as target:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
        except OSError as error:
            if error.errno not in _NO_CLONE:
                raise
            shutil.copyfileobj(source, target, 1024 * 1024)
        with suppress(OSError):
            write_xattrs(target.fileno(), read_xattrs(source.fileno()))
        status = os.fstat(source.fileno())
        os.fchmod(target.fileno(), stat.S_IMODE(status.st_mode))
    os.utime(there, ns=(status.st_atime_ns, status.st_mtime_ns))


def own_git_directory(pointer: bytes, target: bytes) -> None:
    """Replace a copied `.git` pointer by a private copy of the git directory it points to, if it points to one.

    A worktree has a directory for what is its own, and shares the rest with the repository it belongs to.
    """
    with open(pointer, "rb") as file:
        word, _, named = file.read().strip().partition(b": ")
    git = os.path.normpath(os.path.join(os.path.dirname(pointer), named))
    common = _shared_by(git)
    if word != b"gitdir" or not _is_repository(git, common):
        return
    os.unlink(target)
    os.mkdir(target, 0o700)
    _lay_over(common, target, _is_wanted if common == git else _is_shared)
    if common != git:
        _lay_over(git, target, lambda path: path not in _GIT_POINTERS)
    for name in (b"config", b"config.worktree"):
        _forget_worktree(os.path.join(target, name))


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


def _lay_over(source: bytes, target: bytes, wanted: Callable[[bytes], bool], below: bytes = b"") -> None:
    """Copy what is wanted into a directory, in place of what it has of the same name."""
    for name in sorted(os.listdir(os.path.join(source, below))):
        path = os.path.join(below, name)
        here, there = os.path.join(source, path), os.path.join(target, path)
        if not wanted(path):
            continue
        if os.path.isdir(here) and not os.path.islink(here):
            os.makedirs(there, exist_ok=True)
            _lay_over(source, target, wanted, path)
            continue
        with suppress(FileNotFoundError):
            os.unlink(there)
        for _ in _copy_one(source, target, path):
            pass


def _forget_worktree(config: bytes) -> None:
    """`core.worktree` would send git back to the original's files."""
    with suppress(FileNotFoundError):
        with open(config, "rb") as file:
            lines = file.readlines()
        kept = [line for line in lines if line.partition(b"=")[0].strip().lower() not in (b"worktree", b"bare")]
        with open(config, "wb") as file:
            file.writelines(kept)


def remove_copy(directory: bytes) -> None:
    """Delete a copy that `copy_tree` made, read-only directories in it included."""
    for folder, names, _ in os.walk(directory):
        for name in names:
            child = os.path.join(folder, name)
            if not os.path.islink(child):
                os.chmod(child, stat.S_IMODE(os.lstat(child).st_mode) | 0o700)
    shutil.rmtree(directory)
