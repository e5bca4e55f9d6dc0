"""The API reference is what the docstrings say now, holds every public name once, and every name says its contract."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import builtins, testing

DOCS = Path(__file__).parent.parent / "docs"
ADAPTERS = ("openai_agents", "pydantic_ai", "langgraph")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """In a process of its own: it loads every framework there is an adapter for."""
    command = [sys.executable, str(DOCS / "reference.py"), "--look"]
    told: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return told


def test_the_pages_are_current(found: dict[str, Any]) -> None:
    """If not: `make docs`."""
    assert {file.name: file.read_text("utf-8") for file in (DOCS / "reference").glob("*.md")} == found["pages"]


def test_every_public_name_is_on_exactly_one_page(found: dict[str, Any]) -> None:
    wanted = {f"mulligan.{name}" for name in [*mulligan.__all__, "open"] if name != "tokens"}
    wanted |= {f"mulligan.testing.{name}" for name in testing.__all__}
    wanted |= {f"mulligan.builtins.{name}" for name in builtins.__all__}
    wanted |= {f"mulligan.agents.{adapter}.tools_for" for adapter in ADAPTERS}
    assert wanted - set(found["names"]) == set()
    assert [name for name, count in Counter(found["names"]).items() if count > 1] == []
    assert any(name.startswith("mulligan.tokens.") for name in found["names"])


def test_every_name_and_method_says_its_contract(found: dict[str, Any]) -> None:
    assert found["weak"] == []
    assert found["members"] > len(mulligan.__all__)


def test_the_guide_leads_to_the_reference() -> None:
    assert "../reference/index.md" in (DOCS / "guides" / "python.md").read_text("utf-8")
