"""Small wrong changes of our own code, each with the tests that must fail for it. `mutants.toml` lists them."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).with_name("mutants.toml")


class MutantError(Exception):
    """A line of the table no longer fits the code."""


@dataclass(frozen=True)
class Mutant:
    """`text` is exactly once in `function` of `file`. If `becomes` replaces it, each of `tests` must fail."""

    name: str
    file: str
    function: str
    text: str
    becomes: str
    tests: tuple[str, ...]

    def applied_to(self, source: str) -> str:
        """The source with the wrong change. Raises `MutantError` where it does not fit."""
        first, last = _lines_of(source, self.function, self.file)
        lines = source.splitlines(keepends=True)
        body = "".join(lines[first:last])
        if body.count(self.text) != 1:
            raise MutantError(f"{self.name}: the text is {body.count(self.text)} times in {self.function}")
        changed = "".join([*lines[:first], body.replace(self.text, self.becomes), *lines[last:]])
        ast.parse(changed)
        return changed


def all_mutants() -> list[Mutant]:
    found = tomllib.loads(TABLE.read_text("utf-8"))["mutant"]
    return [Mutant(**{**one, "tests": tuple(one["tests"])}) for one in found]


def _lines_of(source: str, function: str, file: str) -> tuple[int, int]:
    scope: ast.AST = ast.parse(source)
    for name in function.split("."):
        named = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
        if len(named) != 1:
            raise MutantError(f"{file} has {len(named)} definitions of {function}")
        scope = named[0]
    assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and scope.end_lineno is not None
    return scope.lineno - 1, scope.end_lineno


def fault_of_test(test: str) -> str | None:
    """Why a test id cannot be used here: it does not exist, or it is not in the fast lane. None: it can.

    A class may inherit its tests from a contract suite.
    """
    file, *names = test.partition("[")[0].split("::")
    if not (ROOT / file).is_file() or not names:
        return f"{test}: there is no such test"
    scope: ast.AST = ast.parse((ROOT / file).read_text("utf-8"))
    if any(_is_left_out(node.value) for node in ast.iter_child_nodes(scope) if isinstance(node, ast.Assign)):
        return f"{test}: the whole file is not in the fast lane"
    for name in names:
        named = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
        if not named:
            is_inherited = isinstance(scope, ast.ClassDef) and scope.bases and f"def {name}(" in _contract_suites()
            return None if is_inherited else f"{test}: there is no such test"
        scope = named[0]
        if any(_is_left_out(one) for one in getattr(scope, "decorator_list", [])):
            return f"{test}: it is not in the fast lane"
    return None


def _is_left_out(mark: ast.expr) -> bool:
    """Whether a mark takes a test out of the fast lane, `make test`."""
    return "mark.slow" in ast.unparse(mark) or "mark.hosts" in ast.unparse(mark)


@cache
def _contract_suites() -> str:
    return "".join(file.read_text("utf-8") for file in (ROOT / "tests" / "contracts").glob("*_contract.py"))
