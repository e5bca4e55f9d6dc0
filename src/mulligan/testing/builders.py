"""Small trees as values: written to disk, read back, compared.

A tree maps repo-relative paths (non-UTF-8 names by `surrogateescape`) to nodes. Shorthands: text or bytes mean a file,
None means a directory. `as_tree` expands shorthands, parents included, so that the result equals `tree_of`.

A `Person` is another writer of the same files: an editor, a build, a user. It writes without Mulligan.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Protocol, TypeAlias

from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, ancestors_of

FILE_MODE, DIR_MODE = 0o644, 0o755


@fast_dataclass(slots=True, frozen=True)
class File:
    """A file. `mtime_ns` 0 means any time."""

    content: bytes
    mode: int = FILE_MODE
    mtime_ns: int = 0


@fast_dataclass(slots=True, frozen=True)
class Link:
    """A symbolic link and its target."""

    target: str


@fast_dataclass(slots=True, frozen=True)
class Dir:
    """A directory and its mode."""

    mode: int = DIR_MODE
    mtime_ns: int = 0


Node: TypeAlias = File | Link | Dir
Tree: TypeAlias = dict[str, Node]
Sketch: TypeAlias = Mapping[str, Node | str | bytes | None]


def as_tree(sketch: Sketch) -> Tree:
    """The sketch in full: a node for every shorthand, a directory for every parent, in order of path."""
    tree: Tree = {
        str(parent): Dir() for path in sketch for parent in ancestors_of(RepoPath(path)) if parent != ROOT
    } | {path: _node(value) for path, value in sketch.items()}
    return {path: tree[path] for path in sorted(tree, key=os.fsencode)}


def _node(value: Node | str | bytes | None) -> Node:
    if value is None:
        return Dir()
    if isinstance(value, str):
        return File(value.encode())
    return File(value) if isinstance(value, bytes) else value


def plant(root: str | os.PathLike[str], sketch: Sketch) -> str:
    """Create the sketch on disk below `root`, which is created if missing. Existing files stay."""
    base = os.fspath(root)
    os.makedirs(base, exist_ok=True)
    tree = as_tree(sketch)
    for path, node in tree.items():
        _make(os.path.join(base, path), node)
    # Directories last, deepest first: new content changes a directory's time and may need write permission.
    for path, node in reversed(tree.items()):
        if isinstance(node, Dir):
            _finish(os.path.join(base, path), node)
    return base


def _make(path: str, node: Node) -> None:
    if isinstance(node, Dir):
        os.makedirs(path, exist_ok=True)
    elif isinstance(node, Link):
        os.symlink(node.target, path)
    else:
        with open(path, "wb") as file:
            file.write(node.content)
        _finish(path, node)


def _finish(path: str, node: File | Dir) -> None:
    os.chmod(path, node.mode)
    if node.mtime_ns:
        os.utime(path, ns=(node.mtime_ns, node.mtime_ns))


def tree_of(root: str | os.PathLike[str], *, times: bool = False) -> Tree:
    """Everything below `root`, in order of path; with `times` also the modification times."""
    base = os.fspath(root)
    below = [os.path.join(folder, name) for folder, inner, files in os.walk(base) for name in (*inner, *files)]
    found = {os.path.relpath(path, base): _look(path, times=times) for path in below}
    return {path: found[path] for path in sorted(found, key=os.fsencode)}


def _look(path: str, *, times: bool) -> Node:
    status = os.lstat(path)
    mode, mtime_ns = stat.S_IMODE(status.st_mode), status.st_mtime_ns if times else 0
    if stat.S_ISLNK(status.st_mode):
        return Link(os.readlink(path))
    if stat.S_ISDIR(status.st_mode):
        return Dir(mode, mtime_ns)
    with open(path, "rb") as file:
        return File(file.read(), mode, mtime_ns)


def contents_of(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files below `root` and their bytes."""
    return {path: node.content for path, node in tree_of(root).items() if isinstance(node, File)}


class OpenFile(Protocol):
    def write(self, content: bytes, /) -> object: ...

    def close(self) -> None: ...


class Person(Protocol):
    """Another writer. Paths are relative to the root. A save replaces whatever is at its path, as an editor does."""

    def save(self, path: str, content: bytes) -> None:
        """Save as most editors do: a new file, renamed over the old one."""
        ...

    def save_in_place(self, path: str, content: bytes) -> None:
        """Save as the other editors do: truncate the same file and write it; create it if it is missing."""
        ...

    def open_for_writing(self, path: str) -> OpenFile:
        """Truncate a file and keep it open for writing."""
        ...

    def read(self, path: str) -> bytes | None:
        """A file's bytes; None if the file is missing."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or link, if it exists."""
        ...

    def make_dir(self, path: str) -> None: ...

    def remove_dir(self, path: str) -> None: ...

    def make_link(self, path: str, target: str) -> None: ...

    def hard_link(self, path: str, other: str) -> None:
        """Make `other` a second name of the file at `path`."""
        ...

    def names(self, path: str = ".") -> list[str]:
        """The names in a directory, in order."""
        ...


class HostPerson:
    """A `Person` on the real file system."""

    def __init__(self, root: str) -> None:
        self._root = root

    def save(self, path: str, content: bytes) -> None:
        draft = self._at(path) + ".saving~"
        with open(draft, "wb") as file:
            file.write(content)
        os.replace(draft, self._at(path))

    def save_in_place(self, path: str, content: bytes) -> None:
        with open(self._at(path), "wb") as file:
            file.write(content)

    def open_for_writing(self, path: str) -> OpenFile:
        return open(self._at(path), "wb", buffering=0)

    def read(self, path: str) -> bytes | None:
        try:
            with open(self._at(path), "rb") as file:
                return file.read()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def remove(self, path: str) -> None:
        if os.path.lexists(self._at(path)):
            os.unlink(self._at(path))

    def make_dir(self, path: str) -> None:
        os.mkdir(self._at(path))

    def remove_dir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def make_link(self, path: str, target: str) -> None:
        os.symlink(target, self._at(path))

    def hard_link(self, path: str, other: str) -> None:
        os.link(self._at(path), self._at(other))

    def names(self, path: str = ".") -> list[str]:
        return sorted(os.listdir(self._at(path)))

    def _at(self, path: str) -> str:
        return os.path.join(self._root, path)
