"""Measures of our code, taken from its text. What is allowed is in `test_code_rules.py`; here is only what there is."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

BROAD = frozenset({"Exception", "BaseException"})
NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
VAGUE_NAMES = frozenset({"base", "common", "core", "helper", "helpers", "manager", "util", "utils"})
VAGUE_PARTS = VAGUE_NAMES - {"base", "core"}
"""Also smells as part of a name (`session_helpers`), which the other two need not be."""


@dataclass(frozen=True, slots=True)
class FunctionSize:
    """One function: its place, its lines without docstring, and its arguments without self, cls, *args and **kwargs."""

    where: str
    lines: int
    positional: int
    arguments: int


def functions_in(source: str, name: str) -> Iterator[FunctionSize]:
    """Every function and method of a module, nested ones too."""
    for where, node in _named(ast.parse(source), name + ":"):
        if isinstance(node, Function):
            yield _size(where, node)


def broad_excepts_in(source: str, name: str) -> Iterator[str]:
    """Where a module catches everything, as `file:qualified.name` of the function around it."""
    tree = ast.parse(source)
    around = {inner: where for where, scope in _named(tree, name + ":") for inner in ast.walk(scope)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            yield around.get(node, name + ":")


def exceptions_in(sources: Iterable[tuple[str, str]]) -> list[str]:
    """Every exception class of the modules (name, text), as `file:qualified.name`; known by its bases."""
    trees = [(name, ast.parse(text)) for name, text in sources]
    classes = [(where, node) for name, tree in trees for where, node in _named(tree, name + ":")]
    bases = [(where, node.name, _base_names(node)) for where, node in classes if isinstance(node, ast.ClassDef)]
    known = {name for name, value in vars(builtins).items() if _is_exception(value)}
    while new := {name for _, name, above in bases if name not in known and above & known}:
        known |= new
    return [where for where, _, above in bases if above & known]


def percentile(numbers: Sequence[int], percent: int) -> int:
    """The smallest number that at least this share of the numbers does not exceed; 0 when there are none."""
    ordered = sorted(numbers)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


def code_lines(source: str) -> int:
    """The lines that hold code: without blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def comment_lines(source: str) -> int:
    """The lines that hold a comment for a reader; instructions for the type checker and the linter do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return sum(not re.match(r"#\s*(type|noqa|fmt|pragma)\b", comment) for comment in comments)


def public_classes_in(source: str) -> list[str]:
    """The classes of a module whose names have no leading underscore."""
    nodes = ast.parse(source).body
    return [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def is_vague(module_name: str) -> bool:
    """Whether a module's name says nothing about what is in it."""
    return module_name in VAGUE_NAMES or not VAGUE_PARTS.isdisjoint(module_name.split("_"))


def unfinished_in(source: str, name: str) -> Iterator[str]:
    """Lines that say the work is not done."""
    for number, line in enumerate(source.splitlines(), start=1):
        if re.search(r"\b(TODO|FIXME|XXX|TBD)\b", line):
            yield f"{name}:{number}"


def dead_links_in(page: Path, root: Path) -> Iterator[str]:
    """Links of a Markdown page that lead to no file, or to no heading of one, inside the repository."""
    for target in _links(page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page.resolve()
        inside = place.is_relative_to(root.resolve())
        if not inside or not place.exists() or (anchor and anchor not in _anchors(place)):
            yield f"{page.relative_to(root)}: {target}"


def _named(scope: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Every class and function with its qualified name, outer ones before inner ones."""
    for child in ast.iter_child_nodes(scope):
        inner = prefix
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child
            inner = f"{prefix}{child.name}."
        yield from _named(child, inner)


def _base_names(node: ast.ClassDef) -> set[str]:
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _size(where: str, node: Function) -> FunctionSize:
    docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    own = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    positional = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    lines = (node.end_lineno or node.lineno) - node.lineno + 1 - own
    return FunctionSize(where, lines, len(positional), len(positional) + len(node.args.kwonlyargs))


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(item) for item in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in BROAD)


def _links(text: str) -> list[str]:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", prose)
    defined = re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose, flags=re.MULTILINE)
    return [target for target in inline + defined if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    headings = re.findall(r"^#{1,6}\s+(.+?)\s*#*$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def codes_in(text: str) -> Iterator[str]:
    """The literal codes of `Refused(status, code, …)` and `fault(code, …)`."""
    places = {"Refused": 1, "fault": 0}
    for node in ast.walk(ast.parse(text)):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Call) and name in places and len(node.args) > places[name]:
            code = node.args[places[name]]
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                yield code.value
