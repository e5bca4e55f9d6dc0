"""The options every verb takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from mulligan.values.ids import parse_user_id
from mulligan.values.plain import plain

F = TypeVar("F", bound=Callable[..., Any])
_GIVEN = "mulligan.common"

DEFAULT_SESSION = "default"
"""The session of verbs that work in one when none is named."""


def text(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """For names of calls, messages and sessions: a shell hands over any bytes, and not all of them are text."""
    try:
        (given or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{given!r} is not text.", context, parameter) from None
    return given


def _session_id(_: click.Context, __: click.Parameter, given: str | None) -> str | None:
    return None if given is None else parse_user_id(given, "--session")


@plain(slots=True, frozen=True)
class Common:
    """`root` is None unless given: what it then means is the verb's business."""

    root: str | None
    session: str | None
    store: str | None
    as_json: bool

    def beside(self, before: Common | None) -> Common:
        """These options, and those given before the sub-verb where these leave one out."""
        if before is None:
            return self
        return Common(
            self.root if self.root is not None else before.root,
            self.session if self.session is not None else before.session,
            self.store if self.store is not None else before.store,
            self.as_json or before.as_json,
        )


def json_given(context: click.Context, parameter: click.Parameter, given: str | None) -> Any:
    """What a file holds, or the text itself where it is plainly JSON."""
    from mulligan.values.canonical import decode

    if given is None:
        return None
    if given.lstrip().startswith(("{", "[")):
        return decode(given)
    with click.File("rb").convert(given, parameter, context) as file:
        return decode(file.read())


def boundary_options(command: F) -> F:
    """Give the verb `capability` and `policy`, each as what its JSON says, or None."""
    capability = click.option(
        "--capability", metavar="JSON|FILE", callback=json_given, help="What may be done, by any session here."
    )
    policy = click.option(
        "--policy",
        metavar="JSON|FILE",
        callback=json_given,
        help="Rules that narrow that further; the last that fits.",
    )
    return capability(policy(command))


THIS_SESSION = "Only this session."
WORKING_SESSION = f"The session to work in. Default: '{DEFAULT_SESSION}'."
_ROOT = "The workspace. Default: the nearest known one around this folder, else this folder."
_JSON = "Print one JSON document instead of text."


def options_saying(session: str, root: str = _ROOT, as_json: str = _JSON) -> Callable[[F], Callable[..., Any]]:
    """Give the verb its common options, as one value in front of its own. The words say what they mean for it.

    Every verb takes all of them, so that one line of options fits all; where one can mean nothing, its words say so.
    """
    options = (
        click.option("--json", "as_json", is_flag=True, help=as_json),
        click.option("--store", metavar="URL", help="The store: a directory, sqlite:///directory, or memory:."),
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
    """The common options of a verb that looks, or goes back."""
    return options_saying(THIS_SESSION)(command)


def working_options(command: F) -> Callable[..., Any]:
    """The common options of a verb that works in one session."""
    return options_saying(WORKING_SESSION)(command)
