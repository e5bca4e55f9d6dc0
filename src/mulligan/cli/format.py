"""What the command line prints: plain when piped, coloured on a terminal, and never a terminal command from a name."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

import click

from mulligan.values.limits import GIB_BYTES, KIB_BYTES, MIB_BYTES

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of characters that show nothing, or move, or recolour, or reverse what is shown."""


def visible(text: str) -> str:
    """The text with everything that a terminal would act on written out."""
    return text if text.isascii() and text.isprintable() else "".join(_shown(c) for c in text)


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    point = ord(character)
    if 0xDC80 <= point <= 0xDCFF:
        return f"\\x{point - 0xDC00:02x}"
    if point <= 0xFF:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def print_json(value: object) -> None:
    """One canonical document and a line end on standard output."""
    # Loaded here, because most of what `--help` shows needs no JSON.
    from mulligan.values.canonical import encode

    click.echo(encode(value).decode("utf-8"))


def paint(text: str, look: str, stream: TextIO | None = None) -> str:
    """In a colour, `bold` or `dim`, if a person is looking and has not asked for none."""
    if not _is_coloured(stream or sys.stdout):
        return text
    return click.style(text, bold=look == "bold", dim=look == "dim", fg=None if look in ("bold", "dim") else look)


def _is_coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_rows(rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last one is left as it is."""
    lines = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:-1], widths[:-1], strict=True)]
        click.echo("  ".join([*cells, line[-1]]).rstrip())


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_words(size_bytes: int) -> str:
    for unit_bytes, unit in ((GIB_BYTES, "GiB"), (MIB_BYTES, "MiB"), (KIB_BYTES, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"


class ProgressLine:
    """How far long work is, on one line of a terminal's error stream; silent elsewhere."""

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
