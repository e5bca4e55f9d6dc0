"""History in words a person understands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mulligan.cli.output import counted, visible
from mulligan.history.plans import Outcome
from mulligan.values.clock import Clock, SystemClock, parse_timestamp
from mulligan.values.entries import Absent
from mulligan.values.paths import to_wire

if TYPE_CHECKING:
    from mulligan.history.going_back import WayBack
    from mulligan.history.repositories import LeftAlone

_HEAD_CHARACTERS = 12
_NAMED_IN_FOLDER_MAX = 3
_GAPS_NAMED_MAX = 3
_MOVED = "moved to "
_LETTERS = {"created": "A", "modified": "M", "deleted": "D", "renamed": "R", "mode": "m"}

_REASONS = {
    "same_lines": "you changed the same lines",
    "binary": "it is not text, and you changed it too",
    "mode": "you changed its permissions",
    "type_changed": "it is another kind of thing now",
    "deleted_externally": "you deleted it meanwhile",
    "ambiguous": "it is not certain who changed it",
    "file_in_use": "a program has it open and has truncated or replaced it meanwhile",
    "evicted": "its earlier content was dropped, over the cap or with its session's snapshots",
    "lost": "a power cut took its earlier content",
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
    "kept": "keep",
}


_GAPS = {
    **_REASONS,
    "owner": "who owned it cannot be put back",
    "access_list": "its access list cannot be put back",
    "hard_link": "it has or had other names, which may not go back with it",
    "special_file": "it is a device, FIFO or socket",
    "unreadable": "it could not be read",
    "unstable": "somebody wrote into it during every read",
    "too_large": "it is too large to be kept",
    "not_undoable": "it is larger than what is kept",
    "no_baseline": "nobody had read it before it changed",
    "conflicted": "somebody else changed it too, and it was left as it is",
    "rescued": "what was there when it was put back is kept (`mulligan cat --after`)",
    "outside_root": "it is outside the workspace",
    "other_mounts": "it is on another file system",
    "other_daemon": "another program was spoken to, and what that did is not known",
    "network": "what went over the network cannot be taken back",
    "background": "a process that the command left running may write here later",
    "commit_outside": "its git directory is outside the workspace, and this made commits there",
    "store_full": "the store was full while this happened",
    "hook_missed": "the beginning of the call was not heard",
    "hook_late": "the agent had gone on before it was heard of",
    "not_recorded": "something before this call could not be written down",
}


def short(call: object) -> str:
    """The end of an id: the part in which neighbours differ."""
    return str(call)[-8:]


def changes_words(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A few words for each change; a folder that came, went or moved whole is one, and git's own files come last.

    What a move left behind is told by the move.
    """
    origins = {change["path"]: change["from"] for change in changes if "from" in change}
    left = set(origins.values())
    told = [change for change in changes if change["path"] not in left]
    carriers = {_above(path) for path, origin in origins.items() if origins.get(_above(path)) == _above(origin)}
    named = _named({change["path"]: _fate(change, origins, carriers) for change in told})
    shown = sorted((change for change in told if change["path"] in named), key=lambda one: _is_gits(one["path"]))
    return [_change_words(change, named[change["path"]]) for change in shown]


def _fate(change: Mapping[str, Any], origins: Mapping[str, str], carriers: Collection[str]) -> str:
    """What was moved with its folder met that folder's fate; what was moved into a new one has come with that."""
    if "from" not in change:
        return str(change["kind"])
    path, origin = change["path"], change["from"]
    while origins.get(_above(path)) == _above(origin):
        path, origin = _above(path), _above(origin)
    return f"{_MOVED}{path}" if path in carriers else "created"


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _is_gits(path: str) -> bool:
    return ".git" in path.split("/")


def _change_words(change: Mapping[str, Any], below: int) -> str:
    origin = f"{visible(change['from'])} → " if "from" in change else ""
    counts = f" +{change['added']} -{change['removed']}" if change["added"] or change["removed"] else ""
    return f"{_LETTERS.get(change['kind'], '?')} {origin}{visible(change['path'])}{counts}{_in_it(below)}"


def _named(fates: Mapping[str, str]) -> dict[str, int]:
    """The paths to name, each with how many below it met the same fate and go without: those of a full folder, or of
    one that moved."""
    tops = {path: _top(path, fates) for path in fates}
    below = {top: size - 1 for top, size in Counter(tops.values()).items()}
    listed = {top: 0 if fates[top].startswith(_MOVED) else _NAMED_IN_FOLDER_MAX for top in below}
    folders = {top: size for top, size in below.items() if size > listed[top]}
    return {path: folders.get(path, 0) for path, top in tops.items() if path == top or top not in folders}


def _top(path: str, fates: Mapping[str, str]) -> str:
    """The highest folder above a path that met the same fate, and every folder between."""
    while fates.get(above := _above(path)) == fates[path]:
        path = above
    return path


def _in_it(below: int) -> str:
    return f" and {below} in it" if below else ""


def aborted_words(reason: str | None) -> str:
    """What became of a call that does not stand, whether it was refused or put back."""
    return "nothing of it stands" + (f": {visible(reason.replace('_', ' '))}" if reason else "")


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
    """One line per path that mattered, or per folder of them. `came` says how a path got its content."""
    moves, repositories = ((), ()) if way.plan is None else (way.plan.moves, way.plan.left_alone)
    gone = {move.path for move in moves if isinstance(move.target, Absent)}
    heads = {one.repository: _head_line(one, way) for one in repositories if one.head is not None}
    fates = {
        str(one.path): "removed" if one.path in gone else came for one in way.outcomes if one.outcome == "restored"
    }
    named = _named(fates)
    lines = [f"{fates[path]} {visible(path)}{_in_it(below)}" for path, below in named.items()]
    lines += [_outcome_line(one, heads.get(one.path)) for one in way.outcomes if one.outcome != "restored"]
    talk = [] if way.talk is None else [_talk_line(way.talk["messages_before"], way.talk["messages"])]
    slices = [f"left slice {visible(name)} alone: it has changed since" for name in way.slices_left]
    return [_would(line) if dry_run else line for line in [*lines, *talk, *slices] if line] + _untold_gap_lines(way)


def _would(line: str) -> str:
    done, _, rest = line.partition(" ")
    return f"would {_WOULD[done]} {rest}"


def _head_line(left: LeftAlone, way: WayBack) -> str:
    """Undo leaves commits alone; this line says how to undo the commit as well."""
    assert left.head is not None, "it is asked only where HEAD moved"
    old, new = (commit[:_HEAD_CHARACTERS] for commit in left.head)
    if left.outside:
        # Mulligan has no copy of a git directory that is outside the root.
        return f"kept commit {new} (HEAD {old}→{new}; undo it too with `git reset {old}`)"
    also = f"`mulligan undo {short(way.of[-1])} --git restore`" if len(way.of) == 1 else "--git restore"
    return f"kept commit {new} (HEAD {old}→{new}; undo it too with {also})"


def _untold_gap_lines(way: WayBack) -> list[str]:
    """What was never captured, unless its outcome has said so."""
    gaps = () if way.plan is None else way.plan.coverage
    told = {to_wire(one.path) for one in way.outcomes if one.reason is not None}
    return gap_lines([gap for gap in gaps if gap["path"] not in told])


def gap_lines(gaps: Sequence[Mapping[str, str]]) -> list[str]:
    """One line per path that was not captured; many for the same reason are one."""
    paths: dict[str, list[str]] = {}
    for gap in gaps:
        paths.setdefault(gap["reason"], []).append(gap["path"])
    return [
        f"{'put back' if reason == 'rescued' else 'not captured'} {words}"
        for reason, some in paths.items()
        for words in _gaps_words(some, reason)
    ]


def _gaps_words(paths: Sequence[str], reason: str) -> list[str]:
    if len(paths) <= _GAPS_NAMED_MAX:
        return [gap_words(path, reason) for path in paths]
    some = f"{visible(paths[0])} and {len(paths) - 1} more"
    return [f"{some}: {_gap_reason(reason)} (`mulligan coverage` lists them)"]


def gap_words(path: str, reason: str) -> str:
    return f"{visible(path)}: {_gap_reason(reason)}"


def _gap_reason(reason: str) -> str:
    return _GAPS.get(reason, reason.replace("_", " "))


def _talk_line(before: int, after: int) -> str:
    change = abs(after - before)
    words = counted(change, "message")
    return f"brought back {words}" if after > before else f"taken back {words}"


def _outcome_line(one: Outcome, head: str | None) -> str:
    if head is not None:
        return head
    path, why = visible(one.path), _REASONS.get(one.reason or "", one.reason or "")
    if one.outcome == "merged":
        return f"merged your edit in {path}"
    if one.outcome == "conflicted":
        return f"left {path} alone: {why}"
    if one.outcome == "failed":
        return f"not changed {path}: {why}"
    return f"skipped {path}: {why}" if why else ""
