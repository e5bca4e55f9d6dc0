"""`mulligan mcp` and `mulligan acp` start the servers; `mulligan token` manages the bearer tokens of their clients.

`token create` prints a raw token once. No verb takes a raw token as an argument, because every process on the machine
can read the arguments: the user gives it on standard input or in a file, or names the token by its handle.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from mulligan.cli.format import print_json, print_rows
from mulligan.cli.open_root import open_for_changes, opened_store
from mulligan.cli.options import PARTLY, Common, boundary_options, options_saying
from mulligan.session.tokens import HANDLE_PREFIX, Token, Tokens
from mulligan.values import VERSION
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError, fault
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.servers.acp.undo import Workspaces
    from mulligan.servers.auth import StaticKeys
    from mulligan.store.protocol import Store

F = TypeVar("F", bound=Callable[..., Any])

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_TTL = re.compile(r"(?:\d+[smhdw])+|\d+")
_TTL_MAX = timedelta(days=36_500)
_NOT_USED = "Not used: tokens belong to the store."

_store_options = options_saying(_NOT_USED, root=_NOT_USED)


@click.command()
@click.option("--http", "address", metavar="HOST:PORT", help="Serve over HTTP, at /mcp, instead of stdio.")
@click.option(
    "--tools",
    metavar="SETS",
    default="substrate,coding,history",
    show_default=True,
    help="The sets of tools to offer, separated by commas.",
)
@click.option(
    "--profile",
    metavar="PROVIDER",
    help="Offer the coding tools in the form that models of openai, anthropic or gemini know.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    help="HTTP: a file of static keys, one on each line. If it is missing, Mulligan creates it with a random key.",
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
    from mulligan.servers.mcp.protocol import PROFILES, TOOLSETS, parse_sets
    from mulligan.servers.mcp.stdio import McpOptions, choose_sets, serve_plain

    if parse_sets(tools) is None:
        raise click.UsageError(f"--tools takes some of {','.join(TOOLSETS)}.")
    sets = choose_sets(tools, profile)
    if sets is None:
        raise click.UsageError(f"--profile takes one of {', '.join(PROFILES)}, and needs the coding tools.")
    asked = McpOptions(common.root, common.store, common.session, sets)
    if common.root is not None and not os.path.isdir(common.root):
        raise fault("unknown_root", f"{common.root} is not a folder; --root names the folder to serve.")
    _check_boundary(capability, policy)
    if address is None:
        serve_plain(asked, lambda _: open_for_changes(common, capability=capability, policy=policy))
        return
    try:
        from mulligan.servers.mcp.http import parse_address, serve_http
    except ModuleNotFoundError as error:
        from mulligan.servers.auth import needs_serve

        raise needs_serve("--http", error) from error
    where = parse_address(address)
    if where is None:
        raise click.UsageError("--http takes HOST:PORT.")
    from mulligan.servers.http.server import bind

    # Uvicorn reports an address in use late and in its own words, when the key has been printed already.
    bind(*where, "--http").close()
    keys = _keys(token_file)
    with open_for_changes(common, capability=capability, policy=policy) as opened:
        serve_http(opened, asked, where, keys=keys)


def _check_boundary(capability: Any, policy: Any) -> None:
    """Raises for a wrong boundary at the start, not with the first tool call."""
    from mulligan.boundary.capability import parse_capability
    from mulligan.boundary.policy import parse_policy

    parse_capability({} if capability is None else capability)
    parse_policy([] if policy is None else policy)


def _keys(path: str | None) -> StaticKeys:
    """The keys that clients may send."""
    from mulligan.servers.auth import StaticKeys
    from mulligan.session.tokens import random_token

    if path is not None:
        return read_key_file(path, "--token-file")
    key = random_token()
    click.echo(f"mulligan: clients send this key as Authorization: Bearer {key}", err=True)
    return StaticKeys([key])


def read_key_file(path: str, option: str) -> StaticKeys:
    """The static keys in a file, which is created with one random key if it is not there."""
    from mulligan.servers.auth import create_key_file, read_keys

    try:
        if path != "-" and create_key_file(path):
            click.echo(
                f"mulligan: created {visible(path)} with one key; clients send it as Authorization: Bearer", err=True
            )
        with click.open_file(path) as file:
            keys = read_keys(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{option}: {error}") from None
    if not keys:
        raise click.UsageError(f"{option} has no key in it.")
    return keys


@click.command("acp", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--provider", metavar="NAME[:MODEL]", help="The model of Mulligan's own agent: openai, litellm, claude or mock."
)
@click.option(
    "--mode",
    type=click.Choice(["ask", "auto", "read"]),
    default="auto",
    show_default=True,
    help="Ask before each change, do not ask, or only read.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@options_saying(
    "Not used: the client names its sessions.",
    root="With a command: the root to record every session in. Default: the folder that the client works in.",
)
def acp_verb(common: Common, provider: str | None, mode: str, command: tuple[str, ...]) -> int:
    """Serve an agent on stdio to an editor or client that speaks the Agent Client Protocol.

    With `-- COMMAND…`, run that agent as a proxy: Mulligan records what the agent does to files, and the client can
    undo it.
    """
    if command:
        return _proxy(common, list(command))
    _serve(common, provider, mode)
    return 0


def _serve(common: Common, provider: str | None, mode: str) -> None:
    from mulligan.api import PromptWork, chosen_provider
    from mulligan.servers.acp.agent import AcpAgent, AgentConfig
    from mulligan.servers.acp.wire import Wire

    with ExitStack() as opened:
        agent = AcpAgent(AgentConfig(_workspaces(common, opened), PromptWork(chosen_provider(provider)), VERSION, mode))
        agent.wire = Wire(sys.stdin.buffer, sys.stdout.buffer, agent.handle)
        agent.wire.serve()


def _proxy(common: Common, command: list[str]) -> int:
    from mulligan.servers.acp.relay import run_proxy

    opened = ExitStack()
    code = run_proxy(command, workspaces=_workspaces(common, opened), root=common.root)
    try:
        opened.close()
    except MulliganError as error:
        # The exit code is the agent's, even if closing the store fails.
        click.echo(f"mulligan: {error.message}", err=True)
    return code


def _workspaces(common: Common, opened: ExitStack) -> Workspaces:
    """Opens folders and their store on demand; `opened` closes them at the end."""
    from mulligan.servers.acp.undo import Workspaces

    def folder(path: str) -> Mulligan:
        from mulligan.api import open as open_folder

        return opened.enter_context(open_folder(path, store=common.store))

    def store() -> Store:
        return opened.enter_context(opened_store(common.store, create=True))

    return Workspaces(folder, store)


@contextmanager
def _tokens(common: Common, *, create: bool = False) -> Iterator[Tokens]:
    from mulligan.history.projection import SCHEMA
    from mulligan.store.journal import Journal

    with opened_store(common.store, create=create) as store:
        yield Tokens(store, Journal(SCHEMA), clock=SystemClock())


def _ttl(_: click.Context, __: click.Parameter, given: str | None) -> timedelta | None:
    """Parses a duration: 90s, 15m, 12h, 7d, 1d12h; a bare number is seconds."""
    if given is None:
        return None
    if not _TTL.fullmatch(given):
        raise click.BadParameter("give a duration such as 90s, 15m, 12h, 7d or 1d12h.")
    parts = re.findall(r"(\d+)([smhdw]?)", given)
    seconds = sum(int(count[:18]) * _UNITS_S[unit or "s"] for count, unit in parts)
    if not 0 < seconds <= _TTL_MAX.total_seconds():
        raise click.BadParameter("give more than zero seconds and less than a hundred years.")
    return timedelta(seconds=seconds)


def _token_options(command: F) -> F:
    """Adds the two ways to name a token: its handle, or a file with the token in it."""
    file = click.option(
        "--token-file",
        metavar="FILE",
        type=click.File("r"),
        default="-",
        help="A file with the token in it. Default: stdin.",
    )
    return click.argument("handle", required=False)(file(command))


def _checked_handle(handle: str | None) -> str | None:
    if handle is not None and not handle.startswith(HANDLE_PREFIX):
        # The message does not repeat the text: it may be a secret token.
        raise click.UsageError(f"A handle begins with {HANDLE_PREFIX}. Tokens are read from stdin or --token-file.")
    return handle


@click.group("token", context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@_store_options
@click.pass_context
def token_verb(context: click.Context, common: Common) -> None:
    """Create, show and revoke bearer tokens for clients of `mulligan serve` and `mulligan mcp --http`.

    You can give the common options before or after the sub-verb.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@token_verb.command("create")
@click.option("--principal", required=True, metavar="NAME", help="The person or program that uses the token.")
@click.option("--ttl", required=True, callback=_ttl, metavar="DURATION", help="How long it works: 15m, 12h, 7d.")
@click.option("--attributes", metavar="JSON", help="A small JSON object to store with the token.")
@click.option(
    "--role",
    type=click.Choice(["observer", "controller"]),
    help="What the token may do on `mulligan serve`: only read, or everything. Default: controller.",
)
@_store_options
def create(common: Common, *, principal: str, ttl: timedelta, attributes: str | None, role: str | None) -> None:
    """Create a token and print it. Mulligan does not store it, so this is the only time you see it."""
    given = None if attributes is None else _parsed(attributes)
    if role is not None:
        if given is not None and not isinstance(given, dict):
            raise click.UsageError("--attributes takes a JSON object.")
        given = {**(given or {}), "role": role}
    with _tokens(common, create=True) as tokens:
        made = tokens.create(principal=principal, expires_at=SystemClock().now() + ttl, attributes=given)
    common.answer({"id": made.id, **made.to_dict()}, made.id or "")
    if not common.as_json:
        click.echo(f"For {visible(principal)}, until {made.expires_at}. Its handle is {made.handle}.", err=True)


def _parsed(attributes: str) -> Any:
    try:
        return decode(attributes)
    except MulliganError as error:
        raise click.UsageError(f"--attributes: {error.message}") from None


@token_verb.command("get")
@_token_options
@_store_options
def get(common: Common, handle: str | None, token_file: TextIO) -> int:
    """Show a valid token. Exit code 1 if it is not valid."""
    with _tokens(common) as tokens:
        named = _checked_handle(handle)
        if named is None:
            return _print_token(common, tokens.get(_token_in(token_file)))
        found = tokens.named(named)
        return _print_token(common, None if found is None or tokens.is_over(found) else found)


@token_verb.command("touch")
@click.option("--ttl", callback=_ttl, metavar="DURATION", help="Also set a new end: this long from now.")
@_token_options
@_store_options
def touch(common: Common, handle: str | None, ttl: timedelta | None, token_file: TextIO) -> int:
    """Mark a token as seen now. Exit code 1 if it is not valid; then nothing changes."""
    ends = None if ttl is None else SystemClock().now() + ttl
    with _tokens(common) as tokens:
        named = _checked_handle(handle)
        if named is not None:
            return _print_token(common, tokens.touch_named(named, expires_at=ends))
        return _print_token(common, tokens.touch(_token_in(token_file), expires_at=ends))


@token_verb.command("expire")
@_token_options
@_store_options
def expire(common: Common, handle: str | None, token_file: TextIO) -> int:
    """Revoke a token now. It cannot become valid again. Exit code 1 if there is no such token."""
    with _tokens(common) as tokens:
        named = _checked_handle(handle)
        ended = tokens.expire(_token_in(token_file)) if named is None else tokens.expire_named(named)
        return _print_token(common, ended)


@token_verb.command("list")
@click.option("--principal", metavar="NAME", help="Only tokens of this principal.")
@click.option("--all", "everything", is_flag=True, help="Also list tokens that are no longer valid.")
@_store_options
def list_verb(common: Common, principal: str | None, everything: bool) -> None:
    """List tokens by their handles, oldest first."""
    with _tokens(common) as tokens:
        found = [(one, tokens.is_over(one)) for one in tokens.listed(principal)]
    shown = [(one, over) for one, over in found if everything or not over]
    if common.as_json:
        print_json([{**one.to_dict(), "expired": over} for one, over in shown])
        return
    rows = [(one.handle, "expired" if over else "", one.expires_at, one.principal) for one, over in shown]
    if rows:
        print_rows(rows)


def _token_in(file: TextIO) -> str:
    given = file.read(65_536).strip()
    if not given:
        raise click.UsageError("Give the token on standard input or with --token-file, or give its handle.")
    return given


def _print_token(common: Common, found: Token | None) -> int:
    if common.as_json:
        print_json(None if found is None else found.to_dict())
    elif found is None:
        click.echo("There is no such valid token.", err=True)
    else:
        print_rows([(name, _shown(value)) for name, value in found.to_dict().items()])
    return PARTLY if found is None else 0


def _shown(value: object) -> str:
    return value if isinstance(value, str) else encode(value).decode("utf-8")
