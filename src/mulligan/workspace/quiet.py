"""Whether a folder has been left alone since a moment, as far as a short look can tell."""

from __future__ import annotations

import os
import stat
from collections.abc import Set

_GIT = b".git"


def is_quiet(top: bytes, *, since_ns: int, own: Set[bytes], own_since_ns: int, entries_max: int) -> bool:
    """Whether nothing below `top` has changed since; what is our `own`, since a later moment. Git's own files aside.

    It goes by the time that nobody can set. False too if there is more to look at than `entries_max`, or no way to it.
    """
    ahead, left = [top], entries_max
    try:
        while ahead:
            with os.scandir(ahead.pop()) as found:
                for entry in found:
                    left -= 1
                    status = entry.stat(follow_symlinks=False)
                    since = own_since_ns if entry.path in own else since_ns
                    if left < 0 or (status.st_ctime_ns > since and entry.name != _GIT):
                        return False
                    if stat.S_ISDIR(status.st_mode) and entry.name != _GIT:
                        ahead.append(entry.path)
    except OSError:
        return False
    return True
