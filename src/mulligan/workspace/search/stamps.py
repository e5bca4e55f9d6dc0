"""When a directory's own times can vouch that a listing of it is still true.

Adding, removing or renaming an entry sets a directory's change time to now. So a listing holds as long as device, inode
and times are the same, with two reservations. A change within one tick of the clock after the listing leaves the same
time: a listing is trusted only if the directory had been at rest for longer than a tick when it was made. And network
file systems answer from caches of their own: only local file systems are trusted, the rest is listed anew every time.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

_LOCAL = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"])

_FINE_REST_NS = 100_000_000
_COARSE_REST_NS = 2_500_000_000
_FINE_GRAIN_NS = 1_000_000
"""A change time with digits below this comes from a file system that keeps nanoseconds, in ticks of 10 ms or less."""


class Stamp(NamedTuple):
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def was_at_rest(stamp: Stamp, now_ns: int) -> bool:
    """Whether a change made after `now_ns` is sure to show in the stamp."""
    newest = max(stamp.ctime_ns, stamp.mtime_ns)
    needed = _COARSE_REST_NS if stamp.ctime_ns % _FINE_GRAIN_NS == 0 else _FINE_REST_NS
    return now_ns - newest > needed


def is_local(fd: int) -> bool:
    """Whether an open directory is on a file system whose times can be trusted. False when we cannot tell."""
    mount_id = _mount_id(fd)
    return mount_id is not None and _file_systems(mounts()).get(mount_id) in _LOCAL


def _mount_id(fd: int) -> str | None:
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
            found = [line.split()[1] for line in lines if line.startswith("mnt_id:")]
    except OSError:
        return None
    return found[0] if found else None


def mounts() -> str:
    """What is mounted where, as the kernel tells this process; empty when it does not."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


@lru_cache(maxsize=2)
def _file_systems(mounts: str) -> dict[str, str]:
    """Type of file system by mount id. The type is the first word after the lone dash."""
    rows = [line.split(" - ", 1) for line in mounts.splitlines()]
    return {row[0].split(" ", 1)[0]: row[1].split(" ", 1)[0] for row in rows if len(row) == 2}
