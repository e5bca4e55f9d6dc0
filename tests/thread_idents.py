"""Threads with the ident of an ended thread: Python gives idents away again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

THREADS_MAX = 1_000


def ended_thread(act: Callable[[], object]) -> int:
    """The ident of a thread that has run `act` and ended."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert thread.ident is not None
    return thread.ident


@contextmanager
def thread_with_ident(ident: int, act: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A new thread has that ident and runs `act` first; inside the block it is still alive."""
    may_end = threading.Event()
    with ExitStack() as threads:
        threads.callback(may_end.set)
        for _ in range(THREADS_MAX):
            done = threading.Event()

            def run(done: threading.Event = done) -> None:
                try:
                    if threading.get_ident() == ident:
                        act()
                finally:
                    done.set()
                may_end.wait()

            thread = threading.Thread(target=run)
            thread.start()
            done.wait()
            if thread.ident == ident:
                yield
                return
    raise AssertionError(f"none of {THREADS_MAX} threads got the ident {ident}")
