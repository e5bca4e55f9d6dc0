"""Rules that no tool enforces: who may change files, how tests may not be made, and that one command runs them all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "mulligan"

DOORS = {
    "effects/params.py": "the table of parameters, in our own source (`make mcp-table`)",
    "files/disk.py": "the workspace: every change of a person's file",
    "files/copy.py": "the files of a fork, in a new directory that no root knows yet",
    "files/git.py": "a shadow of a repository in a temporary directory; git's own files of a linked working tree",
    "exec/init.py": "the layers of an overlay, in a temporary directory",
    "exec/capture/overlay.py": "the same layers, to throw them away",
    "history/command.py": "the mark of a command that runs, beside the store",
    "history/recovery.py": "the mark of a command whose watcher died",
    "history/tables.py": "the spool of preimages, beside the store",
}
"""Which modules of `files`, `exec`, `history` and `effects` may change the file system, and which part of it."""

CHANGING = re.compile(
    r"(os|shutil)\.(f?chmod|[fl]?chown|link|makedirs|mkdir|mkfifo|mknod|remove\w*|renames?|replace|rmdir|rmtree|"
    r"setxattr|symlink|f?truncate|unlink|utime|copy\w*|move)"
)


def changes_in(source: str) -> Iterator[str]:
    """Calls of `os` and `shutil` that change the file system, and files opened to be written."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if CHANGING.fullmatch(called):
            yield called
        if called == "open" and any(
            isinstance(arg, ast.Constant) and str(arg.value)[:1] in "wxa" for arg in node.args[1:]
        ):
            yield called
        if called == "os.open" and re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC)", ast.unparse(node)):
            yield called


@pytest.mark.req("D3.one_door_to_disk")
def test_a_persons_files_are_changed_by_one_module() -> None:
    found: dict[str, list[str]] = {}
    for room in ("files", "exec", "history", "effects"):
        for file in sorted((SRC / room).rglob("*.py")):
            if changes := sorted(set(changes_in(file.read_text("utf-8")))):
                found[str(file.relative_to(SRC))] = changes
    assert found.keys() == DOORS.keys(), found


@pytest.mark.parametrize(
    ("source", "count"),
    [("import os; os.rename('a', 'b')", 1), ("open('a', 'wb')", 1), ("open('a')", 0), ("os.open(a, os.O_RDWR)", 1)],
)
def test_a_change_is_seen(source: str, count: int) -> None:
    assert len(list(changes_in(source))) == count


def _calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _imports(tree: ast.AST) -> set[str]:
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


@pytest.mark.req("D19.no_sleeps_no_mocks")
def test_no_test_sleeps_runs_again_or_mocks() -> None:
    wrong = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        bad = (_calls(tree) & {"time.sleep", "sleep", "pytest.mark.flaky"}) | (
            _imports(tree) & {"unittest.mock", "mock"}
        )
        wrong += [f"{file.relative_to(ROOT)}: {name}" for name in bad]
    assert wrong == []


@pytest.mark.req("D19.no_sleeps_no_mocks")
def test_no_test_compares_what_an_error_says() -> None:
    """Codes are the contract; words may be improved at any time."""
    wrong = [
        f"{file.relative_to(ROOT)}: {ast.unparse(node)[:80]}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises"
        if any(keyword.arg == "match" for keyword in node.keywords)
    ]
    assert wrong == []


@pytest.mark.req("D19.make_test_is_all")
def test_one_command_runs_all_of_ours_and_the_machine_runs_it_too() -> None:
    ci = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    lanes = ["make test </dev/null"]
    lanes += [f"make test-{lane} SHORT=1 </dev/null" for lane in ("hosts", "web", "fleet")]
    assert ci[-4:] == lanes
    assert "`make test`" in (ROOT / "README.md").read_text("utf-8")
    chosen = {lane: _pytest_of(lane) for lane in ("test", "test-slow", "test-hosts", "test-fleet")}
    assert chosen == {
        "test": '"not slow and not hosts and not web and not fleet"',
        "test-slow": '"not hosts and not web and not fleet"',
        "test-hosts": '"hosts$(if $(SHORT), and not slow)"',
        "test-fleet": '"fleet$(if $(SHORT), and not slow)" tests/fleet',
    }


@pytest.mark.req("D19.make_test_is_all")
def test_only_the_lane_of_hosts_installs_programs_of_others() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.findall(r"^([a-z-]+):.*\$\(TOOLS\)", makefile, re.MULTILINE) == ["test-hosts"]


def _pytest_of(lane: str) -> str:
    """Which tests a target of the Makefile chooses."""
    recipe = re.search(rf"^{lane}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None
    (arguments,) = re.findall(r"(?:\$\(PYTEST\)|-m pytest -n auto) -m (.*)", recipe[1])
    return str(arguments)
