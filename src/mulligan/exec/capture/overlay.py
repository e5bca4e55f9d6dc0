"""The strategy `overlay`: the command works on an overlay over the root; the real files do not change.

The upper layer has what it did. We read it through a descriptor and expand it to plain entries: whiteouts and opaque
folders become absences, renamed folders become copies of the lower paths they came from. Nothing is applied here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Literal

from mulligan.exec.capture.notify import CaughtPaths, StrategyName
from mulligan.exec.capture.touched_paths import below, look
from mulligan.exec.command import Command
from mulligan.exec.start import StartOptions
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import GIB_BYTES
from mulligan.values.paths import is_inside

UPPER_MAX_BYTES = 4 * GIB_BYTES

# An overlay that root mounts marks files with trusted attributes, one in a user namespace with user attributes.
_PREFIXES = (b"trusted.overlay.", b"user.overlay.")


@fast_dataclass(slots=True, frozen=True)
class IsolatedChange:
    """The state of a path after the command.

    `source` is a path from which its bytes, target and attributes can be read until `close`.
    """

    path: bytes
    kind: Literal["absent", "file", "symlink", "dir", "special"]
    mode: int = 0
    source: bytes | None = None


class Overlay:
    """Isolates one command.

    `changes` is set when it has ended, parents first. Call `close` after they are applied or dropped.
    """

    name: StrategyName = "overlay"

    def __init__(self, size_bytes: int = UPPER_MAX_BYTES) -> None:
        self._size_bytes = size_bytes
        self._root = b""
        self._upper = -1
        self.changes: tuple[IsolatedChange, ...] = ()

    def begin(self, command: Command) -> StartOptions:
        _refuse_unsuitable(command.root)
        self._root = command.root
        return StartOptions(confinement={"overlay": {"root": command.root, "size_bytes": self._size_bytes}})

    def received(self, word: str, fds: list[int]) -> None:
        self._upper = fds[0]

    def end(self) -> CaughtPaths:
        if self._upper < 0:
            return CaughtPaths(frozenset())
        # Read through our descriptor, because the namespace in which the overlay had a path has ended.
        self.changes = tuple(Expansion(b"/proc/self/fd/%d" % self._upper, self._root).changes())
        return CaughtPaths(frozenset(change.path for change in self.changes))

    def close(self) -> None:
        """Delete the upper layer, with every byte of it that was not copied."""
        if self._upper >= 0:
            os.close(self._upper)
            self._upper = -1


class Expansion:
    """Compares an upper layer with the lower layer below it."""

    def __init__(self, upper: bytes, root: bytes) -> None:
        self._upper = upper
        self._root = root

    def changes(self) -> Iterator[IsolatedChange]:
        own = os.stat(self._upper)
        if self._is_changed(self._upper, own, self._root):
            yield IsolatedChange(self._root, "dir", stat.S_IMODE(own.st_mode), self._upper)
        yield from self._inside(b"", self._root)

    def _inside(self, folder: bytes, base: bytes | None) -> Iterator[IsolatedChange]:
        """The changes in a folder of the upper layer; `base` is the lower folder that it is merged with, if any."""
        names = os.listdir(_readable(self._upper + folder))
        if base is not None and base != self._root + folder:
            yield from self._moved_with_folder(folder, base, frozenset(names))
        for name in sorted(names):
            yield from self._changes_at(folder + b"/" + name, None if base is None else base + b"/" + name)

    def _changes_at(self, path: bytes, base: bytes | None) -> Iterator[IsolatedChange]:
        source, real = self._upper + path, self._root + path
        status = os.lstat(source)
        # overlayfs marks a deleted lower file by a character device 0/0.
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            yield from _absences(real)
        elif stat.S_ISDIR(status.st_mode):
            yield from self._folder(path, base, status)
        else:
            yield IsolatedChange(real, kind_of_status(status), stat.S_IMODE(status.st_mode), source)
            yield from (IsolatedChange(path, "absent") for path in below(real))

    def _folder(self, path: bytes, base: bytes | None, status: os.stat_result) -> Iterator[IsolatedChange]:
        source, real = self._upper + path, self._root + path
        merged = self._merged_with(source, path, base)
        before = look(real)
        was_folder = before is not None and stat.S_ISDIR(before.st_mode)
        if merged != real or not was_folder or self._is_changed(source, status, real):
            yield IsolatedChange(real, "dir", stat.S_IMODE(status.st_mode), source)
        if was_folder and merged != real:
            kept = set(os.listdir(_readable(source)))
            yield from (gone for name in _names(real) - kept for gone in _absences(real + b"/" + name))
        yield from self._inside(path, merged)

    def _is_changed(self, source: bytes, status: os.stat_result, real: bytes) -> bool:
        """Whether the folder itself changed. The upper layer also has a folder if only something in it changed."""
        before = os.lstat(real)
        same_owner = (status.st_uid, status.st_gid) == (before.st_uid, before.st_gid)
        return status.st_mode != before.st_mode or not same_owner or attributes_of(source) != attributes_of(real)

    def _merged_with(self, source: bytes, path: bytes, base: bytes | None) -> bytes | None:
        """The lower folder whose content is visible in it: its own, the one it was renamed from, or none."""
        marks = _overlay_marks(source)
        if marks.get(b"opaque") == b"y":
            return None
        redirect = marks.get(b"redirect")
        if redirect is not None:
            if redirect.startswith(b"/"):
                return self._root + redirect
            return (self._root + path if base is None else base).rpartition(b"/")[0] + b"/" + redirect
        status = look(base) if base is not None else None
        return base if status is not None and stat.S_ISDIR(status.st_mode) else None

    def _moved_with_folder(self, folder: bytes, base: bytes, hidden: frozenset[bytes]) -> Iterator[IsolatedChange]:
        """The unchanged files that a renamed folder took along; their bytes are still in the lower layer."""
        for name in sorted(_names(base) - hidden):
            for path in (base + b"/" + name, *below(base + b"/" + name)):
                status = os.lstat(path)
                moved = self._root + folder + path[len(base) :]
                yield IsolatedChange(moved, kind_of_status(status), stat.S_IMODE(status.st_mode), path)


def _absences(real: bytes) -> Iterator[IsolatedChange]:
    """Absences for a removed path and everything below it."""
    if look(real) is not None:
        yield IsolatedChange(real, "absent")
        for path in below(real):
            yield IsolatedChange(path, "absent")


def kind_of_status(status: os.stat_result) -> Literal["file", "symlink", "dir", "special"]:
    if stat.S_ISREG(status.st_mode):
        return "file"
    if stat.S_ISLNK(status.st_mode):
        return "symlink"
    return "dir" if stat.S_ISDIR(status.st_mode) else "special"


def _overlay_marks(path: bytes) -> dict[bytes, bytes]:
    found = {}
    for name in os.listxattr(path, follow_symlinks=False):
        raw = os.fsencode(name)
        for prefix in _PREFIXES:
            if raw.startswith(prefix):
                found[raw[len(prefix) :]] = os.getxattr(path, name, follow_symlinks=False)
    return found


def attributes_of(source: bytes) -> dict[str, bytes]:
    """A source's extended attributes without the overlay's own marks."""
    own = tuple(os.fsdecode(prefix) for prefix in _PREFIXES)
    names = [name for name in os.listxattr(source, follow_symlinks=False) if not name.startswith(own)]
    return {name: os.getxattr(source, name, follow_symlinks=False) for name in names}


def _readable(folder: bytes) -> bytes:
    """Make a folder readable in the upper layer if the command removed the permission; its mode was noted before."""
    if not os.access(folder, os.R_OK | os.X_OK):
        os.chmod(folder, 0o700)
    return folder


def _names(folder: bytes) -> set[bytes]:
    status = look(folder)
    return set(os.listdir(folder)) if status is not None and stat.S_ISDIR(status.st_mode) else set()


def _refuse_unsuitable(root: bytes) -> None:
    mounts = [path for path in _mount_points() if path != root and is_inside(path, root)]
    if root == b"/" or mounts:
        raise _unsupported("submounts", "Other file systems are mounted inside the root; an overlay would hide them.")
    # An unprivileged overlay copies a file up as its own user, which would change the owner of another user's file.
    if os.geteuid() != 0 and os.stat(root).st_uid != os.geteuid():
        raise _unsupported("foreign_owner", "The root belongs to somebody else; an overlay cannot copy its files up.")


def _unsupported(reason: str, message: str) -> Refused:
    return Refused("error", "unsupported_strategy", message, strategy="overlay", reason=reason)


def _mount_points() -> list[bytes]:
    with open("/proc/self/mountinfo", "rb") as table:
        fields = [line.split(b" ", 5)[4] for line in table]
    return [field.decode("unicode_escape").encode("latin-1") for field in fields]
