"""Files with several names, while an operation changes many paths.

| the file at a path | what happens |
| --- | --- |
| stays, and all its names are inside the root | it is written in place, so all its names change |
| stays, and some of its names are outside | a new file takes the place of all names inside; those outside keep theirs |
| gives way to another | only this name changes; if the other file is there already, it gets this name too |

Which file a name stands for is the `link_group` of its entry. The tree is walked once, and only if it has to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from mulligan.values.entries import ABSENT, Entry, FileEntry, group_of, same_state
from mulligan.values.paths import RepoPath, path_bytes
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import DRAFT_PREFIX, Disk, Image
from mulligan.workspace.inode_names import Inode
from mulligan.workspace.places import Spot

Aim = tuple[Image, Entry]
"""What a path holds, and what it shall hold."""


class HardLinks:
    """Those of one operation. `aims`: all paths that it changes.

    `parts`: names of one file for which it wants different things become two files. Else the file changes under all
    its names, again and again.
    """

    def __init__(self, disk: Disk, aims: Mapping[RepoPath, Aim], *, parts: bool = True) -> None:
        self._disk = disk
        self._parts = parts
        numbers = {number for aim in aims.values() for number in _numbers(*aim)}
        self._aims: Mapping[RepoPath, Aim] = aims if numbers else {}
        self._names: Mapping[Inode, list[RepoPath]] = disk.names_of(numbers) if numbers else {}
        self._placed: dict[str, RepoPath] = {}

    def followers(self, path: RepoPath) -> list[RepoPath]:
        """The other names inside the root that shall be names of the same file as this one."""
        aim = self._aims.get(path)
        if aim is None or not _stays_that_file(*aim):
            return []
        return [name for name in self._names_of(aim[0]) if name != path and self._follows(name, aim)]

    def all_followers(self) -> list[RepoPath]:
        """Those that the operation does not change anyway."""
        found = (name for path in self._aims for name in self.followers(path))
        return list(dict.fromkeys(name for name in found if name not in self._aims))

    def inside(self, path: RepoPath) -> int:
        """How many names the file has that are all inside and change together; 1 if it must not be written in place."""
        aim = self._aims.get(path)
        if aim is None or not _stays_that_file(*aim):
            return 1
        names = self._names_of(aim[0])
        parting = [name for name in names if name != path and not self._follows(name, aim)]
        if len(names) < aim[0].links or any(self._is_name(one, aim[0]) for one in parting):
            return 1
        return len(names)

    @contextmanager
    def same_file(self, path: RepoPath) -> Iterator[Spot | None]:
        """Where the wanted file is already, under another name."""
        wanted = self._aims[path][1] if path in self._aims else ABSENT
        if not isinstance(wanted, FileEntry) or wanted.link_group is None:
            yield None
            return
        for name in self._candidates(wanted.link_group):
            spot = self._holding(name, wanted) if name != path else None
            if spot is not None:
                with spot:
                    yield spot
                return
        yield None

    def was_placed(self, path: RepoPath) -> None:
        """The wanted file is at this path now."""
        group = group_of(self._aims[path][1]) if path in self._aims else None
        if group is not None:
            self._placed.setdefault(group, path)

    def _candidates(self, group: str) -> list[RepoPath]:
        placed = [self._placed[group]] if group in self._placed else []
        number = _number(group)
        return placed + [name for inode, names in self._names.items() if inode[1] == number for name in names]

    def _holding(self, name: RepoPath, wanted: FileEntry) -> Spot | None:
        with suppress(OSError, Refused):
            spot = self._disk.resolve_exactly(name)
            is_that = self._placed.get(wanted.link_group or "") == name or (
                self._disk.link_group(spot) == wanted.link_group
            )
            if is_that and self._disk.image(spot, kept=False).holds(wanted):
                return spot
            spot.close()
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
        """Whether it still is a name of that file."""
        with suppress(OSError, Refused), self._disk.resolve_exactly(name) as spot:
            return self._disk.link_group(spot) == group_of(image.entry)
        return False


def staying_that_file(wanted: Entry, image: Image) -> Entry:
    """The path stays a name of the file that is there, which may have other names."""
    if not isinstance(wanted, FileEntry) or wanted.link_group == group_of(image.entry):
        return wanted
    return replace(wanted, link_group=group_of(image.entry))


def _stays_that_file(image: Image, wanted: Entry) -> bool:
    both = isinstance(image.entry, FileEntry) and isinstance(wanted, FileEntry)
    return both and image.links > 1 and group_of(image.entry) == group_of(wanted)


def _numbers(image: Image, wanted: Entry) -> Iterator[int]:
    """Of the files whose names have to be known."""
    if not isinstance(wanted, FileEntry):
        return
    if image.inode is not None and not (image.holds(wanted) and wanted.mtime_ns in (0, _mtime_of(image.entry))):
        yield image.inode[1]
    if wanted.link_group is not None and wanted.link_group != group_of(image.entry):
        yield _number(wanted.link_group)


def _mtime_of(entry: Entry) -> int:
    return entry.mtime_ns if isinstance(entry, FileEntry) else 0


def _number(group: str) -> int:
    number = group.partition(".")[0]
    return int(number) if number.isdecimal() else -1
