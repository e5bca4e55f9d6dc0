"""The options every verb takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True, frozen=True)
class Common:
    """`root` is None unless given: what it then means is the verb's business."""

    root: str | None
    session: str | None
    store: str | None
    as_json: bool


_OPTIONS = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text."),
    click.option("--store", metavar="URL", help="The store: a directory, sqlite:///directory, or memory:."),
    click.option("--session", metavar="ID", help="Only this session."),
    click.option("--root", metavar="DIR", type=click.Path(file_okay=False), help="The workspace."),
)


def common_options(command: F) -> Callable[..., Any]:
    """Give the verb its common options, as one value in front of its own."""

    @wraps(command)
    def with_common(root: str | None, session: str | None, store: str | None, as_json: bool, **own: Any) -> Any:
        return command(Common(root, session, store, as_json), **own)

    wrapped: Callable[..., Any] = with_common
    for option in _OPTIONS:
        wrapped = option(wrapped)
    return wrapped
