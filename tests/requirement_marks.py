"""Where the tests name requirements, found by reading the source and running nothing.

A mark counts when pytest would really attach it to a test: as a decorator of a test function or test class, in a
`pytestmark`, or in the `marks=` of a `pytest.param`. Anywhere else it is astray, and so is one whose ids are not
literal strings, because then nobody can tell by reading what it shows. A test that is skipped or expected to fail shows
nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

NO_EVIDENCE = frozenset({"skip", "skipif", "xfail"})
EXCUSED = "on a test that is skipped or expected to fail"


@dataclass(frozen=True, slots=True)
class Mark:
    """One `pytest.mark.req(...)`: its ids, its place, and why it does not count (empty: it counts)."""

    ids: tuple[str, ...]
    where: str
    astray: str = ""


def marks_in(source: str, name: str = "source") -> Iterator[Mark]:
    """Every requirement mark of one module."""
    tree = ast.parse(source)
    above = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if _mark_name(node) == "req":
            call = above.get(node)
            yield _mark(node, call, above, name)


def marks_under(folder: Path) -> list[Mark]:
    """Every requirement mark of every module below the folder."""
    files = sorted(folder.rglob("*.py"))
    return [mark for file in files for mark in marks_in(file.read_text("utf-8"), str(file.relative_to(folder)))]


def _mark_name(node: ast.AST) -> str:
    """`req` for the expression `pytest.mark.req` or `mark.req`, else an empty string or another mark's name."""
    if not isinstance(node, ast.Attribute):
        return ""
    holder = node.value
    holder_name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
    return node.attr if holder_name == "mark" else ""


def _mark(node: ast.AST, call: ast.AST | None, above: dict[ast.AST, ast.AST], name: str) -> Mark:
    where = f"{name}:{getattr(node, 'lineno', 0)}"
    if not isinstance(call, ast.Call) or call.func is not node:
        return Mark((), where, "a mark without ids")
    ids = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if len(ids) != len(call.args) or call.keywords or not ids:
        return Mark(tuple(ids), where, "ids must be literal strings")
    return Mark(tuple(ids), where, _astray(call, above))


def _astray(call: ast.Call, above: dict[ast.AST, ast.AST]) -> str:
    """Why pytest would not attach this mark to a test; empty when it would."""
    below: ast.AST = call
    parent = above[call]
    while isinstance(parent, ast.List | ast.Tuple):
        below, parent = parent, above[parent]
    if isinstance(parent, Definition) and below in parent.decorator_list:
        return _why_not_a_test(parent, above)
    if isinstance(parent, ast.Assign | ast.AnnAssign) and _assigns_pytestmark(parent):
        return EXCUSED if _excused(_elements(parent.value)) else _why_no_tests_in(above[parent])
    if isinstance(parent, ast.keyword) and parent.arg == "marks":
        return _why_not_a_param(above[parent], above)
    return "not attached to a test"


def _why_not_a_test(definition: Definition, above: dict[ast.AST, ast.AST]) -> str:
    scope: ast.AST | None = definition
    while scope is not None:
        if isinstance(scope, Definition) and _excused(scope.decorator_list):
            return EXCUSED
        scope = above.get(scope)
    if isinstance(definition, ast.ClassDef):
        return _why_no_tests_in(definition)
    return "" if definition.name.startswith("test") else "on a function that is not a test"


def _why_no_tests_in(scope: ast.AST) -> str:
    """A class with bases may inherit its tests, so only a class without any is judged by what it holds."""
    if isinstance(scope, ast.ClassDef) and scope.bases and scope.name.startswith("Test"):
        return ""
    body = getattr(scope, "body", [])
    holds = any(isinstance(node, Definition) and node.name.lower().startswith("test") for node in body)
    return "" if holds or _assigns_a_test(body) else "where there are no tests"


def _assigns_a_test(body: list[ast.stmt]) -> bool:
    """`TestMachine = Machine.TestCase` is how hypothesis makes a test of a state machine."""
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id.startswith("Test") for target in targets)


def _assigns_pytestmark(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _why_not_a_param(call: ast.AST, above: dict[ast.AST, ast.AST]) -> str:
    if not isinstance(call, ast.Call) or getattr(call.func, "attr", getattr(call.func, "id", "")) != "param":
        return "marks of something that is not a pytest.param"
    if any(_excused(_elements(keyword.value)) for keyword in call.keywords if keyword.arg == "marks"):
        return EXCUSED
    holder: ast.AST | None = call
    while holder is not None and not isinstance(holder, Definition):
        holder = above.get(holder)
    return _why_not_a_test(holder, above) if holder is not None else ""


def _elements(value: ast.expr | None) -> list[ast.expr]:
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts
    return [] if value is None else [value]


def _excused(marks: list[ast.expr]) -> bool:
    return any(_mark_name(mark.func if isinstance(mark, ast.Call) else mark) in NO_EVIDENCE for mark in marks)
