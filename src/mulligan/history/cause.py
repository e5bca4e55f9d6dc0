"""What a call is: work of an agent, an undo operation, a part of another call, an observed call, a merge, or a fork.

The record of a call's begin holds its cause as JSON, and so does its row; this module has the only code that reads and
writes that JSON. OwnWork has no cause on record. The names of the JSON's fields never change: stores hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

from mulligan.values.canonical import decode
from mulligan.values.fast_dataclass import fast_dataclass

Json: TypeAlias = dict[str, Any]


@fast_dataclass(slots=True, frozen=True)
class OwnWork:
    """The call is an agent's own work."""

    verb: ClassVar[None] = None


@fast_dataclass(slots=True, frozen=True)
class UndoOperation:
    """The call undoes others: those in `of` wholly, and some paths of those in `part`.

    `left` are those of `part` of which a conflict left something. `turn` is the turn that a rollback undid, `scope` the
    client's own snapshot that was restored. `hunks`: of the paths in `part`, only some hunks were undone.
    """

    verb: str
    of: tuple[str, ...] = ()
    part: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    turn: str | None = None
    scope: str | None = None
    hunks: bool = False


@fast_dataclass(slots=True, frozen=True)
class PartOfCall:
    """The call is the part of another call in another root. `verb`: that other call is this undo operation.

    `late`: it is what a process did that the call's `command` had left running, after the call had ended.
    """

    part_of: str
    verb: str | None = None
    late: bool = False
    command: str | None = None


@fast_dataclass(slots=True, frozen=True)
class ObservedTool:
    """The call is a tool of another program's agent. `window`: it may change anything below the root while it runs.

    `since` is the newest record of the workspace when it began. `pid` and `born` say which process the agent is.
    `unstable` are paths that changed during every read before the tool ran. `about` is what the observer wants to find
    again.
    """

    window: bool
    since: int = 0
    began_s: float | None = None
    pid: int | None = None
    born: str | None = None
    unstable: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    verb: ClassVar[None] = None


@fast_dataclass(slots=True, frozen=True)
class MergedCopy:
    """The call brings the changes of a copy back. `copy` is the root of the copy, `session` the fork whose it is.

    `root` is the path of a sandboxed root. `mixed` is what the copy held at paths where both sides are mixed.
    """

    copy: str
    session: str | None = None
    root: str | None = None
    mixed: Mapping[str, Any] = field(default_factory=dict)
    verb: ClassVar[str] = "merge"


@fast_dataclass(slots=True, frozen=True)
class ForkedFiles:
    """The call puts the files of a fork's copy back to what they were at a call of its parent."""

    at: str
    verb: ClassVar[str] = "fork"


Cause: TypeAlias = OwnWork | UndoOperation | PartOfCall | ObservedTool | MergedCopy | ForkedFiles

WORK = OwnWork()
_OBSERVED = frozenset({"window", "since", "began_s", "pid", "born", "unstable"})


def cause_to_json(cause: Cause) -> Json | None:
    """None for own work, which has no cause in the record."""
    if isinstance(cause, OwnWork):
        return None
    if isinstance(cause, UndoOperation):
        body: Json = {"verb": cause.verb, "of": list(cause.of)}
        more: Json = {"part": list(cause.part), "left": list(cause.left), "turn": cause.turn, "scope": cause.scope}
        more["hunks"] = cause.hunks
    elif isinstance(cause, PartOfCall):
        body, more = {"part_of": cause.part_of}, {"verb": cause.verb, "late": cause.late, "command": cause.command}
    elif isinstance(cause, ObservedTool):
        body = {**cause.about, "window": cause.window, "since": cause.since, "began_s": cause.began_s}
        body |= {} if cause.pid is None else {"pid": cause.pid, "born": cause.born}
        return body | ({"unstable": list(cause.unstable)} if cause.unstable else {})
    elif isinstance(cause, MergedCopy):
        body = {"verb": "merge", "copy": cause.copy}
        more = {"session": cause.session, "root": cause.root, "mixed": dict(cause.mixed)}
    else:
        body, more = {"verb": "fork", "at": cause.at}, {}
    return body | {name: value for name, value in more.items() if value}


def cause_from_json(body: Mapping[str, Any] | None) -> Cause:
    """The cause in a record of any version; a missing field means its default."""
    if not body:
        return WORK
    # No field names the kind, because the first records had none. So a field that only one kind has tells it; the order
    # matters, because a part of an undo operation and a merge have a verb too.
    if "part_of" in body:
        return PartOfCall(body["part_of"], body.get("verb"), bool(body.get("late")), body.get("command"))
    if "window" in body:
        about = {name: value for name, value in body.items() if name not in _OBSERVED}
        since, pid = int(body.get("since", 0)), body.get("pid")
        pid, unstable = pid if isinstance(pid, int) else None, tuple(body.get("unstable", ()))
        return ObservedTool(bool(body["window"]), since, body.get("began_s"), pid, body.get("born"), unstable, about)
    if "copy" in body or body.get("verb") == "merge":
        return MergedCopy(body.get("copy", ""), body.get("session"), body.get("root"), body.get("mixed", {}))
    if body.get("verb") == "fork":
        return ForkedFiles(body.get("at", ""))
    if "verb" in body:
        undone = {name: tuple(body.get(name, ())) for name in ("of", "part", "left")}
        turn, scope, hunks = body.get("turn"), body.get("scope"), bool(body.get("hunks"))
        return UndoOperation(body["verb"], **undone, turn=turn, scope=scope, hunks=hunks)
    return WORK


@lru_cache(maxsize=1_024)
def cause_from_text(text: str) -> Cause:
    """The cause in a row. It is cached, because planning an undo reads the same few rows again and again."""
    return cause_from_json(decode(text))


def command_of(cause: Cause) -> str | None:
    """The command that an observed tool ran, if it ran one."""
    found = cause.about.get("command") if isinstance(cause, ObservedTool) else None
    if isinstance(cause, PartOfCall):
        found = cause.command
    return found if isinstance(found, str) else None
