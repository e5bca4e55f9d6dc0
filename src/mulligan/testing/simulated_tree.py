"""Files, links and directories in memory, with what a power cut would leave of them.

A file's bytes survive a power cut when the file was synced since they were written, a directory's names when the
directory was. `power_cut` takes the rest back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Literal

from mulligan.testing.builders import Dir, File, Link, Sketch, Tree, as_tree
from mulligan.values.entries import Xattrs

NodeKind = Literal["file", "link", "dir", "special"]

_TICK_NS = 1_000_000
_FIRST_TICK_NS = 1_750_000_000_000_000_000


def os_error(number: int, name: bytes | str = b"") -> OSError:
    """As the kernel says it; Python picks the subclass."""
    return OSError(number, os.strerror(number), os.fsdecode(name))


@dataclass(slots=True, eq=False)
class Inode:
    """What a name stands for. `synced` and `states` are what a power cut goes back to."""

    number: int
    kind: NodeKind
    mode: int
    mtime_ns: int
    owner: int
    content: bytes = b""
    target: bytes = b""
    xattrs: Xattrs = ()
    writers: int = 0
    synced: tuple[bytes, int, Xattrs] | None = None
    states: list[dict[bytes, Inode]] = field(default_factory=lambda: [{}])

    @property
    def entries(self) -> dict[bytes, Inode]:
        return self.states[-1]

    def sync(self) -> None:
        self.synced = (self.content, self.mode, self.xattrs)
        self.states = self.states[-1:]

    def lose_power(self, random: Random | None) -> None:
        """Back to what was synced; with `random`, anything between that and the present."""
        kept = random.randrange(len(self.states)) if random else 0
        self.states = [self.states[kept]]
        old, self.mode, self.xattrs = self.synced or (b"", self.mode, self.xattrs)
        if self.content != old:
            torn = random.randint(0, len(self.content)) if random else 0
            self.content = self.content[:torn] + old[torn:]
        self.writers = 0
        self.sync()


class SimulatedTree:
    def __init__(self, sketch: Sketch) -> None:
        self._numbers = count(1)
        self._ticks = count(_FIRST_TICK_NS, _TICK_NS)
        self.inodes: dict[int, Inode] = {}
        self.root = self.new("dir", mode=0o755)
        for path, node in as_tree(sketch).items():
            self._plant(path, node)
        self.sync_all()

    def _plant(self, path: str, node: File | Link | Dir) -> None:
        folder, name = self.parent_of(path)
        if isinstance(node, Dir):
            inode = self.new("dir", mode=node.mode)
        elif isinstance(node, Link):
            inode = self.new("link", target=os.fsencode(node.target))
        else:
            inode = self.new("file", mode=node.mode, content=node.content)
        inode.mtime_ns = getattr(node, "mtime_ns", 0) or inode.mtime_ns
        self.change(folder, {name: inode})

    def new(self, kind: NodeKind, *, mode: int = 0o777, content: bytes = b"", target: bytes = b"") -> Inode:
        inode = Inode(next(self._numbers), kind, mode, self.tick(), os.geteuid(), content, target)
        self.inodes[inode.number] = inode
        return inode

    def tick(self) -> int:
        return next(self._ticks)

    def write(self, inode: Inode, content: bytes) -> None:
        inode.content = content
        inode.mtime_ns = self.tick()

    def change(self, folder: Inode, names: Mapping[bytes, Inode | None]) -> None:
        """All these names at once, as one step of the directory; None frees a name."""
        merged = {**folder.entries, **names}
        folder.states.append({name: inode for name, inode in merged.items() if inode is not None})
        folder.mtime_ns = self.tick()

    def parent_of(self, path: str) -> tuple[Inode, bytes]:
        """The directory and last name of a path without links."""
        *above, name = os.fsencode(path).split(b"/")
        folder = self.root
        for step in above:
            folder = folder.entries[step]
        return folder, name

    def at(self, path: str) -> Inode | None:
        if path == ".":
            return self.root
        folder, name = self.parent_of(path)
        return folder.entries.get(name)

    def links_of(self, wanted: Inode) -> int:
        """How many names it has."""
        return sum(inode is wanted for _, inode in self.walk())

    def walk(self) -> Iterator[tuple[str, Inode]]:
        """Every path and what it stands for, parents first."""
        pending = [("", self.root)]
        while pending:
            prefix, folder = pending.pop()
            for name, inode in folder.entries.items():
                path = prefix + os.fsdecode(name)
                yield path, inode
                if inode.kind == "dir":
                    pending.append((path + "/", inode))

    def sync_all(self) -> None:
        for inode in self.inodes.values():
            inode.sync()

    def power_cut(self, random: Random | None = None) -> None:
        for inode in self.inodes.values():
            inode.lose_power(random)

    def as_tree(self, *, times: bool = False) -> Tree:
        """In the form of `builders.tree_of`."""
        found: Tree = {}
        for path, inode in sorted(self.walk(), key=lambda item: os.fsencode(item[0])):
            mtime_ns = inode.mtime_ns if times else 0
            if inode.kind == "dir":
                found[path] = Dir(inode.mode, mtime_ns)
            elif inode.kind == "link":
                found[path] = Link(os.fsdecode(inode.target))
            else:
                found[path] = File(inode.content, inode.mode, mtime_ns)
        return found


class _Writing:
    """A file open for writing."""

    def __init__(self, tree: SimulatedTree, inode: Inode) -> None:
        self._tree, self._inode = tree, inode
        inode.writers += 1
        tree.write(inode, b"")

    def write(self, content: bytes, /) -> None:
        self._tree.write(self._inode, self._inode.content + content)

    def close(self) -> None:
        self._inode.writers -= 1


class SimulatedPerson:
    """A `Person` on a simulated tree."""

    def __init__(self, tree: SimulatedTree) -> None:
        self._tree = tree

    def save(self, path: str, content: bytes) -> None:
        if (there := self._tree.at(path)) is not None and there.kind == "dir":
            raise os_error(errno.EISDIR, path)
        self._put(path, self._tree.new("file", mode=0o644, content=content))

    def save_in_place(self, path: str, content: bytes) -> None:
        there = self._tree.at(path)
        if there is None:
            self.save(path, content)
        elif there.kind == "dir":
            raise os_error(errno.EISDIR, path)
        elif there.kind == "link":
            self.save_in_place(os.path.join(os.path.dirname(path), os.fsdecode(there.target)), content)
        else:
            self._tree.write(there, content)

    def open_for_writing(self, path: str) -> _Writing:
        there = self._tree.at(path)
        if there is None or there.kind != "file":
            raise os_error(errno.ENOENT, path)
        return _Writing(self._tree, there)

    def read(self, path: str) -> bytes | None:
        there = self._tree.at(path)
        return there.content if there is not None and there.kind == "file" else None

    def remove(self, path: str) -> None:
        there = self._tree.at(path)
        if there is not None and there.kind == "dir":
            raise os_error(errno.EISDIR, path)
        self._put(path, None)

    def make_dir(self, path: str) -> None:
        self._must_be_free(path)
        self._put(path, self._tree.new("dir", mode=0o755))

    def remove_dir(self, path: str) -> None:
        there = self._tree.at(path)
        if there is None or there.kind != "dir":
            raise os_error(errno.ENOENT if there is None else errno.ENOTDIR, path)
        if there.entries:
            raise os_error(errno.ENOTEMPTY, path)
        self._put(path, None)

    def make_link(self, path: str, target: str) -> None:
        self._must_be_free(path)
        self._put(path, self._tree.new("link", target=os.fsencode(target)))

    def hard_link(self, path: str, other: str) -> None:
        self._must_be_free(other)
        self._put(other, self._tree.at(path))

    def names(self, path: str = ".") -> list[str]:
        there = self._tree.at(path)
        return sorted(os.fsdecode(name) for name in there.entries) if there is not None else []

    def _must_be_free(self, path: str) -> None:
        if self._tree.at(path) is not None:
            raise os_error(errno.EEXIST, path)

    def _put(self, path: str, inode: Inode | None) -> None:
        folder, name = self._tree.parent_of(path)
        self._tree.change(folder, {name: inode})
