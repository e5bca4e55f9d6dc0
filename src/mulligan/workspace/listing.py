"""Everything below a directory as a person would list it: files, links and directories, in byte order of their paths.
Devices, FIFOs and sockets are `special`.

`.git` is never listed or entered, nor are drafts of ours. Links are listed and never followed. Ignored entries are left
out unless asked for; the base is asked for by name, so it never is one of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from mulligan.values.paths import ROOT, RepoPath, ancestors_of, join, name_of
from mulligan.values.plain import plain
from mulligan.workspace.disk import DRAFT_PREFIX
from mulligan.workspace.search.handles import OPEN_DIRECTORY, Handles
from mulligan.workspace.search.ignore import IgnoreRules, read_sources

Kind = Literal["file", "dir", "symlink", "special"]

_GIT = ".git"
_DRAFT = DRAFT_PREFIX.decode("ascii")
_MARKS = (".gitignore", ".ignore", _GIT)


@plain(slots=True, frozen=True)
class Listed:
    """One entry. `empty` is a directory with nothing in it at all; only known of directories that were entered."""

    path: RepoPath
    kind: Kind
    empty: bool = False


def list_below(
    root_fd: int, base: RepoPath, *, depth: int | None = None, include_ignored: bool = False
) -> Iterator[Listed]:
    """Entries at most `depth` levels below the base, each directory before what is in it.

    Raises OSError when the base cannot be opened as a directory; one further down that cannot be is listed only.
    """
    with Handles(root_fd) as handles:
        rules = IgnoreRules() if include_ignored else _rules_above(handles, base)
        fd = handles.open_directory(base)
    yield from _entered(fd, base, rules, depth=0 if depth is None else depth, include_ignored=include_ignored)


def _rules_above(handles: Handles, base: RepoPath) -> IgnoreRules:
    """The rules that hold inside the base, before its own ignore files."""
    rules = IgnoreRules()
    for directory in reversed(ancestors_of(base)):
        inside = rules if directory == ROOT else rules.child(name_of(directory))
        rules = inside.with_sources(read_sources(handles.directory(directory), _MARKS))
    return rules if base == ROOT else rules.child(name_of(base))


def _entered(fd: int, base: RepoPath, rules: IgnoreRules, *, depth: int, include_ignored: bool) -> Iterator[Listed]:
    """`fd` is ours to close. A `depth` of 0 has no end."""
    try:
        rules = rules if include_ignored else rules.with_sources(read_sources(fd, _MARKS))
        for name, kind in _entries(fd):
            if not rules.is_empty and rules.ignores(name, kind == "dir"):
                continue
            path = join(base, name)
            if kind != "dir" or depth == 1:
                yield Listed(path, kind)
                continue
            below = _open_directory(fd, name)
            yield Listed(path, kind, empty=below is not None and _is_empty(below))
            if below is not None:
                inside = rules.child(name)
                yield from _entered(below, path, inside, depth=max(depth - 1, 0), include_ignored=include_ignored)
    finally:
        os.close(fd)


def _open_directory(fd: int, name: str) -> int | None:
    try:
        return os.open(name, OPEN_DIRECTORY, dir_fd=fd)
    except OSError:
        return None


def _is_empty(fd: int) -> bool:
    with os.scandir(fd) as entries:
        return next(iter(entries), None) is None


def _entries(fd: int) -> list[tuple[str, Kind]]:
    """Names with their kinds; a directory sorts as if its name had a slash, so that whole paths are in order."""
    found: list[tuple[bytes, str, Kind]] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            kind = _kind(entry)
            if entry.name != _GIT and not entry.name.startswith(_DRAFT):
                found.append((os.fsencode(entry.name) + (b"/" if kind == "dir" else b""), entry.name, kind))
    return [(name, kind) for _, name, kind in sorted(found)]


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return "symlink"
    if entry.is_dir(follow_symlinks=False):
        return "dir"
    return "file" if entry.is_file(follow_symlinks=False) else "special"
