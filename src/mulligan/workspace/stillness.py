"""Whether anything below a root has moved since somebody last looked, told by the kernel where it can be.

The first question is answered without a watcher, so that a process that asks once pays nothing. From the second on the
kernel reports every change below the root; as long as it reports none, the answer is the same number. Without a watcher
(another system, no watches left) every answer is a new number: nothing is ever taken for granted.

`.git` is left out, because git's own files have stamps that are cheaper to look at. Writes through memory maps and
through other names of hard links are not reported.
"""

from __future__ import annotations

import os

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.faults import MulliganError
from mulligan.workspace.exec.watch import Watcher


class Stillness:
    """For any thread. Close it."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._lock = fork_safe_lock()
        self._watcher: Watcher | None = None
        self._asked = self._refused = False
        self._epoch = 0

    @property
    def is_watching(self) -> bool:
        return self._watcher is not None

    def epoch(self) -> int:
        """A number that stays the same while nothing below the root moves."""
        with self._lock:
            if self._watcher is None:
                self._epoch += 1
                self._start()
            elif self._has_moved(self._watcher):
                self._epoch += 1
            return self._epoch

    def _start(self) -> None:
        """What moves while the watches are being set is before the number we are about to give."""
        if self._asked and not self._refused:
            try:
                self._watcher = Watcher(self._root, frozenset({os.path.join(self._root, b".git")}))
            except (MulliganError, OSError):
                self._refused = True
        self._asked = True

    @staticmethod
    def _has_moved(watcher: Watcher) -> bool:
        dirty = watcher.take()
        return bool(dirty.paths or dirty.moved_away or dirty.overflowed)

    def close(self) -> None:
        with self._lock:
            if self._watcher is not None:
                self._watcher.close()
                self._watcher, self._refused = None, True
