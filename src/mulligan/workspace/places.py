"""From a path somebody names to the one place on disk it means, held by an open handle of its parent directory.

The handle that was judged is the handle acted on: between looking and acting, nobody can put another directory or a
symbolic link under our feet. A place is known by its real path, with bind mounts taken back to the directory they show,
so nested, symlinked and bind-mounted roots agree on it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from mulligan.values.paths import ROOT, RepoPath, parse_repo_path, path_bytes
from mulligan.values.refusal import Refused
from mulligan.workspace import kernel

Follow = Literal["deny", "within_root_only", "allow"]

_LINK_HOPS_MAX = 40
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(slots=True)
class Spot:
    """A name in an open directory. `path` is the real path below the root; `place` identifies it across roots."""

    path: RepoPath
    place: bytes
    parent: int
    name: bytes

    def close(self) -> None:
        if self.parent >= 0:
            os.close(self.parent)
            self.parent = -1

    def __enter__(self) -> Spot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True, frozen=True)
class Root:
    """An open root directory: its handle, its real path, and the prefix of every place below it."""

    handle: int
    path: bytes
    place: bytes
    device: int
    folds_case: bool
    resolves_beneath: bool = True

    def place_of(self, path: RepoPath) -> bytes:
        whole = self.place if path == ROOT else self.place + b"/" + path_bytes(path)
        return (
            whole.decode("utf-8", "surrogateescape").casefold().encode("utf-8", "surrogateescape")
            if (self.folds_case)
            else whole
        )


def open_root(path: str | bytes) -> Root:
    handle = os.open(path, _OPEN_DIRECTORY & ~os.O_NOFOLLOW)
    status = os.fstat(handle)
    real = kernel.real_path_of(handle)
    return Root(handle, real, place_prefix(real, status.st_dev), status.st_dev, kernel.folds_case(handle))


def place_prefix(real: bytes, device: int) -> bytes:
    """The path by which a directory is known however it is reached: bind mounts of one directory have one place.

    It names no device number, because those change from one boot to the next and history must not.
    """
    mounts = _mounts_of(device)
    inside = next((_path_inside(real, mount) for mount in mounts if _is_at_or_below(real, mount[0])), None)
    if inside is None:
        return real.rstrip(b"/")
    homes = [(root, point) for point, root in mounts if _is_at_or_below(inside, root)]
    root, point = min(homes, key=lambda home: (len(home[0]), home[1]))
    return (point.rstrip(b"/") + b"/" + inside[len(root) :].lstrip(b"/")).rstrip(b"/")


def _is_at_or_below(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def _path_inside(real: bytes, mount: tuple[bytes, bytes]) -> bytes:
    """Where a path lies within the file system mounted above it."""
    point, root = mount
    return root.rstrip(b"/") + b"/" + real[len(point) :].lstrip(b"/")


def _mounts_of(device: int) -> list[tuple[bytes, bytes]]:
    """(mount point, root within the file system) of the device's mounts, longest mount point first."""
    wanted = b"%d:%d" % (os.major(device), os.minor(device))
    try:
        with open("/proc/self/mountinfo", "rb") as table:
            lines = [line.split() for line in table]
    except OSError:
        return []
    found = [(_unescaped(line[4]), _unescaped(line[3])) for line in lines if line[2] == wanted]
    return sorted(found, key=lambda mount: -len(mount[0]))


def _unescaped(field: bytes) -> bytes:
    for code, char in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        field = field.replace(code, char)
    return field


def _forbidden_link(path: str) -> Refused:
    return Refused(
        "forbidden", "symlink_not_allowed", f"{path!r} goes through a symbolic link that may not be followed."
    )


def _escapes(path: str) -> Refused:
    return Refused("forbidden", "symlink_not_allowed", f"{path!r} leads out of the root through a symbolic link.")


def resolve(root: Root, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> Spot:
    """The spot a path names. With `final`, a symbolic link at its end is followed too.

    Raises FileNotFoundError or NotADirectoryError if a directory on the way is missing or not one, Refused if the way
    leads where it may not.
    """
    hops = 0
    while True:
        spot = _resolve_parent(root, path, follow)
        target = _link_target(spot) if final and path != ROOT else None
        if target is None:
            return spot
        spot.close()
        hops += 1
        if follow == "deny":
            raise _forbidden_link(path)
        if hops > _LINK_HOPS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        path = _joined(root, spot.path, target, path)


def resolve_exactly(root: Root, path: RepoPath) -> Spot:
    """The spot at a path recorded earlier, through no symbolic link at all."""
    return _resolve_parent(root, path, "deny")


def _link_target(spot: Spot) -> bytes | None:
    try:
        return os.readlink(spot.name, dir_fd=spot.parent)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _joined(root: Root, link: RepoPath, target: bytes, asked: str) -> RepoPath:
    """Where a link leads, as a path below the root, by names only; the next resolution judges it for real."""
    names = [] if target.startswith(b"/") else path_bytes(link).split(b"/")[:-1]
    if target.startswith(b"/"):
        prefix = root.path.rstrip(b"/") + b"/"
        if target.rstrip(b"/") != root.path.rstrip(b"/") and not target.startswith(prefix):
            raise _escapes(asked)
        target = target[len(prefix) :]
    for name in target.split(b"/"):
        if name == b"..":
            if not names:
                raise _escapes(asked)
            names.pop()
        elif name not in (b"", b"."):
            names.append(name)
    return parse_repo_path(b"/".join(names).decode("utf-8", "surrogateescape") or ".")


def _resolve_parent(root: Root, path: RepoPath, follow: Follow) -> Spot:
    if path == ROOT:
        return Spot(ROOT, root.place_of(ROOT), os.dup(root.handle), b".")
    raw = path_bytes(path)
    folder, _, name = raw.rpartition(b"/")
    if not folder:
        return Spot(path, root.place_of(path), os.dup(root.handle), name)
    if root.resolves_beneath:
        try:
            resolve_flags = kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_MAGICLINKS
            handle = kernel.open_beneath(root.handle, folder, os.O_RDONLY | os.O_DIRECTORY, resolve=resolve_flags)
            return _spot_at(root, path, handle, name)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM):
                raise
    handle, real = _walk(root, folder.split(b"/"), follow=follow, asked=path)
    real_path = parse_repo_path(b"/".join([*real, name]).decode("utf-8", "surrogateescape"))
    return _spot_at(root, real_path, handle, name)


def _spot_at(root: Root, path: RepoPath, handle: int, name: bytes) -> Spot:
    device = os.fstat(handle).st_dev
    if device == root.device:
        return Spot(path, root.place_of(path), handle, name)
    return Spot(path, place_prefix(kernel.real_path_of(handle), device) + b"/" + name, handle, name)


def _walk(root: Root, names: list[bytes], *, follow: Follow, asked: str) -> tuple[int, list[bytes]]:
    """Open directory by directory without following links; follow each link by hand, as the policy says."""
    pending, real, hops = list(reversed(names)), list[bytes](), 0
    handle = os.dup(root.handle)
    try:
        while pending:
            name = pending.pop()
            try:
                below = os.open(name, _OPEN_DIRECTORY, dir_fd=handle)
            except OSError as error:
                target = _as_link(handle, name, error)
                hops += 1
                if follow == "deny":
                    raise _forbidden_link(asked) from None
                if hops > _LINK_HOPS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), asked) from None
                here = "/".join([*(part.decode("utf-8", "surrogateescape") for part in real), "x"])
                goal = path_bytes(_joined(root, parse_repo_path(here), target, asked))
                pending += reversed([] if goal == b"." else goal.split(b"/"))
                real = []
                os.close(handle)
                handle = os.dup(root.handle)
                continue
            os.close(handle)
            handle = below
            real.append(name)
        return handle, real
    except BaseException:
        os.close(handle)
        raise


def _as_link(directory: int, name: bytes, error: OSError) -> bytes:
    """The target if opening failed because the name is a link; else the error goes on."""
    if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
        raise error
    if not stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(name)) from None
    return os.readlink(name, dir_fd=directory)


@contextmanager
def spot_at(root: Root, path: RepoPath) -> Iterator[Spot]:
    """`resolve_exactly` for the length of a block."""
    spot = resolve_exactly(root, path)
    try:
        yield spot
    finally:
        spot.close()
