"""What a directory holds, as far as a walk cares."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mulligan.values.plain import plain
from mulligan.workspace.search.ignore import GIT_IGNORE, OWN_IGNORE
from mulligan.workspace.search.stamps import Stamp, is_local, was_at_rest

_GIT = ".git"
MARKS = (_GIT, GIT_IGNORE, OWN_IGNORE)
"""Entries that say something about the others."""


@plain(slots=True, frozen=True)
class Listing:
    """What a directory held: entries in walking order, directories with a slash; and which marks were among them."""

    stamp: Stamp
    trusted: bool
    entries: tuple[str, ...]
    marks: tuple[str, ...]


class Lister:
    """Lists directories, `now_ns` being the time before the first of them."""

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._local_devices: dict[int, bool] = {}

    def list(self, fd: int, stamp: Stamp) -> Listing:
        """A change since the stamp was taken makes the next one differ, whether this listing has seen it or not."""
        names: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    names.append(entry.name + "/")
        text = "".join(names)
        marks = _marks_among(names) if _GIT in text or OWN_IGNORE in text else ()
        if _GIT in marks:
            names = [name for name in names if name not in (_GIT, _GIT + "/")]
        if text.isascii():
            names.sort()
        else:  # code points sort as their UTF-8 does, except for the surrogates that stand for other bytes
            names.sort(key=lambda name: name.encode("utf-8", "surrogateescape"))
        trusted = was_at_rest(stamp, self._now_ns) and self._is_local(fd, stamp)
        return Listing(stamp, trusted, tuple(names), marks)

    def _is_local(self, fd: int, stamp: Stamp) -> bool:
        if stamp.device not in self._local_devices:
            self._local_devices[stamp.device] = is_local(fd)
        return self._local_devices[stamp.device]


def _marks_among(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(mark for mark in MARKS if mark in names or mark + "/" in names)
