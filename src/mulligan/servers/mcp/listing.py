"""The table of tools as it is listed, read from a file beside this module so that listing it loads nothing else.

The file is written by `python -m mulligan.servers.mcp.table` from the tools themselves; a test compares the two.
"""

from __future__ import annotations

import json
import os
from typing import Any

TOOLSETS = ("substrate", "coding", "history")
TABLE = os.path.join(os.path.dirname(__file__), "tools.json")


def read_table(path: str = TABLE) -> dict[str, list[dict[str, Any]]]:
    """Tools by set, each as `tools/list` shows it."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    assert isinstance(found, dict)
    return found


def listed_tools(sets: tuple[str, ...]) -> list[dict[str, Any]]:
    table = read_table()
    return [tool for name in TOOLSETS if name in sets for tool in table[name]]


def names_of(tools: list[dict[str, Any]]) -> dict[str, str]:
    """Listed and dotted spellings, to the listed one."""
    return {spelling: tool["name"] for tool in tools for spelling in (tool["name"], tool["title"])}
