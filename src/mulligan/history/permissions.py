"""Works in folders whose modes lock even the owner out, and finds metadata that Mulligan cannot restore.

If we may not write into a folder of ours, or pass it, Mulligan opens it for one step and then restores its mode. Before
that, the store records the lifted mode as one more intended entry of the call, so recovery restores the mode if the
process dies.

Mulligan cannot restore an owner, an access list or other names of a file. `LostMetadata` finds what a call removed of
these, for the coverage of the call.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field, replace
from typing import TypeVar

from mulligan.files.disk import Disk, Image
from mulligan.files.replace import is_unlike_ours
from mulligan.values.entries import DirEntry, FileEntry
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, ancestors_of, join, parent_of, path_bytes, to_wire

T = TypeVar("T")

NoteLift = Callable[[RepoPath, DirEntry, DirEntry], None]
"""Records, durably, a folder that is about to be opened: its path, its entry, and its entry while it is open."""

_PASS = 0o500
"""Read permission, too, because the disk opens each folder on the way for reading."""
_WRITE = 0o700


def despite_modes(disk: Disk, path: RepoPath, act: Callable[[], T], note: NoteLift, *, refused: PermissionError) -> T:
    """Call `act` again after it was not permitted, with our own locked directories above `path` opened.

    Raises `refused` if there is none.
    """
    with _opened(disk, path, note) as opened:
        if not opened:
            raise refused
        return act()


def is_shut(disk: Disk, path: RepoPath) -> bool:
    """Whether the path is a folder whose mode locks us out."""
    there = os.path.join(disk.root.path, path_bytes(path))
    try:
        return stat.S_ISDIR(os.lstat(there).st_mode) and not os.access(there, os.R_OK | os.X_OK)
    except OSError:
        return False


@contextmanager
def opened_up(disk: Disk, folder: RepoPath) -> Iterator[None]:
    """Open a shut folder of ours in order to read it. Nothing is recorded: if the process dies, it stays open."""
    with _opened(disk, join(folder, "."), lambda *_: None):
        yield


@contextmanager
def _opened(disk: Disk, path: RepoPath, note: NoteLift) -> Iterator[list[RepoPath]]:
    opened = list[RepoPath]()
    with ExitStack() as closing:
        # From the top, because a folder below a locked one cannot even be read.
        for above in reversed(ancestors_of(path)):
            needed = _WRITE if above == parent_of(path) else _PASS
            shut = _shut_folder(disk, above, needed)
            if shut is not None:
                lifted = replace(shut, mode=shut.mode | needed)
                # Recorded and registered for closing before it is opened, so that nothing in between leaves it open.
                note(above, shut, lifted)
                closing.callback(_set_mode, disk, above, lifted.mode, shut.mode)
                _set_mode(disk, above, shut.mode, lifted.mode)
                opened.append(above)
        yield opened


def _shut_folder(disk: Disk, path: RepoPath, needed: int) -> DirEntry | None:
    """The folder, if it is ours and its mode lacks what is needed."""
    try:
        with disk.resolve_exactly(path) as spot:
            image = disk.image(spot)
    except (FileNotFoundError, NotADirectoryError, Refused):
        return None
    if not isinstance(image.entry, DirEntry) or image.owner != os.geteuid() or image.entry.mode & needed == needed:
        return None
    return image.entry


def _set_mode(disk: Disk, path: RepoPath, now: int, mode: int) -> None:
    with suppress(FileNotFoundError, NotADirectoryError, Refused), disk.resolve_exactly(path) as spot:
        entry = disk.image(spot).entry
        # If the mode is another one, another process has changed it meanwhile, so it stays.
        if isinstance(entry, DirEntry) and entry.mode == now:
            disk.set_metadata(spot, replace(entry, mode=mode))


@fast_dataclass(slots=True)
class LostMetadata:
    """Owners, access lists and hard links of the files of one call, as they were before it."""

    had: dict[RepoPath, Image] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)

    def note(self, path: RepoPath, image: Image) -> None:
        """Note what a path holds before the call changes it."""
        if image.links > 1 or is_unlike_ours(image):
            self.had[path] = replace(image, content=None)
        group = image.entry.link_group
        if image.stamp is not None and group is not None:
            self.groups[image.stamp[0]] = group

    def with_group(self, image: Image) -> Image:
        """The image with the hard-link group that its file had when the call began, though it has one name left."""
        if not self.groups or image.stamp is None or not isinstance(image.entry, FileEntry):
            return image
        # The stamp begins with the inode, which all names of a file share.
        group = image.entry.link_group or self.groups.get(image.stamp[0])
        if group == image.entry.link_group:
            return image
        return replace(image, entry=replace(image.entry, link_group=group))

    def lost(
        self, paths: Iterable[RepoPath], folders: Collection[RepoPath], now: Callable[[RepoPath], Image]
    ) -> list[dict[str, str]]:
        """What is lost, as notes of coverage. For names lost below one of `folders`, the note names the folder."""
        found: dict[tuple[RepoPath, str], None] = {}
        for path in paths:
            reason = _lost(self.had[path], now(path)) if path in self.had else None
            # The outermost folder is what the user knows to have been replaced.
            if reason == "hard_link":
                found[next((one for one in reversed(ancestors_of(path)) if one in folders), path), reason] = None
            elif reason is not None:
                found[path, reason] = None
        return [{"path": to_wire(path), "reason": reason} for path, reason in found]


def _lost(had: Image, now: Image) -> str | None:
    if is_unlike_ours(had) and (now.owner, now.bound) != (had.owner, had.bound):
        return "owner" if had.owner not in (os.geteuid(), now.owner) else "access_list"
    return "hard_link" if now.links < had.links else None
