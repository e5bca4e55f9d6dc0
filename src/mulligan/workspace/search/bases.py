"""Where a search begins, and what is answered when it cannot begin there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from mulligan.values.faults import fault_of_os_error
from mulligan.values.paths import RepoPath
from mulligan.values.refusal import Refused
from mulligan.workspace.search.tree_cache import TreeCache

SHARED_CACHE = TreeCache()
"""One for the process: it holds nothing but what the disk says again before it is used."""


@contextmanager
def refusing_bad_base(base: RepoPath) -> Iterator[None]:
    """Turn what stops a search at its base into an outcome. Errors further down are the walk's to skip."""
    try:
        yield
    except OSError as error:
        raise _refusal(base, error) from error


def _refusal(base: RepoPath, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return Refused("not_found", "path_not_found", f"{base} does not exist.")
    if error.errno == errno.ELOOP:
        return Refused("forbidden", "symlink_not_allowed", f"{base} leads through a symlink.")
    if error.errno == errno.ENOTDIR:
        return Refused("error", "not_a_directory", f"{base} is not a directory.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused("forbidden", "forbidden", f"{base} may not be read.")
    return fault_of_os_error(error, f"Searching {base}")
