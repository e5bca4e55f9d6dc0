"""Originals of paths that are not captured. The store may not have their bytes, so a copy lies in the root meanwhile.

Before Mulligan writes such a path, it copies what is there to a file in the root directory, which no effect removes
together with a folder. Abort and recovery put the copy back. The name says the call, the path's number in it and what
the copy is of, so a call that writes a path several times has a copy of each state. Where nothing was, an empty file
says so: without it, a command made the file, whose bytes nobody has, and it stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mulligan.values.content import Content
from mulligan.values.digest import digest_of
from mulligan.values.entries import Entry, FileEntry, kind_of, same_content
from mulligan.values.paths import ROOT, RepoPath, path_from_bytes
from mulligan.workspace.disk import DRAFT_PREFIX, Disk, Image
from mulligan.workspace.places import Spot

_ORIGINAL = b"-original-"
_COPY = FileEntry(digest_of(b""), 0, 0o600)
_DIGITS = 16


def original_name(draft: bytes, entry: Entry) -> bytes:
    """`draft` is the path's own draft name in its call."""
    told = entry.digest.partition(":")[2][:_DIGITS] if isinstance(entry, FileEntry) else kind_of(entry)
    return draft + _ORIGINAL + told.encode("ascii")


@contextmanager
def _spot_of(disk: Disk, path: RepoPath, name: bytes) -> Iterator[Spot]:
    """The copy, as a spot that is judged by the path it is a copy of."""
    with disk.resolve_exactly(path_from_bytes(name)) as found:
        yield Spot(path, found.place, found.parent, found.name)


def keep_original(disk: Disk, path: RepoPath, draft: bytes, image: Image) -> bytes:
    """Copy what an image of the path holds, unless the call has that copy already. The copy's name."""
    name = original_name(draft, image.entry)
    content: Content = b"" if image.any_content is None else image.any_content
    with _spot_of(disk, path, name) as spot, suppress(FileExistsError):
        disk.stage_file(spot, name, content, like=_COPY)
    return name


def find_original(disk: Disk, path: RepoPath, draft: bytes, entry: Entry) -> Image | None:
    """The copy of what the path held, if there is one and it is whole."""
    with _spot_of(disk, path, original_name(draft, entry)) as spot:
        image = disk.image(spot)
    if not isinstance(image.entry, FileEntry):
        return None
    is_whole = not isinstance(entry, FileEntry) or same_content(image.entry, entry)
    return image if is_whole else None


def discard_original(disk: Disk, path: RepoPath, name: bytes) -> None:
    with _spot_of(disk, path, name) as spot:
        disk.discard(spot, name)


def discard_abandoned(disk: Disk, is_open: Callable[[str], bool]) -> None:
    """Remove the copies of calls that have ended. `is_open` is asked with the end of a call's id."""
    with disk.resolve(ROOT) as root:
        names = [name for name in disk.children(root) if name.startswith(DRAFT_PREFIX) and _ORIGINAL in name]
    for name in names:
        call = os.fsdecode(name[len(DRAFT_PREFIX) :]).partition("-")[0]
        if not is_open(call):
            with suppress(OSError):
                discard_original(disk, path_from_bytes(name), name)
