"""Where a search begins, and what is answered when it cannot begin there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from mulligan.values.faults import fault_of_os_error
from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of
from mulligan.values.refusal import Refused
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.tree_cache import TreeCache

SHARED_CACHE = TreeCache()
"""One for the process: it holds nothing but what the disk says again before it is used."""


def admit_all(path: RepoPath) -> bool:
    """For a search in which nothing is hidden from whoever asks."""
    return True


@contextmanager
def refusing_bad_base(base: RepoPath) -> Iterator[None]:
    """Turn what stops a search at its base into an outcome. Errors further down are the walk's to skip."""
    try:
        yield
    except OSError as error:
        raise _refusal(base, error) from error


def base_is_directory(root_fd: int, base: RepoPath) -> bool:
    """Raises OSError when there is neither a directory nor a regular file by that name."""
    if base == ROOT:
        return True
    with Handles(root_fd) as handles:
        mode = os.stat(name_of(base), dir_fd=handles.directory(parent_of(base)), follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "a symlink", base)
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise OSError(errno.ENOTDIR, "a special file", base)
    return stat.S_ISDIR(mode)


def _refusal(base: RepoPath, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return Refused("not_found", "path_not_found", f"{base} does not exist.")
    if error.errno == errno.ELOOP:
        return Refused("forbidden", "symlink_not_allowed", f"{base} leads through a symlink.")
    if error.errno == errno.ENOTDIR:
        return Refused("error", "not_directory", f"{base} is not a directory.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused("forbidden", "forbidden", f"{base} may not be read.")
    return fault_of_os_error(error, f"Searching {base}")
