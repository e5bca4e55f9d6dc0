"""End the calls that dead processes left open.

Recovery rolls an ordinary call back by the rules of `abort`. It never rolls back an observed call: it records what the
agent changed, and ends the call.

A command may have run in a capture window of the dead call (see `command`). Then only the store and the disk can say
what the command changed. The store has what every path was when the window opened. The init process of the command
wrote into the mark when the command's last process ended, even if no Mulligan was alive then. Recovery restores a path
that changed between these two moments. A path that changed later, or for which another call has recorded a change, is
another process's work: it stays, and the coverage names it. If the init process was killed too, the end of the window
is unknown, so everything stays and is named.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Protocol

from mulligan.history.abort import Trace, discard_abandoned, everything_below, put_back, rescue_note, trace_of
from mulligan.history.baseline import WINDOW_ORDINAL, Baseline, ReadableRoot, draft_name
from mulligan.history.ledger import STORE_FULL, Ending, Facts, facts_of, intending, touch_row
from mulligan.history.permissions import NoteLift
from mulligan.history.tables import (
    AGENT,
    CALLS,
    CHANGES,
    OBSERVED_WHILE_FULL,
    OPEN,
    TOUCHES,
    WATCH_WINDOWS,
    WSEQ_END,
    OpenRow,
    TouchRow,
    spool_path,
    spooled_calls,
    standing_in,
)
from mulligan.values.clock import monotonic_s
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Change,
    DirEntry,
    Entry,
    entry_from_bytes,
    same_state,
)
from mulligan.values.errors import MulliganError, RequestError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import CallId, OwnerId
from mulligan.values.paths import RepoPath, ancestors_of, from_wire, path_bytes, path_from_bytes, to_wire

_TICK_NS = 20_000_000
"""The kernel stamps files with a clock that may be this much behind."""

_MARK_MAX_BYTES = 64
_INIT_WAIT_S = 10.0
_INIT_NAP_S = 0.005


class RecoverableRoot(ReadableRoot, Protocol):
    """A root that can open every other root of the store."""

    def at(self, root: str) -> RecoverableRoot: ...


@fast_dataclass(slots=True)
class Recovered:
    """One dead call that was ended: the restored paths, and the paths that stay because another process changed them.

    `committed`: the call is observed, so recovery restores nothing. `stuck` says why recovery could not end the call;
    the next process that opens the store tries again.
    """

    call: str
    put_back: list[RepoPath] = field(default_factory=list)
    conflicts: list[RepoPath] = field(default_factory=list)
    committed: bool = False
    stuck: str | None = None


def recover(open_root: RecoverableRoot) -> list[Recovered]:
    """End every open call whose owner is dead and whose root can be reached from here."""
    found = [one for row in _dead_calls(open_root) if (one := _recover(open_root, row)) is not None]
    _remove_spools(open_root)
    if found and open_root.disk.capture.any:
        discard_copies(open_root)
    return found


def _remove_spools(open_root: RecoverableRoot) -> None:
    """Remove the spools of calls that have ended. A call is recorded before it gets a spool."""
    directory = open_root.ledger.store.directory
    spooled = [] if directory is None else spooled_calls(directory)
    if directory is None or not spooled:
        return
    with open_root.ledger.store.read() as tx:
        ended = [call for call in spooled if not tx.has(OPEN, call)]
    for call in ended:
        with suppress(OSError):
            os.unlink(spool_path(directory, call))


def discard_copies(open_root: RecoverableRoot) -> None:
    """Remove copies of paths that are not captured, where the process died after its call had ended."""
    with open_root.ledger.store.read() as tx:
        open_calls = [row.call for row in tx.select(OPEN)]
    # A root that is gone has no copies.
    with suppress(OSError):
        discard_abandoned(open_root.disk, lambda end: any(call.endswith(end) for call in open_calls))


def _dead_calls(open_root: RecoverableRoot) -> list[OpenRow]:
    store = open_root.ledger.store
    with store.read() as tx:
        rows = tx.select(OPEN)
    return [row for row in rows if row.owner != AGENT and store.is_alive(OwnerId(row.owner)) is False]


def _recover(open_root: RecoverableRoot, row: OpenRow) -> Recovered | None:
    try:
        there = open_root.at(row.root)
    except RequestError:
        return None
    try:
        return _end_call(there, row)
    except (OSError, MulliganError) as error:
        # A disk that fails now must not keep the user from working. The row goes back to its dead owner for a retry.
        with suppress(MulliganError), open_root.ledger.store.write() as tx:
            # Another process may have taken it over, or ended the call.
            if tx.get(OPEN, row.call) == replace(row, owner=open_root.ledger.store.owner()):
                tx.put(OPEN, row)
        if isinstance(error, MulliganError) and error.code == "no_space":
            open_root.ledger.note_store_full(CallId(row.call))
        reason = error.message if isinstance(error, MulliganError) else f"{error.strerror or error}"
        return Recovered(row.call, committed=bool(row.observed), stuck=reason)


def _end_call(open_root: RecoverableRoot, row: OpenRow) -> Recovered | None:
    store, owner = open_root.ledger.store, open_root.ledger.store.owner()
    with store.write() as tx:
        # The first process that takes the row over does the work; a second one sees a living owner.
        if tx.get(OPEN, row.call) != row:
            return None
        tx.put(OPEN, replace(row, owner=owner))
    if store.directory is not None:
        open_root.ledger.store_preimages(standing_in(spool_path(store.directory, row.call)))
    with store.read() as tx:
        touches = tx.select(TOUCHES, {"call": row.call})
        call = tx.get(CALLS, row.call)
        assert call is not None, "a call is recorded when it begins"
    facts = facts_of(call)
    if not row.observed:
        return _roll_back(open_root, facts, touches)
    return _commit_observed(open_root, facts, touches, [STORE_FULL] if row.observed == OBSERVED_WHILE_FULL else [])


def _roll_back(open_root: RecoverableRoot, facts: Facts, touches: list[TouchRow]) -> Recovered:
    own, for_window = _split_touches(touches)
    # A path may have been moved onto another one, so the rollback goes backwards.
    newest_first = sorted(own, key=lambda touch: touch.ordinal, reverse=True)
    traces = [trace_of(touch) for touch in newest_first]
    window = _inspect_window(open_root, facts.id, for_window)
    known = {one.path for one in traces}
    window_traces = [
        Trace(path, before, (draft_name(facts.id, path_bytes(path)),), in_place=True)
        for path, before in window.befores.items()
        if path not in known
    ]
    all_traces = [*traces, *everything_below(open_root, traces), *window_traces]
    # The window comes last: where the call itself changed a path, its own trace knows more.
    report = put_back(open_root, all_traces, _lift_recorder(open_root, facts.id))
    notes = [{"path": to_wire(path), "reason": "conflicted"} for path in report.conflicts]
    notes += [{"path": to_wire(path), "reason": "not_captured"} for path in report.not_captured]
    notes += [{"path": to_wire(path), "reason": "lost"} for path in report.lost]
    with open_root.ledger.store.write() as tx:
        # The record names rescued bytes, so that garbage collection leaves them.
        rescued = sorted(report.rescued, key=lambda one: path_bytes(one[0]))
        coverage = [*window.notes, *notes, *(rescue_note(*one) for one in rescued)]
        digests = {digest for _, digest in rescued}
        ending = Ending("aborted", reason="process_died", coverage=coverage, handed_out=digests)
        open_root.ledger.end(tx, facts, ending)
    # After the end is recorded: if the process dies before, the next one needs the window again.
    _forget_window(open_root, facts.id)
    stays = [*report.conflicts, *report.lost, *(from_wire(note["path"]) for note in window.notes)]
    return Recovered(facts.id, report.put_back, stays)


def _lift_recorder(open_root: RecoverableRoot, call: CallId) -> NoteLift:
    """Records a lifted mode as one more thing that the dead call meant to put there, in case this process dies too."""

    def record(path: RepoPath, now: DirEntry, lifted: DirEntry) -> None:
        key = path_bytes(path)
        with open_root.ledger.store.write() as tx:
            known = tx.select(TOUCHES, {"call": call, "path": key})
            row = known[0] if known else touch_row(call, key, open_root.root, ordinal=0, before=now)
            open_root.ledger.touch(tx, intending(row, lifted, draft_name(call, key), in_place=False), ())

    return record


def _commit_observed(
    open_root: RecoverableRoot, facts: Facts, touches: list[TouchRow], notes: Sequence[Mapping[str, str]]
) -> Recovered:
    own, for_window = _split_touches(touches)
    window = _inspect_window(open_root, facts.id, for_window)
    befores = window.befores | _befores_of(own)
    changes = []
    for path, before in sorted(befores.items(), key=lambda item: path_bytes(item[0])):
        image = open_root.image(path)
        if image.content is not None:
            open_root.ledger.blobs.store(image.content)
        if not image.special and not same_state(before, image.entry):
            changes.append(Change(path, before, image.entry))
    with open_root.ledger.store.write() as tx:
        coverage = [*notes, *window.notes]
        open_root.ledger.end(tx, facts, Ending("committed", changes, reason="process_died", coverage=coverage))
    _forget_window(open_root, facts.id)
    return Recovered(facts.id, committed=True)


def _split_touches(touches: Iterable[TouchRow]) -> tuple[list[TouchRow], list[TouchRow]]:
    """The touches that the call made itself, and those that others wrote for its capture window."""
    own, for_window = list[TouchRow](), list[TouchRow]()
    for touch in touches:
        (for_window if touch.ordinal == WINDOW_ORDINAL else own).append(touch)
    return own, for_window


def _befores_of(touches: Iterable[TouchRow]) -> dict[RepoPath, Entry]:
    return {path_from_bytes(one.path): entry_from_bytes(one.before) for one in touches}


# The capture window of a dead call.


def closed_mark(started_ns: int) -> bytes:
    """The content of a mark whose call has recorded all changes of the window.

    It names the window, because windows use one mark in turn, and a power cut may restore the mark of an earlier
    window.
    """
    return b"closed %d" % started_ns


@fast_dataclass(slots=True)
class _DeadWindow:
    """What a command changed in the window of a dead call: paths to restore, and notes for the paths that stay."""

    befores: dict[RepoPath, Entry] = field(default_factory=dict)
    notes: list[dict[str, str]] = field(default_factory=list)

    def leave(self, path: RepoPath, reason: str) -> None:
        self.notes.append({"path": to_wire(path), "reason": reason})


def _inspect_window(root: ReadableRoot, call: str, for_window: Sequence[TouchRow]) -> _DeadWindow:
    """Empty if the call had no window open. `for_window`: preimages that others saved before they changed the rows."""
    with root.ledger.store.read() as tx:
        row = tx.get(WATCH_WINDOWS, call)
    window = _DeadWindow()
    written = b"" if row is None else _read_mark(row.mark)
    if row is None or written == closed_mark(row.started_ns):
        return window
    span = _Span(root.disk.root.path, row.started_ns, int(written) if written.isdigit() else None)
    befores = _baseline_befores(root, window) | _befores_of(for_window)
    for path, before in befores.items():
        if before is None:
            window.leave(path, "no_baseline")
        elif not span.may_hold(path):
            continue
        elif span.holds(path) and not _is_recorded_since(root, path, row.since):
            window.befores[path] = before
        else:
            window.leave(path, "ambiguous")
    _add_emptied_folders(window, befores, span)
    return window


def _baseline_befores(root: ReadableRoot, window: _DeadWindow) -> dict[RepoPath, Entry | None]:
    baseline = Baseline(root)
    try:
        # An unreadable folder stays shut: opening it would set its ctime, which says when it last changed.
        changes = baseline.find_changes(full=True, open_folders=False) if baseline.load() else []
        for folder in baseline.unreadable_paths:
            window.leave(root.disk.root.below(folder), "unreadable")
        return {one.path: one.before for one in changes}
    finally:
        baseline.close()


def _read_mark(mark: str) -> bytes:
    """Empty if the init process of the command was killed before it could write."""
    try:
        with open(mark, "rb") as file:
            _wait_for_init(file.fileno())
            return file.read(_MARK_MAX_BYTES)
    except OSError:
        return b""


def _wait_for_init(mark: int) -> None:
    """Wait for the init process, which may still kill descendants of the command.

    It holds the lock until it has written.
    """
    deadline = monotonic_s() + _INIT_WAIT_S
    while monotonic_s() < deadline:
        try:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_INIT_NAP_S)
        else:
            return


def _is_recorded_since(root: ReadableRoot, path: RepoPath, since: int) -> bool:
    place = root.disk.root.place_of(path)
    with root.ledger.store.read() as tx:
        return bool(tx.select(CHANGES, {"place": place}, between=("wseq", since + 1, WSEQ_END), limit=1))


def _add_emptied_folders(window: _DeadWindow, befores: dict[RepoPath, Entry | None], span: _Span) -> None:
    """Remove folders that the command made if they are empty by then, even if another process changed them later."""
    above = {folder for path in window.befores for folder in ancestors_of(path)}
    for path in above & befores.keys() - window.befores.keys():
        if isinstance(befores[path], Absent) and span.is_folder(path):
            window.befores[path] = ABSENT
            window.notes = [note for note in window.notes if note["path"] != to_wire(path)]


@fast_dataclass(slots=True, frozen=True)
class _Span:
    """From the opening of a capture window to the end of the command's last process. None: the end is unknown."""

    root: bytes
    started_ns: int
    ended_ns: int | None

    def may_hold(self, path: RepoPath) -> bool:
        """False if the path has not changed since the window opened, whatever the store says."""
        return self._changed_ns(path) is not None

    def holds(self, path: RepoPath) -> bool:
        """Whether the path changed in the window, and not later."""
        changed_ns = self._changed_ns(path)
        return self.ended_ns is not None and changed_ns is not None and changed_ns <= self.ended_ns

    def _changed_ns(self, path: RepoPath) -> int | None:
        """The time at which the path changed, if that was after the opening."""
        # A missing path has no time, and a moved one has its old time, so the folder above tells.
        for one in (path, *ancestors_of(path)):
            status = self._status(one)
            if status is not None and status.st_ctime_ns >= self.started_ns - _TICK_NS:
                return status.st_ctime_ns
        return None

    def is_folder(self, path: RepoPath) -> bool:
        status = self._status(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _status(self, path: RepoPath) -> os.stat_result | None:
        try:
            return os.lstat(os.path.join(self.root, path_bytes(path)))
        except OSError:
            return None


def _forget_window(root: ReadableRoot, call: str) -> None:
    with root.ledger.store.write() as tx:
        row = tx.get(WATCH_WINDOWS, call)
        tx.delete(WATCH_WINDOWS, call)
    if row is not None and row.mark:
        with suppress(FileNotFoundError):
            os.unlink(row.mark)
