"""The background process that makes hooks quick: it has the store open and the tree in its head.

One for a store and a mount namespace, held apart by a lock; reached through a socket in the state directory that only
its owner can enter. It starts when a hook finds none, and ends when it has heard nothing for a while, when it is asked
to end, and when its socket is not its own any more. All that it knows is also in the store, so it may be killed at any
moment.
"""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from mulligan.agents.hooks.dispatch import DONE, FAILED, Dispatcher, OpenRecorder
from mulligan.agents.hooks.keeper_socket import SOCKET
from mulligan.agents.hooks.spool import private_folder
from mulligan.store.sqlite_file import refuse_untrusted
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError

LOCK = "keeper.lock"
IDLE_S = 900.0
_TICK_S = 1.0
_MESSAGE_MAX = 80 * 1024 * 1024

Sync = Callable[[str], None]
"""Syncs what the process of this name left in `originals/`."""


class Keeper:
    """Listens until there is no reason to. `sync` syncs what a process that has ended left to us."""

    def __init__(self, dispatcher: Dispatcher, sync: Sync, *, idle_s: float = IDLE_S) -> None:
        self._dispatcher = dispatcher
        self._syncing = SyncThread(sync)
        self._address = os.path.join(dispatcher.folder, SOCKET)
        self._idle_s = idle_s
        self._heard_at = monotonic_s()
        self._stopping = False

    def serve(self) -> None:
        listener = self._listen()
        # By its whole name: a folder that was moved is where nobody looks for us.
        own = os.stat(self._address).st_ino
        threading.Thread(target=self._dispatcher.take_up_spool, daemon=True).start()
        try:
            while not self._is_over(own):
                self._hear(listener)
        finally:
            # First the name, so that whoever comes now starts another one.
            with suppress(OSError):
                if os.stat(self._address).st_ino == own:
                    os.unlink(self._address)
            listener.close()
            self._syncing.close()
            self._dispatcher.close()

    def _listen(self) -> socket.socket:
        """By a name without folders: what the system takes for the name of a socket is short."""
        os.chdir(self._dispatcher.folder)
        with suppress(FileNotFoundError):
            os.unlink(SOCKET)
        before = os.umask(0o177)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(SOCKET)
        finally:
            os.umask(before)
        listener.listen(64)
        listener.settimeout(_TICK_S)
        return listener

    def _is_over(self, own: int) -> bool:
        try:
            replaced = os.stat(self._address).st_ino != own
        except OSError:
            replaced = True
        idle = monotonic_s() - self._heard_at > self._idle_s and not self._dispatcher.is_busy
        return self._stopping or replaced or idle or self._dispatcher.is_broken

    def _hear(self, listener: socket.socket) -> None:
        try:
            speaker, _ = listener.accept()
        except TimeoutError:
            return
        self._heard_at = monotonic_s()
        threading.Thread(target=self._answer, args=(speaker,), daemon=True).start()

    def _answer(self, speaker: socket.socket) -> None:
        with speaker, suppress(OSError):
            speaker.settimeout(5.0)
            data = _read_message(speaker)
            if data is None:
                return
            speaker.sendall(self._reply(data))

    def _reply(self, data: bytes) -> bytes:
        if data == b"stop":
            self.stop()
            return DONE
        if data == b"status":
            return DONE + encode({"pid": os.getpid(), "busy": self._dispatcher.is_busy})
        word, _, process = data.partition(b" ")
        if word == b"sync":
            return DONE if self._syncing.ask(process.decode("ascii", "replace")) else FAILED
        return self._dispatcher.take(data)

    def stop(self, *_: object) -> None:
        self._stopping = True


class SyncThread:
    """Syncs what processes that have ended left, one after another."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._processes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="mulligan-hooks-sync", daemon=True)
        self._thread.start()

    def ask(self, process: str) -> bool:
        """False: it is over, and nothing more is synced."""
        self._processes.put(process)
        return not self._is_over

    def close(self) -> None:
        self._is_over = True
        self._processes.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (process := self._processes.get()) is not None:
            # What cannot be synced stays in `originals/`, and the next process that opens the store looks at it.
            with suppress(MulliganError, OSError):
                self._sync(process)


def _read_message(speaker: socket.socket) -> bytes | None:
    head = _read_exactly(speaker, 8)
    size = int.from_bytes(head, "big") if head is not None else 0
    return _read_exactly(speaker, size) if 0 < size <= _MESSAGE_MAX else None


def _read_exactly(speaker: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = speaker.recv(min(1 << 20, size - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)


def take_lock(folder: str, *, wait: bool) -> int | None:
    """The right to work on this store's hooks, for as long as the handle is open. None: somebody else has it."""
    private_folder(folder)
    refuse_untrusted(folder)
    handle = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def keep(folder: str, open_recorder: OpenRecorder, sync: Sync, *, idle_s: float = IDLE_S) -> None:
    """Be the background process, unless there is one."""
    if take_lock(folder, wait=False) is None:
        return
    keeper = Keeper(Dispatcher(folder, open_recorder), sync, idle_s=idle_s)
    signal.signal(signal.SIGTERM, keeper.stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keeper.serve()


def keep_once(folder: str, open_recorder: OpenRecorder, data: bytes, answer: Callable[[bytes], None]) -> None:
    """Write one event down without a background process. What takes longer is done after the answer."""
    take_lock(folder, wait=True)
    dispatcher = Dispatcher(folder, open_recorder)
    try:
        answer(dispatcher.take(data))
        dispatcher.settle()
    finally:
        dispatcher.close()
