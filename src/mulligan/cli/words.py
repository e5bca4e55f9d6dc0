"""History in words a person understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mulligan.cli.output import counted, visible
from mulligan.history.plans import Outcome
from mulligan.values.clock import Clock, SystemClock, parse_timestamp
from mulligan.values.entries import Absent
from mulligan.values.paths import to_wire

if TYPE_CHECKING:
    from mulligan.history.going_back import WayBack

_HEAD_CHARACTERS = 12
_LETTERS = {"created": "A", "modified": "M", "deleted": "D", "renamed": "R", "mode": "m"}

_REASONS = {
    "same_lines": "you changed the same lines",
    "binary": "it is not text, and you changed it too",
    "mode": "you changed its permissions",
    "type_changed": "it is another kind of thing now",
    "deleted_externally": "you deleted it meanwhile",
    "ambiguous": "it is not certain who changed it",
    "evicted": "its earlier content was dropped, over the cap or with its session's snapshots",
    "not_captured": "its earlier content was never captured",
    "io_error": "the disk refused",
    "git": "git's own files stay",
}

_WOULD = {
    "restored": "restore",
    "removed": "remove",
    "brought": "bring",
    "taken": "take",
    "merged": "merge",
    "left": "leave",
    "skipped": "skip",
}


_GAPS = {
    **_REASONS,
    "owner": "who owned it cannot be put back",
    "access_list": "its access list cannot be put back",
    "special_file": "it is a device, FIFO or socket",
    "not_undoable": "it is larger than what is kept",
    "outside_root": "it is outside the workspace",
}


def short(call: object) -> str:
    """The end of an id: the part in which neighbours differ."""
    return str(call)[-8:]


def change_words(change: dict[str, Any]) -> str:
    counts = f" +{change['added']} -{change['removed']}" if change["added"] or change["removed"] else ""
    return f"{_LETTERS.get(change['kind'], '?')} {visible(change['path'])}{counts}"


def change_line(change: dict[str, Any]) -> str:
    origin = f" (from {visible(change['from'])})" if "from" in change else ""
    return f"{change['kind']:<9} {visible(change['path'])}{origin}  +{change['added']} -{change['removed']}"


def ago(text: str, clock: Clock | None = None) -> str:
    seconds = max(0, int(((clock or SystemClock()).now() - parse_timestamp(text)).total_seconds()))
    for size, name in ((86_400, "day"), (3_600, "hour"), (60, "min"), (1, "sec")):
        if seconds >= size:
            count = seconds // size
            return f"{count} {name}{'s' if count > 1 and name in ('day', 'hour') else ''} ago"
    return "just now"


def outcome_lines(way: WayBack, *, dry_run: bool = False, came: str = "restored") -> list[str]:
    """One line per path that mattered. `came` says how a path got its content."""
    moves, repositories = ((), ()) if way.plan is None else (way.plan.moves, way.plan.left_alone)
    gone = {move.path for move in moves if isinstance(move.target, Absent)}
    heads = {one.repository: _head_words(*one.head) for one in repositories if one.head is not None}
    lines = [
        _outcome_line(one, came="removed" if one.path in gone else came, head=heads.get(one.path))
        for one in way.outcomes
    ]
    talk = [] if way.talk is None else [_talk_line(way.talk["messages_before"], way.talk["messages"])]
    return [_would(line) if dry_run else line for line in [*lines, *talk] if line] + _gap_lines(way)


def _would(line: str) -> str:
    done, _, rest = line.partition(" ")
    return f"would {_WOULD[done]} {rest}"


def _head_words(before: str, after: str) -> str:
    return f"HEAD {before[:_HEAD_CHARACTERS]}→{after[:_HEAD_CHARACTERS]} stays"


def _gap_lines(way: WayBack) -> list[str]:
    """What was never captured, unless its outcome has said so."""
    gaps = () if way.plan is None else way.plan.coverage
    told = {to_wire(one.path) for one in way.outcomes if one.reason is not None}
    return [f"not captured {gap_words(gap)}" for gap in gaps if gap["path"] not in told]


def gap_words(gap: Mapping[str, str]) -> str:
    reason = gap["reason"]
    return f"{visible(gap['path'])}: {_GAPS.get(reason, reason.replace('_', ' '))}"


def _talk_line(before: int, after: int) -> str:
    change = abs(after - before)
    words = counted(change, "message")
    return f"brought back {words}" if after > before else f"taken back {words}"


def _outcome_line(one: Outcome, *, came: str, head: str | None) -> str:
    path, why = visible(one.path), head or _REASONS.get(one.reason or "", one.reason or "")
    if one.outcome == "restored":
        return f"{came} {path}"
    if one.outcome == "merged":
        return f"merged your edit in {path}"
    if one.outcome == "conflicted":
        return f"left {path} alone: {why}"
    if one.outcome == "failed":
        return f"not changed {path}: {why}"
    return f"skipped {path}: {why}" if why else ""
