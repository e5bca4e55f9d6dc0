"""How much is kept of what every file was before a change that is seen only afterwards, and what git has of it.

Kept small: a tracked file that git calls clean is a reference into git's object store; files over 2 MiB and what
exceeds 512 MiB in all are not kept, and neither are git's own objects. What is not kept cannot be put back, and the
call says so for each such path that changed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping

from mulligan.values.entries import Xattrs
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import path_bytes
from mulligan.values.plain import plain
from mulligan.workspace.disk import read_xattrs
from mulligan.workspace.git import GitFailed, GitReader, oid_of, reading

FILE_MAX_BYTES = 2 * MIB_BYTES
WORKSPACE_MAX_BYTES = 512 * MIB_BYTES

_LOOSE = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
"""git's name of an object that has a file to itself"""


@plain(slots=True, frozen=True)
class InGit:
    """A clean tracked file: its bytes are git's, the rest is as it was."""

    oid: str
    size: int
    mode: int
    mtime_ns: int
    ctime_ns: int
    xattrs: Xattrs = ()


def clean_files(root: bytes, known: Collection[bytes]) -> dict[bytes, InGit]:
    """Tracked files among the known paths whose bytes git has, of the size it has them in.

    Others are what attributes made of git's bytes.
    """
    try:
        with reading(root) as git:
            return {} if git is None else dict(_found_clean(git, root, known))
    except GitFailed:
        return {}


def _found_clean(git: GitReader, root: bytes, known: Collection[bytes]) -> Iterator[tuple[bytes, InGit]]:
    dirty = {row[3:] for row in git.status(exact=True).split(b"\0") if row}
    tracked = [one for one in git.staged() if stat.S_ISREG(one.mode) and path_bytes(one.path) not in dirty]
    sizes = _sizes(git, [one.oid for one in tracked])
    for one in tracked:
        path = os.path.join(root, path_bytes(one.path))
        found = _as_it_is(path, one.oid) if path in known else None
        if found is not None and found.size == sizes.get(one.oid):
            yield path, found


def git_contents(root: bytes, oids: Mapping[bytes, str]) -> dict[bytes, bytes]:
    """The bytes of files by git's names for them; without those that are nowhere any more."""
    try:
        with reading(root) as git:
            contents = {} if git is None else git.contents(list(oids.values()))
    except GitFailed:
        contents = {}
    found = {path: contents[oid] if oid in contents else _if_it_is_still(path, oid) for path, oid in oids.items()}
    return {path: data for path, data in found.items() if data is not None}


def lacks(folder: bytes, names: Iterable[bytes]) -> bool:
    """Whether a repository's object store has lost something with these files of it: what was packed, it still has."""
    parts = [name.split(b"/") for name in names]
    oids = {b"".join(part).decode("ascii") for part in parts if len(part) == 2 and _LOOSE.fullmatch(b"".join(part))}
    if any(part[0] == b"pack" and part[-1].endswith(b".pack") for part in parts):
        return True
    try:
        with reading(folder) as git:
            return bool(oids) and (git is None or len(_sizes(git, list(oids))) < len(oids))
    except GitFailed:
        return True


def _if_it_is_still(path: bytes, oid: str) -> bytes | None:
    """A file's bytes, if they are what git calls by this name."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    return data if oid_of(data, like=oid) == oid else None


def _sizes(git: GitReader, oids: list[str]) -> dict[str, int]:
    asked = "".join(f"{oid}\n" for oid in oids).encode("ascii")
    rows = [row.split(b" ") for row in git.run("cat-file", "--batch-check", "--buffer", stdin=asked).splitlines()]
    return {row[0].decode("ascii"): int(row[2]) for row in rows if len(row) == 3}


def _as_it_is(path: bytes, oid: str) -> InGit | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return None
        mode = stat.S_IMODE(status.st_mode)
        return InGit(oid, status.st_size, mode, status.st_mtime_ns, status.st_ctime_ns, read_xattrs(handle))
    finally:
        os.close(handle)
