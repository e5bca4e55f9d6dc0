"""What a process sees after a reboot: another boot id, a machine that was just started, files with their inodes.

The checks run on the machine that made the recording, so these are replaced in the process that opens a state.
"""

from __future__ import annotations

import builtins
import io
import os
import time
from collections.abc import Callable
from typing import Any

import apsw

from tests.power.recorder import BOOT_FILE


def pretend_boot(name: str) -> None:
    """From now on this process runs under that boot."""
    real_open = builtins.open

    def open_(file: Any, *rest: Any, **more: Any) -> Any:
        if file == BOOT_FILE:
            return io.StringIO(f"{name}\n")
        return real_open(file, *rest, **more)

    builtins.open = open_


def wait_for_no_disk() -> None:
    """From now on this process syncs nothing, so that it is quick."""

    class Quick(apsw.VFS):
        def __init__(self) -> None:
            super().__init__("mulligan-quick", "unix", makedefault=True)

        def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
            return QuickFile("unix", name, flags)

    class QuickFile(apsw.VFSFile):
        def xSync(self, flags: int) -> None:
            return None

    for name in ("fsync", "fdatasync", "sync"):
        setattr(os, name, lambda *_: None)
    _kept.append(Quick())


_kept: list[object] = []


def start_machine() -> None:
    """From now on this process sees a machine that was started at this moment."""
    started_ns, real = time.time_ns(), time.clock_gettime_ns

    def clock_gettime_ns(clock: int) -> int:
        return time.time_ns() - started_ns if clock == time.CLOCK_BOOTTIME else real(clock)

    time.clock_gettime_ns = clock_gettime_ns


def show_inodes(recorded: dict[int, int]) -> None:
    """Files keep their inodes over a reboot: from now on this process sees those of the recording."""

    def showing(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def look(*arguments: Any, **options: Any) -> os.stat_result:
            found = real(*arguments, **options)
            inode = recorded.get(found.st_ino)
            if not inode:
                return found
            exact = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
            return os.stat_result((found.st_mode, inode, *tuple(found)[2:]), exact)

        return look

    for name in ("stat", "lstat", "fstat"):
        real = getattr(os, name)
        setattr(os, name, showing(real))
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            supported.update({getattr(os, name)} if real in supported else ())
