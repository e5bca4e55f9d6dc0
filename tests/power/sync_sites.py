"""Every call in Mulligan's code that syncs something, found in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mulligan

SOURCES = Path(mulligan.__file__).parent
PACKAGES = ("history", "store", "workspace")
"""Those that write files whose loss a power cut test could notice."""


class SyncSite(NamedTuple):
    """The calls of one name in one function."""

    file: str
    function: str
    callee: str
    lines: frozenset[int]

    def __str__(self) -> str:
        return f"{self.file}:{self.function}:{self.callee}"

    def holds(self, file: str, line: int) -> bool:
        return file == self.file and line in self.lines


def sync_sites() -> list[SyncSite]:
    found: dict[tuple[str, str, str], set[int]] = {}
    for package in PACKAGES:
        for path in sorted((SOURCES / package).rglob("*.py")):
            file = str(path.relative_to(SOURCES))
            for function, call in _calls(ast.parse(path.read_text("utf-8")), ""):
                name = _name_of(call)
                if "sync" in name and "async" not in name:
                    lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
                    found.setdefault((file, function, name), set()).update(lines)
    return [SyncSite(*key, frozenset(lines)) for key, lines in sorted(found.items())]


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
