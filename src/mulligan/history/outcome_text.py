"""The words for what calls changed and for what an undo operation did: one line for each path or folder.

The command line and the hosts show these lines. File names are escaped, so that a name cannot send commands to a
terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mulligan.history.call_about import redacted
from mulligan.history.cause import command_of
from mulligan.values.clock import Clock, SystemClock, parse_timestamp
from mulligan.values.entries import Absent
from mulligan.values.paths import to_wire
from mulligan.values.text import shortened, visible, width_of

if TYPE_CHECKING:
    from mulligan.history.git_changes import LeftAlone
    from mulligan.history.plan import Outcome
    from mulligan.history.tables import CallRow
    from mulligan.history.undo import UndoResult


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_HEAD_CHARACTERS = 12
_NAMED_IN_FOLDER_MAX = 3
_GAPS_NAMED_MAX = 3
_MOVED = "moved to "
_LETTERS = {"created": "A", "modified": "M", "deleted": "D", "renamed": "R", "mode": "m"}
_REASONS = {
    "same_lines": "you changed the same lines",
    "binary": "it is not text, and you changed it too",
    "mode": "you changed its permissions",
    "type_changed": "it has another type now (file, folder or link)",
    "deleted_externally": "you have deleted it",
    "ambiguous": "Mulligan cannot tell who changed it",
    "file_in_use": "a program has it open and has truncated or replaced it",
    "evicted": "its earlier content was deleted: over the cap, with its session's snapshots, or by `mulligan forget`",
    "lost": "a power cut destroyed its earlier content",
    "not_captured": "its earlier content was never captured",
    "io_error": "the disk reported an error",
    "git": "git's own files are kept",
    "git_changed": "HEAD, its branch or the index has changed since",
}
_WOULD = {
    "restored": "restore",
    "removed": "remove",
    "brought": "bring",
    "merged": "merge",
    "left": "leave",
    "skipped": "skip",
    "kept": "keep",
}
_GAPS = {
    **_REASONS,
    "owner": "its owner cannot be restored",
    "access_list": "its access list cannot be restored",
    "hard_link": "it has or had other names, which may not be restored with it",
    "special_file": "it is a device, FIFO or socket",
    "unreadable": "it could not be read",
    "unstable": "another process wrote into it during every read",
    "too_large": "it is too large to be stored",
    "not_undoable": "it is larger than the store keeps",
    "no_baseline": "Mulligan had not read it before it changed",
    "conflicted": "another writer changed it too, so Mulligan left it as it is",
    "rescued": "the store keeps the version that Mulligan replaced (`mulligan cat --after`)",
    "outside_root": "it is outside the workspace",
    "other_mounts": "it is on another file system",
    "other_daemon": "the command talked to another program, and Mulligan does not know what that program did",
    "network": "Mulligan cannot undo what the command sent over the network",
    "background": "a process that the command left running may write here later",
    "commit_outside": "the command made commits in a git directory outside the workspace",
    "git_outside": "the command changed the index or the branch in a git directory outside the workspace",
    "store_full": "the store was full while this happened",
    "hook_missed": "no hook reported the beginning of the call",
    "end_missed": "no hook reported the end of the call, so its exit code is unknown",
    "hook_late": "the agent went on before its hook reached Mulligan",
    "not_recorded": "an earlier event could not be recorded",
}
_GAP_VERBS = {"rescued": "restored", "commit_outside": "not undone", "git_outside": "not undone"}


def short(call: object) -> str:
    """The last eight characters of an id; ids made at about the same time begin alike."""
    return str(call)[-8:]


_COMMAND_SHOWN = 70
_SESSION_SHOWN = 12
_LINE_SHOWN, _TITLE_MIN = 160, 20


EDITED_OUTSIDE = "edited outside"


def call_title(row: CallRow, *, label: bool = False) -> str:
    """The tool of a call and its command, shortened, on one line; with `label` also the agent's own id of the call."""
    if row.external:
        return visible(row.reason or EDITED_OUTSIDE)
    command = command_of(row.why)
    title = title_text(row.tool, row.label, None if command is None else redacted(command))
    return f"{title} [{visible(row.label)}]" if label and row.label not in (None, row.tool) else title


def title_text(tool: str | None, label: str | None, command: str | None, columns: int = _COMMAND_SHOWN) -> str:
    """The tool of a call and its command on one line; without a command, the tool or the label."""
    words = visible(" ".join((command or "").split()))
    name = visible(tool or label or "call")
    return shortened(f"{name}: {words}" if words else name, columns)


def who_text(agent: str | None, session: str | None) -> str:
    """The agent and the session of a call; of a long session, the last characters."""
    name = visible(session or "")
    # Sessions of hosts are UUIDs, and the beginnings of new ones are alike.
    known = name if width_of(name) <= _SESSION_SHOWN else f"…{name[-_SESSION_SHOWN + 1 :]}"
    return " ".join(part for part in (visible(agent or ""), known) if part)


def call_words(named: Mapping[str, Any], columns: int | None = None) -> str:
    """A call in one line: its title, its id, its agent and session, and its prompt. `named`: see `call_named`."""
    who = who_text(named["agent"], named["session_id"])
    tail = f" ({short(named['id'])}{', ' if who else ''}{who})"
    title = title_text(named["tool"], named["label"], named["command"])
    said = visible(" ".join((named["prompt"] or "").split()))
    text = f"{title}{tail}{f' for “{said}”' if said else ''}"
    if columns is None or width_of(text) <= columns:
        return text if columns is not None else shortened(text, _LINE_SHOWN)
    left = max(columns - width_of(tail), _TITLE_MIN)
    if width_of(title) > left:
        return f"{shortened(title, left)}{tail}"
    return shortened(text, columns)


OUTSIDE_WORDS = {
    "push": "it pushed commits",
    "network": "it used the network",
    "other_daemon": "it talked to another program",
}


def outside_words(outside: Sequence[str]) -> str:
    """What a call did besides files, as one sentence; empty if it did nothing."""
    if not outside:
        return ""
    did = " and ".join(OUTSIDE_WORDS.get(one, one) for one in outside)
    return f"also acted outside: {did}; undo cannot reach that"


def changes_words(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A few words for each change, git's own files last. A folder that was created, deleted or moved is one entry.

    The old path of a move is not listed: the entry of the new path names it.
    """
    origins = {change["path"]: change["from"] for change in changes if "from" in change}
    left = set(origins.values())
    told = [change for change in changes if change["path"] not in left]
    carriers = {_above(path) for path, origin in origins.items() if origins.get(_above(path)) == _above(origin)}
    named = _named({change["path"]: _fate(change, origins, carriers) for change in told})
    shown = sorted((change for change in told if change["path"] in named), key=lambda one: _is_gits(one["path"]))
    return [_change_words(change, named[change["path"]]) for change in shown]


def _fate(change: Mapping[str, Any], origins: Mapping[str, str], carriers: Collection[str]) -> str:
    """A path that moved with its folder counts as that folder's move; one that moved into a new folder as created."""
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
    """The paths to list, each with the number of paths below it that changed in the same way and are not listed.

    A folder with few such paths lists them all, unless the folder moved.
    """
    tops = {path: _top(path, fates) for path in fates}
    below = {top: size - 1 for top, size in Counter(tops.values()).items()}
    listed = {top: 0 if fates[top].startswith(_MOVED) else _NAMED_IN_FOLDER_MAX for top in below}
    folders = {top: size for top, size in below.items() if size > listed[top]}
    return {path: folders.get(path, 0) for path, top in tops.items() if path == top or top not in folders}


def _top(path: str, fates: Mapping[str, str]) -> str:
    """The highest folder above a path that changed in the same way, if every folder between did too."""
    while fates.get(above := _above(path)) == fates[path]:
        path = above
    return path


def _in_it(below: int) -> str:
    return f" and {below} in it" if below else ""


def aborted_words(reason: str | None) -> str:
    """What `log` says of an aborted call, whether Mulligan refused it or rolled it back."""
    return "rolled back, no changes kept" + (f": {visible(reason.replace('_', ' '))}" if reason else "")


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


def outcome_lines(result: UndoResult, *, dry_run: bool = False, came: str = "restored") -> list[str]:
    """One line for each path, or for a folder of paths, that an undo operation changed or left.

    `came` is the word for a path that got its content back.
    """
    moves, repositories = ((), ()) if result.plan is None else (result.plan.moves, result.plan.left_alone)
    gone = {move.path for move in moves if isinstance(move.target, Absent)}
    heads = {one.repository: _head_line(one, result) for one in repositories if one.head is not None}
    fates = {
        str(one.path): "removed" if one.path in gone else came for one in result.outcomes if one.outcome == "restored"
    }
    named = _named(fates)
    lines = [f"{fates[path]} {visible(path)}{_in_it(below)}" for path, below in named.items()]
    lines += [_outcome_line(one, heads.get(one.path)) for one in result.outcomes if one.outcome != "restored"]
    moved = result.talk
    transcript = [] if moved is None else [_transcript_line(moved["messages_before"], moved["messages"])]
    slices = [f"left slice {visible(name)} as it is: it has changed since" for name in result.slices_left]
    lines += [*transcript, *slices]
    return [_would(line) if dry_run else line for line in lines if line] + _further_gap_lines(result)


_LINES_MAX, _FOLDERS_MAX = 40, 20


def plan_lines(result: UndoResult, *, dry_run: bool = True, came: str = "restored") -> list[str]:
    """The outcomes in lines; of many paths a summary by folder, and only what is not restored path by path."""
    lines = outcome_lines(result, dry_run=dry_run, came=came)
    if len(lines) <= _LINES_MAX:
        return lines
    gone = (
        set() if result.plan is None else {move.path for move in result.plan.moves if isinstance(move.target, Absent)}
    )
    done = [one for one in result.outcomes if one.outcome in ("restored", "merged")]
    folders = Counter(
        (_fate_word(one, gone, came), one.path.partition("/")[0] + "/" if "/" in one.path else "") for one in done
    )
    summary = [
        f"{word} {counted(count, 'path')} {f'below {visible(folder)}' if folder else 'at the top'}"
        for (word, folder), count in folders.most_common(_FOLDERS_MAX)
    ]
    more = folders.total() - sum(count for _, count in folders.most_common(_FOLDERS_MAX))
    summary += [f"{came} {counted(more, 'path')} in other folders"] if more else []
    restored = {"merged", "removed", came}
    rest = [line for line in lines if not _is_done_line(line, restored)]
    hidden = len(rest) - _LINES_MAX
    shown = rest[:_LINES_MAX] + ([f"and {hidden} more lines (--json has all)"] if hidden > 0 else [])
    return [*([_would(line) for line in summary] if dry_run else summary), *shown]


def _fate_word(one: Outcome, gone: Collection[str], came: str) -> str:
    return "merged" if one.outcome == "merged" else "removed" if one.path in gone else came


def _is_done_line(line: str, words: Collection[str]) -> bool:
    """Whether a line tells of a path that the summary counts."""
    would, _, rest = line.partition(" ")
    first = rest.partition(" ")[0] if would == "would" else would
    return first in words or first in {_WOULD[word.partition(" ")[0]] for word in words}


def _would(line: str) -> str:
    done, _, rest = line.partition(" ")
    return f"would {_WOULD[done]} {rest}"


def _head_line(left: LeftAlone, result: UndoResult) -> str:
    """Undo leaves commits alone; this line says how to undo the commit as well."""
    assert left.head is not None, "called only where HEAD moved"
    old, new = (commit[:_HEAD_CHARACTERS] for commit in left.head)
    if left.outside:
        # Mulligan has no copy of git's files there.
        return f"kept commit {new} (HEAD {old}→{new}; undo it too with `git reset {old}`)"
    also = f"`mulligan undo {short(result.of[-1])} --git restore`" if len(result.of) == 1 else "--git restore"
    return f"kept commit {new} (HEAD {old}→{new}; undo it too with {also})"


def _further_gap_lines(result: UndoResult) -> list[str]:
    """The paths that were never captured, except those whose outcome says so."""
    gaps = () if result.plan is None else result.plan.coverage
    named = {to_wire(one.path) for one in result.outcomes if one.reason is not None}
    return gap_lines([gap for gap in gaps if gap["path"] not in named])


def gap_lines(gaps: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each path that was not captured; many with the same reason share a line."""
    paths: dict[str, list[str]] = {}
    for gap in gaps:
        paths.setdefault(gap["reason"], []).append(gap["path"])
    return [
        f"{_GAP_VERBS.get(reason, 'not captured')} {words}"
        for reason, some in paths.items()
        for words in _gaps_words(some, reason)
    ]


def _gaps_words(paths: Sequence[str], reason: str) -> list[str]:
    if len(paths) <= _GAPS_NAMED_MAX:
        return [gap_words(path, reason) for path in paths]
    some = f"{visible(paths[0])} and {len(paths) - 1} more"
    return [f"{some}: {gap_reason(reason)} (`mulligan coverage` lists them)"]


def gap_words(path: str, reason: str) -> str:
    return f"{visible(path)}: {gap_reason(reason)}"


def gap_reason(reason: str) -> str:
    """Why a change was not captured, in words."""
    return _GAPS.get(reason, reason.replace("_", " "))


def _transcript_line(before: int, after: int) -> str:
    change = abs(after - before)
    words = counted(change, "message")
    return f"restored {words}" if after > before else f"removed {words}"


def _outcome_line(one: Outcome, head: str | None) -> str:
    if head is not None:
        return head
    path, why = visible(one.path), _REASONS.get(one.reason or "", one.reason or "")
    if one.outcome == "merged":
        return f"merged your edit in {path}"
    if one.outcome == "conflicted":
        return f"left {path} as it is: {why}"
    if one.outcome == "failed":
        return f"failed to change {path}: {why}"
    return f"skipped {path}: {why}" if why else ""
