"""A tree as it is, told completely enough to be compared and put back; and a witness that keeps what it is told."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """Everything about one path that a way back must bring back."""

    kind: str
    mode: int = 0
    data: bytes = b""
    xattrs: tuple[tuple[str, bytes], ...] = ()


ABSENT = Seen("absent")


def see(path: bytes) -> Seen:
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return ABSENT
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return Seen("symlink", data=os.readlink(path))
    if stat.S_ISDIR(status.st_mode):
        return Seen("dir", mode, xattrs=_xattrs(path))
    if stat.S_ISREG(status.st_mode):
        return Seen("file", mode, _bytes_of(path), _xattrs(path))
    return Seen("fifo" if stat.S_ISFIFO(status.st_mode) else "other", mode)


def _bytes_of(path: bytes) -> bytes:
    """A file that its owner may not read is made readable for the moment."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except PermissionError:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        os.chmod(path, mode | 0o400)
        try:
            with open(path, "rb") as file:
                return file.read()
        finally:
            os.chmod(path, mode)


def _xattrs(path: bytes) -> tuple[tuple[str, bytes], ...]:
    names = [name for name in os.listxattr(path) if name.startswith("user.")]
    return tuple(sorted((name, os.getxattr(path, name)) for name in names))


def tree(root: bytes) -> dict[bytes, Seen]:
    """Every path below the root, and the root itself."""
    found = {b".": see(root)}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = see(path)
    return found


class Recorder:
    """A witness that keeps, for each path it is told of, what was there. Being told twice is an error of the teller."""

    def __init__(self, on_told: Callable[[bytes], None] = lambda _: None) -> None:
        self.preimages: dict[bytes, Seen] = {}
        self._on_told = on_told

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        for path in paths:
            assert path not in self.preimages, f"{path!r} told twice"
            self._on_told(path)
            self.preimages[path] = see(path)

    def has(self, path: bytes) -> bool:
        return see(path) == self.preimages[path]


def put_back(touched: Iterable[bytes], before: dict[bytes, Seen]) -> None:
    """What was never told was absent. Deepest first away, then shallowest first back, metadata of folders last."""
    paths = sorted(touched)
    for path in paths:
        _open_up(os.path.dirname(path))
    for path in reversed(paths):
        _take_away(path, before.get(path, ABSENT))
    for path in paths:
        _make(path, before.get(path, ABSENT))
    for path in reversed(paths):
        _dress(path, before.get(path, ABSENT))


def _open_up(folder: bytes) -> None:
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        os.chmod(folder, 0o700)


def _take_away(path: bytes, before: Seen) -> None:
    now = see(path)
    if now.kind == "dir":
        if before.kind != "dir":
            os.rmdir(path)
    elif now.kind == "file" and before.kind == "file":
        return  # written in place, so that other names of it come back too
    elif now != ABSENT:
        os.unlink(path)


def _make(path: bytes, before: Seen) -> None:
    if before.kind == "dir":
        os.makedirs(path, 0o700, exist_ok=True)
    elif before.kind == "file":
        if os.path.lexists(path):
            os.chmod(path, 0o600)
        with open(path, "wb") as file:
            file.write(before.data)
    elif before.kind == "symlink":
        os.symlink(before.data, path)
    elif before.kind == "fifo":
        os.mkfifo(path)


def _dress(path: bytes, before: Seen) -> None:
    if before.kind not in ("file", "dir", "fifo"):
        return
    if before.kind != "fifo":
        for name, _ in _xattrs(path):
            os.removexattr(path, name)
        for name, value in before.xattrs:
            os.setxattr(path, name, value)
    os.chmod(path, before.mode)
