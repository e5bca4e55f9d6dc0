"""What of a tree is on the disk for good: the bytes and names that were synced, compared with what is there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

Synced = dict[int, bytes | tuple[str, ...]]


class SyncWatch:
    """Hears every fsync of this process. All that was below `root` at the beginning counts as synced."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._synced: Synced = {}
        self._held_open: list[int] = []
        self.names: list[str] = []
        """the paths that were synced, under the names that they had then"""
        self._really = os.fsync
        for path in (root, *root.rglob("*")):
            self._note(path)
        monkeypatch.setattr(os, "fsync", self._hear)

    def _hear(self, handle: int) -> None:
        self._really(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        self.names.append(str(path))
        self._note(path)

    def _note(self, path: Path) -> None:
        if not path.is_symlink():
            # Held open, so that no other file is given the number of its inode.
            self._held_open.append(os.open(path, os.O_RDONLY))
            self._synced[path.stat().st_ino] = _held(path)

    def forget(self, path: Path) -> None:
        """It is not synced."""
        del self._synced[path.stat().st_ino]

    def at_risk(self) -> list[str]:
        """Files whose bytes, and directories whose names, a power cut could take now."""
        found = []
        for path in (self._root, *sorted(self._root.rglob("*"))):
            if path.is_symlink() or stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                continue
            if self._synced.get(path.stat().st_ino) != _held(path):
                found.append(str(path.relative_to(self._root)))
        return found


def _held(path: Path) -> bytes | tuple[str, ...]:
    if path.is_dir():
        return tuple(sorted(os.listdir(path)))
    return path.read_bytes()
