"""Aborts calls that are still open after Python left their `with` block.

KeyboardInterrupt can come at any line: just before `__exit__` begins, in the middle of a commit, or a second time in
the middle of an abort. Then Python has left the block, the process continues, and the call is still open: everything
that the process does next would become part of it. So `watch` lists each such block from its first to its last line.
The next call, and `close()`, first abort the listed calls whose block is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from mulligan.session.subscribers import CollectErrors
from mulligan.store.fork_locks import fork_safe_lock, release_interrupted_locks
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.scoped_var import forget_ended_blocks, holder_of

if TYPE_CHECKING:
    from logging import Logger

_BLOCK_METHODS = frozenset({"__enter__", "__exit__", "__aenter__", "__aexit__"})


class AbortableBlock(Protocol):
    """How an open call is aborted. May run again, in any thread, after an interrupt stopped the first attempt."""

    def abort_orphan(self) -> str | None:
        """Abort it unless it is committed. Returns its name for the warning; None if there was nothing to abort."""
        ...


@fast_dataclass(slots=True, frozen=True)
class WatchedBlock:
    """`holder` lives as long as the block does; `block` is the object whose methods enter and leave it."""

    holder: ref[Any]
    block: ref[Any]
    ending: AbortableBlock

    def forget(self) -> None:
        """Stop watching, because the block has ended. May be called again."""
        _watched.pop(id(self), None)


_watched: dict[int, WatchedBlock] = {}
_aborting = fork_safe_lock()


def watch(block: Any, ending: AbortableBlock) -> WatchedBlock:
    """From now until `forget`, abort the block if Python has left it.

    A block that a `with` statement entered is gone when the statement is. A block that was entered in another way is
    gone when nothing refers to its object any more; so `ending` must not refer to it.
    """
    itself = ref(block)
    watched = WatchedBlock(holder_of(block) or itself, itself, ending)
    _watched[id(watched)] = watched
    return watched


def abort_orphans() -> None:
    """Abort the calls that are still open without their block, newest first, and reset their context variables."""
    release_interrupted_locks()
    for one in list(_watched.values()):
        if one.holder() is None:
            with _aborting:
                _abort(_orphans())
            break
    forget_ended_blocks()


def _orphans() -> list[WatchedBlock]:
    gone = [one for one in list(_watched.values()) if one.holder() is None]
    being_left = _blocks_on_stacks() if gone else []
    return [one for one in reversed(gone) if not any(one.block() is block for block in being_left)]


def _blocks_on_stacks() -> list[object]:
    """Objects that a thread is just entering or leaving: a `with` drops its block before `__exit__` has run."""
    found: list[object] = []
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code.co_name in _BLOCK_METHODS:
                found.append(frame.f_locals.get("self"))
            frame = frame.f_back
    return found


def _abort(orphans: Iterable[WatchedBlock]) -> None:
    named: set[str] = set()
    for one in orphans:
        name, errors = None, list[Exception]()
        with CollectErrors(errors):
            name = one.ending.abort_orphan()
        one.forget()
        for error in errors:
            _log().error("A call was interrupted and is still open; Mulligan could not abort it.", exc_info=error)
        if name is not None and name not in named:
            named.add(name)
            warn_of_orphan(name)


def _log() -> Logger:
    import logging  # Only for a warning, because every start of the program would pay for it.

    return logging.getLogger("mulligan.calls")


def warn_of_orphan(name: str) -> None:
    _log().warning("Call %s was interrupted and still open; Mulligan aborted it.", name)


# A forked child has a copy of the list, but the calls belong to its parent, so it must not abort them.
os.register_at_fork(after_in_child=_watched.clear)
