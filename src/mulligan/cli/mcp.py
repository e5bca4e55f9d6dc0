"""`mulligan mcp`: the tools over MCP, on stdio or over HTTP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TextIO

import click

from mulligan.cli.doors import work
from mulligan.cli.options import Common, boundary_options, options_saying
from mulligan.values.faults import fault

if TYPE_CHECKING:
    from mulligan.servers.auth import StaticKeys


@click.command()
@click.option("--http", "address", metavar="HOST:PORT", help="Serve over HTTP, at /mcp, instead of stdio.")
@click.option("--tools", "tools", metavar="SETS", default="substrate,coding,history", show_default=True)
@click.option(
    "--profile", metavar="PROVIDER", help="Coding tools as the models of openai, anthropic or gemini know them."
)
@click.option(
    "--token-file", metavar="FILE", type=click.File("r"), help="HTTP: also accept these static keys, one a line."
)
@click.option("--require-token", is_flag=True, help="HTTP: clients must bear a token (`mulligan token create`).")
@boundary_options
@options_saying("The session of a client that names none. Default: one for each client and root.")
def mcp(
    common: Common,
    *,
    address: str | None,
    tools: str,
    profile: str | None,
    token_file: TextIO | None,
    require_token: bool,
    capability: Any,
    policy: Any,
) -> None:
    """Serve the tools to an agent host over MCP.

    Over HTTP with --require-token or --token-file, clients must bear a token made by `mulligan token create`, or one
    of the static keys.
    """
    from mulligan.servers.mcp.door import Asked, choose_sets, serve_plain
    from mulligan.servers.mcp.listing import PROFILES, TOOLSETS, parse_sets

    if parse_sets(tools) is None:
        raise click.UsageError(f"--tools takes some of {','.join(TOOLSETS)}.")
    sets = choose_sets(tools, profile)
    if sets is None:
        raise click.UsageError(f"--profile takes one of {', '.join(PROFILES)}, and needs the coding tools.")
    asked = Asked(common.root, common.store, common.session, sets)
    if common.root is not None and not os.path.isdir(common.root):
        raise fault("unknown_root", f"{common.root} is no folder; --root names the one to serve.")
    _check_boundary(capability, policy)
    if address is None:
        serve_plain(asked, lambda _: work(common, capability=capability, policy=policy))
        return
    try:
        from mulligan.servers.mcp.http import parse_address, serve_http
    except ModuleNotFoundError as error:
        from mulligan.servers.auth import needs_serve

        raise needs_serve("--http", error) from error
    where = parse_address(address)
    if where is None:
        raise click.UsageError("--http takes HOST:PORT.")
    keys = _keys(token_file) if require_token or token_file is not None else None
    with work(common, capability=capability, policy=policy) as opened:
        serve_http(opened, asked, where, keys=keys)


def _check_boundary(capability: Any, policy: Any) -> None:
    """At once, and not with the first tool call."""
    from mulligan.boundary.capability import parse_capability
    from mulligan.boundary.policy import parse_policy

    parse_capability({} if capability is None else capability)
    parse_policy([] if policy is None else policy)


def _keys(file: TextIO | None) -> StaticKeys:
    from mulligan.servers.auth import StaticKeys, read_keys

    if file is None:
        return StaticKeys()
    keys = read_keys(file.read())
    if not keys:
        raise click.UsageError("--token-file holds no key.")
    return keys
