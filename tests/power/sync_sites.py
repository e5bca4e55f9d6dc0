"""Every call in Mulligan's code that syncs something, found in the source."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import mulligan

SOURCES = Path(mulligan.__file__).parent
PACKAGES = ("history", "store", "files", "exec")
"""Those that write files whose loss a power cut test could notice."""


NO_SYNC = frozenset({"UnsyncedRow", "_has_unsynced"})


class SyncSite(NamedTuple):
    """One call: the `number`-th of that name in its function."""

    file: str
    function: str
    callee: str
    number: int
    line: int
    place: tuple[int, int]
    """From which byte of the file to which the call is."""

    def left_out_of(self, source: bytes) -> bytes:
        """The source without the call."""
        return source[: self.place[0]] + b"None" + source[self.place[1] :]

    @property
    def name(self) -> str:
        """The same when lines move."""
        return f"{self.file}:{self.function}:{self.callee}:{self.number}"

    @property
    def frame(self) -> str:
        """As `check.py` names it."""
        return f"{self.file}:{self.function}:{self.line}"


def sync_sites() -> list[SyncSite]:
    found: list[SyncSite] = []
    for package in PACKAGES:
        for path in sorted((SOURCES / package).rglob("*.py")):
            file, count, source = str(path.relative_to(SOURCES)), Counter[tuple[str, str]](), path.read_bytes()
            starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
            for function, call in _calls(ast.parse(source), ""):
                name = _name_of(call)
                if name in NO_SYNC or "sync" not in name or "async" in name:
                    continue
                count[function, name] += 1
                assert call.end_lineno is not None and call.end_col_offset is not None
                place = starts[call.lineno - 1] + call.col_offset, starts[call.end_lineno - 1] + call.end_col_offset
                found.append(SyncSite(file, function, name, count[function, name], call.lineno, place))
    return found


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}" if function else child.name
        elif isinstance(child, ast.Call):
            yield function, child
        yield from _calls(child, inner)


def _name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
