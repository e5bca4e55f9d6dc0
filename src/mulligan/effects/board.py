"""The commands that run right now on a desk, so that others can page through their output and send them signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from mulligan.effects.receipt import refusal_receipt
from mulligan.history.desk import Desk
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.ids import SessionId
from mulligan.values.refusal import Refused
from mulligan.workspace.exec.output import Spools
from mulligan.workspace.exec.pump import Handle

SIGNALS: dict[str, int] = {
    "term": signal.SIGTERM,
    "kill": signal.SIGKILL,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
}
ENDED_KEPT = 64
"""How many background commands that have ended can still be asked for their output."""


@dataclass(slots=True, eq=False)
class Posted:
    """One command of a call. Those in the background keep their output, and have a receipt when they have ended."""

    call: str
    session: SessionId
    handle: Handle
    spools: Spools | None = None
    receipt: dict[str, Any] | None = None
    thread: threading.Thread | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Board:
    """For any thread. Closing it stops what still runs; what that has changed is put back."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._posted: list[Posted] = []

    def find(self, call: str) -> Posted | None:
        """The command in the background that is this call."""
        with self._lock:
            return next((one for one in self._posted if one.call == call and one.thread is not None), None)

    @contextmanager
    def running(self, call: str, session: SessionId) -> Iterator[Handle]:
        """A command in the foreground, for as long as the block lasts. A call may have several at once."""
        with Handle() as handle:
            posted = Posted(call, session, handle)
            with self._lock:
                self._posted.append(posted)
            try:
                yield handle
            finally:
                with self._lock:
                    posted.ended.set()
                    self._posted.remove(posted)

    def start(self, posted: Posted, work: Callable[[Handle], dict[str, Any]]) -> None:
        """Run in the background; what `work` answers is the receipt."""

        def run() -> None:
            words = "The command broke; the error output of this process says how."
            receipt = refusal_receipt("host.exec", Refused("error", "internal", words)).to_dict()
            try:
                receipt = work(posted.handle)
            finally:
                with self._lock:
                    posted.receipt = receipt
                    posted.ended.set()
                    posted.handle.close()

        posted.thread = threading.Thread(target=run, name=f"mulligan-exec-{posted.call[-8:]}", daemon=True)
        with self._lock:
            self._posted.append(posted)
            self._forget_oldest()
        posted.thread.start()

    def _forget_oldest(self) -> None:
        for one in [one for one in self._posted if one.ended.is_set()][:-ENDED_KEPT]:
            self._posted.remove(one)
            if one.spools is not None:
                one.spools.close()

    def signal(self, posted: Posted, number: int) -> bool:
        """False: it has ended already."""
        with self._lock:
            if posted.ended.is_set():
                return False
            posted.handle.signal(number)
            return True

    def stop(self, call: str) -> None:
        """Kill what a call runs in the foreground, and all that it started: it fails as `cancelled`."""
        with self._lock:
            for posted in self._posted:
                if posted.call == call and posted.thread is None and not posted.ended.is_set():
                    posted.handle.cancel()

    def signal_session(self, session: SessionId, number: int) -> int:
        """To every running command of a session; how many there were."""
        with self._lock:
            found = [one for one in self._posted if one.session == session and not one.ended.is_set()]
        return sum(self.signal(one, number) for one in found)

    def close(self) -> None:
        with self._lock:
            left = list(self._posted)
            for posted in left:
                if posted.thread is not None and not posted.ended.is_set():
                    posted.handle.cancel()
        for posted in left:
            if posted.thread is not None:
                posted.thread.join()
            if posted.spools is not None:
                posted.spools.close()


_BOARDS: WeakKeyDictionary[Desk, Board] = WeakKeyDictionary()
_BOARDS_LOCK = fork_safe_lock()


def board_of(desk: Desk) -> Board:
    """One for all roots reached through one desk, so that a command is found from any of them."""
    desk = desk.opener
    with _BOARDS_LOCK:
        if desk not in _BOARDS:
            _BOARDS[desk] = board = Board()
            desk.at_close(board.close)
        return _BOARDS[desk]
