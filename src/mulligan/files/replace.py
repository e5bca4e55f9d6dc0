"""Replaces one entry by another so that no bytes of another process are lost between check and write.

A `Replacement` acts first and checks afterwards: it exchanges the files in one step, then compares the displaced file
with the expected one. If they differ, another process has saved. `rescue` gets those bytes and returns only when they
are stored; then either our file stays (`insist`), or the other one returns and the caller learns what was found.

`HardLinks` handles files with several names, while an operation changes many paths:

| the file at a path | what happens |
| --- | --- |
| stays, and all its names are inside the root | it is written in place, so all its names change |
| stays, and some of its names are outside | a new file gets all names inside; those outside keep the old file |
| is replaced by another | only this name changes; if the other file exists already, it gets this name too |

The `link_group` of an entry identifies the file of a name. The tree is walked once, and only if necessary.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache

from mulligan.files.disk import DRAFT_PREFIX, UNSUPPORTED, Disk, Image, Inode, with_bytes
from mulligan.files.resolve import ResolvedPath
from mulligan.values.clock import monotonic_s
from mulligan.values.digest import digest_of
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Content,
    DirEntry,
    Entry,
    FileEntry,
    SymlinkEntry,
    digest_of_beginning,
    same_content,
    same_state,
    whole,
)
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, path_bytes

Rescue = Callable[[Image], None]

SETTLE_LIMIT_S = 0.25
_SETTLE_NAP_S = 0.0002
_RETURNS_MAX = 8
_NO_NAME = frozenset({errno.ENOENT, errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP})


@fast_dataclass(slots=True, frozen=True)
class TargetEntry:
    """The entry that a path should get, with the bytes of a file. `mtime_ns` 0 in the entry means the present time."""

    entry: Entry
    content: Content | None = None


@fast_dataclass(slots=True, frozen=True)
class Swapped:
    """The replacement is done, and `entry` is there now. `race_window`: another process's save may have been lost."""

    entry: Entry
    race_window: bool = False
    content: Content | None = None
    """the bytes of `entry`, if another process has appended to the file meanwhile: the wanted bytes and the appended"""


@fast_dataclass(slots=True, frozen=True)
class FoundEntry:
    """The replacement is not done: the path held something unexpected, and still holds it.

    `in_use`: the process that has the file open has truncated or replaced it.
    """

    image: Image
    in_use: bool = False


@fast_dataclass(slots=True, frozen=True)
class Replacement:
    """One replacement in progress: a path, a draft name beside it, the expected entry and the wanted one."""

    disk: Disk
    resolved: ResolvedPath
    draft: bytes
    expected: Entry
    wanted: TargetEntry
    rescue: Rescue
    insist: bool = False
    seen: Image | None = None
    inside: int = 1
    """the number of the file's names inside the root that change with it; without other names it stays one file"""
    in_use: bool = False
    """another process has the file open for writing: the inode stays, and what that process appends stays too"""
    same_as: ResolvedPath | None = None
    """a path that is the wanted file already: the file gets one more name, if it still has the wanted content"""

    def run(self) -> Swapped | FoundEntry:
        if isinstance(self.expected, DirEntry):
            return self._from_directory()
        if isinstance(self.wanted.entry, DirEntry):
            return self._to_directory()
        if isinstance(self.wanted.entry, Absent):
            return self._remove()
        if isinstance(self.expected, Absent):
            return self._create()
        both_files = isinstance(self.expected, FileEntry) and isinstance(self.wanted.entry, FileEntry)
        if both_files and same_content(self.expected, self.wanted.entry):
            return self._set_metadata()
        return self._replace()

    # Creating and removing.

    def _create(self) -> Swapped | FoundEntry:
        self._stage()
        return self._place_staged()

    def _place_staged(self) -> Swapped | FoundEntry:
        try:
            self.disk.place(self.resolved, self.draft)
        except FileExistsError:
            found = self._now()
            if self.insist and found.replaceable:
                return self._exchange_staged()
            self.disk.discard(self.resolved, self.draft)
            return FoundEntry(found)
        return self._done()

    def _remove(self) -> Swapped | FoundEntry:
        if isinstance(self.expected, Absent):
            found = self._now()
            return Swapped(ABSENT) if found.holds(ABSENT) else FoundEntry(found)
        try:
            self.disk.set_aside(self.resolved, self.draft)
        except FileNotFoundError:
            return FoundEntry(self._now())
        theirs = self._look_at_draft()
        if theirs is None:
            self.disk.drop_original(self.resolved, self.draft)
            return Swapped(ABSENT)
        theirs = self._rescued(theirs)
        if self.insist and theirs.replaceable:
            self.disk.drop_original(self.resolved, self.draft)
            return Swapped(ABSENT)
        return self._return_draft(theirs)

    def _return_draft(self, theirs: Image) -> FoundEntry:
        """Rename the displaced file back. If another process has created a new one, that stays; ours was rescued."""
        try:
            self.disk.place(self.resolved, self.draft)
        except FileExistsError:
            if theirs.replaceable:
                self.disk.discard(self.resolved, self.draft)
            return FoundEntry(self._now())
        return FoundEntry(theirs)

    # Replacing a file or link.

    def _replace(self) -> Swapped | FoundEntry:
        now = self.seen or self._now()
        if self._stays_one_file(now):
            return self._write_in_place()
        try:
            self._stage()
        except PermissionError:
            if self._has_names_elsewhere(now):
                raise
            return self._write_in_place()
        return self._exchange_staged()

    def _stays_one_file(self, now: Image) -> bool:
        if not isinstance(now.entry, FileEntry) or not isinstance(self.wanted.entry, FileEntry):
            return False
        if now.links > 1:
            return now.links <= self.inside
        return self.in_use or is_unlike_ours(now)

    def _has_names_elsewhere(self, now: Image) -> bool:
        """Whether a change of the file itself would also change it outside the root."""
        return now.links > self.inside

    def _exchange_staged(self) -> Swapped | FoundEntry:
        try:
            self.disk.exchange(self.resolved, self.draft)
        except FileNotFoundError:
            self.disk.discard(self.resolved, self.draft)
            return FoundEntry(self._now())
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.disk.discard(self.resolved, self.draft)
            return self._write_in_place()
        theirs = self._look_at_draft()
        if theirs is None:
            self.disk.drop_original(self.resolved, self.draft)
            return self._done()
        theirs = self._rescued(theirs)
        if self.insist and theirs.replaceable:
            self.disk.drop_original(self.resolved, self.draft)
            return self._done()
        return self._exchange_back(theirs)

    def _exchange_back(self, theirs: Image) -> FoundEntry:
        """Exchange the displaced file back. If another process has saved over ours meanwhile, the newer save stays.

        In each round the file under the draft name is safe: it was rescued before, or it is ours.
        """
        held, below = theirs, self.wanted.entry
        for _ in range(_RETURNS_MAX):
            try:
                self.disk.exchange(self.resolved, self.draft)
            except FileNotFoundError:
                return self._return_draft(held)
            returned, held = held, self._draft_image()
            if same_content(held.entry, below) and not held.special:
                break
            held = self._rescued(held)
            below = returned.entry
        if held.replaceable:
            self.disk.discard(self.resolved, self.draft)
        return FoundEntry(self._now())

    def _look_at_draft(self) -> Image | None:
        """The displaced file, once no process writes into it; None if it is the expected one."""
        image = self._draft_image()
        return None if image.holds(self.expected) else image

    def _rescued(self, theirs: Image, *, draft: bool = True) -> Image:
        """Read and rescue the present content."""
        found = with_bytes(self.disk, self.resolved, theirs, draft=self.draft if draft else None)
        self.rescue(found)
        return found

    def _draft_image(self) -> Image:
        is_held_open(self.disk, self.resolved, self.draft)
        return self.disk.image(self.resolved, draft=self.draft, kept=False)

    def _write_in_place(self) -> Swapped | FoundEntry:
        """Write a file that must keep its inode. A save between check and write may be lost: `race_window`."""
        now = self._now()
        if not now.holds(self.expected):
            now = self._rescued(now, draft=False)
            if not self.insist and not (self.in_use and self._has_only_grown(now)):
                return FoundEntry(now, in_use=self.in_use and self._is_cut_or_replaced(now))
        entry, content = self.wanted.entry, self.wanted.content
        if not isinstance(now.entry, FileEntry) or not isinstance(entry, FileEntry) or self._has_names_elsewhere(now):
            return self._remove_and_create()
        assert content is not None
        end_from = self.expected.size if self.in_use and isinstance(self.expected, FileEntry) else None
        end = self.disk.write_in_place(self.resolved, content, end_from=end_from)
        if end:
            content = whole(content) + end
            entry = replace(entry, digest=digest_of(content), size=len(content), mtime_ns=0)
        if (now.entry.mode, now.entry.xattrs) != (entry.mode, entry.xattrs):
            self.disk.set_metadata(self.resolved, entry)
        if entry.mtime_ns:
            self.disk.set_mtime(self.resolved, entry.mtime_ns)
        done = replace(self, wanted=TargetEntry(entry, content))._done()
        return replace(done, race_window=True, content=content if end else None)

    def _has_only_grown(self, now: Image) -> bool:
        """Whether the file begins with all expected bytes and has more after them."""
        old = self.expected
        if not isinstance(now.entry, FileEntry) or not isinstance(old, FileEntry) or now.content is None:
            return False
        return now.entry.size > old.size and digest_of_beginning(now.content, old.size) == old.digest

    def _is_cut_or_replaced(self, now: Image) -> bool:
        if not isinstance(now.entry, FileEntry) or not isinstance(self.expected, FileEntry):
            return True
        is_other = self.seen is not None and (self.seen.stamp or (0,))[0] != (now.stamp or (0,))[0]
        return is_other or now.entry.size < self.expected.size

    def _remove_and_create(self) -> Swapped | FoundEntry:
        """Remove, then create, where names cannot be exchanged: for a moment, the path does not exist."""
        before = self.disk.image(self.resolved)
        removed = replace(self, wanted=TargetEntry(ABSENT)).run()
        if isinstance(removed, FoundEntry):
            return removed
        try:
            made = replace(self, expected=ABSENT).run()
        except OSError:
            with suppress(OSError):
                replace(self, expected=ABSENT, wanted=TargetEntry(before.entry, before.any_content), insist=False).run()
            raise
        return replace(made, race_window=True) if isinstance(made, Swapped) else made

    # Directories and metadata. Replacing a file by a directory, or the reverse, takes two steps. If the second one
    # fails, Mulligan reverts the first.

    def _to_directory(self) -> Swapped | FoundEntry:
        if isinstance(self.expected, Absent):
            return self._make_directory()
        try:
            self.disk.set_aside(self.resolved, self.draft)
        except FileNotFoundError:
            return FoundEntry(self._now())
        theirs = self._look_at_draft()
        if theirs is not None:
            theirs = self._rescued(theirs)
            if not self.insist or not theirs.replaceable:
                return self._return_draft(theirs)
        try:
            made = self._make_directory()
        except OSError:
            with suppress(OSError):
                self.disk.place(self.resolved, self.draft)
            raise
        self.disk.drop_original(self.resolved, self.draft)
        return made

    def _make_directory(self) -> Swapped | FoundEntry:
        assert isinstance(self.wanted.entry, DirEntry)
        try:
            self.disk.make_dir(self.resolved, self.wanted.entry.mode)
        except FileExistsError:
            return FoundEntry(self._now())
        try:
            return self._set_metadata_of(self.wanted.entry, now=DirEntry(self.wanted.entry.mode))
        except OSError:
            with suppress(OSError):
                self.disk.remove_dir(self.resolved)
            raise

    def _from_directory(self) -> Swapped | FoundEntry:
        found = self._now()
        if not isinstance(found.entry, DirEntry):
            return FoundEntry(found)
        if isinstance(self.wanted.entry, DirEntry):
            return self._set_metadata()
        if isinstance(self.wanted.entry, Absent):
            return self._remove_directory()
        self._stage()
        try:
            removed = self._remove_directory()
            if isinstance(removed, Swapped):
                return self._place_over_removed(found.entry)
        except OSError:
            with suppress(OSError):
                self.disk.discard(self.resolved, self.draft)
            raise
        self.disk.discard(self.resolved, self.draft)
        return removed

    def _remove_directory(self) -> Swapped | FoundEntry:
        try:
            self.disk.remove_dir(self.resolved)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise
            return FoundEntry(self._now())
        return Swapped(ABSENT)

    def _place_over_removed(self, before: DirEntry) -> Swapped | FoundEntry:
        try:
            return self._place_staged()
        except OSError:
            with suppress(OSError):
                replace(self, expected=ABSENT, wanted=TargetEntry(before), insist=False).run()
            raise

    def _set_metadata(self) -> Swapped | FoundEntry:
        assert isinstance(self.wanted.entry, FileEntry | DirEntry)
        found = self._now()
        same = self.insist and not found.special and same_content(found.entry, self.expected)
        if not same and not found.holds(self.expected):
            return FoundEntry(found)
        if isinstance(found.entry, FileEntry) and self._has_names_elsewhere(found):
            return self._part_with_metadata(found)
        if self.same_as is not None and self.disk.link_group(self.same_as) != self.disk.link_group(self.resolved):
            return self._join_same(found)
        return self._set_metadata_of(self.wanted.entry, now=found.entry)

    def _part_with_metadata(self, found: Image) -> Swapped | FoundEntry:
        """Give only this name other metadata: a new file with the same bytes. Not if only the time differs."""
        assert isinstance(found.entry, FileEntry) and isinstance(self.wanted.entry, FileEntry)
        if found.holds(self.wanted.entry):
            return Swapped(found.entry)
        content = self.wanted.content or self.disk.image(self.resolved).any_content
        entry = replace(self.wanted.entry, mtime_ns=self.wanted.entry.mtime_ns or found.entry.mtime_ns)
        return replace(self, wanted=TargetEntry(entry, content), seen=found)._replace()

    def _join_same(self, found: Image) -> Swapped | FoundEntry:
        """Make the path a name of the wanted file, which is a file of its own elsewhere."""
        content = self.wanted.content or self.disk.image(self.resolved).any_content
        return replace(self, wanted=TargetEntry(self.wanted.entry, content), seen=found)._replace()

    def _set_metadata_of(self, wanted: FileEntry | DirEntry, *, now: Entry) -> Swapped | FoundEntry:
        """Set mode, attributes and time. If another process removes the path meanwhile, there is nothing to set."""
        try:
            if not same_state(now, wanted):
                self.disk.set_metadata(self.resolved, wanted)
            if wanted.mtime_ns:
                self.disk.set_mtime(self.resolved, wanted.mtime_ns)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            return FoundEntry(self._now())
        return self._done()

    def _now(self) -> Image:
        """The present image, for a comparison: the bytes of a large file are not stored."""
        return self.disk.image(self.resolved, kept=False)

    def _stage(self) -> None:
        entry = self.wanted.entry
        if isinstance(entry, SymlinkEntry):
            self.disk.stage_link(self.resolved, self.draft, entry.target)
        elif self.same_as is None or not self._stage_name(self.same_as):
            assert isinstance(entry, FileEntry) and self.wanted.content is not None
            self.disk.stage_file(self.resolved, self.draft, self.wanted.content, like=entry)

    def _stage_name(self, same_as: ResolvedPath) -> bool:
        """Make one more name of the file at another path, if it still has the wanted content."""
        assert isinstance(self.wanted.entry, FileEntry)
        try:
            self.disk.stage_name(self.resolved, self.draft, same_as, like=self.wanted.entry)
        except OSError as error:
            if error.errno not in _NO_NAME:
                raise
            return False
        if self.disk.image(self.resolved, draft=self.draft, kept=False).holds(self.wanted.entry):
            return True
        self.disk.discard(self.resolved, self.draft)
        return False

    def _done(self) -> Swapped:
        entry = self.wanted.entry
        if isinstance(entry, FileEntry | DirEntry) and not entry.mtime_ns:
            # Another process may have removed it already. That happened after our change.
            with suppress(FileNotFoundError):
                entry = replace(entry, mtime_ns=self.disk.mtime_ns(self.resolved))
        if isinstance(entry, FileEntry) and (entry.link_group is not None or self.same_as is not None):
            now = self._now()
            entry = replace(entry, link_group=now.entry.link_group if isinstance(now.entry, FileEntry) else None)
        return Swapped(entry)


def is_held_open(disk: Disk, resolved: ResolvedPath, name: bytes) -> bool:
    """Whether a process still has the file open for writing after SETTLE_LIMIT_S."""
    limit = None
    while disk.settled(resolved, name) is False:
        now = monotonic_s()
        limit = now + SETTLE_LIMIT_S if limit is None else limit
        if now >= limit:
            return True
        time.sleep(_SETTLE_NAP_S)
    return False


def may_stay_one_file(now: Image, wanted: Entry) -> bool:
    """Whether the file should keep its inode: it has hard links, or an owner or access list that a new file lacks."""
    if not isinstance(now.entry, FileEntry) or not isinstance(wanted, FileEntry):
        return False
    return now.links > 1 or is_unlike_ours(now)


def is_unlike_ours(image: Image) -> bool:
    """Whether the file has an owner or attributes that a file made by this process cannot have."""
    return image.bound or image.owner not in (os.geteuid(), -1)


def creation_mode(wanted: int) -> int:
    """The mode of a new file or directory: the wanted one, reduced by the process's umask."""
    return wanted & ~_umask(os.getpid())


@lru_cache(maxsize=1)
def _umask(pid: int) -> int:
    """Read the umask from /proc if possible: `os.umask` changes it for every thread."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


Aim = tuple[Image, Entry]
"""The image of a path, and the entry that it should get."""


class HardLinks:
    """The hard links among the paths of one operation. `aims` are all paths that it changes.

    With `parts`, names of one file that should get different content become two files. Without it, the file changes
    under all its names, once for each of them.
    """

    def __init__(self, disk: Disk, aims: Mapping[RepoPath, Aim], *, parts: bool = True) -> None:
        self._disk = disk
        self._parts = parts
        numbers = {number for aim in aims.values() for number in _numbers(*aim)}
        self._aims: Mapping[RepoPath, Aim] = aims if numbers else {}
        self._names: Mapping[Inode, list[RepoPath]] = disk.names_of(numbers) if numbers else {}
        self._placed: dict[str, RepoPath] = {}

    def followers(self, path: RepoPath) -> list[RepoPath]:
        """The other names inside the root that stay names of the same file as this one."""
        aim = self._aims.get(path)
        if aim is None or not _stays_that_file(*aim):
            return []
        return [name for name in self._names_of(aim[0]) if name != path and self._follows(name, aim)]

    def all_followers(self) -> list[RepoPath]:
        """The followers of all paths, without paths that the operation changes itself."""
        found = (name for path in self._aims for name in self.followers(path))
        return list(dict.fromkeys(name for name in found if name not in self._aims))

    def inside(self, path: RepoPath) -> int:
        """The number of names of a file that are all inside and change together; 1 if a new file must replace it."""
        aim = self._aims.get(path)
        if aim is None or not _stays_that_file(*aim):
            return 1
        names = self._names_of(aim[0])
        parting = [name for name in names if name != path and not self._follows(name, aim)]
        if len(names) < aim[0].links or any(self._is_name(one, aim[0]) for one in parting):
            return 1
        return len(names)

    @contextmanager
    def same_file(self, path: RepoPath) -> Iterator[ResolvedPath | None]:
        """Another path that is the wanted file already, or None."""
        wanted = self._aims[path][1] if path in self._aims else ABSENT
        if not isinstance(wanted, FileEntry) or wanted.link_group is None:
            yield None
            return
        for name in self._candidates(wanted.link_group):
            resolved = self._holding(name, wanted) if name != path else None
            if resolved is not None:
                with resolved:
                    yield resolved
                return
        yield None

    def was_placed(self, path: RepoPath) -> None:
        """Note that the wanted file is at this path now."""
        group = self._aims[path][1].link_group if path in self._aims else None
        if group is not None:
            self._placed.setdefault(group, path)

    def _candidates(self, group: str) -> list[RepoPath]:
        placed = [self._placed[group]] if group in self._placed else []
        number = _number(group)
        return placed + [name for inode, names in self._names.items() if inode[1] == number for name in names]

    def _holding(self, name: RepoPath, wanted: FileEntry) -> ResolvedPath | None:
        with suppress(OSError, Refused):
            resolved = self._disk.resolve_exactly(name)
            is_that = self._placed.get(wanted.link_group or "") == name or (
                self._disk.link_group(resolved) == wanted.link_group
            )
            if is_that and self._disk.image(resolved, kept=False).holds(wanted):
                return resolved
            resolved.close()
        return None

    def _names_of(self, image: Image) -> list[RepoPath]:
        return [] if image.inode is None else self._names.get(image.inode, [])

    def _follows(self, name: RepoPath, aim: Aim) -> bool:
        if path_bytes(name).rpartition(b"/")[2].startswith(DRAFT_PREFIX):
            return False
        if name not in self._aims:
            return True
        return _stays_that_file(*self._aims[name]) and (not self._parts or same_state(self._aims[name][1], aim[1]))

    def _is_name(self, name: RepoPath, image: Image) -> bool:
        """Whether the path still is a name of that file."""
        with suppress(OSError, Refused), self._disk.resolve_exactly(name) as resolved:
            return self._disk.link_group(resolved) == image.entry.link_group
        return False


def staying_that_file(wanted: Entry, image: Image) -> Entry:
    """The wanted entry in the link group of the present file, so that the path stays one of its names."""
    if not isinstance(wanted, FileEntry) or wanted.link_group == image.entry.link_group:
        return wanted
    return replace(wanted, link_group=image.entry.link_group)


def _stays_that_file(image: Image, wanted: Entry) -> bool:
    both = isinstance(image.entry, FileEntry) and isinstance(wanted, FileEntry)
    return both and image.links > 1 and image.entry.link_group == wanted.link_group


def _numbers(image: Image, wanted: Entry) -> Iterator[int]:
    """The inode numbers of files whose other names must be known."""
    if not isinstance(wanted, FileEntry):
        return
    mtime_ns = image.entry.mtime_ns if isinstance(image.entry, FileEntry) else 0
    if image.inode is not None and not (image.holds(wanted) and wanted.mtime_ns in (0, mtime_ns)):
        yield image.inode[1]
    if wanted.link_group is not None and wanted.link_group != image.entry.link_group:
        yield _number(wanted.link_group)


def _number(group: str) -> int:
    number = group.partition(".")[0]
    return int(number) if number.isdecimal() else -1
