"""Resolves a path to one place on disk, held by an open handle of its parent directory.

The boundary checks this handle, and Mulligan acts on the same one: so no process can put another directory or a
symbolic link in between. The place is the real path, with bind mounts resolved to the directory that they show, so
nested, symlinked and bind-mounted roots agree on it.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import replace
from typing import Literal, Protocol

from mulligan.files import kernel
from mulligan.values.errors import MulliganError, Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, is_inside, parse_repo_path, path_bytes, path_from_bytes

Follow = Literal["deny", "within_root_only", "allow"]

_LINK_HOPS_MAX = 40
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_STRAIGHT = kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_MAGICLINKS | kernel.RESOLVE_NO_XDEV
_MUST_WALK = frozenset({errno.ELOOP, errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EAGAIN})


@fast_dataclass(slots=True)
class ResolvedPath:
    """A name in an open directory. `path` is the real path below the root; `place` identifies it across roots.

    An `outside` path was reached through a link that leads out of the root; its `path` is that of the link, with the
    rest after it. `links` are the links that were followed below the root: their paths and targets.
    """

    path: RepoPath
    place: bytes
    parent: int
    name: bytes
    outside: bool = False
    links: tuple[tuple[RepoPath, bytes], ...] = ()

    def close(self) -> None:
        if self.parent >= 0:
            os.close(self.parent)
            self.parent = -1

    def __enter__(self) -> ResolvedPath:
        return self

    def __exit__(self, *_: object) -> None:
        # The same as `close`, without another call, because most paths are resolved for one `with`.
        if self.parent >= 0:
            os.close(self.parent)
            self.parent = -1


@fast_dataclass(slots=True, frozen=True)
class Root:
    """An open root directory: its handle, its real path, and the prefix of every place below it.

    `place` is its path with bind mounts resolved. The prefix is `key`, once a store knows the root, and `place` until
    then. `tree` is the prefix of places of files that are reached through the root and are not below it.
    """

    handle: int
    path: bytes
    place: bytes
    device: int
    folds_case: bool
    resolves_beneath: bool = True
    mount: int = -1
    key: bytes | None = None
    tree: bytes = b""

    def with_key(self, key: bytes) -> Root:
        """The same root, with the key by which a store knows it as the prefix of every place below."""
        tree = key[: -len(self.place)] if self.place and key.endswith(self.place) else b""
        return replace(self, key=key, tree=tree)

    def place_of(self, path: RepoPath) -> bytes:
        prefix = self.place if self.key is None else self.key
        whole = prefix if path == ROOT else prefix + b"/" + path_bytes(path)
        return folded(whole) if self.folds_case else whole

    def absolute(self, path: RepoPath) -> bytes:
        return self.path if path == ROOT else os.path.join(self.path, path_bytes(path))

    def below(self, real: bytes) -> RepoPath:
        """The path below the root of an absolute path; the inverse of `absolute`."""
        return path_from_bytes(real[len(self.path) :].lstrip(b"/") or b".")

    def find(self, name: str) -> RepoPath | None:
        """The path below the root of a file name on this machine, links followed; None if it is outside."""
        folder, last = os.path.split(os.path.join(self.path, os.fsencode(name)))
        real = os.path.join(os.path.realpath(folder), last)
        if not real.startswith(self.path.rstrip(b"/") + b"/"):
            return None
        with suppress(MulliganError):
            return self.below(real)
        return None


class Resolving(Protocol):
    """Something that resolves paths: a disk."""

    @property
    def root(self) -> Root: ...
    def resolve_exactly(self, path: RepoPath) -> ResolvedPath: ...


class Spots:
    """Resolves many paths, one after the other. It holds the directory of the last one, so that a path beside it needs
    no walk.

    A resolved path is valid until the next one is resolved. Call `let_go` when a directory may have been replaced, and
    at the end.
    """

    def __init__(self, disk: Resolving) -> None:
        self._disk = disk
        self._folder = ""
        self._last: ResolvedPath | None = None

    def at(self, path: RepoPath) -> ResolvedPath:
        """Raises as `resolve_exactly` does."""
        folder, _, name = path.rpartition("/")
        if self._last is not None and folder == self._folder and ROOT not in (path, self._last.path):
            return self._beside(self._last, path, name)
        self.let_go()
        self._folder, self._last = folder, self._disk.resolve_exactly(path)
        return self._last

    def _beside(self, last: ResolvedPath, path: RepoPath, name: str) -> ResolvedPath:
        raw = path_bytes(RepoPath(name))
        above = last.place.rpartition(b"/")[0]
        shown = folded(raw) if self._disk.root.folds_case else raw
        return ResolvedPath(path, above + b"/" + shown, last.parent, raw)

    def let_go(self) -> None:
        if self._last is not None:
            self._last.close()
            self._last = None

    def __enter__(self) -> Spots:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


def folded(place: bytes) -> bytes:
    """The folded form of a place in a directory that ignores case."""
    return place.decode("utf-8", "surrogateescape").casefold().encode("utf-8", "surrogateescape")


def open_root(path: str | bytes) -> Root:
    handle = os.open(path, _OPEN_DIRECTORY & ~os.O_NOFOLLOW)
    status = os.fstat(handle)
    real = kernel.real_path_of(handle)
    place = place_prefix(real, status.st_dev)
    return Root(handle, real, place, status.st_dev, kernel.folds_case(handle), mount=kernel.mount_of(handle))


def place_prefix(real: bytes, device: int) -> bytes:
    """The place of a directory: the same path for all bind mounts of it.

    It has no device number, because those change from one boot to the next and history must not.
    """
    mounts = _mounts_of(device)
    inside = next((_path_inside(real, mount) for mount in mounts if is_inside(real, mount[0])), None)
    if inside is None:
        return real.rstrip(b"/")
    homes = [(root, point) for point, root in mounts if is_inside(inside, root)]
    root, point = min(homes, key=lambda home: (len(home[0]), home[1]))
    return (point.rstrip(b"/") + b"/" + inside[len(root) :].lstrip(b"/")).rstrip(b"/")


def _path_inside(real: bytes, mount: tuple[bytes, bytes]) -> bytes:
    """The path within the file system that is mounted above it."""
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


def _escapes(path: str) -> Refused:
    return Refused("forbidden", "symlink_not_allowed", f"{path!r} leads out of the root through a symbolic link.")


def resolve(root: Root, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> ResolvedPath:
    """Resolve a path. With `final`, a symbolic link at its end is followed too.

    A link that leads out of the root is refused; with `allow`, the result is `outside`. Raises FileNotFoundError or
    NotADirectoryError if a directory on the way is missing or not one, Refused if the path is not allowed.
    """
    resolved = straight(root, path)
    if resolved is not None:
        if not final or path == ROOT or not _is_link(resolved):
            return resolved
        resolved.close()
    with _PathWalk(root, follow, path) as walk:
        resolved = walk.go(final=final)
        resolved.links = tuple(walk.links)
        return resolved


def resolve_exactly(root: Root, path: RepoPath) -> ResolvedPath:
    """Resolve a path that was recorded earlier, without following any symbolic link."""
    resolved = straight(root, path)
    if resolved is not None:
        return resolved
    with _PathWalk(root, "deny", path) as walk:
        return walk.go(final=False)


def straight(root: Root, path: RepoPath) -> ResolvedPath | None:
    """Resolve a path with one system call, if no link and no other mount is on the way and the kernel supports that.

    None: the path must be walked.
    """
    if path == ROOT:
        return ResolvedPath(ROOT, root.place_of(ROOT), os.dup(root.handle), b".")
    raw = path_bytes(path)
    folder, _, name = raw.rpartition(b"/")
    place = root.place_of(path) if root.folds_case or root.key is None else root.key + b"/" + raw
    if not folder:
        return ResolvedPath(path, place, os.dup(root.handle), name)
    if not root.resolves_beneath:
        return None
    try:
        handle = kernel.open_beneath(root.handle, folder, os.O_RDONLY | os.O_DIRECTORY, resolve=_STRAIGHT)
    except OSError as error:
        if error.errno not in _MUST_WALK:
            raise
        return None
    return ResolvedPath(path, place, handle, name)


def _is_link(resolved: ResolvedPath) -> bool:
    try:
        os.readlink(resolved.name, dir_fd=resolved.parent)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return False
        resolved.close()
        raise
    return True


def _link_target(directory: int, name: bytes) -> bytes | None:
    """The target of a link; None for anything else, and for a missing path."""
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _resolved_at(root: Root, path: RepoPath, handle: int, name: bytes) -> ResolvedPath:
    """The resolved path of a name.

    Below another mount, even one of the same file system, the place differs from the path.
    """
    if kernel.mount_of(handle) == root.mount:
        return ResolvedPath(path, root.place_of(path), handle, name)
    prefix = place_prefix(kernel.real_path_of(handle), os.fstat(handle).st_dev)
    return ResolvedPath(path, root.tree + prefix + b"/" + name, handle, name)


def _as_path(names: list[bytes]) -> RepoPath:
    return parse_repo_path(b"/".join(names).decode("utf-8", "surrogateescape") or ".")


def _names_of(target: bytes) -> list[bytes]:
    """The names of a link target. A last `.` stays if the target must be a directory."""
    *way, last = target.split(b"/")
    names = [name for name in way if name not in (b"", b".")]
    return [*names, b"." if last == b"" else last] if names or last not in (b"", b".") else []


class _PathWalk:
    """Walks from the root, one name at a time and never through a link; it follows allowed links itself.

    `real` are the names that it has passed, none of them a link; `pending` the next ones, the first of them last.
    """

    def __init__(self, root: Root, follow: Follow, asked: RepoPath) -> None:
        self._root = root
        self._follow = follow
        self._asked = asked
        self._handle = os.dup(root.handle)
        self._real: list[bytes] = []
        self._pending = _names_of(path_bytes(asked))[::-1]
        self._left_at: list[bytes] = []
        self._hops = 0
        self.links: list[tuple[RepoPath, bytes]] = []

    def __enter__(self) -> _PathWalk:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def go(self, *, final: bool) -> ResolvedPath:
        while self._pending:
            resolved = self._step(self._pending.pop(), final=final)
            if resolved is not None:
                return resolved
        return self._here()

    def _step(self, name: bytes, *, final: bool) -> ResolvedPath | None:
        is_last = not self._pending
        if name == b".":
            return None
        if name == b"..":
            return self._up(final=final)
        target = None if is_last and not final else _link_target(self._handle, name)
        if target is not None:
            return self._follow_link(name, target, final=final)
        if is_last:
            return self._resolved_name(name)
        self._enter(name)
        return None

    def _enter(self, name: bytes) -> None:
        try:
            below = os.open(name, _OPEN_DIRECTORY, dir_fd=self._handle)
        except OSError:
            if _link_target(self._handle, name) is None:
                raise
            # The name was no link a moment ago. Check it again, but not for ever.
            self._count_hop()
            self._pending.append(name)
            return
        self._move_to(below, [*self._real, name])

    def _move_to(self, handle: int, real: list[bytes]) -> None:
        os.close(self._handle)
        self._handle, self._real = handle, real

    def _up(self, *, final: bool) -> ResolvedPath | None:
        if not self._real:
            return self._jump(self._root.path + b"/..", final=final)
        self._move_to(self._open_real(self._real[:-1]), self._real[:-1])
        return None

    def _open_real(self, names: list[bytes]) -> int:
        handle = os.dup(self._root.handle)
        for name in names:
            above = handle
            try:
                handle = os.open(name, _OPEN_DIRECTORY, dir_fd=above)
            finally:
                os.close(above)
        return handle

    def _count_hop(self) -> None:
        self._hops += 1
        if self._hops > _LINK_HOPS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._asked)

    def _follow_link(self, name: bytes, target: bytes, *, final: bool) -> ResolvedPath | None:
        if self._follow == "deny":
            words = f"{self._asked!r} goes through a symbolic link that may not be followed."
            raise Refused("forbidden", "symlink_not_allowed", words)
        self._count_hop()
        self.links.append((_as_path([*self._real, name]), target))
        self._left_at = [*self._real, name, *reversed(self._pending)]
        if target.startswith(b"/"):
            return self._jump(target, final=final)
        self._pending += reversed(_names_of(target))
        return None

    def _jump(self, target: bytes, *, final: bool) -> ResolvedPath | None:
        """Continue at an absolute path. Inside the root the walk starts again and checks each name itself."""
        rest = self._pending[::-1]
        if self._begin_anew(target, rest):
            return None
        last = [] if final or not rest or rest[-1] == b".." else [rest.pop()]
        real = os.path.join(os.path.realpath(b"/".join([target, *rest])), *last)
        if self._begin_anew(real, []):
            return None
        if self._follow != "allow":
            raise _escapes(self._asked)
        folder, name = os.path.split(real)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return ResolvedPath(_as_path(self._left_at), self._root.tree + real, handle, name or b".", outside=True)

    def _begin_anew(self, target: bytes, rest: list[bytes]) -> bool:
        """Start again at the root with a path below it; False if the path is not below."""
        inside = self._root.path.rstrip(b"/") + b"/"
        if not (target + b"/").startswith(inside) or target == self._root.path + b"/..":
            return False
        self._pending = [*_names_of(target[len(inside) :]), *rest][::-1]
        self._move_to(os.dup(self._root.handle), [])
        return True

    def _resolved_name(self, name: bytes) -> ResolvedPath:
        handle, self._handle = self._handle, -1
        return _resolved_at(self._root, _as_path([*self._real, name]), handle, name)

    def _here(self) -> ResolvedPath:
        """The walk ended at a directory without a last name, as a link to `..` does."""
        if not self._real:
            return ResolvedPath(ROOT, self._root.place_of(ROOT), os.dup(self._root.handle), b".")
        *above, name = self._real
        return _resolved_at(self._root, _as_path(self._real), self._open_real(above), name)
