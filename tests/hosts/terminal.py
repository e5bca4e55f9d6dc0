"""A host's full-screen program in a terminal: what a person types, and what is on the screen."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

WAIT_S = 600.0
"""A test waits for a condition, and no machine is too slow for it; this only ends a test that hangs."""
_COLUMNS, _LINES = "120", "400"
"""So many lines that nothing scrolls away."""
_STILL_S = 1.0


class Terminal:
    """A program in a terminal of tmux, with a server of its own."""

    def __init__(self, server: str) -> None:
        self._server = server

    def tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self._server, *words], capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def screen(self) -> str:
        """The text on the screen."""
        return self.tmux("capture-pane", "-p", "-t", "host")

    def count(self, wanted: str) -> int:
        """How often a text is on the screen, wherever the program has broken the lines."""
        return _squeezed(self.screen()).count(_squeezed(wanted))

    def wait_for(self, wanted: str, times: int = 1) -> None:
        self.wait_until(lambda: self.count(wanted) >= times, wanted)

    def wait_until(self, holds: Callable[[], object], wanted: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"{wanted!r} does not come:\n{self.screen()}"

    def wait_until_still(self) -> None:
        """Wait until the program has shown nothing new for a while: its hooks have ended, and it has taken all keys."""
        shown, since = "", time.monotonic()

        def is_still() -> bool:
            nonlocal shown, since
            if (now := self.screen()) != shown:
                shown, since = now, time.monotonic()
            return time.monotonic() - since > _STILL_S

        self.wait_until(is_still, "a still screen")

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "host", *keys)

    def type(self, line: str) -> None:
        """Type a line, wait until it is on the screen, and press Enter."""
        before = self.count(line)
        self.tmux("send-keys", "-t", "host", "-l", line)
        self.wait_for(line, before + 1)
        # Programs take an Enter that comes too soon after other keys for a part of a paste.
        self.wait_until_still()
        self.press("Enter")


def _squeezed(text: str) -> str:
    return "".join(text.split())


@contextmanager
def terminal(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> Iterator[Terminal]:
    """The program in a terminal. It ends with the block."""
    made = Terminal(f"mulligan-{uuid4().hex[:12]}")
    words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), "TERM=xterm-256color", *command]
    made.tmux(
        "-f", "/dev/null", "new-session", "-d", "-s", "host", "-x", _COLUMNS, "-y", _LINES, "-c", str(cwd), *words
    )
    try:
        yield made
    finally:
        leader = int(made.tmux("list-panes", "-t", "host", "-F", "#{pane_pid}"))
        # Some programs go on after their terminal is gone.
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        made.tmux("kill-server")
