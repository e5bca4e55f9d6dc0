"""The originals of files that Mulligan replaced or deleted, as long as a power cut could destroy their replacements.

A file system writes the bytes of a new file to its disk seconds after its name. Mulligan therefore does not delete an
original: one rename moves it here, and Mulligan deletes it when the new file and the store have been synced. A file
system with a journal preserves the order of renames, so everything that recovery needs is in file names; it reads
neither a file's bytes nor a row of the store. Below the state directory:

    originals/PROCESS/                   locked while that process lives
        folder-N                         a symbolic link to a directory in which the process replaces files
        next-K~ORIGINAL                  the original that the process will move in next
        ORIGINAL                         TIME~FOLDER~INODE~MTIME~DIGEST~DRAFT~NAME; INODE to DIGEST are the new file's

When a process dies, its directory stays. The next process that opens the store reads it (`history.power_cuts`).
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from weakref import WeakSet

from mulligan.store.blob_files import sync_file_system
from mulligan.values.clock import monotonic_s
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass

_NAME_MAX_BYTES = 255
_FOLDER, _NEXT = b"folder-", b"next-"
_SEPARATOR = b"~"
_SYNCED_ONE_BY_ONE = 16
_GONE_WAIT_S = 60.0
_GONE_NAP_S = 0.05
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_OPEN_TO_SYNC = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@fast_dataclass(slots=True, frozen=True)
class NewFile:
    """The file that replaces an original: the inode, time and content that it has unless a power cut damaged it."""

    inode: int
    mtime_ns: int
    digest: Digest


NO_FILE = NewFile(0, 0, digest_from_raw(bytes(32)))
"""The replacement of a deleted original, or one without bytes that could be lost, such as a symbolic link."""


@fast_dataclass(slots=True, frozen=True)
class Original:
    """One original, moved in or about to be: its directory, its name there, and the file that replaces it."""

    taken_ns: int
    folder: int
    draft: bytes
    name: bytes
    new: NewFile

    @property
    def entry(self) -> bytes:
        digest = urlsafe_b64encode(raw_digest(self.new.digest)).rstrip(b"=")
        numbers = b"%d~%d~%d~%d" % (self.taken_ns, self.folder, self.new.inode, self.new.mtime_ns)
        return _SEPARATOR.join((numbers, digest, self.draft, self.name))

    @classmethod
    def parse(cls, entry: bytes) -> Original | None:
        """None: Mulligan did not make this name."""
        fields = entry.split(_SEPARATOR, 6)
        try:
            taken, folder, inode, mtime = map(int, fields[:4])
            digest = digest_from_raw(urlsafe_b64decode(fields[4] + b"="))
            return cls(taken, folder, fields[5], fields[6], NewFile(inode, mtime, digest))
        except (ValueError, IndexError):
            return None


class Originals:
    """The originals that this process has moved in and not yet dropped. A forked child begins with none."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.process = ""
        """The name of its directory."""
        self._pid = 0
        self._handle = -1
        self._device = -1
        self._folders: dict[bytes, int] = {}
        self._free: list[bytes] = []
        self._slots = count()
        self._taken: dict[bytes, Original] = {}
        self._emptied: dict[tuple[int, bytes], bytes] = {}
        self._lock = threading.Lock()
        _all.add(self)

    def device(self) -> int:
        """The device number of the originals directory: only files on the same device can be moved in."""
        if self._pid != os.getpid():
            self._open()
        return self._device

    def announce(self, folder: int, draft: bytes, name: bytes, new: NewFile) -> Original | None:
        """Announce that the file at a name will be replaced or deleted. None: its name is too long to announce.

        `folder` is the number that `register_folder` gave its directory.
        """
        original = Original(time.monotonic_ns(), folder, draft, name, new)
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._new_slot()
        entry = slot.partition(_SEPARATOR)[0] + _SEPARATOR + original.entry
        if len(entry) > _NAME_MAX_BYTES:
            self._free.append(slot)
            return None
        os.rename(slot, entry, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        self._free.append(entry)
        return original

    def move_in(self, parent: int, original: Original) -> None:
        """Move in an original, which has its draft's name in the open directory `parent`, with one rename."""
        entry = original.entry
        os.rename(original.draft, entry, src_dir_fd=parent, dst_dir_fd=self._handle)
        self._taken[entry] = original
        if original.new is NO_FILE:
            self._emptied[original.folder, original.name] = entry

    def reassign(self, folder: int, name: bytes, new: NewFile) -> None:
        """Make the original of a deleted file the original of the file that is about to be created in its place."""
        entry = self._emptied.pop((folder, name), None)
        original = None if entry is None else self._taken.pop(entry, None)
        if entry is None or original is None:
            return
        follower = replace(original, new=new)
        os.rename(entry, follower.entry, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        self._taken[follower.entry] = follower

    def _open(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            while True:
                process = os.urandom(8).hex()
                path = os.path.join(self.directory, process)
                os.makedirs(path, mode=0o700)
                handle = os.open(path, _OPEN_DIRECTORY)
                fcntl.flock(handle, fcntl.LOCK_EX)
                # Another process may have found it unlocked, taken it for a dead process's, and removed it.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(path), os.fstat(handle)):
                        break
                os.close(handle)
            if self._handle >= 0:
                # This handle belongs to the parent process, which still holds its lock.
                os.close(self._handle)
            self._handle, self.process, self._device = handle, process, os.fstat(handle).st_dev
            self._folders, self._free, self._taken, self._emptied = {}, [], {}, {}
            self._pid = os.getpid()

    def register_folder(self, folder: bytes) -> int:
        """Note a directory before a file is replaced there, so that recovery finds it. Answers its number."""
        if self._pid != os.getpid():
            self._open()
        number = self._folders.get(folder)
        if number is None:
            with self._lock:
                number = self._folders.get(folder, len(self._folders))
                if folder not in self._folders:
                    os.symlink(folder, _FOLDER + b"%d" % number, dir_fd=self._handle)
                    self._folders[folder] = number
        return number

    def _new_slot(self) -> bytes:
        slot = _NEXT + b"%d" % next(self._slots)
        os.close(os.open(slot, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._handle))
        return slot

    def pending(self) -> list[Original]:
        """The originals that are not dropped yet; none in a forked child."""
        return list(self._taken.values()) if self._pid == os.getpid() else []

    def sync(self, taken: Sequence[Original]) -> None:
        """Make the files that replaced them survive a power cut. Raises `sync_failed`."""
        folders = {number: folder for folder, number in self._folders.items()}
        _sync({(folders[one.folder], one.name) for one in taken}, self._handle)

    def drop(self, taken: Iterable[Original]) -> None:
        """Delete originals, after their replacements and the store are synced."""
        for one in taken:
            entry = one.entry
            with suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=self._handle)
            self._taken.pop(entry, None)
            if self._emptied.get((one.folder, one.name)) == entry:
                del self._emptied[one.folder, one.name]

    def close(self) -> None:
        """Originals that are still here stay for the next process that opens the store."""
        with self._lock:
            if self._pid != os.getpid():
                return
            if not self._taken:
                remove_all(self._handle, os.path.join(self.directory, self.process))
            os.close(self._handle)
            self._handle, self._pid = -1, 0

    def others_exist(self) -> bool:
        """Whether there are originals of other processes, dead or alive."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return False
        return any(name != self.process for name in names)

    def of_process(self, process: str) -> DeadProcessOriginals | None:
        """The directory of one process, locked until it is closed. None: it does not exist, or its process lives."""
        return _locked(os.path.join(self.directory, process))

    def of_dead_processes(self) -> list[DeadProcessOriginals]:
        """The directories of dead processes, each locked until it is closed."""
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return []
        mine = self.process if self._pid == os.getpid() else ""
        found = [_locked(os.path.join(self.directory, name)) for name in names if name != mine]
        return [originals for originals in found if originals is not None]


def wait_until_empty(directory: str) -> None:
    """Wait until living processes have dropped all originals that exist now. Raises `store_busy`."""
    waiting = [path for path in _everything_in(directory) if not os.path.basename(path).startswith((_FOLDER, _NEXT))]
    deadline = monotonic_s() + _GONE_WAIT_S
    while waiting := [path for path in waiting if os.path.lexists(path)]:
        if monotonic_s() > deadline:
            words = "Another process still holds the originals of files that it replaced; end its calls and try again."
            raise fault("store_busy", words, directory=directory)
        time.sleep(_GONE_NAP_S)


def _everything_in(directory: str) -> list[bytes]:
    found = list[bytes]()
    with suppress(FileNotFoundError):
        for process in os.listdir(os.fsencode(directory)):
            folder = os.path.join(os.fsencode(directory), process)
            with suppress(FileNotFoundError):
                found += [os.path.join(folder, name) for name in os.listdir(folder)]
    return found


_all: WeakSet[Originals] = WeakSet()


def _after_fork_in_child() -> None:
    """Replace the locks: a thread that the child does not have may have held them."""
    for originals in list(_all):
        originals._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _locked(path: str) -> DeadProcessOriginals | None:
    """None: its process lives, or another process is recovering it."""
    try:
        handle = os.open(path, _OPEN_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return DeadProcessOriginals(handle, path)


class DeadProcessOriginals:
    """The originals of a process that died. The process may or may not have replaced the `announced` ones."""

    def __init__(self, handle: int, path: str) -> None:
        self.handle = handle
        self.path = path
        self.folders: dict[int, bytes] = {}
        names = [os.fsencode(name) for name in os.listdir(handle)]
        for name in names:
            if name.startswith(_FOLDER):
                self.folders[int(name[len(_FOLDER) :])] = os.readlink(name, dir_fd=handle)
        self.taken = self._parsed(name for name in names if not name.startswith((_FOLDER, _NEXT)))
        announced = self._parsed(name.partition(_SEPARATOR)[2] for name in names if name.startswith(_NEXT))
        self.announced = [one for one in announced if one not in self.taken]

    def _parsed(self, entries: Iterable[bytes]) -> list[Original]:
        found = map(Original.parse, entries)
        return [one for one in found if one is not None and one.folder in self.folders]

    def sync(self) -> None:
        """Make the files that replaced its originals survive a power cut. Raises `sync_failed`."""
        _sync({(self.folders[one.folder], one.name) for one in self.taken}, self.handle)

    def remove(self) -> None:
        """Delete the directory with all originals in it."""
        remove_all(self.handle, self.path)

    def close(self) -> None:
        os.close(self.handle)


def remove_all(handle: int, path: str) -> None:
    # List by path: on btrfs, a handle lists only the names that existed when it was opened.
    for name in os.listdir(path) if os.path.isdir(path) else ():
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)
    with suppress(FileNotFoundError):
        os.rmdir(path)


def _sync(places: set[tuple[bytes, bytes]], handle: int) -> None:
    try:
        if len(places) > _SYNCED_ONE_BY_ONE or not _sync_places(places):
            sync_file_system(handle)
    except OSError as error:
        raise fault("sync_failed", f"Syncing files: {error.strerror}", errno=error.errno) from error


def _sync_places(places: Iterable[tuple[bytes, bytes]]) -> bool:
    """Sync files and their directories; a file that is gone needs no sync. False: some could not be opened."""
    for folder in {folder for folder, _ in places}:
        try:
            handle = os.open(folder, _OPEN_DIRECTORY)
        except OSError:
            return False
        try:
            for name in (name for other, name in places if other == folder):
                if not _sync_file(handle, name):
                    return False
            os.fsync(handle)
        finally:
            os.close(handle)
    return True


def _sync_file(folder: int, name: bytes) -> bool:
    try:
        if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
            return True
        handle = os.open(name, _OPEN_TO_SYNC, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return True
