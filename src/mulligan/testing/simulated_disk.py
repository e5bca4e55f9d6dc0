"""`SimulatedDisk`: the door to the file system over a disk in memory.

The same protocol, the same steps in the same order, the same errors as `workspace.disk.HostDisk`; one contract suite
judges both. Beyond the real one it can lose power (`power_cut`), and a `person` can act on it at any step.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from random import Random

from mulligan.store.originals import Originals
from mulligan.store.protocol import Durability
from mulligan.testing.builders import Sketch, Tree
from mulligan.testing.simulated_tree import Inode, SimulatedPerson, SimulatedTree, os_error
from mulligan.values.content import Content, KeepLarge, whole
from mulligan.values.digest import digest_of
from mulligan.values.entries import DirEntry, FileEntry, SymlinkEntry
from mulligan.values.paths import ROOT, RepoPath, path_bytes, path_from_bytes
from mulligan.values.refusal import Refused
from mulligan.workspace.capture_rules import NO_RULES
from mulligan.workspace.disk import NOTHING, SPECIAL, FreeSteps, Image, Steps
from mulligan.workspace.places import Follow, Root, Spot

_ROOT_PATH = b"/simulated"
_LINK_HOPS_MAX = 40
_Trail = list[tuple[bytes, Inode]]


class SimulatedDisk:
    """Handles are negative numbers, which nobody can mistake for the operating system's."""

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
        """Lose what is not synced: bytes are gone, names are as they were. With `random`, any part of it is lost."""
        self.simulated.power_cut(random)

    def tree(self, *, times: bool = False) -> Tree:
        """Everything on it, in the form of `builders.tree_of`."""
        return self.simulated.as_tree(times=times)

    # Looking.

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> Spot:
        return self._resolved(path, follow=follow, final=final)

    def resolve_exactly(self, path: RepoPath) -> Spot:
        return self._resolved(path, follow="deny", final=False)

    def _resolved(self, path: RepoPath, *, follow: Follow, final: bool) -> Spot:
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
                return self._spot(trail, here, name)
            else:
                trail.append((name, _directory(below, name)))
        if not trail:
            return Spot(ROOT, self.root.place_of(ROOT), _handle(self.simulated.root), b".")
        name, _ = trail.pop()
        return self._spot(trail, trail[-1][1] if trail else self.simulated.root, name)

    def _followed(
        self, link: Inode, trail: _Trail, pending: list[bytes], *, follow: Follow, hops: int, asked: RepoPath
    ) -> tuple[_Trail, list[bytes]]:
        """Where the walk goes on after a link."""
        if follow == "deny":
            raise Refused("forbidden", "symlink_not_allowed", f"{asked!r} goes through a link")
        if hops > _LINK_HOPS_MAX:
            raise os_error(errno.ELOOP, asked)
        if not link.target.startswith(b"/"):
            return trail, pending + link.target.split(b"/")[::-1]
        if link.target.rstrip(b"/") != _ROOT_PATH and not link.target.startswith(_ROOT_PATH + b"/"):
            raise _escapes(asked)
        return [], pending + link.target[len(_ROOT_PATH) :].split(b"/")[::-1]

    def _spot(self, trail: _Trail, folder: Inode, name: bytes) -> Spot:
        path = path_from_bytes(b"/".join([*(above for above, _ in trail), name]))
        return Spot(path, self.root.place_of(path), _handle(folder), name)

    def image(self, spot: Spot, *, draft: bytes | None = None, kept: bool = True, known: Image | None = None) -> Image:
        """It has no stamps, and so trusts no earlier image."""
        inode = self._find(spot, draft)
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
        if self.capture.withheld(spot.path) is None:
            return Image(entry, content, links, inode.owner, inode=number)
        entry = self.capture.named(spot.path, entry)
        return Image(entry, None, links, inode.owner, unstored=content, inode=number)

    def children(self, spot: Spot) -> list[bytes]:
        return sorted(_directory(self._find(spot), spot.name).entries)

    def mtime_ns(self, spot: Spot) -> int:
        return self._must_find(spot).mtime_ns

    def names_of(self, numbers: Collection[int]) -> dict[tuple[int, int], list[RepoPath]]:
        found: dict[tuple[int, int], list[RepoPath]] = {}
        for path, inode in self.simulated.walk():
            if inode.kind == "file" and inode.number in numbers:
                found.setdefault((0, inode.number), []).append(RepoPath(path))
        return found

    def link_group(self, spot: Spot) -> str | None:
        inode = self._find(spot)
        return str(inode.number) if inode is not None and inode.kind == "file" else None

    # Changing.

    def stage_file(self, spot: Spot, draft: bytes, content: Content, *, like: FileEntry) -> None:
        data = whole(content)
        self._steps.reach("stage.create", spot.path)
        self._must_be_free(spot, draft)
        inode = self.simulated.new("file", mode=0o600)
        self._change(spot, {draft: inode})
        try:
            self.simulated.write(inode, data[: len(data) // 2])
            self._steps.reach("stage.half", spot.path)
            self.simulated.write(inode, data)
            self._steps.reach("stage.write", spot.path)
            inode.xattrs, inode.mode = like.xattrs, like.mode
            inode.mtime_ns = like.mtime_ns or inode.mtime_ns
            if self.durability == "power":
                self._steps.reach("sync.draft", spot.path)
                inode.sync()
        except OSError:
            self._change(spot, {draft: None})
            raise

    def stage_link(self, spot: Spot, draft: bytes, target: str) -> None:
        self._steps.reach("stage.link", spot.path)
        self._must_be_free(spot, draft)
        self._change(spot, {draft: self.simulated.new("link", target=os.fsencode(target))})

    def stage_name(self, spot: Spot, draft: bytes, other: Spot, *, like: FileEntry) -> None:
        self._steps.reach("stage.name", spot.path)
        self._must_be_free(spot, draft)
        self._change(spot, {draft: self._must_find(other)})

    def exchange(self, spot: Spot, draft: bytes) -> None:
        self._steps.reach("exchange", spot.path)
        ours, theirs = self._must_find(spot, draft), self._must_find(spot)
        self._change(spot, {spot.name: ours, draft: theirs})

    def place(self, spot: Spot, draft: bytes) -> None:
        self._steps.reach("place", spot.path)
        ours = self._must_find(spot, draft)
        self._must_be_free(spot, spot.name)
        self._change(spot, {spot.name: ours, draft: None})

    def set_aside(self, spot: Spot, draft: bytes) -> None:
        self._steps.reach("set_aside", spot.path)
        theirs = self._must_find(spot)
        self._must_be_free(spot, draft)
        self._change(spot, {spot.name: None, draft: theirs})

    def discard(self, spot: Spot, draft: bytes) -> None:
        self._steps.reach("discard", spot.path)
        with suppress(FileNotFoundError):
            if self._must_find(spot, draft).entries:
                raise os_error(errno.ENOTEMPTY, draft)
            self._change(spot, {draft: None})

    def drop_original(self, spot: Spot, draft: bytes) -> None:
        self.discard(spot, draft)

    def settled(self, spot: Spot, draft: bytes) -> bool | None:
        inode = self._must_find(spot, draft)
        return inode.writers == 0 if inode.kind == "file" else None

    def make_dir(self, spot: Spot, mode: int) -> None:
        self._steps.reach("make_dir", spot.path)
        self._must_be_free(spot, spot.name)
        self._change(spot, {spot.name: self.simulated.new("dir", mode=mode)})

    def remove_dir(self, spot: Spot) -> None:
        self._steps.reach("remove_dir", spot.path)
        if _directory(self._find(spot), spot.name).entries:
            raise os_error(errno.ENOTEMPTY, spot.name)
        self._change(spot, {spot.name: None})

    def write_in_place(self, spot: Spot, content: Content, *, end_from: int | None = None) -> bytes:
        data = whole(content)
        self.sync_preimages()
        self._steps.reach("in_place.open", spot.path)
        inode = self._must_open(spot)
        if inode.kind == "dir":
            raise os_error(errno.EISDIR, spot.name)
        end = b"" if end_from is None else inode.content[end_from:]
        data += end
        half = len(data) // 2
        self.simulated.write(inode, data[:half] + inode.content[half:])
        self._steps.reach("in_place.half", spot.path)
        self.simulated.write(inode, data)
        self._steps.reach("in_place.write", spot.path)
        return end

    def set_metadata(self, spot: Spot, entry: FileEntry | DirEntry) -> None:
        self._steps.reach("metadata", spot.path)
        inode = self._must_open(spot)
        inode.mode, inode.xattrs = entry.mode, entry.xattrs

    def set_mtime(self, spot: Spot, mtime_ns: int) -> None:
        self._steps.reach("mtime", spot.path)
        self._must_find(spot).mtime_ns = mtime_ns

    def sync_file(self, spot: Spot) -> None:
        self._steps.reach("sync.file", spot.path)
        self._must_open(spot).sync()

    def sync_dir(self, spot: Spot) -> None:
        self._steps.reach("sync.dir", spot.path)
        self._folder(spot).sync()

    # The tree below a spot.

    def _folder(self, spot: Spot) -> Inode:
        return self.simulated.inodes[-2 - spot.parent]

    def _find(self, spot: Spot, draft: bytes | None = None) -> Inode | None:
        name = spot.name if draft is None else draft
        return self._folder(spot) if name == b"." else self._folder(spot).entries.get(name)

    def _must_find(self, spot: Spot, draft: bytes | None = None) -> Inode:
        inode = self._find(spot, draft)
        if inode is None:
            raise os_error(errno.ENOENT, spot.name if draft is None else draft)
        return inode

    def _must_open(self, spot: Spot) -> Inode:
        inode = self._must_find(spot)
        if inode.kind == "link":
            raise os_error(errno.ELOOP, spot.name)
        return inode

    def _must_be_free(self, spot: Spot, name: bytes) -> None:
        if name in self._folder(spot).entries:
            raise os_error(errno.EEXIST, name)

    def _change(self, spot: Spot, names: dict[bytes, Inode | None]) -> None:
        self.simulated.change(self._folder(spot), names)


def _handle(inode: Inode) -> int:
    return -2 - inode.number


def _directory(inode: Inode | None, name: bytes) -> Inode:
    if inode is None or inode.kind != "dir":
        raise os_error(errno.ENOENT if inode is None else errno.ENOTDIR, name)
    return inode


def _escapes(asked: RepoPath) -> Refused:
    return Refused("forbidden", "symlink_not_allowed", f"{asked!r} leads out of the root through a link")
