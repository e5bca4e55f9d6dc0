"""Locks and threads of a process that forks.

A forked child has one thread, so no other thread can release its locks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import _bootstrap
from types import CodeType, FrameType
from typing import Any, TypeAlias
from weakref import ref

from mulligan.values.errors import MulliganError, fault

_FORK_WAIT_S = 30.0
_locks: set[ref[threading.RLock]] = set()
"""Not a WeakSet, which runs Python code for each change: every call creates locks, so that would cost time."""


def fork_safe_lock() -> threading.RLock:
    """A lock that a forked child finds free, unless the thread that forked holds it.

    It is for short sections. If another thread was inside at the fork, the data is half changed in the child. So it may
    only protect data for which that does no harm: a cache, a table of objects, a counter.
    """
    lock = threading.RLock()
    _locks.add(ref(lock, _locks.discard))
    return lock


_shared: set[ref[threading.RLock]] = set()


def shared_lock() -> threading.RLock:
    """A fork-safe lock for an object that many threads share. No thread may hold it while it begins a call.

    An interrupt can arrive after the last line of a `with lock:` block and before the lock is released. A thread that
    begins a call should hold none of these locks, so `release_interrupted_locks` can release them.
    """
    lock = fork_safe_lock()
    _shared.add(ref(lock, _shared.discard))
    return lock


def release_interrupted_locks() -> None:
    """Release the shared locks that an interrupt kept this thread from releasing. For a thread that begins a call."""
    for reference in list(_shared):
        lock = reference()
        if lock is not None and lock._is_owned():  # type: ignore[attr-defined]
            release_interrupted_lock(lock)


def release_interrupted_lock(lock: threading.RLock) -> None:
    """Release one such lock, if this thread holds it."""
    if lock._is_owned():  # type: ignore[attr-defined]
        lock._release_save()  # type: ignore[attr-defined]


class _Running:
    """An object that lives while its thread runs."""


ThreadMark: TypeAlias = ref[_Running]
"""A weak reference that identifies one thread.

It is dead when the thread has ended; Python gives the thread's ident to a later thread.
"""


class _Here(threading.local):
    """`mark` identifies the thread that reads it."""

    def __init__(self) -> None:
        # No variable holds the object itself: a traceback refers to variables, and would keep it alive after its
        # thread.
        self._running = _Running()
        self.mark: ThreadMark = ref(self._running)


here = _Here()


def is_any_running(codes: frozenset[CodeType]) -> bool:
    """Whether a thread is inside one of these functions, or in what they call."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code in codes:
                return True
            frame = frame.f_back
    return False


no_fork = fork_safe_lock()
"""Held while another library takes a lock of its own: a fork in another thread waits until it is released."""


def _before_fork() -> None:
    no_fork.acquire(timeout=_FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):  # The wait timed out or was interrupted: this thread does not hold the lock.
        no_fork.release()


def _after_fork_in_child() -> None:
    _after_fork_in_parent()
    for reference in list(_locks):
        lock = reference()
        # Python's own conditions and log handlers use these two methods for the same purpose.
        if lock is not None and not lock._is_owned():  # type: ignore[attr-defined]
            lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


_module_locks: dict[str, Callable[[], Any]] = getattr(_bootstrap, "_module_locks", {})
"""The lock of each module that a thread is importing. Python offers no public way to see them."""


def importing_threads() -> set[int]:
    """Threads that are importing a module. A child that is forked now could never import that module."""
    locks = [reference() for reference in list(_module_locks.values())]
    return {lock.owner for lock in locks if lock is not None and lock.owner is not None}


def forked_unsafely() -> MulliganError:
    return fault(
        "forked_unsafely",
        "This process was forked while another thread of its parent used SQLite, whose locks stay locked here. "
        "Start a new process instead: multiprocessing.get_context('spawn'), or subprocess.",
    )
