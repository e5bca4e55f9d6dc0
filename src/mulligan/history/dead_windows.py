"""What a command changed in a window whose call died: told from the store and from the disk alone.

The store has what every path was when the window opened; the command's warden has left the moment in which its last
process ended, even though nobody was there to hear it. A path that changed between those two moments is put back. One
that changed since is somebody's, and so is one that others have on record meanwhile: it stays and is named. If even the
warden was killed, nobody knows where the window ended, and everything stays and is named.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mulligan.history.kept import Ground, KeptTree
from mulligan.history.kept_rows import OF_A_WINDOW, draft_name
from mulligan.history.putting_back import Trace
from mulligan.history.tables import CHANGES, WATCH_WINDOWS, WSEQ_END, TouchRow
from mulligan.values.canonical import decode
from mulligan.values.clock import monotonic_s
from mulligan.values.entries import ABSENT, Absent, Entry, entry_from_json
from mulligan.values.ids import CallId
from mulligan.values.paths import RepoPath, ancestors_of, path_bytes, path_from_bytes, to_wire
from mulligan.values.plain import plain

_TICK_NS = 20_000_000
"""The kernel stamps with a clock that may be this much behind."""

CLOSED = b"closed"
"""In a mark: whatever was in the window is the call's by now."""

_WARDEN_PATIENCE_S = 10.0
_WARDEN_NAP_S = 0.005


@dataclass(slots=True)
class Left:
    """What a dead window has left: what can be put back, and what stays, with the reason."""

    befores: dict[RepoPath, Entry] = field(default_factory=dict)
    notes: list[dict[str, str]] = field(default_factory=list)

    def traces(self, call: CallId) -> list[Trace]:
        return [
            Trace(path, before, (draft_name(call, path_bytes(path)),), in_place=True)
            for path, before in self.befores.items()
        ]

    def leave(self, path: RepoPath, reason: str) -> None:
        self.notes.append({"path": to_wire(path), "reason": reason})


def of_window(touches: Iterable[TouchRow]) -> list[TouchRow]:
    """The touches that others kept for a window, beside those the call made itself."""
    return [row for row in touches if row.ordinal == OF_A_WINDOW]


def left_by(site: Ground, call: str, kept: Sequence[TouchRow]) -> Left:
    """Nothing, if the call had no window open. `kept`: what others had to forget and kept for it."""
    with site.ledger.store.read() as tx:
        row = tx.get(WATCH_WINDOWS, call)
    left = Left()
    written = b"" if row is None else _written(row.mark)
    if row is None or written == CLOSED:
        return left
    span = _Span(site.disk.root.path, row.started_ns, int(written) if written.isdigit() else None)
    befores = _befores(site, left) | {path_from_bytes(one.path): entry_from_json(decode(one.before)) for one in kept}
    for path, before in befores.items():
        if before is None:
            left.leave(path, "no_baseline")
        elif not span.may_hold(path):
            continue
        elif span.holds(path) and not _is_on_record(site, path, row.since):
            left.befores[path] = before
        else:
            left.leave(path, "ambiguous")
    _take_emptied_folders(left, befores, span)
    return left


def forget(site: Ground, call: str) -> None:
    with site.ledger.store.write() as tx:
        row = tx.get(WATCH_WINDOWS, call)
        tx.delete(WATCH_WINDOWS, call)
    if row is not None and row.mark:
        with suppress(FileNotFoundError):
            os.unlink(row.mark)


def _befores(site: Ground, left: Left) -> dict[RepoPath, Entry | None]:
    """A folder that is shut stays so: opening it would be the last that happened to it."""
    tree = KeptTree(site)
    try:
        drifts = tree.look(whole=True, opens=False) if tree.restore() else []
        for folder in tree.closed:
            left.leave(site.disk.root.below(folder), "unreadable")
        return {one.path: one.before for one in drifts}
    finally:
        tree.close()


def _written(mark: str) -> bytes:
    """What is in a mark once nobody will write into it any more: nothing, if even the warden was killed."""
    try:
        with open(mark, "rb") as file:
            _wait_for_warden(file.fileno())
            return file.read(32)
    except OSError:
        return b""


def _wait_for_warden(mark: int) -> None:
    """It is killing what the command has left; that takes a moment."""
    deadline = monotonic_s() + _WARDEN_PATIENCE_S
    while monotonic_s() < deadline:
        try:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_WARDEN_NAP_S)
        else:
            return


def _is_on_record(site: Ground, path: RepoPath, since: int) -> bool:
    place = site.disk.root.place_of(path)
    with site.ledger.store.read() as tx:
        return bool(tx.select(CHANGES, {"place": place}, between=("wseq", since + 1, WSEQ_END), limit=1))


def _take_emptied_folders(left: Left, befores: dict[RepoPath, Entry | None], span: _Span) -> None:
    """A folder that the command made is its own even if somebody put something into it since: it goes if it can."""
    above = {folder for path in left.befores for folder in ancestors_of(path)}
    for path in above & befores.keys() - left.befores.keys():
        if isinstance(befores[path], Absent) and span.is_folder(path):
            left.befores[path] = ABSENT
            left.notes = [note for note in left.notes if note["path"] != to_wire(path)]


@plain(slots=True, frozen=True)
class _Span:
    """From the opening of a window to the end of its last process."""

    root: bytes
    started_ns: int
    ended_ns: int | None

    def may_hold(self, path: RepoPath) -> bool:
        """False: it has not changed since the window opened, whatever the store says it was."""
        return self._moment_ns(path) is not None

    def holds(self, path: RepoPath) -> bool:
        """Whether it changed inside, and not after."""
        moment_ns = self._moment_ns(path)
        return self.ended_ns is not None and moment_ns is not None and moment_ns <= self.ended_ns

    def _moment_ns(self, path: RepoPath) -> int | None:
        """When it changed, if since the opening. Of what is gone, or came along unchanged, a folder above can say."""
        for one in (path, *ancestors_of(path)):
            status = self._look(one)
            if status is not None and status.st_ctime_ns >= self.started_ns - _TICK_NS:
                return status.st_ctime_ns
        return None

    def is_folder(self, path: RepoPath) -> bool:
        status = self._look(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _look(self, path: RepoPath) -> os.stat_result | None:
        try:
            return os.lstat(os.path.join(self.root, path_bytes(path)))
        except OSError:
            return None
