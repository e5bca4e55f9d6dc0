"""Observed calls: an agent's own tools, announced before and after by the agent's hooks or by its protocol.

Such a call belongs to the agent, not to the process that records it. Any process may end it; no process rolls it back.
It holds no claims, so it never blocks another call. Either the agent names the paths beforehand, or the call is a
capture window: everything that changes between its begin and its end is its doing. Of a change in two windows, the
call that ends first gets it. A change that another call has recorded meanwhile stays with that call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice
from typing import Any

from mulligan.files.disk import Image
from mulligan.history.baseline import Baseline, BaselineChange
from mulligan.history.cause import ObservedTool, PartOfCall, command_of
from mulligan.history.git_changes import OUTSIDE
from mulligan.history.ledger import STORE_FULL, Ending, Facts, facts_of, newest_wseq, touch_row
from mulligan.history.log import calls_of, can_be_undone, workspace_of
from mulligan.history.open_root import OpenRoot
from mulligan.history.processes import (
    Process,
    is_agent_running,
    left_running,
    processes_from_text,
    processes_to_text,
    start_time_of,
    with_descendants,
)
from mulligan.history.tables import AGENT, CALLS, CHANGES, OBSERVED_WHILE_FULL, OPEN, TOUCHES, TURNS, CallRow
from mulligan.history.undo_log import with_moves
from mulligan.session.tables import session_journal
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import since_boot_s
from mulligan.values.digest import Digest
from mulligan.values.entries import ABSENT, Absent, Change, DirEntry, Entry, entry_from_bytes, same_state
from mulligan.values.errors import MulliganError, RequestError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import CallId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, path_bytes, path_from_bytes, to_wire

Note = Mapping[str, str]


@fast_dataclass(slots=True, frozen=True)
class Observed:
    """A tool call as its agent announces it. `paths` None: it may change any file. `pid`: the agent's process."""

    session: SessionId
    tool: str
    turn: TurnId | None = None
    label: str | None = None
    paths: Sequence[RepoPath] | None = None
    pid: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)


@fast_dataclass(slots=True, frozen=True)
class EarlierScan:
    """What some paths were at the last scan, when the newest record of the workspace was `since`."""

    since: int
    befores: Mapping[RepoPath, Entry] = field(default_factory=dict)
    gaps: Sequence[Note] = ()


UNANNOUNCED = EarlierScan(0)
"""For a tool that the agent did not announce: the last scan was long before it, and others may have worked since."""


# Begin.


def begin(
    open_root: OpenRoot,
    observed: Observed,
    baseline: Baseline | None = None,
    *,
    earlier_scan: EarlierScan | None = None,
    left: LeftRunning | None = None,
) -> CallId:
    """Record the call before its tool runs, with the preimages of the paths that the agent named.

    With `earlier_scan`, the tool may be running already: everything since that scan is its doing, except for what
    another call has recorded. `left`: what earlier commands have left running.
    """
    ledger = open_root.ledger
    ledger.session(observed.session, open_root.root)
    scan = earlier_scan or _scan_of(open_root, observed.paths or ())
    is_scanned = observed.paths is None or (left is not None and left.is_any)
    if earlier_scan is None and baseline is not None and is_scanned:
        record_changes(open_root, baseline, left=left)
    with ledger.store.write() as tx:
        since = newest_wseq(tx, workspace_of(tx, open_root)) if earlier_scan is None else earlier_scan.since
        facts = _facts(open_root, observed, since=since, gaps=scan.gaps)
        ledger.begin(tx, facts, AGENT)
        for ordinal, (path, before) in enumerate(scan.befores.items()):
            if earlier_scan is None:
                _record_if_external(tx, open_root, path, before)
            ledger.touch(tx, touch_row(facts.id, path_bytes(path), open_root.root, ordinal=ordinal, before=before), ())
    return facts.id


def earlier_scan_of(baseline: Baseline, paths: Iterable[RepoPath], *, since: int) -> EarlierScan:
    """What the baseline knows of the paths, and of missing folders above them."""
    found = baseline.entries(paths)
    found |= _missing_above(found, lambda folder: baseline.entries([folder])[folder])
    befores = {path: entry for path, entry in found.items() if entry is not None}
    gaps = [{"path": to_wire(path), "reason": baseline.gap_at(path)} for path in found.keys() - befores]
    return EarlierScan(since, befores, gaps)


def workspace_seq(open_root: OpenRoot) -> int:
    """The number of the newest record of the workspace."""
    with open_root.ledger.store.read() as tx:
        return newest_wseq(tx, workspace_of(tx, open_root))


def _facts(open_root: OpenRoot, observed: Observed, *, since: int, gaps: Sequence[Note]) -> Facts:
    identifier = CallId(open_root.ledger.ids.new())
    pid, window, began_s = observed.pid or None, observed.paths is None, since_boot_s()
    process = None if pid is None else start_time_of(pid)
    unstable = tuple(note["path"] for note in gaps if note["reason"] == "unstable")
    return Facts(
        id=identifier,
        session=observed.session,
        turn=observed.turn or TurnId(identifier),
        root=RootId(open_root.root.id),
        workspace=WorkspaceId(open_root.root.workspace),
        label=observed.label,
        tool=observed.tool,
        cause=ObservedTool(window, since, began_s, pid, process, unstable, observed.about),
        observed=True,
    )


def _scan_of(open_root: OpenRoot, paths: Iterable[RepoPath]) -> EarlierScan:
    """What the paths hold, with the bytes in the store, and the folders above them that are missing.

    Bytes that were never there together are no preimage, so paths that change during every read are gaps.
    """
    images = {path: image for path in paths if not (image := open_root.image(path)).special}
    gaps = [{"path": to_wire(path), "reason": "unstable"} for path, one in images.items() if one.unstable]
    stable = {path: image for path, image in images.items() if not image.unstable}
    open_root.ledger.blobs.store_all(one.content for one in stable.values() if one.content is not None)
    found: dict[RepoPath, Entry] = {path: one.entry for path, one in stable.items()}
    return EarlierScan(0, found | _missing_above(found, open_root.entry), gaps)


def _missing_above(
    found: Mapping[RepoPath, Entry | None], entry_of: Callable[[RepoPath], Entry | None]
) -> dict[RepoPath, Entry]:
    """The missing folders above absent paths: the tool that creates the file creates them, too."""
    missing: dict[RepoPath, Entry] = {}
    for path in (path for path, entry in found.items() if isinstance(entry, Absent)):
        for above in ancestors_of(path):
            if above == ROOT or not isinstance(entry_of(above), Absent):
                break
            missing[above] = ABSENT
    return missing


# Changes that a scan finds.


def record_changes(
    open_root: OpenRoot,
    baseline: Baseline,
    call: CallId | None = None,
    *,
    full: bool = False,
    until_ns: int | None = None,
    left: LeftRunning | None = None,
    by_host: bool = False,
) -> list[Note]:
    """Scan, and record each change for the call, else for the newest open capture window, else for the newest call with
    a process that still runs, else as external. `by_host`: the agent's host says that it has reverted files.

    Returns notes for the coverage of the call: what could not be captured.
    """
    is_window_open = call is not None or _is_any_window_open(open_root)
    # Without an open call no tool of an agent can have made a folder unreadable, so Mulligan leaves it shut.
    changes = baseline.find_changes(full=full, until_ns=until_ns, open_folders=is_window_open)
    git_notes = _linked_git_notes(open_root, baseline, call, is_window_open=is_window_open)
    if not changes and not baseline.has_unpublished:
        return git_notes
    if changes and not is_window_open:
        with open_root.ledger.store.read() as tx:
            put_back = _put_back(tx, open_root, changes, by_host=by_host)
        if put_back is not None or (left is not None and left.is_any):
            _record_outside(open_root, baseline, changes, left=left, put_back=put_back)
            return git_notes
    with open_root.ledger.store.write() as tx:
        windows = _open_windows(tx, open_root) if call is None else []
        account = call if call is not None else (CallId(windows[0].id) if windows else None)
        for change in changes:
            _record_change(tx, open_root, account, change)
        baseline.publish(tx)
    baseline.mark_published()
    below = open_root.disk.root.below
    unreadable = [{"path": to_wire(below(path)), "reason": "unreadable"} for path in sorted(baseline.unreadable_paths)]
    baseline.unreadable_paths.clear()
    return [*(_gap(change) for change in changes if _is_gap(change)), *unreadable, *git_notes]


def _open_windows(tx: Tx, open_root: OpenRoot) -> list[CallRow]:
    """Calls of agents that may change anything below this root, the one that began last first."""
    rows = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.owner == AGENT and row.root == open_root.root.id]
    windows = [row for row in rows if row is not None and tool_of(row).window]
    return sorted(windows, key=lambda row: row.id, reverse=True)


_UNTOLD_TOOL = ObservedTool(window=False)


def tool_of(row: CallRow) -> ObservedTool:
    """The facts that the observer noted about an agent's call."""
    return cause if isinstance(cause := row.why, ObservedTool) else _UNTOLD_TOOL


def _is_any_window_open(open_root: OpenRoot) -> bool:
    with open_root.ledger.store.read() as tx:
        return bool(_open_windows(tx, open_root))


def _linked_git_notes(
    open_root: OpenRoot, baseline: Baseline, call: CallId | None, *, is_window_open: bool
) -> list[Note]:
    """Notes for the call's changes of git's files outside the root.

    A difference between two calls belongs to no call.
    """
    if call is not None:
        note = baseline.linked_git.note(open_root.ledger.blobs.store)
        return [] if note is None else [note]
    if not is_window_open or not baseline.linked_git.has_read:
        baseline.linked_git.read()
    return []


def _record_change(tx: Tx, open_root: OpenRoot, account: CallId | None, change: BaselineChange) -> None:
    if change.before is None or change.after is None:
        return
    if account is None and not change.unstable:
        _record_if_external(tx, open_root, change.path, change.after)
    elif account is not None and not tx.has(TOUCHES, account, path_bytes(change.path)):
        # Only the first preimage of a path in a call counts. It is durable before the baseline forgets it.
        row = touch_row(account, path_bytes(change.path), open_root.root, ordinal=0, before=change.before)
        open_root.ledger.touch(tx, row, ())


def _record_outside(
    open_root: OpenRoot,
    baseline: Baseline,
    changes: Sequence[BaselineChange],
    *,
    left: LeftRunning | None,
    put_back: _PutBack | None,
) -> None:
    """Record changes outside of every capture window: what was put back, and the rest for the newest call whose process
    still runs, or else as external.
    """
    done = frozenset() if put_back is None else {one.path for one in put_back.changes}
    rest = [one for one in changes if one.path not in done]
    is_late = left is not None and left.is_any
    images = {one.path: _store_image(open_root, one.path) for one in rest if is_late and not _is_gap(one)}
    stable = {path: image.entry for path, image in images.items() if not (image.special or image.unstable)}
    with open_root.ledger.store.write() as tx:
        if put_back is not None:
            open_root.ledger.external(tx, open_root.root, put_back.changes, cause=put_back.cause)
        if left is not None and is_late:
            _record_late(tx, open_root, left, rest, stable=stable)
        else:
            for change in rest:
                _record_change(tx, open_root, None, change)
        # In this transaction: the bytes of the earlier contents are referenced before the baseline forgets them.
        baseline.publish(tx)
    baseline.mark_published()
    baseline.unreadable_paths.clear()


def _record_late(
    tx: Tx,
    open_root: OpenRoot,
    left: LeftRunning,
    changes: Sequence[BaselineChange],
    *,
    stable: Mapping[RepoPath, Entry],
) -> None:
    (main, *others), found, ledger = left.rows(tx), list[Change](), open_root.ledger
    for change in changes:
        seen = ledger.last_seen(tx, open_root.disk.root.place_of(change.path)) or change.before
        now = stable.get(change.path)
        if seen is not None and now is not None and not same_state(seen, now):
            found.append(Change(change.path, seen, now))
    if found:
        cause = PartOfCall(main.id, late=True, command=command_of(main.why))
        facts = replace(facts_of(main), id=CallId(ledger.ids.new()), tool=main.tool, label=None, cause=cause)
        notes = [*map(_gap, filter(_is_gap, changes)), *_shared_notes(found, main.id, [one.id for one in others])]
        ledger.begin(tx, facts, AGENT)
        moved = with_moves(found, guessed=True, rules=open_root.disk.capture)
        ledger.end(tx, facts, Ending("committed", moved, coverage=notes))


REVERTED_BY_HOST = "reverted by the host"
REVERTED = "reverted by the host or by hand"
_CHANGES_SEARCHED = 50


@fast_dataclass(slots=True, frozen=True)
class _PutBack:
    """Changes that put paths back to what they were before an agent's calls; `cause` names the calls."""

    changes: list[Change]
    cause: Mapping[str, Any]


def _put_back(tx: Tx, open_root: OpenRoot, found: Sequence[BaselineChange], *, by_host: bool) -> _PutBack | None:
    """What the agent's host, or a person, has reverted. Hosts have an undo of their own, and report nothing of it.

    A call counts as undone if each of its files is as it was before the call. If files are then again as the call had
    left them, it counts as done again.
    """
    changes = list[Change]()
    places: dict[str, set[bytes]] = {}
    for one in found:
        place = open_root.disk.root.place_of(one.path)
        seen = open_root.ledger.last_seen(tx, place) if one.after is not None and not one.unstable else None
        if seen is None or one.after is None or same_state(seen, one.after):
            continue
        rows = tx.select(CHANGES, {"place": place}, order=("wseq",), descending=True, limit=_CHANGES_SEARCHED)
        was = [same_state(entry_from_bytes(row.before), one.after) for row in rows]
        first = tx.get(CALLS, rows[was.index(True)].call) if True in was else None
        if first is None or not (
            first.reason in (REVERTED, REVERTED_BY_HOST) or (first.observed and not first.way_back)
        ):
            continue
        changes.append(Change(one.path, seen, one.after))
        for row in rows[: was.index(True) + 1]:
            places.setdefault(row.call, set()).add(place)
    if not changes:
        return None
    calls = [known for call in places if (known := tx.get(CALLS, call)) is not None]
    whole = [call for call in calls if _files_of(tx, call.id) <= places[call.id]]
    cause = {
        "reason": REVERTED_BY_HOST if by_host else REVERTED,
        "undoes": sorted(call.id for call in whole if call.observed and can_be_undone(call)),
        "redoes": sorted(one.id for call in whole if call.external for one in tx.select(CALLS, {"undone_by": call.id})),
    }
    return _PutBack(changes, cause)


def _files_of(tx: Tx, call: str) -> set[bytes]:
    """The places that a call changed, without folders: a host that removes a file leaves its folder."""
    rows = tx.select(CHANGES, {"call": call})
    return {row.place for row in rows if not isinstance(entry_from_bytes(row.after), DirEntry)}


def _shared_notes(changes: Iterable[Change], call: str, others: Sequence[str]) -> list[Note]:
    """Notes for changes that may be the doing of several calls: undo of one of them leaves these paths."""
    whose = " ".join([call, *others])
    about = {"reason": "ambiguous", "attribution": "window", "calls": whose}
    return [{"path": to_wire(one.path), **about} for one in changes] if others else []


def _is_gap(change: BaselineChange) -> bool:
    """A folder that still exists has lost nothing, even if its earlier state is unknown."""
    return change.unstable or change.after is None or (change.before is None and not isinstance(change.after, DirEntry))


def _gap(change: BaselineChange) -> Note:
    if change.unstable:
        return {"path": to_wire(change.path), "reason": "unstable"}
    return {"path": to_wire(change.path), "reason": "no_baseline" if change.before is None else "too_large"}


def _record_if_external(tx: Tx, open_root: OpenRoot, path: RepoPath, now: Entry) -> None:
    """Record an external change if the last record of the path differs from what is there now."""
    seen = open_root.ledger.last_seen(tx, open_root.disk.root.place_of(path))
    if seen is not None and not same_state(seen, now):
        open_root.ledger.external(tx, open_root.root, [Change(path, seen, now)])


# End.


def finish(
    open_root: OpenRoot,
    call: CallId,
    baseline: Baseline | None = None,
    *,
    reason: str | None = None,
    notes: Sequence[Note] = (),
    until_ns: int | None = None,
    left: LeftRunning | None = None,
) -> bool:
    """Record the changes of a call whose tool or agent has ended, and undo nothing. False if the call had ended
    already.

    `until_ns`: when the tool ended, if other processes may have changed files since. `left`: what earlier commands have
    left running; what this one leaves comes to it.
    """
    with open_root.ledger.store.read() as tx:
        row, shown = tx.get(OPEN, call), tx.get(CALLS, call)
    if row is None or shown is None or row.owner != AGENT:
        return False
    coverage, is_window = list(notes), tool_of(shown).window
    try:
        if is_window and baseline is not None:
            coverage += record_changes(open_root, baseline, call, until_ns=until_ns)
        if row.observed == OBSERVED_WHILE_FULL and STORE_FULL not in notes:
            coverage.append(STORE_FULL)
        if is_window and baseline is None:
            coverage.append({"path": ".", "reason": "no_baseline"})
        processes = left_by(open_root, shown) if is_window else []
        processes = processes if left is None else left.without_known(processes)
        if processes:
            coverage.append({"path": ".", "reason": "background", "processes": processes_to_text(processes)})
        others = [one for one in left.during(tool_of(shown).began_s) if one != call] if is_window and left else []
        done = _end(open_root, shown, reason, notes=coverage, others=others)
        if left is not None and processes:
            left.add(call, processes, tool_of(shown).pid)
        return done
    except MulliganError as error:
        if error.code == "no_space":
            # The process that ends the call later says so in its coverage.
            open_root.ledger.note_store_full(call)
        raise


def left_by(open_root: OpenRoot, shown: CallRow) -> list[Process]:
    """The processes that the tool of a call has left running."""
    tool = tool_of(shown)
    if not isinstance(tool.began_s, float):
        return []
    return left_running(tool.pid, command_of(tool), open_root.disk.root.path, since_s=tool.began_s)


def _end(
    open_root: OpenRoot, shown: CallRow, reason: str | None, *, notes: Sequence[Note], others: Sequence[CallId] = ()
) -> bool:
    with open_root.ledger.store.read() as tx:
        touches = tx.select(TOUCHES, {"call": shown.id})
    befores = {path_from_bytes(touch.path): entry_from_bytes(touch.before) for touch in touches}
    images = {path: _store_image(open_root, path) for path in sorted(befores, key=path_bytes)}
    unstable = [*tool_of(shown).unstable, *(to_wire(path) for path, image in images.items() if image.unstable)]
    with open_root.ledger.store.write() as tx:
        if tx.get(OPEN, shown.id) is None:
            return False
        own = _OwnChanges(tx, open_root, tool_of(shown).since)
        found = [own.change(path, befores[path], one.entry) for path, one in images.items() if not one.special]
        changes = with_moves([one for one in found if one], guessed=tool_of(shown).window, rules=open_root.disk.capture)
        outside = [note for note in notes if note["reason"] in OUTSIDE]
        named = [Digest(note["blob_ref"]) for note in outside if "blob_ref" in note]
        disturbed = [{"path": path, "reason": "unstable"} for path in unstable]
        all_notes = [*notes, *own.notes, *_shared_notes(changes, shown.id, others), *disturbed]
        coverage = list({tuple(note.items()): note for note in all_notes}.values())
        ending = Ending("committed", changes, reason, coverage, handed_out=named, placed=bool(outside))
        open_root.ledger.end(tx, facts_of(shown), ending)
    return True


def _store_image(open_root: OpenRoot, path: RepoPath) -> Image:
    image = open_root.image(path)
    if image.content is not None:
        open_root.ledger.blobs.store(image.content)
    return image


class _OwnChanges:
    """Separates the changes of a call from those that others have recorded since it began (`since`)."""

    def __init__(self, tx: Tx, open_root: OpenRoot, since: int) -> None:
        self._tx = tx
        self._open_root = open_root
        self._since = since
        self.notes: list[Note] = []

    def change(self, path: RepoPath, before: Entry, after: Entry) -> Change | None:
        """What the call changed at a path: from `before`, or from what another call has recorded there since."""
        place = self._open_root.disk.root.place_of(path)
        rows = self._tx.select(CHANGES, {"place": place}, order=("wseq",), descending=True, limit=1)
        start = before
        if rows:
            last = entry_from_bytes(rows[0].after)
            if rows[0].wseq > self._since:
                start = last
                # An unannounced tool began after every record, so a record that equals `before` is no doubt.
                is_older = self._since == UNANNOUNCED.since and same_state(last, before)
                if not same_state(last, after) and not is_older:
                    self.notes.append({"path": to_wire(path), "reason": "ambiguous"})
            elif not same_state(last, before):
                self._open_root.ledger.external(self._tx, self._open_root.root, [Change(path, last, before)])
        return None if same_state(start, after) else Change(path, start, after)


def finish_session(open_root: OpenRoot, session: SessionId, baseline: Baseline | None, *, reason: str) -> list[CallId]:
    """End every open call of a session whose agent reports that it has stopped."""
    with open_root.ledger.store.read() as tx:
        rows = [row for row in tx.select(OPEN) if row.owner == AGENT and row.session == session]
    calls = [CallId(row.call) for row in rows if row.root == open_root.root.id]
    return [call for call in calls if finish(open_root, call, baseline, reason=reason)]


def finish_abandoned(open_root: OpenRoot) -> list[CallId]:
    """End the calls of agents whose process is gone, in every root that can be reached from here."""
    with open_root.ledger.store.read() as tx:
        calls = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.owner == AGENT]
    gone = [call for call in calls if call is not None and not is_agent_alive(call)]
    return [CallId(call.id) for call in gone if _finish_abandoned(open_root, call)]


def _finish_abandoned(open_root: OpenRoot, call: CallRow) -> bool:
    try:
        there = open_root.at(call.root)
    except RequestError:
        return False
    baseline = Baseline(there)
    try:
        done = finish(there, CallId(call.id), baseline if baseline.load() else None, reason="agent_died")
    finally:
        baseline.close()
    if call.session is not None:
        end_open_turns(there, SessionId(call.session))
    return done


# Turns.


def open_turn(
    open_root: OpenRoot, session: SessionId, turn: TurnId, prompt: str | None, *, pid: int | None = None
) -> None:
    """Record that a turn has begun. It ends by `end_turn`, or with this process.

    With a `pid` it ends with the agent's process; 0 is an agent that did not name its process.
    """
    ledger = open_root.ledger
    ledger.session(session, open_root.root)
    body: dict[str, Any] = {"session": session, "turn": turn, "prompt": prompt}
    body |= {"owner": ledger.store.owner()} if pid is None else {}
    body |= {"pid": pid, "born": start_time_of(pid)} if pid else {}
    with ledger.store.write() as tx:
        ledger.journal.append(tx, session_journal(session), "turn.opened", body, at=ledger.now())


def end_turn(open_root: OpenRoot, session: SessionId, turn: TurnId) -> None:
    ledger = open_root.ledger
    with ledger.store.write() as tx:
        body = {"session": session, "turn": turn}
        ledger.journal.append(tx, session_journal(session), "turn.ended", body, at=ledger.now())


def end_open_turns(open_root: OpenRoot, session: SessionId) -> None:
    """End the turns of an agent that is gone."""
    with open_root.ledger.store.read() as tx:
        turns = [row.id for row in tx.select(TURNS, {"session": session}) if row.is_open]
    for turn in turns:
        end_turn(open_root, session, TurnId(turn))


def is_agent_alive(call: CallRow) -> bool:
    """Whether the agent that a call belongs to may still be running."""
    return is_agent_running(tool_of(call).pid, tool_of(call).born)


# Processes that commands have left running.

_CALLS_SEARCHED = 200


class LeftRunning:
    """The calls of one root whose command has left a process running. For one thread at a time.

    The coverage of a call names its processes, so another process of Mulligan finds them again.
    """

    def __init__(self, open_root: OpenRoot) -> None:
        self._processes: dict[CallId, list[Process]] = {}
        self._agents: dict[CallId, int | None] = {}
        self._ended_s: dict[CallId, float] = {}
        self._ended: deque[tuple[CallId, float]] = deque(maxlen=_CALLS_SEARCHED)
        with open_root.ledger.store.read() as tx:
            rows = list(islice(calls_of(tx, open_root, None, only={"observed": 1}), _CALLS_SEARCHED))
        for row in reversed(rows):
            notes = decode(row.coverage) if '"background"' in row.coverage else []
            processes = processes_from_text(" ".join(note.get("processes", "") for note in notes))
            if any(one.is_alive for one in processes):
                self.add(CallId(row.id), processes, tool_of(row).pid)

    @property
    def is_any(self) -> bool:
        return bool(self._processes)

    def add(self, call: CallId, processes: Sequence[Process], agent: int | None) -> None:
        self._processes[call], self._agents[call] = list(processes), agent

    def without_known(self, processes: Iterable[Process]) -> list[Process]:
        """The processes without those of earlier calls, and without what these have started."""
        known = {one.pid for each in self._processes.values() for one in each}
        return [one for one in processes if known.isdisjoint((one.pid, one.parent, one.session))]

    def rows(self, tx: Tx) -> list[CallRow]:
        """The calls, the newest first."""
        return [row for call in reversed(self._processes) if (row := tx.get(CALLS, call)) is not None]

    def during(self, began_s: float | None) -> list[CallId]:
        """The calls whose processes ran at a moment, in seconds since the boot, or later."""
        return [*(call for call, ended_s in self._ended if ended_s >= (began_s or 0.0)), *self._processes]

    def ended(self) -> list[CallId]:
        """The calls whose last process has ended since. They still count, until the caller drops them."""
        for call, processes in self._processes.items():
            if not all(one.is_alive for one in processes):
                self._processes[call] = with_descendants(processes, self._agents[call])
            if not self._processes[call]:
                self._ended_s.setdefault(call, since_boot_s())
        return list(self._ended_s)

    def drop(self, calls: Iterable[CallId]) -> None:
        """Forget calls whose processes have ended, after their last changes are recorded."""
        for call in calls:
            del self._processes[call], self._agents[call]
            self._ended.append((call, self._ended_s.pop(call)))
