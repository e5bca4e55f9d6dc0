"""Token classes of source code, by Pygments, in a process of its own with limits for each request.

A regular expression of a lexer can take for ever on hostile text, and nothing can stop it inside our process. So a
child process colours, and the server kills it when it takes too long. Without Pygments, or over the limits, the text is
plain.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from typing import Any

from mulligan.values.canonical import decode, encode
from mulligan.values.clock import monotonic_s
from mulligan.values.fast_dataclass import fast_dataclass

LINES_MAX = 2_000
TEXT_MAX_BYTES = 400_000
TIME_MAX_S = 1.0
START_MAX_S = 10.0

Spans = list[list[Any]]
"""Of one line: start, end and class of each coloured part, in characters."""


@fast_dataclass(slots=True)
class ColourBudget:
    """What is left of the lines and of the time that one request may take for colours."""

    lines: int = LINES_MAX
    time_s: float = TIME_MAX_S


class Colours:
    """For any thread. One text is coloured at a time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def of(self, name: str, lines: list[str], budget: ColourBudget) -> list[Spans] | None:
        """The spans of each line; None if the text stays plain. `name` of the file chooses the language."""
        if not lines or len(lines) > budget.lines or budget.time_s <= 0:
            return None
        budget.lines -= len(lines)
        body = encode({"name": name, "text": "\n".join(line.replace("\n", " ") for line in lines)})
        if len(body) > TEXT_MAX_BYTES:
            return None
        with self._lock:
            answer = self._ask(len(body).to_bytes(4, "big") + body, budget)
        found: list[Spans] | None = None if answer is None else decode(answer)
        return found if found is not None and len(found) == len(lines) else None

    def _ask(self, message: bytes, budget: ColourBudget) -> bytes | None:
        start_s = 0.0
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "mulligan.servers.http.colours"]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            start_s = START_MAX_S
        began_s = monotonic_s()
        try:
            return _exchange(self._child, message, began_s + start_s + budget.time_s)
        except (OSError, TimeoutError):
            self._kill()
            return None
        finally:
            # The time in which Python and Pygments start is not the request's.
            budget.time_s -= max(0.0, monotonic_s() - began_s - start_s)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def close(self) -> None:
        with self._lock:
            self._kill()


def _exchange(child: subprocess.Popen[bytes], message: bytes, until: float) -> bytes:
    assert child.stdin is not None and child.stdout is not None, "both are pipes"
    child.stdin.write(message)
    child.stdin.flush()
    data = bytearray()
    size: int | None = None
    while size is None or len(data) < size + 4:
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, until - monotonic_s()))
        piece = os.read(child.stdout.fileno(), 1 << 16) if ready else b""
        if not piece:
            raise TimeoutError
        data += piece
        size = int.from_bytes(data[:4], "big") if len(data) >= 4 else None
    return bytes(data[4:])


def _classes(name: str, text: str) -> list[Spans]:
    """In the child. The class of a token is the short name that Pygments has for it."""
    from pygments.lexers import get_lexer_for_filename
    from pygments.token import STANDARD_TYPES, Token
    from pygments.util import ClassNotFound

    lines: list[Spans] = [[]]
    try:
        lexer = get_lexer_for_filename(name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return [[] for _ in text.split("\n")]
    at = 0
    for kind, value in lexer.get_tokens(text):
        while kind is not Token and kind not in STANDARD_TYPES:
            kind = kind.parent or Token
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append([])
                at = 0
            if part and STANDARD_TYPES[kind]:
                lines[-1].append([at, at + len(part), STANDARD_TYPES[kind]])
            at += len(part)
    return lines


def _serve() -> None:
    while head := sys.stdin.buffer.read(4):
        asked = decode(sys.stdin.buffer.read(int.from_bytes(head, "big")))
        answer = encode(_classes(asked["name"], asked["text"]))
        sys.stdout.buffer.write(len(answer).to_bytes(4, "big") + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
