"""Whatever a call can be said not to have captured, a person is told in words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mulligan.history.outcome_text import gap_words

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "mulligan"
GUIDES = REPOSITORY / "docs" / "guides"

MAKERS = frozenset({"_coverage", "_lost", "internet_address", "_on_connect"})
"""Functions that give reasons in other forms than a note of a path and a reason."""
TAKERS = frozenset({"fromkeys", "leave", "Skipped"})
"""What is called with a path, or some, and the reason."""


def constants(node: ast.expr | None) -> Iterator[str]:
    """The texts that an expression may come to, as far as they are written there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*constants(node.body), *constants(node.orelse))
    elif isinstance(node, ast.Tuple):
        yield from (text for one in node.elts for text in constants(one))


def noted(node: ast.AST) -> Iterator[str]:
    """Reasons in `{"path": …, "reason": …, …}`, and in what is called with a path and a reason."""
    if isinstance(node, ast.Dict) and [*map(list, map(constants, node.keys[:2]))] == [["path"], ["reason"]]:
        yield from constants(node.values[1])
    if isinstance(node, ast.Call) and len(node.args) == 2:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        yield from constants(node.args[1]) if name in TAKERS else ()


def made(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Return | ast.DictComp):
            yield from constants(inner.value)
        elif isinstance(inner, ast.Tuple):
            yield from constants(inner)


def given_reasons() -> set[str]:
    found = set[str]()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            found.update(noted(node))
            if isinstance(node, ast.FunctionDef) and node.name in MAKERS:
                found.update(made(node))
    return found


def explained_reasons() -> set[str]:
    """Those in the guides' tables."""
    found = set[str]()
    for file in GUIDES.glob("*.md"):
        for table in re.findall(r"(?m)^\| reason \|.*\n(?:\|.*\n)*", file.read_text("utf-8")):
            rows = [line.split("|")[1] for line in table.splitlines()[2:]]
            found.update(word for row in rows for word in re.findall(r"`(\w+)`", row))
    return found


def test_every_reason_for_a_capture_gap_has_a_sentence() -> None:
    given, explained = given_reasons(), explained_reasons()
    assert {"owner", "network", "hook_late", "other_mounts", "not_captured"} <= given and explained <= given
    assert [reason for reason in sorted(given) if gap_words("f", reason) == f"f: {reason.replace('_', ' ')}"] == []
