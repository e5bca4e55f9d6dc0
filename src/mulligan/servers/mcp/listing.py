"""The table of tools as it is listed, read from a file beside this module so that listing it loads nothing else.

The file is written by `python -m mulligan.servers.mcp.table` from the tools themselves; a test compares the two.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

TOOLSETS = ("substrate", "coding", "history")
PROFILES = ("openai", "anthropic", "gemini")
"""What may stand for `coding`: the part of it that one provider's models are given, in the words they know."""
FILE = os.path.join(os.path.dirname(__file__), "tools.json")

Tools = list[dict[str, Any]]


class Table(NamedTuple):
    """Who we are, and tools by set, each as `tools/list` shows it."""

    server: dict[str, str]
    tools: dict[str, Tools]


def read_table(path: str = FILE) -> Table:
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    return Table(found["server"], found["tools"])


def tools_in(table: Table, sets: tuple[str, ...]) -> Tools:
    order = ("substrate", "coding", *PROFILES, "history")
    return [tool for name in order if name in sets for tool in table.tools[name]]


def names_of(tools: Tools) -> dict[str, str]:
    """Listed and dotted spellings, to the listed one."""
    return {spelling: tool["name"] for tool in tools for spelling in (tool["name"], tool["title"])}


def parse_sets(text: str) -> tuple[str, ...] | None:
    """The sets a list with commas names; None if one of them is no set."""
    sets = tuple(part.strip() for part in text.split(",") if part.strip())
    return sets if sets and all(one in TOOLSETS for one in sets) else None


def with_profile(sets: tuple[str, ...], profile: str) -> tuple[str, ...] | None:
    """The sets with a provider's tools for `coding`; None if there is no such provider, or nothing to replace."""
    if profile not in PROFILES or "coding" not in sets:
        return None
    return tuple(profile if one == "coding" else one for one in sets)
