"""`mulligan mcp`: the tools over MCP, on stdio or over HTTP."""

from __future__ import annotations

from typing import TextIO

import click

from mulligan.cli.doors import work
from mulligan.cli.options import Common, common_options


@click.command()
@click.option("--http", "address", metavar="HOST:PORT", help="Serve over HTTP, at /mcp, instead of stdio.")
@click.option("--tools", "tools", metavar="SETS", default="substrate,coding,history", show_default=True)
@click.option("--token-file", type=click.File("r"), help="HTTP: clients must bear one of these tokens, one a line.")
@common_options
def mcp(common: Common, address: str | None, tools: str, token_file: TextIO | None) -> None:
    """Serve the tools to an agent host over MCP."""
    from mulligan.servers.mcp.door import Asked, serve_plain
    from mulligan.servers.mcp.listing import TOOLSETS, parse_sets

    sets = parse_sets(tools)
    if sets is None:
        raise click.UsageError(f"--tools takes some of {','.join(TOOLSETS)}.")
    asked = Asked(common.root, common.store, common.session, sets)
    if address is None:
        serve_plain(asked, lambda _: work(common))
        return
    from mulligan.servers.mcp.http import parse_address, serve_http

    where = parse_address(address)
    if where is None:
        raise click.UsageError("--http takes HOST:PORT.")
    tokens: frozenset[str] = frozenset() if token_file is None else frozenset(token_file.read().split())
    with work(common) as opened:
        serve_http(opened, asked, where, tokens=tokens)
