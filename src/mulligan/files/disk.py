"""Every change of a user's file goes through this module. No other module of Mulligan changes one.

A change consists of named steps on a `ResolvedPath`, whose parent directory is already open. Before each step, the disk
announces its name to `Steps`; a fault plan there can fail the step or stop the process at that very point, and
`mulligan.testing.SimulatedDisk` does the same on a disk in memory that can also lose power.

The disk stages new content under a draft name beside its target. Then one step that can be undone puts it in place: an
exchange with the present file, or a rename to a free name. The former file stays under the draft name until the caller
has checked it.

`names_inside` finds the names of a file below a root. A file with several names changes under all of them, and how
Mulligan may change it depends on which names are inside the root. It searches through open handles: it does not enter a
directory that becomes a symbolic link meanwhile, so no name outside is ever taken for one inside.
"""

from __future__ import annotations

import errno
import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import attrgetter
from typing import Protocol

from mulligan.files import kernel
from mulligan.files.capture_rules import NO_RULES, CaptureRules
from mulligan.files.resolve import Follow, ResolvedPath, Root, open_root, resolve, resolve_exactly, straight
from mulligan.files.tree.directories import OPEN_DIRECTORY, OPEN_FILE
from mulligan.store.blob_files import sync_file_system
from mulligan.store.originals import NO_FILE, NewFile, Original, Originals
from mulligan.store.protocol import Durability
from mulligan.values import limits
from mulligan.values.digest import Digest, digest_from_raw, digest_of
from mulligan.values.entries import (
    ABSENT,
    Content,
    DirEntry,
    Entry,
    FileEntry,
    KeepLarge,
    Large,
    SymlinkEntry,
    Xattrs,
    digest_of_content,
    same_state,
    whole,
)
from mulligan.values.errors import Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, path_from_bytes

Inode = tuple[int, int]
"""Device and number."""


def names_inside(root: Root, numbers: Collection[int]) -> dict[Inode, list[RepoPath]]:
    """The names below a root of files with these inode numbers. Folders that we may not read are left out."""
    found: dict[Inode, list[RepoPath]] = {}
    ahead = [b""] if numbers else []
    while ahead:
        folder = ahead.pop()
        with suppress(OSError, Refused):
            ahead += _names_in(root, folder, numbers, found)
    return found


def _names_in(root: Root, folder: bytes, numbers: Collection[int], found: dict[Inode, list[RepoPath]]) -> list[bytes]:
    """Collect the names in a folder; its path is empty or ends with a slash. Answers its subfolders."""
    inner: list[bytes] = []
    with resolve_exactly(root, path_from_bytes(folder + b"any")) as resolved, _entries_of(resolved.parent) as entries:
        for entry in entries:
            path = folder + os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False):
                inner.append(path + b"/")
                continue
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_ino in numbers:
                    found.setdefault((status.st_dev, status.st_ino), []).append(path_from_bytes(path))
    return inner


@contextmanager
def _entries_of(folder: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List through a new handle: on btrfs, a handle lists only the names that existed when it was opened."""
    handle = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(handle) as entries:
            yield entries
    finally:
        os.close(handle)


DRAFT_PREFIX = b".mulligan-"

_BINDING = frozenset({"system.posix_acl_access", "system.nfs4_acl", "system.richacl"})
_STABLE_READ_TRIES = 5
_KIND_TRIES = 1000
_OF_ANOTHER_KIND = frozenset({errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO})
UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


Stamp = tuple[int, int, int, int]
"""Inode, size, time of change of the bytes and of anything."""

_stamp: Callable[[os.stat_result], Stamp] = attrgetter("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


class Steps(Protocol):
    """Gets the name of each step before it happens. If it raises, the step does not happen."""

    def reach(self, step: str, path: RepoPath) -> None: ...


class FreeSteps:
    """Lets every step happen."""

    def reach(self, step: str, path: RepoPath) -> None:
        return None


_EVERY_STEP_HAPPENS: Callable[[str, RepoPath], object] = dict[str, RepoPath]().get
"""The same for the real disk.

Every change has a dozen steps, and calling a builtin that does nothing costs almost nothing.
"""


@fast_dataclass(slots=True, frozen=True)
class Image:
    """The content of a path: its entry, the bytes of a file, and facts that matter when it is replaced.

    A `special` file (device, FIFO, socket) has no entry, because it cannot be captured. A `bound` one has an access
    list, or other system attributes, which we may not give to another file. A file has a `stamp` if the disk can tell
    by it that the file has not changed since, and an `inode` if it has several names. An `unstable` one changed during
    every read, so its bytes may mix several states. The bytes of an uncaptured path are `unstored`: Mulligan may
    compare them, but `content`, which the store may have, is None.
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
        """All bytes of a file, however many, for a caller that needs them in memory; empty for anything else."""
        return b"" if self.any_content is None else whole(self.any_content)

    @property
    def any_content(self) -> Content | None:
        """The bytes of a file, whether or not the store may have them."""
        return self.unstored if self.content is None else self.content

    def without_content(self) -> Image:
        """The image without its bytes, which are too many to hold."""
        return replace(self, content=None, unstored=None)

    def holds(self, entry: Entry) -> bool:
        """Whether the image equals the entry, apart from times."""
        return not self.special and same_state(self.entry, entry)

    @property
    def replaceable(self) -> bool:
        """Whether the path is a file or link, whose bytes can be stored, so that it may be replaced."""
        return not self.special and isinstance(self.entry, FileEntry | SymlinkEntry)


@dataclass(frozen=True)
class UnstoredBytes(Large):
    """The digest and size of bytes that were read and not stored."""

    digest: Digest
    size: int

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> UnstoredBytes:
        whole, size = sha256(), 0
        for piece in pieces:
            whole.update(piece)
            size += len(piece)
        return cls(digest_from_raw(whole.digest()), size)

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("these bytes were not stored")


NOTHING = Image(ABSENT)
SPECIAL = Image(ABSENT, special=True)


class Disk(Protocol):
    """A disk, real or simulated. Each method that changes files is one step, which its docstring names."""

    root: Root
    keep_large: KeepLarge | None
    durability: Durability
    """in `power` mode a staged file is synced before it can take its place"""
    sync_preimages: Callable[[], None]
    """syncs the preimages before a file is written in place"""
    originals: Originals | None
    """in `process` mode, the store of originals until their replacements are synced; None: a power cut may destroy both
    """
    capture: CaptureRules
    """the rules for paths whose bytes may not be stored"""

    def settle_birth(self) -> None:
        """Make the root's birth time final.

        On an overlay, a directory of a lower layer gets another birth time with its first change. Setting its present
        mode is such a change.
        """
        ...

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> ResolvedPath: ...
    def resolve_exactly(self, path: RepoPath) -> ResolvedPath: ...
    def image(
        self, resolved: ResolvedPath, *, draft: bytes | None = None, kept: bool = True, known: Image | None = None
    ) -> Image: ...
    def children(self, resolved: ResolvedPath) -> list[bytes]: ...
    def mtime_ns(self, resolved: ResolvedPath) -> int: ...
    def names_of(self, numbers: Collection[int]) -> dict[Inode, list[RepoPath]]: ...
    def link_group(self, resolved: ResolvedPath) -> str | None: ...
    def stage_file(self, resolved: ResolvedPath, draft: bytes, content: Content, *, like: FileEntry) -> None: ...
    def stage_link(self, resolved: ResolvedPath, draft: bytes, target: str) -> None: ...
    def stage_name(self, resolved: ResolvedPath, draft: bytes, other: ResolvedPath, *, like: FileEntry) -> None: ...
    def exchange(self, resolved: ResolvedPath, draft: bytes) -> None: ...
    def place(self, resolved: ResolvedPath, draft: bytes) -> None: ...
    def set_aside(self, resolved: ResolvedPath, draft: bytes) -> None: ...
    def discard(self, resolved: ResolvedPath, draft: bytes) -> None: ...
    def drop_original(self, resolved: ResolvedPath, draft: bytes) -> None: ...
    def settled(self, resolved: ResolvedPath, draft: bytes) -> bool | None: ...
    def make_dir(self, resolved: ResolvedPath, mode: int) -> None: ...
    def remove_dir(self, resolved: ResolvedPath) -> None: ...
    def write_in_place(self, resolved: ResolvedPath, content: Content, *, end_from: int | None = None) -> bytes: ...
    def set_metadata(self, resolved: ResolvedPath, entry: FileEntry | DirEntry) -> None: ...
    def set_mtime(self, resolved: ResolvedPath, mtime_ns: int) -> None: ...
    def sync_file(self, resolved: ResolvedPath) -> None: ...
    def sync_dir(self, resolved: ResolvedPath) -> None: ...
    def close(self) -> None: ...


def with_bytes(disk: Disk, resolved: ResolvedPath, image: Image, *, draft: bytes | None = None) -> Image:
    """An image whose bytes are stored: this one, or a new one if these bytes were not stored."""
    return disk.image(resolved, draft=draft) if isinstance(image.any_content, UnstoredBytes) else image


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
        self._staged: dict[bytes, tuple[int, NewFile]] = {}
        self._announced: dict[bytes, Original | None] = {}
        self.capture = NO_RULES
        self._reach: Callable[[str, RepoPath], object] = _EVERY_STEP_HAPPENS if steps is None else steps.reach
        self._is_open = True

    def close(self) -> None:
        """Close only once: a second close would close another file that got the same number."""
        if self._is_open:
            self._is_open = False
            os.close(self.root.handle)
            self.root = replace(self.root, handle=-1)

    def settle_birth(self) -> None:
        if kernel.is_on_overlay(self.root.handle):
            with suppress(OSError):
                os.fchmod(self.root.handle, stat.S_IMODE(os.fstat(self.root.handle).st_mode))

    # Reading.

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> ResolvedPath:
        return resolve(self.root, path, follow=follow, final=final)

    def resolve_exactly(self, path: RepoPath) -> ResolvedPath:
        return straight(self.root, path) or resolve_exactly(self.root, path)

    def image(
        self, resolved: ResolvedPath, *, draft: bytes | None = None, kept: bool = True, known: Image | None = None
    ) -> Image:
        """The present image of a path, or of a draft beside it. A file that changes during the read is read again.

        Not `kept`: the bytes of a large file are not stored, and its image cannot give them. `known` is an earlier
        image, which is answered again if the stamp is the same: this is a hint, as two changes may share one tick of
        the clock.
        """
        name = resolved.name if draft is None else draft
        for _ in range(_KIND_TRIES):
            try:
                status = os.lstat(name, dir_fd=resolved.parent)
                if known is not None and known.stamp == _stamp(status):
                    return known
                if stat.S_ISREG(status.st_mode):
                    return self._file_image(resolved, name, kept)
                return self._other_image(resolved, name, status)
            except FileNotFoundError:
                return NOTHING
            except OSError as error:
                # Between the check and the read, another process put something of another kind there.
                if error.errno not in _OF_ANOTHER_KIND:
                    raise
        raise OSError(errno.EBUSY, "Other processes keep replacing it", os.fsdecode(resolved.place))

    def _other_image(self, resolved: ResolvedPath, name: bytes, status: os.stat_result) -> Image:
        """The image of something that is no regular file."""
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(name, dir_fd=resolved.parent)
            return Image(SymlinkEntry(os.fsdecode(target)), None, status.st_nlink, status.st_uid)
        if not stat.S_ISDIR(status.st_mode):
            return SPECIAL
        mode = stat.S_IMODE(status.st_mode)
        return Image(DirEntry(mode, status.st_mtime_ns, self._dir_xattrs(resolved, name)), None, 1, status.st_uid)

    def _dir_xattrs(self, resolved: ResolvedPath, name: bytes) -> Xattrs:
        try:
            handle = os.open(name, OPEN_DIRECTORY, dir_fd=resolved.parent)
        except OSError:
            return ()
        try:
            return read_xattrs(handle)
        finally:
            os.close(handle)

    def _file_image(self, resolved: ResolvedPath, name: bytes, kept: bool) -> Image:
        handle = os.open(name, OPEN_FILE, dir_fd=resolved.parent)
        try:
            before = os.fstat(handle)
            if not stat.S_ISREG(before.st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            withheld = self.capture.withheld(resolved.path) if self.capture.any else None
            is_small = before.st_size <= limits.WHOLE_MAX_BYTES or self.keep_large is None
            for _ in range(_STABLE_READ_TRIES):
                content: Content
                if is_small or (kept and withheld is not None):
                    content = _read_all(handle, before.st_size)
                else:
                    assert self.keep_large is not None
                    content = self.keep_large(_pieces(handle)) if kept else UnstoredBytes.of(_pieces(handle))
                after = os.fstat(handle)
                unstable = _stamp(before) != _stamp(after) or len(content) != after.st_size
                if not unstable:
                    break
                before = after
            names = _attributes(handle)
            entry = FileEntry(
                digest=digest_of(content) if isinstance(content, bytes) else digest_of_content(content),
                size=len(content),
                mode=stat.S_IMODE(after.st_mode),
                mtime_ns=after.st_mtime_ns,
                xattrs=_values(handle, names) if names else (),
                link_group=_link_group(handle, after) if after.st_nlink > 1 else None,
            )
            bound = not _BINDING.isdisjoint(names)
            stamp = None if unstable else _stamp(after)
            inode = (after.st_dev, after.st_ino) if after.st_nlink > 1 else None
            links, owner = after.st_nlink, after.st_uid
            image = Image(entry, content, links, owner, bound=bound, unstable=unstable, stamp=stamp, inode=inode)
            if withheld is None:
                return image
            return replace(image, entry=self.capture.named(resolved.path, entry), content=None, unstored=content)
        finally:
            os.close(handle)

    def children(self, resolved: ResolvedPath) -> list[bytes]:
        """The names in the directory, in byte order."""
        handle = os.open(resolved.name, OPEN_DIRECTORY, dir_fd=resolved.parent)
        try:
            return sorted(os.fsencode(name) for name in os.listdir(handle))
        finally:
            os.close(handle)

    def mtime_ns(self, resolved: ResolvedPath) -> int:
        return os.lstat(resolved.name, dir_fd=resolved.parent).st_mtime_ns

    def names_of(self, numbers: Collection[int]) -> dict[Inode, list[RepoPath]]:
        """The names below the root of files with these inode numbers. Walks the whole tree."""
        return names_inside(self.root, numbers)

    def link_group(self, resolved: ResolvedPath) -> str | None:
        """An id that all names of the file share, and no other file; None if the path is no file."""
        try:
            handle = os.open(resolved.name, OPEN_FILE, dir_fd=resolved.parent)
        except OSError:
            return None
        try:
            return _link_group(handle, os.fstat(handle))
        finally:
            os.close(handle)

    # Changing.

    def stage_file(self, resolved: ResolvedPath, draft: bytes, content: Content, *, like: FileEntry) -> None:
        """`stage.create`, `stage.half`, `stage.write`: a whole file beside its target, with the mode and attributes
        of `like`, and its time of change unless that is 0. In `power` mode also `sync.draft`."""
        self._reach("stage.create", resolved.path)
        originals = self.originals
        folder = None if originals is None else originals.register_folder(kernel.real_path_of(resolved.parent))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(draft, flags, 0o600, dir_fd=resolved.parent)
        try:
            self._write(handle, content, resolved, half="stage.half")
            self._reach("stage.write", resolved.path)
            if like.xattrs:
                write_xattrs(handle, like.xattrs)
            os.fchmod(handle, like.mode)
            if like.mtime_ns:
                os.utime(handle, ns=(like.mtime_ns, like.mtime_ns))
            if self.durability == "power":
                self._reach("sync.draft", resolved.path)
                os.fsync(handle)
            if folder is not None:
                status = os.fstat(handle)
                self._staged[draft] = folder, NewFile(status.st_ino, status.st_mtime_ns, like.digest)
        except OSError:
            with suppress(OSError):
                os.unlink(draft, dir_fd=resolved.parent)
            raise
        finally:
            os.close(handle)

    def stage_link(self, resolved: ResolvedPath, draft: bytes, target: str) -> None:
        """`stage.link`: a symbolic link beside its target."""
        self._reach("stage.link", resolved.path)
        if self.originals is not None:
            self._staged[draft] = self.originals.register_folder(kernel.real_path_of(resolved.parent)), NO_FILE
        os.symlink(os.fsencode(target), draft, dir_fd=resolved.parent)

    def stage_name(self, resolved: ResolvedPath, draft: bytes, other: ResolvedPath, *, like: FileEntry) -> None:
        """`stage.name`: one more name, beside the target, of the file `other`, which should be `like`."""
        self._reach("stage.name", resolved.path)
        originals = self.originals
        folder = None if originals is None else originals.register_folder(kernel.real_path_of(resolved.parent))
        os.link(other.name, draft, src_dir_fd=other.parent, dst_dir_fd=resolved.parent, follow_symlinks=False)
        if folder is not None:
            status = os.lstat(draft, dir_fd=resolved.parent)
            self._staged[draft] = folder, NewFile(status.st_ino, status.st_mtime_ns, like.digest)

    def exchange(self, resolved: ResolvedPath, draft: bytes) -> None:
        """`exchange`: the file at the path gets the draft name, and the draft gets the path."""
        staged = self._staged.pop(draft, None)
        if staged is not None and not self._announce(resolved, draft, *staged) and staged[1] is not NO_FILE:
            self._sync_draft(resolved, draft)
        self._reach("exchange", resolved.path)
        kernel.exchange(resolved.parent, draft, resolved.name)

    def place(self, resolved: ResolvedPath, draft: bytes) -> None:
        """`place`: give the draft its name, if the name is free (else FileExistsError)."""
        staged = self._staged.pop(draft, None)
        if staged is not None and staged[1] is not NO_FILE and self.originals is not None:
            folder, new = staged
            self.originals.reassign(folder, resolved.name, new)
        self._reach("place", resolved.path)
        try:
            kernel.rename_to_free(resolved.parent, draft, resolved.name)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            os.link(draft, resolved.name, src_dir_fd=resolved.parent, dst_dir_fd=resolved.parent, follow_symlinks=False)
            os.unlink(draft, dir_fd=resolved.parent)

    def set_aside(self, resolved: ResolvedPath, draft: bytes) -> None:
        """`set_aside`: the file at the path gets the draft name, and the path is free."""
        if self.originals is not None and not self._announce(resolved, draft, None, NO_FILE):
            self._announced[draft] = None
        self._reach("set_aside", resolved.path)
        try:
            kernel.rename_to_free(resolved.parent, resolved.name, draft)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            os.rename(resolved.name, draft, src_dir_fd=resolved.parent, dst_dir_fd=resolved.parent)

    def discard(self, resolved: ResolvedPath, draft: bytes) -> None:
        """`discard`: remove the draft, if it exists."""
        self._reach("discard", resolved.path)
        self._staged.pop(draft, None)
        self._announced.pop(draft, None)
        self._remove(resolved, draft)

    def drop_original(self, resolved: ResolvedPath, draft: bytes) -> None:
        """`discard`: remove an original that was exchanged or set aside, as soon as a power cut can destroy only bytes
        that are in the store or were at the path before.
        """
        self._reach("discard", resolved.path)
        is_protected, original = draft in self._announced, self._announced.pop(draft, None)
        if original is not None and self.originals is not None and self._take(resolved, original):
            return
        if is_protected:
            with suppress(FileNotFoundError):
                self.sync_file(resolved)
            self.sync_preimages()
        is_ordered = self.durability != "power" or kernel.keeps_order(resolved.parent)
        if not is_ordered:
            self.sync_dir(resolved)
        self._remove(resolved, draft)
        if not is_ordered:
            # Otherwise the disk may still have one of its names when the next new file gets its inode.
            self.sync_dir(resolved)

    def _announce(self, resolved: ResolvedPath, draft: bytes, folder: int | None, new: NewFile) -> bool:
        """Announce an original.

        False: it cannot be moved to the originals directory. `folder`: the number of its directory.
        """
        originals = self.originals
        if originals is None or os.fstat(resolved.parent).st_dev != originals.device():
            return False
        if self.capture.any and self.capture.withheld(resolved.path) is not None:
            # Its bytes may not be in the state directory, not even for seconds.
            return False
        if folder is None:
            folder = originals.register_folder(kernel.real_path_of(resolved.parent))
        original = originals.announce(folder, draft, resolved.name, new)
        if original is not None:
            self._announced[draft] = original
        return original is not None

    def _take(self, resolved: ResolvedPath, original: Original) -> bool:
        """Move an original. False: it is on another mount; only the move itself shows that."""
        assert self.originals is not None
        try:
            self.originals.move_in(resolved.parent, original)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOENT):
                raise
            return False
        return True

    def put_original_back(self, resolved: ResolvedPath, folder: int, name: bytes) -> None:
        """`put_original_back`: one rename out of another open directory; it replaces the file at the path."""
        self._reach("put_original_back", resolved.path)
        os.rename(name, resolved.name, src_dir_fd=folder, dst_dir_fd=resolved.parent)

    def _sync_draft(self, resolved: ResolvedPath, draft: bytes) -> None:
        self._reach("sync.draft", resolved.path)
        handle = os.open(draft, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=resolved.parent)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _remove(self, resolved: ResolvedPath, draft: bytes) -> None:
        with suppress(FileNotFoundError):
            try:
                os.unlink(draft, dir_fd=resolved.parent)
            except (IsADirectoryError, PermissionError):
                os.rmdir(draft, dir_fd=resolved.parent)

    def settled(self, resolved: ResolvedPath, draft: bytes) -> bool | None:
        """Whether no process still writes into the file that was set aside. None: this system cannot tell."""
        try:
            handle = os.open(draft, OPEN_FILE, dir_fd=resolved.parent)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EACCES):
                raise
            return None
        try:
            return kernel.nobody_writes(handle)
        finally:
            os.close(handle)

    def make_dir(self, resolved: ResolvedPath, mode: int) -> None:
        """`make_dir`"""
        self._reach("make_dir", resolved.path)
        os.mkdir(resolved.name, 0o700, dir_fd=resolved.parent)
        handle = os.open(resolved.name, OPEN_DIRECTORY, dir_fd=resolved.parent)
        try:
            os.fchmod(handle, mode)
        finally:
            os.close(handle)

    def remove_dir(self, resolved: ResolvedPath) -> None:
        """`remove_dir`: an empty one (else OSError ENOTEMPTY)."""
        self._reach("remove_dir", resolved.path)
        os.rmdir(resolved.name, dir_fd=resolved.parent)

    def write_in_place(self, resolved: ResolvedPath, content: Content, *, end_from: int | None = None) -> bytes:
        """`in_place.open`, `in_place.half`, `in_place.write`: write other bytes into the same inode.

        `end_from`: bytes that another process has written from that offset on stay at the end of the file, and are
        returned.
        """
        self.sync_preimages()
        self._reach("in_place.open", resolved.path)
        access = os.O_WRONLY if end_from is None else os.O_RDWR
        handle = os.open(resolved.name, access | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=resolved.parent)
        try:
            end = b"" if end_from is None else _read_from(handle, end_from)
            self._write(handle, content, resolved, half="in_place.half")
            size = len(content)
            if end_from is not None:
                _write_all(handle, end)
                late = max(end_from, size) + len(end)
                end += (more := _read_from(handle, late))
                _write_all(handle, more)
            os.ftruncate(handle, size + len(end))
            self._reach("in_place.write", resolved.path)
            os.fsync(handle)
            return end
        finally:
            os.close(handle)

    def _write(self, handle: int, content: Content, resolved: ResolvedPath, *, half: str) -> None:
        middle = len(content) // 2
        pieces = [content[:middle], content[middle:]] if isinstance(content, bytes) else content
        for count, piece in enumerate(pieces):
            if count == 1:
                self._reach(half, resolved.path)
            _write_all(handle, piece)

    def set_metadata(self, resolved: ResolvedPath, entry: FileEntry | DirEntry) -> None:
        """`metadata`: mode and extended attributes of a file or directory."""
        self._reach("metadata", resolved.path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            handle = os.open(resolved.name, flags, dir_fd=resolved.parent)
        except PermissionError:
            # The owner may set the mode of a file by its name even without permission to read it.
            os.chmod(resolved.name, entry.mode, dir_fd=resolved.parent)
            return
        try:
            write_xattrs(handle, entry.xattrs, replace=True)
            os.fchmod(handle, entry.mode)
        finally:
            os.close(handle)

    def set_mtime(self, resolved: ResolvedPath, mtime_ns: int) -> None:
        """`mtime`"""
        self._reach("mtime", resolved.path)
        access = os.stat(resolved.name, dir_fd=resolved.parent, follow_symlinks=False).st_atime_ns
        os.utime(resolved.name, ns=(access, mtime_ns), dir_fd=resolved.parent, follow_symlinks=False)

    def sync_file(self, resolved: ResolvedPath) -> None:
        """`sync.file`: its bytes survive a power cut. An error here is never retried: the handle lies afterwards."""
        self._reach("sync.file", resolved.path)
        try:
            handle = os.open(resolved.name, OPEN_FILE, dir_fd=resolved.parent)
        except PermissionError:
            # The owner may not read the file, so sync its whole file system.
            sync_file_system(resolved.parent)
            return
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_dir(self, resolved: ResolvedPath) -> None:
        """`sync.dir`: the names in its directory survive a power cut."""
        self._reach("sync.dir", resolved.path)
        os.fsync(resolved.parent)


def _nothing() -> None:
    """Does nothing: without a store there are no preimages to sync."""


def _link_group(handle: int, status: os.stat_result) -> str:
    """The id of a file's hard links.

    It has no device number, because that changes with a restart, and no file has names on two devices.
    """
    return f"{status.st_ino}.{kernel.generation_of(handle)}"


def _read_all(handle: int, size: int) -> bytes:
    """All bytes of a file. A read that ends at the expected `size` tries once more, because the file may have grown."""
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
    """The disk of a root whose directory is missing: its history can be read, and it has no files."""

    def __init__(self, place: bytes, *, folds_case: bool) -> None:
        self.root = Root(-1, place or b"/", place, device=0, folds_case=folds_case)
        self.keep_large = None
        self._reach = _EVERY_STEP_HAPPENS
        self._is_open = False

    def resolve(self, path: RepoPath, *, follow: Follow = "within_root_only", final: bool = True) -> ResolvedPath:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(self.root.path))

    def resolve_exactly(self, path: RepoPath) -> ResolvedPath:
        return self.resolve(path)


def read_xattrs(handle: int) -> Xattrs:
    """The user's extended attributes. Other namespaces belong to the system, and we may not set them."""
    return _values(handle, _attributes(handle))


def _attributes(handle: int) -> list[str]:
    """The names of the visible extended attributes; none if the file system has no attributes."""
    if not hasattr(os, "listxattr"):
        return []
    try:
        return os.listxattr(handle)
    except OSError:
        return []


def _values(handle: int, names: list[str]) -> Xattrs:
    ours = sorted(name for name in names if name.startswith("user."))
    return tuple((name, b64encode(os.getxattr(handle, name)).decode("ascii")) for name in ours)


def write_xattrs(handle: int, xattrs: Xattrs, *, replace: bool = False) -> None:
    if replace and hasattr(os, "removexattr"):
        kept = {name for name, _ in xattrs}
        for name, _ in read_xattrs(handle):
            if name not in kept:
                os.removexattr(handle, name)
    for name, value in xattrs:
        os.setxattr(handle, name, b64decode(value))
