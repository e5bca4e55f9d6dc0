"""Small trees as values: written to disk, read back, compared.

A tree maps repo-relative paths (non-UTF-8 names by `surrogateescape`) to nodes. Shorthands: text or bytes stand for a
file, None for a directory. `as_tree` writes a shorthand out in full, parents included, so that it equals `tree_of`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from mulligan.values.paths import ROOT, RepoPath, ancestors_of
from mulligan.values.plain import plain

FILE_MODE, DIR_MODE = 0o644, 0o755


@plain(slots=True, frozen=True)
class File:
    """`mtime_ns` 0 stands for whatever it is."""

    content: bytes
    mode: int = FILE_MODE
    mtime_ns: int = 0


@plain(slots=True, frozen=True)
class Link:
    """A symbolic link to be planted, and where it leads."""

    target: str


@plain(slots=True, frozen=True)
class Dir:
    """A directory to be planted, with its mode."""

    mode: int = DIR_MODE
    mtime_ns: int = 0


Node: TypeAlias = File | Link | Dir
Tree: TypeAlias = dict[str, Node]
Sketch: TypeAlias = Mapping[str, Node | str | bytes | None]


def as_tree(sketch: Sketch) -> Tree:
    """The sketch in full: every shorthand a node, every parent a directory, in order of path."""
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
    """Make the sketch on disk below `root`, which is made if need be. What is there already stays."""
    base = os.fspath(root)
    os.makedirs(base, exist_ok=True)
    tree = as_tree(sketch)
    for path, node in tree.items():
        _make(os.path.join(base, path), node)
    # Directories last and deepest first: what is put into one changes its time, and may need its mode open.
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
    """Everything below `root`, in order of path; times only if asked for."""
    base = os.fspath(root)
    found = {os.path.relpath(path, base): _look(path, times=times) for path in _paths_below(base)}
    return {path: found[path] for path in sorted(found, key=os.fsencode)}


def _paths_below(base: str) -> Iterator[str]:
    for folder, directories, files in os.walk(base):
        for name in (*directories, *files):
            yield os.path.join(folder, name)


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
    """The files below `root` and their bytes: what most tests ask."""
    return {path: node.content for path, node in tree_of(root).items() if isinstance(node, File)}
