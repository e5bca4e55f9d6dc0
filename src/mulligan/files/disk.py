"""The one door to the file system. Nothing else in the product changes a file.

Every change is made of named steps on a `Spot`, whose parent directory is already open. Before a step happens its name
is announced to `Steps`; a fault plan there can fail it or stop the process at that very point, and
`mulligan.testing.SimulatedDisk` is the same door over a disk in memory that can also lose power.

New content is staged under a draft name beside its target and then takes the target's place in one step that can be
undone: exchanged with what was there, or renamed to a free name. What was there stays under the draft name until
whoever asked has looked at it.
"""

from __future__ import annotations

import errno
import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Protocol

from mulligan.store.bodies import sync_file_system
from mulligan.store.originals import NO_FILE, NewFile, Original, Originals
from mulligan.store.protocol import Durability
from mulligan.values import limits
from mulligan.values.content import Content, KeepLarge, Large, digest_of_content, whole
from mulligan.values.digest import Digest, digest_from_raw
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, SymlinkEntry, Xattrs, same_state
from mulligan.values.faults import fault
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain
from mulligan.workspace import kernel
from mulligan.workspace.capture_rules import NO_RULES, CaptureRules
from mulligan.workspace.inode_names import Inode, names_inside
from mulligan.workspace.places import Follow, Root, Spot, open_root, resolve, resolve_exactly

DRAFT_PREFIX = b".mulligan-"

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_BINDING = frozenset({"system.posix_acl_access", "system.nfs4_acl", "system.richacl"})
_STABLE_READ_TRIES = 5
_KIND_TRIES = 1000
_OF_ANOTHER_KIND = frozenset({errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO})
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


Stamp = tuple[int, int, int, int]
"""Inode, size, time of change of the bytes and of anything."""


class Steps(Protocol):
    """Told the name of each step as it is about to happen. May raise, and then it does not."""

    def reach(self, step: str, path: RepoPath) -> None: ...


class FreeSteps:
    """No plan: every step happens."""

    def reach(self, step: str, path: RepoPath) -> None:
        return None


@plain(slots=True, frozen=True)
class Image:
    """What a spot holds: its entry, the bytes of a file, and what replacing it would have to take care of.

    A `special` file (device, FIFO, socket) has no content that could be captured, and no entry. One that is `bound` has
    an access list, or other attributes of the system's, which we may not give to another file. A file has a `stamp`
    where the disk can tell by it that nothing has happened to it since, and an `inode` if it has several names. One
    that is `unstable` changed during every read, so these bytes may be of no moment at all. The bytes of a path that is
    not captured are `unstored`: they can be looked at, and `content`, which is what the store may have, is None.
    """

    entry: Entry
    content: Content | None = None
    links: int = 1
    owner: int = -1
    special: bool = False
    bound: bool = False
    unstable: bool = False
    unstored: Content | None = field(default=None, compare=False)
    stamp: Stamp | None = field(default=None, compare=False)
    inode: Inode | None = field(default=None, compare=False)

    @property
    def data(self) -> bytes:
        """All bytes of a file, however many, for whoever cannot do with less; none of anything else."""
        return b"" if self.any_content is None else whole(self.any_content)

    @property
    def any_content(self) -> Content | None:
        """The bytes of a file, whether or not the store may have them."""
        return self.unstored if self.content is None else self.content

    def without_content(self) -> Image:
        """To be remembered: all but the bytes."""
        return replace(self, content=None, unstored=None)

    def holds(self, entry: Entry) -> bool:
        """Whether this is what `entry` says, times aside."""
        return not self.special and same_state(self.entry, entry)

    @property
    def replaceable(self) -> bool:
        """A file or link: its bytes can be kept, so something else may take its place."""
        return not self.special and isinstance(self.entry, FileEntry | SymlinkEntry)


@dataclass(frozen=True)
class Passed(Large):
    """What went by and was not kept."""

    digest: Digest
    size: int

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> Passed:
        whole, size = sha256(), 0
        for piece in pieces:
            whole.update(piece)
            size += len(piece)
        return cls(digest_from_raw(whole.digest()), size)

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("nobody kept these bytes")


NOTHING = Image(ABSENT)
SPECIAL = Image(ABSENT, special=True)


class Disk(Protocol):
    """The door, real or simulated. Each mutating method is one step and is named in its docstring."""

    root: Root
    keep_large: KeepLarge | None
    durability: Durability
    """in `power` mode a staged file is synced before it can take its place"""
    sync_preimages: Callable[[], None]
    """makes what is about to be written over survive a power cut, before any file is written in place"""
    originals: Originals | None
    """in `process` mode, where originals are kept until what replaced them is synced; None: a power cut costs all"""
    capture: CaptureRules
    """which paths have bytes that the store may not have"""

    def settle_birth(self) -> None:
        """Have the root's time of birth be one that stays.

        On an overlay, a directory of a lower layer gets another one with its first change. Giving it the mode that it
        has is such a change.
        """
        ...

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> Spot: ...
    def resolve_exactly(self, path: RepoPath) -> Spot: ...
    def image(
        self, spot: Spot, *, draft: bytes | None = None, kept: bool = True, known: Image | None = None
    ) -> Image: ...
    def children(self, spot: Spot) -> list[bytes]: ...
    def mtime_ns(self, spot: Spot) -> int: ...
    def names_of(self, numbers: Collection[int]) -> dict[Inode, list[RepoPath]]: ...
    def link_group(self, spot: Spot) -> str | None: ...
    def stage_file(self, spot: Spot, draft: bytes, content: Content, *, like: FileEntry) -> None: ...
    def stage_link(self, spot: Spot, draft: bytes, target: str) -> None: ...
    def stage_name(self, spot: Spot, draft: bytes, other: Spot, *, like: FileEntry) -> None: ...
    def exchange(self, spot: Spot, draft: bytes) -> None: ...
    def place(self, spot: Spot, draft: bytes) -> None: ...
    def set_aside(self, spot: Spot, draft: bytes) -> None: ...
    def discard(self, spot: Spot, draft: bytes) -> None: ...
    def drop_original(self, spot: Spot, draft: bytes) -> None: ...
    def settled(self, spot: Spot, draft: bytes) -> bool | None: ...
    def make_dir(self, spot: Spot, mode: int) -> None: ...
    def remove_dir(self, spot: Spot) -> None: ...
    def write_in_place(self, spot: Spot, content: Content, *, end_from: int | None = None) -> bytes: ...
    def set_metadata(self, spot: Spot, entry: FileEntry | DirEntry) -> None: ...
    def set_mtime(self, spot: Spot, mtime_ns: int) -> None: ...
    def sync_file(self, spot: Spot) -> None: ...
    def sync_dir(self, spot: Spot) -> None: ...
    def close(self) -> None: ...


def with_bytes(disk: Disk, spot: Spot, image: Image, *, draft: bytes | None = None) -> Image:
    """An image whose bytes are safe: this one, or that of what is there by now, if nobody kept these."""
    return disk.image(spot, draft=draft) if isinstance(image.any_content, Passed) else image


class HostDisk:
    """The real file system below one root."""

    def __init__(self, root: str | bytes, *, steps: Steps | None = None) -> None:
        try:
            self.root: Root = open_root(root)
        except OSError as error:
            shown = os.fsdecode(root)
            words = f"{shown} cannot be opened as a root: {error.strerror}."
            if isinstance(error, FileNotFoundError):
                words += f" If it was removed, make it again, empty; `mulligan store adopt {shown}` joins its history."
            raise fault("unknown_root", words, root=shown) from error
        self.keep_large: KeepLarge | None = None
        self.durability: Durability = "process"
        self.sync_preimages: Callable[[], None] = _nothing
        self.originals: Originals | None = None
        self._staged: dict[bytes, NewFile] = {}
        self._announced: dict[bytes, Original | None] = {}
        self.capture = NO_RULES
        self._steps: Steps = steps or FreeSteps()
        self._is_open = True

    def close(self) -> None:
        """Once: a second close would hit whoever was given the number meanwhile."""
        if self._is_open:
            self._is_open = False
            os.close(self.root.handle)
            self.root = replace(self.root, handle=-1)

    def settle_birth(self) -> None:
        if kernel.is_on_overlay(self.root.handle):
            with suppress(OSError):
                os.fchmod(self.root.handle, stat.S_IMODE(os.fstat(self.root.handle).st_mode))

    # Looking.

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> Spot:
        return resolve(self.root, path, follow=follow, final=final)

    def resolve_exactly(self, path: RepoPath) -> Spot:
        return resolve_exactly(self.root, path)

    def image(self, spot: Spot, *, draft: bytes | None = None, kept: bool = True, known: Image | None = None) -> Image:
        """What is there now, or under a draft name beside it. A file changing under our eyes is read again.

        Not `kept`: a large file's bytes are not put anywhere, and its image cannot give them. `known` is an earlier
        image, given again if the stamp is still the same: a hint, as two changes may share one tick of the clock.
        """
        name = spot.name if draft is None else draft
        for _ in range(_KIND_TRIES):
            try:
                return self._image_of(spot, name, kept, known)
            except FileNotFoundError:
                return NOTHING
            except OSError as error:
                # Between the look and the reading somebody put a thing of another kind there.
                if error.errno not in _OF_ANOTHER_KIND:
                    raise
        raise OSError(errno.EBUSY, "It is exchanged for something else all the time", os.fsdecode(spot.place))

    def _image_of(self, spot: Spot, name: bytes, kept: bool, known: Image | None) -> Image:
        status = os.lstat(name, dir_fd=spot.parent)
        if known is not None and known.stamp == _stamp(status):
            return known
        if stat.S_ISREG(status.st_mode):
            return self._file_image(spot, name, kept)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(name, dir_fd=spot.parent)
            return Image(SymlinkEntry(os.fsdecode(target)), None, status.st_nlink, status.st_uid)
        if not stat.S_ISDIR(status.st_mode):
            return SPECIAL
        mode = stat.S_IMODE(status.st_mode)
        return Image(DirEntry(mode, status.st_mtime_ns, self._dir_xattrs(spot, name)), None, 1, status.st_uid)

    def _dir_xattrs(self, spot: Spot, name: bytes) -> Xattrs:
        try:
            handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=spot.parent)
        except OSError:
            return ()
        try:
            return read_xattrs(handle)
        finally:
            os.close(handle)

    def _file_image(self, spot: Spot, name: bytes, kept: bool) -> Image:
        handle = os.open(name, _READ_FLAGS, dir_fd=spot.parent)
        try:
            before = os.fstat(handle)
            if not stat.S_ISREG(before.st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            withheld = self.capture.withheld(spot.path)
            for _ in range(_STABLE_READ_TRIES):
                content = self._content(handle, before.st_size, kept, stored=withheld is None)
                after = os.fstat(handle)
                unstable = _stamp(before) != _stamp(after) or len(content) != after.st_size
                if not unstable:
                    break
                before = after
            names = _attributes(handle)
            entry = FileEntry(
                digest=digest_of_content(content),
                size=len(content),
                mode=stat.S_IMODE(after.st_mode),
                mtime_ns=after.st_mtime_ns,
                xattrs=_values(handle, names),
                link_group=_link_group(handle, after) if after.st_nlink > 1 else None,
            )
            bound = not _BINDING.isdisjoint(names)
            stamp = None if unstable else _stamp(after)
            inode = (after.st_dev, after.st_ino) if after.st_nlink > 1 else None
            links, owner = after.st_nlink, after.st_uid
            image = Image(entry, content, links, owner, bound=bound, unstable=unstable, stamp=stamp, inode=inode)
            if withheld is None:
                return image
            return replace(image, entry=self.capture.named(spot.path, entry), content=None, unstored=content)
        finally:
            os.close(handle)

    def _content(self, handle: int, size: int, kept: bool, *, stored: bool) -> Content:
        if size <= limits.WHOLE_MAX_BYTES or self.keep_large is None or (kept and not stored):
            return _read_all(handle, size)
        return self.keep_large(_pieces(handle)) if kept else Passed.of(_pieces(handle))

    def children(self, spot: Spot) -> list[bytes]:
        """Names in the directory at the spot, in byte order."""
        handle = os.open(spot.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=spot.parent)
        try:
            return sorted(os.fsencode(name) for name in os.listdir(handle))
        finally:
            os.close(handle)

    def mtime_ns(self, spot: Spot) -> int:
        return os.lstat(spot.name, dir_fd=spot.parent).st_mtime_ns

    def names_of(self, numbers: Collection[int]) -> dict[Inode, list[RepoPath]]:
        """The names below the root of files with these inode numbers. Walks the whole tree."""
        return names_inside(self.root, numbers)

    def link_group(self, spot: Spot) -> str | None:
        """What all names of the file at the spot have in common, and no other file; None if no file is there."""
        try:
            handle = os.open(spot.name, _READ_FLAGS, dir_fd=spot.parent)
        except OSError:
            return None
        try:
            return _link_group(handle, os.fstat(handle))
        finally:
            os.close(handle)

    # Changing.

    def stage_file(self, spot: Spot, draft: bytes, content: Content, *, like: FileEntry) -> None:
        """`stage.create`, `stage.half`, `stage.write`: a whole file beside its target, with the mode and attributes
        of `like`, and its time of change unless that is 0. In `power` mode also `sync.draft`."""
        self._steps.reach("stage.create", spot.path)
        if self.originals is not None:
            self.originals.know(kernel.real_path_of(spot.parent))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(draft, flags, 0o600, dir_fd=spot.parent)
        try:
            self._write(handle, content, spot, half="stage.half")
            self._steps.reach("stage.write", spot.path)
            write_xattrs(handle, like.xattrs)
            os.fchmod(handle, like.mode)
            if like.mtime_ns:
                os.utime(handle, ns=(like.mtime_ns, like.mtime_ns))
            if self.durability == "power":
                self._steps.reach("sync.draft", spot.path)
                os.fsync(handle)
            if self.originals is not None:
                status = os.fstat(handle)
                self._staged[draft] = NewFile(status.st_ino, status.st_mtime_ns, like.digest)
        except OSError:
            with suppress(OSError):
                os.unlink(draft, dir_fd=spot.parent)
            raise
        finally:
            os.close(handle)

    def stage_link(self, spot: Spot, draft: bytes, target: str) -> None:
        """`stage.link`: a symbolic link beside its target."""
        self._steps.reach("stage.link", spot.path)
        if self.originals is not None:
            self.originals.know(kernel.real_path_of(spot.parent))
            self._staged[draft] = NO_FILE
        os.symlink(os.fsencode(target), draft, dir_fd=spot.parent)

    def stage_name(self, spot: Spot, draft: bytes, other: Spot, *, like: FileEntry) -> None:
        """`stage.name`: one more name, beside the target, of the file that is at another spot and should be `like`."""
        self._steps.reach("stage.name", spot.path)
        if self.originals is not None:
            self.originals.know(kernel.real_path_of(spot.parent))
        os.link(other.name, draft, src_dir_fd=other.parent, dst_dir_fd=spot.parent, follow_symlinks=False)
        if self.originals is not None:
            status = os.lstat(draft, dir_fd=spot.parent)
            self._staged[draft] = NewFile(status.st_ino, status.st_mtime_ns, like.digest)

    def exchange(self, spot: Spot, draft: bytes) -> None:
        """`exchange`: what was at the spot is now under the draft name, and the other way round."""
        new = self._staged.pop(draft, None)
        if new is not None and not self._announce(spot, draft, new) and new != NO_FILE:
            self._sync_draft(spot, draft)
        self._steps.reach("exchange", spot.path)
        kernel.exchange(spot.parent, draft, spot.name)

    def place(self, spot: Spot, draft: bytes) -> None:
        """`place`: give the draft its name, if the name is free (else FileExistsError)."""
        new = self._staged.pop(draft, None)
        if new is not None and new != NO_FILE and self.originals is not None:
            self.originals.refill(kernel.real_path_of(spot.parent), spot.name, new)
        self._steps.reach("place", spot.path)
        try:
            kernel.rename_to_free(spot.parent, draft, spot.name)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.link(draft, spot.name, src_dir_fd=spot.parent, dst_dir_fd=spot.parent, follow_symlinks=False)
            os.unlink(draft, dir_fd=spot.parent)

    def set_aside(self, spot: Spot, draft: bytes) -> None:
        """`set_aside`: what is at the spot goes under the draft name; the spot is free."""
        if self.originals is not None and not self._announce(spot, draft, NO_FILE):
            self._announced[draft] = None
        self._steps.reach("set_aside", spot.path)
        try:
            kernel.rename_to_free(spot.parent, spot.name, draft)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.rename(spot.name, draft, src_dir_fd=spot.parent, dst_dir_fd=spot.parent)

    def discard(self, spot: Spot, draft: bytes) -> None:
        """`discard`: remove the draft; one that is not there is fine."""
        self._steps.reach("discard", spot.path)
        self._staged.pop(draft, None)
        self._announced.pop(draft, None)
        self._remove(spot, draft)

    def drop_original(self, spot: Spot, draft: bytes) -> None:
        """`discard`: remove an original that was exchanged or set aside, as soon as a power cut can take nothing that
        was not in the store or at the spot before."""
        self._steps.reach("discard", spot.path)
        is_protected, original = draft in self._announced, self._announced.pop(draft, None)
        if original is not None and self.originals is not None and self._take(spot, original):
            return
        if is_protected:
            with suppress(FileNotFoundError):
                self.sync_file(spot)
            self.sync_preimages()
        is_ordered = self.durability != "power" or kernel.keeps_order(spot.parent)
        if not is_ordered:
            self.sync_dir(spot)
        self._remove(spot, draft)
        if not is_ordered:
            # Else the disk may still have one of its names when the next new file is given its inode.
            self.sync_dir(spot)

    def _announce(self, spot: Spot, draft: bytes, new: NewFile) -> bool:
        """False: the original cannot be moved to where originals are kept."""
        originals = self.originals
        if originals is None or os.fstat(spot.parent).st_dev != originals.device():
            return False
        if self.capture.withheld(spot.path) is not None:
            # No byte of it may be in the state directory, not even for seconds.
            return False
        original = originals.announce(kernel.real_path_of(spot.parent), draft, spot.name, new)
        if original is not None:
            self._announced[draft] = original
        return original is not None

    def _take(self, spot: Spot, original: Original) -> bool:
        """False: there is another mount in between, which cannot be seen before."""
        assert self.originals is not None
        try:
            self.originals.take(spot.parent, original)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOENT):
                raise
            return False
        return True

    def put_original_back(self, spot: Spot, folder: int, name: bytes) -> None:
        """`put_original_back`: one rename out of another open directory, over whatever is at the spot."""
        self._steps.reach("put_original_back", spot.path)
        os.rename(name, spot.name, src_dir_fd=folder, dst_dir_fd=spot.parent)

    def _sync_draft(self, spot: Spot, draft: bytes) -> None:
        self._steps.reach("sync.draft", spot.path)
        handle = os.open(draft, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=spot.parent)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _remove(self, spot: Spot, draft: bytes) -> None:
        with suppress(FileNotFoundError):
            try:
                os.unlink(draft, dir_fd=spot.parent)
            except (IsADirectoryError, PermissionError):
                os.rmdir(draft, dir_fd=spot.parent)

    def settled(self, spot: Spot, draft: bytes) -> bool | None:
        """Whether nobody still writes into what was set aside. None: this system cannot say."""
        try:
            handle = os.open(draft, _READ_FLAGS, dir_fd=spot.parent)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EACCES):
                raise
            return None
        try:
            return kernel.nobody_writes(handle)
        finally:
            os.close(handle)

    def make_dir(self, spot: Spot, mode: int) -> None:
        """`make_dir`"""
        self._steps.reach("make_dir", spot.path)
        os.mkdir(spot.name, 0o700, dir_fd=spot.parent)
        handle = os.open(spot.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=spot.parent)
        try:
            os.fchmod(handle, mode)
        finally:
            os.close(handle)

    def remove_dir(self, spot: Spot) -> None:
        """`remove_dir`: an empty one (else OSError ENOTEMPTY)."""
        self._steps.reach("remove_dir", spot.path)
        os.rmdir(spot.name, dir_fd=spot.parent)

    def write_in_place(self, spot: Spot, content: Content, *, end_from: int | None = None) -> bytes:
        """`in_place.open`, `in_place.half`, `in_place.write`: the same file, the same inode, other bytes.

        `end_from`: what a process has written from there on stays at the end of the file, and is returned.
        """
        self.sync_preimages()
        self._steps.reach("in_place.open", spot.path)
        access = os.O_WRONLY if end_from is None else os.O_RDWR
        handle = os.open(spot.name, access | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=spot.parent)
        try:
            end = b"" if end_from is None else _read_from(handle, end_from)
            self._write(handle, content, spot, half="in_place.half")
            size = len(content)
            if end_from is not None:
                _write_all(handle, end)
                late = max(end_from, size) + len(end)
                end += (more := _read_from(handle, late))
                _write_all(handle, more)
            os.ftruncate(handle, size + len(end))
            self._steps.reach("in_place.write", spot.path)
            os.fsync(handle)
            return end
        finally:
            os.close(handle)

    def _write(self, handle: int, content: Content, spot: Spot, *, half: str) -> None:
        middle = len(content) // 2
        pieces = [content[:middle], content[middle:]] if isinstance(content, bytes) else content
        for count, piece in enumerate(pieces):
            if count == 1:
                self._steps.reach(half, spot.path)
            _write_all(handle, piece)

    def set_metadata(self, spot: Spot, entry: FileEntry | DirEntry) -> None:
        """`metadata`: mode and extended attributes of what is at the spot."""
        self._steps.reach("metadata", spot.path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            handle = os.open(spot.name, flags, dir_fd=spot.parent)
        except PermissionError:
            # A file its owner may not read can still be given another mode, by name.
            os.chmod(spot.name, entry.mode, dir_fd=spot.parent)
            return
        try:
            write_xattrs(handle, entry.xattrs, replace=True)
            os.fchmod(handle, entry.mode)
        finally:
            os.close(handle)

    def set_mtime(self, spot: Spot, mtime_ns: int) -> None:
        """`mtime`"""
        self._steps.reach("mtime", spot.path)
        access = os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False).st_atime_ns
        os.utime(spot.name, ns=(access, mtime_ns), dir_fd=spot.parent, follow_symlinks=False)

    def sync_file(self, spot: Spot) -> None:
        """`sync.file`: its bytes survive a power cut. An error here is never retried: the handle lies afterwards."""
        self._steps.reach("sync.file", spot.path)
        try:
            handle = os.open(spot.name, _READ_FLAGS, dir_fd=spot.parent)
        except PermissionError:
            # Its owner may not read it; the kernel syncs it with all that is on its file system.
            sync_file_system(spot.parent)
            return
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_dir(self, spot: Spot) -> None:
        """`sync.dir`: the names in its directory survive a power cut."""
        self._steps.reach("sync.dir", spot.path)
        os.fsync(spot.parent)


def _nothing() -> None:
    """Without a store the disk keeps nothing."""


def _link_group(handle: int, status: os.stat_result) -> str:
    """Names no device: that has another number after a restart, and no file has names on two."""
    return f"{status.st_ino}.{kernel.generation_of(handle)}"


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read_all(handle: int, size: int) -> bytes:
    """From the beginning to the end, which a short read that comes just to the expected `size` has found."""
    pieces: list[bytes] = []
    at = 0
    while piece := os.pread(handle, max(size + 1, 65_536), at):
        pieces.append(piece)
        at += len(piece)
        if at == size:
            break
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


def _read_from(handle: int, at: int) -> bytes:
    pieces: list[bytes] = []
    while piece := os.pread(handle, 65_536, at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _pieces(handle: int) -> Iterator[bytes]:
    at = 0
    while piece := os.pread(handle, limits.BLOB_PART_BYTES, at):
        yield piece
        at += len(piece)


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


class GoneDisk(HostDisk):
    """The disk of a root whose directory is not there: what was recorded of it can be read, and no file is in it."""

    def __init__(self, place: bytes, *, folds_case: bool) -> None:
        self.root = Root(-1, place or b"/", place, device=0, folds_case=folds_case)
        self.keep_large = None
        self._steps = FreeSteps()
        self._is_open = False

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> Spot:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(self.root.path))

    def resolve_exactly(self, path: RepoPath) -> Spot:
        return self.resolve(path)


def read_xattrs(handle: int) -> Xattrs:
    """The user's extended attributes. Other name spaces belong to the system and are not ours to set."""
    return _values(handle, _attributes(handle))


def _attributes(handle: int) -> list[str]:
    """The names of all extended attributes we are shown; none where there is no such thing."""
    if not hasattr(os, "listxattr"):
        return []
    try:
        return os.listxattr(handle)
    except OSError:
        return []


def _values(handle: int, names: list[str]) -> Xattrs:
    ours = sorted(name for name in names if name.startswith("user.")) if names else ()
    return tuple((name, b64encode(os.getxattr(handle, name)).decode("ascii")) for name in ours)


def write_xattrs(handle: int, xattrs: Xattrs, *, replace: bool = False) -> None:
    if replace and hasattr(os, "removexattr"):
        kept = {name for name, _ in xattrs}
        for name, _ in read_xattrs(handle):
            if name not in kept:
                os.removexattr(handle, name)
    for name, value in xattrs:
        os.setxattr(handle, name, b64decode(value))
