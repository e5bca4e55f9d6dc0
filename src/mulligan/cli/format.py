"""What the command line prints: plain text in a pipe, colours on a terminal. The words are in `history.outcome_text`.

File names are escaped, so that a name cannot send commands to the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

import click

from mulligan.values.limits import GIB_BYTES, KIB_BYTES, MIB_BYTES
from mulligan.values.text import visible


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
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:-1], widths[:-1], strict=True)]
        click.echo("  ".join([*cells, line[-1]]).rstrip())


def size_words(size_bytes: int) -> str:
    for unit_bytes, unit in ((GIB_BYTES, "GiB"), (MIB_BYTES, "MiB"), (KIB_BYTES, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"


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
