"""What a file of our making would not have: another owner, an access list, other names.

No way back can give a file these again, so what a call took of them is said in its coverage. And a file with other
names changes under all of them at once: those are the call's changes too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from mulligan.values.entries import FileEntry, group_of
from mulligan.values.paths import RepoPath, ancestors_of, to_wire
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import is_unlike_ours


class Traits:
    """Those of the files that one call has to do with."""

    def __init__(self) -> None:
        self.had: dict[RepoPath, Image] = {}
        self._groups: dict[int, str] = {}

    def note(self, path: RepoPath, image: Image) -> None:
        """What a path holds before the call changes it."""
        if image.links > 1 or is_unlike_ours(image):
            self.had[path] = replace(image, content=None)
        group = group_of(image.entry)
        if image.stamp is not None and group is not None:
            self._groups[image.stamp[0]] = group

    def with_group(self, image: Image) -> Image:
        """The last name of a file that had more when the call began is still one of that group."""
        if not self._groups or image.stamp is None or not isinstance(image.entry, FileEntry):
            return image
        group = image.entry.link_group or self._groups.get(image.stamp[0])
        return (
            image if group == image.entry.link_group else replace(image, entry=replace(image.entry, link_group=group))
        )

    def lost(
        self, paths: Iterable[RepoPath], folders: Collection[RepoPath], now: Callable[[RepoPath], Image]
    ) -> list[dict[str, str]]:
        """What is not there any more, as lines of coverage. Names lost below one of `folders` are told as its own."""
        found: dict[tuple[RepoPath, str], None] = {}
        for path in paths:
            reason = _lost(self.had[path], now(path)) if path in self.had else None
            if reason == "hard_link":
                found[next((one for one in reversed(ancestors_of(path)) if one in folders), path), reason] = None
            elif reason is not None:
                found[path, reason] = None
        return [{"path": to_wire(path), "reason": reason} for path, reason in found]


def _lost(had: Image, now: Image) -> str | None:
    if is_unlike_ours(had) and (now.owner, now.bound) != (had.owner, had.bound):
        return "owner" if had.owner not in (os.geteuid(), now.owner) else "access_list"
    return "hard_link" if now.links < had.links else None
