"""`mulligan token`: bearer tokens for clients of the servers.

A raw token is printed once, by `create`. No verb takes one as an argument, where every process on the machine could
read it: give it on standard input or in a file, or name the token by its handle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any, TextIO, TypeVar

import click

from mulligan.cli.errors import PARTLY
from mulligan.cli.options import Common, options_saying
from mulligan.cli.output import print_json, print_rows, visible
from mulligan.history.schema import SCHEMA
from mulligan.opening import open_store
from mulligan.session.tokens import HANDLE_PREFIX, Token, Tokens
from mulligan.store.journal import Journal
from mulligan.values.canonical import decode
from mulligan.values.clock import SystemClock
from mulligan.values.faults import MulliganError

F = TypeVar("F", bound=Callable[..., Any])

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_TTL = re.compile(r"(?:\d+[smhdw])+|\d+")
_TTL_MAX = timedelta(days=36_500)
_NOT_USED = "Not used: tokens belong to the store."

_store_options = options_saying(_NOT_USED, root=_NOT_USED)


@contextmanager
def _tokens(common: Common, *, create: bool = False) -> Iterator[Tokens]:
    clock = SystemClock()
    store = open_store(common.store, SCHEMA, durability="process", clock=clock, create=create)
    try:
        yield Tokens(store, Journal(SCHEMA), clock=clock)
    finally:
        store.close()


def _ttl(_: click.Context, __: click.Parameter, given: str | None) -> timedelta | None:
    """How long: 90s, 15m, 12h, 7d, 1d12h; a bare number is seconds."""
    if given is None:
        return None
    if not _TTL.fullmatch(given):
        raise click.BadParameter("give a duration such as 90s, 15m, 12h, 7d or 1d12h.")
    parts = re.findall(r"(\d+)([smhdw]?)", given)
    seconds = sum(int(count[:18]) * _UNITS_S[unit or "s"] for count, unit in parts)
    if not 0 < seconds <= _TTL_MAX.total_seconds():
        raise click.BadParameter("a token lives more than no time and less than a hundred years.")
    return timedelta(seconds=seconds)


def _named(command: F) -> F:
    """The two ways to say which token is meant."""
    file = click.option(
        "--token-file", metavar="FILE", type=click.File("r"), default="-", help="Where the token is; default stdin."
    )
    return click.argument("handle", required=False)(file(command))


def _checked(handle: str | None) -> str | None:
    if handle is not None and not handle.startswith(HANDLE_PREFIX):
        # Never repeated: it may be a token somebody meant to keep.
        raise click.UsageError(f"A handle begins with {HANDLE_PREFIX}. Tokens are read from stdin or --token-file.")
    return handle


@click.group("token", context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@_store_options
@click.pass_context
def token_verb(context: click.Context, common: Common) -> None:
    """Make and end bearer tokens for clients of `mulligan mcp --http`.

    The common options may stand before or after the verb.
    """
    context.obj = common
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _token_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The common options of a verb of this group, with those that stood before it."""

    @_store_options
    @wraps(command)
    def with_outer(common: Common, **own: Any) -> Any:
        outer = click.get_current_context().find_object(Common) or common
        both = replace(common, store=common.store or outer.store, as_json=common.as_json or outer.as_json)
        return command(both, **own)

    return with_outer


@token_verb.command("create")
@click.option("--principal", required=True, metavar="NAME", help="Whom the token stands for.")
@click.option("--ttl", required=True, callback=_ttl, metavar="DURATION", help="How long it works: 15m, 12h, 7d.")
@click.option("--attributes", metavar="JSON", help="A small JSON object kept with it.")
@_token_options
def create(common: Common, principal: str, ttl: timedelta, attributes: str | None) -> None:
    """Make a token and print it. It is not kept: this is the only time it can be had."""
    given = None if attributes is None else _parsed(attributes)
    with _tokens(common, create=True) as tokens:
        made = tokens.create(principal=principal, expires_at=SystemClock().now() + ttl, attributes=given)
    if common.as_json:
        print_json({"id": made.id, **made.to_dict()})
        return
    click.echo(made.id)
    click.echo(f"For {visible(principal)}, until {made.expires_at}. Its handle is {made.handle}.", err=True)


def _parsed(attributes: str) -> Any:
    try:
        return decode(attributes)
    except MulliganError as error:
        raise click.UsageError(f"--attributes: {error.message}") from None


@token_verb.command("get")
@_named
@_token_options
def get(common: Common, handle: str | None, token_file: TextIO) -> int:
    """Show a token that works. Exit code 1 if it does not."""
    with _tokens(common) as tokens:
        named = _checked(handle)
        if named is None:
            return _tell(common, tokens.get(_token_in(token_file)))
        found = tokens.named(named)
        return _tell(common, None if found is None or tokens.is_over(found) else found)


@token_verb.command("touch")
@click.option("--ttl", callback=_ttl, metavar="DURATION", help="Let it end so long from now instead.")
@_named
@_token_options
def touch(common: Common, handle: str | None, ttl: timedelta | None, token_file: TextIO) -> int:
    """Count a token as seen now. Exit code 1 if it does not work, and then nothing changes."""
    ends = None if ttl is None else SystemClock().now() + ttl
    with _tokens(common) as tokens:
        named = _checked(handle)
        if named is not None:
            return _tell(common, tokens.touch_named(named, expires_at=ends))
        return _tell(common, tokens.touch(_token_in(token_file), expires_at=ends))


@token_verb.command("expire")
@_named
@_token_options
def expire(common: Common, handle: str | None, token_file: TextIO) -> int:
    """Revoke a token, now and for good. Exit code 1 if there is none."""
    with _tokens(common) as tokens:
        named = _checked(handle)
        ended = tokens.expire(_token_in(token_file)) if named is None else tokens.expire_named(named)
        return _tell(common, ended)


@token_verb.command("list")
@click.option("--principal", metavar="NAME", help="Only those of one principal.")
@click.option("--all", "everything", is_flag=True, help="Those that no longer work too.")
@_token_options
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
        raise click.UsageError("Give the token on standard input or with --token-file, or name it by its handle.")
    return given


def _tell(common: Common, found: Token | None) -> int:
    if common.as_json:
        print_json(None if found is None else found.to_dict())
    elif found is None:
        click.echo("No such token works.", err=True)
    else:
        print_rows([(name, _shown(value)) for name, value in found.to_dict().items()])
    return PARTLY if found is None else 0


def _shown(value: object) -> str:
    from mulligan.values.canonical import encode

    return value if isinstance(value, str) else encode(value).decode("utf-8")
