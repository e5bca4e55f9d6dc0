"""How `mulligan mcp` begins: quickly, on stdio; whatever is more than that takes the ordinary way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mulligan.servers.mcp.listing import TOOLSETS, parse_sets, with_profile

if TYPE_CHECKING:
    from mulligan.boundary.verdict import Boundary
    from mulligan.history.desk import Desk
    from mulligan.servers.mcp.toolbox import Toolbox


class Workspace(Protocol):
    """An open workspace, as the composition root makes it."""

    desk: Desk
    boundary: Boundary

    def close(self) -> None: ...


class Asked(NamedTuple):
    """What was asked for on the command line."""

    root: str | None = None
    store: str | None = None
    session: str | None = None
    sets: tuple[str, ...] = TOOLSETS


INTERRUPTED = 130
"""The exit code of a program that an interrupt ended."""

OpenWorkspace = Callable[[Asked], Workspace]

_PLAIN = {"--root": "root", "--store": "store", "--session": "session", "--tools": "sets", "--profile": "profile"}


def parse_plain(words: Sequence[str]) -> Asked | None:
    """The plain options of stdio; None for anything else, which the command line proper understands or refuses."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in _PLAIN or (not equals and not rest):
            return None
        found[_PLAIN[name]] = value if equals else rest.pop(0)
    sets = choose_sets(found.get("sets"), found.get("profile"))
    return None if sets is None else Asked(found.get("root"), found.get("store"), found.get("session"), sets)


def choose_sets(tools: str | None, profile: str | None) -> tuple[str, ...] | None:
    """The sets asked for, by their names and a provider's; None if that makes no sense."""
    sets = TOOLSETS if tools is None else parse_sets(tools)
    return sets if sets is None or profile is None else with_profile(sets, profile)


def serve_plain(asked: Asked, open_workspace: OpenWorkspace) -> None:
    """Serve stdio. The workspace is opened when it is needed, and closed at the end."""
    from mulligan.servers.mcp.stdio import serve_stdio

    opened: list[Workspace] = []

    def open_tools() -> Toolbox:
        opened.append(open_workspace(asked))
        return toolbox_of(opened[-1], asked)

    try:
        serve_stdio(open_tools, asked.sets)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        for workspace in opened:
            workspace.close()


def toolbox_of(workspace: Workspace, asked: Asked) -> Toolbox:
    # Loaded when the first tool is wanted: everything the tools need takes longer than a host waits for their list.
    from mulligan.servers.mcp.toolbox import Toolbox

    return Toolbox(workspace.desk, workspace.boundary, asked.session)
