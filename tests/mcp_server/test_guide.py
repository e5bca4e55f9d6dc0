"""The guide says what is there."""

from __future__ import annotations

import re
from pathlib import Path

from mulligan.servers.mcp.listing import TOOLSETS, read_table

GUIDE = Path(__file__).parent.parent.parent / "docs/guides/mcp.md"


def test_the_guide_lists_every_tool() -> None:
    text = GUIDE.read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    table = read_table().tools
    assert {name: re.findall(r"`(\w+)`", rows[name]) for name in TOOLSETS} == {
        name: [tool["name"] for tool in table[name]] for name in TOOLSETS
    }
