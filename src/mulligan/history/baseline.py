"""The baseline of a root: what every path below it was at the last scan.

An agent that is not our child process changes files by itself, and so does a command whose changes are found only
afterwards. What was there before has to be known already. So `Baseline` scans the whole tree once and reads every
file; later scans read only the paths whose stamps have changed.

1. An entry of the baseline is right: Mulligan read it while the path had the stamp that the scan had found, and the
   file did not change during the read.
2. A change is returned once, by the scan that finds it. The caller attributes it to a call or records it as external.
3. What Mulligan could not read in time, or what is too large to store, is unknown (`before` is None), never guessed.
4. The rows in the store change in the transaction that records the changes. So a process that dies between two scans
   loses nothing: the next process continues from the rows.

The store holds little for a baseline. For a tracked file that git calls clean, it holds git's object id. It holds no
file over 2 MiB, no more than 512 MiB in all, and no objects of git. A change to a path that is not held cannot be
undone, and the coverage of the call says so.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import islice
from typing import Protocol, TypeAlias

from mulligan.exec.capture.scan import Stamp, StatIndex, Statuses, stamp_now, stamp_of, status_of, statuses, twins
from mulligan.files.disk import DRAFT_PREFIX, Image
from mulligan.files.tree.watcher import Watcher
from mulligan.history.abort import WritableRoot
from mulligan.history.git_changes import (
    LinkedGit,
    clean_files,
    git_contents,
    is_object,
    lost_objects,
    repository_of,
)
from mulligan.history.ledger import entry_bytes, intending, touch_row
from mulligan.history.permissions import is_shut, opened_up
from mulligan.history.tables import KEPT, KEPT_ROOTS, TOUCHES, WATCH_WINDOWS, KeptRootRow, KeptRow, RootRow
from mulligan.store.blobs import SMALL_BYTES
from mulligan.store.protocol import Tx
from mulligan.values.clock import monotonic_s
from mulligan.values.digest import digest_of, raw_digest
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Content,
    Entry,
    FileEntry,
    entry_from_bytes,
    same_state,
)
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import CallId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import RepoPath, path_bytes, path_from_bytes

FILE_MAX_BYTES = 2 * MIB_BYTES
WORKSPACE_MAX_BYTES = 512 * MIB_BYTES
TOUCHED_MAX_BYTES = 64 * MIB_BYTES
"""A file that changed between two scans is stored up to this size, though the first scan would not have stored it."""
WATCHED_FROM_PATHS = 4_000
"""In a smaller tree a check of every stamp is quick, so Mulligan does not need the watcher."""
WINDOW_ORDINAL = -1
"""The ordinal of a touch that another process wrote for an open capture window."""

_GIT = b"/.git"
_OBJECTS = b"/.git/objects"
_BATCH = 200
_READ_AND_SEARCH = 0o500
_CONTENT_KINDS = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK})
_STAMP = struct.Struct("<5q")

Known: TypeAlias = Entry | str | None
"""An entry whose bytes are in the store, git's object id of a clean file, or None for unknown content."""


@fast_dataclass(slots=True, frozen=True)
class BaselineChange:
    """A path that differs from the baseline. `before` None: unknown. `after` None: not captured.

    `image` is an image of `after`, without bytes. `link_count` is how many names below the root the file had before.
    `linked_outside`: the file has names outside the root, too; of several names below it, only the first says so.
    `unstable`: the file changed during every read, so `before` is unknown or `after` mixes several states.
    """

    path: RepoPath
    before: Entry | None
    after: Entry | None
    image: Image | None = None
    link_count: int = 1
    linked_outside: bool = False
    unstable: bool = False

    @property
    def is_same(self) -> bool:
        return self.before is not None and self.after is not None and same_state(self.before, self.after)


class ReadableRoot(WritableRoot, Protocol):
    """A root, and what its paths hold."""

    def image(self, path: RepoPath) -> Image: ...


class Baseline:
    """What every path of one root was at the last scan. For one thread at a time. Close it."""

    def __init__(
        self,
        open_root: ReadableRoot,
        *,
        file_max_bytes: int = FILE_MAX_BYTES,
        workspace_max_bytes: int = WORKSPACE_MAX_BYTES,
        watched_from: int = WATCHED_FROM_PATHS,
    ) -> None:
        self._open_root = open_root
        self._watched_from = watched_from
        self._root = open_root.disk.root.path
        self._below, self._absolute = open_root.disk.root.below, open_root.disk.root.absolute
        self._file_max_bytes = file_max_bytes
        self._free_bytes = workspace_max_bytes
        self._index: StatIndex | None = None
        self._rows = BaselineRows(open_root)
        self._unreadable = UnreadableFolders(self._rows.stamps)
        self._unread: list[bytes] = []
        self._is_git_read = True
        self._watcher: Watcher | None = None
        self._is_watcher_new = False
        self._postponed: frozenset[bytes] = frozenset()
        # After which scan a call restored paths, and which.
        self._restored: tuple[int, frozenset[bytes]] = (0, frozenset())
        self._names_by_inode: dict[int, list[bytes]] | None = None
        self._special_now: set[bytes] = set()
        self.scan_count = 0
        self._unstable: set[bytes] = set()
        """Paths of unknown content, because they changed during every read."""
        # The next two say what a scan could not capture. The caller clears them when it has read them.
        self.special_paths: set[bytes] = set()
        self.unreadable_paths = self._unreadable.skipped
        self.linked_git = LinkedGit(self._root)

    @property
    def watcher(self) -> Watcher | None:
        """A caller that waits for long drains it, so that the kernel's queue does not overflow."""
        return self._watcher

    @property
    def has_unpublished(self) -> bool:
        return bool(self._rows.unpublished)

    @property
    def is_complete(self) -> bool:
        """Whether every file that is to be read has been read and saved."""
        return not self._unread and self._is_git_read and not self._rows.unsaved

    def find_changes(
        self, *, full: bool = False, until_ns: int | None = None, store_contents: bool = True, open_folders: bool = True
    ) -> list[BaselineChange]:
        """Scan: return every path that differs from the last scan, and store what it is now.

        `full`: compare the stamp of every path, whatever the watcher says. `until_ns`: leave a path that changed later
        for the next scan. `store_contents` False: the caller will roll the changes back, so the new bytes are not
        stored, and a preimage that the store cannot take from git is unknown. `open_folders`: open a folder of ours
        that became unreadable since the last scan, so that this one can read it.
        """
        if self._index is None and not self.load():
            self._take_first_stamps()
            return []
        self.scan_count += 1
        touched = self._touched(full=full)
        self._postponed = frozenset() if until_ns is None else _changed_since(touched, until_ns)
        folders = {path: now for path, now in touched.items() if now is not None and stat.S_ISDIR(now.st_mode)}
        shut = {path for path in folders.keys() - self._postponed if is_shut(self._open_root.disk, self._below(path))}
        hidden = tuple(path + b"/" for path in shut)
        visible = {path: touched[path] for path in touched.keys() - self._postponed if not path.startswith(hidden)}
        unknown = [BaselineChange(self._below(path), None, None) for path in self._unreadable.changed(visible)]
        newly_shut = {path for path in shut if stamp_of(folders[path]) != self._rows.stamps.get(path)}
        to_open = {
            path for path in newly_shut if open_folders and not self._unreadable.is_unknown(path, folders[path].st_ino)
        }
        self._unreadable.skip(newly_shut - to_open)
        changes = self._compare(visible, store_contents=store_contents) + unknown
        return changes + [one for path in to_open for one in self._scan_shut(path, store_contents=store_contents)]

    def _scan_shut(self, folder: bytes, *, store_contents: bool) -> list[BaselineChange]:
        """Scan a folder that became unreadable since the last scan. What stays hidden in it does not count as gone."""
        with opened_up(self._open_root.disk, self._below(folder)):
            inner = StatIndex.of(folder)
            if folder in inner.unreadable:
                self._unreadable.skip([folder])
                return []
            hidden = tuple(path + b"/" for path in inner.unreadable)
            known = {path for path in self._rows.stamps if path.startswith(folder + b"/")}
            found = statuses({path for path in known if not path.startswith(hidden)}.union(inner.paths()))
            inodes = {path: now.st_ino for path in inner.unreadable if (now := found[path])}
            unknown = {path for path, inode in inodes.items() if self._unreadable.is_unknown(path, inode)}
            self._unreadable.skip(unknown)
            changes = self._compare(found, store_contents=store_contents)
            for path in inner.unreadable - unknown:
                changes += self._scan_shut(path, store_contents=store_contents)
        self._unreadable.was_opened(folder)
        stamp = stamp_now(folder)
        if stamp is not None:
            # Mulligan itself opened the folder and shut it again, so the new stamp is no change.
            self._rows.stamps[folder] = stamp
        return changes

    def revert_last_scan(self) -> None:
        """Restore the baseline to before the last scan, because the caller will roll its changes back; the next scan
        reads those paths again.
        """
        self._postponed |= self._rows.revert()

    def note_restored(self, paths: Iterable[RepoPath], *, scan_count: int) -> None:
        """A call has restored these paths after that scan. If no scan came between, the next need not read them."""
        self._restored = scan_count, frozenset(self._absolute(path) for path in paths)

    def entries(self, paths: Iterable[RepoPath]) -> dict[RepoPath, Entry | None]:
        """The entries that the last scan found, with the bytes in the store. None: not read yet, and changed since."""
        places = [self._absolute(path) for path in paths]
        known, stamps = self._rows.known, self._rows.stamps
        sizes = {place: _size(stamps[place]) for place in places if place in stamps}
        unread = [
            place for place, size in sizes.items() if size <= TOUCHED_MAX_BYTES and known.get(place, ABSENT) is None
        ]
        self._read(unread)
        return {self._below(place): before for place, before in self._befores(places).items()}

    def gap_at(self, path: RepoPath) -> str:
        """Why the content of a path is unknown, as coverage says it."""
        return "unstable" if self._absolute(path) in self._unstable else "no_baseline"

    def refresh(self, paths: Iterable[RepoPath]) -> list[BaselineChange]:
        """Read these paths again, so that the next scan does not return them. Returns those that differ."""
        return self._compare(statuses([self._absolute(path) for path in paths]))

    # The first scan.

    def _take_first_stamps(self) -> None:
        """Take every stamp now. `read_contents` reads the files later, as far as their stamps are still the same."""
        self._index = StatIndex.take(self._root)
        self._rows.begin(dict(self._index.stamps()))
        self._is_git_read = False
        self._watch()

    def _watch(self) -> None:
        if len(self._rows.stamps) < self._watched_from or self._watcher is not None:
            return
        try:
            # A path may change before its watch is set, so one more scan compares every stamp.
            self._watcher, self._is_watcher_new = Watcher(self._root), True
        except (MulliganError, OSError):
            return

    def read_contents(self, deadline_s: float) -> None:
        """Read the files that the first scan only stamped, the smallest first, then save the rows; until a deadline."""
        if not self._is_git_read:
            self._is_git_read = True
            self._plan_reading()
        while self._unread and monotonic_s() < deadline_s:
            batch, self._unread = self._unread[-_BATCH:], self._unread[:-_BATCH]
            self._read(batch)
        while self._rows.unsaved and not self._unread and monotonic_s() < deadline_s:
            self._rows.save_some(self._taken_ns)

    def _plan_reading(self) -> None:
        for path, oid in clean_files(self._root, self._rows.stamps).items():
            if self._open_root.disk.capture.withheld(self._below(path)) is None:
                self._rows.known[path] = oid
        sizes = {path: _size(self._rows.stamps[path]) for path, known in self._rows.known.items() if known is None}
        # Objects of git never change and no undo removes them. Their folder counts, because it may be removed whole.
        unread = [
            path
            for path, size in sizes.items()
            if size <= self._file_max_bytes and (path.endswith(_OBJECTS) or not is_object(self._below(path)))
        ]
        # Batches are taken from the end, so the smallest files come last.
        self._unread = sorted(unread, key=lambda path: -sizes[path])

    def _read(self, paths: Iterable[bytes]) -> None:
        found: dict[bytes, Entry] = {}
        self._open_root.ledger.blobs.store_all(self._contents(paths, found))
        for path, entry in found.items():
            # The same stamp after the read: the bytes are those that the scan saw.
            if stamp_now(path) == self._rows.stamps.get(path):
                self._rows.known[path] = entry
                self._unstable.discard(path)

    def _contents(self, paths: Iterable[bytes], found: dict[bytes, Entry]) -> Iterator[Content]:
        """Yields contents to be stored; fills `found` on the way, so that no more than one content is in memory."""
        for path in paths:
            size = _size(self._rows.stamps[path]) if path in self._rows.stamps else 0
            image = self._image(path) if size <= self._free_bytes else None
            if image is None or image.special or image.unstable:
                continue
            found[path] = image.entry
            if image.content is not None:
                self._free_bytes -= size
                yield image.content

    # Every later scan: first the paths that may have changed.

    def _touched(self, *, full: bool) -> Statuses:
        """The paths that may have changed since the last scan, with their status now."""
        assert self._index is not None
        dirty = self._watcher.take() if self._watcher is not None else None
        if dirty is None or dirty.overflowed or full or self._is_watcher_new:
            index = self._index.again()
            touched = index.touched_since(self._index)
            self._index, self._is_watcher_new = index, False
            self._watch()
            return self._with_other_names(statuses(self._postponed.union(touched, dirty.paths if dirty else ())))
        # A folder that was moved away takes everything below it along; the kernel reports only the folder.
        gone = tuple(folder + b"/" for folder in dirty.moved_away)
        inner = [path for path in self._rows.stamps if path.startswith(gone)] if gone else []
        found = statuses(self._postponed.union(dirty.paths, inner))
        restored_after, restored = self._restored
        for path in restored & dirty.placed if restored_after == self.scan_count - 1 else ():
            now = found[path]
            if now is not None and self._is_as_restored(path, now):
                self._rows.stamps[path] = stamp_of(now)
                del found[path]
        return self._with_other_names(found)

    def _is_as_restored(self, path: bytes, now: os.stat_result) -> bool:
        """Whether a path to which only Mulligan moved a file still is what the baseline says."""
        before = self._rows.known.get(path)
        if not isinstance(before, FileEntry) or not stat.S_ISREG(now.st_mode) or now.st_nlink > 1:
            return False
        return (now.st_size, now.st_mtime_ns, stat.S_IMODE(now.st_mode)) == (before.size, before.mtime_ns, before.mode)

    def _with_other_names(self, touched: Statuses) -> Statuses:
        """Add the other hard links of the same files: the kernel reports only the name that was used."""
        if self._names_by_inode is None:
            self._names_by_inode = twins(self._rows.stamps)
        linked = {now.st_ino for now in touched.values() if now and now.st_nlink > 1 and stat.S_ISREG(now.st_mode)}
        known = [name for path in touched for name in self._names_of(path)] if self._names_by_inode else []
        new = [path for path, stamp in self._rows.stamps.items() if stamp[3] in linked] if linked else []
        return touched | statuses({*known, *new} - touched.keys())

    def _names_of(self, path: bytes) -> list[bytes]:
        """All names that the file at a path had at the last scan, if it had several."""
        stamp = self._rows.stamps.get(path)
        if stamp is None or self._names_by_inode is None:
            return []
        names = self._names_by_inode.get(stamp[3], ())
        return [name for name in names if name in self._rows.stamps and self._rows.stamps[name][3] == stamp[3]]

    # Then what they were, and what they are.

    def _compare(self, touched: Statuses, *, store_contents: bool = True) -> list[BaselineChange]:
        # What was below a folder that is a symlink by now is gone, whatever the link leads to.
        links = tuple(path + b"/" for path, now in touched.items() if now is not None and stat.S_ISLNK(now.st_mode))
        stamps = {
            path: None if now is None or path.startswith(links) else stamp_of(now)
            for path, now in touched.items()
            if now is not None or path in self._rows.stamps or path in self._rows.known or path in self._special_now
        }
        ours = {path: now for path, now in stamps.items() if path != self._root and not self._is_gits_own(path, now)}
        gone = [path for path, now in stamps.items() if now is None and path not in ours]
        objects = self._lost_objects(gone)
        self._forget_gone(gone)
        befores = self._befores(ours, store_contents=store_contents) | dict.fromkeys(self._unreadable.moved_to(ours))
        names = {path: len(self._names_of(path)) or 1 for path in ours} if self._names_by_inode else {}
        unstable = {path for path in self._unstable if befores.get(path, ABSENT) is None}
        images = self._read_afters(ours, store_contents=store_contents)
        unstable.update(path for path, image in images.items() if image.unstable)
        outside = self._linked_outside(images)
        changes = [
            BaselineChange(
                self._below(path), before, self._entry_of(path, images), images.get(path), names.get(path, 1), *flags
            )
            for path, before in befores.items()
            for flags in [(path in outside, path in unstable)]
        ]
        self._rows.unpublished = befores | self._rows.unpublished
        return [one for one in changes if not one.is_same] + objects

    def _lost_objects(self, gone: Iterable[bytes]) -> list[BaselineChange]:
        """The object stores of git that have lost an object: the baseline holds no objects, so they are unknown."""
        files: dict[bytes, list[bytes]] = {}
        for path in gone:
            if _OBJECTS + b"/" in path and path in self._rows.stamps and stat.S_ISREG(self._rows.stamps[path][4]):
                folder, _, name = path.rpartition(_OBJECTS + b"/")
                files.setdefault(folder, []).append(name)
        lost = [folder + _OBJECTS for folder, names in files.items() if lost_objects(folder, names)]
        return [BaselineChange(self._below(folder), None, None) for folder in lost]

    def _linked_outside(self, images: Mapping[bytes, Image]) -> frozenset[bytes]:
        """The files with names outside the root; of several names of one file, the first."""
        linked = {path: image for path, image in images.items() if image.links > 1}
        if not linked:
            return frozenset()
        self._names_by_inode = twins(self._rows.stamps)
        names = {path: self._names_of(path) or [path] for path in linked}
        return frozenset(min(names[path]) for path, image in linked.items() if image.links > len(names[path]))

    def _entry_of(self, path: bytes, images: Mapping[bytes, Image]) -> Entry | None:
        known = images[path].entry if path in images else self._rows.known.get(path, ABSENT)
        assert not isinstance(known, str), "`_befores` has replaced git's object ids"
        return known

    def _is_gits_own(self, path: bytes, now: Stamp | None) -> bool:
        """An object of a repository that was there at the last scan. That the whole folder went is a change."""
        if _GIT not in path:
            return False
        inner = self._below(path)
        repository = repository_of(inner) if is_object(inner) else None
        if repository is None or self._absolute(repository) not in self._rows.stamps:
            return False
        return inner != f"{repository}/objects" or now is not None

    def _forget_gone(self, paths: Iterable[bytes]) -> None:
        """Forget git's objects that are gone. Otherwise, one that comes again would count as known."""
        for path in paths:
            if path in self._rows.stamps:
                self._rows.forget(path)
                self._rows.unpublished.setdefault(path, None)

    def _befores(self, paths: Collection[bytes], *, store_contents: bool = True) -> dict[bytes, Entry | None]:
        """What the paths were. Mulligan reads the bytes that only git has, all at once, and stores them."""
        in_git = {path: known for path in paths if isinstance(known := self._rows.known.get(path), str)}
        contents = git_contents(self._root, in_git) if in_git else {}
        # The bytes go into the store now: git may drop the object, and then they would be nowhere.
        try:
            self._open_root.ledger.blobs.store_all(contents.values())
        except MulliganError:
            if store_contents:
                raise
            contents = {}
        for path, data in contents.items():
            stamp = self._rows.stamps[path]
            self._rows.known[path] = FileEntry(digest_of(data), len(data), stat.S_IMODE(stamp[4]), stamp[1])
        unknown = tuple(path + b"/" for path in paths if self._unreadable.is_unknown(path))
        found = {path: None if path.startswith(unknown) else self._rows.known.get(path, ABSENT) for path in paths}
        return {path: None if isinstance(known, str) else known for path, known in found.items()}

    def _read_afters(self, stamps: Mapping[bytes, Stamp | None], *, store_contents: bool) -> dict[bytes, Image]:
        """Remember what is there now. Returns images of what could be read, without the bytes."""
        images: dict[bytes, Image] = {}
        # Stamps come before reads: if a file changes during its read, the next scan finds another stamp.
        changed = {path for path, stamp in stamps.items() if self._set_stamp(path, stamp)}
        contents = self._touched_contents(stamps, changed, images)
        if store_contents:
            self._open_root.ledger.blobs.store_all(contents)
        else:
            deque(contents, maxlen=0)  # runs the generator, which fills `images`
        for path in stamps:
            if path not in self._rows.stamps:
                self._rows.known.pop(path, None)
            elif path in images and not images[path].unstable:
                self._rows.known[path] = images[path].entry
                self._unstable.discard(path)
            elif path in changed or path in images:
                self._rows.known[path] = None
        return images

    def _set_stamp(self, path: bytes, stamp: Stamp | None) -> bool:
        """Returns whether the stamp differs. Devices, FIFOs and sockets have none; they are only listed."""
        before = self._rows.stamps.get(path)
        is_special = stamp is not None and stat.S_IFMT(stamp[4]) not in _CONTENT_KINDS
        if is_special or path in self._special_now:
            self.special_paths.add(path)
            (self._special_now.add if is_special else self._special_now.discard)(path)
        if stamp is None or is_special:
            self._rows.stamps.pop(path, None)
        else:
            self._rows.stamps[path] = stamp
        return stamp != before

    def _touched_contents(
        self, paths: Iterable[bytes], changed: Collection[bytes], images: dict[bytes, Image]
    ) -> Iterator[Content]:
        """Yields what is stored at once. A few small contents wait for the transaction that writes their rows."""
        for path in paths:
            stamp = self._rows.stamps.get(path)
            if stamp is None or _size(stamp) > (TOUCHED_MAX_BYTES if path in changed else self._file_max_bytes):
                continue
            image = self._image(path)
            if image is None or image.special:
                continue
            images[path] = image.without_content()
            small = self._rows.small_contents
            if image.content is not None and len(image.content) > SMALL_BYTES:
                yield image.content
            elif image.content is not None:
                small.append(image.content)
            if len(small) == _BATCH:
                yield from small
                small.clear()

    def _image(self, path: bytes) -> Image | None:
        """None if Mulligan may not read what is there."""
        try:
            image = self._open_root.image(self._below(path))
        except (PermissionError, MulliganError):
            return None
        if image.unstable:
            self._unstable.add(path)
        return image

    # The rows in the store.

    @property
    def _taken_ns(self) -> int | None:
        return None if self._index is None else self._index.taken_ns

    def publish(self, tx: Tx) -> None:
        """Write what scans have found, in the transaction that records it. Call `mark_published` when that is over."""
        self._rows.publish(tx, self._taken_ns)

    def mark_published(self) -> None:
        self._rows.mark_published()

    def store_small_contents(self, tx: Tx) -> None:
        """Store what the last scan has read, without rows: the caller is about to roll the changes back."""
        self._rows.store_small_contents(tx)

    def load(self) -> bool:
        """Continue from the rows that another process wrote. False if there are none, or not all of them."""
        taken_ns = self._rows.load()
        if taken_ns is None:
            return False
        stored = [path for path, known in self._rows.known.items() if isinstance(known, FileEntry)]
        self._free_bytes -= sum(_size(self._rows.stamps[path]) for path in stored)
        self._index = StatIndex.restored(self._root, self._rows.stamps, taken_ns)
        return True

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None


class UnreadableFolders:
    """The folders of a baseline that their modes keep Mulligan out of, by absolute path.

    Such a folder has unknown content. It counts neither as unchanged nor as gone, even after a process has moved it.
    `stamps` are those of the last scan; the baseline keeps changing them.
    """

    def __init__(self, stamps: Mapping[bytes, Stamp]) -> None:
        self._stamps = stamps
        self._opened: set[bytes] = set()
        self._moved_inodes: set[int] = set()
        self.skipped: set[bytes] = set()

    def skip(self, folders: Iterable[bytes]) -> None:
        self.skipped.update(folders)
        self._opened.difference_update(folders)

    def was_opened(self, folder: bytes) -> None:
        """A scan has opened the folder although it is unreadable, so its content is known."""
        self._opened.add(folder)

    def is_unknown(self, path: bytes, inode: int | None = None) -> bool:
        """Whether the last scan could not read this folder, wherever it is now."""
        mode = self._stamps[path][4] if path in self._stamps else 0
        was_shut = stat.S_ISDIR(mode) and mode & _READ_AND_SEARCH != _READ_AND_SEARCH and os.geteuid() != 0
        return (was_shut and path not in self._opened) or inode in self._moved_inodes

    def changed(self, touched: Statuses) -> list[bytes]:
        """The unknown folders that are gone, or in which a name has come or gone."""
        unknown = {path: self._stamps[path] for path in touched if self.is_unknown(path)}
        self._moved_inodes = {stamp[3] for path, stamp in unknown.items() if touched[path] is None}
        # A folder's mtime changes with its names.
        return [
            path
            for path, before in unknown.items()
            if (now := touched[path]) is None or (now.st_mtime_ns, now.st_ino) != (before[1], before[3])
        ]

    def moved_to(self, stamps: Mapping[bytes, Stamp | None]) -> list[bytes]:
        """The places to which unknown folders were moved, with everything below."""
        tops = {path for path, now in stamps.items() if now and now[3] in self._moved_inodes and stat.S_ISDIR(now[4])}
        below = tuple(path + b"/" for path in tops)
        return [path for path in stamps if path in tops or path.startswith(below)] if tops else []


class BaselineRows:
    """The data of a baseline by absolute path: in memory at once, in the store once it is published."""

    def __init__(self, open_root: WritableRoot) -> None:
        self._open_root = open_root
        self.stamps: dict[bytes, Stamp] = {}
        self.known: dict[bytes, Known] = {}
        self.unpublished: dict[bytes, Entry | None] = {}
        """the paths that scans found changed since the last publication, each with what it was before"""
        self.unsaved: set[bytes] = set()
        """the paths of the first scan that have no row yet"""
        self.small_contents: list[Content] = []
        """bytes that the next rows name"""

    def forget(self, path: bytes) -> None:
        self.stamps.pop(path, None)
        self.known.pop(path, None)

    def revert(self) -> frozenset[bytes]:
        """Return to what was last published. Returns the paths that differed."""
        changed = frozenset(self.unpublished)
        for path, before in self.unpublished.items():
            if isinstance(before, Absent):
                self.forget(path)
            else:
                self.known[path] = before
        self.unpublished = {}
        self.small_contents.clear()
        return changed

    def begin(self, stamps: Mapping[bytes, Stamp]) -> None:
        """Start anew: only stamps are known."""
        with self._open_root.ledger.store.write() as tx:
            forget_baseline(tx, self._open_root.root.id)
        self.stamps.update(stamps)
        self.known.update(dict.fromkeys(stamps))
        self.unsaved = set(stamps)

    def publish(self, tx: Tx, taken_ns: int | None) -> None:
        """Write the rows of changed paths. `taken_ns`: when the index took all stamps.

        Nothing here is cleared before `mark_published`, so a transaction that fails loses nothing.
        """
        root = self._open_root.disk.root
        self.store_small_contents(tx)
        befores = {root.below(path): before for path, before in self.unpublished.items()}
        _save_for_windows(tx, self._open_root.root, befores)
        for path in self.unpublished:
            self._put(tx, path)
        if self.unsaved <= self.unpublished.keys() and taken_ns is not None:
            # This row says that the rows of the root are complete.
            tx.put(KEPT_ROOTS, KeptRootRow(self._open_root.root.id, taken_ns, self._open_root.ledger.now()))

    def store_small_contents(self, tx: Tx) -> None:
        blobs = self._open_root.ledger.blobs
        for content in self.small_contents:
            blobs.put(tx, blobs.prepare(content))

    def mark_published(self) -> None:
        self.unsaved.difference_update(self.unpublished)
        self.unpublished = {}
        self.small_contents.clear()

    def save_some(self, taken_ns: int | None) -> None:
        """Save one batch of the first scan's rows; with the last batch, publish."""
        some = list(islice(self.unsaved, _BATCH))
        with self._open_root.ledger.store.write() as tx:
            for path in some:
                self._put(tx, path)
            self.unsaved.difference_update(some)
            if not self.unsaved:
                self.publish(tx, taken_ns)
        if not self.unsaved:
            self.mark_published()

    def _put(self, tx: Tx, path: bytes) -> None:
        root, key = self._open_root.root.id, path_bytes(self._open_root.disk.root.below(path))
        stamp = self.stamps.get(path)
        if stamp is None:
            tx.delete(KEPT, root, key)
        else:
            tx.put(KEPT, _row_of(root, key, stamp, self.known.get(path)))

    def load(self) -> int | None:
        """Read the rows of another process. Returns when their stamps were taken; None if they are not complete."""
        with self._open_root.ledger.store.read() as tx:
            complete = tx.get(KEPT_ROOTS, self._open_root.root.id)
            rows = tx.select(KEPT, {"root": self._open_root.root.id}) if complete is not None else []
        for row in rows:
            path = self._open_root.disk.root.absolute(path_from_bytes(row.path))
            self.stamps[path] = _STAMP.unpack(row.stamp)
            self.known[path] = row.oid if row.entry is None else entry_from_bytes(row.entry)
        return complete.taken_ns if complete is not None and rows else None


def _row_of(root: str, path: bytes, stamp: Stamp, known: Known) -> KeptRow:
    entry, oid = (None, known) if isinstance(known, str) else (known, None)
    digest = raw_digest(entry.digest) if isinstance(entry, FileEntry) else None
    text = None if entry is None else entry_bytes(entry)
    return KeptRow(root, path, _STAMP.pack(*stamp), text, oid, digest)


def forget_baseline(tx: Tx, root: str) -> None:
    tx.delete(KEPT_ROOTS, root)
    for row in tx.select(KEPT, {"root": root}):
        tx.delete(KEPT, root, row.path)


def forget_unused_baselines(tx: Tx, before: str) -> None:
    """Forget the baselines of roots that no process has scanned since that time."""
    for row in tx.select(KEPT_ROOTS):
        if row.looked_at < before:
            forget_baseline(tx, row.root)


# Capture windows: a command whose changes are found afterwards has its preimages in the rows of the baseline.


def _save_for_windows(tx: Tx, root: RootRow, befores: Mapping[RepoPath, Entry | None]) -> None:
    """Before rows change, copy them for each open capture window: recovery needs them if its process dies."""
    for window in tx.select(WATCH_WINDOWS, {"root": root.id}) if befores else ():
        for path, before in befores.items():
            call, key = CallId(window.call), path_bytes(path)
            if before is not None and not tx.has(TOUCHES, call, key):
                row = touch_row(call, key, root, ordinal=WINDOW_ORDINAL, before=before)
                tx.put(TOUCHES, intending(row, before, draft_name(call, key), in_place=True))


def forget_window_touches(tx: Tx, call: str) -> None:
    """A capture window is over: delete the touches that others wrote for it and it did not need."""
    for row in tx.select(TOUCHES, {"call": call, "ordinal": WINDOW_ORDINAL}):
        tx.delete(TOUCHES, call, row.path)


def draft_name(call: CallId, path: bytes) -> bytes:
    return DRAFT_PREFIX + f"{call[-12:]}-{sha256(path).hexdigest()[:16]}".encode("ascii")


# Stamps.


def kernel_time_ns() -> int:
    """The time by the clock that stamps files, whatever clock a session has."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def _changed_since(paths: Collection[bytes], when_ns: int) -> frozenset[bytes]:
    """The paths that changed after a moment, without folders above a path that did not.

    A file system whose clock is ahead of ours cannot say; there, none.
    """
    now_ns = kernel_time_ns()
    stamps = {path: status.st_ctime_ns for path in paths if (status := status_of(path)) is not None}
    late = {path for path, changed_ns in stamps.items() if when_ns < changed_ns <= now_ns}
    # A new folder's time changes with each name in it. It came before the names that are not late.
    for path in set(paths) - late:
        while (path := os.path.dirname(path)) in late:
            late.discard(path)
    return frozenset(late)


def _size(stamp: Stamp) -> int:
    return stamp[2] if stat.S_ISREG(stamp[4]) else 0
