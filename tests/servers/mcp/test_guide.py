"""The guide says what is there."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mulligan.servers.mcp.protocol import TOOLSETS, read_table
from mulligan.servers.mcp.stdio import parse_plain

GUIDE = Path(__file__).parents[3] / "docs/guides/mcp.md"


def test_the_guide_lists_every_tool() -> None:
    text = GUIDE.read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    table = read_table().tools
    assert {name: re.findall(r"`(\w+)`", rows[name]) for name in TOOLSETS} == {
        name: [tool["name"] for tool in table[name]] for name in TOOLSETS
    }


def words_of(kind: str, block: str) -> list[str]:
    """The command a host would start, as its configuration in the guide says."""
    if not kind:
        words = shlex.split(block)
        return shlex.split(words[-1]) if "--with-extension" in words else words[words.index("--") + 1 :]
    config: Any = json.loads(block) if kind == "json" else tomllib.loads(block)
    for name in ("mcpServers", "mcp_servers", "servers", "mcp"):
        config = config.get(name, config)
    command = config["mulligan"]["command"]
    return list(command) if isinstance(command, list) else [command, *config["mulligan"]["args"]]


def commands() -> Iterator[list[str]]:
    hosts = GUIDE.read_text("utf-8").split("## Hosts")[1].split("## Tools")[0]
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", hosts, re.MULTILINE | re.DOTALL):
        yield words_of(kind, block)


def test_what_the_guide_tells_hosts_to_start_is_understood() -> None:
    found = list(commands())
    assert len(found) == 8
    for program, verb, *options in found:
        assert (program, verb) == ("mulligan", "mcp")
        assert parse_plain(options) is not None
