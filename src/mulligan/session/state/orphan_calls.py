"""Calls whose `with` block is gone while they are still open, and how they are aborted.

An interrupt can come at any line: just before `__exit__` begins, in the middle of a commit, or, for a second time, in
the middle of an abort. Then the block is left, the process lives on, and the call is still open: whatever this process
did next would become a part of it. So every block that ends something is on a list from its first line to its last, and
the next call that begins, and `close()`, first abort those whose block is gone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, Protocol
from weakref import ref

from mulligan.session.bus import Isolated
from mulligan.store.fork_locks import fork_safe_lock, release_left_locks
from mulligan.values.here import forget_ended_blocks, holder_of
from mulligan.values.plain import plain

_log = logging.getLogger("mulligan.calls")
_BLOCK_METHODS = frozenset({"__enter__", "__exit__", "__aenter__", "__aexit__"})


class Ending(Protocol):
    """How something that was opened ends. May be asked again, from any thread, after it was itself interrupted."""

    def abort_orphan(self) -> str | None:
        """Undo it, unless it has been committed. What to call it in the warning; None if nothing had to be undone."""
        ...


@plain(slots=True, frozen=True)
class Watched:
    """`holder` is alive as long as the block is; `block` is the object whose methods enter and leave it."""

    holder: ref[Any]
    block: ref[Any]
    ending: Ending

    def forget(self) -> None:
        """It has ended. Any number of times."""
        _watched.pop(id(self), None)


_watched: dict[int, Watched] = {}
_aborting = fork_safe_lock()


def watch(block: Any, ending: Ending) -> Watched:
    """From now until `forget`: abort it if its block is gone.

    Entered by a `with`, a block is gone when the statement is. Entered in another way, it is gone when nothing refers
    to the object any more; so `ending` must not.
    """
    itself = ref(block)
    watched = Watched(holder_of(block) or itself, itself, ending)
    _watched[id(watched)] = watched
    return watched


def abort_orphans() -> None:
    """Abort what was left open, newest first, and reset the context variables that this left set."""
    release_left_locks()
    if any(one.holder() is None for one in list(_watched.values())):
        with _aborting:
            _abort(_orphans())
    forget_ended_blocks()


def _orphans() -> list[Watched]:
    gone = [one for one in list(_watched.values()) if one.holder() is None]
    being_left = _blocks_on_stacks() if gone else []
    return [one for one in reversed(gone) if not any(one.block() is block for block in being_left)]


def _blocks_on_stacks() -> list[object]:
    """Objects that a thread is just entering or leaving: a `with` lets go of its block before `__exit__` has run."""
    found: list[object] = []
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code.co_name in _BLOCK_METHODS:
                found.append(frame.f_locals.get("self"))
            frame = frame.f_back
    return found


def _abort(orphans: Iterable[Watched]) -> None:
    named: set[str] = set()
    for one in orphans:
        name, errors = None, list[Exception]()
        with Isolated(errors):
            name = one.ending.abort_orphan()
        one.forget()
        for error in errors:
            _log.error("A call was interrupted and left open, and could not be aborted.", exc_info=error)
        if name is not None and name not in named:
            named.add(name)
            warn_of_orphan(name)


def warn_of_orphan(name: str) -> None:
    _log.warning("Call %s was interrupted and left open; it has been aborted.", name)


# A child has its own copy of what its parent watches, and nothing to abort: the calls are the parent's.
os.register_at_fork(after_in_child=_watched.clear)
