"""The benchmarks still run: a name that moved is noticed here, not when somebody measures again."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def names_imported_from_mulligan(source: str) -> list[tuple[str, str]]:
    """Each module of ours that a script imports, with each name that it takes from it."""
    nodes = list(ast.walk(ast.parse(source)))
    found = [(alias.name, "") for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [
        (node.module or "", alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return [(module, name) for module, name in found if module.partition(".")[0] == "mulligan"]


def can_be_imported(module: str, name: str) -> bool:
    try:
        return not name or hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("script", sorted(file.name for file in BENCHMARKS.glob("*.py")))
def test_every_name_that_a_benchmark_imports_exists(script: str) -> None:
    asked = names_imported_from_mulligan((BENCHMARKS / script).read_text("utf-8"))
    assert [one for one in asked if not can_be_imported(*one)] == []


def test_every_benchmark_of_make_bench_is_there() -> None:
    listed = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert listed is not None
    assert [name for name in listed[1].split() if not (BENCHMARKS / f"{name}.py").is_file()] == []


@pytest.mark.slow
def test_two_checkouts_are_compared_in_every_measure(tmp_path: Path) -> None:
    script, result = str(BENCHMARKS / "compare.py"), tmp_path / "found.json"
    command = [sys.executable, script, str(ROOT), str(ROOT), "--runs", "1", "--json", str(result)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    measures = {"statements", "pages", "call_events", "call_files", "cpu_us", "wall_us"}
    measures |= {"system_calls"} if shutil.which("strace") else set()
    found = json.loads(result.read_text("utf-8"))
    assert len(found) == 12
    assert [
        name for name, sides in found.items() if set(sides["old"]) != measures or set(sides["new"]) != measures
    ] == []
    assert [name for name, sides in found.items() if not sides["new"]["call_events"]] == []
