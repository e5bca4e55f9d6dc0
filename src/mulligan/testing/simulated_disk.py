"""`SimulatedDisk`: a disk in memory with the protocol of `files.disk.HostDisk`.

It has the same steps in the same order and the same errors; one contract suite tests both. It can also lose power
(`power_cut`), and a `person` can act on it at any step.

A file's bytes survive a power cut if the file was synced after the write, a directory's names if the directory was
synced. `power_cut` reverts everything else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from itertools import count
from random import Random
from typing import Literal

from mulligan.files.capture_rules import NO_RULES
from mulligan.files.disk import NOTHING, SPECIAL, FreeSteps, Image, Steps
from mulligan.files.resolve import Follow, ResolvedPath, Root
from mulligan.store.originals import Originals
from mulligan.store.protocol import Durability
from mulligan.testing.builders import Dir, File, Link, Sketch, Tree, as_tree
from mulligan.values.digest import digest_of
from mulligan.values.entries import Content, DirEntry, FileEntry, KeepLarge, SymlinkEntry, Xattrs, whole
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, path_bytes, path_from_bytes

NodeKind = Literal["file", "link", "dir", "special"]

_TICK_NS = 1_000_000
_FIRST_TICK_NS = 1_750_000_000_000_000_000


def os_error(number: int, name: bytes | str = b"") -> OSError:
    """The error of the kernel; Python chooses the subclass."""
    return OSError(number, os.strerror(number), os.fsdecode(name))


@fast_dataclass(slots=True, eq=False)
class Inode:
    """A file, link or directory. `synced` and `states` are the versions that a power cut may leave."""

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
        """Set back to the last sync; with `random`, to any version since then."""
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
        """Change all these names in one step of the directory; None removes a name."""
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
        """Every path and its inode, parents first."""
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


class _OpenFile:
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

    def open_for_writing(self, path: str) -> _OpenFile:
        there = self._tree.at(path)
        if there is None or there.kind != "file":
            raise os_error(errno.ENOENT, path)
        return _OpenFile(self._tree, there)

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


_ROOT_PATH = b"/simulated"
_LINK_HOPS_MAX = 40
_Trail = list[tuple[bytes, Inode]]


class SimulatedDisk:
    """A disk in memory. Its handles are negative numbers, so that no code confuses them with real descriptors."""

    def __init__(self, sketch: Sketch | None = None, *, steps: Steps | None = None) -> None:
        self.simulated = SimulatedTree(sketch or {})
        self.person = SimulatedPerson(self.simulated)
        self.root = Root(_handle(self.simulated.root), _ROOT_PATH, b"simulated", device=0, folds_case=False)
        self.keep_large: KeepLarge | None = None
        self.durability: Durability = "process"
        self.sync_preimages: Callable[[], None] = lambda: None
        self.originals: Originals | None = None
        self.capture = NO_RULES
        self._steps: Steps = steps or FreeSteps()

    def close(self) -> None:
        return None

    def settle_birth(self) -> None:
        return None

    def restarted(self, *, steps: Steps | None = None) -> SimulatedDisk:
        """The same disk as the next process finds it."""
        other = SimulatedDisk(steps=steps)
        other.simulated, other.person = self.simulated, self.person
        other.root = replace(self.root)
        return other

    def power_cut(self, random: Random | None = None) -> None:
        """Lose bytes and names that are not synced. With `random`, lose any part of them."""
        self.simulated.power_cut(random)

    def tree(self, *, times: bool = False) -> Tree:
        """All files, in the form of `builders.tree_of`."""
        return self.simulated.as_tree(times=times)

    # Read.

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> ResolvedPath:
        return self._resolved(path, follow=follow, final=final)

    def resolve_exactly(self, path: RepoPath) -> ResolvedPath:
        return self._resolved(path, follow="deny", final=False)

    def _resolved(self, path: RepoPath, *, follow: Follow, final: bool) -> ResolvedPath:
        trail: _Trail = []
        pending = [] if path == ROOT else path_bytes(path).split(b"/")[::-1]
        hops = 0
        while pending:
            name = pending.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if not trail:
                    raise _escapes(path)
                trail.pop()
                continue
            here = trail[-1][1] if trail else self.simulated.root
            ends = not pending
            below = here.entries.get(name)
            if below is not None and below.kind == "link" and (final or not ends):
                hops += 1
                trail, pending = self._followed(below, trail, pending, follow=follow, hops=hops, asked=path)
            elif ends:
                return self._resolved_path(trail, here, name)
            else:
                trail.append((name, _directory(below, name)))
        if not trail:
            return ResolvedPath(ROOT, self.root.place_of(ROOT), _handle(self.simulated.root), b".")
        name, _ = trail.pop()
        return self._resolved_path(trail, trail[-1][1] if trail else self.simulated.root, name)

    def _followed(
        self, link: Inode, trail: _Trail, pending: list[bytes], *, follow: Follow, hops: int, asked: RepoPath
    ) -> tuple[_Trail, list[bytes]]:
        """Where path resolution continues after a link."""
        if follow == "deny":
            raise Refused("forbidden", "symlink_not_allowed", f"{asked!r} goes through a link")
        if hops > _LINK_HOPS_MAX:
            raise os_error(errno.ELOOP, asked)
        if not link.target.startswith(b"/"):
            return trail, pending + link.target.split(b"/")[::-1]
        if link.target.rstrip(b"/") != _ROOT_PATH and not link.target.startswith(_ROOT_PATH + b"/"):
            raise _escapes(asked)
        return [], pending + link.target[len(_ROOT_PATH) :].split(b"/")[::-1]

    def _resolved_path(self, trail: _Trail, folder: Inode, name: bytes) -> ResolvedPath:
        path = path_from_bytes(b"/".join([*(above for above, _ in trail), name]))
        return ResolvedPath(path, self.root.place_of(path), _handle(folder), name)

    def image(
        self, resolved: ResolvedPath, *, draft: bytes | None = None, kept: bool = True, known: Image | None = None
    ) -> Image:
        """Read the image. This disk has no stamps, so it never reuses an earlier image."""
        inode = self._find(resolved, draft)
        if inode is None:
            return NOTHING
        if inode.kind == "link":
            return Image(SymlinkEntry(os.fsdecode(inode.target)), None, 1, inode.owner)
        if inode.kind == "dir":
            return Image(DirEntry(inode.mode, inode.mtime_ns, inode.xattrs), None, 1, inode.owner)
        if inode.kind == "special":
            return SPECIAL
        content = inode.content
        entry = FileEntry(digest_of(content), len(content), inode.mode, inode.mtime_ns, inode.xattrs)
        links = self.simulated.links_of(inode)
        number = None if links == 1 else (0, inode.number)
        if number is not None:
            entry = replace(entry, link_group=str(inode.number))
        if self.capture.withheld(resolved.path) is None:
            return Image(entry, content, links, inode.owner, inode=number)
        entry = self.capture.named(resolved.path, entry)
        return Image(entry, None, links, inode.owner, unstored=content, inode=number)

    def children(self, resolved: ResolvedPath) -> list[bytes]:
        return sorted(_directory(self._find(resolved), resolved.name).entries)

    def mtime_ns(self, resolved: ResolvedPath) -> int:
        return self._must_find(resolved).mtime_ns

    def names_of(self, numbers: Collection[int]) -> dict[tuple[int, int], list[RepoPath]]:
        found: dict[tuple[int, int], list[RepoPath]] = {}
        for path, inode in self.simulated.walk():
            if inode.kind == "file" and inode.number in numbers:
                found.setdefault((0, inode.number), []).append(RepoPath(path))
        return found

    def link_group(self, resolved: ResolvedPath) -> str | None:
        inode = self._find(resolved)
        return str(inode.number) if inode is not None and inode.kind == "file" else None

    # Change.

    def stage_file(self, resolved: ResolvedPath, draft: bytes, content: Content, *, like: FileEntry) -> None:
        data = whole(content)
        self._steps.reach("stage.create", resolved.path)
        self._must_be_free(resolved, draft)
        inode = self.simulated.new("file", mode=0o600)
        self._change(resolved, {draft: inode})
        try:
            self.simulated.write(inode, data[: len(data) // 2])
            self._steps.reach("stage.half", resolved.path)
            self.simulated.write(inode, data)
            self._steps.reach("stage.write", resolved.path)
            inode.xattrs, inode.mode = like.xattrs, like.mode
            inode.mtime_ns = like.mtime_ns or inode.mtime_ns
            if self.durability == "power":
                self._steps.reach("sync.draft", resolved.path)
                inode.sync()
        except OSError:
            self._change(resolved, {draft: None})
            raise

    def stage_link(self, resolved: ResolvedPath, draft: bytes, target: str) -> None:
        self._steps.reach("stage.link", resolved.path)
        self._must_be_free(resolved, draft)
        self._change(resolved, {draft: self.simulated.new("link", target=os.fsencode(target))})

    def stage_name(self, resolved: ResolvedPath, draft: bytes, other: ResolvedPath, *, like: FileEntry) -> None:
        self._steps.reach("stage.name", resolved.path)
        self._must_be_free(resolved, draft)
        self._change(resolved, {draft: self._must_find(other)})

    def exchange(self, resolved: ResolvedPath, draft: bytes) -> None:
        self._steps.reach("exchange", resolved.path)
        ours, theirs = self._must_find(resolved, draft), self._must_find(resolved)
        self._change(resolved, {resolved.name: ours, draft: theirs})

    def place(self, resolved: ResolvedPath, draft: bytes) -> None:
        self._steps.reach("place", resolved.path)
        ours = self._must_find(resolved, draft)
        self._must_be_free(resolved, resolved.name)
        self._change(resolved, {resolved.name: ours, draft: None})

    def set_aside(self, resolved: ResolvedPath, draft: bytes) -> None:
        self._steps.reach("set_aside", resolved.path)
        theirs = self._must_find(resolved)
        self._must_be_free(resolved, draft)
        self._change(resolved, {resolved.name: None, draft: theirs})

    def discard(self, resolved: ResolvedPath, draft: bytes) -> None:
        self._steps.reach("discard", resolved.path)
        with suppress(FileNotFoundError):
            if self._must_find(resolved, draft).entries:
                raise os_error(errno.ENOTEMPTY, draft)
            self._change(resolved, {draft: None})

    def drop_original(self, resolved: ResolvedPath, draft: bytes) -> None:
        self.discard(resolved, draft)

    def settled(self, resolved: ResolvedPath, draft: bytes) -> bool | None:
        inode = self._must_find(resolved, draft)
        return inode.writers == 0 if inode.kind == "file" else None

    def make_dir(self, resolved: ResolvedPath, mode: int) -> None:
        self._steps.reach("make_dir", resolved.path)
        self._must_be_free(resolved, resolved.name)
        self._change(resolved, {resolved.name: self.simulated.new("dir", mode=mode)})

    def remove_dir(self, resolved: ResolvedPath) -> None:
        self._steps.reach("remove_dir", resolved.path)
        if _directory(self._find(resolved), resolved.name).entries:
            raise os_error(errno.ENOTEMPTY, resolved.name)
        self._change(resolved, {resolved.name: None})

    def write_in_place(self, resolved: ResolvedPath, content: Content, *, end_from: int | None = None) -> bytes:
        data = whole(content)
        self.sync_preimages()
        self._steps.reach("in_place.open", resolved.path)
        inode = self._must_open(resolved)
        if inode.kind == "dir":
            raise os_error(errno.EISDIR, resolved.name)
        end = b"" if end_from is None else inode.content[end_from:]
        data += end
        half = len(data) // 2
        self.simulated.write(inode, data[:half] + inode.content[half:])
        self._steps.reach("in_place.half", resolved.path)
        self.simulated.write(inode, data)
        self._steps.reach("in_place.write", resolved.path)
        return end

    def set_metadata(self, resolved: ResolvedPath, entry: FileEntry | DirEntry) -> None:
        self._steps.reach("metadata", resolved.path)
        inode = self._must_open(resolved)
        inode.mode, inode.xattrs = entry.mode, entry.xattrs

    def set_mtime(self, resolved: ResolvedPath, mtime_ns: int) -> None:
        self._steps.reach("mtime", resolved.path)
        self._must_find(resolved).mtime_ns = mtime_ns

    def sync_file(self, resolved: ResolvedPath) -> None:
        self._steps.reach("sync.file", resolved.path)
        self._must_open(resolved).sync()

    def sync_dir(self, resolved: ResolvedPath) -> None:
        self._steps.reach("sync.dir", resolved.path)
        self._folder(resolved).sync()

    # Inodes by path.

    def _folder(self, resolved: ResolvedPath) -> Inode:
        return self.simulated.inodes[-2 - resolved.parent]

    def _find(self, resolved: ResolvedPath, draft: bytes | None = None) -> Inode | None:
        name = resolved.name if draft is None else draft
        return self._folder(resolved) if name == b"." else self._folder(resolved).entries.get(name)

    def _must_find(self, resolved: ResolvedPath, draft: bytes | None = None) -> Inode:
        inode = self._find(resolved, draft)
        if inode is None:
            raise os_error(errno.ENOENT, resolved.name if draft is None else draft)
        return inode

    def _must_open(self, resolved: ResolvedPath) -> Inode:
        inode = self._must_find(resolved)
        if inode.kind == "link":
            raise os_error(errno.ELOOP, resolved.name)
        return inode

    def _must_be_free(self, resolved: ResolvedPath, name: bytes) -> None:
        if name in self._folder(resolved).entries:
            raise os_error(errno.EEXIST, name)

    def _change(self, resolved: ResolvedPath, names: dict[bytes, Inode | None]) -> None:
        self.simulated.change(self._folder(resolved), names)


def _handle(inode: Inode) -> int:
    return -2 - inode.number


def _directory(inode: Inode | None, name: bytes) -> Inode:
    if inode is None or inode.kind != "dir":
        raise os_error(errno.ENOENT if inode is None else errno.ENOTDIR, name)
    return inode


def _escapes(asked: RepoPath) -> Refused:
    return Refused("forbidden", "symlink_not_allowed", f"{asked!r} leads out of the root through a link")
