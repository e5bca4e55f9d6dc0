"""A command inside a call: what it changes is captured before or after it does, and is the call's own change.

The command's changes are observed, not made by us, so they are put back by the rules of recovery: what is there
when the call is aborted is kept in the store, then the preimage returns. New objects in git's store are never captured
and never removed: they are content-addressed and harmless, and a commit made inside a command is never lost.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from mulligan.history.baseline import WorkspaceBaseline
from mulligan.history.call import Call, Intent
from mulligan.history.desk import Desk
from mulligan.history.merge import Conflict, TakeTheirs, WriteMerged, merge_entry
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, SymlinkEntry
from mulligan.values.paths import RepoPath, path_bytes, path_from_bytes, to_wire
from mulligan.workspace.disk import Image
from mulligan.workspace.exec.choose import Means, run_caught
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.output import Sink
from mulligan.workspace.exec.overlay import IsolatedChange, Overlay, attributes_of
from mulligan.workspace.exec.pump import Handle
from mulligan.workspace.exec.run import Ran
from mulligan.workspace.exec.scan import Scan
from mulligan.workspace.writing import Wanted

Strategy = Literal["notify", "watch", "scan", "overlay", "bare"]


@dataclass(slots=True, frozen=True)
class How:
    """How a command is to be run."""

    strategy: Strategy | None = None
    isolate: bool = False
    deadline: float | None = None
    handle: Handle | None = None


class CallWitness:
    """Told by the supervisor before a command changes a path; returns when the call has it safe."""

    def __init__(self, call: Call, root: bytes) -> None:
        self._call = call
        self._root = root

    def about_to_change(self, paths: Sequence[bytes]) -> None:
        self._call.about_to_change(captured_paths(self._root, paths))


def captured_paths(root: bytes, paths: Iterable[bytes]) -> list[RepoPath]:
    """Absolute paths as paths below the root, without the root itself and git's objects, in byte order."""
    below = sorted(path[len(root) :].lstrip(b"/") for path in paths)
    return [path_from_bytes(path) for path in below if path and not is_git_object(path)]


def is_git_object(path: bytes) -> bool:
    names = path.split(b"/")
    return any(one == b".git" and two == b"objects" for one, two in pairwise(names))


def run_in_call(desk: Desk, call: Call, command: Command, *, sink: Sink, how: How) -> Ran:
    """Run to the end. What it changed is then part of the call; nothing is committed or put back here."""
    baseline = WorkspaceBaseline(desk) if how.strategy in ("scan", "watch") else None
    started_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
    means = Means(CallWitness(call, command.root), baseline=baseline, index=baseline.take() if baseline else None)
    try:
        ran, capture = run_caught(
            command,
            means,
            strategy=how.strategy,
            isolate=how.isolate,
            sink=sink,
            handle=how.handle,
            deadline=how.deadline,
        )
    except BaseException:
        call.absorb(call.live_paths())
        raise
    if isinstance(capture, Overlay):
        if not (ran.timed_out or ran.cancelled):
            _take_over(desk, call, capture, started_ns)
        capture.close()
        return ran
    if isinstance(capture, Scan) and baseline is not None:
        _adopt(call, command.root, ran, baseline)
    call.absorb(captured_paths(command.root, {*ran.touched}))
    _cover(call, command.root, ran)
    return ran


def _adopt(call: Call, root: bytes, ran: Ran, baseline: WorkspaceBaseline) -> None:
    """For the ways that see a change only afterwards: the baseline says what was there."""
    for path in captured_paths(root, ran.touched):
        before = baseline.before_of(os.path.join(root, path_bytes(path)))
        if before is not None:
            call.adopt(path, before)


def _cover(call: Call, root: bytes, ran: Ran) -> None:
    for path, reason in ran.coverage:
        below = path[len(root) :].lstrip(b"/")
        if below and not is_git_object(below):
            call.coverage.append({"path": to_wire(path_from_bytes(below)), "reason": reason})


def _take_over(desk: Desk, call: Call, overlay: Overlay, started_ns: int) -> None:
    """Apply what an isolated command did, as one effect. Until here the real tree has not seen any of it."""
    intents = [_intent(desk, call, change, started_ns) for change in overlay.changes]
    leaving = [one for one, change in zip(intents, overlay.changes, strict=True) if one and change.kind == "absent"]
    coming = [one for one, change in zip(intents, overlay.changes, strict=True) if one and change.kind != "absent"]
    call.change([*reversed(leaving), *coming])


def _intent(desk: Desk, call: Call, change: IsolatedChange, started_ns: int) -> Intent | None:
    (path,) = captured_paths(desk.disk.root.path, [change.path]) or (None,)
    if path is None:
        return None
    if change.kind == "special":
        call.coverage.append({"path": to_wire(path), "reason": "special_file"})
        return None
    wanted = _wanted(change)
    return Intent(path, lambda image: _merged(desk, call, path, _Sides(image, wanted, started_ns)))


def _wanted(change: IsolatedChange) -> Wanted:
    if change.kind == "absent" or change.source is None:
        return Wanted(ABSENT)
    if change.kind == "symlink":
        return Wanted(SymlinkEntry(os.fsdecode(os.readlink(change.source))))
    if change.kind == "dir":
        return Wanted(DirEntry(change.mode, xattrs=_xattrs(change.source)))
    with open(change.source, "rb") as file:
        data = file.read()
    mtime = os.stat(change.source).st_mtime_ns
    entry = FileEntry(digest_of(data), len(data), change.mode, mtime_ns=mtime, xattrs=_xattrs(change.source))
    return Wanted(entry, data)


def _xattrs(source: bytes) -> tuple[tuple[str, str], ...]:
    from base64 import b64encode

    own = {name: value for name, value in attributes_of(source).items() if name.startswith("user.")}
    return tuple((name, b64encode(own[name]).decode("ascii")) for name in sorted(own))


@dataclass(slots=True, frozen=True)
class _Sides:
    """What a path holds now, what an isolated command made of it, and when that command began."""

    now: Image
    wanted: Wanted
    started_ns: int

    def content(self, entry: Entry) -> bytes | None:
        """The bytes of an entry that is one of the two sides."""
        for side, data in ((self.now.entry, self.now.content), (self.wanted.entry, self.wanted.content)):
            if side == entry or (
                isinstance(side, FileEntry) and isinstance(entry, FileEntry) and side.digest == entry.digest
            ):
                return data
        return None

    @property
    def kept(self) -> Wanted:
        return Wanted(self.now.entry, self.now.content)


def _merged(desk: Desk, call: Call, path: RepoPath, sides: _Sides) -> Wanted:
    """A path that somebody changed while the command ran is merged, or stays theirs and is reported."""
    before = call.seen_at_start(path)
    if before is None:
        if not _changed_since(desk, path, sides.started_ns):
            return sides.wanted
        call.coverage.append({"path": to_wire(path), "reason": "conflicted"})
        return sides.kept
    if sides.now.holds(before):
        return sides.wanted
    merged = merge_entry(before, sides.now.entry, sides.wanted.entry, _reader(desk, sides))
    if isinstance(merged, Conflict):
        call.coverage.append({"path": to_wire(path), "reason": "conflicted"})
        return sides.kept
    if isinstance(merged, WriteMerged):
        return Wanted(merged.entry, merged.content or sides.content(merged.entry))
    return sides.wanted if isinstance(merged, TakeTheirs) else sides.kept


def _reader(desk: Desk, sides: _Sides) -> Callable[[Digest], bytes]:
    known = {
        entry.digest: data
        for entry, data in ((sides.now.entry, sides.now.content), (sides.wanted.entry, sides.wanted.content))
        if isinstance(entry, FileEntry) and data is not None
    }
    return lambda digest: known[digest] if digest in known else desk.ledger.blobs.read(digest)


def _changed_since(desk: Desk, path: RepoPath, moment_ns: int) -> bool:
    try:
        status = os.lstat(os.path.join(desk.disk.root.path, path_bytes(path)))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return status.st_ctime_ns >= moment_ns and not stat.S_ISDIR(status.st_mode)
