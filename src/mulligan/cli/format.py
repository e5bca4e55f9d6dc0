"""What the command line prints: plain text in a pipe, colours on a terminal. The words are in `history.outcome_text`.

File names are escaped, so that a name cannot send commands to the terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

import click

from mulligan.values.limits import GIB_BYTES, KIB_BYTES, MIB_BYTES
from mulligan.values.text import padded, visible, width_of

_COLUMNS_MIN = 40


def print_json(value: object) -> None:
    """Prints one canonical JSON document and a line end."""
    # Imported here, because `--help` needs no JSON.
    from mulligan.values.canonical import encode

    click.echo(encode(value).decode("utf-8"))


def paint(text: str, look: str, stream: TextIO | None = None) -> str:
    """The text in a colour, `bold` or `dim`, if the stream is a terminal and the user has not set NO_COLOR."""
    if not _is_coloured(stream or sys.stdout):
        return text
    return click.style(text, bold=look == "bold", dim=look == "dim", fg=None if look in ("bold", "dim") else look)


def _is_coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_rows(rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; every column but the last is padded to its widest cell."""
    lines = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(width_of, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [padded(cell, width) for cell, width in zip(line[:-1], widths[:-1], strict=True)]
        click.echo("  ".join([*cells, line[-1]]).rstrip())


def columns_shown() -> int | None:
    """The columns of the terminal that stdout is; None for a pipe or a file, where lines may have any length."""
    if not sys.stdout.isatty():
        return None
    return max(_COLUMNS_MIN, shutil.get_terminal_size().columns)


def print_pages(lines: Sequence[str]) -> None:
    """Prints lines; on a terminal with fewer rows, through the user's pager, for example `less`."""
    if not sys.stdout.isatty() or not sys.stdin.isatty() or len(lines) < shutil.get_terminal_size().lines:
        for line in lines:
            click.echo(line)
        return
    pager = os.environ.get("MULLIGAN_PAGER") or os.environ.get("PAGER") or "less"
    if pager == "cat" or shutil.which(pager.split()[0]) is None:
        for line in lines:
            click.echo(line)
        return
    # Imported here, because short output needs no other process.
    import subprocess

    # F: one page needs no pager; R: colours; X: what was shown stays on the screen.
    environment = {"LESS": "FRX", "LV": "-c", **os.environ}
    with subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None, "it is a pipe"
        # The user may leave before the end.
        with suppress(BrokenPipeError):
            child.stdin.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
            child.stdin.close()


def size_words(size_bytes: int) -> str:
    for unit_bytes, unit in ((GIB_BYTES, "GiB"), (MIB_BYTES, "MiB"), (KIB_BYTES, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"


class Working:
    """Says on stderr after a second, and then each second, how far the work is; only on a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._part, self._done = "", 0
        self._thread: Any = None
        self._ended: Any = None

    def __enter__(self) -> Working:
        if sys.stderr.isatty():
            # Imported here, because only a terminal needs it.
            from threading import Event, Thread

            self._ended = Event()
            self._thread = Thread(target=self._tell, daemon=True)
            self._thread.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Hears how much more of the work is done."""
        self._done += done
        self._part = f"{min(100, 100 * self._done // max(1, total))} %, "

    def _tell(self) -> None:
        seconds = 0
        while not self._ended.wait(1.0):
            seconds += 1
            click.echo(f"\r\x1b[K{self._what}: {self._part}{seconds} s", err=True, nl=False)
        if seconds:
            click.echo("\r\x1b[K", err=True, nl=False)

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()


class ProgressLine:
    """Shows the progress of long work on one line of stderr, if stderr is a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._last = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._on:
            line = f"{what}: {100 * done // max(1, total)} %"
            if line != self._last:
                self._last = line
                click.echo(f"\r\x1b[K{line}", err=True, nl=False)

    def clear(self) -> None:
        if self._on and self._last:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._last = ""
