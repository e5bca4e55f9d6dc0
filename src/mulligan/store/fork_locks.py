"""Locks of Python in a process that forks: a forked child has one thread, and no other one that could release them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import _bootstrap
from typing import Any
from weakref import WeakSet, WeakValueDictionary

_FORK_WAIT_S = 30.0
_locks: WeakSet[threading.RLock] = WeakSet()


def fork_safe_lock() -> threading.RLock:
    """A lock that a forked child finds free, unless the thread that forked holds it.

    It is for short sections. What it protects may be half changed in the child if another thread was inside, so each
    section must be one that can be entered anew: a cache, a table of objects, a counter.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


_shared: WeakValueDictionary[int, threading.RLock] = WeakValueDictionary()


def shared_lock() -> threading.RLock:
    """The same for an object that many threads share. It must not be held where a call may begin.

    Raised by a debugger's trace function, an interrupt can come after the last line of a `with lock:` and before the
    lock is released. A thread that begins a call holds none of these, so `release_left_locks` can release them.
    """
    lock = fork_safe_lock()
    _shared[id(lock)] = lock
    return lock


def release_left_locks() -> None:
    """For a thread that is about to begin a call: release what an interrupt has kept it from releasing."""
    for reference in _shared.valuerefs():
        lock = reference()
        if lock is not None and lock._is_owned():  # type: ignore[attr-defined]
            release_left_lock(lock)


def release_left_lock(lock: threading.RLock) -> None:
    """The same for one lock. Does nothing if this thread does not hold it."""
    if lock._is_owned():  # type: ignore[attr-defined]
        lock._release_save()  # type: ignore[attr-defined]


no_fork = fork_safe_lock()
"""Hold it where another library takes a lock of its own: a fork in another thread waits until it is free."""


def _before_fork() -> None:
    no_fork.acquire(timeout=_FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):  # The wait was too long, or was interrupted: the lock is not ours.
        no_fork.release()


def _after_fork_in_child() -> None:
    _after_fork_in_parent()
    for lock in list(_locks):
        # Python's own conditions and log handlers use these two methods for the same purpose.
        if not lock._is_owned():  # type: ignore[attr-defined]
            lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


_module_locks: dict[str, Callable[[], Any]] = getattr(_bootstrap, "_module_locks", {})
"""The lock of each module that a thread is importing. Python gives no other way to see them."""


def importing_threads() -> set[int]:
    """Threads that are in the middle of an import: a child forked now could never import the same module."""
    locks = [reference() for reference in list(_module_locks.values())]
    return {lock.owner for lock in locks if lock is not None and lock.owner is not None}
