"""Whether one path is ignored, by the rules that a walk uses."""

from __future__ import annotations

import os

from mulligan.files.tree.directories import Handles
from mulligan.files.tree.ignore import (
    GIT_IGNORE,
    NO_SOURCES,
    OWN_IGNORE,
    IgnoreSources,
    read_above,
    read_sources,
    rules_inside,
)
from mulligan.values.paths import ROOT


def is_ignored(root: str | bytes | os.PathLike[str], path: str, is_dir: bool) -> bool:
    """Whether `path` below `root` is ignored, by itself or by a directory above it."""
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *above, name = [name for name in path.split("/") if name not in ("", ".")] or [ROOT]
        with Handles(root_fd) as handles:
            rules = rules_inside(read_above(root_fd)).with_sources(_sources_at(handles, "."))
            for depth, directory in enumerate(above):
                if rules.ignores(directory, is_dir=True):
                    return True
                rules = rules.child(directory).with_sources(_sources_at(handles, "/".join(above[: depth + 1])))
        return rules.ignores(name, is_dir)
    finally:
        os.close(root_fd)


def _sources_at(handles: Handles, directory: str) -> IgnoreSources:
    try:
        return read_sources(handles.directory(directory), (GIT_IGNORE, OWN_IGNORE, ".git"))
    except OSError:
        return NO_SOURCES
