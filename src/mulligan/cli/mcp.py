"""`mulligan mcp`: the tools over MCP, on stdio or over HTTP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.doors import work
from mulligan.cli.options import Common, boundary_options, options_saying
from mulligan.cli.output import visible
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
    "--token-file",
    metavar="FILE",
    help="HTTP: accept these static keys, one a line. A missing file is created with one random key.",
)
@click.option("--require-token", is_flag=True, help="HTTP: changes nothing, because a token is always required.")
@boundary_options
@options_saying("The session of a client that names none. Default: one for each client and root.")
def mcp(
    common: Common,
    *,
    address: str | None,
    tools: str,
    profile: str | None,
    token_file: str | None,
    require_token: bool,
    capability: Any,
    policy: Any,
) -> None:
    """Serve the tools to an agent host over MCP.

    Over HTTP every request must carry a token made by `mulligan token create`, or a key of --token-file. Without
    --token-file, Mulligan makes a key for this process and prints it once on stderr.
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
    keys = _keys(token_file)
    with work(common, capability=capability, policy=policy) as opened:
        serve_http(opened, asked, where, keys=keys)


def _check_boundary(capability: Any, policy: Any) -> None:
    """At once, and not with the first tool call."""
    from mulligan.boundary.capability import parse_capability
    from mulligan.boundary.policy import parse_policy

    parse_capability({} if capability is None else capability)
    parse_policy([] if policy is None else policy)


def _keys(path: str | None) -> StaticKeys:
    """The keys that clients may send."""
    from mulligan.servers.auth import StaticKeys, create_key_file, read_keys
    from mulligan.session.tokens import random_token

    if path is None:
        key = random_token()
        click.echo(f"mulligan: clients send this key as Authorization: Bearer {key}", err=True)
        return StaticKeys([key])
    try:
        if path != "-" and create_key_file(path):
            click.echo(
                f"mulligan: created {visible(path)} with one key; clients send it as Authorization: Bearer", err=True
            )
        with click.open_file(path) as file:
            keys = read_keys(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--token-file: {error}") from None
    if not keys:
        raise click.UsageError("--token-file holds no key.")
    return keys
