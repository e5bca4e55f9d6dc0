"""The background process of the hooks. Hooks are quick because it has the store open and the tree in memory.

A lock allows one process for each store and mount namespace. Hooks reach it through a socket in the state directory,
which only its owner can enter. A hook starts it if there is none. It ends if it gets no message for a while, if it is
asked to, or if another process has replaced its socket. Everything it knows is also in the store, so it may be killed
at any time.
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
from typing import Protocol

from mulligan.agents.hooks.recorder import DONE, FAILED, Dispatcher, OpenRecorder
from mulligan.agents.hooks.socket import SOCKET
from mulligan.store.sqlite_file import private_folder, refuse_untrusted
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import MulliganError

LOCK = "keeper.lock"
IDLE_S = 900.0
"""How long it waits for the next hook."""
COMMANDS_IDLE_S = 60.0
"""How long it waits for the next command, and for a first hook."""
_TICK_S = 1.0
_MESSAGE_MAX = 80 * 1024 * 1024

Sync = Callable[[str], None]
"""Syncs what the process of this name has left in `originals/`."""


class Commands(Protocol):
    """The process beside this one that runs verbs of the command line."""

    @property
    def used_at_s(self) -> float: ...

    @property
    def has_ended(self) -> bool: ...

    def close(self) -> None: ...


class BackgroundProcess:
    """Serves the socket. `sync` syncs the files of a process that has ended and left that to this one."""

    def __init__(self, dispatcher: Dispatcher, sync: Sync, commands: Commands) -> None:
        self._dispatcher = dispatcher
        self._syncing = SyncThread(sync)
        self._address = os.path.join(dispatcher.folder, SOCKET)
        self._commands = commands
        self._heard_at = -IDLE_S
        self._stopping = False

    def serve(self) -> None:
        listener = self._listen()
        # By its full path: if the folder is moved, hooks no longer find this process there.
        own = os.stat(self._address).st_ino
        threading.Thread(target=self._dispatcher.take_up_spool, daemon=True).start()
        try:
            while not self._is_over(own):
                self._hear(listener)
        finally:
            # The socket's name goes first, so that a hook that comes now starts another process.
            with suppress(OSError):
                if os.stat(self._address).st_ino == own:
                    os.unlink(self._address)
            listener.close()
            self._commands.close()
            self._syncing.close()
            self._dispatcher.close()

    def _listen(self) -> socket.socket:
        """Binds the socket by a relative name: the kernel allows only 107 bytes for the address."""
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
        now = monotonic_s()
        unused = now - self._heard_at > IDLE_S and now - self._commands.used_at_s > COMMANDS_IDLE_S
        idle = unused and not self._dispatcher.is_busy
        return self._stopping or replaced or idle or self._dispatcher.is_broken or self._commands.has_ended

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
    """Syncs the files of ended processes, one process after another."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._processes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="mulligan-hooks-sync", daemon=True)
        self._thread.start()

    def ask(self, process: str) -> bool:
        """False: this thread has ended and will not sync."""
        self._processes.put(process)
        return not self._is_over

    def close(self) -> None:
        self._is_over = True
        self._processes.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (process := self._processes.get()) is not None:
            # What cannot be synced stays in `originals/`, and the next process that opens the store checks it.
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
    """Takes the lock of this store's hooks until the handle is closed. None: another process has it."""
    private_folder(folder)
    refuse_untrusted(folder)
    handle = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def run(folder: str, open_recorder: OpenRecorder, sync: Sync, commands: Commands) -> None:
    """Runs the background process. The caller has its lock."""
    process = BackgroundProcess(Dispatcher(folder, open_recorder), sync, commands)
    signal.signal(signal.SIGTERM, process.stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process.serve()


def record_once(folder: str, open_recorder: OpenRecorder, data: bytes, answer: Callable[[bytes], None]) -> None:
    """Records one event without a background process. It answers first and finishes reading the tree afterwards."""
    take_lock(folder, wait=True)
    dispatcher = Dispatcher(folder, open_recorder)
    try:
        answer(dispatcher.take(data))
        dispatcher.settle()
    finally:
        dispatcher.close()
