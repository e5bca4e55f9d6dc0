"""Calls that we only observe: an agent's own tools, told to us before and after by its hooks or by its protocol.

Such a call belongs to the agent, not to the process that writes it down: any process may end it, none puts it back. It
holds no claims, so it is never in anybody's way. Either the paths it will touch are known beforehand, or everything
that changes between its begin and its end is its doing (a window). What two windows share goes to the one that ends
first; what others have put on record meanwhile stays theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from mulligan.history.desk import Desk
from mulligan.history.kept import Drift, KeptTree
from mulligan.history.ledger import Ending, Facts, newest_wseq, touch_row
from mulligan.history.log import workspace_of
from mulligan.history.moves import with_moves
from mulligan.history.tables import AGENT, CALLS, CHANGES, OPEN, TOUCHES, TURNS, CallRow
from mulligan.session.tables import session_journal
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import since_boot_s
from mulligan.values.entries import ABSENT, Absent, Change, DirEntry, Entry, entry_from_json, same_state
from mulligan.values.faults import AskedWrongly
from mulligan.values.ids import CallId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, path_bytes, path_from_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.disk import Image
from mulligan.workspace.processes import left_running

Note = Mapping[str, str]


@plain(slots=True, frozen=True)
class Observed:
    """A tool call as its agent announces it. `paths` None: it may change anything. `pid`: the agent's process."""

    session: SessionId
    tool: str
    turn: TurnId | None = None
    label: str | None = None
    paths: Sequence[RepoPath] | None = None
    pid: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)


@plain(slots=True, frozen=True)
class Looked:
    """What was at some paths at the last look, when the journal of the workspace had come to `since`."""

    since: int
    befores: Mapping[RepoPath, Entry] = field(default_factory=dict)
    gaps: Sequence[Note] = ()


UNTOLD = Looked(0)
"""Of a tool that nobody announced: the last look was some time before it, and others may have worked since."""


def begin(desk: Desk, observed: Observed, tree: KeptTree | None = None, *, looked: Looked | None = None) -> CallId:
    """On record before the tool runs, with the preimages of the paths that are known.

    With `looked` the tool may be running already: everything since that look is its doing, but for what is on record.
    """
    ledger = desk.ledger
    ledger.session(observed.session, desk.root)
    befores = _images(desk, observed.paths or ()) if looked is None else looked.befores
    if looked is None and tree is not None and observed.paths is None:
        take_stock(desk, tree)
    with ledger.store.write() as tx:
        since = newest_wseq(tx, workspace_of(tx, desk)) if looked is None else looked.since
        facts = _facts(desk, observed, since=since)
        ledger.begin(tx, facts, AGENT)
        for ordinal, (path, before) in enumerate(befores.items()):
            if looked is None:
                _note_external(tx, desk, path, before)
            ledger.touch(tx, touch_row(facts.id, path_bytes(path), desk.root, ordinal=ordinal, before=before), ())
    return facts.id


def as_looked(tree: KeptTree, paths: Iterable[RepoPath], *, since: int) -> Looked:
    """What the tree knows of the paths, and of the folders on the way to them that were missing."""
    found = tree.as_looked(paths)
    found |= _missing_above(found, lambda folder: tree.as_looked([folder])[folder])
    befores = {path: entry for path, entry in found.items() if entry is not None}
    return Looked(since, befores, [{"path": to_wire(path), "reason": "no_baseline"} for path in found.keys() - befores])


def workspace_seq(desk: Desk) -> int:
    """How far the journal of the workspace has come."""
    with desk.ledger.store.read() as tx:
        return newest_wseq(tx, workspace_of(tx, desk))


def _facts(desk: Desk, observed: Observed, *, since: int) -> Facts:
    identifier = CallId(desk.ledger.ids.new())
    cause = {**observed.about, "window": observed.paths is None, "since": since, "began_s": since_boot_s()}
    if observed.pid:
        cause |= {"pid": observed.pid, "born": born(observed.pid)}
    return Facts(
        id=identifier,
        session=observed.session,
        turn=observed.turn or TurnId(identifier),
        root=RootId(desk.root.id),
        workspace=WorkspaceId(desk.root.workspace),
        label=observed.label,
        tool=observed.tool,
        cause=cause,
        observed=True,
    )


def _images(desk: Desk, paths: Iterable[RepoPath]) -> dict[RepoPath, Entry]:
    """What the paths hold, and the folders on the way to them that are missing; bytes are in the store."""
    images = {path: desk.image(path) for path in paths}
    desk.ledger.blobs.store_all(one.content for one in images.values() if one.content is not None)
    found: dict[RepoPath, Entry] = {path: one.entry for path, one in images.items() if not one.special}
    return found | _missing_above(found, desk.entry)


def _missing_above(
    found: Mapping[RepoPath, Entry | None], entry_of: Callable[[RepoPath], Entry | None]
) -> dict[RepoPath, Entry]:
    """The folders on the way to what is not there that are not there either."""
    missing: dict[RepoPath, Entry] = {}
    for path in (path for path, entry in found.items() if isinstance(entry, Absent)):
        for above in ancestors_of(path):
            if above == ROOT or not isinstance(entry_of(above), Absent):
                break
            missing[above] = ABSENT
    return missing


def open_windows(tx: Tx, desk: Desk) -> list[CallRow]:
    """Calls of agents that may change anything below this root, the one that began last first."""
    rows = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.owner == AGENT and row.root == desk.root.id]
    return sorted((row for row in rows if row is not None and row.why.get("window")), key=_id, reverse=True)


def _is_any_window_open(desk: Desk) -> bool:
    with desk.ledger.store.read() as tx:
        return bool(open_windows(tx, desk))


def _id(row: CallRow) -> str:
    return row.id


def take_stock(
    desk: Desk, tree: KeptTree, call: CallId | None = None, *, whole: bool = False, until_ns: int | None = None
) -> list[Note]:
    """Look, and put what changed to the account of the call, else of the newest open window, else of nobody.

    What could not be captured, as notes for the call's coverage. What no call can have shut is not opened.
    """
    drifts = tree.look(whole=whole, until_ns=until_ns, opens=call is not None or _is_any_window_open(desk))
    if not drifts and not tree.has_news:
        return []
    with desk.ledger.store.write() as tx:
        windows = open_windows(tx, desk) if call is None else []
        account = call if call is not None else (CallId(windows[0].id) if windows else None)
        for drift in drifts:
            _put_down(tx, desk, account, drift)
        tree.publish(tx)
    tree.has_published()
    closed = [{"path": to_wire(desk.disk.root.below(path)), "reason": "unreadable"} for path in sorted(tree.closed)]
    tree.closed.clear()
    return [*(_gap(drift) for drift in drifts if _is_gap(drift)), *closed]


def _put_down(tx: Tx, desk: Desk, account: CallId | None, drift: Drift) -> None:
    """What it was is durable before anybody forgets it. The first before of a path in a call stands."""
    if drift.before is None or drift.after is None:
        return
    if account is None:
        _note_external(tx, desk, drift.path, drift.after)
    elif not tx.has(TOUCHES, account, path_bytes(drift.path)):
        row = touch_row(account, path_bytes(drift.path), desk.root, ordinal=0, before=drift.before)
        desk.ledger.touch(tx, row, ())


def _is_gap(drift: Drift) -> bool:
    """A folder that is still there has lost nothing, whatever nobody knew of it."""
    return drift.after is None or (drift.before is None and not isinstance(drift.after, DirEntry))


def _gap(drift: Drift) -> Note:
    return {"path": to_wire(drift.path), "reason": "no_baseline" if drift.before is None else "too_large"}


def _note_external(tx: Tx, desk: Desk, path: RepoPath, now: Entry) -> None:
    """What the record last saw there is not what is there now, and no call of ours made it so."""
    seen = desk.ledger.last_seen(tx, desk.disk.root.place_of(path))
    if seen is not None and not same_state(seen, now):
        desk.ledger.external(tx, desk.root, [Change(path, seen, now)])


def finish(
    desk: Desk,
    call: CallId,
    tree: KeptTree | None = None,
    *,
    reason: str | None = None,
    notes: Sequence[Note] = (),
    until_ns: int | None = None,
) -> bool:
    """The tool is over, or its agent is: what changed is recorded, nothing is undone. False: it had ended already.

    `until_ns`: when it was over, if somebody else has gone on since.
    """
    with desk.ledger.store.read() as tx:
        row, shown = tx.get(OPEN, call), tx.get(CALLS, call)
    if row is None or shown is None or row.owner != AGENT:
        return False
    window = bool(shown.why.get("window"))
    gaps = take_stock(desk, tree, call, until_ns=until_ns) if window and tree is not None else []
    lost: list[Note] = [{"path": ".", "reason": "no_baseline"}] if window and tree is None else []
    return _end(desk, shown, reason, notes=[*notes, *gaps, *lost, *(_left_running(desk, shown) if window else ())])


def _left_running(desk: Desk, shown: CallRow) -> list[Note]:
    """A process that the tool has left running may write after the tool is over; that is in no call."""
    began_s = shown.why.get("began_s")
    is_known = isinstance(began_s, float) and left_running(desk.disk.root.path, since_s=began_s)
    return [{"path": ".", "reason": "background"}] if is_known else []


def _end(desk: Desk, shown: CallRow, reason: str | None, *, notes: Sequence[Note]) -> bool:
    with desk.ledger.store.read() as tx:
        touches = tx.select(TOUCHES, {"call": shown.id})
    befores = {path_from_bytes(touch.path): entry_from_json(decode(touch.before)) for touch in touches}
    images = {path: _kept_image(desk, path) for path in befores}
    afters = {path: image.entry for path, image in images.items() if not image.special}
    unstable: list[Note] = [
        {"path": to_wire(path), "reason": "unstable"} for path, image in images.items() if image.unstable
    ]
    with desk.ledger.store.write() as tx:
        if tx.get(OPEN, shown.id) is None:
            return False
        told = _Told(tx, desk, int(shown.why.get("since", 0)))
        changes = [told.change(path, befores[path], after) for path, after in sorted(afters.items(), key=_by_bytes)]
        moved = with_moves([one for one in changes if one], guessed=bool(shown.why.get("window")))
        ending = Ending("committed", moved, reason, [*notes, *told.notes, *unstable])
        desk.ledger.end(tx, _facts_of(shown), ending)
    return True


def _kept_image(desk: Desk, path: RepoPath) -> Image:
    image = desk.image(path)
    if image.content is not None:
        desk.ledger.blobs.store(image.content)
    return image


def _by_bytes(item: tuple[RepoPath, Entry]) -> bytes:
    return path_bytes(item[0])


def _facts_of(row: CallRow) -> Facts:
    return Facts(
        id=CallId(row.id),
        session=SessionId(row.session or ""),
        turn=TurnId(row.turn),
        root=RootId(row.root),
        workspace=WorkspaceId(row.workspace),
        label=row.label,
        observed=True,
    )


class _Told:
    """What of a window is the window's own, seen beside what others put on record since it began.

    Where nobody was told that it began, the record is as new as the last look, or newer: what a look finds goes on it.
    """

    def __init__(self, tx: Tx, desk: Desk, since: int) -> None:
        self._tx = tx
        self._desk = desk
        self._since = since
        self.notes: list[Note] = []

    def change(self, path: RepoPath, before: Entry, after: Entry) -> Change | None:
        place = self._desk.disk.root.place_of(path)
        rows = self._tx.select(CHANGES, {"place": place}, order=("wseq",), descending=True, limit=1)
        if not rows:
            return _real(Change(path, before, after))
        last = entry_from_json(decode(rows[0].after))
        if rows[0].wseq <= self._since:
            if not same_state(last, before):
                self._desk.ledger.external(self._tx, self._desk.root, [Change(path, last, before)])
            return _real(Change(path, before, after))
        if not same_state(last, after) and not (self._since == UNTOLD.since and same_state(last, before)):
            self.notes.append({"path": to_wire(path), "reason": "ambiguous"})
        return _real(Change(path, last, after))


def _real(change: Change) -> Change | None:
    return None if same_state(change.before, change.after) else change


def finish_session(desk: Desk, session: SessionId, tree: KeptTree | None, *, reason: str) -> list[CallId]:
    """The agent says that it has stopped: whatever of it is still open is over."""
    with desk.ledger.store.read() as tx:
        rows = [row for row in tx.select(OPEN) if row.owner == AGENT and row.session == session]
    here = [CallId(row.call) for row in rows if row.root == desk.root.id]
    return [call for call in here if finish(desk, call, tree, reason=reason)]


def finish_abandoned(desk: Desk) -> list[CallId]:
    """End the calls of agents whose process is gone, in every root that can be reached from here."""
    with desk.ledger.store.read() as tx:
        calls = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.owner == AGENT]
    gone = [call for call in calls if call is not None and not is_agent_alive(call)]
    return [CallId(call.id) for call in gone if _finish_abandoned(desk, call)]


def _finish_abandoned(desk: Desk, call: CallRow) -> bool:
    try:
        there = desk.at(call.root)
    except AskedWrongly:
        return False
    tree = KeptTree(there)
    try:
        done = finish(there, CallId(call.id), tree if tree.restore() else None, reason="agent_died")
    finally:
        tree.close()
    if call.session is not None:
        end_open_turns(there, SessionId(call.session))
    return done


def is_agent_alive(call: CallRow) -> bool:
    return is_running(call.why)


def is_running(agent: Mapping[str, Any]) -> bool:
    """One that did not say who it is may be."""
    pid = agent.get("pid")
    return not isinstance(pid, int) or born(pid) == agent.get("born")


def born(pid: int) -> str | None:
    """When a process began, as far as this system says; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return _born_elsewhere(pid)
    # A zombie is over: in a container there may be nobody who would bury it.
    return None if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")


def _born_elsewhere(pid: int) -> str | None:
    if os.path.exists("/proc/self/stat"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
    return "alive"


# Turns.


def open_turn(desk: Desk, session: SessionId, turn: TurnId, prompt: str | None, *, pid: int | None = None) -> None:
    """It ends by `end_turn`, or with this process; with a `pid`, with the agent's process, if that is known."""
    ledger = desk.ledger
    ledger.session(session, desk.root)
    opener: dict[str, Any] = {"owner": ledger.store.owner()} if pid is None else {}
    opener |= {"pid": pid, "born": born(pid)} if pid else {}
    with ledger.store.write() as tx:
        body = {"session": session, "turn": turn, "prompt": prompt, **opener}
        ledger.journal.append(tx, session_journal(session), "turn.opened", body, at=ledger.now())


def end_turn(desk: Desk, session: SessionId, turn: TurnId) -> None:
    ledger = desk.ledger
    with ledger.store.write() as tx:
        body = {"session": session, "turn": turn}
        ledger.journal.append(tx, session_journal(session), "turn.ended", body, at=ledger.now())


def end_open_turns(desk: Desk, session: SessionId) -> None:
    """Whoever was to end them is gone."""
    with desk.ledger.store.read() as tx:
        turns = [row.id for row in tx.select(TURNS, {"session": session}) if row.is_open]
    for turn in turns:
        end_turn(desk, session, TurnId(turn))
