"""The options that every verb takes, the exit code of every error, and the questions before a destructive verb."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

import click

from mulligan.cli.format import print_json
from mulligan.values.errors import INTEGRITY_CODES, Family, MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, parse_user_id
from mulligan.values.text import visible

F = TypeVar("F", bound=Callable[..., Any])
_GIVEN = "mulligan.common"

DEFAULT_SESSION = "default"
"""The session of verbs that work in one session, if the user names none."""


def text(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Checks names of calls, messages and sessions: a shell passes any bytes, and not all of them are text."""
    try:
        (given or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{given!r} is not text.", context, parameter) from None
    return given


def _session_id(_: click.Context, __: click.Parameter, given: str | None) -> str | None:
    return None if given is None else parse_user_id(given, "--session")


STORE_HELP = "a directory, sqlite:///directory, postgresql://user@host/database"


def store_url(_: click.Context, __: click.Parameter, given: str | None) -> str | None:
    """Checks that the store on the command line names no password, and hides the one of the environment."""
    if given is None and "MULLIGAN_STORE" not in os.environ:
        return None
    from mulligan.api import hide_secrets, refuse_secret

    hide_secrets()
    return refuse_secret(given)


@fast_dataclass(slots=True, frozen=True)
class Common:
    """The options that every verb takes. `root` is None if the user gave none; each verb has its own default."""

    root: str | None
    session: str | None
    store: str | None
    as_json: bool

    @property
    def session_id(self) -> SessionId | None:
        return None if self.session is None else SessionId(self.session)

    def answer(self, body: object, *lines: str) -> None:
        """Prints the body if the user wants JSON, else the lines."""
        if self.as_json:
            print_json(body)
            return
        for line in lines:
            click.echo(line)

    def beside(self, before: Common | None) -> Common:
        """These options; where one is missing, the one that the user gave before the sub-verb."""
        if before is None:
            return self
        return Common(
            self.root if self.root is not None else before.root,
            self.session if self.session is not None else before.session,
            self.store if self.store is not None else before.store,
            self.as_json or before.as_json,
        )


def json_given(context: click.Context, parameter: click.Parameter, given: str | None) -> Any:
    """The JSON that the option holds, or that the file it names holds."""
    from mulligan.values.canonical import decode

    if given is None:
        return None
    if given.lstrip().startswith(("{", "[")):
        return decode(given)
    with click.File("rb").convert(given, parameter, context) as file:
        return decode(file.read())


yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
turn_option = click.option("--turn", metavar="ID", help="Calls with the same turn are rolled back together.")


def boundary_options(command: F) -> F:
    """Adds `capability` and `policy` to a verb, each as parsed JSON or None."""
    capability = click.option(
        "--capability", metavar="JSON|FILE", callback=json_given, help="What sessions here may do."
    )
    policy = click.option(
        "--policy", metavar="JSON|FILE", callback=json_given, help="Rules that narrow it; the last match wins."
    )
    return capability(policy(command))


THIS_SESSION = "Only this session."
WORKING_SESSION = f"The session to work in. Default: '{DEFAULT_SESSION}'."
_ROOT = "The workspace. Default: the nearest known root that contains this folder, else this folder."
_JSON = "Print one JSON document instead of text."


def options_saying(session: str, root: str = _ROOT, as_json: str = _JSON) -> Callable[[F], Callable[..., Any]]:
    """Adds the common options to a verb, as one first argument; the parameters are their help texts.

    Every verb takes all of them, so that a script can pass the same options to all. If a verb does not use one, the
    help text says so.
    """
    options = (
        click.option("--json", "as_json", is_flag=True, help=as_json),
        click.option("--store", metavar="URL", callback=store_url, help=f"The store: {STORE_HELP}, or memory:."),
        click.option("--session", metavar="ID", callback=_session_id, help=session),
        click.option("--root", metavar="DIR", type=click.Path(file_okay=False), help=root),
    )

    def give(command: F) -> Callable[..., Any]:
        @wraps(command)
        def with_common(root: str | None, session: str | None, store: str | None, as_json: bool, **own: Any) -> Any:
            # Click shares `meta` between a verb and its sub-verb: `sessions --store X show Y` means store X too.
            meta = click.get_current_context().meta
            meta[_GIVEN] = given = Common(root, session, store, as_json).beside(meta.get(_GIVEN))
            return command(given, **own)

        wrapped: Callable[..., Any] = with_common
        for option in options:
            wrapped = option(wrapped)
        return wrapped

    return give


def common_options(command: F) -> Callable[..., Any]:
    """The common options of a verb that reads history or undoes."""
    return options_saying(THIS_SESSION)(command)


def working_options(command: F) -> Callable[..., Any]:
    """The common options of a verb that works in one session."""
    return options_saying(WORKING_SESSION)(command)


PARTLY, BAD_USAGE, INTEGRITY, INTERRUPTED = 1, 2, 3, 130


def exit_code_of_fault(error: MulliganError) -> int:
    if error.code in INTEGRITY_CODES:
        return INTEGRITY
    return PARTLY if error.family is Family.CONFLICT else BAD_USAGE


def exit_code_of(error: Exception, *, as_json: bool) -> int:
    """Prints the error and returns its exit code."""
    if isinstance(error, MulliganError):
        _print_error(error.message, code=error.code, as_json=as_json, details=error.details)
        return exit_code_of_fault(error)
    if isinstance(error, BrokenPipeError):
        # The reader has closed the pipe; without this the interpreter would print an error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PARTLY
    if isinstance(error, click.ClickException):
        hint = f" Try '{error.ctx.command_path} --help'." if isinstance(error, click.UsageError) and error.ctx else ""
        _print_error(error.format_message() + hint, code="bad_usage", as_json=as_json)
        return BAD_USAGE
    _print_error("Interrupted.", code="cancelled", as_json=as_json)
    return INTERRUPTED


def _print_error(message: str, *, code: str, as_json: bool, details: Mapping[str, Any] = MappingProxyType({})) -> None:
    sessions = {"sessions": details["sessions"]} if "sessions" in details else {}
    if as_json:
        print_json({"error": {"code": code, "message": message, **sessions}})
    click.echo(f"mulligan: {visible(' '.join(message.split()))}", err=True)
    for line in details.get("choices", ()):
        click.echo(f"  {visible(line)}", err=True)


def can_ask(common: Common) -> bool:
    """Whether a person can see and answer a question. Mulligan never asks a script that wants JSON."""
    return not common.as_json and sys.stdin.isatty() and sys.stdout.isatty()


def ask(question: str, *, default: bool = False) -> None:
    """Returns if the answer is yes; otherwise the verb ends with exit code 1 and changes nothing."""
    if not click.confirm(question, default=default):
        raise click.exceptions.Exit(PARTLY)


def confirm(common: Common, question: str, *, yes: bool, otherwise: str) -> None:
    """Asks before a destructive verb, unless the user gave --yes. Without a terminal a missing --yes is bad usage."""
    if yes:
        return
    if not can_ask(common):
        raise click.UsageError(otherwise)
    ask(question)
