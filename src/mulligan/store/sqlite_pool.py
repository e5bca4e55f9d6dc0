"""The connections of one store, shared by the threads of a process, and what happens to them when the process forks.

A forked child has only the thread that forked. A lock of SQLite that another thread held at that moment stays locked in
the child for ever: SQLite has such locks for its allocator, page cache, random numbers and list of file systems, and
for each open file. SQLite also remembers file locks of the parent that the child does not have. So:

- the lock of the allocator is turned off, because threads take it without a connection, too;
- before a fork Mulligan waits until no other thread has a connection, and closes all connections: the child inherits
  neither a held lock nor an open file;
- it waits for imports of other threads, too: the child could not import what they were importing;
- the child opens its first connection in a thread of its own. If a program that embeds us uses SQLite without us, one
  of its threads may have held a lock; then that first connection never opens, and the child gets `forked_unsafely`.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from weakref import WeakSet

import apsw

from mulligan.store.fork_locks import importing_threads
from mulligan.store.protocol import Durability
from mulligan.store.sqlite_file import BUSY_LIMIT_S, PooledConnection, connect, fault_of_sqlite
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError, fault

FORK_WAIT_S = BUSY_LIMIT_S
"""How long a fork waits for threads that use a connection."""

_POLL_S = 0.0002
_COLLECT_AFTER_S = 0.1
_CHECK_LIMIT_S = 10.0


class ConnectionPool:
    """Connections to one file. Each is used by one thread at a time and by no process but the one that opened it.

    `stop_left` ends transactions that an interrupt kept from ending; it runs before a fork that has to wait.
    `after_fork` runs in a forked child, before anything else uses the pool there.
    """

    def __init__(
        self,
        path: str,
        *,
        durability: Durability,
        vfs: str | None,
        stop_left: Callable[[], None],
        after_fork: Callable[[], None],
    ) -> None:
        self._path, self._durability, self._vfs = path, durability, vfs
        self._idle: list[PooledConnection] = []
        # Weak, because a connection that an interrupt took from its user closes when it is collected.
        self._open: WeakSet[PooledConnection] = WeakSet()
        self.stop_left, self.after_fork = stop_left, after_fork
        with _process.changing:
            _process.pools.add(self)

    def take(self) -> PooledConnection:
        """A connection for this thread. Raises the faults of opening a store."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._opened()
            connection.user = threading.get_ident()
            # Read after `user` is set: the thread that forks sets this first and looks at users then.
            if not _process.forker or _process.may_go_on(connection):
                return connection
            self._return(connection)
            with _process.forking:
                pass

    def give_back(self, connection: PooledConnection) -> None:
        try:
            if not connection.in_transaction:
                self._return(connection)
                return
        except apsw.ConnectionClosedError:
            # Discarded, because the thread that had it seemed to have gone.
            return
        self.discard(connection)

    def has_idle(self) -> bool:
        return bool(self._idle)

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self.discard(self._idle.pop())

    def _return(self, connection: PooledConnection) -> None:
        connection.user = 0
        self._idle.append(connection)

    def _opened(self) -> PooledConnection:
        try:
            with _process.changing:
                if _process.must_check:
                    _process.check(lambda: self._connect().pragma("user_version"))
                connection = self._connect()
                self._open.add(connection)
                return connection
        except apsw.Error as error:
            raise fault_of_sqlite(error, "Opening the store") from error

    def _connect(self) -> PooledConnection:
        return connect(self._path, durability=self._durability, vfs=self._vfs)

    def discard(self, connection: PooledConnection) -> None:
        """Close it, and undo its transaction if it has one."""
        with _process.changing:
            self._drop(connection)

    def _drop(self, connection: PooledConnection) -> None:
        self._open.discard(connection)
        connection.close(True)

    def drained(self, forker: int) -> bool:
        """Close what no thread uses; whether no other thread than `forker` uses any. Caller has `changing`."""
        with suppress(IndexError):
            while True:
                self._drop(self._idle.pop())
        living = sys._current_frames()
        for connection in list(self._open):
            # The thread that had it was interrupted and has ended, and a traceback may still refer to it.
            if connection.user and connection.user not in living:
                self._drop(connection)
        return all(connection.user == forker for connection in self._open)

    def users(self) -> Iterable[tuple[PooledConnection, int]]:
        return [(connection, connection.user) for connection in self._open]

    def abandon(self) -> None:
        """In a forked child: never use and never close what the parent opened. Closing could undo its transaction."""
        left = [*self._idle, *self._open]
        self._idle, self._open = [], WeakSet()
        if left:
            import ctypes  # Hardly ever needed: only after a fork inside a transaction, or without Python's hooks.

            for connection in left:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        self.after_fork()


class _Process:
    """What the pools of this process share. One thread at a time forks."""

    def __init__(self) -> None:
        self.pools: WeakSet[ConnectionPool] = WeakSet()
        self.forker = 0
        """The thread that is about to fork, else 0."""
        self.must_check = False
        self.is_unsafe = False
        self._new_locks()

    def _new_locks(self) -> None:
        self.forking = threading.RLock()
        """Held from before a fork until after it; threads that want a connection meanwhile wait for it."""
        self.changing = threading.RLock()
        """Held to open or close a connection, and during the fork itself. Taken last of all locks here."""

    def may_go_on(self, connection: PooledConnection) -> bool:
        """Whether the thread that forks does not wait for us, or waits until we have done more than this."""
        me = threading.get_ident()
        with self.changing:
            others = [other for pool in self.pools for other, user in pool.users() if user == me]
        return self.forker in (0, me) or others != [connection] or me in importing_threads()

    def before_fork(self) -> None:
        self.forking.acquire()
        self.forker = threading.get_ident()
        began_s = monotonic_s()
        deadline_s, collect_s = began_s + FORK_WAIT_S, began_s + _COLLECT_AFTER_S
        while True:
            if monotonic_s() > collect_s:
                # A connection that an interrupt took from its user may be garbage that waits to be collected.
                collect_s = deadline_s
                for pool in list(self.pools):
                    pool.stop_left()
                gc.collect()
            self.changing.acquire()
            quiet = [pool.drained(self.forker) for pool in self.pools]
            if (all(quiet) and importing_threads() <= {self.forker}) or monotonic_s() > deadline_s:
                return
            self.changing.release()
            time.sleep(_POLL_S)

    def after_fork_in_parent(self) -> None:
        # An interrupt may have ended `before_fork` anywhere; Python forks all the same. A lock that is not ours raises.
        if self.forker == threading.get_ident():
            self.forker = 0
        for lock in (self.changing, self.forking):
            with suppress(RuntimeError):
                lock.release()

    def after_fork_in_child(self) -> None:
        me = threading.get_ident()
        used = {user for pool in self.pools for _, user in pool.users()}
        self.is_unsafe = self.is_unsafe or bool(used - {0, me})
        self.must_check, self.forker = True, 0
        self._new_locks()
        for pool in list(self.pools):
            pool.abandon()

    def check(self, use: Callable[[], object]) -> None:
        """Whether SQLite works in this forked child: a thread tries, because it may never come back."""
        if not self.is_unsafe:
            trial = threading.Thread(target=_tried, args=(use,), name="mulligan-fork-check", daemon=True)
            trial.start()
            trial.join(_CHECK_LIMIT_S)
            self.is_unsafe = trial.is_alive()
        if self.is_unsafe:
            raise _forked_unsafely()
        self.must_check = False


def _tried(use: Callable[[], object]) -> None:
    # The caller does the same next, and raises.
    with suppress(apsw.Error):
        use()


def _forked_unsafely() -> MulliganError:
    return fault(
        "forked_unsafely",
        "This process was forked while another thread of its parent used SQLite, whose locks stay locked here. "
        "Start it anew instead: multiprocessing.get_context('spawn'), or subprocess.",
    )


_process = _Process()
os.register_at_fork(
    before=_process.before_fork,
    after_in_parent=_process.after_fork_in_parent,
    after_in_child=_process.after_fork_in_child,
)
